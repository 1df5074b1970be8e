"""Module paths of 0.1 can be imported, warn, and give the modules that are there now."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo._moved import MOVED
from checkpoints_zoo.training.pickling import rebuild_recipe, serialize_recipe
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import read_recipe

ROOT = Path(__file__).resolve().parents[2]

# What the documents of 0.1 import: `git show 47a0031:README.md`, docs/.
TAUGHT = {
    "checkpoints_zoo.architectures": "build",
    "checkpoints_zoo.methods.searching": "search",
    "checkpoints_zoo.metrics": "accuracy",
}
OLD_RECIPE = """
import dataclasses

from training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits

assert Recipe is type(convnet_digits())
RECIPE = dataclasses.replace(convnet_digits(), name="old", members=2)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the clone."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def not_imported() -> None:
    for old in (*MOVED, "training.recipe"):
        sys.modules.pop(old, None)


@pytest.mark.parametrize("old", TAUGHT)
def test_an_old_path_warns_and_gives_the_module_that_is_there_now(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"^{old} is {MOVED[old]} now; the old path goes in 0.3$") as caught:
        module = import_module(old)
    assert module is import_module(MOVED[old])
    assert hasattr(module, TAUGHT[old])
    assert caught[0].filename.endswith("importlib/__init__.py")  # who imports it, not the shim


def test_every_old_path_is_tried() -> None:
    assert MOVED.keys() == TAUGHT.keys()


@pytest.mark.slow
def test_names_of_the_package_that_moved_do_not_warn() -> None:
    code = "import checkpoints_zoo as zoo; from checkpoints_zoo import metrics; assert zoo.metrics is metrics"
    assert python("-W", "error::DeprecationWarning:__main__", "-c", code).returncode == 0


def test_training_recipe_gives_the_same_class_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"^training\.recipe is checkpoints_zoo\.training\.recipe now"):
        assert import_module("training.recipe").Recipe is Recipe


@pytest.mark.slow
def test_an_old_recipe_file_loads_where_warnings_are_errors_and_is_sent_to_workers(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text(OLD_RECIPE)
    found = read_recipe(str(path))
    assert type(found) is Recipe
    sys.modules.pop("training.recipe")
    assert rebuild_recipe(serialize_recipe(found)).hash == found.hash
    done = python("-W", "error", "-m", "training", str(path), "--list")
    assert done.returncode == 0, done.stderr
    assert "old" in done.stdout


def test_training_in_the_clone_is_the_command_of_the_package() -> None:
    here, package = python("-m", "training", "--help"), python("-m", "checkpoints_zoo.cli.train", "--help")
    assert (here.returncode, here.stdout) == (0, package.stdout)


def test_barriers_is_barrier_and_warns() -> None:
    members = zoo.load("convnet-digits", n=2)
    with pytest.warns(
        DeprecationWarning, match="^zoo.barriers is zoo.barrier from version 0.2 on, and goes in the next"
    ):
        lines = zoo.barriers(members, "digits", points=2)
    assert lines.losses.equal(zoo.barrier(members, data="digits", points=2).losses)


def test_compare_compact_is_compact_and_warns() -> None:
    members = zoo.load("convnet-digits", n=4)
    options = {"samples": 1, "splits": 2}
    with pytest.warns(DeprecationWarning, match="^zoo.compare_compact is zoo.compact from version 0.2 on, and goes in"):
        table = zoo.compare_compact(members[:2], members[2:], **options)
    assert table == zoo.compact(members[2:], against=members[:2], **options)
