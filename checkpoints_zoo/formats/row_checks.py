"""Checks of a manifest's rows against the description beside it, since anyone may have written the two files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoints_zoo.errors import DamagedError, FormatError, SelectionError
from checkpoints_zoo.formats.arrow_tables import numpy_values, text_codes
from checkpoints_zoo.formats.layout import DescriptionWithLayouts
from checkpoints_zoo.formats.member_parts import PARTS_COLUMN, is_etag, parse_repo_file
from checkpoints_zoo.formats.source_paths import path_refusal

REQUIRED_COLUMNS = ("member", "epoch", "final", "status")
LOCATION_COLUMNS = ("path", "offset", "nbytes", "layout", "dtype")


def check_rows(
    rows: pa.Table, description: DescriptionWithLayouts, path: Path, positions: Sequence[int] | None = None
) -> None:
    """Check rows of a manifest against the description, since anyone may have written the two files.

    Args:
        rows: the manifest, as `read_manifest` returns it, or some of its rows.
        description: the description beside the manifest.
        path: the manifest's name in error texts.
        positions: position in the manifest of each row; None for the whole manifest.

    Raises:
        FormatError: a required value is null, a row occurs twice, or a layout is unknown.
        DamagedError: a path leads out of the source, or an offset or size is impossible.
    """
    if not rows.num_rows:
        return

    def row_error(
        error_class: type[FormatError] | type[DamagedError], position: int, expected: str, found: str
    ) -> Exception:
        member = rows.column("member")[position].as_py()
        subject = f"row {position if positions is None else positions[position]} (member {member}) of manifest {path}"
        return error_class(
            subject, expected=expected, found=found, collection=description.name, member=member, path=path
        )

    is_null_in = {n: ~numpy_values(rows.column(n).is_valid()) for n in (*REQUIRED_COLUMNS, *LOCATION_COLUMNS)}
    for name in REQUIRED_COLUMNS:
        if (position := _first_true_position(is_null_in[name])) is not None:
            raise row_error(FormatError, position, f"a value for {name}", "null")
    status_codes, statuses = text_codes(rows.column("status"))
    is_ok = np.array([status == "ok" for status in statuses], bool)[status_codes]
    location_is_null = np.stack([is_null_in[name] for name in LOCATION_COLUMNS])
    lacks_value = location_is_null.any(0) & (is_ok | ~location_is_null.all(0))
    if (position := _first_true_position(lacks_value)) is not None:
        name = LOCATION_COLUMNS[int(np.argmax(location_is_null[:, position]))]
        raise row_error(FormatError, position, f"a value for {name}", "null")
    member_ids, epochs = (numpy_values(rows.column(name)).astype(np.int64) for name in ("member", "epoch"))
    is_negative = (member_ids < 0) | (epochs < 0)
    final_positions = np.flatnonzero(numpy_values(rows.column("final")))
    is_repeated = _repeats_earlier((member_ids << 32) + epochs)
    is_repeated[final_positions[_repeats_earlier(member_ids[final_positions])]] = True
    if (position := _first_true_position(is_negative | is_repeated)) is not None:
        if is_negative[position]:
            found = f"member {member_ids[position]}, epoch {epochs[position]}"
            raise row_error(FormatError, position, "member and epoch not negative", found)
        raise row_error(FormatError, position, "each (member, epoch) once and one final row a member", "a second one")
    for code, status in enumerate(statuses):
        if status not in ("ok", "failed", "excluded"):
            position = int(np.argmax(status_codes == code))
            raise row_error(FormatError, position, "status ok, failed or excluded", repr(status))
    path_codes, paths = text_codes(rows.column("path"))
    has_parts = np.zeros(rows.num_rows, bool)
    if PARTS_COLUMN in rows.column_names:
        has_parts = numpy_values(rows.column(PARTS_COLUMN).is_valid())
    for code, path_in_source in enumerate(paths):
        if problem := path_refusal(path_in_source):
            position = int(np.argmax((path_codes == code) & ~has_parts))
            if not has_parts[position] and path_codes[position] == code:
                raise row_error(DamagedError, position, "a path inside the source", problem)
    if (wrong_part := _first_wrong_part(rows, has_parts)) is not None:
        raise row_error(DamagedError, *wrong_part)
    positions_with_path = np.flatnonzero(path_codes >= 0)
    layout_codes, layout_keys = text_codes(rows.column("layout"))
    dtype_codes, dtypes = text_codes(rows.column("dtype"))
    layouts = [description.layouts.get(key) for key in layout_keys]
    layout_codes, dtype_codes = layout_codes[positions_with_path], dtype_codes[positions_with_path]
    offsets, row_nbytes = (numpy_values(rows.column(name))[positions_with_path] for name in ("offset", "nbytes"))
    # (layout, dtype) -> whether the layout has the dtype; no layout has the size -1.
    has_dtype = np.array([[layout is not None and layout.dtype == dtype for dtype in dtypes] for layout in layouts])
    layout_nbytes = np.array([-1 if layout is None else layout.nbytes for layout in layouts], np.int64)
    if len(positions_with_path):
        is_wrong = (offsets < 0) | (row_nbytes != layout_nbytes[layout_codes]) | ~has_dtype[layout_codes, dtype_codes]
        if (place := _first_true_position(is_wrong)) is not None:
            position, key = int(positions_with_path[place]), layout_keys[layout_codes[place]]
            layout = description.layouts.get(key)
            if layout is None:
                raise row_error(FormatError, position, f"a layout among {', '.join(description.layouts)}", repr(key))
            expected = f"an offset from 0, {layout.nbytes:,} bytes of {layout.dtype} for layout {key!r}"
            found = f"offset {offsets[place]}, {row_nbytes[place]:,} bytes of {dtypes[dtype_codes[place]]}"
            raise row_error(DamagedError, position, expected, found)
    if (position := _first_true_position(~_are_hashes(rows.column("sha256")))) is not None:
        digest = rows.column("sha256")[position].as_py()
        raise row_error(FormatError, position, "sha256 of 64 lower-case hex digits", repr(digest[:80]))


def _first_wrong_part(
    rows: pa.Table, has_parts: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[int, str, str] | None:
    """Check the parts of rows; return the position of the first wrong row, what was expected and what was found; None
    if all are right."""
    if not has_parts.any():
        return None
    parts_column = rows.column(PARTS_COLUMN).combine_chunks()
    parts = parts_column.flatten()
    lengths = np.where(has_parts, numpy_values(pa.chunked_array([pc.list_value_length(parts_column)])), 0)
    row_of_part = np.repeat(np.arange(rows.num_rows), lengths)
    fields = dict(zip(("path", "offset", "nbytes", "etag"), parts.flatten(), strict=True))
    columns = {name: pa.chunked_array([array]) for name, array in fields.items()}
    if (position := _first_true_position(has_parts & (lengths == 0))) is not None:
        return position, "one part or more", "none"
    is_null_part = ~np.logical_and.reduce([numpy_values(columns[n].is_valid()) for n in ("path", "offset", "nbytes")])
    if (place := _first_true_position(is_null_part)) is not None:
        return int(row_of_part[place]), "a path, an offset and nbytes in each part", "null"
    offsets, nbytes = numpy_values(columns["offset"]), numpy_values(columns["nbytes"])
    if (place := _first_true_position((offsets < 0) | (nbytes < 0))) is not None:
        found = f"offset {offsets[place]}, {nbytes[place]:,} bytes"
        return int(row_of_part[place]), "offset and nbytes of each part not negative", found
    path_codes, paths = text_codes(columns["path"])
    for code, address in enumerate(paths):
        file = parse_repo_file(address)
        problem = f"{address[:200]!r}" if file is None else path_refusal(file.path)
        if problem:
            place = int(np.argmax(path_codes == code))
            return int(row_of_part[place]), "parts at hf://[datasets/]ORG/NAME@COMMIT/FILE", problem
    etag_codes, etags = text_codes(columns["etag"])
    for code, etag in enumerate(etags):
        if not is_etag(etag):
            place = int(np.argmax(etag_codes == code))
            return int(row_of_part[place]), "an etag of letters and digits", repr(etag[:80])
    first_places = np.cumsum(lengths) - lengths
    totals = np.bincount(row_of_part, nbytes.astype(np.float64), rows.num_rows)
    row_codes, row_paths = text_codes(rows.column("path"))
    row_offsets, row_nbytes = (numpy_values(rows.column(name)) for name in ("offset", "nbytes"))
    for position in np.flatnonzero(has_parts).tolist():
        place = first_places[position]
        first = paths[path_codes[place]], int(offsets[place]), int(totals[position])
        row_path = row_paths[row_codes[position]] if row_codes[position] >= 0 else None
        row = row_path, int(row_offsets[position]), int(row_nbytes[position])
        if first != row:
            expected = f"path, offset and nbytes of its parts ({first[0]}, {first[1]}, {first[2]})"
            return position, expected, f"{row[0]}, {row[1]}, {row[2]}"
    return None


def _first_true_position(is_wrong: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int | None:
    """Return the position of the first true value, None if there is none."""
    return int(np.argmax(is_wrong)) if is_wrong.any() else None


def _repeats_earlier(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say for each value whether an earlier value equals it."""
    value_order = np.argsort(values, kind="stable")
    is_repeated = np.zeros(len(values), bool)
    is_repeated[value_order[1:]] = np.diff(values[value_order]) == 0
    return is_repeated


def _are_hashes(column: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say for each text of a column whether it is null, or has 64 lower-case hex digits."""
    is_digit = np.zeros(256, bool)
    is_digit[list(b"0123456789abcdef")] = True
    parts = [np.zeros(0, bool)]
    for chunk in column.chunks:
        _, offset_buffer, text_buffer = chunk.buffers()
        ends = np.frombuffer(offset_buffer or b"", np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        is_hash = np.diff(ends) == 64
        text = np.frombuffer(text_buffer or b"", np.uint8)
        if len(is_hash) and not is_digit[text[ends[0] : ends[-1]]].all():
            wrong_offsets = np.flatnonzero(~is_digit[text[ends[0] : ends[-1]]]) + ends[0]
            is_hash[np.searchsorted(ends, wrong_offsets, side="right") - 1] = False
        parts.append(is_hash | ~numpy_values(pa.chunked_array([chunk.is_valid()])))
    return np.concatenate(parts)


def check_located(rows: pa.Table, collection: str) -> None:
    """Check that every selected row has weights: rows whose status is not "ok" may have none.

    Args:
        rows: the selected rows of a manifest.
        collection: name of the collection, for error texts.

    Raises:
        SelectionError: a row has no weights; the error names the first such member.
    """
    if not rows.column("path").null_count:
        return
    member = rows.column("member").to_pylist()[rows.column("path").to_pylist().index(None)]
    raise SelectionError(
        f"member {member} of {collection}",
        expected="weights",
        found="a row without weights (its status is not ok)",
        do="Select with where=\"status = 'ok'\"",
        collection=collection,
        member=member,
    )
