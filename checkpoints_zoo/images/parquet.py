"""Reading of images and labels from the rows of Parquet files, whose columns are as the package `datasets` writes
them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from checkpoints_zoo.errors import FormatError, TooLargeError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.images.reading import ImageBuffer
from checkpoints_zoo.networks.device import free_if_short

ROWS_AT_ONCE = 256  # Number of rows decoded at once; their whole row group is in memory as well.


def read_footer(path: Path, data_name: str) -> tuple[pa.Schema, int]:
    """Read the footer of a Parquet file; return its columns and its number of rows.

    Raises:
        FormatError: the file is not a Parquet file.
    """
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        str(schema)  # Column names may be bytes that are no valid text.
        return schema, metadata.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = _file_kind(path) or f"{type(error).__name__}: {error}"[:200]
        name = _file_name_in_errors(path, data_name)
        raise FormatError(name, expected="a Parquet file", found=found, path=path) from error


def _file_kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return guess_kind(file.read(512))
    except OSError:
        return ""


def _file_name_in_errors(path: Path, data_name: str) -> str:
    """Return a name for a file in error texts: the file's name, and the name of the data that the file belongs to."""
    return data_name if data_name.endswith(path.name) else f"{path.name} of {data_name}"


def features_of(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return column -> feature, as `datasets` writes them into a file's metadata; {} if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    pairs = features.items() if isinstance(features, Mapping) else ()
    return {column: feature for column, feature in pairs if isinstance(feature, dict)}


def read_rows(
    paths: Sequence[Path], image_column: str, label_column: str | None, buffer: ImageBuffer
) -> list[Any] | None:
    """Decode the images of Parquet files, in order, into a buffer; return their labels, None if there is no column of
    labels.

    Pixels are the same as those from the package `datasets`: images are rotated as their EXIF orientation says, and
    converted to the mode of the column's feature. Memory is needed for all pixels, and for one row group of encoded
    images.

    Args:
        paths: paths of the files.
        image_column, label_column: columns.
        buffer: buffer that receives the images; its `data_name` is the name of the data in error texts.

    Raises:
        FormatError: a column has another type, a row has no image, or the buffer refuses an image.
        TooLargeError: a row group or the pixels do not fit into memory.
    """
    labels: list[Any] = []
    for path in paths:
        name, row = _file_name_in_errors(path, buffer.data_name), 0
        mode = features_of(read_footer(path, name)[0]).get(image_column, {}).get("mode")
        if mode is not None and mode not in Image.MODES:
            found = repr(mode)[:80]
            raise FormatError(f"column {image_column!r} of {name}", expected="a mode of Pillow's images", found=found)
        for images, label_batch in _read_batches(path, image_column, label_column, buffer.data_name):
            for encoded in images.to_pylist():
                if encoded is None:
                    raise FormatError(
                        f"row {row:,} of {name}", expected="an image in the file", found="none", path=path
                    )
                buffer.add_encoded(encoded, f"row {row:,} of {name}", upright=True, mode=mode)
                row += 1
            labels += [] if label_batch is None else label_batch.to_pylist()
    return None if label_column is None else labels


def _read_batches(
    path: Path, image_column: str, label_column: str | None, data_name: str
) -> Iterator[tuple[pa.Array, pa.Array | None]]:
    """Yield the encoded images and the labels of batches of rows."""
    schema, name = read_footer(path, data_name)[0], _file_name_in_errors(path, data_name)
    label_columns = [] if label_column is None else [label_column]
    for column in (image_column, *label_columns):
        if column not in schema.names:
            raise FormatError(name, expected=f"a column {column!r}", found=", ".join(schema.names)[:200])
    image_type = schema.field(image_column).type
    is_struct = pa.types.is_struct(image_type) and "bytes" in image_type.names
    bytes_type = image_type.field("bytes").type if is_struct else image_type
    if not (pa.types.is_binary(bytes_type) or pa.types.is_large_binary(bytes_type)):
        raise FormatError(f"column {image_column!r} of {name}", expected="encoded images", found=str(image_type)[:200])
    for column in label_columns:
        label_type = schema.field(column).type
        label_type = label_type.value_type if pa.types.is_dictionary(label_type) else label_type
        if not any(
            is_type(label_type) for is_type in (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)
        ):
            found = str(label_type)[:200]
            raise FormatError(f"column {column!r} of {name}", expected="whole numbers or names", found=found)
    columns = [f"{image_column}.bytes" if is_struct else image_column, *label_columns]
    try:
        with pq.ParquetFile(path) as file:
            # Groups are read one by one, because pyarrow would hold all of them in memory.
            for row_group in range(file.num_row_groups):
                _check_memory(file.metadata.row_group(row_group).total_byte_size, name)
                for batch in file.iter_batches(ROWS_AT_ONCE, [row_group], columns):
                    images = batch.column(image_column)
                    yield (
                        pc.struct_field(images, "bytes") if is_struct else images,
                        None if label_column is None else batch.column(label_column),
                    )
    except (pa.ArrowException, OSError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(name, expected="rows that can be read", found=found, path=path) from error


def _check_memory(row_group_bytes: int, file_name: str) -> None:
    if (free_memory := free_if_short(row_group_bytes)) is not None:
        found = f"{row_group_bytes:,}, by the file's footer"
        raise TooLargeError(f"a row group of {file_name}", expected=f"at most {free_memory:,} bytes", found=found)
