"""The facts of a collection that a card states."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from checkpoints_zoo.formats import arrow_tables
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.member_parts import parse_repo_file
from checkpoints_zoo.formats.text import count_with_noun, markdown_code

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST_FIGURE = 1e6  # test figures above this number, and figures that are not numbers, are not shown


@dataclass(frozen=True)
class Section:
    """The facts of a collection that the card states.

    Args:
        name: name of the collection.
        description, rows: description and manifest of the collection.
        predictions: names of the sets of stored predictions of the collection's members.
    """

    name: str
    description: Description
    rows: pa.Table
    predictions: tuple[str, ...] = ()

    @property
    def row_count(self) -> int:
        return int(self.rows.num_rows)

    @cached_property
    def row_values(self) -> Mapping[str, list[Any]]:
        """Column -> values of all rows; times are seconds since 1970, because Arrow's own conversion needs pandas."""
        column_names = self.rows.column_names
        times_in_seconds = {
            name: self.rows.column(name).cast(pa.int64())
            for name in column_names
            if pa.types.is_timestamp(self.rows[name].type)
        }
        return {name: times_in_seconds.get(name, self.rows.column(name)).to_pylist() for name in column_names}

    @cached_property
    def member_values(self) -> Mapping[str, list[Any]]:
        """Column -> values of the rows that are loaded by default: those with status ok and final weights."""
        is_kept = [s == "ok" and f for s, f in zip(self.row_values["status"], self.row_values["final"], strict=True)]
        return {
            name: [value for value, keep in zip(values, is_kept, strict=True) if keep]
            for name, values in self.row_values.items()
        }

    @property
    def member_count(self) -> int:
        return len(self.member_values["member"])

    @property
    def nbytes(self) -> int:
        """Size of all stored weights in bytes, snapshots included."""
        return arrow_tables.sum_of(self.rows, "nbytes")

    @property
    def base(self) -> str:
        return self.description.base

    @property
    def base_repo(self) -> str:
        return self.base.removeprefix("hf://datasets/").partition("@")[0]

    def layouts(self) -> list[Layout]:
        """Return the layouts that members are stored in."""
        return [self.description.layouts[key] for key in sorted({k for k in self.member_values["layout"] if k})]

    def dtypes(self) -> list[str]:
        """Return the names of the weights' dtypes as Markdown code."""
        return sorted({markdown_code(DTYPE_NAMES.get(d, d)) for d in self.member_values["dtype"] if d})

    def finite_values(self, column: str) -> list[float]:
        """Return the values of a test figure, without members that have none, NaN or an implausibly large value."""
        return [v for v in self.member_values[column] if v is not None and abs(v) < LARGEST_FIGURE]

    def accuracy(self) -> str:
        """Return the members' test accuracy in percent as text; "" if it is not known."""
        percentages = [100 * v for v in self.finite_values("test_accuracy")]
        if not percentages:
            return ""
        accuracy_text = f"{statistics.fmean(percentages):.2f}"
        if len(percentages) > 1:
            accuracy_text += (
                f" ± {statistics.stdev(percentages):.2f} ({min(percentages):.2f} to {max(percentages):.2f})"
            )
        return (
            accuracy_text
            if len(percentages) == self.member_count
            else f"{accuracy_text}, of {count_with_noun(len(percentages), 'member')}"
        )

    def first_shard(self) -> str:
        """Return the path of the file that has the first member; "" if that file is no shard."""
        source_path, layout_key = self.member_values["path"][0], self.member_values["layout"][0]
        is_shard = source_path.endswith(".safetensors") and not self.description.layouts[layout_key].header_nbytes
        is_shard = is_shard and parse_repo_file(source_path) is None
        return str(source_path) if is_shard else ""
