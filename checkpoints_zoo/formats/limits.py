"""Sizes beyond which what a source says of itself is refused, before memory or disk is spent on it.

A manifest of a million members is far below all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import FormatError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

LARGEST = {".json": 64 * 2**20, ".parquet": 2**30}  # bytes of a description, and of a manifest
LARGEST_COLUMNS = 2**32  # bytes of a manifest's columns once they are unpacked
MOST_ROWS = 2**24
LONGEST_TEXT = 2**20  # characters of one text of a description
LONGEST_LIST = 2**20


def check_size(size: int, path: str | Path, thing: str = "") -> None:
    """Check that a file is no larger than one of its kind, by its name, may be.

    Args:
        size: in bytes.
        path: of the file; those that are neither JSON nor Parquet have no limit.
        thing: what to call it in errors.

    Raises:
        FormatError: it is larger.
    """
    most = LARGEST.get(Path(path).suffix)
    if most is not None and size > most:
        raise _refused(thing or f"file {path}", f"at most {most:,} bytes", f"{size:,}", path)


def check_file(path: Path) -> None:
    """Check a file on this disk as `check_size` does."""
    check_size(path.stat().st_size, path)


def check_columns(metadata: pq.FileMetaData, columns: Mapping[str, int], path: Path) -> None:
    """Check what the footer of a Parquet file says of rows and sizes.

    Args:
        metadata: the footer.
        columns: that are to be read, and bytes a row that each takes at least.
        path: of the file.

    Raises:
        FormatError: more than a manifest may have.
    """
    if metadata.num_rows > MOST_ROWS:
        raise _refused(f"manifest {path}", f"at most {MOST_ROWS:,} rows", f"{metadata.num_rows:,}", path)
    # Of whole groups: asked about a column whose statistics are damaged, pyarrow ends the process.
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    sizes.append(metadata.num_rows * sum(columns.values()))
    if min(sizes) < 0 or sum(sizes) > LARGEST_COLUMNS:
        raise _too_much(f"{sum(sizes):,}, by its footer", path)


def check_texts(column: pa.ChunkedArray, spent: int, path: Path) -> int:
    """Check how long the texts of a column are that Parquet holds once each; return the bytes of all columns so far.

    Args:
        column: with its texts still in a dictionary.
        spent: bytes of the columns before.
        path: of the file.

    Raises:
        FormatError: more than a manifest may have.
    """
    import pyarrow.compute as pc

    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary).cast("int64")
        spent += int(pc.sum(lengths.take(chunk.indices)).as_py() or 0)
        if spent > LARGEST_COLUMNS:
            raise _too_much(f"{spent:,} or more", path)
    return spent


def check_json(values: Any, path: Path) -> None:
    """Check that no text and no list of a description is longer than any sensible one.

    Raises:
        FormatError: one is.
    """
    left = [values]
    while left:
        value = left.pop()
        most, what = (LONGEST_TEXT, "characters") if isinstance(value, str) else (LONGEST_LIST, "values in a list")
        if isinstance(value, str | list | dict) and len(value) > most:
            raise _refused(f"description {path}", f"at most {most:,} {what}", f"{len(value):,}", path)
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def bar(inside: str, what: str) -> type[Any]:
    """Return a progress bar for the Hub's client that ends a download which is, or becomes, too large.

    Args:
        inside: the file's path in the repo; only manifests and descriptions are bounded.
        what: to call it in errors.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bounded(tqdm):
        """The client's own bar, that knows how much may come."""

        came = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._check(options.get("total") or 0)
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self.came += int(n or 0)
            self._check(self.came)
            shown: bool | None = super().update(n)
            return shown

        def _check(self, size: int) -> None:
            if inside.startswith(("manifests/", "predictions/")):
                check_size(size, inside, what)

    return Bounded


def _too_much(found: str, path: Path) -> FormatError:
    return _refused(f"manifest {path}", f"columns of at most {LARGEST_COLUMNS:,} bytes, unpacked", found, path)


def _refused(thing: str, expected: str, found: str, path: str | Path) -> FormatError:
    do = "It is no honest one, or not ours; nothing of it was used"
    return FormatError(thing, expected=expected, found=found, do=do, path=path)
