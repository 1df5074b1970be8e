"""The first handwritten digits of a split, and noise in their stead."""

from __future__ import annotations

from dataclasses import replace

import torch

from checkpoints_zoo import images
from checkpoints_zoo.images import ImageData


def noise() -> tuple[ImageData, ImageData]:
    """Give the images of a recipe, drawn at random: a process that trains on them imports no scikit-learn."""
    draw = torch.Generator().manual_seed(0)

    def split(name: str, count: int) -> ImageData:
        pixels = torch.randint(256, (count, 1, 8, 8), generator=draw, dtype=torch.uint8)
        return ImageData("noise", name, pixels, torch.arange(count) % 10, tuple(map(str, range(10))))

    return split("train", 64), split("test", 20)


def some(split: str, count: int) -> ImageData:
    whole = images.load("digits", split)
    assert whole.labels is not None
    return replace(whole, images=whole.images[:count], labels=whole.labels[:count])
