"""Labels in the order of a collection's logits, where the names of the classes tell how."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from checkpoints_zoo.images.image_data import ImageData

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPELLED: Mapping[str, str] = MappingProxyType(
    {
        "cra": "crab",  # uoft-cs/cifar100 on the Hub
        **{f"{digit} - {word}": str(digit) for digit, word in enumerate(_DIGITS)},  # torchvision.datasets.MNIST
    }
)
"""What others call a class that we call otherwise, beside capitals, spaces, hyphens and underscores."""


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
    positions = places(data.classes, classes)
    if positions is None:
        return data
    return replace(data, labels=torch.tensor(positions)[data.labels], classes=tuple(classes))


def places(names: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """Find each of some names among classes; return the positions, None where a name has none or shares one.

    >>> places(("Pickup truck", "apple"), ("apple", "pickup_truck", "rose"))
    [1, 0]
    """
    missing, found = unplaced(names, classes)
    return found if names and not missing else None


def unplaced(names: Sequence[str], classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Look each of some names up among classes; return the names without a place of their own, and the others' places.

    Args:
        names: of classes that occur.
        classes: names to find them among.
    """
    exact = {name: at for at, name in enumerate(classes)}
    plain = {_plain(name): at for at, name in enumerate(classes)}
    if len(plain) < len(classes) or len({_plain(name) for name in names}) < len(names):
        plain = {}  # EMNIST's "A" and "a": only as they are written
    spelled = {_plain(theirs): _plain(ours) for theirs, ours in SPELLED.items()}
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
