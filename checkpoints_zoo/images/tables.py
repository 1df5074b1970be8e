"""Parquet files of encoded images and labels, as `datasets` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from checkpoints_zoo.errors import FormatError, TooLargeError
from checkpoints_zoo.formats.safetensors import what_is
from checkpoints_zoo.images import decoding
from checkpoints_zoo.images.pixels import Gathered, Wanted
from checkpoints_zoo.images.sets import Columns, Found
from checkpoints_zoo.networks.device import free_bytes

STEP = 256  # encoded images that are held at a time, beside a row group


def read(paths: Sequence[Path], columns: Columns, wanted: Wanted, where: str) -> Found:
    """Read the rows of Parquet files in order; return images and labels.

    Memory: the pixels, and a row group of the encoded images.

    Args:
        paths: of the files.
        columns: which have images and labels, where the files don't say.
        wanted: what images are made into.
        where: what to call the data in errors.

    Raises:
        FormatError: no Parquet, columns of other kinds, a row without an image, or one that does not fit the others.
        UsageError: which columns are meant is not clear.
        TooLargeError: a row group or pixels that memory has no room for.
    """
    schemas = [_schema(path) for path in paths]
    said = [_said(schema) for schema in schemas]
    kinds = {column: said[0].get(column, {}).get("_type", "") for column in schemas[0].names}
    image, label = columns.choose(kinds, where)
    classes = [_names(one.get(label or "", {})) for one in said]
    for path, names in zip(paths, classes, strict=True):
        if names != classes[0]:
            found = f"others in {path.name}"
            raise FormatError(where, expected=f"the classes of {paths[0].name} in every file", found=found, path=path)
    total = sum(pq.read_metadata(path).num_rows for path in paths)
    gathered = Gathered(wanted, total, where)
    labels: list[Any] = []
    for path, schema in zip(paths, schemas, strict=True):
        row = 0
        for images, numbers in _batches(path, schema, image, label):
            for encoded in images.to_pylist():
                what = f"row {row:,} of {path}"
                if encoded is None:
                    raise FormatError(what, expected="an image in the file", found="none", path=path)
                decoding.add(encoded, gathered, what)
                row += 1
            labels += [] if numbers is None else numbers.to_pylist()
    pixels = gathered.done()
    if label is None or all(x is None for x in labels):
        return Found(pixels)
    if None in labels:
        raise FormatError(where, expected="a label in every row, or in none", found=f"none in row {labels.index(None)}")
    return Found(pixels, labels, classes[0])


def _schema(path: Path) -> pa.Schema:
    try:
        schema = pq.read_schema(path)
        str(schema)  # the names of columns may be no text
        return schema
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = _kind(path) or f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"file {path}", expected="a Parquet file", found=found, path=path) from error


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return what_is(file.read(512))
    except OSError:
        return ""


def _said(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return what a file's metadata says of its columns, as `datasets` writes it; {} where it says nothing."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    known = features.items() if isinstance(features, Mapping) else ()
    return {column: kind for column, kind in known if isinstance(kind, dict)}


def _names(kind: Mapping[str, Any]) -> tuple[str, ...]:
    names = kind.get("names") if kind.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else ()


def _batches(
    path: Path, schema: pa.Schema, image: str, label: str | None
) -> Iterator[tuple[pa.Array, pa.Array | None]]:
    """Yield the encoded images and the labels of some rows at a time."""
    for column in (image, *([] if label is None else [label])):
        if column not in schema.names:
            raise FormatError(f"file {path}", expected=f"a column {column!r}", found=", ".join(schema.names)[:200])
    kind = schema.field(image).type
    nested = pa.types.is_struct(kind) and "bytes" in kind.names
    inner = kind.field("bytes").type if nested else kind
    if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
        raise FormatError(f"column {image!r} of {path}", expected="encoded images", found=str(kind)[:200])
    if label is not None:
        of = schema.field(label).type
        of = of.value_type if pa.types.is_dictionary(of) else of
        if not (pa.types.is_integer(of) or pa.types.is_string(of) or pa.types.is_large_string(of)):
            raise FormatError(f"column {label!r} of {path}", expected="whole numbers or names", found=str(of)[:200])
    names = [f"{image}.bytes" if nested else image, *([] if label is None else [label])]
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):  # told of all, the reader would hold all
                _check_room(file.metadata.row_group(group).total_byte_size, path)
                for batch in file.iter_batches(STEP, [group], names):
                    images = batch.column(image)
                    labels = None if label is None else batch.column(label)
                    yield pc.struct_field(images, "bytes") if nested else images, labels
    except (pa.ArrowException, OSError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"file {path}", expected="rows that can be read", found=found, path=path) from error


def _check_room(needed: int, path: Path) -> None:
    free = free_bytes(torch.device("cpu"))
    if free is not None and needed > free:
        found = f"{needed:,}, by its footer"
        raise TooLargeError(f"a row group of {path}", expected=f"at most {free:,} bytes", found=found, path=path)
