"""Data flows one way: a room imports only rooms above it, and some rooms start without torch and pandas."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "checkpoints_zoo"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# From the ground up; a room is a file or a folder. LIGHT: it may import neither torch nor pandas.
LIGHT, HEAVY = True, False
ROOMS = {
    "errors": LIGHT,
    "replacing": LIGHT,
    "markup": LIGHT,
    "drawing": LIGHT,
    "limits": LIGHT,
    "layout": LIGHT,
    "header": LIGHT,
    "wrappers": LIGHT,
    "keymaps": LIGHT,
    "where": LIGHT,
    "catalog": LIGHT,
    "columns": LIGHT,
    "manifest": LIGHT,
    "selection": LIGHT,
    "pieces": LIGHT,
    "writing": LIGHT,
    "archive": LIGHT,
    "answers": LIGHT,
    "spares": LIGHT,
    "hub": LIGHT,
    "addresses": LIGHT,
    "ranges": LIGHT,
    "cache": LIGHT,
    "fetching": LIGHT,
    "unpacking": LIGHT,
    "indexing": LIGHT,
    "archived": LIGHT,
    "source": LIGHT,
    "hubsource": LIGHT,
    "finding": LIGHT,
    "placement": LIGHT,
    "checks": LIGHT,
    "prediction_sets": LIGHT,
    "copying": LIGHT,
    "device": HEAVY,
    "shard": HEAVY,
    "transfer": HEAVY,
    "mapped": HEAVY,
    "store": HEAVY,
    "architectures": HEAVY,
    "modules": HEAVY,
    "recording": HEAVY,
    "symmetry": HEAVY,
    "symmetry_files": HEAVY,
    "canonical": HEAVY,
    "metrics": HEAVY,
    "figures": HEAVY,
    "growth": HEAVY,
    "sides": HEAVY,
    "population": HEAVY,
    "images": HEAVY,
    "views": HEAVY,
    "selected": HEAVY,
    "dataset": HEAVY,
    "ensemble": HEAVY,
    "executor": LIGHT,
    "predictions": HEAVY,
    "member": HEAVY,
    "viewed": HEAVY,
    "collection": HEAVY,
    "equivalence": HEAVY,
    "measuring": HEAVY,
    "loading": HEAVY,
    "curve_plots": HEAVY,
    "plots": HEAVY,
    "pairwise_plots": HEAVY,
    "mmd_plots": HEAVY,
    "posterior": HEAVY,
    "held_out": HEAVY,
    "evaluated": HEAVY,
    "evaluation": HEAVY,
    "verification": HEAVY,
    "ingest": LIGHT,
    "sections": LIGHT,
    "pictures": LIGHT,
    "mass_plots": HEAVY,
    "alignment_plots": HEAVY,
    "compact_plots": HEAVY,
    "comparison_plots": HEAVY,
    "reporting": HEAVY,
    "cards": LIGHT,
    "publishing": LIGHT,
    "auditing": LIGHT,
    "interop": HEAVY,
    "training": HEAVY,
    "methods": HEAVY,
    "comparing": HEAVY,
    "cli": LIGHT,
    "__init__": LIGHT,
}
ORDER = list(ROOMS)
ALONE = {"metrics"}  # imports nothing of ours
DATA_FOLDERS = {"cards", "embedded", "manifests"}
NEIGHBOURS = {"training", "tests", "benchmarks"}  # they may import the package, never the reverse


def room_of(file: Path, root: Path) -> str:
    """Return the room that a file of the package belongs to: its stem, or its folder's name."""
    first = file.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything a file imports, wherever it does so.

    Imports inside functions and under TYPE_CHECKING count, and so do `import_module` and `__import__` of a
    literal name.

    Args:
        tree: the parsed file.
        module: its dotted name, from which relative imports are resolved.
        is_package: whether it is an `__init__.py`.
    """
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def python_files(root: Path) -> list[Path]:
    """Return every Python file below a folder, behind links as well."""
    walked = os.walk(root, followlinks=True)
    return sorted(Path(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))


def violations(root: Path) -> list[str]:
    """Return every breach of the order of the rooms below a package folder, one sentence each."""
    found = []
    for file in python_files(root):
        where = file.relative_to(root.parent).as_posix()
        parts = file.relative_to(root).with_suffix("").parts
        room = room_of(file, root)
        if len(parts) > 1 and room in DATA_FOLDERS:
            found.append(f"{where}: code in a data folder")
            continue
        if room not in ORDER:
            found.append(f"{where}: belongs to no room")
            continue
        is_package = parts[-1] == "__init__"
        module = ".".join([root.name, *(parts[:-1] if is_package else parts)])
        for line, name in imported(ast.parse(file.read_text(encoding="utf-8")), module, is_package):
            top, _, rest = name.partition(".")
            if top in NEIGHBOURS:
                found.append(f"{where}:{line}: imports {top}")
            if top != root.name:
                continue
            # `from package import name`: a room where there is one of that name, else the package itself.
            target = rest.partition(".")[0]
            target = target if target in ORDER else "__init__"
            if target == room:
                continue
            if ORDER.index(target) > ORDER.index(room):
                found.append(f"{where}:{line}: {room} imports {target}, which is below it")
            elif room in ALONE:
                found.append(f"{where}:{line}: {room} imports {target}, and may import nothing of ours")
    return found


def test_a_room_imports_only_rooms_above_it() -> None:
    assert violations(ROOT) == []


GOOD = {
    "__init__.py": "from checkpoints_zoo import cli\n",
    "errors.py": "import json\n",
    "layout.py": "from checkpoints_zoo.errors import ZooError\nfrom . import errors\nimport numpy.training\n",
    "metrics/__init__.py": "from .calibration import ece\nfrom checkpoints_zoo.metrics import calibration\n",
    "metrics/calibration.py": "from . import _check\nfrom ..metrics import _check\n",
    "metrics/_check.py": "",
    "cli/__init__.py": "def main():\n    from ..collection import load\n    from .. import cards\n",
    "cards.py": "",
}


@pytest.mark.parametrize(
    ("file", "code", "expected"),
    [
        ("errors.py", "import checkpoints_zoo.layout", ":1: errors imports layout, which is below it"),
        ("errors.py", "from checkpoints_zoo import layout", ":1: errors imports layout, which is below it"),
        ("errors.py", "from checkpoints_zoo.cli.x import y", ":1: errors imports cli, which is below it"),
        ("errors.py", "from . import layout", ":1: errors imports layout, which is below it"),
        ("errors.py", "from .layout import Layout", ":1: errors imports layout, which is below it"),
        ("cli/show.py", "from .. import load", ":1: cli imports __init__, which is below it"),
        ("cli/show.py", "import checkpoints_zoo as zoo", ":1: cli imports __init__, which is below it"),
        (
            "errors.py",
            "def f():\n    import checkpoints_zoo.cli",
            ":2: errors imports cli, which is below it",
        ),
        (
            "errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .layout import Layout",
            ":3: errors imports layout, which is below it",
        ),
        (
            "errors.py",
            "import importlib\nimportlib.import_module('checkpoints_zoo.layout')",
            ":2: errors imports layout, which is below it",
        ),
        ("errors.py", "__import__('checkpoints_zoo.layout')", ":1: errors imports layout, which is below it"),
        (
            "metrics/calibration.py",
            "from checkpoints_zoo.errors import ZooError",
            ":1: metrics imports errors, and may import nothing of ours",
        ),
        ("cli/show.py", "from training.recipes import RECIPES", ":1: imports training"),
        ("cli/show.py", "import tests.scenarios", ":1: imports tests"),
        ("common.py", "", ": belongs to no room"),
        ("common/__init__.py", "", ": belongs to no room"),
        ("embedded/build.py", "", ": code in a data folder"),
        ("cards/fill.py", "", ": code in a data folder"),
    ],
)
def test_the_order_of_rooms_can_be_broken(tmp_path: Path, file: str, code: str, expected: str) -> None:
    root = tmp_path / PACKAGE
    for name, text in GOOD.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert violations(root) == []

    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(code + "\n")
    assert violations(root) == [f"{PACKAGE}/{file}{expected}"]


def test_code_behind_a_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "fill.py").touch()
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "cards").symlink_to("../cards")
    assert violations(tmp_path / PACKAGE) == [f"{PACKAGE}/cards/fill.py: code in a data folder"]


def run_python(code: str, *arguments: str) -> dict[str, object]:
    """Run code in a fresh interpreter, and return the JSON object on its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


IMPORT_ALL = """
import importlib, json, sys
heavy, loaded = {"torch", "pandas"}, {}
for module in sys.argv[1:]:
    before = heavy & set(sys.modules)
    importlib.import_module(module)
    if new := sorted(heavy & set(sys.modules) - before):
        loaded[module] = new
print(json.dumps(loaded))
"""


def test_light_rooms_import_neither_torch_nor_pandas() -> None:
    present = {room_of(file, ROOT) for file in python_files(ROOT)}
    rooms = [room for room in ORDER if ROOMS[room] is LIGHT and room in present]
    modules = [PACKAGE if room == "__init__" else f"{PACKAGE}.{room}" for room in rooms]
    assert run_python(IMPORT_ALL, *modules) == {}


@pytest.mark.slow
def test_a_heavy_room_would_be_noticed() -> None:
    assert run_python(IMPORT_ALL, f"{PACKAGE}.errors", f"{PACKAGE}.store") == {f"{PACKAGE}.store": ["torch"]}


RUN_COMMAND = """
import json, sys
from checkpoints_zoo.cli import main
sys.argv[0] = "zoo-cli"
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print()
print(json.dumps({"exit": code or 0, "loaded": sorted({"torch", "pandas", "huggingface_hub"} & set(sys.modules))}))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["list", "--format", "json"],
        ["show", "convnet-digits"],
        ["show", "convnet-digits", "--where", "test_accuracy > 0.9"],
        ["show", "convnet-digits", "--format", "json"],
        ["show", "--help"],
        ["evaluate", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_import_neither_torch_nor_pandas_nor_the_hub_client(arguments: list[str]) -> None:
    assert run_python(RUN_COMMAND, *arguments) == {"exit": 0, "loaded": []}
