"""Tensors and arrays, torch Datasets and DataLoaders, and anything else that gives images one after the other.

Each gives images (channel, height, width), batches of them (input, channel, height, width), or Pillow's images; alone,
as (images, labels), or as columns of a mapping. The number of axes tells an image from a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.images.reading import Columns, Gathered, PixelFormat, RawImages

PIXELS = np.dtype(np.uint8)
INPUTS = np.dtype(np.float32)
DEPTH = 8  # of Subsets of Subsets


def read(given: object, columns: Columns, wanted: PixelFormat, kind: np.dtype[Any], channels_last: bool) -> RawImages:
    """Read what some object gives; return its images and labels.

    Args:
        given: images, (images, labels), or what gives such: a sequence, a Dataset, a DataLoader, an iterator.
        columns: keys of the images and the labels, where mappings are given.
        wanted: what images are made into.
        kind: `PIXELS` or `INPUTS`.
        channels_last: whether axes are (input, height, width, channel).

    Raises:
        UsageError: images or labels of another kind.
        FormatError: none, or images of several sizes.
    """
    where = f"images ({type(given).__name__})"
    gathered, labels = Gathered(wanted, _total(given), where), _Labels(where)
    kinds, key = _kinds(given), None
    for piece in _pieces(given, where):
        what = f"input {gathered.count:,} of {where}"
        image, label, key = _taken(piece, columns, kinds, what)
        before = gathered.count
        if isinstance(image, Image.Image):
            if kind != PIXELS:
                raise UsageError(what, expected="float32 inputs", found="an image of Pillow's", do=_DO[kind])
            gathered.picture(image, what)
        else:
            gathered.arrays(_array(image, kind, channels_last, what), what)
        labels.add(label, gathered.count - before, what)
    return RawImages(gathered.done(), labels.done(), _classes(given, key))


def _total(given: object) -> int:
    """Return how many images are announced."""
    if isinstance(given, tuple):
        given = given[0] if given else ()
    dataset = getattr(given, "dataset", given)
    try:
        return len(dataset) if isinstance(dataset, Sized) else 1
    except TypeError:  # an IterableDataset has a length that it does not know
        return 1


def _pieces(given: Any, where: str) -> Iterator[object]:
    if isinstance(given, Tensor | np.ndarray):
        yield given
    elif isinstance(given, tuple):
        if len(given) != 2:
            raise UsageError(where, expected="(images, labels)", found=f"{len(given)} values")
        yield given
    elif isinstance(given, Mapping | str | bytes) or not (
        isinstance(given, Iterable) or (hasattr(given, "__getitem__") and hasattr(given, "__len__"))
    ):
        expected = "tensors, arrays, a Dataset, a DataLoader, or what gives images one by one"
        do = "Give one of its values" if isinstance(given, Mapping) else ""
        raise UsageError(where, expected=expected, found=_kind_of(given), do=do)
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, IterableDataset):
        yield from (given[at] for at in range(len(given)))
    else:
        yield from given


def _taken(piece: Any, columns: Columns, kinds: Mapping[str, str], what: str) -> tuple[Any, Any, str | None]:
    """Return the images and the labels of what was given, None for no labels, and the labels' column."""
    if isinstance(piece, Mapping):
        image, label = columns.choose({str(key): kinds.get(str(key), "") for key in piece}, what)
        return piece[image], None if label is None else piece[label], label
    if columns != Columns():
        raise UsageError(what, expected="mappings, since columns are named", found=_kind_of(piece))
    if isinstance(piece, Tensor | np.ndarray | Image.Image):
        return piece, None, None
    if isinstance(piece, list | tuple) and len(piece) in (1, 2):
        return piece[0], piece[1] if len(piece) == 2 else None, None
    raise UsageError(what, expected="an image, or (image, label)", found=_kind_of(piece))


def _kind_of(piece: object) -> str:
    return type(piece).__name__ + (f" of {len(piece)}" if isinstance(piece, list | tuple) else "")


_DO = {
    PIXELS: "Give pixels, as torchvision's PILToTensor has them; or, if they are preprocessed as the members want them,"
    " `zoo.images.prepared(…)`",
    INPUTS: "Give what the members take, or pixels to `zoo.images.of`, which the members preprocess themselves",
}


def _array(images: Any, kind: np.dtype[Any], channels_last: bool, what: str) -> npt.NDArray[Any]:
    """Check images; return them as (input, channel, height, width)."""
    if not isinstance(images, Tensor | np.ndarray):
        expected = "a tensor, an array or an image of Pillow's"
        raise UsageError(what, expected=expected, found=_kind_of(images))
    if isinstance(images, Tensor) and (images.is_meta or images.layout != torch.strided):
        raise UsageError(what, expected="a dense tensor", found=f"{images.layout} on {images.device}")
    array = np.asarray(_plain(images))
    if kind == INPUTS and array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype != kind:
        expected = "uint8 pixels in 0..255" if kind == PIXELS else "float32 inputs"
        raise UsageError(what, expected=expected, found=f"{array.dtype}", do=_DO[kind])
    if array.ndim not in (3, 4):
        axes = "height, width, channel" if channels_last else "channel, height, width"
        expected = f"axes ({axes}), or (input, {axes})"
        raise UsageError(what, expected=expected, found=f"shape ({', '.join(map(str, array.shape))})")
    array = array if array.ndim == 4 else array[None]
    if kind == INPUTS and not np.isfinite(array).all():
        raise FormatError(what, expected="finite inputs", found="others")
    return np.moveaxis(array, -1, 1) if channels_last else array


def _plain(values: Tensor | npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    """Return values that numpy can hold, on the CPU; bfloat16 is widened."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return values.float() if values.dtype == torch.bfloat16 else values


class _Labels:
    """The labels of images as they come: all of them have one, or none.

    Args:
        where: what to call the images in errors.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.values: list[Any] = []
        self.without = 0

    def add(self, labels: Any, count: int, what: str) -> None:
        """Add the labels of so many images."""
        if labels is None:
            self.without += count
            return
        if isinstance(labels, Tensor | np.ndarray):
            values = np.asarray(_plain(labels))
            if values.dtype.kind not in "iuU" or values.ndim > 1:
                expected = "a whole number for each image, its label"
                raise UsageError(what, expected=expected, found=f"{values.dtype}, shape {values.shape}")
            found = values.reshape(-1).tolist()
        else:
            found = list(labels) if isinstance(labels, Sequence) and not isinstance(labels, str) else [labels]
            found = [int(x) if isinstance(x, np.integer) else x for x in found]
        wrong = [x for x in found if type(x) not in (int, str)]
        if wrong:
            raise UsageError(what, expected="labels that are whole numbers or names", found=repr(wrong[0])[:80])
        if len(found) != count:
            raise UsageError(what, expected=f"{count:,} labels, one for each image", found=f"{len(found):,}")
        self.values += found

    def done(self) -> list[Any] | None:
        """Return all labels, None where no image has one."""
        if self.values and self.without:
            raise UsageError(self.where, expected="a label for each image, or none", found=f"{self.without:,} without")
        return self.values or None


def _kinds(given: object) -> dict[str, str]:
    """Return what each column of a set of the package `datasets` says it is, {} for others."""
    for source in _sources(given):
        features = getattr(source, "features", None)
        if isinstance(features, Mapping):
            return {str(column): type(kind).__name__ for column, kind in features.items()}
    return {}


def _classes(given: object, label: str | None) -> tuple[str, ...]:
    """Return the class names that a Dataset, or what it is a part of, has; () for none."""
    for source in _sources(given):
        features = getattr(source, "features", None)
        kind = features.get(label) if isinstance(features, Mapping) else None
        names = getattr(source, "classes", None) if kind is None else getattr(kind, "names", None)
        if isinstance(names, list | tuple) and names and all(type(name) is str for name in names):
            return tuple(names)
    return ()


def _sources(given: object) -> Iterator[object]:
    """Yield an object, and the sets that it is a loader or a part of."""
    for _ in range(DEPTH):
        if given is None:
            return
        yield given
        given = getattr(given, "dataset", None)
