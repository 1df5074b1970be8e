"""When the way to the Hub breaks: each fault, its text, what is left, and that the next run goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.cli import main
from checkpoints_zoo.errors import DamagedError, NetworkError, SourceNotFound, ZooError
from checkpoints_zoo.sources import fetching
from checkpoints_zoo.sources.hub_cache import cache_root
from tests.hub import READER, WRITER, Hub
from tests.hub.faults import HTML
from tests.support.lasting_faults import BYTES, FAULTS
from tests.support.remote import ADDRESS, REPO, published, retry_at_once
from tests.support.scenarios import Built, load

ALWAYS = {"times": math.inf}


@pytest.fixture
def tiny(hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> Built:
    """Publish twenty members, and let retries follow at once; `waits` has how long they would have waited."""
    retry_at_once(monkeypatch, waits)
    return published(hub)


def read(members: str = "1,12") -> dict[str, torch.Tensor]:
    return zoo.load("tiny", members=members, source=ADDRESS).stack()


def sound(tiny: Built, members: str = "1,12") -> bool:
    """Read, and compare with the folder."""
    found, wanted = read(members), load(tiny, members=members).stack()
    return all(torch.equal(found[n], wanted[n]) for n in wanted)


def left() -> list[str]:
    """Every file of the member cache that could be taken for a member."""
    return sorted(p.name for p in cache_root().glob("*/members/*"))


# ---- what heals by itself ----
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 408}, {"status": 429}, {"status": 500}, {"status": 503}, {"hangup": True}, {"cut": 5_000},
        {"reset": 5_000}, {"cut": 0}, {"wrong": 100}, {"expire": True}, {"redirect": True},
        {"status": 429, "headers": {"Retry-After": "7"}},
        {"status": 429, "headers": {"RateLimit": '"resolvers";r=0;t=55'}},
    ],
    ids=str,
)  # fmt: skip
def test_a_range_that_fails_once(hub: Hub, tiny: Built, fault: dict[str, Any], waits: list[float]) -> None:
    hub.faults.append({"path": BYTES, **fault})
    assert sound(tiny)
    assert hub.faults[0]["hits"] == 1
    assert len(left()) == 2
    assert hub.log.leaks(WRITER) == []
    told = {"Retry-After": 8.0, "RateLimit": 56.0}.get(next(iter(fault.get("headers", {})), ""))
    assert told is None or told in waits  # as told, and one more second


@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.parametrize("path", ["/api/datasets/", "resolve/.*parquet", "resolve/.*/shards/", "_cdn/.*json"])
def test_an_answer_that_fails_once(hub: Hub, tiny: Built, path: str, status: int) -> None:
    hub.faults.append({"path": path, "status": status})
    assert sound(tiny)
    assert hub.faults[0]["hits"] == 1


def test_a_cut_range_goes_on_where_it_broke_off(hub: Hub, tiny: Built) -> None:
    hub.faults.append({"path": BYTES, "cut": 5_000})
    assert sound(tiny, "1")
    first, second = (row.range for row in hub.log.select(BYTES))
    begin, end = (int(n) for n in str(first).removeprefix("bytes=").split("-"))
    assert second == f"bytes={begin + 5_000}-{end}"


def test_a_stalled_range_is_asked_for_again(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults.append({"path": BYTES, "stall": 2, "after": 5_000})
    assert sound(tiny)


def test_a_range_that_always_stalls(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.faults.append({"path": BYTES, "wait": 1, **ALWAYS})
    with pytest.raises(NetworkError, match=r"all of them; found no bytes for too long, 6 times\. Try again"):
        read("1")
    assert left() == []


def test_a_head_that_leads_to_another_host(hub: Hub, tiny: Built) -> None:
    hub.faults.append({"path": "resolve/.*/shards/", "redirect": True, **ALWAYS})
    with pytest.raises(NetworkError, match=r"expected an ETag and a size; found none\. Check HF_ENDPOINT, and proxies"):
        read("1")
    assert hub.log.leaks(WRITER) == []
    assert left() == []


# ---- what does not ----
@pytest.mark.slow
@pytest.mark.parametrize(("path", "fault", "kind", "text"), FAULTS, ids=[f"{p} {f}" for p, f, _, _ in FAULTS])
def test_a_fault_that_stays(
    hub: Hub, tiny: Built, path: str, fault: dict[str, Any], kind: type[ZooError], text: str
) -> None:
    read("0")
    before = left()
    fetching._remote_files.clear()  # as another process, which has no link yet
    hub.faults.append({"path": path, **fault, **ALWAYS})
    with pytest.raises(ZooError) as caught:
        read("1")
    host, file = hub.url.removeprefix("http://"), f"{tiny.rows[0]['path']} of {ADDRESS}"
    cdn = hub.cdn_url.removeprefix("http://")
    shown = str(caught.value)
    for text_there, word in ((file, "FILE"), (cdn, "CDN"), (host, "HOST"), (ADDRESS, "ADDRESS")):
        shown = shown.replace(text_there, word)
    assert type(caught.value) is kind
    assert shown == text if text.endswith(".") else shown.startswith(text)
    assert WRITER not in shown
    assert left() == before  # the member that was there before, and nothing half
    assert main.exit_code(caught.value) == {NetworkError: 5, DamagedError: 4}.get(kind, 3)
    hub.faults.clear()
    assert sound(tiny, "0,1")
    assert hub.log.leaks(WRITER) == []


def test_what_lies_there_is_named(hub: Hub, tiny: Built) -> None:
    inside = str(tiny.rows[0]["path"])
    pointer = hub.pointer(REPO, inside)
    for content, kind in ((HTML, "a web page"), (pointer, "a Git LFS pointer, not the file it points to")):
        hub.commit(REPO, {inside: content}, lfs=False)
        with pytest.raises(DamagedError) as caught:
            read("1")
        assert f"; found {len(content)} bytes: {kind}. Manifest and file" in str(caught.value)
        assert left() == []


def test_a_manifest_of_the_wrong_bytes_is_not_kept(hub: Hub, tiny: Built) -> None:
    hub.faults.append({"path": "_cdn/.*parquet", "wrong": 10})
    with pytest.raises(DamagedError) as caught:
        read()
    assert str(caught.value).startswith(f"file manifests/tiny.parquet of {ADDRESS}: expected the hash ")
    assert str(caught.value).endswith("…. The file was not stored; get it again.")
    assert sound(tiny)


def test_members_that_arrived_before_a_fault_are_kept(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints_zoo.sources.fetching.CONNECTION_COUNT", 1)
    hub.faults.append({"path": BYTES, "status": 500, "skip": 1, **ALWAYS})
    with pytest.raises(NetworkError):
        read("1,12")
    assert len(left()) == 1
    hub.faults.clear()
    hub.log.clear()
    assert sound(tiny)
    assert hub.log.bytes(BYTES) == tiny.rows[0]["nbytes"]


def test_a_private_repo_of_somebody_else(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["datasets", REPO].private = True
    monkeypatch.setenv("HF_TOKEN", READER)
    with pytest.raises(SourceNotFound, match="expected a data set repo; found none that this login may see"):
        read()
    assert hub.log.leaks(READER) == []


def test_without_a_network(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # else a warning says that it was changed too late
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError) as caught:
        read()
    assert str(caught.value).startswith(f"revision 'main' of {ADDRESS}: expected an answer from 127.0.0.1:9; found Con")
    assert main.exit_code(caught.value) == 5
