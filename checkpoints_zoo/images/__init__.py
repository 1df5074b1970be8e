"""Image data by name or of the user's own, as uint8 pixels, and the preprocessing that a collection's members expect.

Axes: images are (input, channel, height, width), labels (input,).
"""

from __future__ import annotations

from checkpoints_zoo.images.classes import CLASSES
from checkpoints_zoo.images.conversion import Given, of, prepared
from checkpoints_zoo.images.data_sets import DATASETS, load
from checkpoints_zoo.images.image_data import ImageData, Prepared, in_order
from checkpoints_zoo.images.preprocess import Preprocess

__all__ = ["CLASSES", "DATASETS", "Given", "ImageData", "Prepared", "Preprocess", "in_order", "load", "of", "prepared"]
