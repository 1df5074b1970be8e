"""A user's files in other processes: found where they are imported already, run again only where they aren't."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training import recipe_files
from checkpoints_zoo.training.recipe import run_module
from checkpoints_zoo.training.sent_recipes import SentRecipe, Skeleton, rebuild_recipe, serialize_recipe

FILE = """
from dataclasses import replace
from pathlib import Path
from torch import nn
from checkpoints_zoo.training.recipes import convnet_digits

with Path(__file__).with_name("runs").open("a") as file:
    file.write(f"{__name__}\\n")

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

RECIPE = replace(convnet_digits(), name="mine", architecture="mine", arguments={}, build=build)

if __name__ == "__main__":
    raise RuntimeError("the script runs again")
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's file; what is imported meanwhile is forgotten."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def of_script(path: Path, spelt: Path) -> SentRecipe:
    """What comes from a script whose recipe stands in itself."""
    there = serialize_recipe(recipe_files.read_recipe(str(path)))
    path.with_name("runs").unlink()
    return SentRecipe(there.values, there.hash, {"build": (str(spelt), "__main__", "build")})


def script(name: str, file: Path) -> ModuleType:
    """A script as a process knows it."""
    module = ModuleType(name)
    module.__file__ = str(file)
    exec(compile(FILE.split("\nif ")[0], str(file), "exec"), module.__dict__)
    file.resolve().with_name("runs").unlink()
    return module


def test_a_script_is_never_run_as_one_again(path: Path) -> None:
    """As on Ray, where the process has a main module of its own."""
    there, main = of_script(path, path), sys.modules["__main__"]
    assert rebuild_recipe(there).build is rebuild_recipe(there).build is not None
    assert path.with_name("runs").read_text() == "__mp_main__\n"
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_a_script_that_is_imported_is_found_however_its_path_is_spelt(name: str, path: Path) -> None:
    (path.parent / "a").mkdir()
    spelt = path.parent / "a" / ".." / "mine.py"
    there = of_script(path, spelt)
    for file in (path, spelt):
        sys.modules[name] = module = script(name, file)
        assert rebuild_recipe(there).build is module.build
    assert not path.with_name("runs").exists()


def test_a_file_that_does_not_run_is_not_imported(tmp_path: Path, path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('a mistake')")
    with pytest.raises(ValueError, match="a mistake"):
        run_module(broken, "theirs")
    assert "theirs" not in sys.modules
    whole = run_module(path, "theirs")
    with pytest.raises(ValueError, match="a mistake"):
        run_module(broken, "theirs")
    assert sys.modules["theirs"] is whole


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe file .*/mine\.txt: expected a Python file; found another one\."):
        run_module(tmp_path / "mine.txt", "theirs")


def test_what_builds_a_network_of_ones_own_goes_to_other_processes(path: Path) -> None:
    """As draws of it do, whose members are measured there."""
    build = pickle.loads(pickle.dumps(Skeleton(recipe_files.read_recipe(str(path)))))  # noqa: S301 (its own bytes)
    assert [tuple(p.shape) for p in build().parameters()] == [(10, 64), (10,)]
    assert path.with_name("runs").read_text().count("\n") == 1
