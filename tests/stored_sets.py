"""Small sources with stored predictions, shared by their tests."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints_zoo.images import ImageData
from checkpoints_zoo.predictions import Predictions, predict
from tests.scenarios import Built, build, hand_made, load

INSIDE = "predictions/tiny/few-test"


def few(count: int = 9, seed: int = 0) -> ImageData:
    """Some small images with labels of the ten digits."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return ImageData("few", "test", pixels, labels, tuple("0123456789"))


def six(root: Path) -> tuple[Built, Predictions]:
    """Write six members with snapshots in two shards, and the predictions of the final ones."""
    built = build(root, members=range(6), per_shard=3, snapshots=(20,))
    return built, predict(load(built), few(), built.root)


def by_loop(built: Built, member: int, data: ImageData) -> torch.Tensor:
    """A member's logits by its module alone."""
    with torch.no_grad():
        logits: torch.Tensor = hand_made(built, member)(load(built).preprocess(data.images))
    return logits
