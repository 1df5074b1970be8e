"""The arguments that measurements share, checked: members, labelled images of their classes, seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.text import few, whole
from checkpoints_zoo.images import ImageData, in_order
from checkpoints_zoo.images.image_data import match_classes


def images_of(description: Description, split: str = "test") -> ImageData:
    """Load the test or training images that a collection names, if the package has them; return them.

    Args:
        description: of the collection.
        split: "test" or "train".

    Raises:
        UsageError: the package lacks them: they are of whoever made the collection.
        ZooError: they can't be had: see `images.load`.
    """
    if description.dataset in images.DATASETS:
        return images.load(description.dataset, split)
    name = repr(description.dataset) if description.dataset else "no name"
    raise UsageError(
        f"images of {description.name}, {split}",
        expected=f"a data set that the package reads by name ({', '.join(images.DATASETS)})",
        found=f"{name}: images of whoever made the collection",
        do="Give them where images are asked for: `zoo.images.of(…)` reads a folder, a file or tensors",
    )


def labelled(inside: ImageData, description: Description) -> tuple[ImageData, Tensor]:
    """Check that images have labels of a collection's classes; return them, and labels in the order of its logits.

    The images may have some of the classes, in any order: their names tell which is which, as in `images.in_order`.

    Raises:
        UsageError: no labels, labels of classes that nobody named, or of others.
    """
    ordered = in_order(inside, description.classes)
    if ordered.labels is not None and tuple(ordered.classes) == description.classes:
        return ordered, ordered.labels
    more = ", …" if len(description.classes) > 12 else ""
    do = "Give the test set of the collection, or other images of its classes"
    if inside.labels is None:
        wrong = "no labels"
    elif not inside.classes:
        wrong = "labels that are numbers of classes without names"
        do = "Name them in the order of the numbers: `zoo.images.of(…, classes=…)`, which may be `members.classes`"
    else:
        unlike = match_classes(inside.classes, description.classes)[0]
        wrong = f"{few([repr(name) for name in unlike], 3)} among the {len(inside.classes)} classes of the images"
        do = "If they are the same under other names, say so: `zoo.images.of(…, renamed={…})`"
    raise UsageError(
        f"images {inside.name!r} for {description.name}",
        expected=f"labels of the classes {', '.join(description.classes[:12])}{more}",
        found=wrong,
        do=do,
    )


def labels_of(inside: ImageData, description: Description) -> Tensor:
    """Return the labels of images, (input,), in the order of a collection's logits, checked as in `labelled`."""
    return labelled(inside, description)[1]


def eval_data(inside: ImageData) -> str:
    """Return how a manifest names images: name and split ("digits/test")."""
    return f"{inside.name}/{inside.split}"


def image_key(inside: ImageData) -> str:
    """Return how a report names images: name, split and fingerprint ("digits/test 0123456789abcdef")."""
    return f"{eval_data(inside)} {inside.fingerprint}"


def check_measurable(members: object) -> None:
    """Check that what is to be measured are members or their stored predictions.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(members, Collection | predictions.Predictions):
        ensemble = "Give the members themselves, they are run as an ensemble"
        raise UsageError(
            "members to measure",
            expected="a collection, as `zoo.load` gives it, or stored predictions",
            found=type(members).__name__,
            do=ensemble if isinstance(members, torch.nn.Module) else "",
        )


def check_draws(seed: object, subsets: object = 2) -> None:
    """Check the seed and the number of random subsets.

    Raises:
        UsageError: no whole number, a seed of more than 64 bits, or fewer than two subsets.
    """
    known = whole(seed)
    if known is None or not -(2**63) <= known < 2**64:
        raise UsageError("seed", expected="a whole number of at most 64 bits", found=repr(seed)[:80])
    count = whole(subsets)
    if count is None or count < 2:
        raise UsageError("subsets", expected="a whole number from 2", found=repr(subsets)[:80])
