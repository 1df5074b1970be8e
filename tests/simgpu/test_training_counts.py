"""What a training step asks of the host, counted on a simulated card: one replay, whatever the network."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.architectures.resnet18 import small_resnet
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.optimizers import optimizer_step
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import recipe_by_name
from tests.simgpu.counts import Counts, counting
from tests.support.few_digits import some

pytestmark = pytest.mark.simgpu
GPU = torch.device("cuda")
# Recipe, width, and the launches in its captured step: as many as the step's operations had before it was captured.
CASES = {
    "resnet18": ("resnet18-cifar10", 1, 254),
    "resnet20": ("resnet20-frn-silu-cifar10", 2, 1322),
}


def brief(name: str, width: int) -> Recipe:
    """Return a recipe with small batches of images of 8 pixels; a ResNet-18 is narrow, with one more shortcut."""
    recipe = recipe_by_name(name)
    if recipe.architecture == "resnet18":
        recipe = dataclasses.replace(recipe, architecture="own", arguments={}, build=narrow)
    return dataclasses.replace(
        recipe, stack_width=width, batch_size=4, epochs=2, warmup_epochs=0, milestones=(), schedule="constant",
        eval_every=0, snapshots=(), preprocess=dataclasses.replace(recipe.preprocess, size=(8, 8)),
    )  # fmt: skip


def narrow() -> nn.Module:
    return small_resnet((2, 2, 2, 2), nn.Conv2d(3, 64, 3, padding=1, bias=False), 10, channels=(2, 4, 8, 16))


def colourful(count: int) -> ImageData:
    data = some("train", count)
    return dataclasses.replace(data, images=data.images.expand(-1, 3, -1, -1).contiguous())


def counts_of_epochs(recipe: Recipe, steps: int) -> tuple[Counts, Counts]:
    """Train two epochs; return the counts of each."""
    ids = list(range(recipe.stack_width))
    epochs = train_epochs(recipe, ids, initial_state(recipe, ids).to(GPU), colourful(steps * recipe.batch_size))
    with counting() as first:
        assert next(epochs) == 1
    with counting() as second:
        assert next(epochs) == 2
    epochs.close()
    return first, second


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_one_replay(case: str) -> None:
    name, width, launches = CASES[case]
    (first, short), (_, long) = (counts_of_epochs(brief(name, width), steps) for steps in (1, 2))
    assert [captured.total() for captured in first.captures] == [launches]
    assert (short.replays, long.replays) == (1, 2)
    assert long.replayed_launches == 2 * launches
    assert not long.captures
    assert long.launches == short.launches < 20
    assert long.host_waits == short.host_waits < 10
    assert long.to_card - short.to_card == 2 * 4 * width * 8  # Image and view of each input.


@pytest.mark.parametrize(("width", "passes"), [(1, 6), (3, 15)])
def test_sgd_passes_over_the_weights(width: int, passes: int) -> None:
    """The fused kernel of a single member counts the gradients as written, which a card does not write."""
    recipe = brief("resnet20-frn-silu-cifar10", width)
    params, momentum, gradients = ({"w": torch.zeros(width, 1000, device=GPU)} for _ in range(3))
    rate = torch.tensor(0.1, dtype=torch.float64, device=GPU)
    with counting() as counts:
        optimizer_step(recipe, rate, params, momentum, {}, gradients)
    assert (counts.read + counts.written) // (4 * 1000 * width) == passes
