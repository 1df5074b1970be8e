"""Image data by name, as uint8 pixels, and the preprocessing that a collection's members expect.

Axes: images are (input, channel, height, width), labels (input,).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from checkpoints_zoo.errors import FormatError, UsageError


@dataclass(frozen=True, eq=False)
class ImageData:
    """One split of a data set.

    Args:
        name, split: what it is ("digits", "test").
        images: uint8 pixels in 0..255, (input, channel, height, width), for every data set.
        labels: int64 positions in `classes`, (input,), or None where there are none.
        classes: class names, in the order of the labels.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 over shape, pixels, labels and class names."""
        labelled = self.labels is not None
        facts = {"shape": list(self.images.shape), "labelled": labelled, "classes": list(self.classes)}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.images.cpu().contiguous().numpy().tobytes())
        if self.labels is not None:
            digest.update(self.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def load(name: str, split: str = "test") -> ImageData:
    """Load one split of a named data set; the same bytes every time.

    Args:
        name: a key of `DATASETS`.
        split: "test" or "train" ("photos" has only "test").

    Raises:
        UsageError: no data set, or no split, of that name.

    >>> load("digits").images.shape
    torch.Size([540, 1, 8, 8])
    """
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"data set {name!r}",
            expected=f"one of {', '.join(DATASETS)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest!r}",
        )
    splits = DATASETS[name]()
    if split not in splits:
        raise UsageError(f"split of data set {name!r}", expected=f"one of {', '.join(splits)}", found=repr(split))
    return splits[split]


def _digits() -> dict[str, ImageData]:
    """Give scikit-learn's handwritten digits, split by the rule "digits-sha256-540".

    The rule: images ranked by the sha256 of "digits-test|<index>"; the first 540 are the test set and the
    rest, in rank order too, the training set. It was fixed before anything was trained.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = _rank("digits-test", len(digits.target))
    # Pixels are 0..16; in integers, round(k * 255 / 16).
    pixels = torch.from_numpy((digits.images[order].astype(np.int64) * 255 + 8) // 16).to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target[order].astype(np.int64))
    classes = tuple("0123456789")
    return {
        "test": ImageData("digits", "test", pixels[:540], labels[:540], classes),
        "train": ImageData("digits", "train", pixels[540:], labels[540:], classes),
    }


def _photos() -> dict[str, ImageData]:
    """Give 8x8 grey patches of scikit-learn's two photographs, 1,000 of each, without labels.

    The patches of a photograph are numbered row by row and ranked by the sha256 of "photos|<file>|<index>".
    """
    from sklearn.datasets import load_sample_image

    patches = []
    for file in ("china.jpg", "flower.jpg"):
        red, green, blue = np.moveaxis(load_sample_image(file).astype(np.int64), -1, 0)
        # ITU-R 601 luma in 16-bit fixed point, as Pillow's mode "L".
        grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
        tiles = grey[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).swapaxes(1, 2).reshape(-1, 1, 8, 8)
        patches.append(tiles[_rank(f"photos|{file}", len(tiles))[:1000]].astype(np.uint8))
    return {"test": ImageData("photos", "test", torch.from_numpy(np.concatenate(patches)))}


def _rank(rule: str, count: int) -> list[int]:
    """Give the positions 0..count-1 in the order of the sha256 of "<rule>|<position>"."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{rule}|{index}".encode()).hexdigest())


DATASETS: dict[str, Callable[[], dict[str, ImageData]]] = {
    "digits": _digits,
    "photos": _photos,
}


@dataclass(frozen=True)
class Preprocess:
    """What turns pixels into the input of a collection's members.

    Args:
        size: height and width that the members expect, pixels.
        channels: number of channels.
        mean, std: a number a channel, on the scale where 0 is black and 1 is white.

    Raises:
        UsageError: a size, channel count or statistic that makes no sense.

    >>> preprocess = Preprocess(size=(1, 2), channels=1, mean=(0.5,), std=(0.5,))
    >>> preprocess(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-1.,  1.]]]])
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for thing, expected, found, fits in (
            ("size", "a height and a width of at least 1", self.size, _counts(self.size, 2)),
            ("channels", "a number of at least 1", self.channels, _counts((self.channels,), 1)),
            ("mean", "a finite number a channel", self.mean, _numbers(self.mean, self.channels)),
            (
                "std",
                "a finite number above 0 a channel",
                self.std,
                _numbers(self.std, self.channels) and min(self.std) > 0,
            ),
        ):
            if not fits:
                raise UsageError(f"preprocess {thing}", expected=expected, found=repr(found))

    def __call__(self, images: Tensor | npt.NDArray[np.uint8]) -> Tensor:
        """Normalise pixels, and return them as float32 on the same device.

        Args:
            images: uint8 pixels in 0..255, (batch, channel, height, width).

        Raises:
            UsageError: images of another type or shape; nothing is guessed from their values.
        """
        if images.dtype not in (torch.uint8, np.dtype(np.uint8)):
            raise UsageError(
                "images",
                expected="uint8 pixels in 0..255",
                found=f"{type(images).__module__}.{type(images).__name__} of {images.dtype}",
                do="Give the pixels as they are; preprocess scales and normalises them",
            )
        if len(images.shape) != 4 or tuple(images.shape[1:]) != (self.channels, *self.size):
            raise UsageError(
                "images",
                expected=f"shape (batch, {self.channels}, {self.size[0]}, {self.size[1]}),"
                " axes (batch, channel, height, width)",
                found=f"shape ({', '.join(map(str, images.shape))})",
                do="Resize or crop the images, and add a batch axis to a single one",
            )
        pixels = images if isinstance(images, Tensor) else torch.from_numpy(images.copy())
        mean, std = (
            torch.tensor(numbers, dtype=torch.float32, device=pixels.device)[:, None, None]
            for numbers in (self.mean, self.std)
        )
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)

    def to_json(self) -> dict[str, Any]:
        """Give the fields as a dict that JSON can hold."""
        return {
            "size": list(self.size),
            "channels": self.channels,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    @classmethod
    def from_json(cls, fields: object) -> Preprocess:
        """Read what `to_json` gave; the fields come from a file and are checked, never trusted.

        Raises:
            FormatError: fields missing, unknown, or of the wrong kind.

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


def _counts(values: tuple[Any, ...], length: int) -> bool:
    return len(values) == length and all(type(value) is int and value >= 1 for value in values)


def _numbers(values: tuple[Any, ...], length: int) -> bool:
    return len(values) == length and all(type(value) in (int, float) and math.isfinite(value) for value in values)
