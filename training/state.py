"""The saved state of a stack: a safetensors file, written under another name and renamed when complete."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from checkpoints_zoo.errors import DamagedError
from training.loop import StackState, Tensors

_GROUPS = ("params", "momentum", "buffers")


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
    tensors = _flatten(state)
    facts = {
        "format": 1,
        "recipe_hash": key.recipe_hash,
        "members": key.members,
        "torch_version": key.torch_version,
        "epoch": state.epoch,
        "wall_time_s": wall_time_s,
        "sha256": _digest(tensors),
    }
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(save(tensors, {name: json.dumps(fact) for name, fact in facts.items()}))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
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
        if facts["format"] != 1 or facts["sha256"] != _digest(tensors):
            raise ValueError("its content has another hash than it names, or it is of another format")
        key = RunKey(facts["recipe_hash"], tuple(facts["members"]), facts["torch_version"])
        groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            if rest:
                groups[group][rest] = tensor
        state = StackState(**groups, loss=tensors["loss"], failed_step=tensors["failed_step"], epoch=facts["epoch"])
        return state, key, float(facts["wall_time_s"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"training state {path.name}", expected="a complete state file", found=str(error), path=path
        ) from error


def same_shapes(a: StackState, b: StackState) -> bool:
    """Tell whether two states hold tensors of the same names, shapes and dtypes."""
    one, other = _flatten(a), _flatten(b)
    return one.keys() == other.keys() and all(
        (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype) for name in one
    )


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flatten(state: StackState) -> Tensors:
    tensors = {f"{group}/{name}": tensor for group in _GROUPS for name, tensor in getattr(state, group).items()}
    return {**tensors, "loss": state.loss, "failed_step": state.failed_step}


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
