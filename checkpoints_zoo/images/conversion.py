"""`of`: from whatever a user has to ImageData. `prepared`: the same from inputs that are preprocessed already."""

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
from checkpoints_zoo.images.image_files import PLACES, place_of, read_place
from checkpoints_zoo.images.reading import Columns, Gathered, PixelFormat, RawImages

Given = str | os.PathLike[str] | ImageData | Tensor | npt.NDArray[Any] | tuple[Any, Any] | Iterable[Any] | Dataset[Any]
"""What `of` takes, and with it every function that takes images."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")


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
    wanted, columns = PixelFormat(size, channels), Columns(image, label)
    place = place_of(given) if isinstance(given, str | os.PathLike) else None
    if channels_last and isinstance(given, str | os.PathLike | ImageData):
        raise UsageError("argument channels_last", expected="tensors or arrays to go with it", found=_shown(given))
    if place is None and isinstance(given, str | ImageData):
        if columns != Columns():
            raise UsageError("columns of images", expected="Parquet files or mappings", found=_shown(given))
        if isinstance(given, str):
            return _changed(_by_name(given, split), wanted, classes, renamed, name, None)
        return _changed(given, wanted, classes, renamed, name, split)
    if place is not None:
        found, stem = read_place(place, split, columns, wanted)
    else:
        found, stem = arrays.read(given, columns, wanted, arrays.PIXELS, channels_last), "images"
    return ImageData(**_facts(found, image_data_name(name, stem), split, classes, renamed))


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
    read = arrays.read(given, Columns(image, label), PixelFormat(), arrays.INPUTS, channels_last)
    return Prepared(**_facts(read, image_data_name(name, "inputs"), split, classes, renamed))


def _by_name(text: str, split: str | None) -> ImageData:
    """Load a set by name ("digits", "digits/train"); return it.

    Args:
        text: the name.
        split: that is wanted beside it, None for none in particular.

    Raises:
        UsageError: no such set or split.
        SourceNotFound, AccessError, NetworkError, DamagedError, FormatError: as in `load`.
    """
    name, _, inside = text.partition("/")
    if name not in DATASETS:
        try:
            load(name)
        except UsageError as error:
            error.expected += f"; or a place: {PLACES}"
            error.do += ", or give a path with a slash in it, or one that is there"
            raise
    if inside and split and inside != split:
        raise UsageError(f"split of {text!r}", expected=repr(inside), found=repr(split))
    try:
        return load(name, inside or split or "test")
    except UsageError as error:
        error.do = f"A folder of that name is ./{text}"
        raise


def _changed(
    known: ImageData,
    wanted: PixelFormat,
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
        named = _facts(RawImages(known.images, labels, known.classes), known.name, None, classes, renamed)
        new |= {"labels": named["labels"], "classes": named["classes"]}
    new |= {} if name is None else {"name": image_data_name(name, "")}
    new |= {} if split is None else {"split": check_split_name(split)}
    return replace(known, **new) if new else known


def _shown(given: object) -> str:
    return f"images {given.name!r}" if isinstance(given, ImageData) else repr(given)[:80]


def _facts(
    found: RawImages,
    name: str,
    split: str | None,
    classes: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Check labels against the names of their classes; return the fields of ImageData.

    Args:
        found: what was read.
        name: of the images.
        split, classes, renamed: as in `of`.

    Raises:
        UsageError: classes that contradict those that the data names, or that have no labels.
        FormatError: a label that numbers no class.
    """
    where, labels, own = f"images {name!r}", found.labels, found.classes
    if labels is not None and all(label == -1 for label in labels):  # as `datasets` marks what has none
        labels = None
    for thing, names in (("classes", classes), ("renamed", renamed)):
        if names is not None and labels is None:
            raise UsageError(f"{thing} of {where}", expected="no such argument, since they have no labels", found="one")
    if classes is not None:
        names = tuple(classes) if not isinstance(classes, str) else ()
        if not names or not all(type(name) is str for name in names):
            raise UsageError(
                f"classes of {where}", expected="names, in the order of the labels", found=repr(classes)[:80]
            )
        if own and names != own:
            raise UsageError(
                f"classes of {where}",
                expected=f"the names that the data has, {', '.join(own[:6])}{', …' if len(own) > 6 else ''}",
                found=f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}",
                do="Give `renamed={…}`, from the data's names to others: then the order can't be wrong",
            )
        own = names
    numbers, own = _numbered(labels, own, where)
    own = _renamed(own, renamed, where)
    return {
        "name": name,
        "split": _plain(found.split) or ("test" if split is None else check_split_name(split)),
        "images": found.images,
        "labels": None if numbers is None else torch.tensor(numbers),
        "classes": () if numbers is None else own,
        "revision": found.revision,
    }


def _numbered(
    labels: Sequence[int] | Sequence[str] | None, own: tuple[str, ...], where: str
) -> tuple[list[int] | None, tuple[str, ...]]:
    """Return labels as numbers, and the names of the classes that they number; () where nothing names these."""
    if labels is None:
        return None, own
    if isinstance(labels[0], str):
        own = own or tuple(sorted({str(label) for label in labels}))
        positions = {name: at for at, name in enumerate(own)}
        numbers = [positions.get(label, -1) if isinstance(label, str) else -1 for label in labels]
    else:
        numbers = [label if isinstance(label, int) else -1 for label in labels]
    wrong = next((at for at, x in enumerate(numbers) if not 0 <= x < (len(own) or 2**63)), None)
    if wrong is None:
        return numbers, own
    names = f"{own[0]!r} to {own[-1]!r}" if isinstance(labels[0], str) else f"numbers from 0 to {len(own) - 1}"
    raise FormatError(
        f"labels of {where}",
        expected=f"{names}, of {len(own)} classes" if own else "numbers from 0",
        found=f"{labels[wrong]!r:.80} for input {wrong:,}",
    )


def _renamed(own: tuple[str, ...], renamed: Mapping[str, str] | None, where: str) -> tuple[str, ...]:
    unknown = [theirs for theirs in renamed or {} if theirs not in own]
    if unknown:
        expected = f"names that the data has ({', '.join(own[:12]) or 'none'})"
        raise UsageError(f"renamed classes of {where}", expected=expected, found=repr(unknown[0])[:80])
    if others := [ours for ours in (renamed or {}).values() if type(ours) is not str]:
        raise UsageError(f"renamed classes of {where}", expected="names", found=repr(others[0])[:80])
    names = tuple((renamed or {}).get(name, name) for name in own)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"classes of {where}", expected="each name once", found=f"{twice[0]!r} more than once")
    return names


def image_data_name(said: str | None, stem: str) -> str:
    """Return what to call images: as said, or a name from that of their place.

    Raises:
        UsageError: a name that no file could have, or that is another set's.
    """
    if said is None:
        stem = _plain(stem) or "images"
        return f"own-{stem}" if stem in DATASETS else stem
    if type(said) is not str or not _NAME.fullmatch(said) or said in DATASETS:
        expected = "lower-case letters, digits, '.', '_' and '-', at most 80; and no name of another set"
        raise UsageError("name of images", expected=expected, found=repr(said)[:100])
    return said


def check_split_name(split: str) -> str:
    """Check what to call a split; return it.

    Raises:
        UsageError: a name that no file could have.
    """
    if type(split) is not str or not _NAME.fullmatch(split):
        expected = "lower-case letters, digits, '.', '_' and '-'"
        raise UsageError("split of images", expected=expected, found=repr(split)[:80])
    return split


def _plain(stem: str) -> str:
    """Make a name of ours from any; return it, "" where nothing is left."""
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:72]
