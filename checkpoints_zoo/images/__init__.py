"""Image data as uint8 pixels, from a name or from the user's own data, and the preprocessing that members expect.

Axes: images are (input, channel, height, width), labels (input,).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import explain_missing_packages

if TYPE_CHECKING:
    from checkpoints_zoo.images.classes import CLASSES
    from checkpoints_zoo.images.conversion import ImageInput, of, prepared
    from checkpoints_zoo.images.data_sets import DATASETS, load
    from checkpoints_zoo.images.image_data import ImageData, Prepared, in_order
    from checkpoints_zoo.images.preprocess import Preprocess

    Given = ImageInput  # the name of ImageInput in version 0.1

__all__ = [
    "CLASSES",
    "DATASETS",
    "ImageData",
    "ImageInput",
    "Prepared",
    "Preprocess",
    "in_order",
    "load",
    "of",
    "prepared",
]

# Name -> file and name there, imported on first use: the preprocessing of a collection is read without torch.
_PLACES = {
    "CLASSES": ("classes", "CLASSES"),
    "ImageInput": ("conversion", "ImageInput"),
    "Given": ("conversion", "ImageInput"),
    "of": ("conversion", "of"),
    "prepared": ("conversion", "prepared"),
    "DATASETS": ("data_sets", "DATASETS"),
    "load": ("data_sets", "load"),
    "ImageData": ("image_data", "ImageData"),
    "Prepared": ("image_data", "Prepared"),
    "in_order": ("image_data", "in_order"),
    "Preprocess": ("preprocess", "Preprocess"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'checkpoints_zoo.images' has no attribute {name!r}")
    file, name_there = _PLACES[name]
    with explain_missing_packages(f"zoo.images.{name}"):
        public_object = getattr(import_module(f"checkpoints_zoo.images.{file}"), name_there)
    globals()[name] = public_object
    return public_object


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
