"""`of`: from whatever a user has to ImageData. `prepared`: the same from inputs that are preprocessed already."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import arrays, locating
from checkpoints_zoo.images.image_data import ImageData, Prepared
from checkpoints_zoo.images.naming import facts, name_of, split_of
from checkpoints_zoo.images.pixels import Gathered, Wanted
from checkpoints_zoo.images.sets import Columns, Found

Given = str | os.PathLike[str] | ImageData | Tensor | npt.NDArray[Any] | tuple[Any, Any] | Iterable[Any] | Dataset[Any]
"""What `of` takes, and with it every function that takes images."""


def of(
    given: Given,
    *,
    classes: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
    name: str | None = None,
    split: str | None = None,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    channels_last: bool = False,
    image: str | None = None,
    label: str | None = None,
) -> ImageData:
    """Read images from a name, a place, tensors, a Dataset or a DataLoader; return them as ImageData.

    A text is a name ("digits", "digits/train") where there is one; else a path, which has a slash or is there; or an
    address hf://datasets/ORG/NAME[@REVISION][/PATH]. Pixels are uint8; nothing is guessed from their values.

    Args:
        given: a name; a folder with a folder of PNG or JPEG images for each class, or with images alone, which have no
            labels; a Parquet file, a folder of some or a data set on the Hub, with columns as `datasets` writes them;
            images (input, channel, height, width), or a tuple (images, labels); a Dataset, a DataLoader or any other
            thing that gives images or (image, label), one by one or in batches; ImageData.
        classes: names in the order of the labels, where these are numbers and the data does not name its classes.
        renamed: the data's names of some classes -> other names.
        name: what to call the images; None for one from their place.
        split: which one of a place that has several, None for "test"; what to call that of others.
        size: (height, width) that every image is resized to, bilinearly by Pillow; None for no resizing.
        channels: 1 to make them grey, 3 to make grey ones three equal channels; None for what they have.
        channels_last: whether tensors have axes (input, height, width, channel).
        image, label: columns, where several could be meant, or none says what it is.

    Raises:
        UsageError: an unknown name, images or labels of another kind, or an argument that does not go with them.
        SourceNotFound: nothing at that place, or no images.
        FormatError: a damaged image, images of several sizes, labels that number no class, or none at all.
        TooLargeError: more images than memory has room for.
        NetworkError, AccessError, DamagedError: what is on the Hub can't be had.

    >>> import torch
    >>> pixels, labels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 0])
    >>> data = of((pixels, labels), classes=["cat", "dog"], name="two")
    >>> data.name, data.classes, len(data)
    ('two', ('cat', 'dog'), 2)
    """
    wanted, columns = Wanted(size, channels), Columns(image, label)
    place = locating.place_of(given) if isinstance(given, str | os.PathLike) else None
    if channels_last and isinstance(given, str | os.PathLike | ImageData):
        raise UsageError("argument channels_last", expected="tensors or arrays to go with it", found=_shown(given))
    if place is None and isinstance(given, str | ImageData):
        if columns != Columns():
            raise UsageError("columns of images", expected="Parquet files or mappings", found=_shown(given))
        if isinstance(given, str):
            return _changed(locating.named(given, split), wanted, classes, renamed, name, None)
        return _changed(given, wanted, classes, renamed, name, split)
    if place is not None:
        found, stem = locating.read(place, split, columns, wanted)
    else:
        found, stem = arrays.read(given, columns, wanted, arrays.PIXELS, channels_last), "images"
    return ImageData(**facts(found, name_of(name, stem), split, classes, renamed))


def prepared(
    given: Tensor | npt.NDArray[Any] | tuple[Any, Any] | Iterable[Any] | Dataset[Any],
    *,
    classes: Sequence[str] | None = None,
    renamed: Mapping[str, str] | None = None,
    name: str | None = None,
    split: str | None = None,
    channels_last: bool = False,
    image: str | None = None,
    label: str | None = None,
) -> Prepared:
    """Read inputs that are preprocessed as the members want them, so that they are used as they are; return them.

    For a DataLoader whose transforms end in the collection's own Normalize: whether they are the collection's, nothing
    can tell.

    Args:
        given: float32 inputs (input, channel, height, width), or a tuple (inputs, labels); a Dataset, a DataLoader or
            any other thing that gives such, one by one or in batches. float16 and bfloat16 are widened.
        classes, renamed, name, split, channels_last, image, label: as in `of`.

    Raises:
        UsageError, FormatError, TooLargeError: as in `of`; inputs of another type, or that are not finite.

    >>> import checkpoints_zoo as zoo
    >>> members, digits = zoo.load("convnet-digits", n=2), zoo.images.load("digits")
    >>> mine = prepared((members.preprocess(digits.images), digits.labels), classes=digits.classes)
    >>> zoo.evaluate(members, mine)["accuracy"].value == zoo.evaluate(members, digits)["accuracy"].value
    True
    """
    if isinstance(given, str | os.PathLike | ImageData):
        do = "`zoo.images.of` takes those, and members preprocess their pixels"
        raise UsageError("prepared inputs", expected="tensors, a Dataset or a DataLoader", found=_shown(given), do=do)
    read = arrays.read(given, Columns(image, label), Wanted(), arrays.INPUTS, channels_last)
    return Prepared(**facts(read, name_of(name, "inputs"), split, classes, renamed))


def _changed(
    known: ImageData,
    wanted: Wanted,
    classes: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
    name: str | None,
    split: str | None,
) -> ImageData:
    """Return images that are there already as is asked for: the same object where nothing is."""
    new: dict[str, Any] = {}
    if wanted:
        if isinstance(known, Prepared):
            raise UsageError(f"inputs {known.name!r}", expected="no size and no channels", found="some")
        gathered = Gathered(wanted, len(known), f"images {known.name!r}")
        gathered.arrays(known.images.numpy(), f"images {known.name!r}")
        pixels = gathered.done()
        if pixels.shape != known.images.shape:
            new = {"images": pixels, "name": f"{known.name}-{'x'.join(map(str, pixels.shape[1:]))}"}
    if classes is not None or renamed is not None:
        labels = None if known.labels is None else known.labels.tolist()
        named = facts(Found(known.images, labels, known.classes), known.name, None, classes, renamed)
        new |= {"labels": named["labels"], "classes": named["classes"]}
    new |= {} if name is None else {"name": name_of(name, "")}
    new |= {} if split is None else {"split": split_of(split)}
    return replace(known, **new) if new else known


def _shown(given: object) -> str:
    return f"images {given.name!r}" if isinstance(given, ImageData) else repr(given)[:80]
