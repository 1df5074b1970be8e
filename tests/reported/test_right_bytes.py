"""One wrong bit in a member, cases 4 and 5: the same error on every way from a Hub; a cached member is fetched anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, NetworkError
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.sources import fetching, hash_records, hub_cache
from checkpoints_zoo.sources import hub as hub_client
from tests.hub import Hub
from tests.sources.test_archived_collections import forget, optunet
from tests.support.archives import local_tar
from tests.support.remote import ADDRESS, REPO, published
from tests.support.scenarios import Built, build, load


@pytest.fixture
def tiny(hub: Hub) -> Built:
    """Publish twenty small members in two shards."""
    return published(hub)


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("members", ["1", "0-11"])
def test_a_shard_that_differs_from_its_manifest(hub: Hub, tiny: Built, tmp_path: Path, members: str) -> None:
    """Case 4: by ranges and as a whole file, and by ranges afterwards."""
    row = tiny.rows[1]
    shard = tmp_path / "shard"
    shard.write_bytes((tiny.root / str(row["path"])).read_bytes())
    flip_bit(shard, int(row["offset"]) + 5)
    hub.commit(REPO, {str(row["path"]): shard}, lfs=True)
    for selection in (members, "1"):
        with pytest.raises(DamagedError, match=r"^member 1 in file .*: expected sha256 .*, twice"):
            zoo.load("tiny", members=selection, source=ADDRESS).stack()


@pytest.mark.parametrize("change", ["flip", "tail", "zeros", "folder"])
@pytest.mark.parametrize("members", ["1,12", "0-19"])
def test_a_cached_member_that_has_changed(hub: Hub, tiny: Built, members: str, change: str) -> None:
    """Case 5: one bit, a tail of zeros, nothing but zeros, a folder: fetched anew, from our cache and the client's."""
    collection = zoo.load("tiny", members=members, source=ADDRESS)
    collection.stack()
    locations = collection.source.locate(collection.description, collection.rows)
    path = locations[0].path
    size = path.stat().st_size
    if change == "folder":
        if not path.is_relative_to(hub_cache.cache_root()):
            pytest.skip("the client's cache is the client's")
        path.unlink()
        path.mkdir()
    elif change == "flip":
        flip_bit(path.resolve(), locations[0].offset + 9)
    else:
        start = 0 if change == "zeros" else locations[0].offset + 64
        path.resolve().write_bytes(path.read_bytes()[:start] + bytes(size - start))
    fetching._remote_files.clear()
    again = zoo.load("tiny", members=members, source=ADDRESS).stack()
    expected = load(tiny, members=members).stack()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_an_unchanged_member_is_not_read_again(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 16, item 2: a record says which file was hashed; a copy is another file, and is hashed once."""
    for members in ("1,12", "0-19"):
        zoo.load("tiny", members=members, source=ADDRESS).stack()
    hash_records._known_records.clear()  # as another process starts
    hashed: list[int] = []

    def counted(*arguments: object) -> str:
        hashed.append(1)
        return content_hash(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "content_hash", counted)
    zoo.load("tiny", members="0-19", source=ADDRESS).stack()
    assert hashed == []
    zoo.load("tiny", members="1,12", source=ADDRESS, check=True).stack()
    assert len(hashed) == 2
    shutil.rmtree(hub_cache.cache_root() / "datasets--alice--zoo" / "records")
    hash_records._known_records.clear()
    hashed.clear()
    for _ in range(2):
        zoo.load("tiny", members="0-19", source=ADDRESS).stack()
    assert len(hashed) == 20


@pytest.mark.parametrize("part", ["manifests/tiny.json", "manifests/tiny.parquet"])
@pytest.mark.parametrize("change", ["empty", "half", "flip"])
def test_the_clients_files_are_fetched_anew(hub: Hub, tiny: Built, part: str, change: str) -> None:
    """Case 5: an empty or half description or manifest in the client's cache, and one with a wrong bit."""
    source = zoo.load("tiny", n=1, source=ADDRESS).source
    path = source.local_path(part).resolve()
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "flip": content}[change])
    if change == "flip":
        flip_bit(path, len(content) // 2)
    assert zoo.load("tiny", n=1, source=ADDRESS).ids == [0]
    assert source.local_path(part).read_bytes() == content


@pytest.mark.parametrize("part", ["manifests/tiny.json", "manifests/tiny.parquet"])
def test_a_clients_file_without_a_hash_is_fetched_anew(hub: Hub, tiny: Built, part: str) -> None:
    """Case 5: on file systems without links the client's cache does not say which hash was announced."""
    source = zoo.load("tiny", n=1, source=ADDRESS).source
    path = source.local_path(part)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-40])
    assert zoo.load("tiny", n=1, source=ADDRESS).ids == [0]
    assert source.local_path(part).read_bytes() == content


def test_check_hashes_the_members_of_a_folder(tmp_path: Path) -> None:
    """Issue 16, item 2: `check=True` reads what is mapped otherwise."""
    built = build(tmp_path, members=range(4))
    flip_bit(built.shard, int(built.rows[2]["offset"]) + 1)
    assert load(built).stack()
    members = zoo.load(built.name, source=built.root, check=True)
    with pytest.raises(DamagedError, match=r"^member 2 in file .*: expected sha256 .*; found"):
        members.stack()
    with pytest.raises(DamagedError, match=r"^member 2 "):
        members[2].state_dict()
    assert members[:2].stack()


def test_offline_a_damaged_member_stays_and_is_named(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline nothing can be fetched anew: the error says what is damaged, and how to get it again."""
    collection = zoo.load("tiny", members="1,12", source=ADDRESS)
    right = collection.stack()
    path = collection._locations()[1].path
    flip_bit(path, path.stat().st_size - 9)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError) as error:
        zoo.load("tiny", members="1,12", source=ADDRESS).stack()
    assert str(error.value) == (
        "1 of 2 members of tiny: expected members in the cache, since HF_HUB_OFFLINE is set; found no members 12 of "
        f"{collection.source.repo}; the cached copy of members 12 is damaged. Get them online: "
        f"`zoo-cli download tiny --members 12 --source {collection.source.repo}`."
    )
    assert path.exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    again = zoo.load("tiny", members="1,12", source=ADDRESS).stack()
    assert all(torch.equal(again[name], right[name]) for name in right)


def test_offline_a_damaged_archive_stays_and_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of an archive have no hashes of their own, so that none of a damaged archive is used."""
    forget()
    inside = "models/mnist-optunet/mnist-optunet-0-29.tgz"
    files = [(f"mnist-optunet/version_{i}.safetensors", save(state)) for i, state in enumerate(optunet()[1])]
    hub.commit("torch-uncertainty/Checkpoints", {inside: local_tar(files)}, lfs=True)
    collection = zoo.load("optunet-mnist")
    assert collection.source.repo is not None
    path = hub_client.fetch_file(collection.source.repo, inside)
    right = {name: tensor.clone() for name, tensor in collection.stack().items()}
    size = path.stat().st_size
    flip_bit(path.resolve(), size // 2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        NetworkError, match=rf"found no members 0-29 of .*; the cached copy of file {inside} is damaged"
    ):
        collection.stack()
    assert path.stat().st_size == size
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert all(torch.equal(tensor, right[name]) for name, tensor in collection.stack().items())


@pytest.mark.parametrize("part", ["manifests/tiny.json", "manifests/tiny.parquet"])
def test_offline_a_damaged_manifest_stays_and_is_named(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    path = zoo.load("tiny", n=1, source=ADDRESS).source.local_path(part)
    flip_bit(path.resolve(), path.stat().st_size // 2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DamagedError) as error:
        zoo.load("tiny", n=1, source=ADDRESS)
    assert str(error.value).startswith(f"file {part} of {ADDRESS}: expected the hash ")
    assert str(error.value).endswith(
        " The damaged copy in the cache stays, but is not used: unset HF_HUB_OFFLINE to get it again."
    )
    assert path.exists()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert zoo.load("tiny", n=1, source=ADDRESS).ids == [0]
