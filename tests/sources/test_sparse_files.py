"""Large manifests on the Hub: only the footer, and the needed columns and row groups, are fetched, and only once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, MemberNotFound, NetworkError, SelectionError, ZooError
from checkpoints_zoo.sources import cache, fetching, hub_cache, sparse_files
from checkpoints_zoo.sources import hub as sources_hub
from checkpoints_zoo.sources.finding import select_members
from checkpoints_zoo.sources.hub_source import HubSource
from tests.hub import WRITER, Hub
from tests.sources.test_large_manifests import COUNT, pairs, selected, usable, write_large
from tests.support.remote import ADDRESS, REPO
from tests.support.scenarios import Built

MANIFEST = "/manifests/tiny.parquet"
SELECTIONS: list[dict[str, Any]] = [
    {"where": "test_accuracy > 0.9", "n": 50}, {"members": "19998,4"}, {"where": "member BETWEEN 9000 AND 9002"},
    {"members": "12001@10,12000-12001"}, {"n": 9, "sample": 77}, {"where": "status = 'failed'", "n": 3}, {"n": 1},
    {"where": "test_accuracy > 0.5"},
]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Write a source whose manifest has 3.7 MB in 20 row groups."""
    return write_large(tmp_path_factory.mktemp("large"), compression="none", use_dictionary=False)


@pytest.fixture
def remote(hub: Hub, built: Built, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Publish the source, to a client for which 3 MB is large."""
    monkeypatch.setattr(sources_hub, "LARGE_NBYTES", 3 * 2**20)
    fetching._remote_files.clear()
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()})
    return hub


def from_hub(**selection: Any) -> list[tuple[int, int]]:
    return pairs(zoo.load("tiny", source=ADDRESS, **selection).rows.to_pylist())


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_selections_and_citations_are_those_of_the_folder(remote: Hub, built: Built, selection: dict[str, Any]) -> None:
    members = zoo.load("tiny", source=ADDRESS, **selection)
    there = zoo.load("tiny", source=built.root, **selection)
    assert members.rows.equals(there.rows)
    assert members.citation.partition("#")[2] == there.citation.partition("#")[2]
    assert remote.log.leaks(WRITER) == []


def test_only_the_needed_bytes_are_fetched_and_only_once(remote: Hub, built: Built) -> None:
    rows = usable(built, lambda r: r["test_accuracy"] > 0.9)[:50]
    members = zoo.load("tiny", source=ADDRESS, where="test_accuracy > 0.9", n=50)
    assert pairs(members.rows.to_pylist()) == pairs(rows)
    metadata = pq.read_metadata(built.manifest)
    footer = max(sparse_files.FOOTER_NBYTES, metadata.serialized_size + 8)
    groups = [sum(metadata.row_group(g).column(c).total_compressed_size for c in range(metadata.num_columns))
              for g in range(4)]  # fmt: skip
    assert remote.log.bytes(MANIFEST) <= footer + sum(groups)
    assert remote.log.bytes(MANIFEST) < 0.3 * built.manifest.stat().st_size
    ranged = remote.log.select(MANIFEST, method="GET")
    assert all(row.range and row.status == 206 for row in ranged)
    assert len(ranged) <= 12
    before = len(remote.log)
    assert zoo.load(members.citation).ids == members.ids
    assert from_hub(where="test_accuracy > 0.9", n=40) == pairs(rows[:40])
    assert remote.log.bytes(MANIFEST) == sum(row.bytes for row in ranged)
    asked = [row for row in remote.log[before:] if "/revision/" not in row.path]
    assert asked == []
    stored = pq.ParquetFile(built.manifest).read(["member"]).column("member").to_pylist()
    assert select_members(members.citation).of == len(set(stored))
    before = remote.log.bytes(MANIFEST)
    assert select_members("tiny", source=ADDRESS, n=1).of == len(set(stored))
    assert remote.log.bytes(MANIFEST) == before


def test_offline_the_same_selection_works_and_another_says_what_to_do(
    remote: Hub, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    online = from_hub(where="test_accuracy > 0.9", n=50)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert from_hub(where="test_accuracy > 0.9", n=50) == online
    with pytest.raises(NetworkError, match=r"rows of manifests/tiny\.parquet .*Make this selection once"):
        from_hub(members="19998")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert from_hub(members="19998") == [(19_998, 40)]


def test_a_whole_file_is_read_where_it_is_cached_or_most_of_it_is_needed(remote: Hub, built: Built) -> None:
    assert from_hub() == pairs(usable(built))  # all rows, hence most bytes
    assert (
        hub_cache.cached_file(zoo.load("tiny", source=ADDRESS, n=1).source.repo, "manifests/tiny.parquet") is not None
    )
    before = remote.log.bytes(MANIFEST)
    assert from_hub(members="19998,4") == [(19_998, 40), (4, 40)]
    assert remote.log.bytes(MANIFEST) == before <= 1.4 * built.manifest.stat().st_size


@pytest.mark.parametrize(("selection", "kind", "text"), [
    ({"members": [4, 30_000]}, MemberNotFound, "member 30000 of tiny: expected an id among 0"),
    ({"members": [6, 4, 9, 4, 6]}, SelectionError, "expected each member once; found member 4 twice."),
    ({"where": "test_accuracy > 2"}, SelectionError, "expected a row that meets it; found none of 13,"),
], ids=str)  # fmt: skip
def test_errors_of_selections(remote: Hub, selection: dict[str, Any], kind: type[ZooError], text: str) -> None:
    with pytest.raises(kind) as caught:
        from_hub(**selection)
    assert text in str(caught.value)


@pytest.mark.parametrize("place", ["footer", "page", "start"])
def test_damaged_bytes_are_refused_and_fetched_anew(remote: Hub, built: Built, place: str) -> None:
    metadata = pq.read_metadata(built.manifest)
    content = bytearray(built.manifest.read_bytes())
    chunk = metadata.row_group(15).column([*metadata.schema.names].index("sha256"))
    position = {"footer": len(content) - 3, "page": chunk.data_page_offset + 200, "start": -metadata.serialized_size}
    content[position[place]] ^= 0xFF
    if place == "start":
        content[-8 - metadata.serialized_size :][:40] = b"\xff" * 40
    remote.commit(REPO, {"manifests/tiny.parquet": bytes(content)})
    if place == "page":
        assert from_hub(members="19998,42") == [(19_998, 40), (42, 40)]
    with pytest.raises(ZooError):
        from_hub(members="15501")


def test_a_damaged_part_of_the_cache_is_fetched_anew(remote: Hub, built: Built) -> None:
    zoo.load("tiny", source=ADDRESS, members="15501")
    (path,) = cache.cache_folders(REPO)[0].glob("parts/*.parquet")
    metadata = pq.read_metadata(built.manifest)
    chunk = metadata.row_group(15).column([*metadata.schema.names].index("sha256"))
    with path.open("r+b") as file:
        file.seek(chunk.data_page_offset)
        file.write(bytes(chunk.total_compressed_size))
    with pytest.raises(FormatError, match="Load it again: it is then fetched anew"):
        from_hub(members="15501")
    assert from_hub(members="15501") == [(15_501, 40)]


def test_a_server_that_ignores_ranges_is_named(remote: Hub) -> None:
    remote.faults.append({"path": "/_cdn/.*parquet", "whole": True})
    with pytest.raises(NetworkError, match="expected 206 and this range; found 200 and the file from its start"):
        from_hub(n=1)


def test_a_file_that_changes_at_a_commit_is_refused(remote: Hub, built: Built) -> None:
    repo = zoo.load("tiny", source=ADDRESS, n=1).source.repo
    fetching._remote_files.clear()
    folder = cache.cache_folders(REPO)[0]
    cache.write_file_record(folder, repo.commit, "manifests/tiny.parquet", "f" * 64, built.manifest.stat().st_size)
    with pytest.raises(DamagedError, match="A commit's files never change"):
        from_hub(n=1)


def test_a_file_over_the_limit_is_refused_before_its_bytes(remote: Hub) -> None:
    repo = sources_hub.resolve_address(ADDRESS)
    cache.write_file_record(
        cache.writable_folder(REPO), repo.commit, "manifests/tiny.parquet", "f" * 64, 2**30 + 1
    )  # fmt: skip
    with pytest.raises(FormatError, match="expected at most 1,073,741,824 bytes; found 1,073,741,825"):
        from_hub(n=1)
    assert remote.log.bytes(MANIFEST) == 0


def test_verification_reads_the_whole_manifest(remote: Hub, built: Built) -> None:
    members = zoo.load("tiny", source=ADDRESS, n=1)
    assert isinstance(members.source, HubSource)
    assert members.source.read_collection("tiny")[1].num_rows == COUNT
    assert remote.log.bytes(MANIFEST) > built.manifest.stat().st_size


def test_deleting_the_cache_deletes_the_parts(remote: Hub, built: Built) -> None:
    from_hub(n=1)
    assert 0 < cache.delete_members(REPO) < built.manifest.stat().st_size  # The file has holes.
    assert not [*cache.cache_folders(REPO)[0].glob("parts/*")]
    assert from_hub(n=2) == selected(built, n=2)


intervals = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4)  # so few places that some meet


@given(intervals, intervals, st.integers(0, 3))
def test_ranges_as_sets_of_bytes(some: list[tuple[int, int]], present: list[tuple[int, int]], gap: int) -> None:
    def positions(ranges: list[tuple[int, int]]) -> set[int]:
        return {x for start, end in ranges for x in range(start, end)}

    joined = sparse_files._join(present, 0)
    assert positions(joined) == positions(present)
    assert all(a[1] < b[0] for a, b in pairwise(joined))
    missing = sparse_files._without(some, joined)
    assert positions(missing) == positions(some) - positions(present)
    assert all(start < end for start, end in missing)
    wide = sparse_files._join(some, gap)
    assert positions(some) <= positions(wide)
    assert all(a[1] + gap < b[0] for a, b in pairwise(wide))
