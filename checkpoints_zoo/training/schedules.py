"""Schedules: the learning rate of a step, as torch's schedulers give it.

A schedule moves step by step or epoch by epoch, as `schedule_unit` says; milestones and warm-up are counted in epochs.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from checkpoints_zoo.training.recipe import Recipe

# Of a one-cycle schedule: share of the rise, first and last rate as parts of the highest and of the first.
RISE, FIRST, LAST = 0.3, 25.0, 1e4


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Return the learning rate of a step.

    Sources: cosine annealing, without and with restarts, Loshchilov & Hutter 2017, equation 5; one cycle, Smith & Topin
    2018, in torch's form; warm-up, Goyal et al. 2017, section 2.2: linear, from 1/n of the rate in the first of its n
    units to the whole rate in the last. After a warm-up the cosine covers what is left, milestones are where they were.

    Args:
        recipe: with the schedule.
        step: in [0, steps).
        steps: of the whole recipe, as many in each epoch.

    >>> from checkpoints_zoo.training.recipes import RECIPES
    >>> [round(learning_rate(RECIPES["resnet18-cifar10"](), epoch * 390, 75 * 390), 6) for epoch in (0, 24, 25)]
    [0.05, 0.05, 0.005]
    """
    each = max(1, steps // recipe.epochs)
    epoch = step // each
    at, total = (epoch, recipe.epochs) if recipe.schedule_unit == "epoch" else (step, steps)
    warm = recipe.warmup_epochs * (1 if recipe.schedule_unit == "epoch" else each)
    if at < warm:
        return recipe.lr * (at + 1) / warm
    if recipe.schedule == "cosine":
        return recipe.lr * (1 + math.cos(math.pi * (at - warm) / (total - warm))) / 2
    if recipe.schedule == "cosine-restarts":
        first, last = (bound * total // recipe.epochs for bound in _cycle(recipe, epoch))
        first = max(first, warm)
        return recipe.lr * (1 + math.cos(math.pi * (at - first) / (last - first))) / 2
    if recipe.schedule == "multistep":
        return recipe.lr * recipe.gamma ** bisect_right(recipe.milestones, epoch)
    if recipe.schedule == "one-cycle":
        return _one_cycle(recipe.lr, at, total)
    return recipe.lr


def _cycle(recipe: Recipe, epoch: int) -> tuple[int, int]:
    """Return the epochs between which the rate falls once: the last milestone or the start, the next or the end."""
    at = bisect_right(recipe.milestones, epoch)
    bounds = (0, *recipe.milestones)
    return bounds[at], bounds[at + 1] if at < len(recipe.milestones) else recipe.epochs


def _one_cycle(highest: float, at: int, total: int) -> float:
    """Return the rate of a unit: from `highest / FIRST` up in the first units, then down to next to nothing."""
    top = RISE * total - 1
    if at <= top:
        return _between(highest / FIRST, highest, at / top)
    return _between(highest, highest / FIRST / LAST, (at - top) / (total - 1 - top))


def _between(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
