"""Recipes whose members have settings of their own: drawn by seed, used in training, written into rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.population import Progress, train_stack
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import check_changes, vary_recipe
from checkpoints_zoo.training.recipes import convnet_digits, convnet_digits_varied, recipe_from_options
from checkpoints_zoo.training.retrain import retrain
from checkpoints_zoo.training.sent_recipes import rebuild_recipe, serialize_recipe
from tests.support.tiny import TINY, contents, no_waiting_for_the_disk  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
VALUES: dict[str, tuple[Any, ...]] = {
    "lr": (0.01, 0.05), "momentum": (0.0, 0.5, 0.9), "weight_decay": (0.0, 1e-3), "batch_size": (150, 250),
    "optimizer": ("sgd", "adam"), "schedule": ("constant", "cosine"), "augmentation": ("none", "shift1"),
}  # fmt: skip
VARIED = dataclasses.replace(TINY, stack_width=1, epochs=2, snapshots=(1,), varied=VALUES)


def value_by_hand(field: str, member: int, values: tuple[Any, ...]) -> object:
    """Choose a member's value by the rule as the docstring states it."""
    digest = hashlib.sha256(f"varied {field}|{member}".encode()).hexdigest()
    return values[int(digest[:8], 16) % 2**31 % len(values)]


@pytest.mark.parametrize("recipe", [VARIED, convnet_digits_varied()], ids=lambda recipe: recipe.name)
def test_a_value_depends_on_the_seed_and_the_list(recipe: Recipe) -> None:
    for member in range(60):
        of_member = recipe.of_member(member)
        values = {field: value_by_hand(field, member, listed) for field, listed in recipe.varied.items()}
        assert of_member == dataclasses.replace(recipe, varied={}, **values)  # type: ignore[arg-type]
    for field, listed in recipe.varied.items():
        assert {getattr(recipe.of_member(member), field) for member in range(60)} == set(listed), field


def test_a_recipe_without_varied_fields_is_every_members() -> None:
    assert TINY.of_member(3) is TINY
    assert "varied" not in TINY.to_json()


def test_values_and_their_order_are_in_the_hash() -> None:
    recipes = [
        TINY,
        *(
            dataclasses.replace(TINY, stack_width=1, varied=varied)
            for varied in ({}, {"lr": (0.1,)}, {"lr": (0.1, 0.2)}, {"lr": (0.2, 0.1)}, {"momentum": (0.1, 0.2)})
        ),
    ]
    assert len({recipe.hash for recipe in recipes}) == len(recipes)
    json.dumps(VARIED.to_json())


def test_a_varied_recipe_reaches_other_processes() -> None:
    sent = rebuild_recipe(pickle.loads(pickle.dumps(serialize_recipe(VARIED))))  # noqa: S301 (made here)
    assert sent == VARIED
    assert sent.hash == VARIED.hash


@pytest.mark.slow
def test_a_member_is_trained_like_one_of_a_plain_recipe() -> None:
    data = images.load("digits", "train")
    for member in (0, 1, 2):
        values = {field: value_by_hand(field, member, listed) for field, listed in VALUES.items()}
        plain = dataclasses.replace(TINY, stack_width=1, epochs=2, **values)  # type: ignore[arg-type]
        [varied_member] = train_stack(VARIED, (member,), data)
        [plain_member] = train_stack(plain, (member,), data)
        assert all(torch.equal(varied_member.state[name], tensor) for name, tensor in plain_member.state.items())
        assert varied_member.train_loss == plain_member.train_loss


@pytest.mark.slow
def test_a_killed_run_ends_like_a_whole_one_and_rows_hold_the_values(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_into(VARIED, range(3), whole)

    def interrupt(progress: Progress) -> None:
        if (progress.members, progress.epoch) == ((1,), 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_into(VARIED, range(3), killed, progress=interrupt)
    seen: list[tuple[tuple[int, ...], int]] = []
    train_into(VARIED, range(3), killed, progress=lambda progress: seen.append((progress.members, progress.epoch)))
    assert seen == [((1,), 2), ((2,), 1), ((2,), 2)]
    assert contents(killed) == contents(whole)

    members = zoo.load("tiny", source=whole, snapshots=True)
    rows = members.rows.to_pylist()
    assert [(row["member"], row["epoch"]) for row in rows] == [(m, e) for m in range(3) for e in (1, 2)]
    for row in rows:
        assert {field: row[field] for field in VALUES} == {
            field: value_by_hand(field, row["member"], listed) for field, listed in VALUES.items()
        }
        assert (row["recipe"], row["recipe_hash"], row["stack_width"]) == ("tiny", VARIED.hash, 1)
    assert zoo.verify(members) == []
    results = retrain(members, 3, VARIED)
    assert [(result.member, result.compared, result.same) for result in results] == [
        (member, "bytes", True) for member in range(3)
    ]


def test_lists_from_the_command_line() -> None:
    changes = ["stack_width=1", "varied.lr=[0.1, 0.2]", 'varied.optimizer=["sgd","adam"]']
    made = recipe_from_options("convnet-digits", tuple(changes), "mine")
    assert made.varied == {"lr": (0.1, 0.2), "optimizer": ("sgd", "adam")}
    assert made.made_from == 'convnet-digits stack_width=1 varied.lr=[0.1,0.2] varied.optimizer=["sgd","adam"]'
    assert vary_recipe(convnet_digits(), made.made_from.split(" ")[1:]).hash == made.hash
    fixed = vary_recipe(made, ["varied.lr=[0.1]"])
    assert {fixed.of_member(member).lr for member in range(9)} == {0.1}
    with pytest.raises(UsageError, match=r"--set varied.lr=\[0.1,0.2\]: expected another value than the recipe's"):
        check_changes(made, ["varied.lr=[0.1,0.2]"])
    with pytest.raises(UsageError) as error:
        vary_recipe(made, ["lr=0.3"])
    assert str(error.value) == (
        "field 'lr' of recipe 'mine': expected a field with one value for all members; found one that `varied` sets to"
        " 0.1, 0.2. Set varied.lr=[VALUE]."
    )


@pytest.mark.parametrize(
    ("varied", "text"),
    [
        ({"epochs": (1, 2)}, "varied.epochs of recipe 'tiny': expected one of the fields optimizer, lr, momentum,"
         " weight_decay, batch_size, schedule, augmentation; found 'epochs'."),
        ({"lr": ()}, "varied.lr of recipe 'tiny': expected a tuple of one or more values; found ()."),
        ({"lr": 0.1}, "varied.lr of recipe 'tiny': expected a tuple of one or more values; found 0.1."),
        ({"lr": (0.1, -1.0)}, "varied.lr of recipe 'tiny': expected values for this field; found -1.0: lr of recipe"
         " 'tiny': expected a float in [0, inf); found -1.0."),
        ({"batch_size": (32, 0)}, "varied.batch_size of recipe 'tiny': expected values for this field; found 0:"
         " batch_size of recipe 'tiny': expected a whole number from 1 to 1,000,000; found 0."),
        ({"schedule": ("multistep",)}, "varied.schedule of recipe 'tiny': expected values for this field; found"
         " 'multistep': milestones of recipe 'tiny': expected epochs with cosine-restarts and multistep alone; found"
         " ()."),
        ({"augmentation": ("blur",)}, "varied.augmentation of recipe 'tiny': expected values for this field; found"
         " 'blur': augmentation of recipe 'tiny': expected one of none, "),
    ],
)  # fmt: skip
def test_what_can_not_be_varied(varied: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        dataclasses.replace(TINY, stack_width=1, varied=varied)
    assert str(error.value).startswith(text)


def test_members_of_a_stack_and_posteriors_have_one_recipe() -> None:
    with pytest.raises(UsageError) as error:
        dataclasses.replace(TINY, varied={"lr": (0.1, 0.2)})
    assert str(error.value) == (
        "stack_width of recipe 'tiny': expected 1 with `varied`: the members of a stack have one learning rate, and the"
        " like; found 3. Set stack_width to 1."
    )
    with pytest.raises(UsageError, match=r"^varied of recipe 'tiny': expected no varied fields.*; found lr\. Take the"):
        Problem.of(dataclasses.replace(TINY, stack_width=1, varied={"lr": (0.1, 0.2)}))
