"""`download --dest` out of archives: our layout, the hashes filled in, every member the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import checkpoints_zoo as zoo
from checkpoints_zoo.sources import archive_source, copying, fetching
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, tensor_shapes
from checkpoints_zoo.sources.finding import select_members
from tests.hub import Hub
from tests.support.archives import head, local_tar, member, virtual_tar
from tests.support.commands import run, values
from tests.support.scenarios import hash_of, opened

REPO = "torch-uncertainty/Checkpoints"
ADDRESS = f"hf://datasets/{REPO}"


@pytest.fixture(autouse=True)
def as_a_new_process() -> None:
    for known in (indexing._indexes, archive_source._archived_collections, fetching._remote_files):
        known.clear()


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_small_nets(mode: str, hub: Hub, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = tensor_shapes("optunet", classes=10, hidden=None)
    states = [{name: torch.randn(shape).half() for name, shape in shapes.items()} for _ in range(12)]
    stored = [
        {KEY_MAPS["optunet"].translate_to_stored(n, shapes[n])[0]: t for n, t in state.items()} for state in states
    ]
    files = [(f"mnist-optunet/version_{i}.safetensors", save(state)) for i, state in enumerate(stored)]
    hub.commit(REPO, {"models/mnist-optunet/mnist-optunet-0-8191.tgz": local_tar(files, mode=mode)}, lfs=True)
    there = zoo.load("optunet-mnist", members="3,7,9", source=ADDRESS)
    assert there.rows.column("sha256").null_count == 3
    here = there.download(tmp_path)
    assert here.ids == [3, 7, 9]
    (shard,) = (tmp_path / "shards" / "optunet-mnist").iterdir()
    tensors = opened(shard)
    for row, number in zip(here.rows.to_pylist(), here.ids, strict=True):
        found = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{number:06d}/")}
        found.pop("_pad", None)
        assert found.keys() == states[number].keys()
        assert all(torch.equal(found[n], t) for n, t in states[number].items())
        assert row["sha256"] == hash_of(states[number])
        assert (row["layout"], row["dtype"]) == (there.rows.column("layout")[0].as_py(), "F16")
    assert zoo.verify(here, sample=0) == []
    assert here.classes == there.classes
    assert here.description.citation == there.description.citation
    assert values(run("audit", tmp_path, "--format", "json"))["findings"] == []
    stamp = shard.stat()
    (tmp_path / "manifests" / "optunet-mnist.parquet").unlink()  # as if killed before it was written
    assert there.download(tmp_path).rows == here.rows
    assert (shard.stat().st_ino, shard.stat().st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)


@pytest.mark.slow
def test_an_archive_that_proves_irregular_on_the_way(hub: Hub, tmp_path: Path) -> None:
    order = sorted(range(1024), key=str)
    a, b = order.index(100), order.index(733)
    order[a], order[b] = order[b], order[a]  # no sampled header shows it
    files = [(f"x/version_{number}.safetensors", member(number)) for number in order]
    hub.commit(REPO, {"models/cifar100-resnet18/x-0-1023.tgz": virtual_tar(files)}, lfs=True)
    copied = copying.copy_members(select_members("resnet18-cifar100", members="5,100", source=ADDRESS), tmp_path)
    shards = {p.name.partition("-")[0]: opened(p) for p in (tmp_path / "shards" / "resnet18-cifar100").iterdir()}
    assert sorted(shards) == ["00000", "00001"]
    header = head()[0]
    begin, end = json.loads(header[8:])["linear.weight"]["data_offsets"]
    for shard, number in (("00000", 5), ("00001", 100)):
        raw = member(number).read(len(header) + begin, end - begin)
        wanted = torch.frombuffer(bytearray(raw), dtype=torch.float16).view(100, 512)
        assert torch.equal(shards[shard][f"{number:06d}/fc.weight"], wanted)
        assert shards[shard][f"{number:06d}/bn1.running_var"].dtype == torch.float32
    assert copied.rows.column("member").to_pylist() == [5, 100]
