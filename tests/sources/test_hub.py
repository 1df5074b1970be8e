"""Sources on the Hub: a commit once a load, no byte more than asked for, nothing twice, and offline what is local."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, NetworkError, NotCompared, SourceNotFound
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.hub import resolve_address
from checkpoints_zoo.sources.hub_cache import cache_root
from tests.hub import WRITER, Hub, joined, noise
from tests.support.commands import run
from tests.support.remote import ADDRESS, REPO, SHARDS, published
from tests.support.scenarios import Built, build, load


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.fixture
def tiny(hub: Hub) -> Built:
    """Publish twenty small members in two shards."""
    return published(hub)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch):
    """Give a function that takes the client off the network."""
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ---- one load ----
def test_members_are_those_of_the_folder(hub: Hub, tiny: Built) -> None:
    members = zoo.load("tiny", members="1,4,12,19", source=ADDRESS)
    there = load(tiny, members="1,4,12,19")
    assert same(members.stack(), there.stack())
    assert same(members[2].state_dict(), there[2].state_dict())
    assert [ids for ids, _ in members.batches(3)] == [[1, 4, 12], [19]]
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(members.ensemble()(images), there.ensemble()(images))
    assert members.dataset()[0][0].equal(there.dataset()[0][0])


def test_what_a_load_asks_for(hub: Hub, tiny: Built) -> None:
    members = zoo.load("tiny", members="1,2,5,15", source=ADDRESS)
    assert hub.log.requests() == 5  # the commit, and HEAD and GET of manifest and description
    assert members.download() is members
    reads = hub.log.select(SHARDS)
    assert [row.method for row in reads if row.method == "HEAD"] == ["HEAD"] * 2
    assert hub.log.requests() - 4 - 2 <= 4  # files touched; joined runs
    assert hub.log.requests(SHARDS, ranged=True, status=206) == 2  # 1, 2 and 5 lie close together
    before = len(hub.log)
    members.stack()
    zoo.load(members.citation).stack()
    assert len(hub.log) == before


def test_scattered_large_members_cost_their_bytes_alone(hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path, members=range(40))
    size, at = 3 * 2**20, built.rows[0]["offset"]
    built.description["layouts"] = {"only": {"tensors": [["w", "F32", [size // 4]]], "counters": [], "pad": 0}}
    tensors = {
        f"{i:06d}/w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(40)
    }
    head = json.dumps(tensors).encode().ljust(at - 8)
    for i, row in enumerate(built.rows):
        row |= {"offset": 8 + len(head) + i * size, "nbytes": size, "sha256": None, "dtype": "F32"}
    built.write()
    shard = joined(struct.pack("<Q", len(head)), head, noise(1, 40 * size, odd=0x3F))
    hub.commit(REPO, {"manifests/tiny.json": built.json, "manifests/tiny.parquet": built.manifest})
    hub.commit(REPO, {built.rows[0]["path"]: shard})
    hub.latency = 0.02
    members = zoo.load("tiny", members="3,11,12,20,37", source=ADDRESS)
    stacked = members.stack()
    for i, member in enumerate((3, 11, 12, 20, 37)):
        raw = bytes(stacked["w"][i].numpy().data)
        assert raw == shard.read(8 + len(head) + member * size, size)
    assert hub.log.bytes(SHARDS) / (5 * size) <= 1.02
    assert hub.log.requests() - 3 - 4 <= 4
    assert 1 < hub.log.most_at_once(SHARDS, ranged=True) <= 8


def test_most_of_a_file_is_fetched_whole_into_the_clients_cache(hub: Hub, tiny: Built) -> None:
    members = zoo.load("tiny", members="0-5", source=ADDRESS)
    assert same(members.stack(), load(tiny, members="0-5").stack())
    assert hub.log.requests(SHARDS, ranged=True) == 0
    assert hub.log.bytes(SHARDS) == tiny.shard.stat().st_size
    assert cache.cached_repos() == []
    before = len(hub.log)
    zoo.load("tiny", members="7-9", source=str(members.source.display_name)).stack()  # the file is there already
    assert len(hub.log) == before


def test_members_that_are_here_are_not_fetched_with_the_rest(hub: Hub, tiny: Built) -> None:
    zoo.load("tiny", members="0", source=ADDRESS).download()
    hub.log.clear()
    zoo.load("tiny", members="0-9", source=ADDRESS).download()
    assert hub.log.bytes(SHARDS) == 9 * tiny.rows[0]["nbytes"]


def test_a_single_tensor_moves_its_bytes_alone(hub: Hub, tiny: Built) -> None:
    members = zoo.load("tiny", members="1,7,15", source=ADDRESS)
    names = ["fc2.bias", "conv1.weight"]
    with pytest.warns(NotCompared, match="single tensors of tiny are fetched without the rest of their members"):
        found = members.stack(names=names)
    expected = load(tiny, members="1,7,15").stack()
    assert list(found) == names
    assert all(found[name].equal(expected[name]) for name in names)
    assert hub.log.requests(SHARDS, ranged=True) == 2  # 1 and 7 lie close together
    assert same(members.stack(), expected)  # whole members, which are hashed
    before = len(hub.log)
    assert members.take([1]).stack(names=["fc1.weight"])["fc1.weight"][0].equal(expected["fc1.weight"][1])
    assert len(hub.log) == before


@pytest.mark.parametrize("lfs", [True, False])
def test_a_token_goes_to_the_hub_alone(hub: Hub, lfs: bool) -> None:
    published(hub, lfs)
    hub.repos["datasets", REPO].private = True
    zoo.load("tiny", members="1,15", source=ADDRESS).stack()
    assert hub.log.leaks(WRITER) == []
    assert len(hub.log.with_token(WRITER)) >= 3
    agent = f"checkpoints_zoo/{zoo.__version__}"
    assert all(agent in row.headers["user-agent"] for row in hub.log.select(host="127.0.0.1"))


def test_xet_repos_are_read_over_plain_http(hub_xet: Hub) -> None:
    built = published(hub_xet)
    assert same(zoo.load("tiny", n=3, source=ADDRESS).stack(), load(built, n=3).stack())


def test_files_that_lie_in_xet_storage(hub_xet: Hub) -> None:
    from huggingface_hub import HfApi

    built = published(hub_xet)
    hub_xet.repos.clear()
    api = HfApi()
    api.create_repo(REPO, repo_type="dataset")
    api.upload_folder(folder_path=built.root, repo_id=REPO, repo_type="dataset")
    assert all(file.xet for path, file in hub_xet.files(REPO).items() if path.startswith("shards/"))
    hub_xet.log.clear()
    members = zoo.load("tiny", members="0-5,12", source=ADDRESS)
    assert same(members.stack(), load(built, members="0-5,12").stack())
    assert hub_xet.log.bytes(SHARDS) == built.rows[0]["nbytes"]  # of the second shard; Xet has brought the whole first
    before = len(hub_xet.log)
    again = zoo.load("tiny", members="7-9", source=str(members.source.display_name))
    assert same(again.stack(), load(built, members="7-9").stack())
    assert len(hub_xet.log) == before
    assert hub_xet.log.leaks(WRITER) == []


def test_progress_says_bytes_and_rate_on_stderr(
    hub: Hub, tiny: Built, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    members = zoo.load("tiny", n=3, source=ADDRESS).download()
    assert capsys.readouterr() == ("", "")  # HF_HUB_DISABLE_PROGRESS_BARS=1
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    enable_progress_bars()
    try:
        zoo.load("tiny", members="12-13", source=str(members.source.display_name)).download()
    finally:
        disable_progress_bars()
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny: 2 members" in err
    assert "B/s" in err


def test_members_read_one_by_one_cost_a_request_each(hub: Hub, tiny: Built) -> None:
    members = zoo.load("tiny", members="1-3,12", source=ADDRESS)
    assert all(
        torch.equal(m.state_dict()["fc2.bias"], n.state_dict()["fc2.bias"])
        for m, n in zip(members, load(tiny, members="1-3,12"), strict=True)
    )
    hub.expire_links()
    members = zoo.load("tiny", members="4", source=ADDRESS).download()
    assert hub.log.requests(SHARDS, method="HEAD") == 2 + 1  # one a file, and one for the link that ran out
    assert hub.log.requests(SHARDS, ranged=True, status=206) == 5


def test_the_command_line_reads_them(hub: Hub, tiny: Built, offline) -> None:
    shown = run("show", "tiny", "--source", ADDRESS, "--format", "json")
    assert json.loads(shown.stdout)["citation"] == zoo.load("tiny", source=ADDRESS).citation
    assert hub.log.requests(SHARDS) == 0
    listed = run("list", "--source", ADDRESS, "--format", "json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["tiny"]
    offline()
    assert run("show", "tiny", "--source", "hf://datasets/alice/none").exit_code == 5


# ---- commits ----
def test_a_new_commit_between_two_reads_changes_nothing(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    members = zoo.load("tiny", n=2, source=ADDRESS)
    other = build(tmp_path / "other", members=range(3), change=lambda _, s: [t.mul_(2) for t in s.values()])
    files = {p.relative_to(other.root).as_posix(): p for p in other.root.rglob("*.*") if p.is_file()}
    hub.commit(REPO, {tiny.rows[0]["path"]: None, **files}, lfs=True)
    assert same(members.stack(), load(tiny, n=2).stack())
    assert same(zoo.load(members.citation).stack(), load(tiny, n=2).stack())
    assert same(zoo.load("tiny", n=2, source=ADDRESS).stack(), load(other, n=2).stack())


def test_a_commit_with_the_same_shards_fetches_none_again(hub: Hub, tiny: Built) -> None:
    zoo.load("tiny", n=3, source=ADDRESS).download()
    new = hub.commit(REPO, {"README.md": "more"})
    hub.log.clear()
    members = zoo.load("tiny", n=3, source=ADDRESS).download()
    assert members._commit == new
    assert hub.log.bytes(SHARDS) == 0
    assert hub.log.requests(SHARDS) == 1  # its HEAD at the new commit


@pytest.mark.parametrize("revision", ["v1", "side", "refs/pr/1"])
def test_revisions(hub: Hub, tiny: Built, revision: str) -> None:
    first = hub.repo(REPO).at("main").id
    hub.repo(REPO).refs[{"v1": "refs/tags/v1", "side": "refs/heads/side"}.get(revision, revision)] = first
    hub.commit(REPO, {"manifests/tiny.json": None})
    members = zoo.load("tiny", n=1, source=f"{ADDRESS}@{revision}")
    assert members._commit == first
    assert repr(members) == f"Collection('tiny', 1 member, convnet on digits, from {ADDRESS}@{first})"
    assert members.citation.startswith(f"{ADDRESS}@{first}/tiny#0~")
    assert resolve_address(f"{ADDRESS}@{first}").commit == first


def test_the_assets_folder_is_the_clients(hub: Hub, tiny: Built) -> None:
    from huggingface_hub import cached_assets_path

    zoo.load("tiny", n=1, source=ADDRESS).download()
    place = cached_assets_path("checkpoints_zoo", "datasets/alice/zoo", "members")
    assert place == cache_root() / "datasets--alice--zoo" / "members"
    assert len(list(place.iterdir())) == 1


# ---- what is not there ----
FORMS = "hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION"
LOGIN = "Check its name; if it is private, log in with `hf auth login` or set HF_TOKEN."


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("hf://datasets/alice/none", f"expected a data set repo; found none that this login may see. {LOGIN}"),
        (f"{ADDRESS}@v9", "expected a branch, tag or commit; found no such revision."),
        (
            "hf://alice/zoo",
            "expected a folder or data set repo with manifests/; found model repos, which have none. Index them once: "
            "`zoo-cli import 'hf://alice/zoo' --revisions 'step*' --collection NAME --out index/`; then give "
            "source='index/'.",
        ),
        ("hf://datasets/alice", f"expected {FORMS}; found another form."),
        ("hf://datasets/../zoo", f"expected {FORMS}; found another form."),
        (f"{ADDRESS}/shards", f"expected {FORMS}; found another form."),
    ],
)
def test_sources_that_are_not_there(hub: Hub, tiny: Built, address: str, text: str) -> None:
    with pytest.raises(SourceNotFound) as caught:
        zoo.load("tiny", n=1, source=address)
    repo, _, revision = address.partition("@")
    thing = (
        f"source {address}" if FORMS in text or "model repos" in text else f"revision {revision or 'main'!r} of {repo}"
    )
    assert str(caught.value) == f"{thing}: {text}"


def test_a_collection_that_the_repo_lacks(hub: Hub, tiny: Built) -> None:
    with pytest.raises(CollectionNotFound) as caught:
        zoo.load("tinny", source=ADDRESS)
    assert str(caught.value) == (
        f"collection 'tinny': expected a name in source {ADDRESS} (tiny); found no such name. Did you mean tiny?"
    )


# ---- offline ----
def test_offline_with_everything(hub: Hub, tiny: Built, offline) -> None:
    members = zoo.load("tiny", n=3, source=ADDRESS).download()
    hub.commit(REPO, {"README.md": "more"})
    offline()
    hub.log.clear()
    again = zoo.load("tiny", n=3, source=ADDRESS)
    assert same(again.stack(), load(tiny, n=3).stack())
    assert again.citation == members.citation
    assert same(zoo.load(members.citation).stack(), again.stack())
    assert len(hub.log) == 0


def test_offline_with_something_names_the_rest(hub: Hub, tiny: Built, offline) -> None:
    commit = zoo.load("tiny", members="0,2", source=ADDRESS).download()._commit
    offline()
    with pytest.raises(NetworkError) as caught:
        zoo.load("tiny", members="0-3,11", source=ADDRESS).stack()
    assert str(caught.value) == (
        "3 of 5 members of tiny: expected members in the cache, since HF_HUB_OFFLINE is set; found no members 1,3,11 of"
        f" {ADDRESS}@{commit}. Get them online: `zoo-cli download tiny --members 1,3,11 --source {ADDRESS}@{commit}`."
    )


def test_offline_with_nothing(hub: Hub, tiny: Built, offline) -> None:
    offline()
    with pytest.raises(NetworkError) as caught:
        zoo.load("tiny", source=ADDRESS)
    assert str(caught.value) == (
        f"revision 'main' of {ADDRESS}: expected a commit of it in the cache, since HF_HUB_OFFLINE is set; found"
        " none. Load it once online."
    )
    commit = hub.repo(REPO).at("main").id
    with pytest.raises(NetworkError) as caught:
        zoo.load("tiny", source=f"{ADDRESS}@{commit}")
    assert str(caught.value) == (
        f"file manifests/tiny.parquet of {ADDRESS}: expected a copy in the cache, since HF_HUB_OFFLINE is set; found"
        " none. Load it once online."
    )
    assert len(hub.log) == 0
