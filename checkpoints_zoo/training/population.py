"""Training of many members: stacks of the recipe's width, one after another, resumed after a kill.

This is one file, because a stack that is resumed or split is trained and stored by the same steps.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.errors import DamagedError, TooLargeError, UsageError
from checkpoints_zoo.formats.disk import sync_folder, translate_write_errors
from checkpoints_zoo.formats.layout import is_statistic
from checkpoints_zoo.networks.device import free_if_short, one_thread
from checkpoints_zoo.networks.modules import first_names
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.loop import (
    StackState,
    initial_state,
    measure_accuracies,
    train_epochs,
    trains_on_one_thread,
)
from checkpoints_zoo.training.optimizers import stored_tensors
from checkpoints_zoo.training.recipe import STORAGE_DTYPES, Recipe
from checkpoints_zoo.training.sent_recipes import SentRecipe, rebuild_recipe, serialize_recipe
from checkpoints_zoo.training.state import (
    RunKey,
    adopt_state,
    claim_folder,
    clean_folder,
    divide_into_stacks,
    read_state,
    recorded_recipe_hash,
    state_file_name,
    training_lock,
    write_state,
)
from checkpoints_zoo.workers import Engine, InProcess, Job


@dataclass(frozen=True, eq=False)
class TrainedMember:
    """A member after its training.

    Args:
        member, seed: id of the member, which is its seed as well.
        status, reason: "ok" and "", or "failed" and the reason.
        state: parameters and buffers by name, in float32, without `num_batches_tracked`.
        train_loss: mean training loss over the steps of the last epoch, nats.
        wall_time_s: the member's share of the seconds that its stack took, interrupted runs included.
        snapshots: epoch -> parameters and buffers by name, as in `state`.
        device: name of the device on which the member was trained.
    """

    member: int
    seed: int
    status: str
    reason: str
    state: dict[str, Tensor]
    train_loss: float
    wall_time_s: float
    snapshots: Mapping[int, dict[str, Tensor]] = field(default_factory=dict)
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it can't be changed)


@dataclass(frozen=True)
class Progress:
    """Progress of a stack: members, epochs done, epochs in all, and the mean loss of the last epoch in nats.

    `accuracy` is the members' mean accuracy on the test split in 0..1; None if the recipe does not measure accuracy
    after this epoch.
    """

    members: tuple[int, ...]
    epoch: int
    epochs: int
    loss: float
    accuracy: float | None = None


def train_members(
    recipe: Recipe,
    ids: Sequence[int],
    out: Path,
    finish: Callable[[list[Any]], None],
    progress: Callable[[Progress], None] | None = None,
    engine: Engine = InProcess(),  # noqa: B008 (it can't be changed)
    convert_members: Callable[[Recipe, list[TrainedMember], str], list[Any]] | None = None,
) -> None:
    """Train members, and pass each finished stack to `finish`.

    A killed run resumes from its last saved state and ends with the same bytes. If a run is killed between `finish` and
    the removal of the saved state, `finish` gets the stack twice: the second call must change nothing.

    Args:
        recipe: recipe by which the members are trained.
        ids: ids of the members that `out` does not have yet, each once.
        out: folder of the source; states are saved in its folder `.training`.
        finish: function that gets a stack's members and writes them to disk before it returns.
        progress: function that is called after every epoch of a stack that this process trains.
        engine: engine that runs the stacks, each as a job.
        convert_members: function that is called by the worker with the trained members of a stack; `finish` gets its
            result. None passes the members unchanged.

    Raises:
        UsageError: some ids are invalid, or the folder holds members of another recipe of this name.
        LockedError: another process is training into the same folder.
        WorkerError: workers died repeatedly.
    """
    check_ids(ids)
    with training_lock(out):
        folder = claim_folder(out, recipe)
        clean_folder(folder, set(ids), recipe.epochs)
        stacks = divide_into_stacks(folder, recipe, ids)
        jobs = [Job(f"member {s[0]}" if len(s) == 1 else f"members {s[0]} to {s[-1]}", s) for s in stacks]
        trainer = StackTrainer(recipe, folder, convert_members, progress)
        with closing(engine.run(trainer, jobs)) as results:
            for job, finished in results:
                finish(finished)
                with translate_write_errors(folder):
                    (folder / state_file_name(job.argument)).unlink(missing_ok=True)
                    sync_folder(folder)


@dataclass(frozen=True, eq=False)
class StackTrainer:
    """A job function for engines: trains a stack of a recipe's members, from its saved state if there is one.

    Args:
        recipe: recipe by which the members are trained.
        folder: folder of the recipe's runs. Workers that see this folder save states in it; None saves no states.
        convert_members: function called with the trained members and the device; None returns the members unchanged.
        progress: function called after every epoch; it is not sent to other processes.
    """

    recipe: Recipe
    folder: Path | None
    convert_members: Callable[[Recipe, list[TrainedMember], str], list[Any]] | None = None
    progress: Callable[[Progress], None] | None = None

    def __call__(self, stack: tuple[int, ...], device: str) -> list[Any]:
        """Train the stack on a device; return its members, or the result of `convert_members`."""
        path = None
        if self.folder is not None and recorded_recipe_hash(self.folder) == self.recipe.hash:
            path = self.folder / state_file_name(stack)
        data, torch_device = self.recipe.split("train"), torch.device(device)
        try:
            with one_thread(trains_on_one_thread(self.recipe, torch_device)):
                trained = train_stack(self.recipe, stack, data, path, self.progress, torch_device)
                return trained if self.convert_members is None else self.convert_members(self.recipe, trained, device)
        except torch.OutOfMemoryError as error:
            raise TooLargeError(
                f"a stack of {self.recipe.stack_width} members on {device}",
                expected="room for it in the device's memory",
                found=str(error).split(". ")[0],
                do="Give the device fewer workers, or set a smaller stack_width or batch_size: that is another recipe",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_trainer, (serialize_recipe(self.recipe), self.folder, self.convert_members)


def _rebuild_trainer(sent_recipe: SentRecipe, folder: Path | None, convert_members: Any) -> StackTrainer:
    return StackTrainer(rebuild_recipe(sent_recipe), folder, convert_members)


def train_stack(
    recipe: Recipe,
    stack: tuple[int, ...],
    data: images.ImageData,
    state_path: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (it can't be changed)
) -> list[TrainedMember]:
    """Train a stack to the end of the recipe, from its saved state if there is one; return its members.

    Args:
        recipe: recipe by which the members are trained.
        stack: ids of the members, at most the recipe's stack width.
        data: images of the training split.
        state_path: path of the saved state; None saves no states.
        progress: function called after every epoch.
        device: torch device to train on.
    """
    members = stack + stack[-1:] * (recipe.stack_width - len(stack))
    key = RunKey(recipe.hash, stack, str(torch.__version__))
    test_data = recipe.split("test") if recipe.eval_every else None  # A member's own recipe would load images again.
    recipe = recipe.of_member(stack[0])
    _check_memory(recipe, stack)
    state, earlier_seconds = initial_state(recipe, members).to(device), 0.0
    if state_path is not None and state_path.exists():
        earlier_seconds = _resume_state(state_path, key, state)
    start_time = time.monotonic()
    for epoch in train_epochs(recipe, members, state, data):
        if state_path is not None and (epoch % recipe.save_every == 0 or epoch == recipe.epochs):
            with translate_write_errors(state_path.parent):
                write_state(state_path, state, key, earlier_seconds + time.monotonic() - start_time)
        if progress is not None:
            loss, accuracy = state.loss[: len(stack)].mean().item(), None
            if test_data is not None and epoch % recipe.eval_every == 0:
                accuracies = measure_accuracies(recipe, state, data, test_data)
                accuracy = accuracies[: len(stack)].mean().item()
            progress(Progress(stack, epoch, recipe.epochs, loss, accuracy))
    seconds_per_member = (earlier_seconds + time.monotonic() - start_time) / len(stack)
    return _split_stack(recipe, stack, state, seconds_per_member, data)


def _check_memory(recipe: Recipe, stack: tuple[int, ...]) -> None:
    """Check that the weights, optimizer states and gradients of a stack fit into the free memory.

    Raises:
        TooLargeError: the free memory is too small.
    """
    bytes_per_member = sum(tensor.numel() * tensor.element_size() for tensor in recipe.skeleton().parameters())
    needed = (3 if recipe.optimizer == "sgd" else 4) * bytes_per_member * recipe.stack_width
    if (free_bytes := free_if_short(needed)) is not None:
        raise TooLargeError(
            f"a stack of {recipe.stack_width:,} members, from member {stack[0]}",
            expected=f"at most {free_bytes:,} bytes for weights, optimizer state and gradients, the memory that is "
            "free",
            found=f"{needed:,}",
            do="Set a smaller stack_width: that is another recipe",
        )


def _resume_state(state_path: Path, run_key: RunKey, new_state: StackState) -> float:
    """Load a saved state into a new state; return the seconds of training so far, and print why a state can't be
    used."""
    try:
        saved_state, found_key, earlier_seconds = read_state(state_path)
        if found_key != run_key or not adopt_state(new_state, saved_state):
            raise DamagedError(
                f"training state {state_path.name}", expected=f"a state of {run_key}", found=f"one of {found_key}"
            )
    except DamagedError as error:
        print(f"{error} The state is deleted, and its members are trained from the start.", file=sys.stderr)
        state_path.unlink()
        return 0.0
    return earlier_seconds


def _split_stack(
    recipe: Recipe, stack: tuple[int, ...], state: StackState, seconds_per_member: float, data: images.ImageData
) -> list[TrainedMember]:
    """Split a stack into members; mark those whose loss or weights were not finite as failed."""
    trained_name_of_stored = first_names(recipe.skeleton())  # Name in the stored file -> name of the trained tensor.
    final_tensors = stored_tensors(recipe, state.params, state.buffers, state.averages, data)
    trained = []
    for position, member in enumerate(stack):
        tensors, reason = _member_tensors(trained_name_of_stored, final_tensors, position), ""
        snapshots = {
            epoch: _member_tensors(trained_name_of_stored, tensors_of_epoch, position)
            for epoch, tensors_of_epoch in state.snapshots.items()
        }
        step = int(state.failed_step[position])
        not_finite_names = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        too_large_names = (
            []
            if not_finite_names
            else [name for name, tensor in tensors.items() if not _is_finite_when_stored(recipe, name, tensor)]
        )
        if step >= 0:
            reason = f"the loss was not finite at step {step} (epoch {step // (len(data) // recipe.batch_size)})"
        elif not_finite_names:
            reason = f"{not_finite_names[0]} was not finite at the end"
        elif too_large_names:
            reason = f"{too_large_names[0]} was beyond {recipe.storage} at the end"
        trained.append(
            TrainedMember(
                member=member,
                seed=member,
                status="failed" if reason else "ok",
                reason=reason,
                state=tensors,
                train_loss=state.loss[position].item(),
                wall_time_s=seconds_per_member,
                snapshots={} if reason else snapshots,
                device=state.loss.device,
            )
        )
    return trained


def _is_finite_when_stored(recipe: Recipe, tensor_name: str, tensor: Tensor) -> bool:
    """Return whether a tensor stays finite in the dtype of its storage."""
    is_cast = tensor.is_floating_point() and not is_statistic(tensor_name)
    return bool((tensor.to(STORAGE_DTYPES[recipe.storage]) if is_cast else tensor).isfinite().all())


def _member_tensors(
    trained_name_of_stored: Mapping[str, str], stacked_tensors: Tensors, position: int
) -> dict[str, Tensor]:
    """Return copies on the CPU of a member's tensors in a stack, except counters."""
    return {
        name: stacked_tensors[trained_name][position].detach().cpu().contiguous().clone()
        for name, trained_name in trained_name_of_stored.items()
        if name.rpartition(".")[2] != "num_batches_tracked"
    }


def check_ids(ids: Sequence[int]) -> None:
    """Check that all ids are in [0, 2^31) and none is repeated.

    Raises:
        UsageError: an id is invalid or repeated.
    """
    invalid_ids = [member for member in ids if not 0 <= member < 2**31]
    if invalid_ids:
        raise UsageError(f"member {invalid_ids[0]}", expected="an id in [0, 2^31)", found=str(invalid_ids[0]))
    if len(set(ids)) < len(ids):
        [(repeated, _)] = Counter(ids).most_common(1)
        raise UsageError("ids", expected="each once", found=f"member {repeated} more than once")
