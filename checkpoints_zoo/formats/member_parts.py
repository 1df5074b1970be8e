"""The parts of a member's bytes: ranges of files of other repos, which a row of schema 2 names; of schema 1, one range.

A row of schema 1 names one range of a file of its source. A row of schema 2 may instead name ranges of files of other
repos, each `hf://[datasets/]ORG/NAME@COMMIT/FILE`: the member's bytes are these ranges, one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

PARTS_COLUMN = "parts"
LONGEST_ADDRESS = 1024  # characters
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_REPO_FILE = re.compile(
    rf"hf://(datasets/)?((?!datasets/|models/|spaces/){_NAME}/{_NAME})@([0-9a-f]{{40}})/(.+)", re.ASCII
)
_ETAG = re.compile(r"[\w+=.-]{1,128}", re.ASCII)


class RepoFileAddress(NamedTuple):
    """A file of a repo on the Hub at a commit: kind of the repo ("model" or "dataset"), its id "ORG/NAME", the commit,
    and the path of the file in it."""

    kind: str
    id: str
    commit: str
    path: str


def parse_repo_file(path: str) -> RepoFileAddress | None:
    """Parse a row's path that names a file of another repo; return None for a path in the row's own source, and for any
    other text.

    >>> parse_repo_file(f"hf://org/net@{'0' * 40}/model.safetensors").path
    'model.safetensors'
    """
    match = _REPO_FILE.fullmatch(path) if len(path) <= LONGEST_ADDRESS else None
    return RepoFileAddress("dataset" if match[1] else "model", match[2], match[3], match[4]) if match else None


def is_etag(text: str) -> bool:
    """Say whether a text can be an ETag, which becomes part of a file's name in the cache."""
    return _ETAG.fullmatch(text) is not None and bool(text.strip("."))


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file.

    Args:
        path: path of the file in the source, or address of a file of another repo.
        offset, nbytes: position and number of the bytes.
        etag: ETag that the file had when the row was written; None if the row does not say it.
    """

    path: str
    offset: int
    nbytes: int
    etag: str | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the part as a value of the column `parts`."""
        return {"path": self.path, "offset": self.offset, "nbytes": self.nbytes, "etag": self.etag}

    def __str__(self) -> str:
        """Return the text that stands for the part in the hash of a citation."""
        etag_text = "" if self.etag is None else f"|{self.etag}"
        return f"{self.path}|{self.offset}|{self.nbytes}{etag_text}"


def parts_of_rows(rows: pa.Table) -> list[tuple[Part, ...]]:
    """Return the parts of each row's bytes, in the order of the bytes; () for a row without weights."""
    names = ("path", "offset", "nbytes")
    ranges = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    parts_column = (
        rows.column(PARTS_COLUMN).to_pylist() if PARTS_COLUMN in rows.column_names else [None] * rows.num_rows
    )
    return [
        tuple(Part(**part) for part in parts) if parts else () if place[0] is None else (Part(*place),)
        for place, parts in zip(ranges, parts_column, strict=True)
    ]


def join_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join parts that follow each other in one file; return the parts.

    >>> join_parts([Part("a", 8, 2), Part("a", 10, 4), Part("b", 14, 1)])
    (Part(path='a', offset=8, nbytes=6, etag=None), Part(path='b', offset=14, nbytes=1, etag=None))
    """
    joined = list[Part]()
    for part in parts:
        last = joined[-1] if joined else None
        if last and (last.path, last.etag, last.offset + last.nbytes) == (part.path, part.etag, part.offset):
            joined[-1] = Part(last.path, last.offset, last.nbytes + part.nbytes, last.etag)
        else:
            joined.append(part)
    return tuple(joined)
