"""Tables of figures as files, by temporary name and rename."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import safetensors
from checkpoints_zoo.formats.disk import replacing

if TYPE_CHECKING:
    import pandas as pd


def write(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as Parquet or CSV, by the ending of the name; return its path.

    Args:
        frame: its rows, without the index.
        path: of the file; its folder is made.

    Raises:
        UsageError: another ending.
        StorageError: a place that can't be written to.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = Path(path).expanduser()
    writers = {".parquet": pyarrow.parquet.write_table, ".csv": pyarrow.csv.write_csv}
    if path.suffix.lower() not in writers:
        expected = "a name that ends in .parquet or .csv"
        raise UsageError(f"table {path}", expected=expected, found=repr(path.name), path=path)
    with safetensors.writing_into(path.parent), replacing(path) as temporary, temporary.open("wb") as file:
        writers[path.suffix.lower()](pa.Table.from_pandas(frame, preserve_index=False), file)
    return path


def write_text(text: str, path: str | Path) -> Path:
    """Write a text, with an end of line; return its path.

    Args:
        text: such as JSON, or a table for LaTeX.
        path: of the file; its folder is made.

    Raises:
        StorageError: a place that can't be written to.
    """
    path = Path(path).expanduser()
    with safetensors.writing_into(path.parent), replacing(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
    return path
