"""Limits on files that anyone may have written: their sizes, and the lengths of texts and lists in JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import FormatError

# Suffix of a file -> largest number of bytes of the file: descriptions are JSON, manifests Parquet.
LARGEST_FILE_NBYTES = {".json": 64 * 2**20, ".parquet": 2**30}
LONGEST_TEXT = 2**20  # Largest number of characters that one text in a description may have.
LONGEST_LIST = 2**20
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def check_size(nbytes: int, path: str | Path, file_text: str = "") -> None:
    """Check a file's size against the limit for its suffix.

    Args:
        nbytes: size of the file in bytes.
        path: path of the file; only JSON and Parquet files have a limit.
        file_text: the file's name in error texts.

    Raises:
        FormatError: the file is larger than the limit.
    """
    largest_nbytes = LARGEST_FILE_NBYTES.get(Path(path).suffix)
    if largest_nbytes is not None and nbytes > largest_nbytes:
        raise limit_error(file_text or f"file {path}", f"at most {largest_nbytes:,} bytes", f"{nbytes:,}", path)


def check_file(path: Path) -> None:
    """Check the size of a local file as `check_size` does."""
    check_size(path.stat().st_size, path)


def check_json(values: Any, path: Path) -> None:
    """Check all texts and lists in a description.

    Raises:
        FormatError: a text or a list is too long, or a text has half a surrogate pair, which no file can hold.
    """
    pending_values = [values]
    while pending_values:
        value = pending_values.pop()
        limit, unit_text = (
            (LONGEST_TEXT, "characters") if isinstance(value, str) else (LONGEST_LIST, "values in a list")
        )
        if isinstance(value, str | list | dict) and len(value) > limit:
            raise limit_error(f"description {path}", f"at most {limit:,} {unit_text}", f"{len(value):,}", path)
        if isinstance(value, str) and (half_pair := _HALF_PAIR.search(value)):
            found = f"half a surrogate pair, {half_pair[0]!r}"
            raise FormatError(f"description {path}", expected="texts of whole characters", found=found, path=path)
        if isinstance(value, dict):
            pending_values += [*value, *value.values()]
        elif isinstance(value, list):
            pending_values += value


def limit_error(subject: str, expected: str, found: str, path: str | Path) -> FormatError:
    """Return the error on a file that is larger than any collection needs."""
    do = "No collection needs that much: get the source again, or tell its producer"
    return FormatError(subject, expected=expected, found=found, do=do, path=path)
