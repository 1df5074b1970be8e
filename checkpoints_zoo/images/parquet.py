"""Parquet files with encoded images, decoded into one array.

What the files hold is checked before and while it is decoded: columns and their kinds, class names in order, sizes and
modes of the images, labels.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoints_zoo.errors import FormatError
from checkpoints_zoo.images.hub_sets import HubSet

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
