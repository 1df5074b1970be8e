"""What all readers of images share: what is asked for, what was found, and the array that is filled.

Images come one by one or in batches; they are resized and recoloured only where that is asked for.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from checkpoints_zoo.errors import FormatError, SourceNotFound, TooLargeError, UsageError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.networks.device import free_if_short

SPLITS = ("test", "train", "validation", "valid", "val", "eval", "dev")

MOST = 2**26  # pixels of one image
MODES = {1: "L", 3: "RGB"}
FORMATS = ("PNG", "JPEG")
HELD = 256  # encoded images that are held at a time, beside a row group

# What Pillow raises for bytes that are no image, or a damaged one.
UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)  # fmt: skip

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class PixelFormat:
    """What images are made into while they are read.

    Args:
        size: height and width that Pillow resizes them to, bilinearly, its filter as wide as a reduction needs (as
            torchvision's Resize does); None for no resizing.
        channels: 1 for grey (ITU-R 601 luma of coloured ones), 3 for colour (grey ones in three equal channels); None
            for what they have.

    Raises:
        UsageError: something else.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        size: object = self.size
        whole = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        if self.size is not None and not (whole and self.size[0] * self.size[1] <= MOST):
            raise UsageError("size of images", expected="(height, width) in pixels", found=repr(self.size)[:80])
        if self.channels not in (None, *MODES):
            raise UsageError("channels of images", expected="1 (grey) or 3 (colour)", found=repr(self.channels)[:80])

    def __bool__(self) -> bool:
        return self.size is not None or self.channels is not None


@dataclass(frozen=True)
class Columns:
    """Which columns have the images and the labels; None for those that say so themselves."""

    image: str | None = None
    label: str | None = None

    def choose(self, kinds: Mapping[str, str], where: str) -> tuple[str, str | None]:
        """Choose a column of images and one of labels; return their names, None for no labels.

        Args:
            kinds: what each column says it is: "Image", "ClassLabel", or anything else.
            where: what to call the data in errors.

        Raises:
            UsageError: none is said to be it, or several are.
        """
        image = self._one(self.image, "Image", "image", kinds, where)
        if image is None:
            raise UsageError(
                where,
                expected="a column of kind Image, or one called 'image'",
                found=_named(kinds),
                do='Say which it is: `zoo.images.of(…, image="…", label="…")`',
            )
        return image, self._one(self.label, "ClassLabel", "label", kinds, where)

    def _one(self, said: str | None, kind: str, usual: str, kinds: Mapping[str, str], where: str) -> str | None:
        if said is not None:
            if said not in kinds:
                raise UsageError(where, expected=f"a column {said!r}", found=_named(kinds))
            return said
        known = [column for column, of in kinds.items() if of == kind]
        if len(known) > 1:
            raise UsageError(
                where,
                expected=f"one column of kind {kind}",
                found=_named(known),
                do=f'Say which: `zoo.images.of(…, {usual}="{known[0]}")`',
            )
        return known[0] if known else usual if usual in kinds else None


def _named(columns: Iterable[str]) -> str:
    return first_few(list(columns), 12) or "no columns"


def choose_split(there: Iterable[str], wanted: str | None, where: str) -> str:
    """Choose a split of those that a place has; return it: the one wanted, the only one, or "test".

    Args:
        there: their names.
        wanted: None for none in particular.
        where: what to call the place in errors.

    Raises:
        UsageError: it is not there, or none is called "test".
    """
    names = sorted(set(there))
    if wanted is None and len(names) == 1:
        return names[0]
    chosen = "test" if wanted is None else wanted
    if chosen not in names:
        do = f'Give one of them: `split="{names[0]}"`' if wanted is None else ""
        raise UsageError(
            f"split {chosen!r} of {where}", expected=f"one of {', '.join(names)}", found="none such", do=do
        )
    return chosen


@dataclass(frozen=True)
class RawImages:
    """Images as they were read.

    Args:
        images: pixels or inputs, (input, channel, height, width).
        labels: a number or a name each, all -1 or None for none.
        classes: names in the order of the numbers, () where the data does not say.
        split, revision: of the place, "" where it has none.
    """

    images: Tensor
    labels: Sequence[int] | Sequence[str] | None = None
    classes: tuple[str, ...] = ()
    split: str = ""
    revision: str = ""


class Gathered:
    """Images as they come, in one array that grows where more come than were announced.

    Grey images among coloured ones become three equal channels, which loses nothing.

    Args:
        wanted: what they are made into.
        total: how many are announced.
        where: what to call them all in errors.
    """

    def __init__(self, wanted: PixelFormat, total: int, where: str) -> None:
        self.wanted, self.total, self.where = wanted, max(1, total), where
        self.count = 0
        self.array: Array | None = None

    def picture(self, image: Image.Image, what: str) -> None:
        """Add an image of Pillow's, decoded only once its size is known to be right.

        Args:
            image: opened, perhaps not decoded yet.
            what: to call it in errors.

        Raises:
            FormatError: of another size than the others, too large, or of a kind that has no exact pixels here.
        """
        if image.width * image.height > MOST:
            raise FormatError(what, expected=f"at most {MOST:,} pixels", found=f"{image.width} x {image.height}")
        if self.wanted.size is None:
            self._check_size((image.height, image.width), what)
        image = _shown(image, what)
        channels = self.wanted.channels
        if channels is not None and image.mode != MODES[channels]:
            image = image.convert(MODES[channels])
        if self.wanted.size is not None:
            height, width = self.wanted.size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        self._put((pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0))[None], what)

    def arrays(self, images: Array, what: str) -> None:
        """Add images (input, channel, height, width) of one type.

        Raises:
            UsageError: other numbers of channels than 1 and 3 where these are to be changed.
            FormatError: of another size than the others.
        """
        fits = self.wanted.size in (None, images.shape[2:]) and self.wanted.channels in (None, images.shape[1])
        if fits:
            self._put(images, what)
            return
        if images.shape[1] not in MODES:
            found = f"{images.shape[1]}"
            raise UsageError(what, expected="1 or 3 channels, to be resized or recoloured", found=found)
        for image in images:
            self.picture(Image.fromarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, -1).copy()), what)

    def done(self) -> Tensor:
        """Return all images, (input, channel, height, width).

        Raises:
            FormatError: there are none.
        """
        if self.array is None or not self.count:
            raise FormatError(self.where, expected="one image or more", found="none")
        return torch.from_numpy(self.array[: self.count])

    def _check_size(self, size: tuple[int, ...], what: str) -> None:
        if self.array is not None and size != self.array.shape[2:]:
            (height, width), (there_height, there_width) = size, self.array.shape[2:]
            raise FormatError(
                what,
                expected=f"{there_height} x {there_width} pixels (height x width), as the images before it",
                found=f"{height} x {width}",
                do="Give `size=(height, width)` to `zoo.images.of`, which resizes all, or images of one size",
            )

    def _put(self, images: Array, what: str) -> None:
        if 0 in images.shape[1:]:
            raise FormatError(what, expected="a pixel or more", found=f"shape {images.shape[1:]}")
        if self.array is None:
            self.array = self._room(self.total, images.shape[1:], images.dtype)
        self._check_size(images.shape[2:], what)
        if images.shape[1] != self.array.shape[1]:
            if {images.shape[1], self.array.shape[1]} != {1, 3} or self.array.dtype != np.uint8:
                raise FormatError(what, expected=f"{self.array.shape[1]} channels", found=f"{images.shape[1]}")
            if self.array.shape[1] == 1:
                wider = self._room(len(self.array), (3, *self.array.shape[2:]), self.array.dtype)
                wider[: self.count] = self.array[: self.count]
                self.array = wider
        end = self.count + len(images)
        if end > len(self.array):
            longer = self._room(max(end, 2 * len(self.array)), self.array.shape[1:], self.array.dtype)
            longer[: self.count] = self.array[: self.count]
            self.array = longer
        self.array[self.count : end] = images
        self.count = end

    def _room(self, count: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        needed = count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if (free := free_if_short(needed)) is not None:
            raise TooLargeError(
                f"{count:,} images of {self.where}",
                expected=f"at most {free:,} bytes, the memory that is free",
                found=f"{needed:,}",
                do="Give fewer of them, or a smaller `size` to `zoo.images.of`",
            )
        return np.empty((count, *shape), dtype)


def _shown(image: Image.Image, what: str) -> Image.Image:
    """Return an image in mode L or RGB with the pixels that it shows, where these are exact."""
    if image.mode == "1":
        return image.convert("L")
    if image.mode == "P" and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode in ("LA", "RGBA") and image.getchannel("A").getextrema() == (255, 255):
        return image.convert(image.mode[:-1])
    if image.mode not in ("L", "RGB"):
        see_through = image.mode in ("LA", "RGBA", "P", "PA")
        raise FormatError(
            what,
            expected="8-bit grey or RGB pixels",
            found=f"mode {image.mode}{', some of it transparent' if see_through else ''}",
            do="Convert it to RGB first" + (", on the background that it should have" if see_through else ""),
        )
    return image


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
    except UNREADABLE as error:
        kind = guess_kind(encoded[:512]) if encoded else "an empty file"
        found = kind or ("another file" if isinstance(error, UnidentifiedImageError) else str(error)[:200])
        raise FormatError(what, expected="a PNG or JPEG image", found=found) from error


def batches(path: Path, columns: Sequence[str], check: Callable[[int], None] | None = None) -> Iterator[pa.RecordBatch]:
    """Read some columns of a Parquet file, some rows at a time; yield them.

    Args:
        path: of the file.
        columns: names, or paths inside a struct ("image.bytes").
        check: told of the bytes of each row group before it is read.
    """
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):  # told of all, the reader would hold all
            if check is not None:
                check(file.metadata.row_group(group).total_byte_size)
            yield from file.iter_batches(HELD, [group], columns)
