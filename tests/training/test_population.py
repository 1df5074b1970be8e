"""Populations: stacks, saved states, and runs that are cut short, refused or damaged."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_zoo.errors import LockedError, UsageError
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training import population
from checkpoints_zoo.training.loop import StackState, initial_state
from checkpoints_zoo.training.population import Progress, TrainedMember, train_members
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import resnet8_digits
from checkpoints_zoo.training.state import training_lock
from tests.support.tiny import LOCK
from tests.training.test_training import SMALL, assert_identical

SMALL_RESNET = dataclasses.replace(
    resnet8_digits(), name="small", batch_size=200, stack_width=2, epochs=2, save_every=1
)


@dataclasses.dataclass
class Run:
    """What a run gave to `finish`, by id, and the epochs it trained."""

    trained: dict[int, TrainedMember] = dataclasses.field(default_factory=dict)
    epochs: list[int] = dataclasses.field(default_factory=list)


def run(out: Path, ids: list[int], recipe: Recipe = SMALL, stop_after: int | None = None) -> Run:
    """Train; `stop_after` an epoch stands for a kill."""
    result = Run()

    def watch(progress: Progress) -> None:
        result.epochs.append(progress.epoch)
        if progress.epoch == stop_after:
            raise KeyboardInterrupt

    try:
        train_members(recipe, ids, out, lambda stack: result.trained.update({m.member: m for m in stack}), watch)
    except KeyboardInterrupt:
        assert result.trained == {}
    return result


def state_files(out: Path) -> list[Path]:
    return sorted((out / ".training" / "small").glob("*.safetensors*"))


@pytest.mark.slow
def test_population_in_stacks(tmp_path: Path) -> None:
    six = run(tmp_path / "a", [0, 1, 2, 3, 4, 5])
    assert six.epochs == [1, 2, 3] * 2
    all_six = six.trained
    assert list(all_six) == [0, 1, 2, 3, 4, 5]
    alone = run(tmp_path / "b", [4]).trained
    assert list(alone) == [4]
    assert_identical(all_six[4].state, alone[4].state)
    member = alone[4]
    assert (member.seed, member.status, member.reason) == (4, "ok", "")
    assert member.train_loss == all_six[4].train_loss > 0
    assert member.wall_time_s > 0
    template = build_architecture("convnet").state_dict()
    assert {n: t.shape for n, t in member.state.items()} == {n: t.shape for n, t in template.items()}
    assert state_files(tmp_path / "a") == []


@pytest.mark.slow
def test_state_has_statistics_but_no_counters(tmp_path: Path) -> None:
    names = list(run(tmp_path, [0], dataclasses.replace(SMALL_RESNET, epochs=1)).trained[0].state)
    assert names == [n for n in build_architecture("resnet8").state_dict() if not n.endswith("_tracked")]
    assert "bn1.running_var" in names


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [1, 2])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_cut_short_and_gone_on_with_is_never_cut_short(tmp_path: Path, save_every: int, stop_after: int) -> None:
    recipe = dataclasses.replace(SMALL, save_every=save_every)
    whole = run(tmp_path / "whole", [0, 1, 7], recipe).trained
    run(tmp_path / "cut", [0, 1, 7], recipe, stop_after)
    saved = 3 if stop_after == 3 else stop_after // save_every * save_every
    resumed = run(tmp_path / "cut", [0, 1, 7], recipe)
    assert resumed.epochs == list(range(saved + 1, 4))
    assert list(resumed.trained) == [0, 1, 7]
    for member, trained in resumed.trained.items():
        assert_identical(whole[member].state, trained.state)
        assert whole[member].train_loss == trained.train_loss


@pytest.mark.slow
def test_batch_norm_run_cut_short(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", [0, 1], SMALL_RESNET).trained
    run(tmp_path / "cut", [0, 1], SMALL_RESNET, stop_after=1)
    resumed = run(tmp_path / "cut", [0, 1], SMALL_RESNET)
    assert resumed.epochs == [2]
    for member in (0, 1):
        assert_identical(whole[member].state, resumed.trained[member].state)


@pytest.mark.slow
def test_kill_around_finish_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    def killed(_: list[TrainedMember]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_members(SMALL, [0, 1], tmp_path, killed)
    (state,) = state_files(tmp_path)
    # The kill came before finish had stored anything: no epoch is trained again.
    content = state.read_bytes()
    again = run(tmp_path, [0, 1])
    assert list(again.trained) == [0, 1]
    assert again.epochs == []
    # It came after: the caller asks for other members, and the complete state goes.
    state.write_bytes(content)
    run(tmp_path, [2])
    assert state_files(tmp_path) == []


@pytest.mark.slow
def test_unfinished_state_of_other_members_stays(tmp_path: Path) -> None:
    run(tmp_path, [0, 1], stop_after=1)
    (state,) = state_files(tmp_path)
    run(tmp_path, [5])
    assert state_files(tmp_path) == [state]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "shape"])
def test_damaged_state_is_dropped_with_a_note(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(tmp_path / "whole", [0])
    run(tmp_path / "cut", [0], stop_after=2)
    (state,) = state_files(tmp_path / "cut")
    content = bytearray(state.read_bytes())
    if damage == "cut":
        state.write_bytes(content[:-100])
    elif damage == "empty":
        state.write_bytes(b"")
    elif damage == "bit":
        content[-50] ^= 1
        state.write_bytes(content)
    else:
        other = dataclasses.replace(SMALL, arguments={"channels": 1, "classes": 11})
        run(tmp_path / "other", [0], other, stop_after=2)
        state.write_bytes(state_files(tmp_path / "other")[0].read_bytes())
    resumed = run(tmp_path / "cut", [0])
    assert resumed.epochs == [1, 2, 3]
    assert_identical(whole.trained[0].state, resumed.trained[0].state)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"training state {state.name}: expected ")
    assert captured.err.endswith(" The state is deleted, and its members are trained from the start.\n")


def test_half_written_state_is_ignored(tmp_path: Path) -> None:
    run(tmp_path, [0], stop_after=1)
    (state,) = state_files(tmp_path)
    state.with_name(state.name + ".partial").write_bytes(b"half")
    state.with_name(".description.json.0123abcd.tmp").write_bytes(b"half")
    assert run(tmp_path, [0]).epochs == [2, 3]
    assert [path.name for path in state.parent.iterdir()] == ["recipe.json"]


def test_failed_member_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(recipe: Recipe, members: list[int]) -> StackState:
        state = initial_state(recipe, members)
        state.params["fc2.bias"][1, 0] = float("nan")
        return state

    recipe = dataclasses.replace(SMALL, epochs=1)
    sound = run(tmp_path / "a", [0, 1, 2], recipe).trained
    monkeypatch.setattr(population, "initial_state", poisoned)
    trained = run(tmp_path / "b", [0, 1, 2], recipe).trained
    assert [trained[member].status for member in trained] == ["ok", "failed", "ok"]
    assert trained[1].reason == "the loss was not finite at step 0 (epoch 0)"
    for member in (0, 2):
        assert_identical(sound[member].state, trained[member].state)


def test_too_large_a_learning_rate_fails(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, epochs=1, lr=1e30)
    assert {member.status for member in run(tmp_path, [0, 1], recipe).trained.values()} == {"failed"}


def test_changed_recipe_is_refused(tmp_path: Path) -> None:
    run(tmp_path, [0], stop_after=1)
    changed = dataclasses.replace(SMALL, lr=0.01)
    with pytest.raises(UsageError) as error:
        run(tmp_path, [0], changed)
    assert str(error.value) == (
        f"folder {tmp_path}: expected members of recipe 'small' with hash {changed.hash};"
        f" found hash {SMALL.hash}: the recipe has changed since it was trained here."
        " Give another folder, or name the changed recipe differently."
    )
    save_less = dataclasses.replace(SMALL, save_every=3)  # decides no bytes
    assert run(tmp_path, [0], save_less).epochs == [2, 3]


@pytest.mark.slow
def test_second_process_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(LockedError) as error:
            run(tmp_path, [0])
        other.kill()
    assert str(error.value) == (
        f"folder {tmp_path}: expected no other process training into it;"
        f" found a lock on {tmp_path / '.training' / 'lock'}."
        " Wait until the other run ends, or give another folder."
    )
    with training_lock(tmp_path):
        pass  # the lock went with the process


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([-1], "member -1: expected an id in [0, 2^31); found -1."),
        ([2**31], "member 2147483648: expected an id in [0, 2^31); found 2147483648."),
        ([3, 4, 3], "ids: expected each once; found member 3 more than once."),
    ],
)
def test_ids_that_can_not_be(tmp_path: Path, ids: list[int], text: str) -> None:
    with pytest.raises(UsageError) as error:
        run(tmp_path, ids)
    assert str(error.value) == text
