"""Printing of results: `str` gives a text table, `repr` one line, and notebooks show the table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints_zoo.formats.text import align_columns, one_line, printable

LONGEST_CELL, LONGEST_REPR = 60, 500  # Largest numbers of characters in a cell of a table, and in a `repr`.


class PrintedResult:
    """A result with a text table. A dataclass that inherits from this class must be made with `repr=False`."""

    def _one_line(self) -> str:
        """Return text with the names and values that distinguish this result from other results, for `repr`."""
        raise NotImplementedError

    def to_text(self) -> str:
        """Return the result as a text table, followed by lines that describe the measurement."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({one_line(self._one_line(), LONGEST_REPR)})"

    def __str__(self) -> str:
        return printable(self.to_text())

    def _repr_html_(self) -> str:
        return html_text(str(self))


def html_text(text: str) -> str:
    """Return text as an HTML element that shows the text as it is, for notebooks."""
    return f"<pre>{html.escape(printable(text))}</pre>"


def text_table(rows: Sequence[Mapping[str, Any]], largest_row_count: int = 20) -> str:
    """Write rows as a text table; return the text. If rows are left out, the last line gives their number.

    Args:
        rows: for each row, name of a column -> value; all rows have the same keys, which become the header.
        largest_row_count: largest number of rows to show.

    >>> print(text_table([{"name": "a", "value": 0.25}, {"name": "b", "value": None}]))
    name  value
    a      0.25
    b         -
    """
    if not rows:
        return ""
    shown_rows = rows[:largest_row_count]
    number_columns = {
        i for i, key in enumerate(rows[0]) if all(isinstance(row[key], int | float | None) for row in shown_rows)
    }
    text = align_columns(
        [list(rows[0]), *([_cell_text(row[key]) for key in rows[0]] for row in shown_rows)], number_columns
    )
    return text if len(rows) <= largest_row_count else f"{text}\nand {len(rows) - largest_row_count:,} rows more"


def _cell_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), LONGEST_CELL)
