"""Importing what lies on this disk: manifests over files as they are, hashes, accuracies, shards of our own."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.interop.ingest import ImportPlan, NetSpec, ingest, measuring
from tests.support.commands import run, values
from tests.support.originals import (
    KINDS,
    files,
    gzipped,
    hashes,
    imported,
    members_in,
    ours,
    pickles,
    rows_of,
    states,
    tar,
)
from tests.support.refusals import Evil
from tests.support.scenarios import digest_of, hash_of

COUNT = 12


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards and batches hold few members, so that there are several."""
    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.LARGEST_TENSOR_COUNT", 20)
    monkeypatch.setattr(measuring, "MOST_BATCH_MEMBERS", 5)


@pytest.mark.parametrize("kind", ["tar", "files"])
def test_a_manifest_over_files_as_they_are(kind: str, tmp_path: Path) -> None:
    made = states(COUNT)
    made[7] = made[3]
    made[5]["conv2.weight"].view(-1)[8] = float("inf")
    folder = KINDS[kind](tmp_path / "in", made)
    before = digest_of(folder)
    done = imported([folder], "nets", user_facts={"dataset": "mnist", "classes": images.CLASSES["mnist"]})
    assert (done.rows, done.ok, done.hashed, done.measured) == (COUNT, COUNT, 0, 0)
    assert done.manifest == folder / "manifests" / "nets.parquet"
    rows = rows_of(folder)
    for column in ("seed", "sha256", "test_accuracy", "eval_data"):
        assert {row[column] for row in rows} == {None}
    members = zoo.load("nets", source=folder)
    assert members.ids == list(range(COUNT))
    assert torch.equal(members.member(11).state_dict()["fc.weight"], made[11]["linear.weight"])
    done = imported([folder], "nets", hash=True)
    assert (done.rows, done.ok, done.failed, done.excluded, done.hashed) == (COUNT, COUNT - 2, 1, 1, COUNT)
    rows = rows_of(folder)
    assert [row["sha256"] for row in rows] == hashes(made)
    assert (rows[5]["status"], rows[5]["reason"]) == ("failed", "values that are not finite in conv2.weight")
    assert (rows[7]["status"], rows[7]["reason"]) == ("excluded", "the weights of member 3")
    assert zoo.verify(zoo.load("nets", source=folder), sample=0) == []
    assert {k: v for k, v in digest_of(folder).items() if k in before} == before


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_our_own(kind: str, tmp_path: Path) -> None:
    made = states(COUNT)
    made[7] = made[3]
    folder, out = KINDS[kind](tmp_path / "in", made), tmp_path / "out"
    done = imported([folder], "nets", reshard=out)
    assert (done.rows, done.ok, done.excluded, done.hashed) == (COUNT, COUNT - 1, 1, COUNT)
    shutil.rmtree(folder)
    rows = rows_of(out)
    assert [row["sha256"] for row in rows] == hashes(made)
    assert len({row["path"] for row in rows}) == 3
    there = members_in(out / "shards" / "nets")
    for member, state in enumerate(made):
        assert there[member].keys() == ours(state).keys()
        assert all(torch.equal(there[member][name], tensor) for name, tensor in ours(state).items())
    assert zoo.verify(zoo.load("nets", source=out), sample=0) == []
    for path in out.rglob("*"):
        assert not path.is_file() or str(tmp_path / "in").encode() not in path.read_bytes()
    assert sorted(p.name for p in (out / ".import").iterdir()) == ["nets.json"]


@pytest.mark.parametrize(("kind", "found"), [("gzip", "a gzipped archive (nets-0.tgz)"),
                                             ("pickles", "a file of torch.save (net0.ckpt)")])  # fmt: skip
def test_what_has_to_be_copied(kind: str, found: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "in", states(2))
    with pytest.raises(UsageError) as caught:
        ingest([folder], "nets")
    assert str(caught.value) == (
        f"source {folder}: expected files whose members can be read in place; found {found}. "
        "Give --reshard OUT, which copies them into shards."
    )
    assert not (folder / "manifests").exists()


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_that_runs_code(old: bool, tmp_path: Path) -> None:
    folder, out, mark = pickles(tmp_path / "in", states(2)), tmp_path / "out", tmp_path / "evil"
    torch.save({"state_dict": states(1)[0], "x": Evil(mark)}, folder / "net1.ckpt",
               _use_new_zipfile_serialization=not old)  # fmt: skip
    found = r"net1\.ckpt: expected tensors alone, .*found a pickle that asks for \w+\.mkdir\. It was not opened and"
    with pytest.raises(UsageError, match=found):
        ingest([folder], "nets", reshard=out)
    assert not mark.exists()
    assert not (out / "manifests").exists()
    pickle.loads(pickle.dumps(Evil(mark)))  # noqa: S301 (it would have)
    assert mark.exists()


def test_damaged_files_are_members_that_failed(tmp_path: Path) -> None:
    folder = pickles(tmp_path / "pt", states(5))
    whole = (folder / "net1.ckpt").read_bytes()
    (folder / "net1.ckpt").write_bytes(whole[: len(whole) // 2])
    (folder / "net2.ckpt").write_bytes(b"<!DOCTYPE html><html>")
    torch.save({"model": states(1)[0], "epoch": 1}, folder / "net3.ckpt")
    imported([folder], "nets", reshard=tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "failed", "ok"]
    assert f"found {len(whole) // 2:,} bytes without the end that a zip archive has" in rows[1]["reason"]
    assert "expected a file of torch.save; found a web page" in rows[2]["reason"]
    assert "found 'model': dict, 'epoch': int" in rows[3]["reason"]
    assert rows[1]["path"] is None
    folder = files(tmp_path / "st", states(3))
    (folder / "run_1" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert imported([folder], "nets", hash=True).failed == 1
    assert "found a Git LFS pointer" in rows_of(folder)[1]["reason"]
    for path in folder.rglob("*.safetensors"):
        path.write_bytes(b"\x00" * 7)
    shutil.rmtree(folder / "manifests")
    with pytest.raises(DamagedError, match="expected members; found none in 3 files, the first: file 'run_0/model"):
        ingest([folder], "nets")
    folder = pickles(tmp_path / "nested", states(1))
    for path in folder.iterdir():
        torch.save({"model": states(1)[0], "epoch": 1}, path)
    with pytest.raises(DamagedError, match=r"found none in 1 files, .* Give the architecture, which finds it, or key="):
        ingest([folder], "nets", reshard=tmp_path / "none")


NAMES = st.lists(st.from_regex(r"[a-z]{1,3}(\.[a-z]{1,3}){0,2}", fullmatch=True), min_size=1, max_size=5, unique=True)
KINDS_OF = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
TENSORS = NAMES.flatmap(
    lambda names: st.fixed_dictionaries(
        {n: st.tuples(KINDS_OF, st.lists(st.integers(0, 4), max_size=3).map(tuple)) for n in names}
    )
)


@pytest.mark.slow
@settings(max_examples=10)
@given(TENSORS, st.sampled_from(["st", "pt"]))
def test_any_tensors_come_back(tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], kind: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place, "in"), Path(place, "out")
        folder.mkdir()
        made = []
        for i in range(3):
            made.append({n: torch.randn(s).mul(9).add(i).to(d) for n, (d, s) in tensors.items()})
            if kind == "st":
                save_file(made[-1], folder / f"{i}.safetensors")
            else:
                torch.save(made[-1], folder / f"{i}.pt")
        imported([folder], "mine", net=NetSpec(custom_name="any"), reshard=out)
        there = members_in(out / "shards" / "mine")
        for i, state in enumerate(made):
            assert there[i].keys() == state.keys()
            assert all(torch.equal(there[i][n], t) and there[i][n].dtype == t.dtype for n, t in state.items())
        rows = zoo.load("mine", source=out, where="status != ''").rows.to_pylist()
        assert [row["sha256"] for row in rows] == [hash_of(state) for state in made]


def test_members_of_something_else(tmp_path: Path) -> None:
    folder = files(tmp_path / "in", states(3))
    imported([folder], "nets")
    imported([folder], "nets", user_facts={"title": "Nets"})
    assert zoo.load("nets", source=folder).description.title == "Nets"
    extra = folder / "run_3" / "model.safetensors"
    extra.parent.mkdir()
    extra.write_bytes(save(states(1, seed=1)[0]))
    imported([folder], "nets")
    assert zoo.load("nets", source=folder).ids == [0, 1, 2, 3]
    extra.unlink()
    with pytest.raises(UsageError) as caught:
        ingest([folder], "nets")
    assert str(caught.value) == (
        f"manifest {folder}/manifests/nets.parquet: expected the members of {folder}, or no manifest of that name; "
        "found 4 members, not 3. Give the collection another name or folder, or delete the manifest."
    )
    out = tmp_path / "out"
    shutil.copytree(folder / "manifests", out / "manifests")
    with pytest.raises(UsageError, match=r"found one that was not imported\. Give another folder or name, or delete"):
        ingest([folder / "run_0" / "model.safetensors"], "nets", reshard=out)


def test_where_files_may_lie(tmp_path: Path) -> None:
    folder, talk = files(tmp_path / "in", states(2)), io.StringIO()
    with pytest.raises(UsageError, match=r"model\.safetensors: expected a file in the folder .*found a file elsewhere"):
        ingest([folder], "nets", out=tmp_path / "other")
    (folder / "run_0" / "optimizer.pt").write_bytes(b"x")
    imported([folder / "run_0", folder / "run_1"], "nets", out=tmp_path, say=lambda text: print(text, file=talk))
    assert "1 files (.pt) are left out: the .safetensors files are taken" in talk.getvalue()
    assert rows_of(tmp_path)[0]["path"] == "in/run_0/model.safetensors"
    (folder / "run_1" / "model.safetensors").unlink()
    outside = tmp_path / "real.safetensors"
    outside.write_bytes(save(states(1, seed=2)[0]))
    (folder / "run_1" / "model.safetensors").symlink_to(outside)
    with pytest.raises(UsageError, match=r"found a link to .*real\.safetensors"):
        ingest([folder], "nets")
    imported([folder], "nets", reshard=folder / "zoo")  # a copy may lie in what it is a copy of
    assert imported([folder], "nets", reshard=folder / "zoo").rows == 2
    with pytest.raises(UsageError, match=r"expected archives, safetensors files or .*found 1 \(gzip\) and 1 \(safet"):
        ingest([gzipped(tmp_path / "gz", states(1)) / "nets-0.tgz", outside], "nets", reshard=tmp_path / "x")
    with pytest.raises(UsageError, match="import: expected a folder for the manifest, or one for shards; found both"):
        ingest([folder], "nets", out=folder, reshard=tmp_path)


def test_files_that_are_no_members(tmp_path: Path) -> None:
    out, odd = tmp_path / "out", tmp_path / "odd"
    imported([files(tmp_path / "in", states(7))], "nets", reshard=out)
    with pytest.raises(
        UsageError, match=r"00000-\w+\.safetensors of .*: expected one member a file; found a shard with"
    ):
        ingest([out / "shards"], "again", net=NetSpec(custom_name="any"))
    odd.mkdir()
    (odd / "empty.safetensors").write_bytes(b"")
    (odd / os.fsdecode(b"\xff.safetensors")).write_bytes(save(states(1)[0]))
    with pytest.raises(UsageError, match=r"file \\udcff\.safetensors: expected a name in UTF-8"):
        ingest([odd], "nets")
    (odd / os.fsdecode(b"\xff.safetensors")).rename(odd / "a:b.safetensors")
    with pytest.raises(DamagedError, match=r"expected a path inside the source; found 'a:b\.safetensors', which"):
        ingest([odd], "nets")
    assert imported([odd], "nets", reshard=tmp_path / "copied").ok == 1
    header = b'{"\\udcff":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    (odd / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert imported([odd], "nets", reshard=tmp_path / "two").failed == 1
    assert "surrogates not allowed" in rows_of(tmp_path / "two")[1]["reason"]


def test_two_dtypes(tmp_path: Path) -> None:
    folder, out, made = tmp_path / "in", tmp_path / "out", states(4)
    folder.mkdir()
    for i, state in enumerate([*made, made[1]]):
        save_file({n: t.float() if i % 2 == 0 else t for n, t in state.items()}, folder / f"{i}.safetensors")
    done = imported([folder], "nets", reshard=out)
    assert (done.ok, done.excluded) == (4, 1)  # the same values in float32 are the same member
    assert [row["sha256"] for row in rows_of(out)] == hashes([*made, made[1]])
    there = members_in(out / "shards" / "nets")
    assert [there[i]["fc.bias"].dtype for i in range(2)] == [torch.float32, torch.float16]
    assert zoo.load("nets", source=out).stack()["fc.bias"].dtype == torch.float32


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = files(tmp_path / "in", states(2))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 0, 9))
    with pytest.raises(zoo.ZooError, match=r"out: expected room for 1,\d{3} bytes; found 9 bytes free"):
        ingest([folder], "nets", reshard=tmp_path / "out")
    assert not (tmp_path / "out" / "shards").exists()


def test_the_command(tmp_path: Path) -> None:
    folder = tar(tmp_path / "in", states(4))
    dry = values(run("import", folder, "--collection", "nets", "--hash", "--dry-run", "--format", "json"))
    assert dry == {
        "collection": "nets", "source": str(folder), "target": str(folder), "files": 1, "members": 4, "ok": 4,
        "failed": 0, "excluded": 0, "bytes": 4 * 784, "read": 4 * 784, "requests": 0,
    }  # fmt: skip
    assert [p.name for p in folder.iterdir()] == ["nets-0.tgz"]
    done = run("import", folder, "--collection", "nets", "--hash", "--like", "optunet-mnist", "--format", "json")
    assert values(done) == {
        "collection": "nets", "manifest": str(folder / "manifests" / "nets.parquet"), "rows": 4, "ok": 4,
        "failed": 0, "excluded": 0, "hashed": 4, "measured": 0,
    }  # fmt: skip
    assert "nets: 4 of 4" in done.stderr
    description = zoo.load("nets", source=folder).description
    assert (description.dataset, description.classes) == ("mnist", images.CLASSES["mnist"])
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"title": "Four nets", "licence": "MIT"}))
    more = ("--facts", facts, "--dataset", "photos", "--classes-from", "digits", "--reshard", tmp_path / "out")
    assert run("import", folder, "--collection", "nets", *more).exit_code == 0
    description = zoo.load("nets", source=tmp_path / "out").description
    assert (description.title, description.licence, description.dataset) == ("Four nets", "MIT", "photos")
    gzips = gzipped(tmp_path / "gz", states(4))
    unseen = run("import", gzips, "--collection", "n", "--reshard", tmp_path / "o", "--dry-run", "--format", "json")
    assert values(unseen)["members"] is None
    assert not (tmp_path / "o").exists()
    assert run("import", folder, "--collection", "n", "--argument", "classes").exit_code == 2
    assert run("import", folder).exit_code == 2
    assert isinstance(ingest([folder], "other", dry_run=True), ImportPlan)
