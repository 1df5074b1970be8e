"""The collections that lie in archives: a repo laid out like upstream's, true in size, which takes no disk."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, DamagedError, NetworkError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.sources import archive_source, archives, fetching
from checkpoints_zoo.sources import cache as member_cache
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, tensor_shapes
from checkpoints_zoo.sources.finding import open_source, select_members
from tests.hub import WRITER, Hub
from tests.hub.virtual import Virtual
from tests.support.archives import Part, head, local_tar, member, virtual_tar

REPO = "torch-uncertainty/Checkpoints"
ADDRESS = f"hf://datasets/{REPO}"
COUNT = 1024
HEAD, PAYLOAD = head()
FOLDER = "models/cifar100-resnet18"


def named(first: int, order: list[int] | None = None) -> list[tuple[str, Part]]:
    numbers = order or sorted(range(first, first + COUNT), key=str)
    folder = f"cifar100-resnet18-{first}-{first + COUNT - 1}"
    return [(f"{folder}/version_{number}.safetensors", member(number)) for number in numbers]


def path_of(first: int) -> str:
    return f"{FOLDER}/cifar100-resnet18-{first}-{first + COUNT - 1}.tgz"


@cache
def regular(first: int) -> Virtual:
    return virtual_tar(named(first))


@cache
def optunet() -> tuple[bytes, list[dict[str, torch.Tensor]]]:
    """Make a gzipped archive of thirty small nets; return it and their state dicts under upstream's names."""
    torch.manual_seed(0)
    shapes = tensor_shapes("optunet", classes=10, hidden=None)
    stored = dict(KEY_MAPS["optunet"].translate_to_stored(name, shape) for name, shape in shapes.items())
    states = [{name: torch.randn(shape).half() for name, shape in stored.items()} for _ in range(30)]
    files = [(f"mnist-optunet/version_{i}.safetensors", save(state)) for i, state in enumerate(states)]
    return local_tar(files, mode="w:gz"), states


@pytest.fixture
def upstream(hub: Hub) -> Hub:
    """Commit two raw tars of a thousand members each, called .tgz, and a gzipped one."""
    forget()
    files: dict[str, Virtual | bytes] = {path_of(first): regular(first) for first in (0, COUNT)}
    hub.commit(REPO, {"README.md": b"# Checkpoints", "scripts/x/std_loading.py": b"pass\n"})
    hub.commit(REPO, {**files, "models/mnist-optunet/mnist-optunet-0-8191.tgz": optunet()[0]}, lfs=True)
    return hub


def forget() -> None:
    """Start as a new process does."""
    for known in (indexing._indexes, archive_source._archived_collections, fetching._remote_files):
        known.clear()


def bytes_of(number: int, shape: tuple[int, ...] = (100, 512), at: str = "linear.weight") -> torch.Tensor:
    """Read a tensor of a member where safetensors would find it, by the header alone."""
    begin, end = json.loads(HEAD[8:])[at]["data_offsets"]
    raw = member(number).read(len(HEAD) + begin, end - begin)
    return torch.frombuffer(bytearray(raw), dtype=torch.float16).view(shape)


@pytest.mark.slow
def test_three_members_of_nine_thousand(upstream: Hub) -> None:
    upstream.commit(REPO, {path_of(first): regular(first) for first in range(2 * COUNT, 9216, COUNT)}, lfs=True)
    members = zoo.load("resnet18-cifar100", n=3)
    assert members.ids == [0, 1, 2]
    assert members.classes[:2] == ("apple", "aquarium_fish")
    assert members.manifest["test_accuracy"].isna().all()
    assert members.manifest["seed"].isna().all()
    indexing_bytes = sum(row.bytes for row in upstream.log.select("_cdn"))
    assert len(upstream.log.select("_cdn.*")) <= 9 * 40
    assert indexing_bytes < 9 * regular(0).size / 1000
    upstream.log.clear()
    model = members[1].model()
    assert torch.equal(model.fc.weight, bytes_of(1).float())
    assert model(members.preprocess(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))).shape == (2, 100)
    stacked = members.stack()
    assert torch.equal(stacked["fc.weight"], torch.stack([bytes_of(n) for n in range(3)]))
    sent = sum(row.bytes for row in upstream.log)
    assert 3 * PAYLOAD < sent < 3 * PAYLOAD * 1.01  # each member once
    assert upstream.log.leaks(WRITER) == []
    assert members.citation.startswith(f"{ADDRESS}@")


@pytest.mark.slow
def test_one_regular_archive(upstream: Hub) -> None:
    upstream.commit(REPO, {path_of(COUNT): None})
    members = zoo.load("resnet18-cifar100", members="5,1023", source=ADDRESS)
    ranges = upstream.log.select("_cdn")
    assert len(ranges) <= 40
    assert sum(row.bytes for row in ranges) < regular(0).size / 1000
    assert torch.equal(members.stack()["fc.weight"], torch.stack([bytes_of(5), bytes_of(1023)]))


@pytest.mark.slow
def test_the_index_is_kept(upstream: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = zoo.load("resnet18-cifar100", members="2047").stack()["fc.weight"]
    assert torch.equal(wanted[0], bytes_of(2047))
    citation = zoo.load("resnet18-cifar100", members="2047").citation
    upstream.log.clear()
    forget()
    again = zoo.load(citation)
    assert torch.equal(again.stack()["fc.weight"], wanted)
    assert len(upstream.log) <= 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget()
    upstream.log.clear()
    assert torch.equal(zoo.load("resnet18-cifar100", members="2047").stack()["fc.weight"], wanted)
    with pytest.raises(NetworkError, match=r"1 of 1 members of resnet18-cifar100: .*no members 7 of"):
        zoo.load("resnet18-cifar100", members="7").stack()
    with pytest.raises(NetworkError, match=r"optunet-mnist\.parquet of .*since HF_HUB_OFFLINE is set"):
        zoo.load("optunet-mnist", n=1)
    assert len(upstream.log) == 0


@pytest.mark.slow
def test_members_whose_names_were_exchanged(upstream: Hub) -> None:
    order = sorted(range(COUNT), key=str)
    a, b = order.index(100), order.index(733)
    order[a], order[b] = order[b], order[a]  # no sampled header shows it
    upstream.commit(REPO, {path_of(0): virtual_tar(named(0, order))}, lfs=True)
    members = zoo.load("resnet18-cifar100", members="100,500", source=ADDRESS)
    before = members.citation
    assert torch.equal(members.stack()["fc.weight"], torch.stack([bytes_of(100), bytes_of(500)]))
    assert len(upstream.log.select("_cdn")) <= 2 * 40 + 2 * COUNT + 4
    assert zoo.load(members.citation).ids == [100, 500]
    assert members.citation != before  # it names the places where they are
    forget()
    for number in (100, 733):
        found = zoo.load("resnet18-cifar100", members=str(number), source=ADDRESS).stack()
        assert torch.equal(found["fc.weight"][0], bytes_of(number))


@pytest.mark.slow
def test_an_archive_that_is_not_regular(upstream: Hub) -> None:
    order = list(range(COUNT))
    random.Random(0).shuffle(order)
    files = named(0, order)
    foreign = (f"{files[0][0].partition('/')[0]}/notes.txt", b"best ones: 5, 7\n" * 100)
    other = (files[40][0], member(order[40], classes=10))
    files = [*files[:40], other, *files[41:300], foreign, *files[300:]]
    upstream.commit(REPO, {path_of(0): virtual_tar(files)}, lfs=True)
    members = zoo.load("resnet18-cifar100", source=ADDRESS, n=3)
    assert len(upstream.log.select("_cdn")) <= 40 + 2 * (COUNT + 1) + 4
    assert torch.equal(members.stack()["fc.weight"], torch.stack([bytes_of(n) for n in members.ids]))
    rows = zoo.load("resnet18-cifar100", source=ADDRESS, where=f"member = {order[40]} AND status != 'ok'").manifest
    assert rows["status"].tolist() == ["excluded"]
    assert rows["reason"].tolist() == ["a resnet18 with {'classes': 10}"]


def test_a_gzipped_archive_is_unpacked_once(upstream: Hub) -> None:
    raw, states = optunet()
    members = zoo.load("optunet-mnist")
    assert members.ids == list(range(30))
    stacked = members.stack()
    for name, tensor in stacked.items():
        stored, _ = KEY_MAPS["optunet"].translate_to_stored(name, tuple(tensor.shape[1:]))
        wanted = torch.stack([state[stored] for state in states])
        assert torch.equal(tensor, wanted.view_as(tensor))
    assert sum(row.bytes for row in upstream.log.select("_cdn.*mnist")) <= len(raw) + 2**16
    upstream.log.clear()
    forget()
    assert torch.equal(zoo.load("optunet-mnist", n=1).stack()["conv1.weight"], stacked["conv1.weight"][:1])
    assert upstream.log.select("_cdn") == []
    assert member_cache.delete_members(REPO) > 0
    assert torch.equal(zoo.load("optunet-mnist", n=1).stack()["conv1.weight"], stacked["conv1.weight"][:1])


def test_archives_in_a_folder(tmp_path: Path, upstream: Hub) -> None:
    raw, states = optunet()
    files = [(f"mnist-optunet-b/version_{i}.safetensors", save(state)) for i, state in enumerate(states[:3])]
    folder = tmp_path / "models" / "mnist-optunet"
    folder.mkdir(parents=True)
    (folder / "mnist-optunet-0-29.tgz").write_bytes(raw)
    (folder / "mnist-optunet-30-32.tgz").write_bytes(local_tar(files))
    upstream.log.clear()
    members = zoo.load("optunet-mnist", source=tmp_path)
    assert members.ids == list(range(33))
    assert torch.equal(members.member(31).state_dict()["conv1.weight"], states[1]["conv1.weight"])
    assert zoo.load(members[:2].citation).ids == [0, 1]
    assert zoo.verify(members[:1]) == []
    assert zoo.load("optunet-mnist", source=tmp_path, n=1)[0].model()(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    (folder / "mnist-optunet-0-29.tgz").write_bytes(raw[:-200])
    with pytest.raises(DamagedError, match=r"archive .*0-29\.tgz: expected a whole gzip file; found "):
        zoo.load("optunet-mnist", source=tmp_path)
    with pytest.raises(CollectionNotFound, match="resnet18-cifar100"):
        zoo.load("resnet18-cifar100", source=tmp_path)
    assert len(upstream.log) == 0


def test_a_manifest_comes_before_archives(upstream: Hub, tmp_path: Path) -> None:
    raw, _ = optunet()
    assert sorted(indexing_of(upstream)) == ["optunet-mnist", "resnet18-cifar100"]
    folder = tmp_path / "models" / "mnist-optunet"
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(gzip.decompress(raw))
    known = catalog.find_listing("optunet-mnist").archives
    assert known is not None
    facts = {"name": "optunet-mnist", "classes": known.classes, "preprocessing": known.preprocessing}
    description, rows = archives.source_of_archive(folder / "a.tar", tmp_path, facts)
    manifest.write_manifest(rows, tmp_path / "manifests" / "optunet-mnist.parquet")
    catalog.write_json(description.to_json(), tmp_path / "manifests" / "optunet-mnist.json")
    files = {p.relative_to(tmp_path).as_posix(): p for p in tmp_path.rglob("*.*") if p.is_file()}
    upstream.commit(REPO, files, lfs=True)
    members = zoo.load("optunet-mnist", n=2)
    assert members.manifest["path"].tolist() == ["models/mnist-optunet/a.tar"] * 2
    assert members.stack()["conv1.weight"].shape == (2, 2, 1, 4, 4)


def indexing_of(upstream: Hub) -> list[str]:
    return open_source(ADDRESS, "").collections()


@pytest.mark.slow
def test_bytes_in_another_source(upstream: Hub, tmp_path: Path) -> None:
    """A manifest of one's own for archives that lie elsewhere."""
    found = select_members("resnet18-cifar100", members="3,4", source=ADDRESS)
    values = found.description.to_json() | {"base": f"{ADDRESS}@{found.commit}"}
    catalog.write_json(values, tmp_path / "manifests" / "resnet18-cifar100.json")
    manifest.write_manifest(found.rows, tmp_path / "manifests" / "resnet18-cifar100.parquet")
    here = zoo.load("resnet18-cifar100", source=tmp_path)
    assert torch.equal(here.stack()["fc.weight"], torch.stack([bytes_of(3), bytes_of(4)]))
    upstream.commit("alice/index", {f"manifests/{p.name}": p for p in (tmp_path / "manifests").iterdir()})
    there = zoo.load("resnet18-cifar100", source="hf://datasets/alice/index", n=1)
    assert torch.equal(there.stack()["fc.weight"][0], bytes_of(3))
    catalog.write_json(values | {"base": "file:///etc"}, tmp_path / "manifests" / "resnet18-cifar100.json")
    with pytest.raises(zoo.ZooError, match="expected 'base' to be hf://datasets/ORG/NAME@COMMIT"):
        zoo.load("resnet18-cifar100", source=tmp_path)
