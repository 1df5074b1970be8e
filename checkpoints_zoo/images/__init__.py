"""Image data as uint8 pixels, from a name or from the user's own data, and the preprocessing that members expect.

Axes: images are (input, channel, height, width), labels (input,).
"""

from __future__ import annotations

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
