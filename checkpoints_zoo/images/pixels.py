"""Images that come one by one, put into one array; resized and recoloured only where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from checkpoints_zoo.errors import FormatError, TooLargeError, UsageError
from checkpoints_zoo.networks.device import lacking

MOST = 2**26  # pixels of one image
MODES = {1: "L", 3: "RGB"}
Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Wanted:
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


class Gathered:
    """Images as they come, in one array that grows where more come than were announced.

    Grey images among coloured ones become three equal channels, which loses nothing.

    Args:
        wanted: what they are made into.
        total: how many are announced.
        where: what to call them all in errors.
    """

    def __init__(self, wanted: Wanted, total: int, where: str) -> None:
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
        if (free := lacking(needed)) is not None:
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
