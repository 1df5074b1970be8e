"""Every public name, module path and command of version 0.1 still works; those that have a new name warn.

`git show 47a0031:checkpoints_zoo/__init__.py`, `47a0031:docs/cli.md` and `47a0031:README.md` list them.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo._moved import MOVED
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import read_recipe
from checkpoints_zoo.training.sent_recipes import rebuild_recipe, serialize_recipe

ROOT = Path(__file__).resolve().parents[2]
Program = Callable[..., tuple[object, str, str]]

NAMES = """
    Collection Comparison Ensemble Member Report ZooError alignment barrier barriers check_equivalence collections
    compact compare compare_compact compare_predictives corollary evaluate from_checkpoints from_samples images
    interop load metrics minimal_mass mmd ns pairwise publish report symmetries symmetry verify
"""
# A name of 0.1 that has another one now -> a use of it, and the text that it warns with, as a pattern.
RENAMED: dict[str, tuple[Callable[[], object], str]] = {
    "barriers": (
        lambda: zoo.barriers(zoo.load("convnet-digits", n=2), "digits", points=2),
        r"^zoo\.barriers is zoo\.barrier now; the old name goes in 0\.3$",
    ),
    "compare_compact": (
        lambda: zoo.compare_compact(
            zoo.load("convnet-digits", members="0-1"), zoo.load("convnet-digits", members="2-3"), samples=1, splits=2
        ),
        r"^zoo\.compare_compact is zoo\.compact now; the old name goes in 0\.3$",
    ),
    "report": (
        lambda: zoo.report(zoo.load("convnet-digits", n=1), ood=None),
        r"^zoo\.report is zoo\.report_page now; the old name goes in 0\.3$",
    ),
}

COMMANDS = {
    "list": "--source --format",
    "show": "-n --where --members --sample --source --columns --format",
    "evaluate": "-n --where --members --sample --source --architecture --data --ood --sizes --device --seed --stored"
    " --temperature --held-out --within --plot --format",
    "predict": "-n --where --members --sample --source --architecture --data --out --as --device --batch --workers"
    " --ray --format",
    "plot": "-n --where --members --sample --source --architecture --data --ood --sizes --device --seed --stored"
    " --temperature --held-out --within --figures --out --format",
    "pairwise": "-n --where --members --sample --source --architecture --data --ood --device --seed --stored --plot"
    " --out --format",
    "mmd": "-n --where --members --sample --source --architecture --other-source --as-stored --scale --permute"
    " --streams --groups --permutations --device --seed --plot --format",
    "symmetries": "-n --where --members --sample --source --architecture --no-mass --biases --approximate --along"
    " --corollary --tensors --plot --device --seed --format",
    "align": "-n --where --members --sample --source --architecture --to --barrier --save --plot --format",
    "compact": "-n --where --members --sample --source --architecture --data --to --against --vi --samples --splits"
    " --statistics --device --seed --plot --format",
    "compact-table": "--out --runs --draws --steps --warmup --samples --splits --to --workers --device --seed --json"
    " --latex --format",
    "compare": "-n --where --members --sample --source --architecture --methods --with --reference --recipe --data"
    " --ood --out --runs --draws --permutations --search --workers --device --seed --plot --json --latex --table"
    " --dry-run --format",
    "report": "-n --where --members --sample --source --architecture --data --ood --sizes --device --seed --stored"
    " --temperature --held-out --within --out --format",
    "download": "-n --where --members --sample --source --dest --dry-run --format",
    "cache": "--drop --dry-run --format",
    "verify": "--source --sample --architecture --format --retrain --recipe --set --device --devices --workers --ray",
    "audit": "--format",
    "import": "--collection --out --reshard --hash --evaluate --like --dataset --classes-from --facts --architecture"
    " --argument --architecture-name --strip-prefix --key --files --columns --strict --device --dry-run --format",
    "publish": "--repo --dry-run --private --create-pr --tag --sample --format",
    "demo": "--out --format",
    # Of `python -m training RECIPE` and `python -m training merge`.
    "train": "--members --out --set --name --device --devices --workers --ray --log-json --init-permutation"
    " --init-seed",
    "train-merge": "--out --name",
}
FORMS = {  # of the training commands -> the command that the note names
    "training convnet-digits --help": "zoo-cli train",
    "training --list": "zoo-cli recipes",
    "training convnet-digits --list": "zoo-cli recipes",
    "training merge --help": "zoo-cli train-merge",
    "training verify --help": "zoo-cli verify",
    "checkpoints_zoo.cli.training convnet-digits --help": "zoo-cli train",
    "checkpoints_zoo.cli.train --list": "zoo-cli recipes",
}

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


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    """Give what runs `python -W error -m MODULE ARGUMENTS` in this process; it returns exit code, stdout, stderr."""

    def run(module: str, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a module that is there already
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return stop.value.code or 0, *capsys.readouterr()

    return run


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


def test_names_of_the_package_that_moved_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(zoo, "metrics", raising=False)  # as before its first use
    from checkpoints_zoo import metrics

    assert zoo.metrics is metrics is sys.modules["checkpoints_zoo.evaluation.metrics"]
    assert "checkpoints_zoo.metrics" not in sys.modules  # the old path


def test_training_recipe_gives_the_same_class_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"^training\.recipe is checkpoints_zoo\.training\.recipe now"):
        assert import_module("training.recipe").Recipe is Recipe


def test_an_old_recipe_file_loads_where_warnings_are_errors_and_is_sent_to_workers(
    tmp_path: Path, python: Program
) -> None:
    path = tmp_path / "old.py"
    path.write_text(OLD_RECIPE)
    found = read_recipe(str(path))
    assert type(found) is Recipe
    sys.modules.pop("training.recipe")
    assert rebuild_recipe(serialize_recipe(found)).hash == found.hash
    sys.modules.pop("training.recipe", None)
    code, out, err = python("training", str(path), "--list")
    assert code == 0, err
    assert "old" in out


def test_every_name_is_there() -> None:
    for name in set(NAMES.split()) - set(RENAMED):
        assert getattr(zoo, name) is not None
    assert set(RENAMED) <= set(NAMES.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", RENAMED)
def test_a_name_with_a_new_one_works_and_warns(name: str) -> None:
    use, text = RENAMED[name]
    with pytest.warns(DeprecationWarning, match=text):
        use()


@pytest.mark.slow
def test_renamed_functions_return_what_the_new_ones_do() -> None:
    with pytest.warns(DeprecationWarning, match="^zoo"):
        lines, table = RENAMED["barriers"][0](), RENAMED["compare_compact"][0]()
    members = zoo.load("convnet-digits", n=4)
    assert lines.losses.equal(zoo.barrier(members[:2], data="digits", points=2).losses)  # type: ignore[attr-defined]
    assert table == zoo.compact(members[2:], against=members[:2], samples=1, splits=2)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_options_it_had(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert set(COMMANDS[name].split()) <= {option for p in command.params for option in [*p.opts, *p.secondary_opts]}


@pytest.mark.parametrize("form", FORMS)
def test_an_old_form_of_a_command_works_and_names_the_new_one(form: str, python: Program) -> None:
    module, *arguments = form.split()
    code, out, err = python(module, *arguments)
    assert code == 0, err
    assert out.startswith(f"Usage: {FORMS[form]} " if "--help" in form else "recipe ")
    assert err.startswith("zoo-cli: `python -m ")
    assert err.endswith(f"` is `{FORMS[form]}` now; the old form goes in 0.3\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--help",), ("recipes",), ("show", "nothing"), ("train", "nothing")])
def test_the_program_is_the_same_by_every_name(arguments: tuple[str, ...], python: Program) -> None:
    here, package = (python(module, *arguments) for module in ("training", "checkpoints_zoo"))
    assert here == package
    assert package[0] == {"nothing": 3 if arguments[0] == "show" else 2}.get(arguments[-1], 0)


def test_a_process_runs_the_program_by_its_old_name() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "training", "merge", "--help"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"Usage: zoo-cli train-merge ")
