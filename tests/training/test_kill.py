"""Training and merging, killed at any moment and begun again, end with the same bytes; the command makes what ships."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.training.export import run
from checkpoints_zoo.training.measure import device_name
from checkpoints_zoo.training.merge import merge
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import RECIPES
from checkpoints_zoo.workers import Here, Processes
from tests.support.tiny import PRELOADED

ROOT = Path(__file__).parents[2]
MEMBERS = [3, 2, 7]  # two stacks, of which one fills a shard, and the other is filled up
TIMES = ("created", "wall_time_s")


def short(name: str) -> Recipe:
    return dataclasses.replace(RECIPES[name](), epochs=2, batch_size=250, stack_width=2, save_every=1)


def two_a_shard() -> None:
    """Make a shard hold two members at most, in this process."""
    shard_files.MOST_TENSORS = 16


def train_all(name: str, out: str, workers: int) -> None:
    """What each child does: train what is missing, as the command does."""
    two_a_shard()
    engine = Here() if workers == 1 else Processes(workers, start="fork")  # of what is loaded
    run(short(name), MEMBERS, Path(out), engine)


def merge_all(pieces: Sequence[str], out: str) -> None:
    """What each child does: merge."""
    two_a_shard()
    merge([Path(piece) for piece in pieces], Path(out))


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks children from a process that has imported torch and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def child(server: ForkServerContext, target: Callable[..., None], args: Sequence[object], seconds: float | None) -> int:
    """Run a child and kill it after some seconds; return its exit code."""
    process = server.Process(target=target, args=tuple(args))
    process.start()
    process.join(seconds)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return int(process.exitcode)


def contents(out: Path, name: str) -> tuple[dict[str, bytes], list[dict[str, object]], bytes]:
    """Shards by name, manifest rows without times, description."""
    shards = {p.name: p.read_bytes() for p in sorted((out / "shards" / name).iterdir())}
    rows = zoo.load(name, source=out).rows.drop_columns(list(TIMES)).to_pylist()
    return shards, rows, (out / "manifests" / f"{name}.json").read_bytes()


def killed_and_gone_on_with(
    server: ForkServerContext, target: Callable[..., None], args: Sequence[object], name: str, out: Path, kills: int
) -> None:
    """Run a child whole, and other ones that are killed so many times; compare what they leave.

    Args:
        server: that forks them.
        target, args: what they do; the folder is the argument that is None.
        name: of the collection.
        out: folder for their folders.
        kills: at random moments.
    """

    def into(folder: str) -> list[object]:
        return [str(out / folder) if each is None else each for each in args]

    child(server, target, into("first"), None)  # it also starts the server
    began = time.monotonic()
    assert child(server, target, into("whole"), None) == 0
    whole = time.monotonic() - began
    wanted = contents(out / "whole", name)
    assert [r["member"] for r in wanted[1]] == sorted(MEMBERS)
    assert len(wanted[0]) > 1  # shards
    rng = random.Random()  # a new seed each time: any moment must do
    killed, moments = 0, []
    while killed < kills:
        moments.append(rng.uniform(0.02, 0.98) * whole)
        if child(server, target, into("killed"), moments[-1]) == 0:  # through before the kill: start over
            assert contents(out / "killed", name) == wanted, moments
            shutil.rmtree(out / "killed")
        else:
            killed += 1
            if (out / "killed" / "manifests" / f"{name}.parquet").exists():  # readable all the while
                assert zoo.verify(zoo.load(name, source=out / "killed"), sample=0) == [], moments
    assert child(server, target, into("killed"), None) == 0
    assert contents(out / "killed", name) == wanted, f"killed after {moments} s"
    left = [p for p in (out / "killed").rglob("*") if p.suffix in (".tmp", ".partial") or p.name == "finished"]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "kills"), [("convnet-digits", 1, 14), ("resnet8-digits", 1, 5), ("convnet-digits", 2, 12)]
)
def test_training_killed_at_random_moments(
    server: ForkServerContext, name: str, workers: int, kills: int, tmp_path: Path
) -> None:
    killed_and_gone_on_with(server, train_all, [name, None, workers], name, tmp_path, kills)
    runs = tmp_path / "killed" / ".training" / name
    for path in runs.glob("*.safetensors*") if workers > 1 else ():
        path.unlink()  # a worker may have written it after its parent was killed, and before it saw that
    assert sorted(p.name for p in runs.iterdir()) == ["description.json", "log.jsonl", "recipe.json"]
    lines = (runs / "log.jsonl").read_text().splitlines()
    assert sorted(int(line.split(",")[0].split(":")[1]) for line in lines) == sorted(MEMBERS)


@pytest.mark.slow
def test_merging_killed_at_random_moments(server: ForkServerContext, tmp_path: Path) -> None:
    name = "convnet-digits"
    for i, ids in enumerate(([2, 7], [3])):
        assert child(server, train_piece, [name, ids, str(tmp_path / str(i))], None) == 0
    pieces = [str(tmp_path / str(i)) for i in range(2)]
    killed_and_gone_on_with(server, merge_all, [pieces, None], name, tmp_path, 19)


def train_piece(name: str, ids: Sequence[int], out: str) -> None:
    """What a child does: train some members, all at once."""
    two_a_shard()
    run(short(name), ids, Path(out))


def same_machine(rows: list[dict[str, object]]) -> bool:
    recorded = {(r["device"], r["torch_version"]) for r in rows}
    return recorded == {(device_name(), str(torch.__version__))}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "members"), [("convnet-digits", "0-63"), ("resnet8-digits", "0-15")])
def test_the_command_makes_what_ships(name: str, members: str, tmp_path: Path) -> None:
    """The real command, killed once on its way, gives the embedded source: bit for bit where it was trained, by
    accuracy elsewhere."""
    command = [sys.executable, "-m", "training", name, "--members", members, "--out", str(tmp_path / "out")]
    # On one thread, as all tests: two that wait for each other beside another test take four times as long.
    first = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    stop = random.Random().randint(6, 12)  # after the first saved state
    for line in first.stderr:
        if f"epoch {stop}/" in line:
            first.send_signal(signal.SIGKILL)
            break
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "manifests").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"epoch {1}/" not in done.stderr  # it went on, not from the start
    made, shipped = zoo.load(name, source=tmp_path / "out"), zoo.load(name)
    assert made.ids == shipped.ids
    if same_machine(shipped.rows.to_pylist()):
        embedded = contents(shipped.source.root, name)
        assert contents(tmp_path / "out", name)[1] == embedded[1]
        assert contents(tmp_path / "out", name)[0] == embedded[0]
    for before, now in zip(shipped, made, strict=True):
        assert now.row["test_accuracy"] == pytest.approx(before.row["test_accuracy"], abs=0.02)
        assert now.row["recipe_hash"] == before.row["recipe_hash"]
