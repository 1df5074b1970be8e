"""Images of one's own that a recipe brings: two splits, checked against what the recipe says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData, Prepared, Preprocess
from checkpoints_zoo.images.named import name_of
from checkpoints_zoo.training.own_code import running

SPLITS = ("train", "test")


def is_name(text: str) -> bool:
    """Say whether a text can name images of one's own: `zoo.images.of(…, name=…)` takes it.

    >>> is_name("my-flowers"), is_name("digits")
    (True, False)
    """
    try:
        return name_of(text, "") == text
    except UsageError:
        return False


def checked(
    images: Callable[[], tuple[ImageData, ImageData]], recipe: str, dataset: str, preprocess: Preprocess
) -> dict[str, ImageData]:
    """Call a recipe's `images`; return both splits by name, called as the recipe calls its data set.

    Args:
        images: gives the images for training and for testing.
        recipe: its name, for errors.
        dataset: what the images are called.
        preprocess: that they have to fit.

    Raises:
        UsageError: something else, images without labels or class names, of another shape, or of different classes.
    """
    what = f"images of recipe {recipe!r}"
    with running(what, "a function that returns (train, test)"):
        given: Any = images()
    if not (isinstance(given, tuple) and len(given) == 2 and all(_is_pixels(data) for data in given)):
        raise UsageError(
            what,
            expected="a function that returns (train, test), each as `zoo.images.of(…)` gives it",
            found=repr(given)[:80],
        )
    shape = (preprocess.channels, *preprocess.size)
    for name, data in zip(SPLITS, given, strict=True):
        if data.labels is None or not data.classes:
            raise UsageError(
                f"{what}, {name}",
                expected="labels and the names of their classes",
                found="no labels" if data.labels is None else "numbers without names",
                do="Give them to `zoo.images.of((images, labels), classes=[…])`",
            )
        if tuple(data.images.shape[1:]) != shape:
            raise UsageError(
                f"{what}, {name}",
                expected=f"shape (input, {', '.join(map(str, shape))}), as the recipe's preprocess has it",
                found=f"shape ({', '.join(map(str, data.images.shape))})",
                do=f"`zoo.images.of(…, size={preprocess.size}, channels={shape[0]})` makes them fit",
            )
    train, test = given
    if train.classes != test.classes:
        raise UsageError(
            f"{what}, test",
            expected=f"the classes of train, in their order: {', '.join(train.classes[:12])}",
            found=", ".join(test.classes[:12]),
            do="`zoo.images.in_order(test, train.classes)` puts them in order",
        )
    return {name: replace(data, name=dataset, split=name) for name, data in zip(SPLITS, given, strict=True)}


def _is_pixels(data: object) -> bool:
    return isinstance(data, ImageData) and not isinstance(data, Prepared)
