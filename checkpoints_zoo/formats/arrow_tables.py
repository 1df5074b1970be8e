"""Values, rows and sums of Arrow tables, without the functions of pyarrow that would import pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NUMPY_NAME_OF_TYPE = {"double": "float64", "float": "float32", "halffloat": "float16"}  # of Arrow; others are the same


def is_null(rows: pa.Table, column: str) -> bool:
    """Say whether a column is null in every row."""
    return bool(rows.column(column).null_count == rows.num_rows)


def take_rows(rows: pa.Table, positions: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
    """Return the rows of a table at some positions, in the order of the positions."""
    # `pa.array` would import pandas; an Arrow buffer of int64 values does not.
    position_array = np.ascontiguousarray(positions, dtype=np.int64)
    return rows.take(pa.Array.from_buffers(pa.int64(), len(position_array), [None, pa.py_buffer(position_array)]))


def numpy_values(column: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[Any]]:
    """Return the values of a column of numbers, or of true and false; values at nulls are arbitrary."""
    # `ChunkedArray.to_numpy`, old `to_pandas_dtype` and `pyarrow.compute` with Python values would import
    # pandas.
    if pa.types.is_boolean(column.type):
        return numpy_values(column.cast(pa.uint8())).astype(bool)
    combined_array = column.combine_chunks()
    type_name = str(combined_array.type)
    dtype = np.dtype(_NUMPY_NAME_OF_TYPE.get(type_name, type_name))
    values: np.ndarray[tuple[int], Any] = np.frombuffer(combined_array.buffers()[1] or b"", dtype)
    return values[combined_array.offset : combined_array.offset + len(combined_array)]


def text_codes(column: pa.ChunkedArray) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], list[str]]:
    """Number the distinct texts of a column; return the number of each value, -1 for null, and the texts in the order
    of their first rows."""
    # Comparing in `pyarrow.compute` would import pandas.
    encoded = column.dictionary_encode().unify_dictionaries().combine_chunks()
    codes = numpy_values(pa.chunked_array([encoded.indices]))
    return np.where(numpy_values(column.is_valid()), codes, -1), encoded.dictionary.to_pylist()


def sum_of(rows: pa.Table, column: str) -> int:
    """Return the sum of an integer column; 0 if there are no rows."""
    return int(pc.sum(rows.column(column)).as_py() or 0)
