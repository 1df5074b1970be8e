"""A recipe of less than a second, its members made once, and sources compared."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo import images
from checkpoints_zoo.formats import manifest, shard_files
from checkpoints_zoo.training.export import Export
from checkpoints_zoo.training.merge import RUN_COLUMNS
from checkpoints_zoo.training.packing import PackedSnapshot, layout_of, pack_members
from checkpoints_zoo.training.population import TrainedMember, train_stack
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits
from checkpoints_zoo.training.state import training_lock

TINY = dataclasses.replace(convnet_digits(), name="tiny", epochs=1, batch_size=250, stack_width=3, save_every=1)
MEMBERS = tuple(range(9))
# Code of another process that trains into a folder, as far as others notice; it imports nothing that takes long.
LOCK = """
import fcntl, pathlib, sys
path = pathlib.Path(sys.argv[1], ".training", "lock")
path.parent.mkdir(exist_ok=True)
with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""
TWO_A_SHARD = 2 * len(layout_of(TINY).tensors)  # for writing.MOST_TENSORS


@cache
def made() -> dict[int, PackedSnapshot]:
    """Train the members once; return them, the fifth as one that failed."""
    data, found = images.load("digits", "train"), {}
    for first in MEMBERS[:: TINY.stack_width]:
        stack = MEMBERS[first : first + TINY.stack_width]
        for one in pack_members(TINY, train_stack(TINY, stack, data), "cpu"):
            found[one.row["member"]] = one
    measured = ("test_", "train_", "sha256", "eval_data")
    failed = {name: None if name.startswith(measured) else value for name, value in found[5].row.items()}
    return found | {5: PackedSnapshot(failed | {"status": "failed", "reason": "the loss"}, None)}


def finished(ids: Iterable[int], **changes: Any) -> list[PackedSnapshot]:
    """Return members as they come from training, with some columns changed."""
    return [PackedSnapshot(made()[i].row | changes, made()[i].raw) for i in ids]


def export(recipe: Recipe, trained: Sequence[TrainedMember], out: Path) -> None:
    """Add trained members to a source, as a run does with members that have finished."""
    with training_lock(out):
        exporting = Export(recipe, out)
        exporting.claim_runs_folder([member.member for member in trained])
        add_finished(exporting, pack_members(recipe, trained, "cpu"))
        exporting.finish()


def add_finished(exporting: Export, members: list[PackedSnapshot]) -> None:
    """Do what a run does with members that finished."""
    exporting.stage(members)
    exporting.write_complete_shards(members)


def stored(ids: Iterable[int], out: Path, *, seal: bool = True, **changes: Any) -> Path:
    """Put members into a source; with `seal=False` they are left as a killed run leaves them. Return its folder."""
    ids = list(ids)
    with training_lock(out):
        exporting = Export(TINY, out)
        exporting.claim_runs_folder(ids)
        add_finished(exporting, finished(ids, **changes))
        if seal:
            exporting.finish()
    return out


def contents(out: Path, told: bool = False) -> tuple[dict[str, bytes], bytes, Any]:
    """Return a source's shards by name, its description, and its manifest: whole if `told`, or without `TOLD`."""
    shards = {path.name: path.read_bytes() for path in (out / "shards" / "tiny").iterdir()}
    table = out / "manifests" / "tiny.parquet"
    rows = table.read_bytes() if told else manifest.read_manifest(table).drop_columns(list(RUN_COLUMNS)).to_pylist()
    return shards, (out / "manifests" / "tiny.json").read_bytes(), rows


@pytest.fixture
def two_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a shard hold two members."""
    monkeypatch.setattr(shard_files, "LARGEST_TENSOR_COUNT", TWO_A_SHARD)


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what only a power cut would show."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
