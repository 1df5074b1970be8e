"""Schedules: the learning rate of every step, against torch's schedulers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler

from checkpoints_zoo.training.learning_rates import learning_rate
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import RECIPES, convnet_digits

EPOCHS, EACH = 12, 5
STEPS = EPOCHS * EACH
BASE = dataclasses.replace(convnet_digits(), lr=0.3, epochs=EPOCHS)
Make = Callable[[torch.optim.SGD], LRScheduler]


def rates(make: Make, lr: float, units: int, repeat: int) -> list[float]:
    """What torch's scheduler gives in each step, `repeat` steps a unit."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler, found = make(optimizer), []
    for unit in range(units):
        found += [float(optimizer.param_groups[0]["lr"])] * repeat
        optimizer.step()
        if unit < units - 1:  # a one-cycle refuses a step behind its last
            scheduler.step()
    return found


def warmed(units: int, after: Make) -> Make:
    """Linear from 1/units up, then another schedule that begins anew."""

    def make(optimizer: torch.optim.SGD) -> LRScheduler:
        first = torchs.LinearLR(optimizer, start_factor=1 / units, total_iters=units - 1)
        return torchs.SequentialLR(optimizer, [first, after(optimizer)], milestones=[units])

    return make


def chained(units: int, after: Make) -> Make:
    """Linear from 1/units up, and at the same time another schedule."""

    def make(optimizer: torch.optim.SGD) -> LRScheduler:
        first = torchs.LinearLR(optimizer, start_factor=1 / units, total_iters=units - 1)
        return torchs.ChainedScheduler([first, after(optimizer)], optimizer)

    return make


def cosine(units: int) -> Make:
    return lambda optimizer: torchs.CosineAnnealingLR(optimizer, T_max=units)


def multistep(*units: int, gamma: float = 0.1) -> Make:
    return lambda optimizer: torchs.MultiStepLR(optimizer, list(units), gamma)


def restarts(units: int, times: int = 1) -> Make:
    return lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, T_0=units, T_mult=times)


def first_longer(first: int, units: int) -> Make:
    """A first cycle of its own length, as of a snapshot ensemble."""

    def make(optimizer: torch.optim.SGD) -> LRScheduler:
        return torchs.SequentialLR(optimizer, [cosine(first)(optimizer), restarts(units)(optimizer)], [first])

    return make


def one_cycle(units: int) -> Make:
    return lambda optimizer: torchs.OneCycleLR(optimizer, max_lr=0.3, total_steps=units, cycle_momentum=False)


MULTI: dict[str, Any] = {"schedule": "multistep", "milestones": (4, 9), "gamma": 0.2}
CYCLES: dict[str, Any] = {"schedule": "cosine-restarts"}
CASES: dict[str, tuple[dict[str, Any], Make, int]] = {  # fields, torch's, steps a unit
    "cosine-step": ({}, cosine(STEPS), 1),
    "cosine-epoch": ({"schedule_unit": "epoch"}, cosine(EPOCHS), EACH),
    "cosine-warm-step": ({"warmup_epochs": 2}, warmed(2 * EACH, cosine(STEPS - 2 * EACH)), 1),
    "cosine-warm-epoch": (
        {"warmup_epochs": 3, "schedule_unit": "epoch"}, warmed(3, cosine(EPOCHS - 3)), EACH,
    ),
    "multistep-step": (MULTI, multistep(4 * EACH, 9 * EACH, gamma=0.2), 1),
    "multistep-epoch": ({**MULTI, "schedule_unit": "epoch"}, multistep(4, 9, gamma=0.2), EACH),
    "multistep-warm": ({**MULTI, "warmup_epochs": 3}, chained(3 * EACH, multistep(4 * EACH, 9 * EACH, gamma=0.2)), 1),
    "restarts-step": ({**CYCLES, "milestones": (3, 6, 9)}, restarts(3 * EACH), 1),
    "restarts-epoch": ({**CYCLES, "milestones": (3, 6, 9), "schedule_unit": "epoch"}, restarts(3), EACH),
    "restarts-longer": ({**CYCLES, "milestones": (4,)}, restarts(4 * EACH, times=2), 1),
    "restarts-each-epoch": ({**CYCLES, "milestones": tuple(range(1, EPOCHS))}, restarts(EACH), 1),
    "restarts-long-first": ({**CYCLES, "milestones": (6, 8, 10)}, first_longer(6 * EACH, 2 * EACH), 1),
    "restarts-warm": (
        {**CYCLES, "milestones": (2, 7), "warmup_epochs": 2}, warmed(2 * EACH, restarts(5 * EACH)), 1,
    ),
    "restarts-cut": ({**CYCLES, "milestones": (8, 16)}, restarts(8 * EACH), 1),
    "constant": ({"schedule": "constant"}, lambda optimizer: torchs.ConstantLR(optimizer, factor=1.0), 1),
    "one-cycle-step": ({"schedule": "one-cycle"}, one_cycle(STEPS), 1),
    "one-cycle-epoch": ({"schedule": "one-cycle", "schedule_unit": "epoch"}, one_cycle(EPOCHS), EACH),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_rates_are_torchs(case: str) -> None:
    changes, make, repeat = CASES[case]
    recipe = dataclasses.replace(BASE, **changes)
    wanted = rates(make, 0.3, STEPS // repeat, repeat)
    got = [learning_rate(recipe, step, STEPS) for step in range(STEPS)]
    assert got == pytest.approx(wanted, abs=1e-7, rel=0)


def official(recipe: Recipe) -> Make:
    """What the recipes of large networks say, in torch's words."""
    if recipe.schedule == "multistep":
        return multistep(*recipe.milestones, gamma=recipe.gamma)
    return cosine(recipe.epochs)


@pytest.mark.parametrize("name", [n for n in RECIPES if RECIPES[n]().schedule_unit == "epoch"])
def test_rates_of_recipes_by_epoch(name: str) -> None:
    recipe = RECIPES[name]()
    steps = 3 * recipe.epochs
    got = [learning_rate(recipe, step, steps) for step in range(steps)]
    assert got == pytest.approx(rates(official(recipe), recipe.lr, recipe.epochs, 3), abs=1e-7, rel=0)


def test_a_short_run_may_end_in_its_warm_up() -> None:
    recipe = dataclasses.replace(RECIPES["resnet20-frn-silu-cifar10"](), epochs=1)
    assert [learning_rate(recipe, step, 4) for step in range(4)] == pytest.approx([0.1 * n / 20 for n in (1, 2, 3, 4)])
