"""The folder that a run keeps beside the source: its lock, its recipe, the saved states of its stacks.

OUT/.training/lock                        held by the one process that trains into OUT
OUT/.training/NAME/recipe.json            the recipe whose members of this name lie in OUT
OUT/.training/NAME/description.json       what the source will say of the collection
OUT/.training/NAME/000000-000063-CHECK.safetensors   the state of a stack that is being trained
OUT/.training/NAME/finished/              members that wait for their shard; see `checkpoints_zoo.training.staging`
OUT/.training/NAME/log.jsonl              a line a member that finished
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from checkpoints_zoo.errors import LockedError, UsageError
from checkpoints_zoo.formats import catalog, safetensors
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.training import state as states
from checkpoints_zoo.training.recipe import Recipe

_held = threading.local()


def _take(file: IO[Any], how: int, folder: Path, do: str) -> None:
    """Take the lock that an open file stands for, at once or not at all; it goes with the file.

    Raises:
        LockedError: another process holds it.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LockedError(
            f"folder {folder}",
            expected="no other process training into it",
            found=f"a lock on {file.name}",
            do=do,
            path=folder,
        ) from error


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Keep runs from training into a folder while the block runs; it may be one that can't be written to.

    Raises:
        LockedError: a run is training into it.
    """
    lock = folder / ".training" / "lock"
    if not lock.is_file():
        yield
        return
    with lock.open("rb") as file:
        _take(file, fcntl.LOCK_SH, folder, "Wait until that run ends")
        yield


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other processes from training into a folder while the block runs; inside it this thread may do so again.

    Raises:
        LockedError: another process holds the lock; it goes with its process, however that ends.
        StorageError: the folder can't be written to.
    """
    lock = out / ".training" / "lock"
    with safetensors.writing_into(lock.parent):
        lock.touch()
    held: set[Path] = _held.__dict__.setdefault("paths", set())
    if (path := lock.resolve()) in held:
        yield
        return
    with lock.open("w") as file:
        _take(file, fcntl.LOCK_EX, out, "Wait until the other run ends, or give another folder")
        held.add(path)
        try:
            yield
        finally:
            held.remove(path)


def folder_of(out: Path, name: str) -> Path:
    """Return the folder of a collection's runs."""
    return out / ".training" / name


def claim(out: Path, recipe: Recipe) -> Path:
    """Give the folder of a recipe's runs; it records the recipe, and another of this name is refused.

    One that nothing has come of yet, such as a network with a mistake, gives way.

    Raises:
        UsageError: it is another recipe's.
    """
    folder = folder_of(out, recipe.name)
    folder.mkdir(parents=True, exist_ok=True)
    found = recorded_hash(folder)
    begun = any(folder.glob("*.safetensors")) or (folder / "finished").is_dir()
    if found not in (None, recipe.hash) and begun:
        raise UsageError(
            f"folder {out}",
            expected=f"members of recipe {recipe.name!r} with hash {recipe.hash}",
            found=f"hash {found}: the recipe has changed since it was trained here",
            do="Give another folder, or name the changed recipe differently",
        )
    if found != recipe.hash:
        catalog.write_json({"hash": recipe.hash, **recipe.to_json()}, folder / "recipe.json")
    return folder


def describe(folder: Path, description: Description) -> None:
    """Write down what the source will say of a collection: until its first shard it says nothing itself."""
    catalog.write_json(description.to_json(), folder / "description.json")


def read_description(folder: Path) -> Description:
    """Read what `describe` wrote; return it.

    Raises:
        FormatError: it breaks the format.
        FileNotFoundError: there is none.
    """
    path = folder / "description.json"
    return Description.from_json(catalog.read_json(path), path)


def recorded_hash(folder: Path) -> str | None:
    """Return the hash of the recipe that a folder is for, None where it isn't recorded."""
    try:
        return str(json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def clean(folder: Path, wanted: set[int], epochs: int) -> None:
    """Remove what kills leave: half-written files, and complete states whose members were finished.

    Args:
        folder: of the recipe's runs.
        wanted: ids that are still to be finished.
        epochs: of the recipe.
    """
    for partial in (*folder.glob("*.partial"), *folder.glob(".*.tmp")):
        partial.unlink()
    for path in folder.glob("*.safetensors"):
        found = states.read_key(path)  # one that can't be read is dropped by its own stack, which says so
        if found is not None and found[1] == epochs and wanted.isdisjoint(found[0].members):
            path.unlink()


def divided(folder: Path, recipe: Recipe, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide ids into stacks: those that were begun before as they were, so that they go on; the rest in order.

    A stack that was begun may hold members that are finished meanwhile: they come out again as they were.

    Args:
        folder: of the recipe's runs.
        recipe: of the members.
        ids: of the members that are wanted.
    """
    stacks, left = [], dict.fromkeys(ids)
    for path in sorted(folder.glob("*.safetensors")):
        found = states.read_key(path)
        if found is None or (found[0].recipe_hash, found[0].torch_version) != (recipe.hash, str(torch.__version__)):
            continue
        members = found[0].members
        if path.name == state_name(members) and any(member in left for member in members):
            stacks.append(members)
            for member in members:
                left.pop(member, None)
    rest = list(left)
    stacks += [tuple(rest[at : at + recipe.stack_width]) for at in range(0, len(rest), recipe.stack_width)]
    place = {member: at for at, member in enumerate(ids)}
    return sorted(stacks, key=lambda stack: min(place[member] for member in stack if member in place))


def state_name(stack: tuple[int, ...]) -> str:
    """Return the file's name of a stack's state."""
    check = hashlib.sha256(",".join(map(str, stack)).encode()).hexdigest()[:8]
    return f"{stack[0]:06d}-{stack[-1]:06d}-{check}.safetensors"
