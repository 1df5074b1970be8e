"""Columns that the user supplies, since files of weights do not contain them: checked, written, and read again.

This is one file, because every way to supply a column ends in the same check of its values.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import FormatError, SourceNotFound, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.row_checks import LOCATION_COLUMNS
from checkpoints_zoo.formats.text import did_you_mean, first_few
from checkpoints_zoo.interop.ingest.measuring import MEASURED_COLUMNS
from checkpoints_zoo.sources.folder_source import FolderSource

Row = dict[str, Any]
# Maps file -> member to member -> columns.
ColumnReader = Callable[[Mapping[str, int]], dict[int, Row]]
FILE_COLUMN = "file"  # Column of a table with the file of each row.
IMPORT_COLUMNS = (
    "member",
    "final",
    "status",
    "reason",
    "sha256",
    *LOCATION_COLUMNS,
)  # Columns that the import fills itself.
SPLITS = ("train", "validation", "test")


def columns_of_members(columns: Mapping[str, Any], ids: Sequence[int]) -> dict[int, Row]:
    """Check columns; return member -> column -> value.

    Args:
        columns: column -> one value for all members, or a value for each, in the order of their ids.
        ids: ids of the members.

    Raises:
        UsageError: an unknown column, one that the import fills, a value of another type, or too few values.
    """
    check_column_names(columns)
    rows: dict[int, Row] = {member: {} for member in sorted(ids)}
    for name, values in columns.items():
        member_values = values_per_member(values)
        if member_values is None:
            member_values = [values] * len(rows)
        if len(member_values) != len(rows):
            raise UsageError(
                f"column {name!r}",
                expected=f"{len(rows)} values, one for each member, or a single value",
                found=f"{len(member_values)}",
            )
        for (member, row), value in zip(rows.items(), member_values, strict=True):
            row[name] = convert_value(name, value, f"member {member}")
    return rows


def columns_of_files(file_table: Mapping[str, Mapping[str, Any]], member_of_path: Mapping[str, int]) -> dict[int, Row]:
    """Check a table of columns by file; return member -> column -> value.

    Args:
        file_table: file -> column -> value; a file is its path in the folder, or its name if that is unique.
        member_of_path: path -> member.

    Raises:
        UsageError: a file without a row, a row without a file, or a column or value as in `columns_of_members`.
    """
    check_column_names({name for row in file_table.values() for name in row})
    names = [path.rpartition("/")[2] for path in member_of_path]
    counts = Counter(names)
    path_of_unique_name = {name: path for name, path in zip(names, member_of_path, strict=True) if counts[name] == 1}
    rows: dict[int, Row] = {}
    unknown_files = []
    for file, values in file_table.items():
        path = file if file in member_of_path else path_of_unique_name.get(file)
        if path is None or member_of_path[path] in rows:
            unknown_files.append(file)
            continue
        rows[member_of_path[path]] = {
            name: convert_value(name, value, f"file {file}") for name, value in values.items()
        }
    missing = [path for path, member in member_of_path.items() if member not in rows]
    if unknown_files or missing:
        problem_texts = [
            f"{problem} {first_few(names, 5)}"
            for problem, names in (("no row for", missing), ("rows for", unknown_files))
            if names
        ]
        raise UsageError(
            "columns by file",
            expected=f"a row for each of the {len(member_of_path)} files, once",
            found="; ".join(problem_texts),
        )
    return rows


def read_csv(path: Path) -> dict[str, Row]:
    """Read a CSV table with a column "file"; return file -> column -> text, None for empty cells.

    Raises:
        SourceNotFound: the file is missing or can't be read.
        FormatError: the file is no table, lacks the column "file", or has two rows for a file.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            names, rows = list(reader.fieldnames or ()), list(reader)
    except OSError as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
        raise SourceNotFound(f"file {path}", expected="a table", found=found, path=path) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise FormatError(f"file {path}", expected="a table with commas", found=str(error), path=path) from error
    if (
        FILE_COLUMN not in names
        or len(set(names)) < len(names)
        or any(None in row or None in row.values() for row in rows)
    ):
        found = f"columns {', '.join(map(str, names[:12]))}" if FILE_COLUMN not in names else "rows of other lengths"
        raise FormatError(
            f"file {path}", expected=f"a column {FILE_COLUMN!r} and others, each once", found=found, path=path
        )
    return rows_by_file(rows, f"file {path}")


def rows_by_file(rows: Iterable[Mapping[str, Any]], table_label: str) -> dict[str, Row]:
    """Return the rows of a table by file.

    Raises:
        FormatError: a file has two rows.
    """
    table: dict[str, Row] = {}
    for row in rows:
        name = str(row[FILE_COLUMN])
        if name in table:
            raise FormatError(table_label, expected="each file once", found=f"{name} twice")
        table[name] = {column: None if value == "" else value for column, value in row.items() if column != FILE_COLUMN}
    return table


def column_reader_of_table(file_table: Mapping[str, Mapping[str, Any]], figures_are_measured: bool) -> ColumnReader:
    """Return the function that maps a table's columns to members.

    Args:
        file_table: file -> column -> value.
        figures_are_measured: whether test figures are measured; if so, the table may not contain them.

    Raises:
        UsageError: unknown columns.
    """
    names = {name for row in file_table.values() for name in row}
    check_column_names(names)
    if figures_are_measured:
        check_no_measured_figures(names)
    return lambda files: columns_of_files(file_table, files)


def check_column_names(column_names: Iterable[str]) -> None:
    """Check that columns exist in the manifest and are not filled by the import.

    Raises:
        UsageError: a column is unknown, or is filled by the import; the error names it.
    """
    allowed_names = [name for name in SCHEMA.names if name not in IMPORT_COLUMNS]
    for name in column_names:
        if name in IMPORT_COLUMNS:
            raise UsageError(
                f"column {name!r}", expected="a column that the import does not fill", found="one that it fills"
            )
        if name not in allowed_names:
            raise UsageError(
                f"column {name!r}",
                expected=f"one of the manifest's: {', '.join(allowed_names)}",
                found="no such column",
                do=did_you_mean(str(name), allowed_names, cutoff=0.6, text_of_name=repr)
                or "manifests/README.md says what each means",
            )


def check_no_measured_figures(column_names: Iterable[str]) -> None:
    """Check that the user supplies no figure that the import measures.

    Raises:
        UsageError: the user supplies a figure that the import measures.
    """
    if repeated_names := [name for name in column_names if name in MEASURED_COLUMNS]:
        raise UsageError("test figures", expected="columns with figures, or images to measure them on",
                         found=f"both, for {', '.join(repeated_names)}")  # fmt: skip


def write_columns(source: FolderSource, collection: str, columns: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the user's columns into a manifest, if they differ from its columns.

    Args:
        source, collection: source and name of the collection.
        columns: member -> columns.
    """
    if not columns:
        return
    table = source.read_collection(collection)[1]
    rows = [row | columns.get(row["member"], {}) for row in table.to_pylist()]
    if not (new_table := manifest.build_manifest(rows)).equals(table):
        manifest.write_manifest(new_table, source.manifest_path(collection))


def original_files_path(root: Path, collection: str) -> Path:
    """Return the path of the table with the original file of each member."""
    return root / "files" / f"{collection}.csv"


def write_original_files(root: Path, collection: str, member_of_path: Mapping[str, int]) -> None:
    """Write the table with the original file of each member, by rename.

    Args:
        root: root folder of the source.
        collection: name of the collection.
        member_of_path: path in the imported folder -> member.
    """
    if not member_of_path:
        return
    path = original_files_path(root, collection)
    with replace_file(path) as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("member", FILE_COLUMN), *((m, f) for f, m in member_of_path.items())]
        )


def read_original_files(root: Path, collection: str) -> dict[int, str]:
    """Return member -> original file from the table of `write_original_files`; {} without a table."""
    path = original_files_path(root, collection)
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {int(row["member"]): row[FILE_COLUMN] for row in csv.DictReader(file)}


def values_per_member(column_values: Any) -> list[Any] | None:
    """Return the values of a column with a value for each member; None for a single value."""
    is_single_value = isinstance(
        column_values, str | bytes | Mapping | Set
    )  # a set has no order by which its values could be assigned
    if is_single_value or not hasattr(column_values, "__len__") or getattr(column_values, "shape", 1) == ():
        return None
    return list(column_values.tolist() if hasattr(column_values, "tolist") else column_values)


def convert_value(column: str, value: Any, owner_label: str) -> Any:
    """Convert a value to the type of its column; return the converted value, None for a missing value.

    Args:
        column: name of the column.
        value: value of a Python, numpy or pandas type, or text of a table's cell.
        owner_label: member or file that the value belongs to, for errors.

    Raises:
        UsageError: the value has another type, or is out of range.
    """
    column_type = SCHEMA.field(column).type
    try:
        value = value.item() if hasattr(value, "item") else value
        if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
            return None
        converted = _convert(column_type, value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays and tensors with several numbers
        converted = None
    if converted is None or not _in_range(column, converted):
        raise UsageError(
            f"column {column!r} of {owner_label}", expected=_expected_text(column, column_type), found=repr(value)[:80]
        )
    return converted


def _convert(column_type: pa.DataType, value: Any) -> Any:
    """Return a value in a column's type, None if the conversion would lose something."""
    if pa.types.is_string(column_type):
        return value if isinstance(value, str) else None
    if pa.types.is_timestamp(column_type):
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(moment, datetime):
            return None
        return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)).replace(microsecond=0)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    number = float(value) if pa.types.is_floating(column_type) or isinstance(value, float) else int(value)
    if not math.isfinite(number):
        return None
    return number if pa.types.is_floating(column_type) else int(number) if int(number) == number else None


def _in_range(column: str, value: Any) -> bool:
    if column == "split":
        return value in SPLITS
    if column.endswith("_accuracy") or column == "test_ece":
        return bool(0 <= value <= 1)
    return not isinstance(value, int) or 0 <= value < (2**32 if column == "seed" else 2**31)


def _expected_text(column: str, column_type: pa.DataType) -> str:
    if column == "split":
        return f"one of {', '.join(SPLITS)}"
    if column.endswith("_accuracy") or column == "test_ece":
        return "a share in 0..1"
    type_descriptions = ((pa.types.is_string, "text"), (pa.types.is_timestamp, "a time, as 2024-05-01T12:00"),
             (pa.types.is_floating, "a finite number"))  # fmt: skip
    bound = "2³²" if column == "seed" else "2³¹"  # Lightning and numpy draw seeds of 32 bits
    return next(
        (description for is_type, description in type_descriptions if is_type(column_type)),
        f"a whole number in [0, {bound})",
    )
