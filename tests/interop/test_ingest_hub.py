"""Importing from the Hub: a manifest over bytes that stay there, or shards of our own; each byte comes once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import AccessError, SourceNotFound, UsageError
from checkpoints_zoo.interop.ingest import ImportPlan, NetSpec, ingest, measuring
from checkpoints_zoo.sources import cache, fetching
from tests.hub import WRITER, Hub
from tests.sources.test_archived_collections import COUNT, HEAD, PAYLOAD, REPO, forget, named, path_of
from tests.support.archives import member, virtual_tar
from tests.support.originals import hashes, imported, members_in, ours, rows_of, states, tar
from tests.support.scenarios import State

ADDRESS = f"hf://datasets/{REPO}"
NETS = "models/mnist-optunet"


@pytest.fixture
def nets(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """Commit thirty OptuNets in two raw tars and a gzipped one, and as safetensors files; return them all."""
    forget()
    monkeypatch.setattr(measuring, "MOST_BATCH_MEMBERS", 5)
    made = states(30)
    parts = {"a": (tar(tmp_path / "a", made[:12]), "optunet-0-11.tgz"),
             "b": (tar(tmp_path / "b", made[12:24]), "optunet-12-23.tgz")}  # fmt: skip
    commit = {f"{NETS}/{name}": (folder / "nets-0.tgz").read_bytes() for folder, name in parts.values()}
    commit["gz/nets.tar"] = (tar(tmp_path / "c", made[24:], "w:gz") / "nets-0.tgz").read_bytes()
    commit |= {f"loose/net-{i}.safetensors": save(state) for i, state in enumerate(made[:3])}
    commit |= {"pickled/a.pt": b"PK\x03\x04", "README.md": b"# nets"}
    hub.commit(REPO, commit, lfs=True)
    return made


def cached() -> int:
    return len(cache.member_files(REPO))


@pytest.mark.slow
def test_a_manifest_whose_bytes_stay_on_the_hub(hub: Hub, nets: list[State], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"found none\. Give --out DIR for a manifest whose bytes stay on the Hub, or"):
        ingest([ADDRESS], "optunet-mnist")
    plan = ingest([ADDRESS], "optunet-mnist", out=out, hash=True, dry_run=True)
    assert isinstance(plan, ImportPlan)
    assert (plan.files, plan.members, plan.bytes, plan.read) == (2, 24, 24 * 784, 24 * 784)
    assert not out.exists()
    done = imported([ADDRESS], "optunet-mnist", out=out)
    assert (done.rows, done.ok, done.hashed) == (24, 24, 0)
    description = zoo.load("optunet-mnist", source=out).description
    commit = zoo.load("optunet-mnist", n=1)._commit
    assert description.base == f"{ADDRESS}@{commit}"
    assert (description.dataset, description.classes) == ("mnist", images.CLASSES["mnist"])
    zoo.load("optunet-mnist", source=out, members="2,13").download()
    assert cached() == 2
    hub.log.clear()
    done = imported([ADDRESS], "optunet-mnist", out=out, hash=True)
    assert done.hashed == 24
    assert [row["sha256"] for row in rows_of(out, "optunet-mnist")] == hashes(nets[:24])
    assert cached() == 2  # what was there stays, the rest is gone
    assert hub.log.leaks(WRITER) == []
    hub.log.clear()
    assert imported([ADDRESS], "optunet-mnist", out=out, hash=True).hashed == 24
    assert hub.log.bytes("_cdn") == 2 * 512  # the first bytes of each archive tell what it is
    assert torch.equal(zoo.load("optunet-mnist", source=out).stack()["fc.weight"][20], nets[20]["linear.weight"])


def test_a_new_commit_meanwhile(hub: Hub, nets: list[State], tmp_path: Path) -> None:
    imported([ADDRESS], "optunet-mnist", out=tmp_path)
    commit = hub.commit(REPO, {"README.md": b"# more"})
    with pytest.raises(UsageError, match=rf"found members in {ADDRESS}@\w+, not in {ADDRESS}@{commit}\. Give"):
        ingest([ADDRESS], "optunet-mnist", out=tmp_path)
    first = zoo.load("optunet-mnist", source=tmp_path).description.base
    assert imported([first], "optunet-mnist", out=tmp_path, hash=True).hashed == 24


def test_cut_off_and_started_again(
    hub: Hub, nets: list[State], tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints_zoo.sources.ranges.time", type("Clock", (), {"sleep": staticmethod(waits.append)}))
    imported([ADDRESS], "optunet-mnist", out=tmp_path)
    hub.faults.add("_cdn.*", method="GET", status=403, code="Denied", skip=4, times=math.inf)
    with pytest.raises(AccessError):
        ingest([ADDRESS], "optunet-mnist", out=tmp_path, hash=True)
    some = sum(row["sha256"] is not None for row in rows_of(tmp_path, "optunet-mnist"))
    assert 0 < some < 24
    hub.faults.clear()
    fetching._remote_files.clear()
    assert imported([ADDRESS], "optunet-mnist", out=tmp_path, hash=True).hashed == 24


@pytest.mark.slow
def test_shards_of_our_own(hub: Hub, nets: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.LARGEST_TENSOR_COUNT", 40)
    archives = {"mine": (f"{ADDRESS}/{NETS}", nets[:24]), "gz": (f"{ADDRESS}@main/gz/nets.tar", nets[24:]),
                "loose": (f"{ADDRESS}/loose", nets[:3])}  # fmt: skip
    for name, (address, made) in archives.items():
        hub.log.clear()
        done = imported([address], name, reshard=tmp_path)
        assert (done.ok, done.hashed) == (len(made), len(made))
        assert [row["sha256"] for row in rows_of(tmp_path, name)] == hashes(made)
        there = members_in(tmp_path / "shards" / name)
        for i, state in enumerate(made):
            assert all(torch.equal(there[i][n], t) for n, t in ours(state).items())
        assert cached() == 0
        assert not (tmp_path / ".import" / name).exists()
    assert len({row["path"] for row in rows_of(tmp_path, "mine")}) == 3
    hub.log.clear()
    assert imported([f"{ADDRESS}/{NETS}"], "mine", reshard=tmp_path).hashed == 24
    assert hub.log.bytes("_cdn") == 2 * 512
    for path in tmp_path.rglob("shards/*/*"):
        assert b"hf://" not in path.read_bytes()
    assert zoo.load("mine", source=tmp_path).description.base == ""


def test_places_that_hold_none(hub: Hub, nets: list[State], tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="never opened from the Hub"):
        ingest([f"{ADDRESS}/pickled"], "mine", reshard=tmp_path)
    with pytest.raises(SourceNotFound, match=r"found none\. Give the path inside the repo: hf://datasets/ORG/NAME"):
        ingest([ADDRESS], "mine", reshard=tmp_path)
    with pytest.raises(SourceNotFound, match=r"file nothing/here of hf://datasets"):
        ingest([f"{ADDRESS}/nothing/here"], "mine", reshard=tmp_path)
    with pytest.raises(SourceNotFound, match="expected hf://datasets/ORG/NAME"):
        ingest(["hf://torch-uncertainty/Checkpoints/x"], "mine", reshard=tmp_path)
    with pytest.raises(UsageError, match=r"found a gzipped archive \(gz/nets\.tar\)"):
        ingest([f"{ADDRESS}/gz/nets.tar"], "mine", out=tmp_path)
    assert list(tmp_path.glob("manifests/*")) == []


@pytest.mark.slow
def test_every_header_of_a_true_sized_archive_is_read(hub: Hub, tmp_path: Path) -> None:
    forget()
    order = sorted(range(COUNT), key=str)
    a, b = order.index(100), order.index(733)
    order[a], order[b] = order[b], order[a]  # no sampled header shows it
    archive = virtual_tar(named(0, order))
    hub.commit(REPO, {path_of(0): archive}, lfs=True)
    plan = ingest([ADDRESS], "resnet18-cifar100", out=tmp_path, dry_run=True)
    assert isinstance(plan, ImportPlan)
    assert (plan.members, plan.requests) == (COUNT, COUNT)
    assert len(hub.log.select("_cdn")) <= 40
    done = imported([ADDRESS], "resnet18-cifar100", out=tmp_path)
    assert (done.rows, done.ok) == (COUNT, COUNT)
    assert len(hub.log.select("_cdn")) <= 40 + 2 * COUNT + 4
    members = zoo.load("resnet18-cifar100", members="100", source=tmp_path)
    state = members[0].state_dict()
    raw = member(100).read(len(HEAD), PAYLOAD)
    begin = raw.index(state["conv1.weight"].numpy().tobytes())  # bytes of 100, wherever in the archive they lie
    assert begin % 2 == 0
    assert archive.size > 2 * 10**10


@pytest.mark.slow
def test_measured_where_they_lie(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(measuring, "MOST_BATCH_MEMBERS", 3)
    known = zoo.load("convnet-digits", n=7)
    states_of = [{n: t.clone() for n, t in m.state_dict().items()} for m in known]
    hub.commit("alice/nets", {f"runs/seed-{i}.safetensors": save(s) for i, s in enumerate(states_of)}, lfs=True)
    facts = {"licence": "MIT"}
    convnet = {"net": NetSpec("convnet"), "like": "convnet-digits", "evaluate": "digits", "user_facts": facts}
    done = imported(["hf://datasets/alice/nets/runs"], "mine", out=tmp_path / "over", **convnet)
    assert (done.hashed, done.measured) == (7, 7)
    assert cache.member_files("alice/nets") == set()
    done = imported(["hf://datasets/alice/nets/runs"], "mine", reshard=tmp_path / "out", **convnet)
    for folder in ("over", "out"):
        for row, was in zip(rows_of(tmp_path / folder, "mine"), known.rows.to_pylist(), strict=True):
            assert row["sha256"] == was["sha256"]
            assert row["test_nll"] == pytest.approx(was["test_nll"], abs=1e-6)
        zoo.publish(tmp_path / folder, f"alice/{folder}", sample=1)
        there = zoo.load("mine", source=f"hf://datasets/alice/{folder}")
        assert torch.equal(there.stack()["fc2.weight"], known.stack()["fc2.weight"])
