"""Training killed at any moment and started again ends with the same bytes; the real command makes what ships."""

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
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from training.export import device_name, export
from training.population import train
from training.recipes import RECIPES, Recipe

ROOT = Path(__file__).parent.parent
MEMBERS = [3, 0, 7]  # two stacks, the second filled up
TIMES = ("created", "wall_time_s")


def short(name: str) -> Recipe:
    return dataclasses.replace(RECIPES[name](), epochs=4, batch_size=128, stack_width=2, save_every=1)


def train_all(name: str, out: str) -> None:
    """What each child does: train what is missing, as the command does."""
    from training.export import members_of

    torch.set_num_threads(1)
    recipe, folder = short(name), Path(out)
    wanted = [m for m in MEMBERS if m not in members_of(recipe, folder)]
    train(recipe, wanted, folder, lambda trained: export(recipe, trained, folder))


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks children from a process that has imported torch and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sklearn.datasets", "timm.models.resnet", "training.export"])
    return context


def run(server: ForkServerContext, name: str, out: Path, seconds: float | None) -> int:
    """Run a child and kill it after some seconds; return its exit code."""
    child = server.Process(target=train_all, args=(name, str(out)))
    child.start()
    child.join(seconds)
    if child.is_alive():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return int(child.exitcode)


def contents(out: Path, name: str) -> tuple[dict[str, bytes], list[dict[str, object]], bytes]:
    """Shards by name, manifest rows without times, description."""
    shards = {p.name: p.read_bytes() for p in sorted((out / "shards" / name).iterdir())}
    rows = zoo.load(name, source=out).rows.drop_columns(list(TIMES)).to_pylist()
    return shards, rows, (out / "manifests" / f"{name}.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kills"), [("convnet-digits", 7), ("resnet8-digits", 3)])
def test_killed_at_random_moments(server: ForkServerContext, name: str, kills: int, tmp_path: Path) -> None:
    run(server, name, tmp_path / "first", None)  # the first child also starts the server
    began = time.monotonic()
    assert run(server, name, tmp_path / "whole", None) == 0
    whole = time.monotonic() - began
    wanted = contents(tmp_path / "whole", name)
    assert [r["member"] for r in wanted[1]] == sorted(MEMBERS)
    rng = random.Random()  # a new seed each time: any moment must do
    killed, out, moments = 0, tmp_path / "killed", []
    while killed < kills:
        moments.append(rng.uniform(0.02, 0.98) * whole)
        if run(server, name, out, moments[-1]) == 0:  # through before the kill: start over
            assert contents(out, name) == wanted, moments
            shutil.rmtree(out)
        else:
            killed += 1
    assert run(server, name, out, None) == 0
    assert contents(out, name) == wanted, f"killed after {moments} s"
    assert not list(out.rglob("*.tmp")) + list(out.rglob("*.partial"))
    assert [p.name for p in (out / ".training" / name).iterdir()] == ["recipe.json"]


def same_machine(rows: list[dict[str, object]]) -> bool:
    recorded = {(r["device"], r["torch_version"]) for r in rows}
    return recorded == {(device_name(), str(torch.__version__))}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "members"), [("convnet-digits", "0-63"), ("resnet8-digits", "0-15")])
def test_the_command_makes_what_ships(name: str, members: str, tmp_path: Path) -> None:
    """The real command, killed once on its way, gives the embedded source: bit for bit where it was trained, by
    accuracy elsewhere."""
    command = [sys.executable, "-m", "training", name, "--members", members, "--out", str(tmp_path / "out")]
    environment = {n: v for n, v in os.environ.items() if n != "OMP_NUM_THREADS"}  # as many threads as there are cores
    first = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    stop = random.Random().randint(6, 12)  # after the first saved state
    for line in first.stderr:
        if f"epoch {stop}/" in line:
            first.send_signal(signal.SIGKILL)
            break
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "manifests").exists()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
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
