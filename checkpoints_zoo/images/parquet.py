"""Parquet files with encoded images, decoded into one array.

What the files hold is checked before and while it is decoded: columns and their kinds, class names in order, sizes and
modes of the images, labels.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from checkpoints_zoo.errors import FormatError, SourceNotFound, TooLargeError
from checkpoints_zoo.formats.shard_files import what_is
from checkpoints_zoo.images.hub_sets import HubSet
from checkpoints_zoo.images.pixels import Gathered, Wanted
from checkpoints_zoo.images.sets import Columns, Found
from checkpoints_zoo.networks.device import lacking

STEP = 512
CHANGED = "The repo may have changed since this version was made: look for a newer one of checkpoints_zoo"
# What Pillow raises for bytes that are no image, or a damaged one.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def rows(paths: Sequence[Path], most: int, where: str) -> int:
    """Count the rows of Parquet files by their footers; return the sum.

    Args:
        paths: of the files.
        most: rows that the split can have.
        where: what to call the data in errors.

    Raises:
        FormatError: a file that is no Parquet, no rows at all, or more than there can be.
    """
    total = 0
    for path in paths:
        try:
            total += pq.read_metadata(path).num_rows
        except (pa.ArrowInvalid, OSError) as error:
            found = f"{type(error).__name__}: {error}"[:200]
            raise FormatError(where, expected=f"{path.name} to be a Parquet file", found=found, do=CHANGED) from error
    if not 0 < total <= most:
        raise FormatError(where, expected=f"from 1 to {most:,} inputs", found=f"{total:,}", do=CHANGED)
    return total


def decode(
    paths: Sequence[Path], hub_set: HubSet, total: int, where: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Decode all images of Parquet files; return uint8 pixels (input, channel, height, width) and labels (input,).

    Memory: the pixels, and a row group of the encoded images.

    Args:
        paths: of the files, in order.
        hub_set: what they should hold.
        total: rows in all of them.
        where: what to call the data in errors.

    Raises:
        FormatError: columns, images or labels of another kind than expected.
    """
    pixels = np.empty((total, hub_set.channels, *hub_set.size), np.uint8)
    labels = np.empty(total, np.int64)
    at = 0
    for images, numbers in _batches(paths, hub_set, where):
        if numbers.null_count:
            _refuse(where, "a label for every input", f"{numbers.null_count:,} without one")
        labels[at : at + len(numbers)] = numbers.to_numpy(zero_copy_only=False)
        for encoded in images.to_pylist():
            pixels[at] = _pixels(encoded, hub_set, f"image {at:,} of {where}")
            at += 1
    wrong = np.flatnonzero((labels < 0) | (labels >= len(hub_set.classes)))
    if len(wrong):
        last, first = len(hub_set.classes) - 1, wrong[0]
        _refuse(where, f"labels from 0 to {last}", f"{labels[first]} for input {first:,}, {len(wrong):,} such in all")
    return pixels, labels


def _batches(paths: Sequence[Path], hub_set: HubSet, where: str) -> Iterable[tuple[pa.Array, pa.Array]]:
    """Yield the encoded images and the labels of some rows at a time."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            for column in (hub_set.image, hub_set.label):
                if column not in schema.names:
                    expected = f"columns {hub_set.image} and {hub_set.label}"
                    _refuse(where, expected, f"{', '.join(schema.names)} in {path.name}")
            image, label = (schema.field(column).type for column in (hub_set.image, hub_set.label))
            inside = image.field("bytes").type if pa.types.is_struct(image) and "bytes" in image.names else image
            if not (pa.types.is_binary(inside) or pa.types.is_large_binary(inside)) or inside is image:
                _refuse(where, f"encoded images in column {hub_set.image}", f"{image} in {path.name}")
            if not pa.types.is_integer(label):
                _refuse(where, f"whole numbers in column {hub_set.label}", f"{label} in {path.name}")
            try:
                for group in range(file.num_row_groups):  # told of all, the reader would hold all
                    for batch in file.iter_batches(STEP, [group], [f"{hub_set.image}.bytes", hub_set.label]):
                        yield pc.struct_field(batch.column(hub_set.image), "bytes"), batch.column(hub_set.label)
            except (pa.ArrowException, OSError) as error:
                found = f"{type(error).__name__}: {error}"[:200]
                raise FormatError(where, expected=f"rows in {path.name}", found=found, do=CHANGED) from error


def _pixels(encoded: bytes | None, hub_set: HubSet, where: str) -> npt.NDArray[np.uint8]:
    """Decode one image; return its pixels, (channel, height, width)."""
    from PIL import Image

    if encoded is None:
        _refuse(where, "an image", "none")
    height, width = hub_set.size
    mode = "L" if hub_set.channels == 1 else "RGB"
    try:
        with Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG")) as image:
            # Before it is decoded: a header may announce any size.
            if image.size != (width, height):
                _refuse(where, f"{width} x {height} pixels", f"{image.width} x {image.height}")
            if image.mode != mode and not (hub_set.some_grey and image.mode == "L"):
                _refuse(where, f"mode {mode}{' or L' if hub_set.some_grey else ''}", image.mode)
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except FormatError:
        raise
    except (*UNREADABLE, Image.DecompressionBombError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(where, expected="a PNG or JPEG image", found=found, do=CHANGED) from error
    return pixels[None] if hub_set.channels == 1 else np.moveaxis(pixels, -1, 0)


def _refuse(thing: str, expected: str, found: Any) -> Never:
    raise FormatError(thing, expected=expected, found=str(found), do=CHANGED)


# Encoded images, PNG or JPEG, that anyone may have written.


FORMATS = ("PNG", "JPEG")
SUFFIXES = (".png", ".jpg", ".jpeg")
OTHERS = (".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")  # images that are not read


def add(encoded: bytes | Path, gathered: Gathered, what: str) -> None:
    """Decode an image and add it to others.

    Args:
        encoded: its bytes, or the file that has them.
        gathered: the others.
        what: to call it in errors.

    Raises:
        FormatError: no image, a damaged one, or one that does not fit the others.
        SourceNotFound: a file that can't be read.
    """
    try:
        if isinstance(encoded, Path):
            encoded = encoded.read_bytes()
    except OSError as error:
        raise SourceNotFound(what, expected="a file that can be read", found=f"{error.strerror}") from error
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            gathered.picture(image, what)
    except FormatError:
        raise
    except (*UNREADABLE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        kind = what_is(encoded[:512]) if encoded else "an empty file"
        found = kind or ("another file" if isinstance(error, UnidentifiedImageError) else str(error)[:200])
        raise FormatError(what, expected="a PNG or JPEG image", found=found) from error


# Parquet files of encoded images and labels, as `datasets` writes them.


HELD = 256  # encoded images that are held at a time, beside a row group


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
        for images, numbers in _table_batches(path, schema, image, label):
            for encoded in images.to_pylist():
                what = f"row {row:,} of {path}"
                if encoded is None:
                    raise FormatError(what, expected="an image in the file", found="none", path=path)
                add(encoded, gathered, what)
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


def _table_batches(
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
                for batch in file.iter_batches(HELD, [group], names):
                    images = batch.column(image)
                    labels = None if label is None else batch.column(label)
                    yield pc.struct_field(images, "bytes") if nested else images, labels
    except (pa.ArrowException, OSError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"file {path}", expected="rows that can be read", found=found, path=path) from error


def _check_room(needed: int, path: Path) -> None:
    if (free := lacking(needed)) is not None:
        found = f"{needed:,}, by its footer"
        raise TooLargeError(f"a row group of {path}", expected=f"at most {free:,} bytes", found=found, path=path)
