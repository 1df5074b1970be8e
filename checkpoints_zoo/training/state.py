"""The saved state of a stack: a safetensors file, written under another name and renamed when complete."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.safetensors import sync_folder
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.loop import StackState

_GROUPS = ("params", "momentum", "buffers", "averages", "scaling")
_SNAPSHOT = "snapshot@"
_FORMAT = 2


@dataclass(frozen=True)
class RunKey:
    """What must agree for a saved state to be gone on with.

    Args:
        recipe_hash: of the recipe.
        members: ids, without the ones that fill up the stack.
        torch_version: another build may round differently.
    """

    recipe_hash: str
    members: tuple[int, ...]
    torch_version: str


def write(path: Path, state: StackState, key: RunKey, wall_time_s: float) -> None:
    """Write a state: after a kill at any moment, `path` holds the old state or the new one, whole.

    Args:
        path: of the file; its folder exists.
        state: what to save.
        key: whose state it is.
        wall_time_s: seconds of training so far, all runs together.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _flatten(state).items()}
    facts = {
        "format": _FORMAT,
        "recipe_hash": key.recipe_hash,
        "members": key.members,
        "torch_version": key.torch_version,
        "epoch": state.epoch,
        "wall_time_s": wall_time_s,
        "sha256": _digest(tensors),
    }
    # A name of its own: a worker that was given up as dead may still be writing.
    partial = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(save(tensors, {name: json.dumps(fact) for name, fact in facts.items()}))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def read(path: Path) -> tuple[StackState, RunKey, float]:
    """Read what `write` wrote: the state, its key, and the seconds of training so far.

    Raises:
        DamagedError: a file that is cut or changed, or no such file at all.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            # Copies: a kernel may round by its operand's alignment, and a file's map has another one.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if facts["format"] != _FORMAT or facts["sha256"] != _digest(tensors):
            raise ValueError("its content has another hash than it names, or it is of another format")
        key = _key(facts)
        groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
        snapshots: dict[int, Tensors] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            if group.startswith(_SNAPSHOT):
                snapshots.setdefault(int(group.removeprefix(_SNAPSHOT)), {})[rest] = tensor
            elif rest:
                groups[group][rest] = tensor
        loss, failed_step = tensors["loss"], tensors["failed_step"]
        state = StackState(**groups, loss=loss, failed_step=failed_step, epoch=facts["epoch"], snapshots=snapshots)
        return state, key, float(facts["wall_time_s"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"training state {path.name}", expected="a complete state file", found=str(error), path=path
        ) from error


def read_key(path: Path) -> tuple[RunKey, int] | None:
    """Return whose state a file is and after how many epochs, reading no tensors; None where that can't be told."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
        return _key(facts), int(facts["epoch"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def adopt(fresh: StackState, saved: StackState) -> bool:
    """Take a saved state over into a fresh one, in the memory format and on the device that this one has.

    Returns:
        Whether they are of one kind: tensors of the same names, shapes and dtypes. If not, nothing changes.
    """
    ours, theirs = _flatten(fresh, now=True), _flatten(saved, now=True)
    if ours.keys() != theirs.keys() or any(
        (t.shape, t.dtype) != (theirs[name].shape, theirs[name].dtype) for name, t in ours.items()
    ):
        return False
    for name, tensor in ours.items():
        tensor.copy_(theirs[name])
    fresh.epoch, fresh.snapshots = saved.epoch, saved.snapshots
    like = fresh.params | fresh.buffers
    fresh.averages = {name: torch.empty_like(like[name]).copy_(tensor) for name, tensor in saved.averages.items()}
    return True


def _key(facts: dict[str, Any]) -> RunKey:
    return RunKey(facts["recipe_hash"], tuple(facts["members"]), facts["torch_version"])


def _flatten(state: StackState, now: bool = False) -> Tensors:
    """Return all tensors of a state by one name each; with `now`, those alone that a state has from the start."""
    groups = [group for group in _GROUPS if not now or group != "averages"]
    tensors = {f"{group}/{name}": tensor for group in groups for name, tensor in getattr(state, group).items()}
    if not now:
        for epoch, kept in state.snapshots.items():
            tensors |= {f"{_SNAPSHOT}{epoch}/{name}": tensor for name, tensor in kept.items()}
    return {**tensors, "loss": state.loss, "failed_step": state.failed_step}


def _digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
