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
    problem: Problem, runs: int, seed: int, *, schedule: str, lr: float, epochs_after_mode: Sequence[int]
) -> dict[int, Tensors]:
    """Continue the training of the modes by SGD; return epoch -> parameters and buffers, (run, *shape).

    Momentum starts at zero. Batches, augmentation, momentum and weight decay are as in the recipe. The optimizer is SGD
    even if the recipe has another one: the methods are defined for SGD.

    Args:
        problem: problem whose modes are trained further.
        runs: number of runs.
        seed: seed of the order in which each run sees the images.
        schedule: "constant", or "cosine-restarts" with one cycle up to each epoch of `epochs_after_mode`.
        lr: highest learning rate.
        epochs_after_mode: rising numbers of epochs since the mode, at which copies are returned; 0 for the mode itself.

    Raises:
        UsageError: a training loss was not finite.
    """
    mode_epoch, trains_singly = problem.recipe.epochs, problem.recipe.stack_width == 1
    recorded_epochs = [mode_epoch + epoch for epoch in epochs_after_mode]
    recipe = replace(
        problem.recipe,
        schedule=schedule,
        lr=lr,
        schedule_unit="step",
        milestones=tuple(sorted({mode_epoch, *recorded_epochs[:-1]})) if schedule == "cosine-restarts" else (),
        epochs=recorded_epochs[-1],
        snapshots=tuple(recorded_epochs[:-1]),
        stack_width=1 if trains_singly else runs,
        warmup_epochs=0,
        averaging="none",
        eval_every=0,
        optimizer="sgd",
        beta2=Recipe.beta2,
        epsilon=Recipe.epsilon,
    )
    ids, modes = [derive_seed(seed, f"run {run}") for run in range(runs)], problem.trained_state(runs)
    runs_at_once = 1 if trains_singly else runs
    stacks: list[dict[int, Tensors]] = []
    for start in range(0, runs, runs_at_once):
        state = _copy_runs(modes, slice(start, start + runs_at_once))
        state.epoch, state.snapshots[mode_epoch] = mode_epoch, _copy_state(state)
        for _ in train_epochs(recipe, ids[start : start + runs_at_once], state, problem.images):
            pass
        if bool((state.failed_step >= 0).any()):
            raise UsageError(
                f"rate {lr:g} from a mode of {recipe.name!r}",
                expected="finite losses",
                found="others",
                do="Lower the rate",
            )
        stacks.append({**state.snapshots, recorded_epochs[-1]: _copy_state(state)})
    names = [name for name in stacks[0][mode_epoch] if not is_counter(name)]
    return {
        e - mode_epoch: {name: torch.cat([part[e][name] for part in stacks]) for name in names} for e in recorded_epochs
    }


def _copy_state(state: StackState) -> Tensors:
    return {name: t.detach().cpu().clone() for name, t in {**state.params, **state.buffers}.items()}


def _copy_runs(modes: StackState, run_slice: slice) -> StackState:
    """Copy some runs of a stack, because training changes tensors in place."""

    def copy_tensors(tensors: Tensors) -> Tensors:
        return {name: tensor[run_slice].clone() for name, tensor in tensors.items()}

    return StackState(
        copy_tensors(modes.params),
        copy_tensors(modes.momentum),
        copy_tensors(modes.buffers),
        modes.loss[run_slice].clone(),
        modes.failed_step[run_slice].clone(),
        scaling=copy_tensors(modes.scaling),
    )
