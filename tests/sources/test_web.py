"""Files on the web: ranges, pins, hosts without ranges, redirects, and folders of them as sources."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import AccessError, CollectionNotFound, DamagedError, NetworkError, SourceNotFound
from checkpoints_zoo.sources import hosts
from checkpoints_zoo.sources import web as web_room
from checkpoints_zoo.sources.folder_source import EMBEDDED_ROOT
from checkpoints_zoo.sources.web import WebFile, WebFolder, https_address
from tests.support.web_host import WebHost

CONTENT = bytes(range(256)) * 40


def file_of(web: WebHost, path: str = "/a/x.bin") -> WebFile:
    web.files.setdefault(path, CONTENT)
    return WebFolder.of(f"{web.url}/a/").file(path.removeprefix("/a/"))


def test_a_range_is_read_and_the_rest_is_not(web: WebHost) -> None:
    file = file_of(web)
    assert (file.size, file.etag, file.has_ranges) == (10_240, web.etag("/a/x.bin").strip('"'), True)
    assert file.bytes_at(100, 50) == CONTENT[100:150]
    assert file.bytes_at(10_230, 50) == CONTENT[10_230:]
    assert [requested for _, requested, _ in web.log] == ["bytes=0-0", "bytes=100-149", "bytes=10230-10239"]
    web.files["/a/%C3%BC%20b%23c.bin"] = CONTENT
    assert WebFolder.of(f"{web.url}/a").file("ü b#c.bin").size == 10_240


def test_a_connection_that_breaks_is_continued(web: WebHost) -> None:
    file = file_of(web)
    web.cut["/a/x.bin"] = 1000
    assert file.read_whole() == CONTENT
    assert [requested for _, requested, _ in web.log[1:]] == ["bytes=0-10239", "bytes=1000-10239"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_host_that_is_busy(web: WebHost, status: int) -> None:
    file = file_of(web)
    web.statuses["/a/x.bin"] = status
    with pytest.raises(NetworkError, match=rf"bytes 0 to 10,240 of file x.bin of .*/a: .* found {status} .*, 6 times"):
        file.read_whole()
    with pytest.raises(NetworkError, match=rf"file x.bin of .*/a: expected an answer; found {status} "):
        file_of(web)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("etags", ["strong", "weak", "none"])
def test_a_file_that_changes_is_refused(web: WebHost, etags: str, has_ranges: bool) -> None:
    web.etags, web.has_ranges = etags, has_ranges
    file = file_of(web)
    web.files["/a/x.bin"] = CONTENT + b"more" if etags == "none" else CONTENT[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DamagedError, match=r"x\.bin") as error:
            file.bytes_at(100, 50)
    if file.has_ranges:
        assert f"expected ETag {file.etag}, 10,240 bytes, as when it was first read" in str(error.value)
        assert "load the collection again" in str(error.value)


@pytest.mark.parametrize(("etags", "has_ranges"), [("strong", False), ("weak", True), ("none", True), ("none", False)])
def test_hosts_without_ranges_of_a_pinned_file(web: WebHost, etags: str, has_ranges: bool) -> None:
    web.etags, web.has_ranges = etags, has_ranges
    file = file_of(web)
    assert not file.has_ranges
    with pytest.warns(UserWarning, match=r"127.0.0.1:\d+ serves no byte ranges of a pinned file: files there are read "
                      r"whole, such as file x.bin of http://127.0.0.1:\d+/a of 10.24 kB"):  # fmt: skip
        assert file.bytes_at(100, 50) == CONTENT[100:150]
    assert file.bytes_at(0, 5) == CONTENT[:5]  # No second request.
    assert len(web.log) == 2


def test_a_large_file_is_not_read_whole(web: WebHost, monkeypatch: pytest.MonkeyPatch) -> None:
    web.has_ranges = False
    monkeypatch.setattr(web_room, "LARGEST_WHOLE_NBYTES", 10_000)
    with pytest.raises(NetworkError, match=r"expected byte ranges and a strong ETag from .*, for a file of 10.24 kB"):
        file_of(web).bytes_at(0, 1)


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (404, SourceNotFound, "found 404 Not Found. Check the address; a file that was there may have been removed."),
        (403, AccessError, "expected a file that anyone may read; found 403 Forbidden from .* No login is sent"),
        (500, NetworkError, "found 500 Internal Server Error from"),
        (501, NetworkError, "found 501 Not Implemented"),
    ],
)
def test_statuses(web: WebHost, status: int, kind: type[Exception], text: str) -> None:
    web.statuses["/a/x.bin"] = status
    with pytest.raises(kind, match=text):
        file_of(web)


def test_offline_nothing_is_asked(web: WebHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match="expected it in the cache, since HF_HUB_OFFLINE is set"):
        file_of(web)
    assert not web.log


def test_a_host_that_was_never_reached_is_told_at_once(web: WebHost) -> None:
    with pytest.raises(NetworkError, match=r"file x of .*: expected a connection to 127.0.0.1:1; found "):
        WebFolder.of("http://127.0.0.1:1/a").file("x")


def test_public_hosts_need_https() -> None:
    with pytest.raises(
        SourceNotFound, match=r"source http://8.8.8.8/a: expected https://HOST/PATH or gs://.*http://, "
    ):
        https_address("http://8.8.8.8/a")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("https://", "no host"), ("gs://", "no bucket"), ("gs:///a", "no bucket"), ("https://a:b@host/x", "a login"),
        ("https://host/x?y=1", "[?] and more"), ("https://host/x#y", "# and more"), ("https://host:port/", "no host"),
    ],
)  # fmt: skip
def test_addresses_that_are_refused(address: str, found: str) -> None:
    with pytest.raises(SourceNotFound, match=f"found {found}"):
        https_address(address)


def test_buckets_have_an_https_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert https_address("gs://b/o p/ü/") == "https://storage.googleapis.com/b/o%20p/%C3%BC"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1234/")
    assert https_address("gs://b/o") == "http://127.0.0.1:1234/b/o"


# ---- redirects, on hosts that only this test's client knows ----
Answers = Callable[[dict[str, Any]], list[Any]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, web: WebHost) -> Answers:
    """Let a table of address -> redirect or content answer all requests; return the requests as they come."""
    from huggingface_hub.utils import httpx

    def answer_by(table: dict[str, Any]) -> list[Any]:
        asked: list[Any] = []

        def handle(request: Any) -> Any:
            asked.append(request)
            answer = table[str(request.url)]
            if isinstance(answer, str):
                return httpx.Response(307, headers={"location": answer})
            headers = {"etag": '"e"', "content-range": f"bytes 0-0/{len(answer)}"}
            return httpx.Response(206, headers=headers, content=answer[:1])

        client = httpx.Client(transport=httpx.MockTransport(handle), follow_redirects=False)
        web_room._client.cache_clear()
        monkeypatch.setattr(httpx, "Client", lambda **options: client)
        return asked

    hosts.is_private.cache_clear()
    monkeypatch.setattr(hosts.socket, "getaddrinfo", lambda host, *rest, **more: [
        (2, 1, 6, "", ("10.0.0.1" if "inner" in host else "8.8.8.8", 0))])  # fmt: skip
    return answer_by


def test_redirects_are_followed_without_a_login(answers: Answers) -> None:
    asked = answers({"https://one.org/x": "https://two.org/y", "https://two.org/y": "/z", "https://two.org/z": b"abc"})
    assert WebFolder.of("https://one.org").file("x").size == 3
    assert [str(request.url) for request in asked] == ["https://one.org/x", "https://two.org/y", "https://two.org/z"]
    assert not any("authorization" in request.headers for request in asked)


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ("http://two.org/x", "expected redirects that stay on https; found one to http://two.org"),
        (
            "https://127.0.0.1/x",
            "expected a link of one.org to a public address; found '127.0.0.1', an address of this",
        ),
        ("https://169.254.169.254/latest", "found '169.254.169.254', an address of this machine or its network"),
        ("https://inner.one.org/x", "found 'inner.one.org', an address of this machine or its network"),
        ("file:///etc/passwd", "expected a link to http:// or https://"),
        ("https://user:word@two.org/x", "without a login"),
        ("https://one.org/x", "expected at most 5 redirects; found more"),
    ],
)
def test_redirects_that_are_refused(answers: Answers, link: str, text: str) -> None:
    asked = answers({"https://one.org/x": link})
    with pytest.raises(AccessError, match=text):
        WebFolder.of("https://one.org").file("x")
    assert {str(request.url) for request in asked} == {"https://one.org/x"}


# ---- folders as sources ----
@pytest.fixture
def folder(web: WebHost) -> str:
    web.add_folder(EMBEDDED_ROOT, "/zoo/")
    return f"{web.url}/zoo"


def test_members_of_a_folder_on_the_web(web: WebHost, folder: str) -> None:
    here, there = (zoo.load("convnet-digits", n=5, source=source) for source in (None, folder))
    for name, stacked in here.stack().items():
        assert torch.equal(there.stack()[name], stacked)
    ranges = [requested for path, requested, _ in web.log if "/shards/" in path]
    nbytes = sum(int(b) - int(a) + 1 for a, b in (r.removeprefix("bytes=").split("-") for r in ranges))
    assert nbytes == 5 * 14_632 + 1
    count = len(web.log)
    zoo.load(there.citation).stack()
    assert there.citation.startswith(f"{folder}@")
    assert [p for p in web.paths()[count:] if "/shards/" in p] == []  # Members are in the cache.
    assert there.source.count_local(there.description, there.rows) == 5


def test_offline_members_are_there(web: WebHost, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    zoo.load("convnet-digits", n=3, source=folder).stack()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(web.log)
    zoo.load("convnet-digits", n=3, source=folder).stack()
    with pytest.raises(NetworkError, match="1 of 4 members of convnet-digits: expected members in the cache"):
        zoo.load("convnet-digits", n=4, source=folder).stack()
    assert len(web.log) == count


def test_a_shard_that_changed(web: WebHost, folder: str) -> None:
    members = zoo.load("convnet-digits", n=5, source=folder)
    members[:2].stack()
    (shard,) = {path for path in web.files if "/shards/convnet-digits/" in path}
    content = bytearray(web.files[shard])
    content[-100:] = bytes(100)
    web.files[shard] = bytes(content)
    with pytest.raises(
        DamagedError, match=r"file shards/convnet-digits/.* of http.*: expected ETag .*load the collection"
    ):
        members.stack()
    members.stack()  # Bytes of the changed file are taken where they have the manifest's hashes.
    with pytest.raises(DamagedError, match=r"member 63 in file shards/convnet-digits.*expected sha256"):
        zoo.load("convnet-digits", members=[63], source=folder).stack()


def test_the_cache_of_a_folder_is_deleted_whole(web: WebHost, folder: str, tmp_path: Path) -> None:
    from tests.support.commands import run, values

    zoo.load("convnet-digits", n=2, source=folder).stack()
    ((name, count),) = [(row["repo"], row["members"]) for row in values(run("cache", "--format", "json"))]
    assert (name.startswith("web+127.0.0.1_"), count) == (True, 2)
    assert run("cache", "--drop", name).exit_code == 0
    left = [path for path in (tmp_path / "hf-home").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []


def test_a_changed_manifest_is_another_commit(web: WebHost, folder: str) -> None:
    citation = zoo.load("convnet-digits", n=5, source=folder).citation
    path = "/zoo/manifests/convnet-digits.json"
    web.files[path] = web.files[path].replace(b'"title": "', b'"title": "New ')
    with pytest.raises(zoo.ZooError, match="convnet-digits"):
        zoo.load(citation)


def test_names_and_lists(web: WebHost, folder: str) -> None:
    with pytest.raises(
        CollectionNotFound, match=r"'nothing' of http.*/zoo: expected manifests/nothing.parquet and .json"
    ):
        zoo.load("nothing", source=folder)
    with pytest.raises(SourceNotFound, match="a folder on the web, which can't be listed"):
        zoo.load("convnet-digits", source=folder).source.collections()


def test_a_copy_is_a_source(web: WebHost, folder: str, tmp_path: Path) -> None:
    from tests.support.commands import run

    result = run("download", "convnet-digits", "-n", "3", "--source", folder, "--dest", str(tmp_path / "copy"))
    assert result.exit_code == 0, result.output
    copied = zoo.load("convnet-digits", source=tmp_path / "copy")
    assert copied.manifest["sha256"].tolist() == zoo.load("convnet-digits", n=3).manifest["sha256"].tolist()


def test_hosts_without_ranges_serve_members_too(web: WebHost, folder: str) -> None:
    web.has_ranges = False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stacked = zoo.load("convnet-digits", n=2, source=folder).stack()
    assert any("serves no byte ranges" in str(warning.message) for warning in warned)
    assert torch.equal(stacked["fc2.bias"], zoo.load("convnet-digits", n=2).stack()["fc2.bias"])
