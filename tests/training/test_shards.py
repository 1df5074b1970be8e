"""Finished members laid aside, and put into shards as soon as all of a shard's ids are there."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.training import population, recipe_files
from checkpoints_zoo.training.export import Export, train_into
from checkpoints_zoo.training.packing import PackedSnapshot, layout_of
from checkpoints_zoo.training.shards import MemberLog, Staging
from checkpoints_zoo.training.state import divide_into_stacks, state_file_name, training_lock
from checkpoints_zoo.workers import InProcess, Processes
from tests.support import tiny
from tests.support.kills import forks
from tests.support.tiny import (  # noqa: F401 (fixtures)
    MEMBERS,
    TINY,
    add_finished,
    contents,
    finished,
    no_waiting_for_the_disk,
    stored,
    two_a_shard,
)

pytestmark = pytest.mark.usefixtures("two_a_shard", "no_waiting_for_the_disk")


def staging(folder: Path, **options: Any) -> Staging:
    return Staging(folder / "finished", layout_of(TINY), TINY.hash, **options)


# One member after another


def test_what_is_laid_aside_is_there_again(tmp_path: Path) -> None:
    staging(tmp_path).stage(finished([3, 5]))
    again = staging(tmp_path)
    assert again.members == {3, 5}
    assert again.rows == {(i, 1): tiny.made()[i].row for i in (3, 5)}
    (raw,) = [bytes(raw) for _, raw in shard_files.read_members([again.location((3, 1))])]
    assert bytearray(raw) == tiny.made()[3].raw
    assert content_hash(layout_of(TINY), raw) == tiny.made()[3].row["sha256"]
    again.drop(list(again.rows))
    assert not (tmp_path / "finished").exists()


def test_killed_between_any_two_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace
    for moment in itertools.count():
        left = itertools.count()

        def killed(self: Path, target: Path, left: Iterator[int] = left, moment: int = moment) -> Path:
            if next(left) == moment:
                raise KeyboardInterrupt
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", killed)
        try:
            staging(tmp_path / str(moment)).stage(finished([0, 1]))
            break
        except KeyboardInterrupt:
            monkeypatch.setattr(Path, "replace", replace)
        again = staging(tmp_path / str(moment))
        assert again.members == set(range(moment // 3))  # three writes a member, its row the last
        assert len(list((tmp_path / str(moment) / "finished").iterdir())) == 2 * len(again.members)
    assert moment == 6


@pytest.mark.parametrize("damage", ["cut", "gone", "bit", "json", "recipe"])
def test_damage_makes_a_member_unfinished(tmp_path: Path, damage: str) -> None:
    staging(tmp_path).stage(finished([0, 1]))
    path = tmp_path / "finished" / "000001@1.json"
    (weights,) = (tmp_path / "finished").glob("000001@1-*.safetensors")
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif damage == "gone":
        weights.unlink()
    elif damage == "bit":
        content = bytearray(weights.read_bytes())
        content[-9] ^= 1
        weights.write_bytes(content)
    elif damage == "json":
        path.write_text(path.read_text()[:40])
    else:
        path.write_text(path.read_text().replace(TINY.hash, "0" * 16))
    assert staging(tmp_path, readonly=True).members == {0}
    assert path.exists()
    assert staging(tmp_path).members == {0}
    assert not list((tmp_path / "finished").glob("000001*"))


def test_snapshots_without_the_last_one_are_nothing(tmp_path: Path) -> None:
    one = tiny.made()[2]
    earlier = PackedSnapshot(one.row | {"epoch": 0, "final": False}, one.raw)
    staging(tmp_path).stage([earlier])
    assert staging(tmp_path, readonly=True).rows == {}
    staging(tmp_path).stage([one, earlier])
    assert list(staging(tmp_path).rows) == [(2, 0), (2, 1)]


def test_the_log_has_every_member_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [f.row for f in finished([0, 1, 5])]
    assert len(MemberLog(path).add(rows[:2])) == 2
    with path.open("a") as file:
        file.write('{"member": 5, "sta')  # a kill
    assert len(MemberLog(path).add(rows)) == 1
    lines = path.read_text().splitlines()
    assert lines[2] == '{"member": 5, "sta'
    found = [json.loads(line) for line in (*lines[:2], lines[3])]
    assert [line["member"] for line in found] == [0, 1, 5]
    assert found[2] == {
        "member": 5, "status": "failed", "reason": "the loss", "accuracy": None,
        "seconds": rows[2]["wall_time_s"], "time": rows[2]["created"].isoformat(),
    }  # fmt: skip


# Into shards


def test_a_shard_is_written_once_when_its_ids_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    stream = shard_files.stream_shard

    def counted(folder: Path, number: int, layout: Any, prefixes: Sequence[str], members: Any) -> Path:
        if folder.name == "tiny":
            written.append((number, len(prefixes)))
        return stream(folder, number, layout, prefixes, members)

    monkeypatch.setattr(shard_files, "stream_shard", counted)
    with training_lock(tmp_path):
        exporting = Export(TINY, tmp_path)
        for member in (0, 3, 1, 7, 2, 6, 4, 8, 5):
            add_finished(exporting, finished([member]))
        assert written == [(0, 2), (1, 2), (3, 2), (2, 1)]  # 5 failed: its shard has one
        assert exporting.staging.members == {8}
        exporting.finish()
    assert written[4:] == [(4, 1)]
    assert contents(tmp_path) == contents(stored(MEMBERS, tmp_path / "whole"))


def test_what_was_loaded_can_be_read_while_a_run_goes_on(tmp_path: Path) -> None:
    stored([0, 2, 3], tmp_path)
    before = zoo.load("tiny", source=tmp_path)
    with training_lock(tmp_path):
        exporting = Export(TINY, tmp_path)
        add_finished(exporting, finished([1]))  # replaces the shard that member 0 is in
        assert zoo.load("tiny", source=tmp_path).ids == [0, 1, 2, 3]
        assert zoo.verify(before) == []
        exporting.finish()
    assert zoo.verify(zoo.load("tiny", source=tmp_path)) == []
    assert len(list((tmp_path / "shards" / "tiny").iterdir())) == 2


def test_members_that_wait_for_their_shard_are_not_trained_again(tmp_path: Path) -> None:
    stored([0, 1, 4], tmp_path, seal=False)
    assert zoo.load("tiny", source=tmp_path).ids == [0, 1]
    said: list[str] = []
    assert train_into(TINY, [0, 1, 4], tmp_path, say=said.append) == 0
    assert said == [f"tiny: 3 of these members are in {tmp_path} already"]
    assert zoo.load("tiny", source=tmp_path).ids == [0, 1, 4]


def test_stacks_that_were_begun_go_on_as_they_were(tmp_path: Path) -> None:
    for stack in ((0, 1, 2), (6, 7, 8)):
        train_state(tmp_path / state_file_name(stack), stack)
    assert divide_into_stacks(tmp_path, TINY, [2, 3, 4, 5, 6]) == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert divide_into_stacks(tmp_path, TINY, [3, 4, 5, 9]) == [(3, 4, 5), (9,)]


def train_state(path: Path, stack: tuple[int, ...]) -> None:
    from checkpoints_zoo import images

    population.train_stack(TINY, stack, images.load("digits", "train"), path)


# By engines

FILE = """
import multiprocessing, os, signal
from dataclasses import replace
from pathlib import Path
from torch import nn
from checkpoints_zoo.training.recipes import convnet_digits

DIED = Path(__file__).with_name("died")

def build(width):
    if multiprocessing.parent_process() is not None and not DIED.exists():
        DIED.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # as when memory runs out
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

RECIPE = replace(convnet_digits(), name="mine", architecture="mine", arguments={"width": 7}, build=build, epochs=1,
                 batch_size=250, stack_width=2, snapshots=(0,))
"""


@pytest.mark.slow
def test_workers_give_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    """A recipe of the user's own file, with a snapshot a member; one worker is killed."""
    (tmp_path / "mine.py").write_text(FILE)
    recipe = recipe_files.read_recipe(str(tmp_path / "mine.py"))
    forks()
    said: list[str] = []
    logged: list[str] = []
    train_into(recipe, [0, 1, 2, 3, 4], tmp_path / "one")
    train_into(
        recipe,
        [0, 1, 2, 3, 4],
        tmp_path / "two",
        Processes(2, start="forkserver", say=said.append),
        said.append,
        log=logged.append,
    )
    one, two = (zoo.load("mine", source=tmp_path / out, snapshots=True) for out in ("one", "two"))
    assert one._snapshot_keys == two._snapshot_keys == [(i, epoch) for i in range(5) for epoch in (0, 1)]
    times = ["created", "wall_time_s"]
    assert one.rows.drop_columns(times).equals(two.rows.drop_columns(times))
    shards = [sorted(p.name for p in (tmp_path / out / "shards" / "mine").iterdir()) for out in ("one", "two")]
    assert shards[0] == shards[1]  # named by their content
    assert any(" was ended by signal 9 in job members " in line for line in said)
    assert said[-1].startswith("mine: 5 of 5 members, ")
    assert "0 s left, mean test accuracy 0." in said[-1]
    assert sorted(json.loads(line)["member"] for line in logged) == [0, 1, 2, 3, 4]


def test_another_file_on_a_node_is_refused(tmp_path: Path) -> None:
    from checkpoints_zoo.training.sent_recipes import rebuild_recipe, serialize_recipe

    (tmp_path / "mine.py").write_text(FILE)
    there = serialize_recipe(recipe_files.read_recipe(str(tmp_path / "mine.py")))
    assert rebuild_recipe(there).hash == there.hash
    other = dataclasses.replace(there, hash="0" * 16)
    with pytest.raises(UsageError, match=rf"recipe 'mine': expected hash 0{{16}}, .*; found hash {there.hash}\. Put"):
        rebuild_recipe(other)
    gone = dataclasses.replace(there, functions={"build": (str(tmp_path / "gone.py"), "gone", "build")})
    with pytest.raises(UsageError, match=r"found no such file\. Put the same file .*gone\.py onto every node\."):
        rebuild_recipe(gone)


def test_an_error_leaves_what_finished(tmp_path: Path) -> None:
    class Broken:
        """Ends with an error once a stack has finished."""

        device = "cpu"

        def run(self, work: Any, jobs: Any) -> Any:
            yield from itertools.islice(InProcess().run(work, jobs), 1)
            raise UsageError("job 2", expected="another")

    with pytest.raises(UsageError, match="job 2"):
        train_into(TINY, range(6), tmp_path, Broken())
    assert train_into(TINY, range(3), tmp_path) == 0
    assert zoo.load("tiny", source=tmp_path).ids == [0, 1, 2]
