"""What is refused before anything goes up: members and files that are not as they should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import (
    DamagedError,
    FormatError,
    SourceNotFound,
    UsageError,
)
from checkpoints_zoo.publishing.publisher import Plan
from tests.hub import Hub
from tests.support.commands import run
from tests.support.publications import (
    ADDRESS,
    NEW,
    consistent,
    publish,
    quick,
    refused,
    refused_both,
    two_shards,
)
from tests.support.scenarios import SCHEMA, Built, State, build

REFUSED = "Nothing was published. `zoo-cli verify ROOT` lists them all."


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    return two_shards(tmp_path / "out")


# ---- members ----
def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_changed_bytes(hub: Hub, tiny: Built) -> None:
    row = tiny.rows[4]
    flip(tiny.root / row["path"], row["offset"] + 100)
    refused_both(
        hub, DamagedError, "members of source ROOT: expected what their manifest says; found member 4 of tiny: hash: "
        f"expected sha256 {row['sha256'][:16]}…; found …", tiny.root,
    )  # fmt: skip
    assert run("publish", tiny.root, "--repo", NEW).exit_code == 4


def test_many_problems_are_counted(hub: Hub, tiny: Built) -> None:
    for row in tiny.rows:
        flip(tiny.root / row["path"], row["offset"])
    with pytest.raises(DamagedError, match=r"member 2 of tiny: hash: .* And 3 more\. Nothing was published\."):
        publish(tiny.root)


def test_values_that_are_not_finite(hub: Hub, tmp_path: Path, tiny: Built) -> None:
    def spoil(member: int, state: State) -> None:
        if member == 2:
            state["fc1.bias"][3] = torch.nan

    bad = build(tmp_path / "bad", members=range(4), change=spoil)
    assert isinstance(zoo.publish(bad.root, NEW, dry_run=True), Plan)  # one of the checks still to come
    refused(
        hub, DamagedError, "members of source ROOT: expected what their manifest says; found member 2 of tiny: finite: "
        f"expected finite weights; found others in fc1.bias. {REFUSED}", bad.root,
    )  # fmt: skip
    bad.rows[2] |= {"status": "failed", "reason": "diverged"}
    bad.write()
    publish(bad.root)
    assert consistent(hub) == 3


def same(twins: set[int]) -> Callable[[int, State], None]:
    def change(member: int, state: State) -> None:
        if member in twins:
            for tensor in state.values():
                tensor.zero_()

    return change


def test_duplicates(hub: Hub, tmp_path: Path, tiny: Built) -> None:
    bad = build(tmp_path / "bad", members=range(4), change=same({1, 3}))
    text = (
        "members of source ROOT: expected what their manifest says; found member 3 of tiny: duplicate: expected "
        f"weights of its own; found those of member 1. {REFUSED}"
    )
    refused_both(hub, DamagedError, text, bad.root)
    bad.rows[3] |= {"status": "excluded", "reason": "the weights of member 1"}
    bad.write()
    publish(bad.root)
    assert consistent(hub) == 3


def test_duplicates_in_two_collections(hub: Hub, tmp_path: Path, tiny: Built) -> None:
    root = build(tmp_path / "bad", members=range(4), change=same({1})).root
    build(root, members=range(10, 14), name="wide", change=same({12}))
    refused_both(
        hub, DamagedError, "members of source ROOT: expected what their manifest says; found member 12 of wide: "
        f"duplicate: expected weights of its own; found those of member 1 of tiny. {REFUSED}", root,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "runs", "good"),
    [("hmc", (0, 0), True), ("sghmc", (5, 5), True), ("hmc", (0, 1), False), ("swag", (0, 0), False)],
)
def test_equal_draws_of_a_chain(
    hub: Hub, tmp_path: Path, tiny: Built, method: str, runs: tuple[int, int], good: bool
) -> None:
    chain = build(tmp_path / "chain", members=range(4), change=same({1, 2}))
    for row in chain.rows:
        row |= {"method": method, "run": runs[row["member"] == 2], "draw": row["member"]}
    chain.write(pa.schema([*SCHEMA, ("method", pa.string()), ("run", pa.int32()), ("draw", pa.int32())]))
    if good:
        publish(chain.root)
        assert consistent(hub) == 3
    else:
        refused(hub, DamagedError, "members of source ROOT: …", chain.root)


def test_rows_without_a_hash(hub: Hub, tiny: Built) -> None:
    for member in (1, 3):
        tiny.rows[member]["sha256"] = None
    tiny.write()
    refused_both(
        hub, FormatError, "manifest of tiny: expected a sha256 in every row that has weights; found null for members "
        "1,3. `zoo-cli import --hash` fills them.", tiny.root,
    )  # fmt: skip


def test_bytes_that_overlap(hub: Hub, tiny: Built) -> None:
    tiny.rows[1]["offset"] -= 8
    tiny.write()
    begin, size = tiny.rows[0]["offset"], tiny.rows[0]["nbytes"]
    refused_both(
        hub, DamagedError, f"member 1 of tiny in file {tiny.rows[0]['path']}: expected bytes {begin + size - 8:,} to "
        f"{begin + 2 * size - 8:,} of its own; found member 0 of tiny at {begin:,} to {begin + size:,}.", tiny.root,
    )  # fmt: skip


def test_bytes_behind_the_end(hub: Hub, tiny: Built) -> None:
    path = tiny.root / tiny.rows[5]["path"]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    refused_both(
        hub, DamagedError, f"member 5 of tiny in file {tiny.rows[5]['path']}: expected bytes "
        f"{tiny.rows[5]['offset']:,} to {size:,} of its own; found a file of {size - 4:,} bytes.", tiny.root,
    )  # fmt: skip


def test_bytes_that_lie_elsewhere(hub: Hub, tiny: Built) -> None:
    first, second = tiny.rows[0]["offset"], tiny.rows[1]["offset"]
    tiny.rows[0]["offset"], tiny.rows[1]["offset"] = second, first
    tiny.write()
    refused_both(hub, DamagedError, "member 0 in file ROOT/shards/…", tiny.root)


def test_a_shard_that_is_not_there(hub: Hub, tiny: Built) -> None:
    (tiny.root / tiny.rows[0]["path"]).unlink()
    refused_both(
        hub, SourceNotFound, f"file {tiny.rows[0]['path']} of source file://ROOT: expected a file, …", tiny.root
    )


def test_paths_and_links_that_lead_out(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    path = tiny.root / tiny.rows[0]["path"]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused_both(
        hub, DamagedError, f"path '{tiny.rows[0]['path']}' in a manifest of file://ROOT: expected a file …", tiny.root
    )
    for row in tiny.rows[:3]:
        row["path"] = "../elsewhere"
    tiny.write()
    refused_both(
        hub, DamagedError, "row 0 (member 0) of manifest ROOT/manifests/tiny.parquet: expected a path …", tiny.root
    )


@pytest.mark.parametrize("place", ["x.safetensors", "manifests/x", "cards/x", "predictions/x", "shards/.git/x"])
def test_weights_where_other_things_belong(hub: Hub, tiny: Built, place: str) -> None:
    (tiny.root / place).parent.mkdir(parents=True, exist_ok=True)
    (tiny.root / tiny.rows[0]["path"]).rename(tiny.root / place)
    for row in tiny.rows[:3]:
        row["path"] = place
    tiny.write()
    refused_both(
        hub, UsageError, f"file {place} of source file://ROOT: expected members' bytes in a folder of their own, as "
        "shards/; found a path that the repo needs for other files.", tiny.root,
    )  # fmt: skip


def test_a_collection_without_members(hub: Hub, tiny: Built) -> None:
    for row in tiny.rows:
        row["status"] = "failed"
    tiny.write()
    refused_both(
        hub, FormatError, "manifest of tiny: expected a row or more that are final with status ok; found none of 6. "
        "Leave the collection out until it has members.", tiny.root,
    )  # fmt: skip


def test_folders_that_are_none(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    refused(hub, SourceNotFound, "source ROOT: expected a folder with manifests/NAME.parquet in it; …", tmp_path / "no")
    with pytest.raises(UsageError, match=f"^source {ADDRESS}: expected a folder on this machine; found an address on"):
        zoo.publish(ADDRESS, NEW)
    (tmp_path / "empty" / "manifests").mkdir(parents=True)
    refused(hub, SourceNotFound, "source ROOT: expected manifests/NAME.parquet; found none. …", tmp_path / "empty")
    (tiny.root / "manifests" / "tiny.json").unlink()
    refused_both(
        hub, SourceNotFound, "source file://ROOT: expected manifests/tiny.json beside the manifest; …", tiny.root
    )
    (tiny.root / "manifests" / "tiny.json").write_text("{}")
    refused_both(hub, FormatError, "description ROOT/manifests/tiny.json: expected a JSON object with a …", tiny.root)


@pytest.mark.parametrize("sample", [-1, 2.5, True])
def test_samples_that_are_none(hub: Hub, tiny: Built, sample: Any) -> None:
    refused(hub, UsageError, f"sample: expected a whole number from 0; found {sample!r}.", tiny.root, sample=sample)
