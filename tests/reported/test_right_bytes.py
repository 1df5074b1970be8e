"""One wrong bit in a member, cases 4 and 5: the same error on every way from a Hub; a cached member is fetched anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.sources import cache, fetching
from tests.hub import Hub
from tests.support.remote import ADDRESS, REPO, published
from tests.support.scenarios import Built, load


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
        if not path.is_relative_to(cache.cache_root()):
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
