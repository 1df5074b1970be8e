"""Learning rates: the schedule of a recipe as a function of the step."""

from __future__ import annotations

import math
from bisect import bisect_right

from checkpoints_zoo.training.recipe import Recipe

# The one-cycle schedule: share of the steps that rise; highest rate / first rate; first rate / last rate.
ONE_CYCLE_RISE_SHARE, ONE_CYCLE_PEAK_TO_FIRST, ONE_CYCLE_FIRST_TO_LAST = 0.3, 25.0, 1e4


def learning_rate(recipe: Recipe, step: int, step_count: int) -> float:
    """Return the learning rate of a step.

    Sources: cosine annealing, without and with restarts, Loshchilov & Hutter 2017, equation 5; one cycle, Smith & Topin
    2018, in torch's form; warm-up, Goyal et al. 2017, section 2.2: linear over n units, from 1/n of the rate to the
    whole rate. After a warm-up the cosine covers the remaining steps or epochs; milestones count from
    the start of training.

    Args:
        recipe: recipe with the schedule of learning rates.
        step: number of the step, in [0, step_count).
        step_count: number of steps of the whole training; each epoch has the same number.

    >>> from checkpoints_zoo.training.recipes import RECIPES
    >>> [round(learning_rate(RECIPES["resnet18-cifar10"](), epoch * 390, 75 * 390), 6) for epoch in (0, 24, 25)]
    [0.05, 0.05, 0.005]
    """
    steps_per_epoch = max(1, step_count // recipe.epochs)
    epoch = step // steps_per_epoch
    unit, unit_count = (epoch, recipe.epochs) if recipe.schedule_unit == "epoch" else (step, step_count)
    warmup_units = recipe.warmup_epochs * (1 if recipe.schedule_unit == "epoch" else steps_per_epoch)
    if unit < warmup_units:
        return recipe.lr * (unit + 1) / warmup_units
    if recipe.schedule == "cosine":
        return recipe.lr * (1 + math.cos(math.pi * (unit - warmup_units) / (unit_count - warmup_units))) / 2
    if recipe.schedule == "cosine-restarts":
        cycle_start, cycle_end = (bound * unit_count // recipe.epochs for bound in _cycle_bounds(recipe, epoch))
        cycle_start = max(cycle_start, warmup_units)
        return recipe.lr * (1 + math.cos(math.pi * (unit - cycle_start) / (cycle_end - cycle_start))) / 2
    if recipe.schedule == "multistep":
        return recipe.lr * recipe.gamma ** bisect_right(recipe.milestones, epoch)
    if recipe.schedule == "one-cycle":
        return _one_cycle_rate(recipe.lr, unit, unit_count)
    return recipe.lr


def _cycle_bounds(recipe: Recipe, epoch: int) -> tuple[int, int]:
    """Return the first and last epoch of the cosine cycle that an epoch is in."""
    index = bisect_right(recipe.milestones, epoch)
    bounds = (0, *recipe.milestones)
    return bounds[index], bounds[index + 1] if index < len(recipe.milestones) else recipe.epochs


def _one_cycle_rate(highest_rate: float, unit: int, unit_count: int) -> float:
    """Return the rate of a step or epoch, which rises from `highest_rate / ONE_CYCLE_PEAK_TO_FIRST`, then falls to
    almost zero."""
    peak_unit = ONE_CYCLE_RISE_SHARE * unit_count - 1
    if unit <= peak_unit:
        return _interpolate_by_cosine(highest_rate / ONE_CYCLE_PEAK_TO_FIRST, highest_rate, unit / peak_unit)
    return _interpolate_by_cosine(
        highest_rate,
        highest_rate / ONE_CYCLE_PEAK_TO_FIRST / ONE_CYCLE_FIRST_TO_LAST,
        (unit - peak_unit) / (unit_count - 1 - peak_unit),
    )


def _interpolate_by_cosine(start_rate: float, end_rate: float, share: float) -> float:
    return end_rate + (start_rate - end_rate) * (1 + math.cos(math.pi * share)) / 2
