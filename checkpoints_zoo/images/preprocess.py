"""The preprocessing of a collection, which turns pixels into inputs of its members."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from checkpoints_zoo.errors import FormatError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Images = TypeVar("Images", "Tensor", npt.NDArray[np.uint8])


@dataclass(frozen=True)
class Preprocess:
    """A function that turns pixels into inputs of a collection's members.

    Args:
        size: height and width in pixels.
        channels: number of channels.
        mean, std: mean and standard deviation of each channel, on a scale from 0 (black) to 1 (white).

    Raises:
        UsageError: the size, number of channels, mean or standard deviation is not possible.

    >>> import torch
    >>> preprocess = Preprocess(size=(1, 2), channels=1, mean=(0.5,), std=(0.5,))
    >>> preprocess(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-1.,  1.]]]])
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for thing, expected, found, is_valid in (
            ("size", "a height and a width of at least 1", self.size, _are_counts(self.size, 2)),
            ("channels", "a number of at least 1", self.channels, _are_counts((self.channels,), 1)),
            ("mean", "a finite number for each channel", self.mean, _are_numbers(self.mean, self.channels)),
            (
                "std",
                "a finite number above 0 for each channel",
                self.std,
                _are_numbers(self.std, self.channels) and min(self.std) > 0,
            ),
        ):
            if not is_valid:
                raise UsageError(f"preprocess {thing}", expected=expected, found=repr(found))

    def __call__(self, images: Tensor | npt.NDArray[np.uint8]) -> Tensor:
        """Normalise pixels, and return them as float32 on the same device.

        Args:
            images: uint8 pixels in 0..255, (batch, channel, height, width).

        Raises:
            UsageError: the images have another type or shape. The type and scale of pixels are never guessed from their
                values.
        """
        import torch

        pixels = images if isinstance(images, torch.Tensor) else torch.from_numpy(self._check_pixels(images).copy())
        return self.on(pixels.device)(pixels)

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Copy mean and std to a device; return a function that normalises pixels there.

        Use the returned function in loops: calling this object itself copies mean and std each time, and waits for the
            device.

        Args:
            device: device of the pixels.
        """
        import torch

        mean, std = (
            torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]
            for numbers in (self.mean, self.std)
        )

        def normalise(images: Tensor) -> Tensor:
            return self._check_pixels(images).to(torch.float32).div_(255).sub_(mean).div_(std)

        return normalise

    def _check_pixels(self, images: Images) -> Images:
        """Check the type and shape of images; return the images."""
        if str(images.dtype) not in ("torch.uint8", "uint8"):
            raise UsageError(
                "images",
                expected="uint8 pixels in 0..255",
                found=f"{type(images).__module__}.{type(images).__name__} of {images.dtype}",
                do="Give the pixels unchanged; preprocess scales and normalises them",
            )
        if len(images.shape) != 4 or tuple(images.shape[1:]) != (self.channels, *self.size):
            raise UsageError(
                "images",
                expected=f"shape (batch, {self.channels}, {self.size[0]}, {self.size[1]}),"
                " axes (batch, channel, height, width)",
                found=f"shape ({', '.join(map(str, images.shape))})",
                do="Resize or crop the images, and add a batch axis to a single one",
            )
        return images

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values."""
        return {
            "size": list(self.size),
            "channels": self.channels,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    @classmethod
    def from_json(cls, fields: object) -> Preprocess:
        """Make a preprocessing from the fields of a file, as `to_json` returns them; check the fields, and return the
        preprocessing.

        Raises:
            FormatError: a field is missing, unknown, or has a wrong type.

        >>> Preprocess.from_json({"size": [8, 8], "channels": 1, "mean": [0.3], "std": [0.4]})
        Preprocess(size=(8, 8), channels=1, mean=(0.3,), std=(0.4,))
        """
        names = ("size", "channels", "mean", "std")
        if not isinstance(fields, Mapping) or set(fields) != set(names):
            found = sorted(map(str, fields)) if isinstance(fields, Mapping) else [type(fields).__name__]
            raise FormatError("preprocess", expected=f"the fields {', '.join(names)}", found=", ".join(found))
        for name in ("size", "mean", "std"):
            if not isinstance(fields[name], (list, tuple)):
                raise FormatError(f"preprocess {name}", expected="a list", found=repr(fields[name]))
        try:
            return cls(
                size=tuple(fields["size"]),
                channels=fields["channels"],
                mean=tuple(fields["mean"]),
                std=tuple(fields["std"]),
            )
        except UsageError as error:
            raise FormatError(error.thing, expected=error.expected, found=error.found) from error


def _are_counts(values: tuple[Any, ...], length: int) -> bool:
    return _has_length(values, length) and all(type(value) is int and value >= 1 for value in values)


def _are_numbers(values: tuple[Any, ...], length: int) -> bool:
    return _has_length(values, length) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _has_length(values: Any, length: int) -> bool:
    return isinstance(values, tuple | list) and len(values) == length
