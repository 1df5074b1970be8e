"""Checks of the arguments that all measurements have: members, labelled images of their classes, seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.text import first_few, one_line, whole_number
from checkpoints_zoo.images import ImageData, in_order
from checkpoints_zoo.images.image_data import match_classes


def images_of(description: Description, split: str = "test") -> ImageData:
    """Load the test or training images of the data set that a collection names, if the package has this data set;
    return the images.

    Args:
        description: description of the collection.
        split: name of the split, "test" or "train".

    Raises:
        UsageError: the package lacks the images, which only the producer of the collection has.
        ZooError: the images can't be loaded, for the reasons given in `images.load`.
    """
    if description.dataset in images.DATASETS:
        return images.load(description.dataset, split)
    data_set_name = repr(description.dataset) if description.dataset else "no name"
    raise UsageError(
        f"images of {description.name}, {split}",
        expected=f"a data set that the package reads by name ({', '.join(images.DATASETS)})",
        found=f"{data_set_name}: images of the collection's producer",
        do="Give these images as an argument: `zoo.images.of(…)` reads a folder, a file or tensors",
    )


def require_labels(data: ImageData, description: Description) -> tuple[ImageData, Tensor]:
    """Check that images have labels of a collection's classes; return images and labels in the order of its logits.

    The images may have only some of the classes, in any order: classes are matched by name, as in `images.in_order`.

    Raises:
        UsageError: the collection has no classes, the images have no labels, or their classes have no names or are not
            the collection's.
    """
    if not description.classes:
        raise UsageError(
            f"classes of {description.name}",
            expected="names of classes in the order of the logits, to compare the logits with labels",
            found="none in its description",
            do="Make the collection again, with like= or classes= and preprocessing= (`zoo-cli import --like NAME`)",
        )
    renumbered_data = in_order(data, description.classes)
    if renumbered_data.labels is not None and tuple(renumbered_data.classes) == description.classes:
        return renumbered_data, renumbered_data.labels
    ellipsis = ", …" if len(description.classes) > 12 else ""
    advice = "Give the test set of the collection, or other images of its classes"
    if data.labels is None:
        found = "no labels"
    elif not data.classes:
        found = "labels that are numbers of classes without names"
        advice = "Name them in the order of the numbers: `zoo.images.of(…, classes=…)`, which may be `members.classes`"
    else:
        unknown_classes = match_classes(data.classes, description.classes)[0]
        unknown_text = first_few([repr(name) for name in unknown_classes], 3)
        found = f"{unknown_text} among the {len(data.classes)} classes of the images"
        advice = "If they are the same under other names, say so: `zoo.images.of(…, renamed={…})`"
    raise UsageError(
        f"images {data.name!r} for {description.name}",
        expected=f"labels of the classes {', '.join(description.classes[:12])}{ellipsis}",
        found=found,
        do=advice,
    )


def labels_of(data: ImageData, description: Description) -> Tensor:
    """Return the labels of images, (input,), in the order of a collection's logits, checked as in `require_labels`."""
    return require_labels(data, description)[1]


def manifest_image_name(data: ImageData) -> str:
    """Return the name that manifests use for images: data set and split ("digits/test")."""
    return f"{data.name}/{data.split}"


def report_image_name(data: ImageData) -> str:
    """Return the name that reports use for images: data set, split and fingerprint ("digits/test 0123456789abcdef")."""
    return f"{manifest_image_name(data)} {data.fingerprint}"


def check_measurable(members: object) -> None:
    """Check that a value is a collection or stored predictions, which can be measured.

    Raises:
        UsageError: the value is neither a collection nor stored predictions.
    """
    if not isinstance(members, Collection | predictions.Predictions):
        advice = "Give the members themselves, they are run as an ensemble"
        raise UsageError(
            "members to measure",
            expected="a collection, as `zoo.load` gives it, or stored predictions",
            found=type(members).__name__,
            do=advice if isinstance(members, torch.nn.Module) else "",
        )


def check_collection(members: object, value_name: str = "members") -> None:
    """Check that a value is a collection.

    Args:
        members: the value to check.
        value_name: name of the value in error texts.

    Raises:
        UsageError: the value is no collection.
    """
    if not isinstance(members, Collection):
        advice = ""
        if isinstance(members, str):
            advice = f"Load it: zoo.load({one_line(members, 80)!r})"
        elif isinstance(members, Member):
            advice = "One member is a collection as well: members[3:4]"
        raise UsageError(value_name, expected="a Collection", found=type(members).__name__, do=advice)


def check_seed(seed: object) -> int:
    """Check that a seed is a whole number of at most 64 bits; return the seed as an int. Whole numbers of numpy and
    torch are allowed too.

    Raises:
        UsageError: the seed is no whole number, or has more than 64 bits.
    """
    value = whole_number(seed)
    if value is None or not -(2**63) <= value < 2**64:
        raise UsageError("seed", expected="a whole number of at most 64 bits", found=repr(seed)[:80])
    return value


def check_seed_and_subsets(seed: object, subset_count: object) -> tuple[int, int]:
    """Check the seed and the number of random subsets; return both as ints.

    Raises:
        UsageError: the seed or the number of subsets is no whole number, the seed has more than 64 bits, or there are
            fewer than two subsets.
    """
    count = whole_number(subset_count)
    if count is None or count < 2:
        raise UsageError("subsets", expected="a whole number from 2", found=repr(subset_count)[:80])
    return check_seed(seed), count
