"""The manifest: a Parquet table with one row for each snapshot: the facts on the snapshot, and the location of its
bytes.

Manifests and descriptions that are larger than the limits below are refused before they are read into memory. This
module imports neither torch nor pandas (`pyarrow.parquet.read_table` and `pyarrow.array` would import pandas).

This is one file, because reading and writing share the schema.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoints_zoo.errors import FormatError, ZooError
from checkpoints_zoo.formats.arrow_tables import is_null, numpy_values, take_rows
from checkpoints_zoo.formats.columns import PARTS, SCHEMA, SCHEMA_WITH_PARTS
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.layout import DescriptionWithLayouts
from checkpoints_zoo.formats.limits import check_file, limit_error
from checkpoints_zoo.formats.member_parts import PARTS_COLUMN
from checkpoints_zoo.formats.row_checks import check_rows

ROWS_PER_GROUP = 4096
LARGE_ROW_COUNT = 16_384  # A selection reads manifests with fewer rows whole, and checks all their rows.

LARGEST_UNPACKED_NBYTES = 2**32  # Largest number of bytes that a manifest's columns may have after unpacking.
LARGEST_ROW_COUNT = 2**24


class SparseFile(Protocol):
    """A file of which byte ranges are brought to this machine when they are needed."""

    @property
    def size(self) -> int:
        """Size of the whole file in bytes."""

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Bring ranges (start, end) of the file to this machine."""

    def drop(self) -> None:
        """Delete the ranges that are on this machine."""


def build_manifest(rows: Iterable[Mapping[str, Any]], schema: pa.Schema | None = None) -> pa.Table:
    """Build a manifest from rows, where a missing value becomes null; return the table, ordered by member and epoch.

    Args:
        rows: for each row, name of a column -> value.
        schema: Arrow schema of the table; None for that of manifests, with `parts` only if a row has parts.

    Raises:
        FormatError: a row has a column that the schema lacks, or a value has another type.
    """
    rows = list(rows)
    if schema is None:
        has_parts = any(row.get(PARTS_COLUMN) is not None for row in rows)
        schema = SCHEMA_WITH_PARTS if has_parts else SCHEMA
        rows = rows if has_parts else [{k: v for k, v in row.items() if k != PARTS_COLUMN} for row in rows]
    unknown_names = sorted({name for row in rows for name in row} - set(schema.names))
    if unknown_names:
        raise FormatError("manifest row", expected="columns of the schema", found=", ".join(unknown_names))
    for row in rows:
        if type(row.get("member")) is not int or type(row.get("epoch")) is not int:
            raise FormatError(
                "manifest row",
                expected="whole numbers as member and epoch",
                found=f"{row.get('member')!r} and {row.get('epoch')!r}",
            )
    try:
        ordered_rows = sorted(rows, key=lambda r: (r["member"], r["epoch"]))
        return pa.Table.from_pylist(ordered_rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise FormatError("manifest row", expected="values of the schema's types", found=str(error)) from error


def write_manifest(rows: pa.Table, path: Path, schema: pa.Schema | None = None) -> None:
    """Write a manifest by rename: the same rows give the same bytes. Rows with a member and an epoch are
    ordered by both, so that the rows of a member lie in few row groups.

    Args:
        rows: table with the columns of the schema.
        path: path of the new file; its folder is made if missing.
        schema: Arrow schema of the file; None for that of manifests, in version 1 unless a row has parts.
    """
    if schema is None:
        has_parts = PARTS_COLUMN in rows.column_names and not is_null(rows, PARTS_COLUMN)
        schema = SCHEMA_WITH_PARTS if has_parts else SCHEMA
    rows = rows.select(schema.names).cast(schema)
    if {"member", "epoch"} <= set(schema.names):
        row_order = np.lexsort((numpy_values(rows.column("epoch")), numpy_values(rows.column("member"))))
        if (np.diff(row_order) < 0).any():
            rows = take_rows(rows, row_order)
    # Seeds below 2³¹ are stored in 32 bits, because version 0.1 writes and reads them so.
    with contextlib.suppress(pa.ArrowInvalid, KeyError):
        seed_position = schema.get_field_index("seed")
        rows = rows.set_column(
            seed_position, schema.field(seed_position).with_type(pa.int32()), rows.column("seed").cast(pa.int32())
        )
    with replace_file(path, "wb", sync=True) as file:  # Pass an open file, because Arrow opens only paths in UTF-8.
        pq.write_table(
            rows, file, row_group_size=ROWS_PER_GROUP, write_page_index=True,
            compression="zstd", store_schema=True, write_page_checksum=True,
        )  # fmt: skip


def read_manifest(path: Path, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Read a manifest; return the table. Missing columns become null, unknown columns are left out.

    Args:
        path: path of the Parquet file.
        schema: Arrow schema that the table should have. That of manifests gets the column `parts` if the file's version
            is 2.

    Raises:
        FormatError: the file is not a Parquet file, has a newer schema, has a column of another type, or exceeds a
            limit of this module.
    """
    with _reading_errors(path):
        check_file(path)
        content = path.read_bytes()
    return ManifestFile(lambda: pa.BufferReader(content), path, schema).read()


class ManifestFile:
    """A manifest in a Parquet file, whose row groups are read when they are needed.

    Args:
        open_content: function that opens the file's content.
        path: path of the file.
        schema: Arrow schema that tables should have; the same argument as in `read_manifest`.
        description: the description beside the manifest, against which `take` checks rows; None to leave this out.
        sparse_file: the file of which only the footer is on this machine; None if the whole file is.

    Raises:
        FormatError: for the same reasons as in `read_manifest`.
    """

    def __init__(
        self,
        open_content: Callable[[], Any],
        path: Path,
        schema: pa.Schema = SCHEMA,
        description: DescriptionWithLayouts | None = None,
        sparse_file: SparseFile | None = None,
    ) -> None:
        self.open_content, self.path, self.description, self.sparse_file = open_content, path, description, sparse_file
        with _reading_errors(path, sparse_file):
            with open_content() as content:
                self.footer = pq.read_metadata(content)
            smallest_widths = {
                f.name: 4 if f.type == pa.string() else f.type.bit_width // 8
                for f in schema
                if not pa.types.is_nested(f.type)
            }
            check_columns(self.footer, smallest_widths, path)
            file_schema = self.footer.schema.to_arrow_schema()
            newest = SCHEMA_WITH_PARTS if schema is SCHEMA else schema
            version = _check_version(file_schema.metadata or {}, _version_of(newest), path)
            self.schema = newest if version == _version_of(newest) else schema
            schema = self.schema
            self.column_names = file_schema.names
            if repeated_names := [n for n in schema.names if self.column_names.count(n) > 1]:
                raise FormatError(
                    f"manifest {path}", expected="each column once", found=f"{repeated_names[0]!r} twice", path=path
                )
        row_counts = [self.footer.row_group(group).num_rows for group in range(self.footer.num_row_groups)]
        # Position of each row group's first row, and at the end the number of rows.
        self.row_group_starts = np.concatenate([[0], np.cumsum(row_counts, dtype=np.int64)])
        self.num_rows: int = self.footer.num_rows
        self.statistics: dict[str, list[tuple[int, int, int]]] = {}

    def fetch(self, names: Sequence[str], groups: Iterable[int]) -> None:
        """Bring the bytes of columns in some row groups to this machine; the whole file if the footer does not say
        where they are. Columns that the file lacks are left out."""
        if self.sparse_file is not None:
            chunks, whole_file = self._chunks, [(0, self.sparse_file.size)]
            present_names = [name for name in names if name in self.column_names]
            keys = [(group, name) for group in groups for name in present_names]
            self.sparse_file.fetch([chunk for key in keys for chunk in chunks.get(key, whole_file)])

    def read(self, names: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> pa.Table:
        """Read columns; return a table of them, with nulls for columns that the file lacks.

        Args:
            names: names of columns of the schema, or None for all columns.
            groups: numbers of row groups, or None for the whole file.
        """
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        present_names = [name for name in schema.names if name in self.column_names]
        self.fetch(present_names, range(len(self.row_group_starts) - 1) if groups is None else groups)
        with _reading_errors(self.path, self.sparse_file), self._open(schema) as file:
            if groups is None:
                table = file.read(columns=present_names, use_threads=False)
            else:
                table = file.read_row_groups(list(groups), columns=present_names, use_threads=False)
            return self._with_schema(table, schema)

    def take(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
        """Read and check whole rows at some positions; return them in the order of the positions.

        Raises:
            FormatError, DamagedError: for the same reasons as in `read_manifest` and `check_rows`.
        """
        ordered_positions = np.unique(positions)
        tables = [self.read(groups=[])]
        present_names = [name for name in self.schema.names if name in self.column_names]
        row_groups = np.unique(np.searchsorted(self.row_group_starts, ordered_positions, side="right") - 1).tolist()
        self.fetch(present_names, row_groups)
        with _reading_errors(self.path, self.sparse_file), self._open(self.schema) as file:
            for group in row_groups:
                batch_start, group_end = self.row_group_starts[group : group + 2]
                # The rows of a group are read in batches, because other programs write groups of a million rows.
                for batch in file.iter_batches(ROWS_PER_GROUP, [group], present_names, use_threads=False):
                    first_place, end_place = np.searchsorted(
                        ordered_positions, (batch_start, min(batch_start + batch.num_rows, group_end))
                    )
                    if first_place < end_place:
                        rows = take_rows(
                            pa.Table.from_batches([batch]), ordered_positions[first_place:end_place] - batch_start
                        )
                        tables.append(self._with_schema(rows, self.schema))
                    batch_start += batch.num_rows
                pa.default_memory_pool().release_unused()  # Arrow would keep what it freed.
        rows = pa.concat_tables(tables)
        if self.description is not None:
            check_rows(rows, self.description, self.path, ordered_positions.tolist())
        return take_rows(rows, np.searchsorted(ordered_positions, positions))

    def row_groups_with(
        self, name: str, lows: np.ndarray[tuple[int], Any], highs: np.ndarray[tuple[int], Any]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Find the row groups whose column of whole numbers may have a value in one of some intervals, by the
        statistics in the file's footer; return the numbers of these row groups, and of row groups without statistics.

        Args:
            name: name of the column.
            lows, highs: lowest and highest value of each interval; the intervals ascend and do not overlap.
        """
        may_overlap = np.ones(len(self.row_group_starts) - 1, bool)
        if pa.types.is_integer(self.schema.field(name).type):
            for group, lowest, highest in self._statistics(name):
                interval_position = np.searchsorted(highs, lowest, side="left")
                may_overlap[group] = bool(interval_position < len(lows) and lows[interval_position] <= highest)
        return np.flatnonzero(may_overlap)

    def _statistics(self, name: str) -> list[tuple[int, int, int]]:
        """Return (row group, lowest value, highest value) of each row group with statistics of a column."""
        if name not in self.statistics:
            self.statistics[name] = self._query_footer(
                "row_group_id, stats_min_value::BIGINT, stats_max_value::BIGINT",
                f"path_in_schema = {_quote(name)} AND stats_min_value IS NOT NULL AND stats_max_value IS NOT NULL",
            )
        return self.statistics[name]

    @cached_property
    def _chunks(self) -> dict[tuple[int, str], list[tuple[int, int]]]:
        """(row group, column) -> start and end of the column's bytes in the file; of a nested column, of each field."""
        start = "LEAST(data_page_offset, COALESCE(NULLIF(dictionary_page_offset, 0), data_page_offset))"
        rows = self._query_footer(f"row_group_id, path_in_schema, {start}, {start} + total_compressed_size", "true")
        chunks: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for group, name, chunk_start, chunk_end in rows:
            chunks.setdefault((group, name.partition(", ")[0]), []).append((chunk_start, chunk_end))
        return chunks

    def _query_footer(self, columns: str, condition: str) -> list[Any]:
        """Return columns of DuckDB's table of the file's column chunks; [] if DuckDB can't read the footer."""
        import duckdb

        # If a footer has damaged statistics, pyarrow ends the process, and DuckDB raises an error.
        path = _quote(str(self.path))
        settings = f"SET threads = 1; SET autoload_known_extensions = false; SET allowed_paths = [{path}]"
        with contextlib.suppress(duckdb.Error, UnicodeError), duckdb.connect(":memory:") as connection:
            connection.execute(f"{settings}; SET enable_external_access = false; SET lock_configuration = true")
            return connection.execute(f"SELECT {columns} FROM parquet_metadata({path}) WHERE {condition}").fetchall()
        return []

    @contextlib.contextmanager
    def _open(self, schema: pa.Schema) -> Iterator[pq.ParquetFile]:
        # Read each distinct text only once, as Parquet stores it: a few bytes of a file can repeat one long text in a
        # million rows.
        texts = {f.name for f in schema if f.type == pa.string()}
        leaves = [self.footer.schema.column(i) for i in range(self.footer.num_columns)]
        text_columns = [
            leaf.path
            for leaf in leaves
            if leaf.path in texts or (leaf.path.startswith(f"{PARTS_COLUMN}.") and leaf.physical_type == "BYTE_ARRAY")
        ]
        options = {"metadata": self.footer, "page_checksum_verification": True, "read_dictionary": text_columns}
        with self.open_content() as content, pq.ParquetFile(content, **options) as file:
            yield file
        pa.default_memory_pool().release_unused()  # Arrow would keep what it freed.

    def _with_schema(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """Check the values of a table that was read from the file; return the table with the types of the schema, and
        with all its columns."""
        table.validate(full=True)  # This finds text that is not UTF-8, and other damage.
        columns, unpacked_nbytes = [], 0
        for field in schema:
            if field.name in table.column_names:
                column = table.column(field.name)
                if pa.types.is_dictionary(column.type):
                    unpacked_nbytes = check_texts(column, unpacked_nbytes, self.path)
                if pa.types.is_nested(field.type):
                    column, unpacked_nbytes = _plain_parts(column, unpacked_nbytes, self.path)
                columns.append(column.cast(field.type))
            elif not field.nullable:
                raise FormatError(
                    f"manifest {self.path}", expected=f"a column {field.name!r}", found="none", path=self.path
                )
            else:
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
        return pa.Table.from_arrays(columns, schema=schema)


def _plain_parts(column: pa.ChunkedArray, unpacked_nbytes: int, path: Path) -> tuple[pa.ChunkedArray, int]:
    """Check the type and the texts of the column `parts`, whose texts are in Arrow's dictionary encoding; return the
    column with plain texts, and the number of unpacked bytes of all columns so far.

    Raises:
        FormatError: the column is no list of structs with the fields of parts, or its texts are too large.
    """
    fields = list(PARTS.type.value_type)
    is_list_of_parts = pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type)
    if not is_list_of_parts or any(column.type.value_type.get_field_index(f.name) < 0 for f in fields):
        raise FormatError(
            f"manifest {path}", expected=f"a column {PARTS_COLUMN!r} of {PARTS.type}", found=str(column.type), path=path
        )
    chunks = []
    for chunk in column.chunks:
        parts, names = chunk.flatten(), column.type.value_type
        values = dict(zip((names.field(i).name for i in range(names.num_fields)), parts.flatten(), strict=True))
        for name, array in values.items():
            if pa.types.is_dictionary(array.type):
                unpacked_nbytes = check_texts(pa.chunked_array([array]), unpacked_nbytes, path)
                values[name] = array.cast(pa.string())
        lengths = numpy_values(pa.chunked_array([pc.list_value_length(chunk)])).astype(np.int32)
        is_missing = numpy_values(pa.chunked_array([chunk.is_null()]))
        offsets = np.concatenate([[0], np.cumsum(np.where(is_missing, 0, lengths))]).astype(np.int32)
        structs = pa.StructArray.from_arrays([values[f.name].cast(f.type) for f in fields], fields=fields)
        offset_array = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])
        chunks.append(pa.ListArray.from_arrays(offset_array, structs, type=PARTS.type, mask=chunk.is_null()))
    return pa.chunked_array(chunks, PARTS.type), unpacked_nbytes


def _version_of(schema: pa.Schema) -> int:
    return int(schema.metadata[b"schema_version"])


def _quote(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


@contextlib.contextmanager
def _reading_errors(path: Path, sparse_file: SparseFile | None = None) -> Iterator[None]:
    """Raise a FormatError for the errors of pyarrow at a damaged file, and delete the fetched ranges of the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError) as error:  # UnicodeError: a column's name is not UTF-8.
        if isinstance(error, FileNotFoundError | ZooError):
            raise
        if sparse_file is not None:
            sparse_file.drop()
        raise FormatError(
            f"manifest {path}",
            expected="a Parquet file with the manifest's columns",
            found=str(error)[:300],
            do="" if sparse_file is None else "Load it again: it is then fetched anew",
            path=path,
        ) from error


def row_count(path: Path) -> int:
    """Return the number of rows in a manifest; 0 if its footer can't be read."""
    try:
        check_file(path)
        with path.open("rb") as file:
            return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError, UnicodeError, FormatError):
        return 0


def _check_version(metadata: Mapping[bytes, bytes], newest_version: int, path: Path) -> int:
    """Return the version of a manifest's schema, if it is not newer than the newest version that is known."""
    version_text = metadata.get(b"schema_version", b"").decode(errors="replace")
    if not re.fullmatch("[0-9]{1,9}", version_text):
        raise FormatError(
            f"manifest {path}",
            expected="a schema_version in the Parquet metadata",
            found=repr(version_text[:40]),
            do=""
            if version_text
            else "A program that rewrites the table, such as pandas, drops it: write the table with pyarrow, "
            "after `table = table.replace_schema_metadata(pq.read_schema(ORIGINAL).metadata)`",
            path=path,
        )
    if int(version_text) > newest_version:
        raise FormatError(
            f"manifest {path}",
            expected=f"schema version {newest_version} or older",
            found=f"version {version_text}",
            do="Install a newer checkpoints-zoo",
            path=path,
        )
    return int(version_text)


def without_parts(rows: pa.Table) -> pa.Table:
    """Return the rows whose bytes lie in files of the source itself, or that have no bytes."""
    return rows.filter(rows.column(PARTS_COLUMN).is_null()) if PARTS_COLUMN in rows.column_names else rows


def check_columns(metadata: pq.FileMetaData, nbytes_of_column: Mapping[str, int], path: Path) -> None:
    """Check the number of rows and the sizes in the footer of a Parquet file.

    Args:
        metadata: the footer.
        nbytes_of_column: name of each column to read -> smallest number of bytes that one value of the column takes.
        path: path of the Parquet file.

    Raises:
        FormatError: the number of rows or a size exceeds the limit for manifests.
    """
    if metadata.num_rows > LARGEST_ROW_COUNT:
        raise limit_error(f"manifest {path}", f"at most {LARGEST_ROW_COUNT:,} rows", f"{metadata.num_rows:,}", path)
    # Sizes are summed over whole row groups: pyarrow ends the process if the statistics of a single column are damaged.
    group_nbytes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    group_nbytes.append(metadata.num_rows * sum(nbytes_of_column.values()))
    if min(group_nbytes) < 0 or sum(group_nbytes) > LARGEST_UNPACKED_NBYTES:
        raise _unpacked_size_error(f"{sum(group_nbytes):,}, by its footer", path)


def check_texts(column: pa.ChunkedArray, unpacked_nbytes: int, path: Path) -> int:
    """Check the total length of a column's unpacked texts; return the number of unpacked bytes of all columns so far.

    Args:
        column: column of texts, in Arrow's dictionary encoding.
        unpacked_nbytes: number of unpacked bytes of the earlier columns.
        path: path of the Parquet file.

    Raises:
        FormatError: the number of rows or a size exceeds the limit for manifests.
    """
    for chunk in column.chunks:
        text_lengths = pc.binary_length(chunk.dictionary).cast("int64")
        unpacked_nbytes += int(pc.sum(text_lengths.take(chunk.indices)).as_py() or 0)
        if unpacked_nbytes > LARGEST_UNPACKED_NBYTES:
            raise _unpacked_size_error(f"{unpacked_nbytes:,} or more", path)
    return unpacked_nbytes


def _unpacked_size_error(found: str, path: Path) -> FormatError:
    return limit_error(
        f"manifest {path}", f"columns of at most {LARGEST_UNPACKED_NBYTES:,} bytes, unpacked", found, path
    )


def snapshot_keys(rows: pa.Table) -> list[tuple[int, int | None]]:
    """Return (member, epoch) of each row; the epoch is None for a member's final snapshot."""
    columns = (rows.column(c).to_pylist() for c in ("member", "epoch", "final"))
    return [(m, None if final else e) for m, e, final in zip(*columns, strict=True)]
