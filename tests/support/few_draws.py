"""Draws of made-up methods: members of convnet-digits and noise around them, quick to make and to tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.images import ImageData

RUNS, DRAWS = 4, 6
PERMUTATIONS = 39


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits")


@pytest.fixture(scope="module")
def draws(members: zoo.Collection, tmp_path_factory: pytest.TempPathFactory) -> dict[str, zoo.Collection]:
    """Draws of two methods, one nearer to its modes than the other, and members that are not among the first 20."""
    out = tmp_path_factory.mktemp("draws")
    return {
        "swag": noisy(members[40:], "swag", out, 0.05),
        "vi": noisy(members[50:], "vi", out, 0.4),
        "fresh": members[20:40],
    }


@pytest.fixture(scope="module")
def asked(draws: dict[str, zoo.Collection]) -> dict[str, Any]:
    """Arguments of `zoo.compare` beside the population and the folder."""
    inside, outside = few_images()
    return {
        "methods": (), "data": inside, "ood": outside, "draws": draws, "permutations": PERMUTATIONS, "workers": 1,
    }  # fmt: skip


def noisy(members: zoo.Collection, method: str, out: Path, spread: float, runs: int = RUNS) -> zoo.Collection:
    """Draw around members, one run each: every tensor of a member plus noise of a share of its standard deviation."""
    generator = torch.Generator().manual_seed(len(method))
    stacked = members.stack()

    def draw(run: int) -> dict[str, torch.Tensor]:
        return {n: t[run] + spread * t[run].std() * torch.randn(t[run].shape, generator=generator)
                for n, t in stacked.items()}  # fmt: skip

    numbers = [run for run in range(runs) for _ in range(DRAWS)]
    return zoo.from_samples(
        [draw(run) for run in numbers],
        "convnet",
        arguments=members.description.arguments,
        method=method,
        out=out,
        name=f"convnet-digits-{method}-multi",
        run=numbers,
        like="convnet-digits",
    )


def few_images() -> tuple[ImageData, ImageData]:
    """Return 150 digits with their labels, and 60 photographs."""
    digits, photos = zoo.images.load("digits"), zoo.images.load("photos")
    assert digits.labels is not None
    inside = ImageData("digits", "test", digits.images[:150], digits.labels[:150], digits.classes)
    return inside, ImageData("photos", "test", photos.images[:60])
