"""The first handwritten digits of a split."""

from __future__ import annotations

from dataclasses import replace

from checkpoints_zoo import images
from checkpoints_zoo.images import ImageData


def some(split: str, count: int) -> ImageData:
    whole = images.load("digits", split)
    assert whole.labels is not None
    return replace(whole, images=whole.images[:count], labels=whole.labels[:count])
