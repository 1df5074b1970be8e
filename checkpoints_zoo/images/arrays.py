"""Images from tensors, arrays, torch Datasets, DataLoaders, and other iterables.

Each element is an image (channel, height, width), a batch (input, channel, height, width), or an image of Pillow. The
image or batch comes alone, as a pair (images, labels), or in a mapping from column names. A tensor with three axes is
one image, a tensor with four axes is a batch.
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
from checkpoints_zoo.images.reading import MODE_OF_CHANNELS, Columns, ImageBuffer, PixelFormat, RawImages

PIXEL_DTYPE = np.dtype(np.uint8)
INPUT_DTYPE = np.dtype(np.float32)
MAX_NESTED_SUBSETS = 8


def read_arrays(
    images: object, columns: Columns, pixel_format: PixelFormat, required_dtype: np.dtype[Any], channels_last: bool
) -> RawImages:
    """Read images and labels from an object in memory; return the images and labels.

    Args:
        images: an array of images, a tuple (images, labels), or a sequence, Dataset, DataLoader or iterator of images
            or such tuples.
        columns: names of the columns of images and labels, if the elements are mappings.
        pixel_format: the size and channels that images are converted to.
        required_dtype: the dtype that images must have: `PIXEL_DTYPE`, or `INPUT_DTYPE` for preprocessed inputs.
        channels_last: whether axes are (input, height, width, channel).

    Raises:
        UsageError: images or labels have a type that can't be read.
        FormatError: there are no images, or images have several sizes.
    """
    data_name = f"images ({type(images).__name__})"
    buffer, labels = ImageBuffer(pixel_format, _count_images(images), data_name), _Labels(data_name)
    column_kinds, label_column = _column_kinds(images), None
    for element in _iterate_elements(images, data_name):
        image_name = f"input {buffer.count:,} of {data_name}"
        image, label, label_column = _split_image_and_label(element, columns, column_kinds, image_name)
        count_before = buffer.count
        if isinstance(image, Image.Image):
            if required_dtype != PIXEL_DTYPE:
                raise UsageError(
                    image_name,
                    expected="float32 inputs",
                    found="an image of Pillow",
                    do=_ADVICE_BY_DTYPE[required_dtype],
                )
            buffer.add_picture(image, image_name)
        else:
            buffer.add_arrays(_check_array(image, required_dtype, channels_last, image_name), image_name)
        labels.add(label, buffer.count - count_before, image_name)
    return RawImages(buffer.finish(), labels.finish(), _class_names(images, label_column))


def _count_images(images: object) -> int:
    """Return the number of images that an object announces by its length, or 1 if it has no length."""
    if isinstance(images, tuple):
        images = images[0] if images else ()
    dataset = getattr(images, "dataset", images)
    try:
        return len(dataset) if isinstance(dataset, Sized) else 1
    except TypeError:  # An IterableDataset can have a method __len__ that raises an error.
        return 1


def _iterate_elements(images: Any, data_name: str) -> Iterator[object]:
    if isinstance(images, Tensor | np.ndarray):
        yield images
    elif isinstance(images, tuple):
        if len(images) != 2:
            raise UsageError(data_name, expected="(images, labels)", found=f"{len(images)} values")
        yield images
    elif isinstance(images, Mapping | str | bytes) or not (
        isinstance(images, Iterable) or (hasattr(images, "__getitem__") and hasattr(images, "__len__"))
    ):
        expected = "tensors, arrays, a Dataset, a DataLoader, or what gives images one by one"
        do = "Give one of its values" if isinstance(images, Mapping) else ""
        raise UsageError(data_name, expected=expected, found=_type_name(images), do=do)
    elif hasattr(images, "__getitem__") and hasattr(images, "__len__") and not isinstance(images, IterableDataset):
        yield from (images[at] for at in range(len(images)))
    else:
        yield from images


def _split_image_and_label(
    element: Any, columns: Columns, column_kinds: Mapping[str, str], image_name: str
) -> tuple[Any, Any, str | None]:
    """Return the images and the labels (None without any) of one element, and the name of the label column if the
    element is a mapping."""
    if isinstance(element, Mapping):
        image, label = columns.choose_columns({str(key): column_kinds.get(str(key), "") for key in element}, image_name)
        return element[image], None if label is None else element[label], label
    if columns != Columns():
        raise UsageError(image_name, expected="mappings, since columns are named", found=_type_name(element))
    if isinstance(element, Tensor | np.ndarray | Image.Image):
        return element, None, None
    if isinstance(element, list | tuple) and len(element) in (1, 2):
        return element[0], element[1] if len(element) == 2 else None, None
    raise UsageError(image_name, expected="an image, or (image, label)", found=_type_name(element))


def _type_name(element: object) -> str:
    return type(element).__name__ + (f" of {len(element)}" if isinstance(element, list | tuple) else "")


_ADVICE_BY_DTYPE = {
    PIXEL_DTYPE: "Give pixels, as torchvision's PILToTensor returns them. If the inputs are preprocessed already, use"
    " `zoo.images.prepared(…)`",
    INPUT_DTYPE: "Give float32 inputs of the members. For pixels, use `zoo.images.of`: the members preprocess them",
}


def _check_array(images: Any, required_dtype: np.dtype[Any], channels_last: bool, image_name: str) -> npt.NDArray[Any]:
    """Check images; return them as (input, channel, height, width)."""
    if not isinstance(images, Tensor | np.ndarray):
        expected = "a tensor, an array or an image of Pillow"
        raise UsageError(image_name, expected=expected, found=_type_name(images))
    if isinstance(images, Tensor) and (images.is_meta or images.layout != torch.strided):
        raise UsageError(image_name, expected="a dense tensor", found=f"{images.layout} on {images.device}")
    array = np.asarray(_to_cpu_array(images))
    if required_dtype == INPUT_DTYPE and array.dtype == np.float16:
        array = array.astype(np.float32)
    if array.dtype != required_dtype:
        expected = "uint8 pixels in 0..255" if required_dtype == PIXEL_DTYPE else "float32 inputs"
        raise UsageError(image_name, expected=expected, found=f"{array.dtype}", do=_ADVICE_BY_DTYPE[required_dtype])
    if array.ndim not in (3, 4):
        axes = "height, width, channel" if channels_last else "channel, height, width"
        expected = f"axes ({axes}), or (input, {axes})"
        raise UsageError(image_name, expected=expected, found=f"shape ({', '.join(map(str, array.shape))})")
    array = array if array.ndim == 4 else array[None]
    channels, last_or_second_size = (
        (array.shape[3], array.shape[1]) if channels_last else (array.shape[1], array.shape[3])
    )
    if channels not in MODE_OF_CHANNELS and last_or_second_size in (1, 2, 3, 4) and last_or_second_size < channels:
        expected = f"axes (input, {'height, width, channel' if channels_last else 'channel, height, width'})"
        do = "Leave channels_last out" if channels_last else "Give `channels_last=True`"
        found = f"shape ({', '.join(map(str, array.shape))}): {channels} channels"
        raise UsageError(image_name, expected=expected, found=found, do=do)
    if required_dtype == INPUT_DTYPE and not np.isfinite(array).all():
        raise FormatError(image_name, expected="finite inputs", found="infinite ones or NaN")
    return np.moveaxis(array, -1, 1) if channels_last else array


def _to_cpu_array(array: Tensor | npt.NDArray[Any]) -> Tensor | npt.NDArray[Any]:
    """Return an array on the CPU in a dtype that numpy has: bfloat16 becomes float32."""
    if not isinstance(array, Tensor):
        return array
    array = array.detach().cpu()
    return array.float() if array.dtype == torch.bfloat16 else array


class _Labels:
    """The labels of images, collected batch by batch: either every image has a label, or none has.

    Args:
        data_name: name of the images in error texts.
    """

    def __init__(self, data_name: str) -> None:
        self.data_name = data_name
        self.values: list[Any] = []
        self.unlabelled = 0

    def add(self, labels: Any, image_count: int, image_name: str) -> None:
        """Add the labels of `image_count` images."""
        if labels is None:
            self.unlabelled += image_count
            return
        if isinstance(labels, Tensor | np.ndarray):
            values = np.asarray(_to_cpu_array(labels))
            if values.dtype.kind not in "iuU" or values.ndim > 1:
                expected = "a whole number for each image, its label"
                raise UsageError(image_name, expected=expected, found=f"{values.dtype}, shape {values.shape}")
            label_values = values.reshape(-1).tolist()
        else:
            label_values = list(labels) if isinstance(labels, Sequence) and not isinstance(labels, str) else [labels]
            label_values = [int(x) if isinstance(x, np.integer) else x for x in label_values]
        wrong_labels = [x for x in label_values if type(x) not in (int, str)]
        if wrong_labels:
            raise UsageError(
                image_name, expected="labels that are whole numbers or names", found=repr(wrong_labels[0])[:80]
            )
        if len(label_values) != image_count:
            raise UsageError(
                image_name, expected=f"{image_count:,} labels, one for each image", found=f"{len(label_values):,}"
            )
        self.values += label_values

    def finish(self) -> list[Any] | None:
        """Return all labels, or None if no image has a label."""
        if self.values and self.unlabelled:
            raise UsageError(
                self.data_name,
                expected="a label for every image, or for none",
                found=f"{self.unlabelled:,} images without a label",
            )
        return self.values or None


def _column_kinds(images: object) -> dict[str, str]:
    """Return column name -> kind ("Image", "ClassLabel", …) if the object is a data set of the package `datasets`, else
    {}."""
    for source in _wrapped_data_sets(images):
        features = getattr(source, "features", None)
        if isinstance(features, Mapping):
            return {str(column): type(kind).__name__ for column, kind in features.items()}
    return {}


def _class_names(images: object, label_column: str | None) -> tuple[str, ...]:
    """Return the class names of a Dataset, or of the Dataset that it wraps; () if there are none."""
    for source in _wrapped_data_sets(images):
        features = getattr(source, "features", None)
        kind = features.get(label_column) if isinstance(features, Mapping) else None
        names = getattr(source, "classes", None) if kind is None else getattr(kind, "names", None)
        if isinstance(names, list | tuple) and names and all(type(name) is str for name in names):
            return tuple(names)
    return ()


def _wrapped_data_sets(images: object) -> Iterator[object]:
    """Yield an object, then the data set that it wraps (`.dataset` of a DataLoader or Subset), and so on."""
    for _ in range(MAX_NESTED_SUBSETS):
        if images is None:
            return
        yield images
        images = getattr(images, "dataset", None)
