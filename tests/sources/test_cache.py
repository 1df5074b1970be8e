"""The member cache: whole files under their final names only, many readers at once, disks that refuse, and dropping."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, StorageError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.sources import cache, fetching, hub_cache, member_requests
from checkpoints_zoo.sources.finding import select_members
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.hub_cache import cache_root
from tests.hub import Hub
from tests.support.remote import ADDRESS, REPO, SHARDS, published
from tests.support.scenarios import Built, file_bytes, load

BYTES = "/_cdn/.*/shards/"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tiny(hub: Hub) -> Built:
    """Publish twenty small members in two shards."""
    return published(hub)


@pytest.fixture(autouse=True)
def nothing_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the folder that stands in for a read-only cache."""
    monkeypatch.setattr(hub_cache, "_fallback_folders", [])


def stacked(members: str) -> dict[str, torch.Tensor]:
    return zoo.load("tiny", members=members, source=ADDRESS).stack()


def sound(tiny: Built, members: str) -> bool:
    found, wanted = stacked(members), load(tiny, members=members).stack()
    return all(torch.equal(found[n], wanted[n]) for n in wanted)


def left() -> list[Path]:
    return sorted(cache_root().glob("*/members/*"))


# ---- what is kept ----
def test_a_member_is_a_safetensors_file_for_any_reader(hub: Hub, tiny: Built) -> None:
    stacked("3")
    (path,) = left()
    row = tiny.rows[3]
    etag = hub.files(REPO)[row["path"]].sha
    assert path.name.startswith(f"{etag}-{row['offset']}-{row['nbytes']}-")
    with safe_open(path, framework="pt") as file:
        found = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    found.pop("_pad", None)
    assert found.keys() == tiny.states[3, 40].keys()
    assert all(torch.equal(found[n], t) for n, t in tiny.states[3, 40].items())
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_what_is_there_how_much_and_dropped(hub: Hub, tiny: Built) -> None:
    assert (cache.cached_repos(), cache.delete_members()) == ([], 0)
    stacked("0-2")
    stacked("12")
    total = sum(p.stat().st_size for p in left())
    assert cache.cached_repos() == [cache.CachedRepoSummary(REPO, 4, total)]
    assert sum(line.bytes for line in cache.cached_repos()) == total
    assert cache.delete_members("alice/other") == 0
    assert cache.delete_members(REPO) == total
    assert (cache.cached_repos(), left()) == ([], [])
    assert sound(tiny, "0-2,12")


def test_a_file_of_another_size_is_fetched_again(hub: Hub, tiny: Built) -> None:
    stacked("1")
    (path,) = left()
    path.write_bytes(path.read_bytes()[:-1])
    assert sound(tiny, "1")
    assert left() == [path]


def test_what_a_killed_process_left_long_ago_is_swept_away(hub: Hub, tiny: Built) -> None:
    stacked("1")
    old, new = (left()[0].with_name(f".{word}.tmp") for word in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (0, time.time() - cache.STALE_SECONDS - 60))
    stacked("2")
    assert not old.exists()
    assert new.exists()  # somebody may be writing to it


def test_members_of_an_archive_keep_their_own_header(hub: Hub) -> None:
    weights = torch.arange(6, dtype=torch.float32)
    member = file_bytes({"conv.weight": ("F32", [2, 3], weights.numpy().tobytes())}, metadata=False)
    header_nbytes = len(member) - 24
    layout = Layout.of_stored([("w", "F32", (2, 3), "conv.weight", (2, 3))], (), header_nbytes)
    commit = hub.commit(REPO, {"a.tgz": bytes(512) + member + bytes(50_000)}, lfs=True)
    file, offset = (Repo(REPO, commit), "a.tgz"), 512 + header_nbytes
    wanted = member_requests.MemberRequest.of_range(file, (7, None), "", offset, layout, None)
    (found,) = fetching.fetch_members(ADDRESS, "old", [wanted])
    assert found.path.read_bytes() == member
    assert (found.member, found.prefix, found.offset) == (7, "", header_nbytes)

    other = Layout.of_stored([("w", "F32", (3, 2), "conv.weight", (3, 2))], (), header_nbytes)
    with pytest.raises(DamagedError, match=r"^header of member 7 in file a.tgz of hf://datasets/alice/zoo: expected"):
        fetching.fetch_members(
            ADDRESS, "old", [member_requests.MemberRequest.of_range(file, (7, None), "", offset, other, None)]
        )
    assert left() == [found.path]


# ---- many at once ----
def test_eight_threads_fetch_a_member_once(hub: Hub, tiny: Built) -> None:
    hub.latency = 0.01
    found = select_members("tiny", members="1,3,15", source=ADDRESS)

    def bring(_: int) -> list[bytes]:
        places = found.source.locate(found.description, found.rows)
        return [x.path.read_bytes() for x in places]

    hub.log.clear()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(bring, range(8)))
    assert all(r == results[0] for r in results)
    assert hub.log.requests(BYTES) == 2
    assert len(left()) == 3


BRING = f"""
import sys
from checkpoints_zoo.sources.finding import select_members
found = select_members("tiny", members="1,3,15", source="{ADDRESS}")
places = found.source.locate(found.description, found.rows)
print(sum(x.path.stat().st_size for x in places), "torch" in sys.modules)
"""


def process() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BRING], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_four_processes_fetch_a_member_once(hub: Hub, tiny: Built) -> None:
    processes = [process() for _ in range(4)]
    answers = {p.communicate(timeout=120)[0] for p in processes}
    assert [p.returncode for p in processes] == [0] * 4
    assert answers == {f"{sum(p.stat().st_size for p in left())} False\n"}
    assert hub.log.bytes(BYTES) <= 1.02 * 4 * tiny.rows[0]["nbytes"]  # 1 to 3 are one run, with the gap between
    assert len(left()) == 3
    assert sound(tiny, "1,3,15")


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_looks_whole(hub: Hub, tiny: Built) -> None:
    hub.faults.append({"path": BYTES, "stall": 60, "after": 5_000, "times": math.inf})
    running = process()
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size > 6_000 for p in left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.kill()
    running.communicate()
    assert left()
    assert all(p.name.startswith(".") and p.suffix == ".tmp" for p in left())
    assert cache.cached_repos() == []
    hub.faults.clear()
    assert sound(tiny, "1,3,15")


# ---- disks that refuse ----
def test_a_read_only_cache_is_replaced_for_this_process(
    hub: Hub, tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = tmp_path / "a file"
    block.touch()
    for name in ("HF_ASSETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", str(block / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(block / "cache"))  # else a warning says that it was changed too late
    with pytest.warns(UserWarning, match=r"^the cache .*a file/cache can't be written to \(") as said:
        assert sound(tiny, "1,12")
    assert len(said) == 1
    assert str(said[0].message).endswith(
        "fetched files are deleted when this process ends. Set HF_HOME to a folder that can be written to."
    )
    before = hub.log.requests(SHARDS)
    assert sound(tiny, "1,12")
    assert hub.log.requests(SHARDS) == before
    assert block.read_bytes() == b""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    stacked("0")
    before, write = left(), cache._write_all

    def refuse(file: FileIO, piece: bytes) -> None:
        if file.tell() > 0:
            raise OSError(number, os.strerror(number))
        write(file, piece)

    monkeypatch.setattr(cache, "_write_all", refuse)
    with pytest.raises(StorageError) as caught:
        stacked("0,1,12")
    place = cache_root() / "datasets--alice--zoo" / "members"
    assert str(caught.value) == (
        f"cache {place}: expected room for {tiny.rows[0]['nbytes']:,} bytes; found {os.strerror(number)}. Free some"
        " space, or set HF_HOME to a folder on a larger disk: members that have arrived are kept."
    )
    assert left() == before


def test_too_little_room_is_seen_before_anything_is_fetched(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1_000

    members = zoo.load("tiny", members="0,12", source=ADDRESS)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(StorageError) as caught:
        members.download()
    assert f"expected room for {members.nbytes:,} bytes; found 1,000 bytes free." in str(caught.value)
    assert hub.log.requests(BYTES) == 0
