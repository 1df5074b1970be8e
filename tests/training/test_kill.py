"""Training and merging, killed at any moment and begun again, end with the same bytes; the command makes what ships."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.merge import merge
from checkpoints_zoo.training.packing import device_name
from checkpoints_zoo.training.recipes import RECIPES
from checkpoints_zoo.workers import InProcess, Processes
from tests.support.few_digits import noise
from tests.support.kills import Contract, OnFiles, forks

MEMBERS = [3, 2, 7]  # two stacks, of which one fills a shard, and the other is filled up
TIMES = ("created", "wall_time_s")
NAME = "convnet-digits"
SHORT = dataclasses.replace(
    RECIPES[NAME](), epochs=2, batch_size=32, stack_width=2, save_every=1, dataset="noise", split_rule="none",
    images=noise,
)  # fmt: skip


def two_a_shard() -> None:
    """Make a shard hold two members at most, in this process."""
    shard_files.LARGEST_TENSOR_COUNT = 16


def train_all(out: str, count: int) -> None:
    """What each child does: train what is missing, as the command does."""
    two_a_shard()
    engine = InProcess() if count == 1 else Processes(count, start="fork")  # of what is loaded
    train_into(SHORT, MEMBERS, Path(out), engine)


def train_piece(ids: Sequence[int], out: str) -> None:
    """What a child does: train some members, all at once."""
    two_a_shard()
    train_into(SHORT, ids, Path(out))


def merge_all(pieces: Sequence[str], out: str) -> None:
    """What each child does: merge."""
    two_a_shard()
    merge([Path(piece) for piece in pieces], Path(out))


def run_command(words: Sequence[str], errors: str) -> None:
    """What a child does: run a command, whose standard error goes to a file."""
    with Path(errors).open("w", buffering=1) as file, redirect_stderr(file):
        main(words)


def contents(out: Path, name: str) -> tuple[dict[str, bytes], list[dict[str, object]], bytes]:
    """Shards by name, manifest rows without times, description."""
    shards = {p.name: p.read_bytes() for p in sorted((out / "shards" / name).iterdir())}
    rows = zoo.load(name, source=out).rows.drop_columns(list(TIMES)).to_pylist()
    return shards, rows, (out / "manifests" / f"{name}.json").read_bytes()


def contract(operation: Callable[[Path], OnFiles], folder: Path) -> Contract:
    """What is there when it is killed can be read; in the end there are the bytes of a run that wasn't.

    Args:
        operation: gives what is done into a folder.
        folder: for its folders.
    """
    out = folder / "killed"
    assert operation(folder / "whole").run()
    wanted = contents(folder / "whole", NAME)
    assert [r["member"] for r in wanted[1]] == sorted(MEMBERS)
    assert len(wanted[0]) > 1  # shards

    def done() -> None:
        assert contents(out, NAME) == wanted
        left = [p for p in out.rglob("*") if p.suffix in (".tmp", ".partial") or p.name == "finished"]
        assert left == []

    def usable() -> None:
        if (out / "manifests" / f"{NAME}.parquet").exists():
            assert zoo.verify(zoo.load(NAME, source=out), sample=0) == []

    return Contract(operation(out), done, usable, lambda: shutil.rmtree(out))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kills"), [(1, 8), (2, 2)])
def test_training_killed_at_random_moments(workers: int, kills: int, tmp_path: Path) -> None:
    """Statistics of batch norm are in a state that is cut short: tests/training/test_population.py."""
    context = forks()
    contract(lambda out: OnFiles(context, train_all, (str(out), workers)), tmp_path).at_random(kills)
    runs = tmp_path / "killed" / ".training" / NAME
    for path in runs.glob("*.safetensors*") if workers > 1 else ():
        path.unlink()  # a worker may have written it after its parent was killed, and before it saw that
    assert sorted(p.name for p in runs.iterdir()) == ["description.json", "log.jsonl", "recipe.json"]
    lines = (runs / "log.jsonl").read_text().splitlines()
    assert sorted(int(line.split(",")[0].split(":")[1]) for line in lines) == sorted(MEMBERS)


@pytest.mark.slow
def test_merging_killed_at_random_moments(tmp_path: Path) -> None:
    context = forks()
    pieces = [str(tmp_path / str(i)) for i in range(2)]
    for piece, ids in zip(pieces, ([2, 7], [3]), strict=True):
        assert OnFiles(context, train_piece, (ids, piece)).run()
    contract(lambda out: OnFiles(context, merge_all, (pieces, str(out))), tmp_path).at_random(4)


LIMITS = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def same_machine(rows: list[dict[str, object]]) -> bool:
    """Say whether members were trained on a processor like this one; one that is limited is another."""
    recorded = {(r["device"], r["torch_version"]) for r in rows}
    return recorded == {(device_name(), str(torch.__version__))} and not any(map(os.environ.get, LIMITS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "members", "epoch"),
    [
        ("convnet-digits", "0-63", 8),
        ("resnet8-digits", "0-15", 8),
        ("convnet-digits-varied", "6", 12),  # in batches of 128
    ],
)
def test_the_command_makes_what_ships(name: str, members: str, epoch: int, tmp_path: Path) -> None:
    """The real command, killed once on its way, gives the embedded source: all of it bit for bit where it was
    trained, a member by its accuracy anywhere."""
    shipped = zoo.load(name, members=members)
    whole = len(shipped) == len(zoo.load(name))
    if whole and not same_machine(shipped.rows.to_pylist()):
        pytest.skip("trained on another processor")
    errors, context = tmp_path / "errors", forks()
    words = ("train", name, "--members", members, "--out", str(tmp_path / "out"))
    # On one thread, as all tests: two that wait for each other beside another test take four times as long.
    first, second = (context.Process(target=run_command, args=(words, str(errors))) for _ in range(2))
    first.start()
    while first.is_alive() and f"epoch {epoch}/" not in (errors.read_text() if errors.exists() else ""):
        time.sleep(0.01)  # until the first state is saved
    first.kill()
    first.join()
    assert first.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out" / "manifests").exists()
    second.start()
    second.join()
    assert second.exitcode == 0
    assert "epoch 1/" not in errors.read_text()  # it went on, not from the start
    made = zoo.load(name, source=tmp_path / "out")
    assert made.ids == shipped.ids
    if whole:
        embedded = contents(shipped.source.root, name)
        assert contents(tmp_path / "out", name)[1] == embedded[1]
        assert contents(tmp_path / "out", name)[0] == embedded[0]
    for before, now in zip(shipped, made, strict=True):
        assert now.row["test_accuracy"] == pytest.approx(before.row["test_accuracy"], abs=0.02)
        assert now.row["recipe_hash"] == before.row["recipe_hash"]
