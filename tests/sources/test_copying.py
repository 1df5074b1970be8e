"""`download --dest`: a source of its own of the selected members, whatever they come from, killed at any moment."""

from __future__ import annotations

import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, StorageError, UsageError
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.sources import copying
from checkpoints_zoo.sources.finding import select_members
from tests.hub import Hub
from tests.support.commands import ROOT, process, run, values
from tests.support.kills import Contract, OnFiles, forks
from tests.support.remote import ADDRESS, SHARDS, published
from tests.support.scenarios import Built, build, digest_of, file_bytes, hash_of, load, opened

LOCATION = ("path", "offset", "nbytes", "layout", "dtype")
EMBEDDED = ROOT / "checkpoints_zoo" / "embedded"


def rows_of(root: Path, name: str = "tiny") -> list[dict[str, Any]]:
    with (root / "manifests" / f"{name}.parquet").open("rb") as file:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def check(built: Built, dest: Path, keys: list[tuple[int, int]]) -> None:
    """Check a copy with pyarrow and safetensors alone: its rows, its hashes, and the tensors they name."""
    rows = {(r["member"], r["epoch"]): r for r in rows_of(dest)}
    wanted = {(r["member"], r["epoch"]): r for r in built.rows}
    assert sorted(rows) == sorted(keys)
    files = {path: opened(dest / path) for path in {r["path"] for r in rows.values()}}
    for key, row in rows.items():
        known = {n: v for n, v in wanted[key].items() if n not in LOCATION and n != "layout"}
        assert {n: row[n] for n in known} == known
        prefix = f"{key[0]:06d}/" if row["final"] else f"{key[0]:06d}@{key[1]}/"
        found = {n.removeprefix(prefix): t for n, t in files[row["path"]].items() if n.startswith(prefix)}
        found.pop("_pad", None)
        assert found.keys() == built.states[key].keys()
        assert all(torch.equal(t, built.states[key][n]) for n, t in found.items())
        assert hash_of(found) == row["sha256"]
    assert {p.relative_to(dest).as_posix() for p in (dest / "shards").rglob("*") if p.is_file()} == set(files)


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let three members of the convnet share a shard."""
    monkeypatch.setattr(shard_files, "LARGEST_TENSOR_COUNT", 30)  # it has nine, and a pad


def numbers(dest: Path) -> list[str]:
    return sorted(p.name.partition("-")[0] for p in (dest / "shards" / "tiny").iterdir())


# ---- from each kind of source ----
@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_all_members_give_the_bytes_that_training_wrote(name: str, tmp_path: Path) -> None:
    members = zoo.load(name).download(tmp_path)
    assert members.source.root == tmp_path
    (shard,), (there,) = ((root / "shards" / name).iterdir() for root in (tmp_path, EMBEDDED))
    assert (shard.name, shard.read_bytes()) == (there.name, there.read_bytes())
    assert rows_of(tmp_path, name) == rows_of(EMBEDDED, name)
    assert zoo.verify(members, sample=0) == []


@pytest.mark.parametrize(("net", "weights"), [("mlp", torch.float16), ("resnet8", torch.bfloat16)])
def test_snapshots_and_odd_tensors(net: str, weights: torch.dtype, tmp_path: Path) -> None:
    built = build(tmp_path / "source", net, [3, 4, 9], weights=weights, snapshots=(10, 20))
    copied = load(built, snapshots=True).download(tmp_path / "copy")
    keys = [(m, e) for m in (3, 4, 9) for e in (10, 20, 40)]
    check(built, tmp_path / "copy", keys)
    assert [(m.id, m.epoch) for m in copied] == keys
    assert len(copied[1:4].stack()) == len(built.states[3, 10])


@pytest.mark.usefixtures("three")
def test_which_members_share_a_shard(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=[0, 2, 3, 5, 7, 30], per_shard=4)
    load(built).download(tmp_path / "all")
    assert numbers(tmp_path / "all") == ["00000", "00001", "00002", "00010"]
    check(built, tmp_path / "all", [(m, 40) for m in (0, 2, 3, 5, 7, 30)])
    for some in ("0,7", "2,30", "3,5"):  # one after the other gives the same
        load(built, members=some).download(tmp_path / "each")
    assert digests(tmp_path / "each") == digests(tmp_path / "all")


@pytest.mark.usefixtures("three")
def test_snapshots_of_a_member_share_a_shard(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=range(3), snapshots=(10, 20))
    load(built).download(tmp_path / "copy")  # final ones alone: the source has three a member all the same
    assert numbers(tmp_path / "copy") == ["00000", "00001", "00002"]
    load(built, snapshots=True).download(tmp_path / "copy")
    check(built, tmp_path / "copy", [(m, e) for m in range(3) for e in (10, 20, 40)])


def digests(root: Path) -> dict[str, str]:
    return {path: digest for path, (digest, _) in digest_of(root).items() if not path.endswith(".parquet")}


def test_members_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    built = published(hub)
    plan = values(run("download", "tiny", "--members", "2,15", "--source", ADDRESS, "--dest", tmp_path / "copy",
                      "--dry-run", "--format", "json"))  # fmt: skip
    size = built.rows[0]["nbytes"]
    assert (plan["members"], plan["shards"], plan["cache_bytes"]) == (2, 1, 2 * size)
    assert hub.log.requests(SHARDS) == 0
    assert not (tmp_path / "copy").exists()
    result = run("download", "tiny", "--members", "2,15", "--source", ADDRESS, "--dest", tmp_path / "copy")
    assert re.match("citation +hf://datasets/alice/zoo@", result.stdout)
    check(built, tmp_path / "copy", [(2, 40), (15, 40)])
    (shard,) = (tmp_path / "copy" / "shards" / "tiny").iterdir()
    assert plan["dest_bytes"] == shard.stat().st_size
    assert hub.log.bytes(SHARDS) <= 1.02 * 2 * size
    before = hub.log.requests(SHARDS)
    there, here = zoo.load("tiny", members="2,15", source=ADDRESS), zoo.load("tiny", source=tmp_path / "copy")
    assert all(torch.equal(t, here.stack()[n]) for n, t in there.stack().items())
    assert there.rows.column("sha256") == here.rows.column("sha256")
    assert hub.log.requests(SHARDS) == before
    assert here.description == there.description


def test_published_again_it_is_the_same_source(hub: Hub, tmp_path: Path) -> None:
    built = published(hub)
    zoo.load("tiny", n=3, source=ADDRESS).download(tmp_path)
    hub.commit("alice/again", {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*.*") if p.is_file()})
    again = zoo.load("tiny", source="hf://datasets/alice/again")
    assert again.ids == [0, 1, 2]
    assert zoo.verify(again, sample=0) == []
    assert all(torch.equal(t, built.states[1, 40][n]) for n, t in again[1].state_dict().items() if "batches" not in n)


# ---- into a folder that has something ----
@pytest.mark.usefixtures("three")
def test_members_are_added_and_others_stay(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=range(8))
    other = build(tmp_path / "copy", name="other")
    before = digest_of(other.root)
    load(built, members="0,1,6").download(tmp_path / "copy")
    untouched = next(p for p in (tmp_path / "copy" / "shards" / "tiny").iterdir() if p.name.startswith("00002-"))
    stamp = untouched.stat()
    copied = load(built, members="1,2").download(tmp_path / "copy")
    assert copied.ids == [1, 2]
    now = digest_of(tmp_path / "copy")
    assert {path: now[path] for path in before} == before
    assert (untouched.stat().st_ino, untouched.stat().st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)
    shutil.rmtree(tmp_path / "copy" / "shards" / "other")
    check(built, tmp_path / "copy", [(m, 40) for m in (0, 1, 2, 6)])


def test_members_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    load(built).download(tmp_path / "copy")
    before = {path: (digest, time) for path, (digest, time) in digest_of(tmp_path / "copy").items() if "shards" in path}
    shutil.rmtree(built.root / "shards")  # nothing is read either
    load(built, members="1-2").download(tmp_path / "copy")
    assert {p: x for p, x in digest_of(tmp_path / "copy").items() if "shards" in p} == before


def test_what_the_source_says_later_is_taken_over(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    load(built).download(tmp_path / "copy")
    built.rows[1] |= {"test_accuracy": 0.5, "seed": None}
    built.write()
    load(built, members="1").download(tmp_path / "copy")
    assert [(r["test_accuracy"], r["seed"]) for r in rows_of(tmp_path / "copy")[:2]] == [(0.9, 7), (0.5, 8)]


def test_a_snapshot_that_was_the_final_one(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=[0, 1])
    load(built).download(tmp_path / "copy")
    longer = build(tmp_path / "longer", members=[0, 1], snapshots=(60,))
    for row in longer.rows:
        row["final"] = row["epoch"] == 60
    longer.write()
    with pytest.raises(UsageError, match=r"member 0 of tiny in folder .*expected the final epoch 40; found 60"):
        load(longer).download(tmp_path / "copy")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"architecture": "resnet8"}, "another architecture"),
        ({"classes": ["x"], "citation": "me"}, "another classes, citation"),
        ({"base": f"hf://datasets/a/b@{40 * '0'}"}, r"another base \(the bytes there lie in hf://datasets/a/b@0+\)"),
    ],
)
def test_a_collection_of_another_kind_is_refused(change: dict[str, Any], found: str, tmp_path: Path) -> None:
    built, there = build(tmp_path / "source"), build(tmp_path / "copy", members=[7])
    there.description |= change
    there.write()
    before = digest_of(there.root)
    with pytest.raises(UsageError, match=f"collection tiny in folder .*found {found}. Give another folder."):
        load(built).download(there.root)
    assert digest_of(there.root) == before


def test_other_layouts_and_other_weights_are_refused(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    narrow = build(tmp_path / "narrow", weights=torch.float16)
    with pytest.raises(UsageError, match="found another layout 'only'"):
        load(built).download(narrow.root)
    other = build(tmp_path / "other", members=[4, 2], change=lambda m, state: next(iter(state.values())).add_(1))
    with pytest.raises(UsageError, match=r"member 2 of tiny: expected the weights that the folder has .*Give another"):
        load(built).download(other.root)
    with pytest.raises(UsageError, match="expected another one than the source; found the source itself"):
        load(built).download(built.root)


def test_rows_without_weights_come_along(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    built.rows[2] |= {"status": "failed", "reason": "loss", "sha256": None} | dict.fromkeys(LOCATION)
    built.write()
    load(built, where="status in ('ok', 'failed')").download(tmp_path / "copy")
    rows = rows_of(tmp_path / "copy")
    assert [(r["member"], r["status"], r["path"] is None) for r in rows] == [
        (0, "ok", False), (1, "ok", False), (2, "failed", True), (3, "ok", False)
    ]  # fmt: skip
    load(built, where="status = 'failed'").download(tmp_path / "failed")
    assert [r["reason"] for r in rows_of(tmp_path / "failed")] == ["loss"]


# ---- damage, room, kills ----
def test_a_changed_member_is_named_and_nothing_written(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    load(built, members="0").download(tmp_path / "copy")
    before = digest_of(tmp_path / "copy")
    with built.shard.open("r+b") as file:
        file.seek(built.rows[2]["offset"] + 5)
        file.write(b"\xff")
    with pytest.raises(DamagedError, match=r"member 2 of tiny in file .*: expected sha256 .*, as its row says; found"):
        load(built).download(tmp_path / "copy")
    assert digest_of(tmp_path / "copy") == before


@pytest.mark.slow
def test_no_room_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"file: expected a folder with free space that can be written to; found File exists"
    ):
        load(built).download(tmp_path / "file")
    assert process("download", "tiny", "--source", built.root, "--dest", tmp_path / "file").returncode == 3
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(
        StorageError, match=r"copy: expected room for [\d,]+ bytes; found 100 bytes free. Free some space"
    ):
        load(built).download(tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob("*.*"))


def copy_all(source: str, dest: str) -> None:
    """What each child does: copy all members, three a shard."""
    shard_files.LARGEST_TENSOR_COUNT = 30
    copying.copy_members(select_members("tiny", source=source, members="0-7"), Path(dest))


@pytest.mark.slow
@pytest.mark.usefixtures("three")
def test_killed_at_every_step(tmp_path: Path) -> None:
    built, dest = build(tmp_path / "source", members=range(8)), tmp_path / "killed"
    load(built, members="0,1,7").download(tmp_path / "first")
    load(built).download(tmp_path / "whole")
    wanted = digest_of(tmp_path / "whole")
    shards: dict[Path, int] = {}  # that a killed copy left

    def done() -> None:
        assert {p: d for p, (d, _) in digest_of(dest).items()} == {p: d for p, (d, _) in wanted.items()}
        assert all(p.stat().st_ino == inode for p, inode in shards.items() if p.exists())  # none was written again

    def usable() -> None:
        here = zoo.load("tiny", source=dest)  # what was there, or all of it
        assert here.ids in ([0, 1, 7], list(range(8)))
        assert zoo.verify(here, sample=0) == []
        shards.update({p: p.stat().st_ino for p in (dest / "shards" / "tiny").glob("*.safetensors")})

    def reset() -> None:
        shutil.rmtree(dest)
        shutil.copytree(tmp_path / "first", dest)
        shards.clear()

    shutil.copytree(tmp_path / "first", dest)
    copier = OnFiles(forks(), copy_all, (str(built.root), str(dest)))
    Contract(copier, done, usable, reset).at_each_step()
    assert copier.steps > 20


@pytest.mark.slow
def test_two_at_once_add_what_each_has(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=range(8))
    arguments = ["download", "tiny", "--source", built.root, "--dest", tmp_path / "copy", "--members"]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda some: process(*arguments, some), ("0-4", "3-7")))
    assert [x.returncode for x in done] == [0, 0], done
    check(built, tmp_path / "copy", [(m, 40) for m in range(8)])


@pytest.mark.slow
def test_one_member_in_memory_at_a_time(tmp_path: Path) -> None:
    """Thirty members of a megabyte, in a source written by hand."""
    built, size = build(tmp_path / "source"), 10**6
    state = {f"{m:06d}/w": ("F16", [size // 2], bytes([m]) * size) for m in range(30)}
    content = file_bytes(state)
    built.shard.write_bytes(content)
    layout = {"tensors": [["w", "F16", [size // 2]]], "counters": [], "pad": 0}
    built.description["layouts"] = {"only": layout}
    first = {**built.rows[0], "nbytes": size, "dtype": "F16", "sha256": None}
    start = len(content) - 30 * size
    built.rows = [{**first, "member": m, "offset": start + m * size} for m in range(30)]
    built.write()
    found = select_members("tiny", source=built.root)
    tracemalloc.start()
    copying.copy_members(found, tmp_path / "copy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * size  # one in the stored type, one widened for its hash, and what is small
    (shard,) = (tmp_path / "copy" / "shards" / "tiny").iterdir()
    assert shard.read_bytes() == content
    wide = [torch.frombuffer(bytearray(raw), dtype=torch.float16) for _, _, raw in state.values()]
    assert [r["sha256"] for r in rows_of(tmp_path / "copy")] == [hash_of({"w": w}) for w in wide]
