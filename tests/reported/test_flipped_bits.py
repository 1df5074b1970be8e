"""One flipped bit in each of many places of a source, by each checked way: found, or the right bytes come back.

ZOO_FLIPS=200 tries 200 places a way, which takes minutes; without it there are 20.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.sources import fetching, hash_records
from checkpoints_zoo.sources import hub as hub_client
from checkpoints_zoo.sources.hub_cache import cache_root
from tests.hub import Hub
from tests.support.archives import local_tar
from tests.support.remote import ADDRESS, REPO
from tests.support.scenarios import Built, build

PLACES = int(os.environ.get("ZOO_FLIPS", "20"))
ARCHIVES = "torch-uncertainty/Checkpoints"
State = dict[str, Tensor]


@contextmanager
def flipped(path: Path, at: int, bit: int) -> Iterator[None]:
    """Flip a bit of a file for the block."""
    content = path.read_bytes()
    changed = bytearray(content)
    changed[at] ^= 1 << bit
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(content)


def flip(path: Path, at: int, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def is_equal(state: State, other: State) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def weight_place(row: dict[str, object], size: int, rng: random.Random) -> int:
    """Draw a byte of a member's tensors."""
    return int(row["offset"]) + rng.randrange(size)  # type: ignore[call-overload]


def weight_bytes(built: Built) -> int:
    """Return the bytes of a member without its pad."""
    return int(built.rows[0]["nbytes"]) - int(built.description["layouts"]["only"]["pad"])


# ---- a folder ----
def places(built: Built, rng: random.Random) -> list[tuple[str, Path, int]]:
    """Draw the places: in weights, in the header of the shard, in the manifest, in the description."""
    header = int(built.rows[0]["offset"])
    sizes = {"header": (built.shard, header), "manifest": (built.manifest, built.manifest.stat().st_size),
             "description": (built.json, built.json.stat().st_size)}  # fmt: skip
    size = weight_bytes(built)
    drawn = [
        ("weights", built.shard, weight_place(rng.choice(built.rows), size, rng)) for _ in range(PLACES * 11 // 20)
    ]
    return drawn + [
        (kind, path, rng.randrange(n)) for kind, (path, n) in sizes.items() for _ in range(PLACES * 3 // 20)
    ]


def read_checked(built: Built, citation: str, folder: Path) -> State:
    return zoo.load(citation, check=True).stack()


def read_copy(built: Built, citation: str, folder: Path) -> State:
    return zoo.load(citation).download(folder).stack()


def read_verified(built: Built, citation: str, folder: Path) -> State:
    members = zoo.load(citation)
    if zoo.verify(members):
        raise ZooError("verify", expected="no problems", found="some")
    return members.stack()


@pytest.mark.slow
@pytest.mark.parametrize("read", [read_checked, read_copy, read_verified])
def test_a_folder(read: Callable[[Built, str, Path], State], tmp_path: Path) -> None:
    """By `check=True`, by a copy, by `verify`. A flip that no reader sees (in `_pad` of a header) changes nothing."""
    built = build(tmp_path / "source", net="mlp", members=range(3))
    citation = zoo.load(built.name, source=built.root).citation
    right = read(built, citation, tmp_path / "right")
    rng, unseen = random.Random(0), []
    for number, (kind, path, at) in enumerate(places(built, rng)):
        with flipped(path, at, rng.randrange(8)):
            try:
                result = read(built, citation, tmp_path / str(number))
            except ZooError:
                continue
            if kind != "header" or not is_equal(result, right):
                unseen.append((kind, at))
    assert unseen == []


# ---- the Hub ----
def commit(hub: Hub, built: Built) -> None:
    files = {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()}
    hub.commit(REPO, files, lfs=True)


def start_anew() -> None:
    """Forget what a new process does not know."""
    fetching._remote_files.clear()
    hash_records._known_records.clear()


@pytest.mark.slow
@pytest.mark.parametrize("per_shard", [1, 10])
def test_bytes_that_arrive(hub: Hub, tmp_path: Path, per_shard: int) -> None:
    """Each member has a flipped bit on the Hub, and is read alone: as a whole file, and by ranges."""
    start_anew()
    net = "convnet" if per_shard == 1 else "mlp"
    built = build(tmp_path, net=net, members=range(PLACES), per_shard=per_shard)
    rng = random.Random(1)
    for row in built.rows:
        flip(built.root / str(row["path"]), weight_place(row, weight_bytes(built), rng), rng)
    commit(hub, built)
    members = zoo.load("tiny", source=ADDRESS)
    for position in range(PLACES):
        with pytest.raises(ZooError, match=f"^member {position} in file .*: expected sha256"):
            members[position : position + 1].stack()


@pytest.mark.slow
@pytest.mark.parametrize("per_shard", [1, 10])
def test_bytes_in_the_caches(hub: Hub, tmp_path: Path, per_shard: int) -> None:
    """Flips in the members of the client's cache, or ours; then in its manifest and description."""
    start_anew()
    net = "convnet" if per_shard == 1 else "mlp"
    built = build(tmp_path / "source", net=net, members=range(PLACES), per_shard=per_shard)
    commit(hub, built)
    rng = random.Random(2)
    members = zoo.load("tiny", source=ADDRESS)
    halves = [members[i : i + 3] for i in range(0, PLACES, 10)] if per_shard > 1 else [members]
    right = [part.stack() for part in halves]
    files = sorted({x.path for part in halves for x in part._locations()})
    assert len(files) == (PLACES * 3 // 10 if per_shard > 1 else PLACES)
    assert all(path.is_relative_to(cache_root()) == (per_shard > 1) for path in files)
    for turn in range(4 if per_shard > 1 else 1):
        for path in files if turn < 3 else files[:20]:
            size = path.stat().st_size
            flip(path.resolve(), rng.randrange(4096 if turn == 1 else size), rng)
        start_anew()
        assert all(is_equal(part.stack(), state) for part, state in zip(halves, right, strict=True))
    for suffix in ("parquet", "json"):
        for _ in range(PLACES // 10):
            path = members.source.local_path(f"manifests/tiny.{suffix}")
            content = path.read_bytes()
            flip(path.resolve(), rng.randrange(len(content)), rng)
            start_anew()
            assert zoo.load("tiny", source=ADDRESS).citation == members.citation
            assert members.source.local_path(f"manifests/tiny.{suffix}").read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_members_of_an_archive(hub: Hub, whole: bool) -> None:
    """Their rows have no hashes: the record of what arrived is what a cached member is compared with."""
    from tests.sources.test_archived_collections import forget, optunet

    forget()
    files = [(f"mnist-optunet/version_{i}.safetensors", save(state)) for i, state in enumerate(optunet()[1])]
    inside = "models/mnist-optunet/mnist-optunet-0-29.tgz"
    hub.commit(ARCHIVES, {inside: local_tar(files)}, lfs=True)
    members = zoo.load("optunet-mnist", members="0-29" if whole else "0-9")
    assert members.source.repo is not None
    if whole:
        hub_client.fetch_file(members.source.repo, inside)
    right = {name: tensor.clone() for name, tensor in members.stack().items()}  # the files below it are changed
    paths = sorted({x.path for x in members._locations()})
    assert len(paths) == (1 if whole else 10)
    rng = random.Random(3)
    for _ in range(PLACES // len(paths)):
        for path in paths:
            if whole:
                hub_client.fetch_file(members.source.repo, inside)
            flip(path.resolve(), rng.randrange(path.stat().st_size), rng)
        start_anew()
        assert is_equal(members.stack(), right)
        assert path.exists() != whole


@pytest.mark.slow
@pytest.mark.parametrize("on_hub", [True, False])
@pytest.mark.parametrize("damaged", ["unpacked", "gzipped"])
def test_a_gzipped_archive(hub: Hub, tmp_path: Path, damaged: str, on_hub: bool) -> None:
    """A tar that was unpacked into the cache is unpacked anew. A gzipped file in the client's cache is fetched anew; in
    one of a folder, gzip's checksum finds the flip."""
    from tests.sources.test_archived_collections import forget, optunet

    path = tmp_path / "models" / "mnist-optunet" / "mnist-optunet-0-29.tgz"
    path.parent.mkdir(parents=True)
    path.write_bytes(optunet()[0])
    if on_hub:
        hub.commit(ARCHIVES, {path.relative_to(tmp_path).as_posix(): path}, lfs=True)

    def read() -> zoo.Collection:
        forget()
        start_anew()
        return zoo.load("optunet-mnist", source=None if on_hub else tmp_path)

    members = read()
    right = {name: tensor.clone() for name, tensor in members.stack().items()}  # the files below it are changed
    (unpacked,) = {x.path for x in members._locations()}
    assert unpacked.is_relative_to(cache_root())
    if on_hub:
        assert members.source.repo is not None
        path = hub_client.fetch_file(members.source.repo, path.relative_to(tmp_path).as_posix()).resolve()
    rng, content = random.Random(4), path.read_bytes()
    for _ in range(PLACES):
        flipped_file = unpacked if damaged == "unpacked" else path
        flip(flipped_file, rng.randrange(flipped_file.stat().st_size), rng)
        with suppress(*([ZooError] if damaged == "gzipped" and not on_hub else [])):
            assert is_equal(read().stack(), right)
        if damaged == "gzipped":
            assert (path.read_bytes() == content) == on_hub
            path.write_bytes(content)
        else:
            assert hashlib.sha256(unpacked.read_bytes()).digest() == hashlib.sha256(gzip.decompress(content)).digest()
