"""`of` converts names, places, tensors and Datasets to ImageData; `prepared` converts inputs that are preprocessed
already.

This is one file, because both functions take the same kinds of inputs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.images import arrays
from checkpoints_zoo.images.data_sets import DATASETS, load
from checkpoints_zoo.images.image_data import ImageData, Prepared
from checkpoints_zoo.images.image_files import EXPECTED_PLACES, parse_place, read_place
from checkpoints_zoo.images.reading import Columns, ImageBuffer, PixelFormat, RawImages

ImageInput = (
    str | os.PathLike[str] | ImageData | Tensor | npt.NDArray[Any] | tuple[Any, Any] | Iterable[Any] | Dataset[Any]
)
"""The types that `of` accepts, and with it every function that takes images."""

_DATA_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")


def of(
    given: ImageInput,
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

    A string is the name of a data set ("digits", "digits/train"); or a path, which contains a slash or exists; or an
    address hf://datasets/ORG/NAME[@REVISION][/PATH]. Pixels must be uint8: their scale is never guessed from their
    values.

    Args:
        given: the images: a name; a folder with one folder of PNG or JPEG images for each class, or with unlabelled
            images only; a Parquet file, a folder of Parquet files, or a data set on the Hub, with columns as `datasets`
            writes them; images (input, channel, height, width), or a tuple (images, labels); a Dataset, a DataLoader or
            another iterable of images or (image, label), one by one or in batches; ImageData.
        classes: class names in the order of the label numbers, if the data has no class names.
        renamed: old class name -> new class name, for the classes to rename.
        name: a name for the images; None derives a name from the place of the images.
        split: the split to read if the place has several, "test" by default; for tensors, a name for their split.
        size: (height, width) to which Pillow resizes every image, bilinearly; None for no resizing.
        channels: 1 converts images to grey, 3 repeats grey images in three channels; None changes nothing.
        channels_last: whether tensors of images have the axes (input, height, width, channel).
        image, label: names of the columns of images and labels, needed if several columns are possible.

    Raises:
        UsageError: the name is unknown, images or labels have the wrong type, or an argument does not apply to this
            kind of data.
        SourceNotFound: there is nothing at the path or address, or no images.
        FormatError: an image is damaged, images have several sizes, a label exceeds the classes, or there are no
            images.
        TooLargeError: the images need more memory than is free.
        NetworkError, AccessError, DamagedError: the files on the Hub can't be fetched.

    >>> import torch
    >>> pixels, labels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.tensor([1, 0])
    >>> data = of((pixels, labels), classes=["cat", "dog"], name="two")
    >>> data.name, data.classes, len(data)
    ('two', ('cat', 'dog'), 2)
    """
    pixel_format, columns = PixelFormat(size, channels), Columns(image, label)
    place = parse_place(given) if isinstance(given, str | os.PathLike) else None
    if channels_last and isinstance(given, str | os.PathLike | ImageData):
        raise UsageError(
            "argument channels_last", expected="tensors or arrays to go with it", found=_describe_images(given)
        )
    if place is None and isinstance(given, str | ImageData):
        if columns != Columns():
            raise UsageError("columns of images", expected="Parquet files or mappings", found=_describe_images(given))
        if isinstance(given, str):
            return _apply_arguments(_load_by_name(given, split), pixel_format, classes, renamed, name, None)
        return _apply_arguments(given, pixel_format, classes, renamed, name, split)
    if place is not None:
        raw, base_name = read_place(place, split, columns, pixel_format)
    else:
        raw, base_name = arrays.read_arrays(given, columns, pixel_format, arrays.PIXEL_DTYPE, channels_last), "images"
    return ImageData(**_image_data_fields(raw, image_data_name(name, base_name), split, classes, renamed))


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
    """Read inputs that are preprocessed already, as the members expect; return data that members use unchanged.

    Use this function for a DataLoader whose transforms end with the collection's Normalize. The package can't check the
    preprocessing.

    Args:
        given: the inputs: float32 inputs (input, channel, height, width), or a tuple (inputs, labels); a Dataset, a
            DataLoader or another iterable of inputs, one by one or in batches. float16 and bfloat16 become float32.
        classes, renamed, name, split, channels_last, image, label: the same arguments as in `of`.

    Raises:
        UsageError, FormatError, TooLargeError: for the same reasons as in `of`; also if inputs have another type or are
            not finite.

    >>> import checkpoints_zoo as zoo
    >>> members, digits = zoo.load("convnet-digits", n=2), zoo.images.load("digits")
    >>> mine = prepared((members.preprocess(digits.images), digits.labels), classes=digits.classes)
    >>> zoo.evaluate(members, mine)["accuracy"].value == zoo.evaluate(members, digits)["accuracy"].value
    True
    """
    if isinstance(given, str | os.PathLike | ImageData):
        do = "Use `zoo.images.of`: the members preprocess its pixels"
        raise UsageError(
            "prepared inputs", expected="tensors, a Dataset or a DataLoader", found=_describe_images(given), do=do
        )
    raw = arrays.read_arrays(given, Columns(image, label), PixelFormat(), arrays.INPUT_DTYPE, channels_last)
    return Prepared(**_image_data_fields(raw, image_data_name(name, "inputs"), split, classes, renamed))


def _load_by_name(name_and_split: str, split: str | None) -> ImageData:
    """Load a data set by name ("digits", "digits/train"); return the data set.

    Args:
        name_and_split: name of the data set, or name and split with a slash between them.
        split: name of the requested split; None if the caller requested no split.

    Raises:
        UsageError: there is no such data set or split.
        SourceNotFound, AccessError, NetworkError, DamagedError, FormatError: for the same reasons as in `load`.
    """
    name, _, inside = name_and_split.partition("/")
    if name not in DATASETS:
        try:
            load(name)
        except UsageError as error:
            error.expected += f"; or a place: {EXPECTED_PLACES}"
            error.do = (
                f"{error.do} Give {'another name, or ' * (not error.do)}a path that exists or contains a slash".strip()
            )
            raise
    if inside and split and inside != split:
        raise UsageError(f"split of {name_and_split!r}", expected=repr(inside), found=repr(split))
    try:
        return load(name, inside or split or "test")
    except UsageError as error:
        error.do = f"A folder of that name is ./{name_and_split}"
        raise


def _apply_arguments(
    data: ImageData,
    pixel_format: PixelFormat,
    classes: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
    new_name: str | None,
    split: str | None,
) -> ImageData:
    """Apply the arguments of `of` to ImageData; return the same object if no argument changes it."""
    changed_fields: dict[str, Any] = {}
    if pixel_format:
        if isinstance(data, Prepared):
            raise UsageError(f"inputs {data.name!r}", expected="no size and no channels", found="one of them")
        buffer = ImageBuffer(pixel_format, len(data), f"images {data.name!r}")
        buffer.add_arrays(data.images.numpy(), f"images {data.name!r}")
        pixels = buffer.finish()
        if pixels.shape != data.images.shape:
            changed_fields = {"images": pixels, "name": f"{data.name}-{'x'.join(map(str, pixels.shape[1:]))}"}
    if classes is not None or renamed is not None:
        labels = None if data.labels is None else data.labels.tolist()
        fields = _image_data_fields(RawImages(data.images, labels, data.classes), data.name, None, classes, renamed)
        changed_fields |= {"labels": fields["labels"], "classes": fields["classes"]}
    changed_fields |= {} if new_name is None else {"name": image_data_name(new_name, "")}
    changed_fields |= {} if split is None else {"split": check_split_name(split)}
    return replace(data, **changed_fields) if changed_fields else data


def _describe_images(images: object) -> str:
    return f"images {images.name!r}" if isinstance(images, ImageData) else repr(images)[:80]


def _image_data_fields(
    raw_images: RawImages,
    raw_name: str,
    split: str | None,
    classes: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Check labels against the names of their classes; return the fields of ImageData.

    Args:
        raw_images: the images and labels in the form in which they were read.
        raw_name: name of the images.
        split, classes, renamed: the same arguments as in `of`.

    Raises:
        UsageError: the classes contradict the data's own class names, or the images have no labels.
        FormatError: a label exceeds the number of classes.
    """
    data_name, labels, class_names = f"images {raw_name!r}", raw_images.labels, raw_images.classes
    # The package `datasets` marks missing labels by -1.
    if labels is not None and all(label == -1 for label in labels):
        labels = None
    for thing, new_class_names in (("classes", classes), ("renamed", renamed)):
        if new_class_names is not None and labels is None:
            raise UsageError(
                f"{thing} of {data_name}", expected="no such argument, since these images have no labels", found="one"
            )
    if classes is not None:
        new_class_names = tuple(classes) if not isinstance(classes, str) else ()
        if not new_class_names or not all(type(class_name) is str for class_name in new_class_names):
            raise UsageError(
                f"classes of {data_name}", expected="names, in the order of the labels", found=repr(classes)[:80]
            )
        if class_names and new_class_names != class_names:
            raise UsageError(
                f"classes of {data_name}",
                expected=f"the data's own class names, {', '.join(class_names[:6])}{', …' * (len(class_names) > 6)}",
                found=f"{', '.join(new_class_names[:6])}{', …' if len(new_class_names) > 6 else ''}",
                do="Give `renamed={name in the data: new name, …}`: it can't mix up the order",
            )
        class_names = new_class_names
    label_numbers, class_names = _number_labels(labels, class_names, data_name)
    class_names = _rename_classes(class_names, renamed, data_name)
    return {
        "name": raw_name,
        "split": _replace_forbidden_characters(raw_images.split)
        or ("test" if split is None else check_split_name(split)),
        "images": raw_images.images,
        "labels": None if label_numbers is None else torch.tensor(label_numbers),
        "classes": () if label_numbers is None else class_names,
        "revision": raw_images.revision,
    }


def _number_labels(
    labels: Sequence[int] | Sequence[str] | None, classes: tuple[str, ...], data_name: str
) -> tuple[list[int] | None, tuple[str, ...]]:
    """Return labels as numbers, and the class names in the order of these numbers; () if there are no names."""
    if labels is None:
        return None, classes
    if isinstance(labels[0], str):
        classes = classes or tuple(sorted({str(label) for label in labels}))
        number_of_class = {name: at for at, name in enumerate(classes)}
        label_numbers = [number_of_class.get(label, -1) if isinstance(label, str) else -1 for label in labels]
    else:
        label_numbers = [label if isinstance(label, int) else -1 for label in labels]
    first_wrong_input = next((at for at, x in enumerate(label_numbers) if not 0 <= x < (len(classes) or 2**63)), None)
    if first_wrong_input is None:
        return label_numbers, classes
    expected_labels = (
        f"{classes[0]!r} to {classes[-1]!r}" if isinstance(labels[0], str) else f"numbers from 0 to {len(classes) - 1}"
    )
    raise FormatError(
        f"labels of {data_name}",
        expected=f"{expected_labels}, of {len(classes)} classes" if classes else "numbers from 0",
        found=f"{labels[first_wrong_input]!r:.80} for input {first_wrong_input:,}",
    )


def _rename_classes(classes: tuple[str, ...], renamed: Mapping[str, str] | None, data_name: str) -> tuple[str, ...]:
    unknown_names = [name for name in renamed or {} if name not in classes]
    if unknown_names:
        expected = f"class names of the data ({', '.join(classes[:12]) or 'none'})"
        raise UsageError(f"renamed classes of {data_name}", expected=expected, found=repr(unknown_names[0])[:80])
    if wrong_names := [name for name in (renamed or {}).values() if type(name) is not str]:
        raise UsageError(f"renamed classes of {data_name}", expected="names", found=repr(wrong_names[0])[:80])
    new_names = tuple((renamed or {}).get(name, name) for name in classes)
    duplicate_names = [name for name in new_names if new_names.count(name) > 1]
    if duplicate_names:
        raise UsageError(
            f"classes of {data_name}", expected="each name once", found=f"{duplicate_names[0]!r} more than once"
        )
    return new_names


def image_data_name(requested: str | None, base_name: str) -> str:
    """Return a name for images: the requested name, or a name derived from their path or address.

    Raises:
        UsageError: the name can't be a file name, or is the name of a data set.
    """
    if requested is None:
        base_name = _replace_forbidden_characters(base_name) or "images"
        return f"own-{base_name}" if base_name in DATASETS else base_name
    if type(requested) is not str or not _DATA_NAME_PATTERN.fullmatch(requested) or requested in DATASETS:
        expected = "at most 80 lower-case letters, digits, '.', '_' and '-', and not the name of a data set"
        raise UsageError("name of images", expected=expected, found=repr(requested)[:100])
    return requested


def check_split_name(split: str) -> str:
    """Check the name of a split; return it.

    Raises:
        UsageError: the name can't be a file name.
    """
    if type(split) is not str or not _DATA_NAME_PATTERN.fullmatch(split):
        expected = "lower-case letters, digits, '.', '_' and '-'"
        raise UsageError("split of images", expected=expected, found=repr(split)[:80])
    return split


def _replace_forbidden_characters(base_name: str) -> str:
    """Make a name from a text by replacing the characters that names may not have; return it, "" if nothing is left."""
    return re.sub(r"[^a-z0-9._-]+", "-", base_name.lower()).strip("-._")[:72]
