"""The folder `.training` of a source: the lock of the run, its recipe, and the saved states of its stacks.

A state is a safetensors file, written under a temporary name and renamed when complete.

This is one file, because all of it is about the files of one folder under one lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from checkpoints_zoo.errors import DamagedError, LockedError, UsageError
from checkpoints_zoo.formats import catalog, disk
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.disk import replace_file, sync_folder
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.loop import StackState
from checkpoints_zoo.training.recipe import Recipe

_TENSOR_GROUPS = ("params", "momentum", "buffers", "averages", "scaling", "adam")
_SNAPSHOT_PREFIX = "snapshot@"
_FORMAT_VERSION = 2
_held_locks = threading.local()


@dataclass(frozen=True)
class RunKey:
    """Identifies a saved state; a run resumes from a state only if all three fields agree.

    Args:
        recipe_hash: hash of the recipe.
        members: ids of the stack's members, without the repeated ids that fill up a short stack.
        torch_version: version of torch that the run used; another build may round differently.
    """

    recipe_hash: str
    members: tuple[int, ...]
    torch_version: str


def write_state(path: Path, state: StackState, run_key: RunKey, wall_time_s: float) -> None:
    """Write a state; after a kill at any moment `path` holds the complete old state or the complete new one.

    Args:
        path: path of the state file, in an existing folder.
        state: training state of the stacked members.
        run_key: key that identifies the run of the state.
        wall_time_s: seconds of training so far, interrupted runs included.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _named_tensors(state).items()}
    metadata = {
        "format": _FORMAT_VERSION,
        "recipe_hash": run_key.recipe_hash,
        "members": run_key.members,
        "torch_version": run_key.torch_version,
        "epoch": state.epoch,
        "wall_time_s": wall_time_s,
        "sha256": _tensors_digest(tensors),
    }
    with replace_file(path, "wb", sync=True) as file:  # A worker declared dead by mistake may still write.
        file.write(save(tensors, {name: json.dumps(fact) for name, fact in metadata.items()}))
    sync_folder(path.parent)


def read_state(path: Path) -> tuple[StackState, RunKey, float]:
    """Read a state file; return the state, its key, and the seconds of training so far.

    Raises:
        DamagedError: the file is cut, changed or missing.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            # Tensors are copied, because a mapped file is aligned differently and kernels may round by alignment.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if metadata["format"] != _FORMAT_VERSION or metadata["sha256"] != _tensors_digest(tensors):
            raise ValueError("the content has another hash, or the file has another format")
        key = _key_from_json(metadata)
        groups: dict[str, Tensors] = {group: {} for group in _TENSOR_GROUPS}
        snapshots: dict[int, Tensors] = {}
        for name, tensor in tensors.items():
            group, _, tensor_name = name.partition("/")
            if group.startswith(_SNAPSHOT_PREFIX):
                snapshots.setdefault(int(group.removeprefix(_SNAPSHOT_PREFIX)), {})[tensor_name] = tensor
            elif tensor_name:
                groups[group][tensor_name] = tensor
        loss, failed_step = tensors["loss"], tensors["failed_step"]
        state = StackState(**groups, loss=loss, failed_step=failed_step, epoch=metadata["epoch"], snapshots=snapshots)
        return state, key, float(metadata["wall_time_s"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"training state {path.name}", expected="a complete state file", found=str(error), path=path
        ) from error


def read_key_and_epoch(path: Path) -> tuple[RunKey, int] | None:
    """Return the key and the number of epochs of a state file, without reading tensors; None if it is unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
        return _key_from_json(metadata), int(metadata["epoch"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None


def adopt_state(new_state: StackState, saved_state: StackState) -> bool:
    """Copy a saved state into a new state, which keeps its own memory format and device.

    Returns:
        Whether both states have tensors of the same names, shapes and dtypes. If names, shapes or dtypes differ,
        nothing is copied.
    """
    new_tensors, saved_tensors = (
        _named_tensors(new_state, initial_only=True),
        _named_tensors(saved_state, initial_only=True),
    )
    if new_tensors.keys() != saved_tensors.keys() or any(
        (t.shape, t.dtype) != (saved_tensors[name].shape, saved_tensors[name].dtype) for name, t in new_tensors.items()
    ):
        return False
    for name, tensor in new_tensors.items():
        tensor.copy_(saved_tensors[name])
    new_state.epoch, new_state.snapshots = saved_state.epoch, saved_state.snapshots
    stacked = new_state.params | new_state.buffers
    new_state.averages = {
        name: torch.empty_like(stacked[name]).copy_(tensor) for name, tensor in saved_state.averages.items()
    }
    return True


def _key_from_json(metadata: dict[str, Any]) -> RunKey:
    return RunKey(metadata["recipe_hash"], tuple(metadata["members"]), metadata["torch_version"])


def _named_tensors(state: StackState, initial_only: bool = False) -> Tensors:
    """Return all tensors of a state under unique names; with `initial_only`, without averages and snapshots."""
    groups = [group for group in _TENSOR_GROUPS if not initial_only or group != "averages"]
    tensors = {f"{group}/{name}": tensor for group in groups for name, tensor in getattr(state, group).items()}
    if not initial_only:
        for epoch, snapshot in state.snapshots.items():
            tensors |= {f"{_SNAPSHOT_PREFIX}{epoch}/{name}": tensor for name, tensor in snapshot.items()}
    return {**tensors, "loss": state.loss, "failed_step": state.failed_step}


def _tensors_digest(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {list(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _try_lock(file: IO[Any], lock_kind: int, folder: Path, advice: str) -> None:
    """Lock an open file without waiting; the lock ends when the file is closed.

    Raises:
        LockedError: another process holds the lock.
    """
    try:
        fcntl.flock(file, lock_kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(
            f"folder {folder}",
            expected="no other process training into it",
            found=f"a lock on {file.name}",
            do=advice,
            path=folder,
        ) from error


@contextmanager
def reading_lock(folder: Path) -> Iterator[None]:
    """Keep runs from training into a folder while the block runs; the folder may be read-only.

    Raises:
        LockedError: a run is training into the folder.
    """
    lock_path = folder / ".training" / "lock"
    if not lock_path.is_file():
        yield
        return
    with lock_path.open("rb") as file:
        _try_lock(file, fcntl.LOCK_SH, folder, "Wait until that run ends")
        yield


@contextmanager
def training_lock(out: Path) -> Iterator[None]:
    """Keep other processes from training into a folder while the block runs; this thread may nest the lock.

    Raises:
        LockedError: another process holds the lock; the lock ends with its process.
        StorageError: the folder can't be written to.
    """
    lock_path = out / ".training" / "lock"
    with disk.translate_write_errors(lock_path.parent):
        lock_path.touch()
    held_paths: set[Path] = _held_locks.__dict__.setdefault("paths", set())
    if (path := lock_path.resolve()) in held_paths:
        yield
        return
    with lock_path.open("w") as file:
        _try_lock(file, fcntl.LOCK_EX, out, "Wait until the other run ends, or give another folder")
        held_paths.add(path)
        try:
            yield
        finally:
            held_paths.remove(path)


def runs_folder(out: Path, collection: str) -> Path:
    """Return the folder of a collection's runs."""
    return out / ".training" / collection


def claim_folder(out: Path, recipe: Recipe) -> Path:
    """Return the folder of a recipe's runs, with the recipe recorded in it; refuse another recipe of this name.

    If the folder records another recipe but holds no states or members, the new recipe replaces the recorded recipe,
        which may have had a mistake.

    Raises:
        UsageError: the folder holds states or members of another recipe.
    """
    folder = runs_folder(out, recipe.name)
    folder.mkdir(parents=True, exist_ok=True)
    earlier_recipe_hash = recorded_recipe_hash(folder)
    has_members = any(folder.glob("*.safetensors")) or (folder / "finished").is_dir()
    if earlier_recipe_hash not in (None, recipe.hash) and has_members:
        raise UsageError(
            f"folder {out}",
            expected=f"members of recipe {recipe.name!r} with hash {recipe.hash}",
            found=f"hash {earlier_recipe_hash}: the recipe has changed since it was trained here",
            do="Give another folder, or name the changed recipe differently",
        )
    if earlier_recipe_hash != recipe.hash:
        catalog.write_json({"hash": recipe.hash, **recipe.to_json()}, folder / "recipe.json")
    return folder


def write_description(folder: Path, description: Description) -> None:
    """Write a collection's description into the folder of its runs; the source gets the description with its first
    shard."""
    catalog.write_json(description.to_json(), folder / "description.json")


def read_description(folder: Path) -> Description:
    """Read the collection's description that `write_description` wrote; return it.

    Raises:
        FormatError: the file breaks the format.
        FileNotFoundError: there is no such file.
    """
    path = folder / "description.json"
    return Description.from_json(catalog.read_json(path), path)


def recorded_recipe_hash(folder: Path) -> str | None:
    """Return the recipe hash recorded in a folder of runs, None if there is none."""
    try:
        return str(json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clean_folder(folder: Path, unfinished_ids: set[int], epoch_count: int) -> None:
    """Remove files of killed runs: half-written files, and states of members that are finished.

    Args:
        folder: folder of the recipe's runs.
        unfinished_ids: ids of the members still to be trained.
        epoch_count: number of epochs of the recipe.
    """
    for temporary_path in (*folder.glob("*.partial"), *folder.glob(".*.tmp")):
        temporary_path.unlink()
    for path in folder.glob("*.safetensors"):
        key = read_key_and_epoch(path)  # `train_stack` deletes unreadable states and prints a message.
        if key is not None and key[1] == epoch_count and unfinished_ids.isdisjoint(key[0].members):
            path.unlink()


def divide_into_stacks(folder: Path, recipe: Recipe, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide ids into stacks: stacks with a saved state keep their members; the other ids follow in order.

    A stack with a saved state may hold finished members; finished members are trained to the same bytes again.

    Args:
        folder: folder of the recipe's runs.
        recipe: recipe by which the members are trained.
        ids: ids of the members to be trained.
    """
    stacks, remaining = [], dict.fromkeys(ids)
    for path in sorted(folder.glob("*.safetensors")):
        key = read_key_and_epoch(path)
        if key is None or (key[0].recipe_hash, key[0].torch_version) != (recipe.hash, str(torch.__version__)):
            continue
        members = key[0].members
        if path.name == state_file_name(members) and any(member in remaining for member in members):
            stacks.append(members)
            for member in members:
                remaining.pop(member, None)
    unstarted_ids = list(remaining)
    stacks += [
        tuple(unstarted_ids[start : start + recipe.stack_width])
        for start in range(0, len(unstarted_ids), recipe.stack_width)
    ]
    position = {member: at for at, member in enumerate(ids)}
    return sorted(stacks, key=lambda stack: min(position[member] for member in stack if member in position))


def state_file_name(stack: tuple[int, ...]) -> str:
    """Return the file name of a stack's state."""
    ids_hash = hashlib.sha256(",".join(map(str, stack)).encode()).hexdigest()[:8]
    return f"{stack[0]:06d}-{stack[-1]:06d}-{ids_hash}.safetensors"
