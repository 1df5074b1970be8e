"""One split of a data set in memory, and its labels in the order of a collection's logits."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images.preprocess import Preprocess

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OTHER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "cra": "crab",  # uoft-cs/cifar100 on the Hub
        **{f"{digit} - {word}": str(digit) for digit, word in enumerate(_DIGITS)},  # torchvision.datasets.MNIST
    }
)
"""What others call a class that we call otherwise, beside capitals, spaces, hyphens and underscores."""


@dataclass(frozen=True, eq=False)
class ImageData:
    """One split of a data set.

    Args:
        name, split: what it is ("digits", "test").
        images: uint8 pixels in 0..255, (input, channel, height, width), for every data set.
        labels: int64 positions in `classes`, (input,), or None where there are none.
        classes: class names, in the order of the labels.
        revision: commit of the repo on the Hub that it was read from; "" for what comes with the package.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    revision: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def _facts(self) -> dict[str, Any]:
        labelled = self.labels is not None
        return {"shape": list(self.images.shape), "labelled": labelled, "classes": list(self.classes)}

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 over shape, pixels, labels and class names."""
        digest = hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Turn some of the images into what members take; return float32 inputs (batch, channel, height, width).

        Args:
            some: of `images`.
            preprocess: of the members.

        Raises:
            UsageError: images of a size or with channels that the members can't take.
        """
        self._check(some, preprocess, "images")
        return preprocess(some)

    def _check(self, some: Tensor, preprocess: Preprocess, what: str) -> None:
        wanted, found = (preprocess.channels, *preprocess.size), tuple(some.shape[1:])
        if found == wanted:
            return
        do = f"`zoo.images.of(…, size={preprocess.size}, channels={wanted[0]})` makes them fit"
        if found == (*preprocess.size, preprocess.channels):
            do = f"`zoo.images.{'of' if what == 'images' else 'prepared'}(…, channels_last=True)` says so"
        elif what != "images":
            do = "Prepare them as the members want them"
        raise UsageError(
            f"{what} {self.name!r}",
            expected=f"shape (input, {', '.join(map(str, wanted))}), axes (input, channel, height, width)",
            found=f"shape (input, {', '.join(map(str, found))})",
            do=do,
        )


@dataclass(frozen=True, eq=False)
class Prepared(ImageData):
    """One split of a data set whose images are preprocessed already: members take them as they are.

    Args:
        images: float32 inputs of members, (input, channel, height, width).
        name, split, labels, classes, revision: as of `ImageData`. The fingerprint is over the float32 values.
    """

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "dtype": "float32"}

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Return some of the inputs as they are, once their shape is known to fit."""
        self._check(some, preprocess, "inputs")
        return some


def in_order(data: ImageData, classes: Sequence[str]) -> ImageData:
    """Number labels by their positions among given classes; return them so, or the same images where names don't tell.

    The images may have some of the classes, in any order. Their names may differ in capitals, spaces, hyphens and
    underscores, as long as no two are alike.

    Args:
        data: images, with labels or without.
        classes: names, in the order that is wanted.

    >>> from checkpoints_zoo.images import load
    >>> digits = load("digits")
    >>> moved = in_order(digits, tuple("9876543210"))
    >>> int(digits.labels[0] + moved.labels[0])
    9
    """
    if data.labels is None or tuple(data.classes) == tuple(classes):
        return data
    positions = class_positions(data.classes, classes)
    if positions is None:
        return data
    return replace(data, labels=torch.tensor(positions)[data.labels], classes=tuple(classes))


def class_positions(names: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """Find each of some names among classes; return the positions, None where a name has none or shares one.

    >>> class_positions(("Pickup truck", "apple"), ("apple", "pickup_truck", "rose"))
    [1, 0]
    """
    missing, found = match_classes(names, classes)
    return found if names and not missing else None


def match_classes(names: Sequence[str], classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Look each of some names up among classes; return the names without a place of their own, and the others' places.

    Args:
        names: of classes that occur.
        classes: names to find them among.
    """
    exact = {name: at for at, name in enumerate(classes)}
    plain = {_plain(name): at for at, name in enumerate(classes)}
    if len(plain) < len(classes) or len({_plain(name) for name in names}) < len(names):
        plain = {}  # EMNIST's "A" and "a": only as they are written
    spelled = {_plain(theirs): _plain(ours) for theirs, ours in OTHER_SPELLINGS.items()}
    found = []
    for name in names:
        short = _plain(name)
        found.append(exact.get(name, plain.get(short, plain.get(spelled.get(short, ""), -1))))
    missing = [name for name, at in zip(names, found, strict=True) if at < 0 or found.count(at) > 1]
    return missing, found


def _plain(name: str) -> str:
    """Return a name in small letters, without spaces, hyphens and underscores."""
    letters = unicodedata.normalize("NFC", name).casefold()
    return "".join(letter for letter in letters if not letter.isspace() and letter not in "-_")
