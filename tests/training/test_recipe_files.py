"""Variants of recipes by text, and recipes from a user's own file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import is_recipe_file, read_recipe, read_recipes, vary_recipe
from checkpoints_zoo.training.recipes import RECIPES, convnet_digits, recipe_from_options, resnet8_digits


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("lr=0.1", "lr", 0.1),
        ("lr=1", "lr", 1.0),
        ("epochs=5", "epochs", 5),
        ("nesterov=true", "nesterov", True),
        ("nesterov=False", "nesterov", False),
        ("init_seed=3", "init_seed", 3),
        ("init_seed=none", "init_seed", None),
        ("snapshots=0,5,10", "snapshots", (0, 5, 10)),
        ("snapshots=none", "snapshots", ()),
        ("augmentation=shift1", "augmentation", "shift1"),
        ("title=Two words", "title", "Two words"),
        ("arguments.classes=9", "arguments", {"channels": 1, "classes": 9}),
    ],
)
def test_fields_are_set_in_their_types(text: str, field: str, value: Any) -> None:
    recipe = convnet_digits()
    made = vary_recipe(recipe, [text])
    assert getattr(made, field) == value
    assert type(getattr(made, field)) is type(value) or field == "arguments"
    same = dataclasses.replace(recipe, **{field: value})
    assert made.hash == same.hash
    assert made == dataclasses.replace(same, made_from=made.made_from)


def test_what_was_set_is_written_down_once() -> None:
    recipe = convnet_digits()
    made = vary_recipe(recipe, ["lr=0.1", "epochs=5", "title=Mine", "save_every=1"])
    assert made.made_from == "convnet-digits epochs=5 lr=0.1"  # what decides the members, in order
    assert vary_recipe(made, ["lr=0.2", "nesterov=true"]).made_from == "convnet-digits epochs=5 lr=0.2 nesterov=true"
    assert vary_recipe(recipe, ["epochs=5", "lr=0.1"]).made_from == made.made_from
    assert vary_recipe(recipe, ["schedule=multistep", "milestones=3,5"]).made_from == (
        "convnet-digits milestones=3,5 schedule=multistep"
    )
    assert vary_recipe(recipe, ["arguments.classes=9"]).made_from == "convnet-digits arguments.classes=9"
    assert vary_recipe(recipe, ["save_every=1"]).made_from == "convnet-digits"
    wide = vary_recipe(resnet8_digits(), ["arguments.widths=[4, 8, 8]"])
    assert wide.made_from == "resnet8-digits arguments.widths=[4,8,8]"
    text = dataclasses.replace(recipe, build=nn.Module, architecture="mine", arguments={})
    assert vary_recipe(text, ['arguments.kind="a b"']).made_from == 'convnet-digits arguments.kind="a\\u0020b"'


@given(lr=st.floats(1e-9, 1e3), epochs=st.integers(1, 10**6), smooth=st.floats(0, 0.99), flag=st.booleans())
def test_variants_are_made_again_from_what_was_written_down(lr: float, epochs: int, smooth: float, flag: bool) -> None:
    set_ = [f"lr={lr!r}", f"epochs={epochs}", f"label_smoothing={smooth!r}", f"nesterov={flag}"]
    made = vary_recipe(convnet_digits(), set_)
    name, *settings = made.made_from.split(" ")
    assert vary_recipe(RECIPES[name](), settings).hash == made.hash


@pytest.mark.parametrize(
    "recipe",
    [
        vary_recipe(resnet8_digits(), ["arguments.widths=[4,8,8]", "snapshots=0,3"]),
        recipe_from_options("convnet-digits", ("lr=0.1",), "mine", 9, 5),
        recipe_from_options("convnet-digits", (), None, 9),
    ],
)
def test_what_a_row_says_makes_the_recipe_again(recipe: Recipe) -> None:
    name, *settings = recipe.made_from.split(" ")
    assert recipe_from_options(name, tuple(settings)).hash == recipe.hash


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("lr", "change 'lr': expected FIELD=VALUE, as in lr=0.05; found no '='."),
        ("epochs=1.5", "field 'epochs' of a recipe: expected a whole number; found '1.5'."),
        ("lr=fast", "field 'lr' of a recipe: expected a number; found 'fast'."),
        ("nesterov=1", "field 'nesterov' of a recipe: expected true or false; found '1'."),
        ("init_seed=x", "field 'init_seed' of a recipe: expected a whole number or none; found 'x'."),
        ("snapshots=a", "field 'snapshots' of a recipe: expected whole numbers between commas, or none; found 'a'."),
        ("arguments.classes=ten", "field 'arguments.classes' of a recipe: expected a JSON value; found 'ten'."),
        ("lr=-1", "lr of recipe 'convnet-digits': expected a float in [0, inf); found -1.0."),
        ("name=Upper", "collection name 'Upper': expected lower-case letters, digits, '.', '_' and '-', at most 96 of"
         " them."),
    ],
)  # fmt: skip
def test_changes_that_can_not_be(change: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        vary_recipe(convnet_digits(), [change])
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("learning_rate", "lr"), ("epoch", "epochs"), ("wd", "weight_decay"), ("batchsize", "batch_size"), ("build", "")],
)
def test_an_unknown_field_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^field '{wrong}' of a recipe: expected one of name, .*; found no such"
    ) as e:
        vary_recipe(convnet_digits(), [f"{wrong}=1"])
    assert str(e.value).endswith(f"Did you mean {nearest}?") or not nearest


FILE = """
from dataclasses import dataclass, replace
from torch import nn
from checkpoints_zoo.training.recipes import convnet_digits

@dataclass
class Widths:
    hidden: int

def build(width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, Widths(width).hidden), nn.ReLU(), nn.Linear(width, 10))

MINE = replace(
    convnet_digits(), name="mine", title="Mine", architecture="perceptron", arguments={"width": 12}, build=build,
    epochs=2, batch_size=200, stack_width=3, members=5,
)
"""


def written(folder: Path, tail: str, name: str = "own.py") -> Path:
    path = folder / name
    path.write_text(FILE + tail)
    return path


@pytest.mark.parametrize("tail", ["RECIPE = MINE", "def RECIPE():\n    return MINE", "RECIPES = {'mine': MINE}"])
def test_a_file_with_one_recipe(tmp_path: Path, tail: str) -> None:
    path = written(tmp_path, tail)
    recipe = read_recipe(str(path))
    assert (recipe.name, recipe.architecture, recipe.members) == ("mine", "perceptron", 5)
    assert sum(p.numel() for p in recipe.module().parameters()) == 64 * 12 + 12 + 12 * 10 + 10
    assert read_recipe(str(path)).hash == recipe.hash
    json.dumps(recipe.to_json())


def test_a_file_with_several(tmp_path: Path) -> None:
    path = written(tmp_path, "RECIPES = {'one': MINE, 'two': lambda: replace(MINE, lr=0.2)}")
    assert read_recipe(f"{path}:two").lr == 0.2
    assert list(read_recipes(path)) == ["one", "two"]
    for wrong, found in (("", "no name"), (":three", "'three'")):
        with pytest.raises(UsageError) as error:
            read_recipe(f"{path}{wrong}")
        assert str(error.value) == (
            f"recipe file {path}: expected {path}:NAME, with one of the names one, two; found {found}."
        )
    assert is_recipe_file(str(path))
    assert is_recipe_file(f"{path}:two")
    assert not is_recipe_file("convnet-digits")


def test_the_hash_covers_the_file(tmp_path: Path) -> None:
    hashes = set()
    for i, text in enumerate((FILE, FILE.replace("ReLU", "GELU"), FILE + "# a comment\n")):
        path = tmp_path / f"{i}.py"
        path.write_text(text + "RECIPE = MINE")
        hashes.add(read_recipe(str(path)).hash)
    assert len(hashes) == 3
    moved = written(tmp_path, "RECIPE = MINE", "moved.py")
    assert read_recipe(str(moved)).hash in hashes  # where it lies doesn't count


@pytest.mark.parametrize(
    ("tail", "found"), [("", "neither"), ("RECIPE = 3", "3"), ("RECIPES = {}", "neither"), ("RECIPES = 'x'", "'x'")]
)
def test_files_without_recipes(tmp_path: Path, tail: str, found: str) -> None:
    path = written(tmp_path, tail)
    with pytest.raises(UsageError) as error:
        read_recipe(str(path))
    assert str(error.value) == (
        f"recipe file {path}: expected RECIPE, a Recipe or a function that returns one; or RECIPES, a dict of these by"
        f" name; found {found}."
    )
    with pytest.raises(UsageError, match=r"recipe file .*none.py: expected a Python file; found no such file\."):
        read_recipe(str(tmp_path / "none.py"))


def test_a_build_without_a_file_is_refused() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def build(): return None", "<typed in>", "exec"), scope)
    recipe = dataclasses.replace(convnet_digits(), build=scope["build"], architecture="typed")
    with pytest.raises(
        UsageError, match=r"function `build` of recipe 'convnet-digits': expected a function or class written in"
    ):
        recipe.to_json()
    with pytest.raises(UsageError) as error:
        recipe.module()
    assert str(error.value) == (
        "arguments of recipe 'convnet-digits': expected what build() takes; found {'channels': 1, 'classes': 10}:"
        " got an unexpected keyword argument 'channels'."
    )
    with pytest.raises(UsageError, match=r"expected a function that returns a torch.nn.Module .*; found None\."):
        dataclasses.replace(recipe, arguments={}).module()


def test_names_and_variants_from_the_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "RECIPE = MINE")
    made = recipe_from_options(str(path), ("lr=0.2",), "theirs")
    assert (made.name, made.made_from, made.lr) == ("theirs", "mine lr=0.2", 0.2)
    assert recipe_from_options("convnet-digits").made_from == ""
    assert recipe_from_options("convnet-digits", (), "other").made_from == "convnet-digits"
    permuted = recipe_from_options("convnet-digits", (), None, 9, 5)
    assert (permuted.name, permuted.init_permutation, permuted.init_seed) == ("convnet-digits-from-5-permuted-9", 9, 5)


def test_the_list(tmp_path: Path) -> None:
    listed = CliRunner().invoke(main, ["recipes"]).stdout.splitlines()
    assert listed[0].split() == ["recipe", "members", "architecture", "data", "epochs", "at", "once", "precision"]
    assert [line.split()[0] for line in listed[1:]] == list(RECIPES)
    assert "9,216  resnet18           cifar100           75" in "\n".join(listed)
    path = written(tmp_path, "RECIPES = {'one': MINE, 'two': replace(MINE, name='two')}")
    assert [line.split()[:3] for line in CliRunner().invoke(main, ["recipes", str(path)]).stdout.splitlines()[1:]] == [
        ["one", "5", "perceptron"], ["two", "5", "perceptron"],
    ]  # fmt: skip


def test_an_own_architecture_from_file_to_source(tmp_path: Path) -> None:
    path, out = written(tmp_path, "RECIPE = MINE"), tmp_path / "out"
    command = ["train", str(path), "--members", "0-3", "--out", str(out), "--set", "epochs=1", "--set", "snapshots=0"]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    build = read_recipe(str(path)).module
    members = zoo.load("mine", source=out, architecture=build)
    assert members.ids == [0, 1, 2, 3]
    rows = members.rows.to_pylist()
    assert {r["recipe"] for r in rows} == {"mine epochs=1 snapshots=0"}
    assert {r["recipe_hash"] for r in rows} == {vary_recipe(read_recipe(str(path)), ["epochs=1", "snapshots=0"]).hash}
    assert members.description.architecture == "perceptron"
    everything = zoo.load("mine", source=out, architecture=build, snapshots=True)
    assert [(r["member"], r["epoch"], r["final"]) for r in everything.rows.to_pylist()] == [
        (member, epoch, epoch == 1) for member in range(4) for epoch in (0, 1)
    ]
    assert zoo.verify(everything, sample=8) == []
    assert zoo.load("mine", source=out, members="2@0", architecture=build)[0].epoch == 0
    refused = CliRunner().invoke(main, command[:-2])
    assert refused.exit_code == 2
    assert "Give another folder, or name the changed recipe differently." in refused.stderr
