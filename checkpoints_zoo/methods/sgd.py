"""Continue SGD from the modes, for snapshot ensembles and SWAG.

Axes: stacked tensors are (run, *shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.loop import StackState, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import derive_seed


def continue_training(
    problem: Problem, runs: int, seed: int, *, schedule: str, lr: float, after: Sequence[int]
) -> dict[int, Tensors]:
    """Continue the training of the modes by SGD; return epoch -> parameters and buffers, (run, *shape).

    Momentum starts at zero. Batches, augmentation, momentum and weight decay are as in the recipe. The optimizer is SGD
    even if the recipe has another one: the methods are defined for SGD.

    Args:
        problem: problem whose modes are trained further.
        runs: number of runs.
        seed: seed of the order in which each run sees the images.
        schedule: "constant", or "cosine-restarts" with a cycle up to each of the epochs.
        lr: highest rate.
        after: numbers of epochs since the mode at which a copy is returned, rising; 0 for the mode itself.

    Raises:
        UsageError: a training loss was not finite.
    """
    first, one_by_one = problem.recipe.epochs, problem.recipe.stack_width == 1
    at = [first + epoch for epoch in after]
    recipe = replace(
        problem.recipe,
        schedule=schedule,
        lr=lr,
        schedule_unit="step",
        milestones=tuple(sorted({first, *at[:-1]})) if schedule == "cosine-restarts" else (),
        epochs=at[-1],
        snapshots=tuple(at[:-1]),
        stack_width=1 if one_by_one else runs,
        warmup_epochs=0,
        averaging="none",
        eval_every=0,
        optimizer="sgd",
        beta2=Recipe.beta2,
        epsilon=Recipe.epsilon,
    )
    ids, modes = [derive_seed(seed, f"run {run}") for run in range(runs)], problem.trained_state(runs)
    size = 1 if one_by_one else runs
    parts: list[dict[int, Tensors]] = []
    for start in range(0, runs, size):
        state = _copy_runs(modes, slice(start, start + size))
        state.epoch, state.snapshots[first] = first, _copy_state(state)
        for _ in train_epochs(recipe, ids[start : start + size], state, problem.images):
            pass
        if bool((state.failed_step >= 0).any()):
            raise UsageError(
                f"rate {lr:g} from a mode of {recipe.name!r}",
                expected="finite losses",
                found="others",
                do="Lower the rate",
            )
        parts.append({**state.snapshots, at[-1]: _copy_state(state)})
    names = [name for name in parts[0][first] if not is_counter(name)]
    return {e - first: {name: torch.cat([part[e][name] for part in parts]) for name in names} for e in at}


def _copy_state(state: StackState) -> Tensors:
    return {name: t.detach().cpu().clone() for name, t in {**state.params, **state.buffers}.items()}


def _copy_runs(modes: StackState, runs: slice) -> StackState:
    """Copy some runs of a stack, because training changes tensors in place."""

    def of(tensors: Tensors) -> Tensors:
        return {name: tensor[runs].clone() for name, tensor in tensors.items()}

    return StackState(
        of(modes.params),
        of(modes.momentum),
        of(modes.buffers),
        modes.loss[runs].clone(),
        modes.failed_step[runs].clone(),
        scaling=of(modes.scaling),
    )
