"""The loopback Hub is a Hub to the real client, counts right, and breaks as told."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hub import READER, WRITER, Server, filled, joined, noise
from tests.hub.faults import Faults

# The client's own: it uploads with an argument that its HTTP library no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO, DATASET = "alice/zoo", {"repo_id": "alice/zoo", "repo_type": "dataset"}
ROOT = Path(__file__).resolve().parents[2]
GB23 = 23 * 10**9
SHARD = noise(1, 300_000).read(0, 300_000)
HEAD_ONLY = {"path": "resolve", "method": "HEAD"}


@pytest.fixture
def api(hub):
    from huggingface_hub import HfApi

    return HfApi()


def fetch(path="shards/0.safetensors", **options):
    """Download a file as users do, and return its bytes."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(REPO, path, repo_type="dataset", **options)).read_bytes()


def location(path="shards/0.safetensors", **options):
    """Return what the client learns of a file by one HEAD."""
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url

    return get_hf_file_metadata(hf_hub_url(REPO, path, repo_type="dataset"), token=get_token(), **options)


def get(url, **headers):
    """Send a GET of the client's session, follow nothing, and return the response."""
    from huggingface_hub import get_session

    return get_session().get(url, headers=headers, follow_redirects=False)


# ---- who and which repo ----
def test_a_token_has_an_owner(hub, api, monkeypatch):
    from huggingface_hub.errors import HfHubHTTPError

    assert (api.whoami()["name"], api.whoami(token=READER)["name"]) == ("alice", "bob")
    assert [group["name"] for group in api.whoami()["orgs"]] == ["zoo"]
    with pytest.raises(HfHubHTTPError) as caught:
        api.whoami(token="hf_nobody")
    assert caught.value.response.status_code == 401
    assert [row.status for row in hub.log] == [200, 200, 200, 401]


def test_repos_are_made_found_hidden_and_deleted(hub, api):
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    assert api.create_repo(**DATASET).repo_id == REPO
    assert api.create_repo(**DATASET, exist_ok=True).repo_id == REPO
    assert api.create_repo("zoo/models", private=True).repo_type == "model"
    for repo_id, status in ((REPO, 409), ("carol/zoo", 403)):
        with pytest.raises(HfHubHTTPError) as caught:
            api.create_repo(repo_id, repo_type="dataset")
        assert caught.value.response.status_code == status
    assert api.repo_exists("zoo/models")
    assert not api.repo_exists("zoo/models", token=READER)
    assert [found.id for found in api.list_datasets(author="alice")] == [REPO]
    api.delete_repo(**DATASET)
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info(REPO)


# ---- upload ----
def test_files_arrive_as_they_were_sent(hub, api):
    hub.create_repo(REPO)
    hub.part_size = 100_000
    for path, content in {
        "note.txt": b"text",
        "one.bin": SHARD[:50_000],
        "parts.bin": SHARD[:250_001],
    }.items():
        api.upload_file(path_or_fileobj=content, path_in_repo=path, **DATASET)
        assert hub.read(REPO, path) == content
    assert [file.lfs for file in hub.files(REPO).values()] == [False, True, True]
    assert hub.log.requests("_lfs/.*/[123]$", method="PUT") == 3
    assert hub.log.received("_lfs/", method="PUT") == 300_001
    assert hub.log.leaks(WRITER) == []


def test_a_folder_sent_again_makes_no_commit(hub, api, tmp_path):
    hub.create_repo(REPO)
    folder = tmp_path / "out"
    for i in range(3):
        (folder / "shards").mkdir(parents=True, exist_ok=True)
        (folder / f"shards/{i}.safetensors").write_bytes(SHARD[i:])
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nhello")
    first = api.upload_folder(folder_path=folder, **DATASET).oid
    assert {path: hub.read(REPO, path) for path in hub.files(REPO)} == {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")
    }
    hub.reset()
    assert api.upload_folder(folder_path=folder, **DATASET).oid == first
    assert hub.log.requests("/commit/") == hub.log.requests(method="PUT") == 0
    assert hub.log.received() < 20_000


def test_a_stale_parent_is_refused(hub, api):
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
    from huggingface_hub.errors import HfHubHTTPError

    start = hub.commit(REPO, {"a.txt": b"a", "b.bin": b"\0b", "old/x.txt": b"x"})
    change = [
        CommitOperationAdd("c.txt", b"c"),
        CommitOperationCopy("b.bin", "copy.bin"),
        CommitOperationDelete("old/"),
    ]
    done = api.create_commit(operations=change, commit_message="change", parent_commit=start, **DATASET)
    assert sorted(hub.files(REPO)) == ["a.txt", "b.bin", "c.txt", "copy.bin"]
    assert sorted(hub.files(REPO, start)) == ["a.txt", "b.bin", "old/x.txt"]
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(operations=change[2:], commit_message="late", parent_commit=start, **DATASET)
    assert caught.value.response.status_code == 412
    titles = [commit.title for commit in api.list_repo_commits(**DATASET)]
    assert titles == ["change", "set up", "initial commit"]
    assert hub.repo(REPO).at("main").id == done.oid


def test_a_card_with_broken_yaml_is_refused(hub, api):
    hub.create_repo(REPO)
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        api.upload_file(path_or_fileobj=b"---\na: [\n---\n", path_in_repo="README.md", **DATASET)


# ---- listings and refs ----
def test_listings_come_by_the_page(hub, api):
    hub.commit(REPO, {f"shards/{i:02d}.safetensors": SHARD[:i] for i in range(25)} | {"a.txt": b"a"})
    hub.page = 10
    rows = list(api.list_repo_tree(recursive=True, **DATASET))
    assert [row.path for row in rows] == sorted([*hub.files(REPO), "shards"])
    assert hub.log.requests("/tree/main") == 3
    assert {row.path: row.lfs.sha256 for row in rows[2:]} == {
        path: file.sha for path, file in hub.files(REPO).items() if file.lfs
    }
    assert [row.path for row in api.list_repo_tree(**DATASET)] == ["a.txt", "shards"]
    found = api.get_paths_info(paths=["a.txt", "shards", "none"], expand=True, **DATASET)
    assert [(row.path, row.last_commit.title) for row in found] == [("a.txt", "set up"), ("shards", "set up")]


def test_branches_tags_and_pull_requests(hub, api):
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    first = hub.commit(REPO, {"a.txt": b"1"})
    api.create_tag(tag="v1.0", **DATASET)
    api.create_branch(branch="dev", **DATASET)
    hub.commit(REPO, {"a.txt": b"2"}, branch="dev")
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_tag(tag="v1.0", **DATASET)
    assert caught.value.response.status_code == 409
    pull = api.upload_file(path_or_fileobj=b"3", path_in_repo="a.txt", create_pr=True, **DATASET)
    refs = api.list_repo_refs(include_pull_requests=True, **DATASET)
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1.0": first}
    assert [ref.name for ref in refs.branches] == ["main", "dev"]
    assert [fetch("a.txt", revision=name) for name in ("v1.0", "dev", pull.pr_revision)] == [b"1", b"2", b"3"]
    api.delete_tag(tag="v1.0", **DATASET)
    with pytest.raises(RevisionNotFoundError):
        fetch("a.txt", revision="v1.0")


# ---- download ----
def test_bytes_are_counted(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD, "a.txt": b"text"})
    assert (fetch(), fetch("a.txt")) == (SHARD, b"text")
    assert hub.log.bytes("/_cdn/.*0.safetensors") == hub.log.bytes(host="localhost") == len(SHARD)
    assert hub.log.bytes() == len(SHARD) + 4
    assert (hub.log.requests(method="HEAD"), hub.log.requests(method="GET")) == (2, 2)
    hub.reset()
    assert fetch() == SHARD
    assert [(row.method, row.status, row.bytes) for row in hub.log] == [("HEAD", 302, 0)]


def test_a_token_that_leaves_is_seen(hub):
    hub.create_repo(REPO, private=True)
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    assert fetch() == SHARD
    assert len(hub.log.with_token(WRITER)) == 1
    assert hub.log.leaks(WRITER) == []
    assert get(location().location, authorization=f"Bearer {WRITER}").status_code == 400
    assert [row.host for row in hub.log.leaks(WRITER)] == [f"localhost:{hub.port}"]


def test_snapshots(hub, tmp_path):
    from huggingface_hub import snapshot_download

    hub.commit(REPO, {f"m/{i}.parquet": bytes([i]) * 9 for i in range(3)} | {"big.tar": noise(0, GB23)})
    folder = Path(snapshot_download(REPO, repo_type="dataset", allow_patterns="m/*", local_dir=tmp_path / "out"))
    found = {path.name: path.read_bytes() for path in (folder / "m").iterdir()}
    assert found == {f"{i}.parquet": bytes([i]) * 9 for i in range(3)}
    assert hub.log.bytes("/_cdn/") == 27


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=5-", slice(5, None)),
        ("bytes=-3", slice(-3, None)),
        ("bytes=299990-400000", slice(299_990, None)),
        ("bytes=100000-199999", slice(100_000, 200_000)),
        ("bytes=0-1,5-6", None),
        ("bytes=300000-", 416),
    ],
)
def test_ranges(hub, asked, expected):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    answer = get(location().location, range=asked)
    if expected == 416:
        assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */300000")
        return
    whole = expected is None
    assert answer.status_code == (200 if whole else 206)
    assert answer.content == (SHARD if whole else SHARD[expected])
    assert hub.log[-1].bytes == int(answer.headers["content-length"]) == len(answer.content)


def test_23_gb_that_nobody_stores(hub, api):
    from huggingface_hub import HfFileSystem

    archive = noise(3, GB23, odd=0xBF)
    hub.add_virtual(REPO, "models/big.tgz", archive.size, archive.read)
    [row] = api.get_paths_info(paths=["models/big.tgz"], **DATASET)
    known = location("models/big.tgz")
    assert row.size == known.size == GB23
    assert row.lfs.sha256 == known.etag
    at = [0, 22 * 10**9 + 1, GB23 - 50]
    with ThreadPoolExecutor(3) as pool:
        parts = pool.map(lambda start: get(known.location, range=f"bytes={start}-{start + 49}").content, at)
    assert list(parts) == [archive.read(start, 50) for start in at]
    assert hub.log.bytes("big.tgz") == 150
    with HfFileSystem().open(f"datasets/{REPO}/models/big.tgz", block_size=2**16) as file:
        file.seek(15 * 10**9)
        assert file.read(1000) == archive.read(15 * 10**9, 1000)
    assert hub.log.bytes("big.tgz") < 10**5


def test_a_client_that_leaves_ends_the_work(hub):
    from huggingface_hub import get_session

    hub.commit(REPO, {"big.tar": noise(0, GB23)})
    with get_session().stream("GET", location("big.tar").location) as answer:
        assert answer.headers["content-length"] == str(GB23)
        next(answer.iter_raw(1000))
    assert hub.log.bytes() < 10**9


# ---- Xet ----
def test_the_same_client_over_xet(hub_xet, api, tmp_path):
    from huggingface_hub import HfFileSystem

    hub_xet.create_repo(REPO)
    shard = noise(5, 2_000_000).read(0, 2_000_000)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/0.safetensors").write_bytes(shard)
    (tmp_path / "out/README.md").write_text("---\nlicense: mit\n---\n")
    first = api.upload_folder(folder_path=tmp_path / "out", **DATASET).oid
    [row] = api.get_paths_info(paths=["0.safetensors"], **DATASET)
    assert row.xet_hash == hub_xet.files(REPO)["0.safetensors"].xet
    assert api.upload_folder(folder_path=tmp_path / "out", **DATASET).oid == first
    assert hub_xet.log.requests("_lfs") == 0
    assert fetch("0.safetensors") == shard
    assert hub_xet.log.bytes("_cdn") == 0
    with HfFileSystem().open(f"datasets/{REPO}/0.safetensors") as file:
        file.seek(1_000_000)
        assert file.read(10) == shard[1_000_000:1_000_010]
    api.upload_file(path_or_fileobj=shard[:-1] + b"!", path_in_repo="1.safetensors", **DATASET)
    assert hub_xet.read(REPO, "1.safetensors") == shard[:-1] + b"!"
    stored = sum(path.stat().st_size for path in hub_xet.folder.glob("xet/*/xet/xorbs/xorbs/**/*"))
    assert stored < 2_500_000


# ---- faults, as the client meets them; tests/sources/test_hub_faults.py has the rest ----
def test_a_range_that_is_overlooked(hub, waits, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    hub.faults = [{"path": "_cdn", "cut": 100_000}, {"path": "_cdn", "whole": True}]
    assert fetch() == SHARD
    assert [(row.range, row.status, row.bytes) for row in hub.log.select("_cdn")] == [
        (None, 200, 100_000),
        ("bytes=100000-", 200, 300_000),
    ]


def test_faults_that_the_client_does_not_notice(hub):
    hub.commit(REPO, {f"shards/{i}.safetensors": SHARD[i:] for i in range(2)})
    hub.faults.add("_cdn", wrong=1000)
    assert fetch() == SHARD[:1000] + bytes(255 - value for value in SHARD[1000:])
    hub.faults.add("resolve", headers={"X-Linked-Size": 0})
    assert fetch("shards/1.safetensors") == b""


def test_a_size_that_is_not_told(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    hub.faults.add("resolve", headers={"X-Linked-Size": None})
    assert location().size is None
    assert fetch() == SHARD


def test_a_commit_whose_answer_is_lost(hub, api, waits):
    from huggingface_hub.utils import httpx

    hub.create_repo(REPO)
    hub.faults.add("/commit/main", cut=0)
    with pytest.raises(httpx.RemoteProtocolError):
        api.upload_file(path_or_fileobj=b"a", path_in_repo="a.txt", **DATASET)
    assert hub.read(REPO, "a.txt") == b"a"


def test_a_pointer_in_place_of_the_file(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    pointer = hub.pointer(REPO, "shards/0.safetensors")
    assert pointer.startswith(b"version https://git-lfs.github.com/spec/v1\noid sha256:")
    hub.faults.add("_cdn", body=pointer, ranges=True, times=math.inf)
    link = location().location
    assert get(link, range="bytes=0-6").content == b"version"
    assert get(link, range="bytes=1000-").status_code == 416
    hub.commit(REPO, {"kept.safetensors": pointer}, lfs=False)
    assert fetch("kept.safetensors") == pointer


def test_an_expired_link_lives_again_after_a_new_head(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    link = location().location
    hub.expire_links()
    assert get(link, range="bytes=0-9").status_code == 403
    assert get(location().location, range="bytes=0-9").content == SHARD[:10]
    hub.cdn_ttl = -1
    assert get(location().location).status_code == 403


def test_redirects_take_no_token_along(hub, api):
    from huggingface_hub.errors import HfHubHTTPError

    hub.faults.add("whoami", redirect=True)
    with pytest.raises(HfHubHTTPError):
        api.whoami()
    assert [(row.host.split(":")[0], row.status) for row in hub.log] == [
        ("127.0.0.1", 302),
        ("localhost", 401),
    ]
    assert hub.log.leaks(WRITER) == []


def test_gated_and_missing(hub):
    from huggingface_hub import errors

    hub.create_repo("carol/gated", gated=True)
    hub.commit("carol/gated", {"a.txt": b"a"})
    hub.commit(REPO, {"a.txt": b"a"})
    from huggingface_hub import hf_hub_download

    cases = [
        ("carol/gated", "a.txt", None, errors.GatedRepoError),
        ("carol/none", "a.txt", None, errors.RepositoryNotFoundError),
        (REPO, "none.txt", None, errors.EntryNotFoundError),
        (REPO, "a.txt", "none", errors.RevisionNotFoundError),
    ]
    for repo, path, revision, error in cases:
        with pytest.raises(error):
            hf_hub_download(repo, path, repo_type="dataset", revision=revision)
    hub.repo("carol/gated").allowed.add("alice")
    assert Path(hf_hub_download("carol/gated", "a.txt", repo_type="dataset")).read_bytes() == b"a"


def test_which_requests_a_fault_meets(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    link = location().location
    hub.faults = [{"path": "_cdn", "ranged": True, "skip": 1, "times": 2, "status": 503}]
    asked = [get(link, **({"range": "bytes=0-9"} if ranged else {})).status_code for ranged in (1, 0, 1, 1, 1)]
    assert asked == [206, 200, 503, 503, 206]
    assert [row.fault is not None for row in hub.log.select("_cdn")] == [False, False, True, True, False]
    with pytest.raises(ValueError, match=r"a fault knows no \['sttus'\]"):
        Faults([{"sttus": 503}])


# ---- time, and what happens between two requests ----
def test_latency_is_paid_once_by_parallel_requests(hub):
    hub.commit(REPO, {"shards/0.safetensors": SHARD})
    link, hub.latency = location().location, 0.1
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: get(link, range=f"bytes={i}-{i}"), range(4)))
    assert all(row.seconds >= 0.1 for row in hub.log.select("_cdn"))
    assert hub.log.most_at_once("_cdn") > 1


def test_a_commit_between_two_requests(hub):
    first = hub.commit(REPO, {"a.bin": b"\0old"})

    def meanwhile(exchange):
        if "_cdn" in exchange.path and hub.repo(REPO).at("main").id == first:
            hub.commit(REPO, {"a.bin": b"\0new"})

    hub.on_request = meanwhile
    assert (fetch("a.bin"), fetch("a.bin")) == (b"\0old", b"\0new")


# ---- the server itself ----
def test_two_servers_in_one_process(hub, tmp_path):
    with Server(tmp_path / "other", latency=0.01) as other:
        other.commit("a/b", {"x.txt": b"x"}, kind="models")
        with urllib.request.urlopen(f"{other.url}/a/b/resolve/main/x.txt") as answer:
            assert answer.read() == b"x"
        assert (len(other.log), len(hub.log)) == (1, 0)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(other.url)


@pytest.mark.slow
def test_as_a_process(tmp_path):
    command = [sys.executable, "-m", "tests.hub", "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            settings = dict(word.split("=", 1) for word in process.stdout.readline().split())
            bearer = {"Authorization": f"Bearer {settings['HF_TOKEN']}"}
            request = urllib.request.Request(f"{settings['HF_ENDPOINT']}/api/whoami-v2", headers=bearer)
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert json.load(answer)["name"] == "alice"
        finally:
            process.terminate()
        assert process.wait(10) == 0


# ---- virtual files ----
@given(st.lists(st.integers(0, 100), max_size=6), st.integers(0, 400), st.integers(0, 400))
def test_a_virtual_file_reads_like_its_bytes(sizes, offset, length):
    kinds = [lambda i, n: noise(i, n), lambda i, n: filled(n, i), lambda i, n: noise(i, n).read(0, n)]
    parts = [kinds[i % 3](i, n) for i, n in enumerate(sizes)]
    literal = b"".join(part if isinstance(part, bytes) else part.read(0, part.size) for part in parts)
    whole = joined(*parts)
    assert whole.size == len(literal) == sum(sizes)
    assert whole.read(offset, length) == literal[offset : offset + length]


def test_noise_can_be_finite():
    import numpy as np

    for odd, low in ((0xBF, -2), (0x3F, 0)):
        for dtype in ("<f2", "<f4"):
            values = np.frombuffer(noise(1, 4096, odd).read(0, 4096), dtype)
            assert ((values > low) | (values == 0)).all()
            assert (values < 2).all()
            assert len(np.unique(values)) > 500
