"""`verify` of members on the Hub: fetched in one go, and where something is damaged the members to blame are named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import AccessError, NetworkError
from tests.hub import WRITER, Hub
from tests.support.commands import run, values
from tests.support.remote import ADDRESS, REPO, SHARDS, published
from tests.support.scenarios import Built, build


@pytest.fixture
def tiny(hub: Hub) -> Built:
    return published(hub)


def test_all_members_in_one_go(hub: Hub, tiny: Built) -> None:
    assert zoo.verify(zoo.load("tiny", members="1-3,12", source=ADDRESS), sample=0) == []
    assert hub.log.requests(SHARDS, ranged=True) == 2  # one a run, not one a member
    assert hub.log.leaks(WRITER) == []


@pytest.mark.slow
def test_the_members_to_blame_are_named(hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path, members=range(12), per_shard=6)
    content = bytearray(built.shard.read_bytes())
    for member in (1, 4):
        content[built.rows[member]["offset"] + 9] ^= 1
    built.shard.write_bytes(content)
    (tmp_path / str(built.rows[9]["path"])).rename(tmp_path / "elsewhere")
    hub.commit("alice/bad", {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*.*")}, lfs=True)
    found = zoo.verify(zoo.load("tiny", members="1,2,6,7", source="hf://datasets/alice/bad"), sample=0)
    assert [(p.member, p.kind) for p in found] == [(1, "bytes"), (None, "bytes")]
    assert "expected sha256 " in found[0].text  # it came in a range of its own, and was not kept
    assert found[1].text.startswith("members 6-7: ")
    assert "expected a file, since a manifest names it; found no such file at this commit" in found[1].text
    found = zoo.verify(zoo.load("tiny", source="hf://datasets/alice/bad"), sample=0)
    assert [p.member for p in found] == [1, 4, None]
    assert found[2].text.startswith("members 6-11: ")


def test_the_network_is_no_finding(hub: Hub, tiny: Built, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("tiny", n=2, source=ADDRESS)
    hub.faults.add(SHARDS, status=403, times=math.inf)
    with pytest.raises(AccessError):
        zoo.verify(members)
    hub.faults.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match="2 of 2 members of tiny"):
        zoo.verify(members)
    assert run("verify", "tiny", "--source", ADDRESS).exit_code == 5


def test_an_address_means_every_collection_of_it(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    other = build(tmp_path, members=range(3), name="other", change=lambda m, state: None)
    other.rows[2]["sha256"] = "0" * 64
    other.write()
    hub.commit(REPO, {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*.*") if p.is_file()})
    result = run("verify", ADDRESS, "--sample", "0", "--format", "json")
    found = values(result)
    assert result.exit_code == 1
    assert [(x["collection"], x["members"], x["problems"]) for x in found["checked"]] == [
        ("other", 3, 1),
        ("tiny", 20, 0),
    ]
    assert [(p["collection"], p["member"]) for p in found["problems"]] == [("other", 2)]
    assert hub.log.requests("/revision/") == 1  # one commit for all of it
    hub.commit(REPO, {"manifests/other.json": b"{}"})
    found = values(run("verify", f"{ADDRESS}@main", "--sample", "0", "--format", "json"))
    assert [(p["collection"], p["kind"]) for p in found["problems"]] == [("other", "manifest")]
    hub.commit("alice/none", {"README.md": b"#"})
    empty = run("verify", "hf://datasets/alice/none")
    assert (empty.exit_code, "expected manifests/NAME.parquet; found none" in empty.stderr) == (3, True)


def test_a_citation_is_no_address(hub: Hub, tiny: Built) -> None:
    citation = zoo.load("tiny", members="3,4", source=ADDRESS).citation
    found = json.loads(run("verify", citation, "--sample", "0", "--format", "json").stdout)
    assert [x["members"] for x in found["checked"]] == [2]
