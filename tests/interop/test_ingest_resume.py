"""An import that was cut off goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.interop.ingest import ingest, shards
from tests.support.originals import KINDS, gzipped, hashes, imported, rows_of, states, tar

COUNT = 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards and batches hold five members, so that there are several."""
    monkeypatch.setattr(shard_files, "MOST_TENSORS", 20)
    monkeypatch.setattr(shards, "BATCH_MEMBERS", 5)


class Stop(Exception):
    pass


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Let reading a member fail after some of them; return the list of those that are read."""
    seen: list[int] = []
    judge = shards.judge

    def counted(row: dict[str, Any], *rest: Any) -> None:
        if len(seen) == after:
            raise Stop
        seen.append(row["member"])
        judge(row, *rest)

    monkeypatch.setattr(shards, "judge", counted)
    return seen


def test_hashing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = states(COUNT)
    folder = tar(tmp_path / "in", made)
    with monkeypatch.context() as patch:
        stopping(patch, 8)
        with pytest.raises(Stop):
            ingest([folder], "nets", hash=True)
    assert sum(row["sha256"] is not None for row in rows_of(folder)) == 5
    with monkeypatch.context() as patch:
        seen = stopping(patch, COUNT)
        assert imported([folder], "nets", hash=True).hashed == COUNT
    assert len(seen) == COUNT - 5
    assert [row["sha256"] for row in rows_of(folder)] == hashes(made)


@pytest.mark.parametrize("kind", KINDS)
def test_copying_goes_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, whole = states(COUNT), tmp_path / "whole"
    folder, out = KINDS[kind](tmp_path / "in", made), tmp_path / "out"
    imported([folder], "nets", reshard=whole)
    with monkeypatch.context() as patch:
        stopping(patch, 8)  # in the second shard of five
        with pytest.raises(Stop):
            ingest([folder], "nets", reshard=out)
    assert [row["member"] for row in rows_of(out)] == list(range(5))
    assert zoo.load("nets", source=out).stack()["fc.weight"].shape == (5, 10, 10)
    for left in ("manifests/.nets.json.1.tmp", "shards/nets/.00001.1.tmp", ".import/.nets.json.1.tmp"):
        (out / left).touch()
    with monkeypatch.context() as patch:
        seen = stopping(patch, COUNT)
        patch.setattr("checkpoints_zoo.sources.archives.stream", None)  # a gzipped archive isn't streamed again
        imported([folder], "nets", reshard=out)
        assert not list(out.rglob("*.tmp"))
    assert seen == list(range(5, COUNT))
    for path in ("shards/nets", "manifests"):
        names = sorted(p.name for p in (whole / path).iterdir())
        assert names == sorted(p.name for p in (out / path).iterdir())
        assert all((whole / path / n).read_bytes() == (out / path / n).read_bytes() for n in names)


def contents(out: Path) -> dict[str, bytes]:
    places = ("shards/nets", "manifests")
    return {p.name: p.read_bytes() for place in places for p in (out / place).iterdir()}


def import_slowly(folder: str, out: str, copied: bool) -> None:
    """What each child does, in small steps."""
    shard_files.MOST_TENSORS, shards.BATCH_MEMBERS = 20, 5
    judge = shards.judge

    def slow(*arguments: Any) -> None:
        time.sleep(0.01)
        judge(*arguments)

    shards.judge = slow
    if copied:
        ingest([folder], "nets", reshard=out)
    else:
        ingest([folder], "nets", hash=True)


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Forks children from a process that has imported what they need and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "huggingface_hub.utils", "checkpoints_zoo.interop.ingest", "tests.support.originals"]
    )
    return context


def killed(server: ForkServerContext, arguments: tuple[str, str, bool], seconds: float | None) -> bool:
    """Run a child and kill it after some seconds; return whether it was through before."""
    child = server.Process(target=import_slowly, args=arguments)
    child.start()
    child.join(seconds)
    if child.is_alive():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_killed_at_random_moments(server: ForkServerContext, copied: bool, tmp_path: Path) -> None:
    made = states(40)
    folder = (gzipped if copied else tar)(tmp_path / "in", made)
    whole, out = tmp_path / "whole", tmp_path / "out" if copied else folder
    killed(server, (str(folder), str(tmp_path / "first"), True), None)  # the first child also starts the server
    imported([folder], "nets", reshard=whole)
    began = time.monotonic()
    killed(server, (str(folder), str(tmp_path / "timed"), True), None)
    seconds, rng, kills = time.monotonic() - began, random.Random(), 0
    while kills < 3:
        if killed(server, (str(folder), str(out), copied), rng.uniform(0.05, 0.6) * seconds):
            for place in ("manifests", "shards", ".import"):
                shutil.rmtree(out / place, ignore_errors=True)
        else:
            kills += 1
            if (out / "manifests" / "nets.parquet").is_file():  # what is there can be read
                assert len(zoo.load("nets", source=out).download().stack()) == 4
    assert killed(server, (str(folder), str(out), copied), None)
    assert [row["sha256"] for row in rows_of(out)] == hashes(made)
    if copied:
        assert contents(out) == contents(whole)
        assert not list(out.rglob("*.tmp"))
