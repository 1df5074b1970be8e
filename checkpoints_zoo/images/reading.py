"""Parts that all readers of images share: the requested pixel format, the choice of columns and splits, and the pixel
buffer.

Images arrive one by one or in batches; they are resized or recoloured only on request.

This is one file, because the buffer takes the format and the columns from the other parts.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor

from checkpoints_zoo.errors import FormatError, SourceNotFound, TooLargeError, UsageError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.networks.device import free_if_short

SPLIT_NAMES = ("test", "train", "validation", "valid", "val", "eval", "dev")

MAX_PIXELS = 2**26  # Largest number of pixels of one image.
MODE_OF_CHANNELS = {1: "L", 3: "RGB"}
IMAGE_FORMATS = ("PNG", "JPEG")

# Errors that Pillow raises for bytes that are no image, or a damaged image.
DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)  # fmt: skip

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class PixelFormat:
    """The size and channels to which images are converted while they are read.

    Args:
        size: height and width to which Pillow resizes images, bilinearly and with antialiasing (as torchvision's Resize
            does); None for no resizing.
        channels: number of channels: 1 for grey (ITU-R 601 luma of coloured images), 3 for colour (grey images in three
            equal channels); None to keep the channels.

    Raises:
        UsageError: the size or the number of channels is not possible.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        size: object = self.size
        is_pair_of_counts = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        if self.size is not None and not (is_pair_of_counts and self.size[0] * self.size[1] <= MAX_PIXELS):
            raise UsageError("size of images", expected="(height, width) in pixels", found=repr(self.size)[:80])
        if self.channels not in (None, *MODE_OF_CHANNELS):
            raise UsageError("channels of images", expected="1 (grey) or 3 (colour)", found=repr(self.channels)[:80])

    def __bool__(self) -> bool:
        return self.size is not None or self.channels is not None


@dataclass(frozen=True)
class Columns:
    """The names of the requested columns of images and labels; None to find the columns by their kind or name."""

    image: str | None = None
    label: str | None = None

    def choose_columns(self, column_kinds: Mapping[str, str], data_name: str) -> tuple[str, str | None]:
        """Choose a column of images and a column of labels; return the names of both columns, None for no labels.

        Args:
            column_kinds: column name -> kind as the data says it: "Image", "ClassLabel", or anything else.
            data_name: the data's name in errors.

        Raises:
            UsageError: there is no column of the right kind, or there are several such columns.
        """
        image = self._choose_column(self.image, "Image", "image", column_kinds, data_name)
        if image is None:
            raise UsageError(
                data_name,
                expected="a column of kind Image, or one called 'image'",
                found=_columns_text(column_kinds),
                do='Name the columns: `zoo.images.of(…, image="…", label="…")`',
            )
        return image, self._choose_column(self.label, "ClassLabel", "label", column_kinds, data_name)

    def _choose_column(
        self,
        column_name: str | None,
        required_kind: str,
        default_name: str,
        column_kinds: Mapping[str, str],
        data_name: str,
    ) -> str | None:
        if column_name is not None:
            if column_name not in column_kinds:
                raise UsageError(data_name, expected=f"a column {column_name!r}", found=_columns_text(column_kinds))
            return column_name
        columns_of_kind = [column for column, column_kind in column_kinds.items() if column_kind == required_kind]
        if len(columns_of_kind) > 1:
            raise UsageError(
                data_name,
                expected=f"one column of kind {required_kind}",
                found=_columns_text(columns_of_kind),
                do=f'Choose one: `zoo.images.of(…, {default_name}="{columns_of_kind[0]}")`',
            )
        return columns_of_kind[0] if columns_of_kind else default_name if default_name in column_kinds else None


def _columns_text(columns: Iterable[str]) -> str:
    return first_few(list(columns), 12) or "no columns"


def choose_split(splits: Iterable[str], requested_split: str | None, data_name: str) -> str:
    """Return the requested split of a place; without a request, return the only split, or "test".

    Args:
        splits: names of the splits of the images.
        requested_split: name of the requested split, or None.
        data_name: name of the data in error texts.

    Raises:
        UsageError: there is no split of the requested name, or several splits and no split called "test".
    """
    names = sorted(set(splits))
    if requested_split is None and len(names) == 1:
        return names[0]
    chosen = "test" if requested_split is None else requested_split
    if chosen not in names:
        do = f'Choose one: `split="{names[0]}"`' if requested_split is None else ""
        raise UsageError(
            f"split {chosen!r} of {data_name}", expected=f"one of {', '.join(names)}", found="none such", do=do
        )
    return chosen


@dataclass(frozen=True)
class RawImages:
    """Images and labels as they were read, before labels and classes are checked.

    Args:
        images: pixels or inputs, (input, channel, height, width).
        labels: a number or a class name for each image; None, or all -1, for no labels.
        classes: class names in the order of the numbers, () if the data has none.
        split, revision: split and revision of the place; "" if it has none.
    """

    images: Tensor
    labels: Sequence[int] | Sequence[str] | None = None
    classes: tuple[str, ...] = ()
    split: str = ""
    revision: str = ""


class ImageBuffer:
    """A buffer that collects images in one array, which grows if more images arrive than were announced.

    Grey images among coloured images get three equal channels, so that all pixel values stay exact.

    Args:
        pixel_format: the size and channels to which images are converted.
        announced_count: announced number of images.
        data_name: name of the images in error texts.
        shape: (channels, height, width) that every image must have; None for the first image's size.
        allowed_modes: Pillow's modes that images may have, () for all modes that have exact pixels.
    """

    def __init__(
        self,
        pixel_format: PixelFormat,
        announced_count: int,
        data_name: str,
        shape: tuple[int, int, int] | None = None,
        allowed_modes: tuple[str, ...] = (),
    ) -> None:
        self.pixel_format, self.total, self.data_name = pixel_format, max(1, announced_count), data_name
        self.modes, self.count = allowed_modes, 0
        self.array: Array | None = None if shape is None else self._allocate(self.total, shape, np.dtype(np.uint8))

    def add_picture(self, image: Image.Image, image_name: str, upright: bool = False, mode: str | None = None) -> None:
        """Add a Pillow image to the buffer; its size is checked before it is decoded.

        Args:
            image: an opened Pillow image, which may not be decoded yet.
            image_name: name of the image in error texts.
            upright: whether to rotate the image as its EXIF orientation says.
            mode: Pillow's mode to which the image is converted; None for no conversion.

        Raises:
            FormatError: the image has another size, is too large, or has a mode without exact 8-bit pixels.
        """
        with _refuse_damaged_images():
            self._add_picture(image, image_name, upright, mode)

    def _add_picture(self, image: Image.Image, image_name: str, upright: bool, mode: str | None) -> None:
        if image.width * image.height > MAX_PIXELS:
            raise FormatError(
                image_name, expected=f"at most {MAX_PIXELS:,} pixels", found=f"{image.width} x {image.height}"
            )
        # Pillow would cut the 16-bit pixels to 8 bits.
        if any("16" in str(tile[3]) for tile in getattr(image, "tile", ())):
            do = "Convert it to 8 bits first"
            raise FormatError(image_name, expected="8-bit grey or RGB pixels", found="16 bits a channel", do=do)
        orientation = image.getexif().get(ExifTags.Base.Orientation) if upright else None
        if self.pixel_format.size is None:
            size = image.height, image.width
            self._check_size(size[::-1] if orientation in (5, 6, 7, 8) else size, image_name)
        if self.modes and image.mode not in self.modes:
            raise FormatError(image_name, expected=f"mode {' or '.join(self.modes)}", found=image.mode)
        if orientation is not None:
            image = ImageOps.exif_transpose(image)
        if mode is not None and image.mode != mode:
            image = image.convert(mode)
        image = _to_grey_or_rgb(image, image_name)
        channels = self.pixel_format.channels
        if channels is not None and image.mode != MODE_OF_CHANNELS[channels]:
            image = image.convert(MODE_OF_CHANNELS[channels])
        if self.pixel_format.size is not None:
            height, width = self.pixel_format.size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        self._append_images((pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0))[None], image_name)

    def add_encoded(
        self, encoded: bytes | Path, image_name: str, upright: bool = False, mode: str | None = None
    ) -> None:
        """Decode an image and add it to the buffer.

        Args:
            encoded: the bytes of a PNG or JPEG file, or the file's path.
            image_name, upright, mode: the same arguments as in `add_picture`.

        Raises:
            FormatError: the bytes are no image or a damaged image, or `add_picture` refuses the image.
            SourceNotFound: the file can't be read.
        """
        try:
            if isinstance(encoded, Path):
                encoded = encoded.read_bytes()
        except OSError as error:
            raise SourceNotFound(image_name, expected="a file that can be read", found=f"{error.strerror}") from error
        try:
            with _refuse_damaged_images(), Image.open(io.BytesIO(encoded), formats=IMAGE_FORMATS) as image:
                self.add_picture(image, image_name, upright, mode)
        except FormatError:
            raise
        except DECODE_ERRORS as error:
            kind = guess_kind(encoded[:512]) if encoded else "an empty file"
            found = kind or ("another file" if isinstance(error, UnidentifiedImageError) else str(error)[:200])
            raise FormatError(image_name, expected="a PNG or JPEG image", found=found) from error

    def add_arrays(self, images: Array, image_name: str) -> None:
        """Add an array of images (input, channel, height, width) to the buffer.

        Raises:
            UsageError: images should be resized or recoloured but have other channels than 1 or 3.
            FormatError: the images have another size than earlier images.
        """
        has_requested_format = self.pixel_format.size in (None, images.shape[2:]) and self.pixel_format.channels in (
            None,
            images.shape[1],
        )
        if has_requested_format:
            self._append_images(images, image_name)
            return
        if images.shape[1] not in MODE_OF_CHANNELS:
            found = f"{images.shape[1]}"
            raise UsageError(image_name, expected="1 or 3 channels, to be resized or recoloured", found=found)
        for image in images:
            self.add_picture(
                Image.fromarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, -1).copy()), image_name
            )

    def finish(self) -> Tensor:
        """Return all images of the buffer, (input, channel, height, width).

        Raises:
            FormatError: there are no images.
        """
        if self.array is None or not self.count:
            raise FormatError(self.data_name, expected="one image or more", found="none")
        return torch.from_numpy(self.array[: self.count])

    def _check_size(self, image_size: tuple[int, ...], image_name: str) -> None:
        if self.array is not None and image_size != self.array.shape[2:]:
            (height, width), (expected_height, expected_width) = image_size, self.array.shape[2:]
            others = ", as the images before it" if self.count else ""
            raise FormatError(
                image_name,
                expected=f"{expected_height} x {expected_width} pixels (height x width){others}",
                found=f"{height} x {width}",
                do="Give images of one size, or `size=(height, width)` to `zoo.images.of`, which resizes them",
            )

    def _append_images(self, images: Array, image_name: str) -> None:
        if 0 in images.shape[1:]:
            raise FormatError(image_name, expected="a pixel or more", found=f"shape {images.shape[1:]}")
        if self.array is None:
            self.array = self._allocate(self.total, images.shape[1:], images.dtype)
        self._check_size(images.shape[2:], image_name)
        if images.shape[1] != self.array.shape[1]:
            if {images.shape[1], self.array.shape[1]} != {1, 3} or self.array.dtype != np.uint8:
                raise FormatError(image_name, expected=f"{self.array.shape[1]} channels", found=f"{images.shape[1]}")
            if self.array.shape[1] == 1:
                wider_array = self._allocate(len(self.array), (3, *self.array.shape[2:]), self.array.dtype)
                wider_array[: self.count] = self.array[: self.count]
                self.array = wider_array
        end = self.count + len(images)
        if end > len(self.array):
            longer_array = self._allocate(max(end, 2 * len(self.array)), self.array.shape[1:], self.array.dtype)
            longer_array[: self.count] = self.array[: self.count]
            self.array = longer_array
        self.array[self.count : end] = images
        self.count = end

    def _allocate(self, image_count: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        needed = image_count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if (free := free_if_short(needed)) is not None:
            raise TooLargeError(
                f"{image_count:,} images of {self.data_name}",
                expected=f"at most {free:,} bytes, the memory that is free",
                found=f"{needed:,}",
                do="Give fewer of them, or a smaller `size` to `zoo.images.of`",
            )
        return np.empty((image_count, *shape), dtype)


@contextmanager
def _refuse_damaged_images() -> Iterator[None]:
    """Make Pillow refuse damaged images while the `with` block runs, even if the process has told it to accept them."""
    previous_setting, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = previous_setting


def _to_grey_or_rgb(image: Image.Image, image_name: str) -> Image.Image:
    """Return an image in mode L or RGB with the same pixels; refuse modes that have no exact equivalent in L or RGB."""
    if image.mode == "1":
        return image.convert("L")
    if image.mode == "P" and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema() == (255, 255):
        return image.convert(image.mode[:-1])
    if image.mode not in ("L", "RGB"):
        may_be_transparent = image.mode in ("LA", "RGBA", "P", "PA")
        raise FormatError(
            image_name,
            expected="8-bit grey or RGB pixels",
            found=f"mode {image.mode}{', some of it transparent' if may_be_transparent else ''}",
            do="Convert it to RGB first" + (", on a background of your choice" if may_be_transparent else ""),
        )
    return image
