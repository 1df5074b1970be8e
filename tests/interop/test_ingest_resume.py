"""An import that was cut off goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.interop.ingest import ingest, measuring
from tests.support.kills import Contract, OnFiles, forks
from tests.support.originals import KINDS, files, gzipped, hashes, imported, rows_of, states, tar

COUNT = 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards and batches hold five members, so that there are several."""
    monkeypatch.setattr(shard_files, "LARGEST_TENSOR_COUNT", 20)
    monkeypatch.setattr(measuring, "MOST_BATCH_MEMBERS", 5)


class Stop(Exception):
    pass


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """Let reading a member fail after some of them; return the list of those that are read."""
    seen: list[int] = []
    judge = measuring.check_member

    def counted(row: dict[str, Any], *rest: Any) -> None:
        if len(seen) == after:
            raise Stop
        seen.append(row["member"])
        judge(row, *rest)

    monkeypatch.setattr(measuring, "check_member", counted)
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


@pytest.mark.slow
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
        patch.setattr("checkpoints_zoo.sources.archives.stream_members", None)  # a gzipped archive isn't streamed again
        imported([folder], "nets", reshard=out)
        assert not list(out.rglob("*.tmp"))
    assert seen == list(range(5, COUNT))
    for path in ("shards/nets", "manifests"):
        names = sorted(p.name for p in (whole / path).iterdir())
        assert names == sorted(p.name for p in (out / path).iterdir())
        assert all((whole / path / n).read_bytes() == (out / path / n).read_bytes() for n in names)


def test_an_import_that_version_0_1_began_goes_on(tmp_path: Path) -> None:
    folder, out = files(tmp_path / "in", states(3)), tmp_path / "out"
    imported([folder], "nets", reshard=out)
    before = contents(out)
    stats = {p.relative_to(folder).as_posix(): p.stat() for p in sorted(folder.rglob("*.safetensors"))}
    stamps = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()]
    options = {"architecture": None, "arguments": {}, "own": None, "prefix": "", "key": ""}
    digest = hashlib.sha256(json.dumps(["", stamps, options], sort_keys=True).encode()).hexdigest()
    record = out / ".import" / "nets.json"
    record.write_text(json.dumps({"import": digest}))
    imported([folder], "nets", reshard=out)
    assert contents(out) == before
    assert json.loads(record.read_text())["import"] == digest
    record.write_text(json.dumps({"import": "0" * 64}))
    with pytest.raises(UsageError, match="found one of other files"):
        ingest([folder], "nets", reshard=out)


def contents(out: Path) -> dict[str, bytes]:
    places = ("shards/nets", "manifests")
    return {p.name: p.read_bytes() for place in places for p in (out / place).iterdir()}


def import_all(folder: str, out: str, copied: bool) -> None:
    """What each child does, in small steps."""
    shard_files.LARGEST_TENSOR_COUNT, measuring.MOST_BATCH_MEMBERS = 20, 5
    if copied:
        ingest([folder], "nets", reshard=out)
    else:
        ingest([folder], "nets", hash=True)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_killed_at_random_moments(copied: bool, tmp_path: Path) -> None:
    made, context = states(40), forks()
    folder = (gzipped if copied else tar)(tmp_path / "in", made)
    whole, out = tmp_path / "whole", tmp_path / "out" if copied else folder
    imported([folder], "nets", reshard=whole)

    def done() -> None:
        assert [row["sha256"] for row in rows_of(out)] == hashes(made)
        if copied:
            assert contents(out) == contents(whole)
            assert not list(out.rglob("*.tmp"))

    def usable() -> None:
        if (out / "manifests" / "nets.parquet").is_file():
            assert len(zoo.load("nets", source=out).download().stack()) == 4

    def reset() -> None:
        for place in ("manifests", "shards", ".import"):
            shutil.rmtree(out / place, ignore_errors=True)

    Contract(OnFiles(context, import_all, (str(folder), str(out), copied)), done, usable, reset).at_random(6)
