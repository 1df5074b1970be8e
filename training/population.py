"""Many members: stacks of the recipe's width one after the other, resumed where a killed run left off."""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_zoo import architectures, images
from checkpoints_zoo.errors import DamagedError, LockedError, UsageError
from training import state as states
from training.loop import StackState, start, train_epochs
from training.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Trained:
    """A member at the end of its training.

    Args:
        member, seed: its id, and what its random numbers come from (the same number).
        status, reason: "ok" and "", or "failed" and why.
        state: parameters and buffers by name, in float32 as trained, without `num_batches_tracked`.
        train_loss: mean over the steps of the last epoch, nats.
        wall_time_s: its share of the seconds that its stack took, all runs together.
    """

    member: int
    seed: int
    status: str
    reason: str
    state: dict[str, Tensor]
    train_loss: float
    wall_time_s: float


@dataclass(frozen=True)
class Progress:
    """How far a stack is: its members, epochs done and in all, mean loss of the last epoch in nats."""

    members: tuple[int, ...]
    epoch: int
    epochs: int
    loss: float


def train(
    recipe: Recipe,
    ids: Sequence[int],
    out: Path,
    finish: Callable[[list[Trained]], None],
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Train members, and give each complete stack of them to `finish`.

    A run that was killed goes on from its last saved state and ends with the same bytes. `finish` is called
    again for a stack only if the kill came before its state was removed: it must give the same result twice.

    Args:
        recipe: the recipe.
        ids: ids of the members that `out` doesn't hold yet, each once.
        out: folder of the source; states lie in its `.training`.
        finish: stores a stack's members, to disk, before it returns.
        progress: called after every epoch of a stack.

    Raises:
        UsageError: ids that can't be, or a folder that holds members of another recipe of this name.
        LockedError: another process is training into the same folder.
    """
    _check(ids)
    with locked(out):
        folder = _claim(out, recipe)
        width = recipe.stack_width
        stacks = [tuple(ids[first : first + width]) for first in range(0, len(ids), width)]
        _clean(folder, wanted=set(ids))
        data = images.load(recipe.dataset, "train")
        for stack in stacks:
            path = folder / _state_name(stack)
            trained = _train_stack(recipe, stack, path, data, progress)
            finish(trained)
            path.unlink(missing_ok=True)
            states.sync_folder(folder)


def _train_stack(
    recipe: Recipe,
    stack: tuple[int, ...],
    path: Path,
    data: images.ImageData,
    progress: Callable[[Progress], None] | None,
) -> list[Trained]:
    """Train a stack from its saved state, or from the start, to the end of the recipe."""
    members = stack + stack[-1:] * (recipe.stack_width - len(stack))
    key = states.RunKey(recipe.hash, stack, str(torch.__version__))
    state, earlier_s = start(recipe, members), 0.0
    if path.exists():
        state, earlier_s = _resume(path, key, fresh=state)
    began = time.monotonic()
    for epoch in train_epochs(recipe, members, state, data):
        if epoch % recipe.save_every == 0 or epoch == recipe.epochs:
            states.write(path, state, key, earlier_s + time.monotonic() - began)
        if progress is not None:
            loss = state.loss[: len(stack)].mean().item()
            progress(Progress(stack, epoch, recipe.epochs, loss))
    share_s = (earlier_s + time.monotonic() - began) / len(stack)
    return _unstack(recipe, stack, state, share_s, steps_per_epoch=len(data) // recipe.batch_size)


def _resume(path: Path, key: states.RunKey, fresh: StackState) -> tuple[StackState, float]:
    """Give the saved state and its seconds, or the fresh one where the saved can't be used, and say so."""
    try:
        state, found, earlier_s = states.read(path)
        if found != key or not states.same_shapes(state, fresh):
            raise DamagedError(f"training state {path.name}", expected=f"a state of {key}", found=f"one of {found}")
    except DamagedError as error:
        print(f"{error} It is dropped, and its members are trained from the start.", file=sys.stderr)
        path.unlink()
        return fresh, 0.0
    return state, earlier_s


def _unstack(
    recipe: Recipe, stack: tuple[int, ...], state: StackState, share_s: float, steps_per_epoch: int
) -> list[Trained]:
    """Take a stack apart, and mark the members whose loss or weights weren't finite."""
    with torch.device("meta"):
        names = list(architectures.build(recipe.architecture, **recipe.arguments).state_dict())
    stacked = {**state.params, **state.buffers}
    trained = []
    for position, member in enumerate(stack):
        tensors = {
            name: stacked[name][position].clone() for name in names if name.rpartition(".")[2] != "num_batches_tracked"
        }
        reason = ""
        step = int(state.failed_step[position])
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if step >= 0:
            reason = f"the loss was not finite at step {step} (epoch {step // steps_per_epoch})"
        elif broken:
            reason = f"{broken[0]} was not finite at the end"
        trained.append(
            Trained(
                member=member,
                seed=member,
                status="failed" if reason else "ok",
                reason=reason,
                state=tensors,
                train_loss=state.loss[position].item(),
                wall_time_s=share_s,
            )
        )
    return trained


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from training into a folder while the block runs.

    Raises:
        LockedError: another process holds the lock; it goes with its process, however that ends.
    """
    lock = out / ".training" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockedError(
                f"folder {out}",
                expected="no other process training into it",
                found=f"a lock on {lock}",
                do="Wait until the other run ends, or give another folder",
                path=out,
            ) from error
        yield


def _check(ids: Sequence[int]) -> None:
    wrong = [member for member in ids if not 0 <= member < 2**31]
    if wrong:
        raise UsageError(f"member {wrong[0]}", expected="an id in [0, 2^31)", found=str(wrong[0]))
    if len(set(ids)) < len(ids):
        twice = next(member for member in ids if list(ids).count(member) > 1)
        raise UsageError("ids", expected="each once", found=f"member {twice} more than once")


def _claim(out: Path, recipe: Recipe) -> Path:
    """Give the folder of a recipe's states; it records the recipe, and another of this name is refused."""
    folder = out / ".training" / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "recipe.json"
    facts = {"hash": recipe.hash, **recipe.to_json()}
    try:
        found = json.loads(record.read_text(encoding="utf-8"))["hash"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        partial = record.with_name("recipe.json.partial")
        partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        partial.replace(record)
        return folder
    if found != recipe.hash:
        raise UsageError(
            f"folder {out}",
            expected=f"members of recipe {recipe.name!r} with hash {recipe.hash}",
            found=f"hash {found}: the recipe has changed since it was trained here",
            do="Give another folder, or name the changed recipe differently",
        )
    return folder


def _clean(folder: Path, wanted: set[int]) -> None:
    """Remove what kills leave: half-written files, and complete states whose members were finished."""
    for partial in folder.glob("*.partial"):
        partial.unlink()
    for path in folder.glob("*.safetensors"):
        try:
            state, key, _ = states.read(path)
        except DamagedError:
            continue  # its own stack drops it, and says so
        epochs = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["epochs"]
        if state.epoch == epochs and wanted.isdisjoint(key.members):
            path.unlink()


def _state_name(stack: tuple[int, ...]) -> str:
    check = hashlib.sha256(",".join(map(str, stack)).encode()).hexdigest()[:8]
    return f"{stack[0]:06d}-{stack[-1]:06d}-{check}.safetensors"
