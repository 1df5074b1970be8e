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
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.images.preprocess import Preprocess

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
OTHER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "cra": "crab",  # The repo uoft-cs/cifar100 on the Hub writes "cra".
        # The classes of torchvision.datasets.MNIST are called "0 - zero" to "9 - nine".
        **{f"{digit} - {word}": str(digit) for digit, word in enumerate(_DIGITS)},
    }
)
"""Other spellings of class names -> our name. Case, spaces, hyphens and underscores are ignored anyway."""


@dataclass(frozen=True, eq=False, repr=False)
class ImageData(PrintedResult):
    """One split of a data set.

    Args:
        name, split: name of the data set ("digits") and of the split ("test").
        images: uint8 pixels in 0..255, (input, channel, height, width).
        labels: int64 labels as positions in `classes`, (input,); None if there are no labels.
        classes: class names, in the order of the labels.
        revision: commit of the repo on the Hub from which the images were read; "" for data that comes with the
            package.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    revision: str = ""

    def _one_line(self) -> str:
        inputs = " × ".join(f"{size:,}" for size in self.images.shape)
        labels = f"{len(self.classes)} classes" if self.labels is not None else "no labels"
        return f"{self.name!r}, {self.split!r}, {inputs}, {labels}"

    def to_text(self) -> str:
        """Return a text table of the data set's name, number of images, size, classes and fingerprint."""
        names = ", ".join(self.classes[:12]) + (", …" if len(self.classes) > 12 else "")
        facts = {
            "name": f"{self.name}/{self.split}", "images": " × ".join(f"{size:,}" for size in self.images.shape),
            "pixels": str(self.images.dtype).removeprefix("torch."), "classes": names or None,
            "labels": "yes" if self.labels is not None else "no", "fingerprint": self.fingerprint,
            "revision": self.revision or None,
        }  # fmt: skip
        return text_table([{"": key, "value": value} for key, value in facts.items()])

    def __len__(self) -> int:
        return len(self.images)

    def _fingerprint_fields(self) -> dict[str, Any]:
        labelled = self.labels is not None
        return {"shape": list(self.images.shape), "labelled": labelled, "classes": list(self.classes)}

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of a sha256 over the shape, the pixels, the labels and the class names."""
        digest = hashlib.sha256(json.dumps(self._fingerprint_fields(), sort_keys=True).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Preprocess some of the images for members; return float32 inputs (batch, channel, height, width).

        Args:
            some: the images to preprocess, some of `self.images`.
            preprocess: preprocessing of the members.

        Raises:
            UsageError: the images have another size or other channels than the members expect.
        """
        self._check_shape(some, preprocess, "images")
        return preprocess(some)

    def _check_shape(self, images: Tensor, preprocess: Preprocess, noun_in_errors: str) -> None:
        expected, found = (preprocess.channels, *preprocess.size), tuple(images.shape[1:])
        if found == expected:
            return
        do = f"`zoo.images.of(…, size={preprocess.size}, channels={expected[0]})` makes them fit"
        if found == (*preprocess.size, preprocess.channels):
            do = f"`zoo.images.{'of' if noun_in_errors == 'images' else 'prepared'}(…, channels_last=True)` says so"
        elif noun_in_errors != "images":
            do = "Prepare them as the members want them"
        raise UsageError(
            f"{noun_in_errors} {self.name!r}",
            expected=f"shape (input, {', '.join(map(str, expected))}), axes (input, channel, height, width)",
            found=f"shape (input, {', '.join(map(str, found))})",
            do=do,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Prepared(ImageData):
    """One split of a data set whose images are preprocessed already: members use them unchanged.

    Args:
        images: float32 inputs of members, (input, channel, height, width).
        name, split, labels, classes, revision: the same arguments as in `ImageData`. The fingerprint is computed from
            the float32 values.
    """

    def _fingerprint_fields(self) -> dict[str, Any]:
        return {**super()._fingerprint_fields(), "dtype": "float32"}

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Check the shape of some of the inputs; return them unchanged."""
        self._check_shape(some, preprocess, "inputs")
        return some


def in_order(data: ImageData, classes: Sequence[str]) -> ImageData:
    """Renumber labels in the order of `classes`; return the images with these labels, or unchanged if their class names
    don't match.

    The images may have only some of the classes, in any order. Names may differ in case, spaces, hyphens and
    underscores, unless that makes two names equal.

    Args:
        data: images, with or without labels.
        classes: class names in the new order.

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


def class_positions(class_names: Sequence[str], classes: Sequence[str]) -> list[int] | None:
    """Return the position of each name in `classes`; None if a name has no position, or has the same position as
    another name.

    >>> class_positions(("Pickup truck", "apple"), ("apple", "pickup_truck", "rose"))
    [1, 0]
    """
    missing, found = match_classes(class_names, classes)
    return found if class_names and not missing else None


def match_classes(class_names: Sequence[str], classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Look up class names in `classes`; return the names without a match of their own, and the position of each name
    (-1 without a match).

    Args:
        class_names: the class names to look up.
        classes: the class names to search, in the order of the positions.
    """
    position_of_name = {name: at for at, name in enumerate(classes)}
    position_of_simple_name = {_simplify_name(name): at for at, name in enumerate(classes)}
    simple_names = {_simplify_name(name) for name in class_names}
    if len(position_of_simple_name) < len(classes) or len(simple_names) < len(class_names):
        # Two classes differ only in case, as "A" and "a" in EMNIST, so names must match exactly.
        position_of_simple_name = {}
    standard_spellings = {
        _simplify_name(other_name): _simplify_name(standard_name)
        for other_name, standard_name in OTHER_SPELLINGS.items()
    }
    positions = []
    for name in class_names:
        simple_name = _simplify_name(name)
        positions.append(
            position_of_name.get(
                name,
                position_of_simple_name.get(
                    simple_name, position_of_simple_name.get(standard_spellings.get(simple_name, ""), -1)
                ),
            )
        )
    missing = [name for name, at in zip(class_names, positions, strict=True) if at < 0 or positions.count(at) > 1]
    return missing, positions


def _simplify_name(class_name: str) -> str:
    """Return a name in lower case, without spaces, hyphens and underscores."""
    letters = unicodedata.normalize("NFC", class_name).casefold()
    return "".join(letter for letter in letters if not letter.isspace() and letter not in "-_")
