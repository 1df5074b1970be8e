"""Write a figure with its interval as text, and write tables and texts to files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.disk import replace_file

if TYPE_CHECKING:
    import pandas as pd

    from checkpoints_zoo.evaluation.metrics import Interval

ROUNDING_ERROR = 1e-7  # Smaller widths of intervals and smaller mutual information are taken for float32 errors.


def as_text(interval: Interval, scale: float = 1) -> str:
    """Write a figure and its interval, in four digits, or fewer if the interval is wide; return the text.

    Args:
        interval: value and bounds of the figure; bounds that differ only by rounding are left out.
        scale: factor by which the numbers are multiplied: 100 for percent.
    """
    value = interval.value * scale
    if not math.isfinite(value):
        return "-"
    if interval.low is None or interval.high is None or interval.high - interval.low < ROUNDING_ERROR:
        return f"{round(value, 7):.4g}"
    half_width = (interval.high - interval.low) * scale / 2
    decimals_for_half_width = 1 - math.floor(math.log10(half_width))
    decimals_for_value = 3 - math.floor(math.log10(max(abs(value), half_width)))
    decimals = max(0, min(decimals_for_half_width, decimals_for_value))
    return f"{value:.{decimals}f} [{interval.low * scale:.{decimals}f}, {interval.high * scale:.{decimals}f}]"


def write_frame(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as Parquet or CSV, by the ending of the file's name; return the path.

    Args:
        frame: the table; its index is not written.
        path: path of the new file; its folder is made if missing.

    Raises:
        UsageError: the name has another ending.
        StorageError: the file can't be written.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = Path(path).expanduser()
    writers = {".parquet": pyarrow.parquet.write_table, ".csv": pyarrow.csv.write_csv}
    if path.suffix.lower() not in writers:
        expected = "a name that ends in .parquet or .csv"
        raise UsageError(f"table {path}", expected=expected, found=repr(path.name), path=path)
    with disk.translate_write_errors(path.parent), replace_file(path, "wb") as file:
        writers[path.suffix.lower()](pa.Table.from_pandas(frame, preserve_index=False), file)
    return path


def write_text(text: str, path: str | Path) -> Path:
    """Write a text and a line end to a file; return the path.

    Args:
        text: the text to write, for example JSON or a table in LaTeX.
        path: path of the new file; its folder is made if missing.

    Raises:
        StorageError: the file can't be written.
    """
    path = Path(path).expanduser()
    with disk.translate_write_errors(path.parent), replace_file(path) as file:
        file.write(f"{text}\n")
    return path
