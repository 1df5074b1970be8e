"""Conditions on a table in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from checkpoints_zoo.formats.where import Condition


def rows_where(table: pa.Table, text: str) -> np.ndarray[tuple[int], np.dtype[Any]]:
    """Return the positions of the rows that meet a condition, ascending; raise its error if there is none."""
    condition = Condition.parse(text)
    is_met = condition.is_met(table, table.schema)
    if not is_met.any():
        raise condition.no_row_error(table)
    return np.flatnonzero(is_met)
