"""A publication cut off at each of its requests: no reader sees a row without bytes, and run again it goes on."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import AccessError, NetworkError, ZooError
from checkpoints_zoo.publishing import publisher
from checkpoints_zoo.publishing.publisher import Published
from tests.hub import WRITER, Hub
from tests.hub.faults import HTML
from tests.support.publications import ADDRESS, NEW, complete, consistent, quick, two_shards
from tests.support.scenarios import Built

ALWAYS = {"times": math.inf}


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    monkeypatch.setattr(publisher, "LARGEST_COMMIT_FILE_COUNT", 1)
    return two_shards(tmp_path / "out")


def publish(built: Built, repo: str = NEW, **options: Any) -> Published:
    done = zoo.publish(built.root, repo, **{"sample": 0, "tag": "v1.0", **options})
    assert isinstance(done, Published)
    return done


# What each second request meets, and each: the first, the step, the fault.
FAULTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "500 once": (0, 2, {"status": 500}),
    "answer lost once": (1, 2, {"cut": 0}),
    "hangup": (0, 1, {"hangup": True, **ALWAYS}),
}


def cut_off(hub: Hub, built: Built, at: int, fault: dict[str, Any], **options: Any) -> tuple[bool, Published | None]:
    """Publish while the requests from one on meet a fault; say whether any did, and return what was done, if it was."""
    hub.faults = [{"skip": at, **fault}]
    done, problem = None, None
    try:
        done = publish(built, **options)
    except ZooError as error:
        problem = error
    assert isinstance(problem, NetworkError | AccessError | None), problem
    assert WRITER not in str(problem)
    hit = hub.faults[0]["hits"] > 0
    hub.faults.clear()
    return hit, done


@pytest.mark.slow
@pytest.mark.parametrize(("first", "step", "fault"), FAULTS.values(), ids=FAULTS)
def test_cut_off_at_each_request(hub: Hub, tiny: Built, first: int, step: int, fault: dict[str, Any]) -> None:
    for at in range(first, 100, step):
        hub.wipe()
        hit, done = cut_off(hub, tiny, at, fault)
        if ("datasets", NEW) in hub.repos:
            assert consistent(hub), at
        again = publish(tiny)
        assert complete(hub, tiny), at
        assert consistent(hub) == 4, at
        assert hub.repo(NEW).refs["refs/tags/v1.0"] == hub.repo(NEW).at("main").id == again.commit
        assert again.commits == 0 or done is None
        assert hub.log.leaks(WRITER) == []
        if not hit:
            break
    assert 25 < at < 100  # each request had its turn


@pytest.mark.slow
def test_cut_off_at_each_request_of_a_pull_request(hub: Hub, tiny: Built) -> None:
    for at in range(100):
        hub.wipe()
        start = hub.commit(NEW, {"notes.txt": b"mine"})
        hit, _ = cut_off(hub, tiny, at, {"hangup": True, **ALWAYS}, create_pr=True, tag=None)
        again = publish(tiny, create_pr=True, tag=None)
        assert hub.repo(NEW).pulls == ["Publish tiny"], at  # never a second one
        assert hub.repo(NEW).refs["refs/pr/1"] == again.commit
        assert hub.repo(NEW).refs["refs/heads/main"] == start
        assert consistent(hub) == 5
        if not hit:
            break
    assert 25 < at < 100


@pytest.mark.slow
def test_cut_off_at_each_request_with_xet(
    hub_xet: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    quick(monkeypatch, waits)
    built = two_shards(tmp_path / "out")
    own = "^(?!.*/xet-write-token)"  # for that one hf_xet itself asks again, for minutes
    for at in range(100):
        hub_xet.repos.clear()
        hit, _ = cut_off(hub_xet, built, at, {"path": own, "hangup": True, **ALWAYS})
        publish(built)
        assert complete(hub_xet, built), at
        assert consistent(hub_xet) == 3
        if not hit:
            break
    assert 10 < at < 100
    assert hub_xet.log.leaks(WRITER) == []


AGAIN = "Try again: what has arrived is kept."
LOGIN = "Log in with `hf auth login` or set HF_TOKEN."
COMMIT = "commit 'Publish tiny: weights' to ADDRESS:"
TEXTS: list[tuple[dict[str, Any], type[ZooError], str]] = [
    (
        {"path": "/_lfs/", "status": 403}, AccessError,
        f"upload to ADDRESS: expected permission to write; found 403 Forbidden. {LOGIN}",
    ),
    (
        {"path": "/_lfs/", "status": 503}, NetworkError,
        f"upload to ADDRESS: expected an answer from HOST; found 503 Service Unavailable. {AGAIN}",
    ),
    (
        {"path": "/_lfs/", "hangup": True}, NetworkError,
        "upload to ADDRESS: expected an answer from HOST; found a cut connection…",
    ),
    (
        {"path": "/commit/", "status": 429, "headers": {"Retry-After": "7"}}, NetworkError,
        f"{COMMIT} expected an answer; found 429 Too Many Requests: the Hub's rate limit. Try again in 7 s: what has "
        "arrived is kept. Logged in, the limit is higher.",
    ),
    (
        {"path": "/commit/", "status": 403}, AccessError,
        f"{COMMIT} expected permission to write; found 403 Forbidden. {LOGIN}",
    ),
    (
        {"path": "/commit/", "status": 400}, NetworkError,
        f"{COMMIT} expected an answer from HOST; found 400 Bad Request. {AGAIN}",
    ),
    (
        {"path": "/repos/create", "status": 402}, NetworkError,
        f"making ADDRESS: expected an answer from HOST; found 402 Payment Required. {AGAIN}",
    ),
    (
        {"path": "/repos/create", "status": 403}, AccessError,
        f"making ADDRESS: expected permission to write; found 403 Forbidden. {LOGIN}",
    ),
    (
        {"path": "/revision/main", "status": 401}, AccessError,
        "revision 'main' of ADDRESS: expected a login that the Hub takes; found 401 Unauthorized: the token was "
        "refused. Replace it (HF_TOKEN, or `hf auth login`), or unset it: public repos need none.",
    ),
    (
        {"path": "/revision/main", "body": HTML}, NetworkError,
        "revision 'main' of ADDRESS: expected JSON from HOST; found another page…",
    ),
    (
        {"path": "/revision/main", "body": b"{}"}, NetworkError,
        "revision 'main' of ADDRESS: expected an answer of HOST with the fields that Hubs send; found another one…",
    ),
    ({"path": "/preupload/", "body": HTML}, NetworkError, "upload to ADDRESS: expected JSON from HOST; found another…"),
    ({"path": "/objects/batch", "body": b"{}"}, NetworkError, "upload to ADDRESS: expected an answer from HOST; …"),
    (
        {"path": "/tag/", "status": 500}, NetworkError,
        f"tag v1.0 of ADDRESS: expected an answer from HOST; found 500 Internal Server Error. {AGAIN}",
    ),
]  # fmt: skip


CUT = ("RemoteProtocolError: Server disconnected without", r"ReadError: \[Errno 104\] Connection reset by peer")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind", "text"), TEXTS, ids=str)
def test_what_the_user_reads(hub: Hub, tiny: Built, fault: dict[str, Any], kind: type[ZooError], text: str) -> None:
    hub.faults.append({**fault, **ALWAYS})
    with pytest.raises(ZooError) as caught:
        publish(tiny)
    host = hub.url.removeprefix("http://")
    found = str(caught.value).replace(ADDRESS, "ADDRESS").replace(host, "HOST")
    # Whether its end or its reset is read first is chance.
    found = re.sub(f"found ({'|'.join(CUT)})", "found a cut connection", found)
    assert found == text or (text.endswith("…") and found.startswith(text[:-1])), found
    assert type(caught.value) is kind
    hub.faults.clear()
    publish(tiny)
    assert complete(hub, tiny)


def test_a_rate_limit_is_waited_out(hub: Hub, tiny: Built, waits: list[float]) -> None:
    hub.faults.append({"path": "/_lfs/", "method": "PUT", "status": 429, "headers": {"Retry-After": "7"}})
    hub.faults.append({"path": "/commit/", "status": 429})
    assert publish(tiny).commits == 3
    assert 8.0 in waits  # as told, and one more second
    assert [f["hits"] for f in hub.faults] == [1, 1]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_no_token_goes_to_another_host(hub: Hub, tiny: Built, method: str) -> None:
    hub.part_size = 5_000
    hub.faults.append({"path": "/api/|/_lfs/", "method": method, "redirect": True, "status": 307, **ALWAYS})
    with contextlib.suppress(ZooError):  # it may be led there, as long as it goes without the token
        publish(tiny)
    assert hub.faults[0]["hits"] > 0
    hub.faults.clear()
    publish(tiny)
    assert complete(hub, tiny)
    assert hub.log.leaks(WRITER) == []
