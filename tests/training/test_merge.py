"""Pieces of a collection merged: the source that one run makes, whatever the pieces, their order and their place."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from errno import EACCES
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, DamagedError, LockedError, UsageError, ZooError
from checkpoints_zoo.formats import catalog, shard_files
from checkpoints_zoo.training import merge as merging
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.merge import RUN_COLUMNS, merge
from tests.support import commands, tiny
from tests.support.commands import values
from tests.support.tiny import (
    LOCK,
    MEMBERS,
    TINY,
    contents,
    no_waiting_for_the_disk,  # noqa: F401 (a fixture)
    stored,
    two_a_shard,  # noqa: F401 (a fixture)
)

pytestmark = pytest.mark.usefixtures("two_a_shard", "no_waiting_for_the_disk")
pieces = st.lists(st.sets(st.sampled_from(MEMBERS), min_size=1), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All members, as one run leaves them."""
    out = tmp_path_factory.mktemp("whole")
    before, shard_files.LARGEST_TENSOR_COUNT = shard_files.LARGEST_TENSOR_COUNT, tiny.TWO_A_SHARD
    stored(MEMBERS, out)
    shard_files.LARGEST_TENSOR_COUNT = before
    return out


def described(folder: Path, **changes: Any) -> None:
    """Change a source's description."""
    path = folder / "manifests" / "tiny.json"
    catalog.write_json(catalog.read_json(path) | changes, path)


@pytest.mark.slow
@settings(max_examples=5)
@given(pieces=pieces, unsealed=st.lists(st.booleans(), min_size=5, max_size=5), data=st.data())
def test_pieces_in_any_order_are_the_whole(
    whole: Path, pieces: list[set[int]], unsealed: list[bool], data: st.DataObject
) -> None:
    rest = set(MEMBERS) - set().union(*pieces)
    parts = [*pieces, rest] if rest else pieces
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = [stored(sorted(part), root / str(i), seal=not unsealed[i]) for i, part in enumerate(parts)]
        order = data.draw(st.permutations(folders))
        merge(order, root / "out")
        assert contents(root / "out", told=True) == contents(whole, told=True)
        cut = data.draw(st.integers(0, len(order)))
        for some, out in ((order[:cut], "first"), (order[cut:], "second")):
            if some:
                merge(some, root / out)
        merge([root / out for out in ("second", "first") if (root / out).exists()], root / "nested")
        assert contents(root / "nested", told=True) == contents(whole, told=True)
        assert sorted(p.name for p in (root / "nested").iterdir()) == [".training", "manifests", "shards"]


@pytest.mark.slow
def test_trained_in_pieces_and_merged_is_trained_at_once(tmp_path: Path) -> None:
    for ids, out in ((MEMBERS[:4], "whole"), ((3, 0), "a"), ((2,), "b"), ((1,), "b")):
        train_into(TINY, ids, tmp_path / out)
    assert merge([tmp_path / "b", tmp_path / "a"], tmp_path / "out") == {"tiny": 4}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert zoo.verify(zoo.load("tiny", source=tmp_path / "out")) == []
    # What differs is what a run tells of itself.
    one, other = (zoo.load("tiny", source=tmp_path / out).rows for out in ("out", "whole"))
    differing = {name for name in one.column_names if not one.column(name).equals(other.column(name))}
    assert differing <= set(RUN_COLUMNS)
    # Training goes on in what was merged.
    train_into(TINY, (0, 1, 2, 3, 5), tmp_path / "out")
    assert zoo.load("tiny", source=tmp_path / "out").ids == [0, 1, 2, 3, 5]


def test_of_a_member_in_several_pieces_the_first_made_stays(tmp_path: Path) -> None:
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (3, 1, 2)]
    folders = [stored([0, 1], tmp_path / str(i), created=t, device=f"d{i}") for i, t in enumerate(times)]
    found = []
    for i, order in enumerate(itertools.permutations(folders)):
        merge(order, tmp_path / f"out{i}")
        found.append(contents(tmp_path / f"out{i}", told=True))
    assert all(one == found[0] for one in found)
    assert zoo.load("tiny", source=tmp_path / "out0").rows.column("device").to_pylist() == ["d1", "d1"]


def test_merging_again_writes_nothing(whole: Path, tmp_path: Path) -> None:
    pieces = [stored(MEMBERS[:5], tmp_path / "a"), stored(MEMBERS[4:], tmp_path / "b")]
    merge(pieces[:1], tmp_path / "out")
    merge(pieces, tmp_path / "out")
    assert contents(tmp_path / "out", told=True) == contents(whole, told=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    said: list[str] = []
    assert merge(pieces, tmp_path / "out", say=said.append) == {"tiny": 9}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")} == before
    assert said == []


@pytest.mark.slow
def test_what_a_killed_merge_left_is_gone_on_with(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every moment between two writes."""
    pieces = [stored(MEMBERS[::2], tmp_path / "a"), stored(MEMBERS[1::2], tmp_path / "b")]
    replace, moment = Path.replace, 0
    while True:
        left = itertools.count()

        def killed(self: Path, target: Path, left: Iterator[int] = left, moment: int = moment) -> Path:
            if next(left) == moment:
                raise KeyboardInterrupt
            return replace(self, target)

        out = tmp_path / f"out{moment}"
        monkeypatch.setattr(Path, "replace", killed)
        try:
            merge(pieces, out)
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(Path, "replace", replace)
        if (out / "manifests" / "tiny.parquet").exists():
            assert zoo.verify(zoo.load("tiny", source=out), sample=0) == []  # readable all the while
        merge(pieces, out)
        assert contents(out, told=True) == contents(whole, told=True)
        moment += 1
    assert moment >= 15  # five shards, and after each description and manifest


# Refused


def refused(folders: list[Path], out: Path, kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as error:
        merge(folders, out)
    assert not (out / "manifests").exists()
    return str(error.value)


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    a, b = stored([0], tmp_path / "a"), stored([1], tmp_path / "b", recipe_hash="0123456789abcdef")
    assert refused([a, b], tmp_path / "out") == (
        f"members of tiny: expected one recipe hash in all rows; found 0123456789abcdef in {b}, {TINY.hash} in {a}."
        " Name a changed recipe differently."
    )


def test_a_member_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = stored([0, 1], tmp_path / "a")
    other = tiny.made()[2]
    swapped = dataclasses.replace(other, row=other.row | {"member": 1})
    monkeypatch.setattr(tiny, "finished", lambda ids: [swapped])
    b = stored([1], tmp_path / "b")
    assert refused([a, b], tmp_path / "out") == (
        f"member 1 of tiny: expected the weights that it has in {a}, sha256 {tiny.made()[1].row['sha256'][:16]}…;"
        f" found sha256 {other.row['sha256'][:16]}… in {b}."
        " Keep one of the two: the same recipe on another processor or torch may round differently."
    )


def test_a_member_that_failed_in_one_piece_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, failed = stored([1], tmp_path / "a"), tiny.made()[5]
    monkeypatch.setattr(tiny, "finished", lambda ids: [dataclasses.replace(failed, row=failed.row | {"member": 1})])
    b = stored([1], tmp_path / "b")
    assert f"; found failed in {b}. Keep one" in refused([a, b], tmp_path / "out")


def test_another_description_is_refused(tmp_path: Path) -> None:
    a, b = stored([0], tmp_path / "a"), stored([1], tmp_path / "b")
    described(b, title="Others", licence="MIT")
    assert refused([a, b], tmp_path / "out") == (
        f"collection tiny in folder {b}: expected the description that it has in {a}; found another licence, title."
    )


def test_damaged_bytes_are_refused(tmp_path: Path) -> None:
    a = stored([0], tmp_path / "a")
    (path,) = (a / "shards" / "tiny").iterdir()
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    assert "as its row says" in refused([a], tmp_path / "out", DamagedError)


def test_folders_without_members_are_refused(tmp_path: Path) -> None:
    a = stored([0], tmp_path / "a")
    (tmp_path / "b").mkdir()
    nothing = f"folder {tmp_path / 'b'}: expected members that were trained; found none."
    for folders in ([tmp_path / "b"], [a, tmp_path / "b"]):
        assert refused(folders, tmp_path / "out", CollectionNotFound) == nothing
    with pytest.raises(CollectionNotFound, match=rf"collection 'other': expected one in {a}; found none\."):
        merge([a], tmp_path / "out", ["other"])
    with pytest.raises(UsageError, match=rf"folder {a}: expected another one than the pieces; found one of them\."):
        merge([a], a)


@pytest.mark.slow
def test_a_folder_that_is_being_trained_into_is_refused(tmp_path: Path) -> None:
    a = stored([0], tmp_path / "a")
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(a)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        lock = a / ".training" / "lock"
        assert refused([a], tmp_path / "out", LockedError) == (
            f"folder {a}: expected no other process training into it; found a lock on {lock}. Wait until that run ends."
        )
        other.kill()
    assert merge([a], tmp_path / "out") == {"tiny": 1}


def test_pieces_are_locked_before_they_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, out, looked = stored([0], tmp_path / "a"), tmp_path / "out", list[Path]()
    collections = merging._collection_names

    def looking(folder: Path) -> set[str]:
        looked.append(folder)
        with (folder / ".training" / "lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return collections(folder)

    monkeypatch.setattr(merging, "_collection_names", looking)
    merge([a], out)
    assert looked == [a, out]


def test_a_piece_that_can_not_be_read_is_not_said_of_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*arguments: object) -> None:
        raise PermissionError(EACCES, os.strerror(EACCES))

    a = stored([0], tmp_path / "a")
    monkeypatch.setattr(merging, "read_rows", unreadable)
    with pytest.raises(PermissionError) as error:
        merge([a], tmp_path / "out")
    assert not isinstance(error.value, ZooError)


def test_the_command(whole: Path, tmp_path: Path) -> None:
    pieces = [stored(MEMBERS[:5], tmp_path / "a"), stored(MEMBERS[5:], tmp_path / "b")]
    done = commands.run("train-merge", *pieces, "--out", tmp_path / "out", "--format", "json")
    assert contents(tmp_path / "out", told=True) == contents(whole, told=True)
    assert values(done) == [{"collection": "tiny", "members": 9, "path": str(tmp_path / "out")}]
    shutil.rmtree(tmp_path / "out")
    assert commands.run("train-merge", pieces[0], "--out", pieces[0]).exit_code == 2
