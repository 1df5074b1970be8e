"""Augmentation as a fixed set of views of every image, of which a member's seed chooses one an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _none(images: Tensor) -> Tensor:
    return images[None]


def _shift1(images: Tensor) -> Tensor:
    """Shift by -1, 0 or 1 pixels along both axes; what comes in is black."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1))
    return torch.stack([padded[..., y : y + height, x : x + width] for y, x in itertools.product(range(3), repeat=2)])


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _none,
    "shift1": _shift1,
}


def views(images: Tensor, augmentation: str) -> Tensor:
    """Give all views of images, (view, input, channel, height, width).

    Args:
        images: pixels, before normalisation, (input, channel, height, width).
        augmentation: a key of `AUGMENTATIONS`.

    >>> views(torch.ones(5, 1, 8, 8, dtype=torch.uint8), "shift1").shape
    torch.Size([9, 5, 1, 8, 8])
    """
    return AUGMENTATIONS[augmentation](images)
