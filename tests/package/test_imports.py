"""Rooms import only the rooms below them, modules in no circle, and light commands start without torch."""

from __future__ import annotations

import graphlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

PACKAGE = "checkpoints_zoo"
ROOT = Path(__file__).resolve().parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Hold the package in a folder against the contracts of the pyproject.toml beside it; return what was printed."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)


def test_every_contract_on_imports_is_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with our rooms, all of them empty, under our contracts."""
    root = tmp_path_factory.mktemp("rooms")
    shutil.copy(ROOT / "pyproject.toml", root)
    for path in [ROOT / PACKAGE, *(ROOT / PACKAGE).iterdir(), ROOT / PACKAGE / "evaluation" / "metrics"]:
        if (path / "__init__.py").exists():
            (root / path.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
            (root / path.relative_to(ROOT) / "__init__.py").touch()
        elif path.suffix == ".py":
            (root / path.relative_to(ROOT)).touch()
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "code", "broken"),
    [
        ("errors.py", "", ""),
        ("sources/find.py", "from checkpoints_zoo.formats import catalog", ""),
        ("errors.py", "from checkpoints_zoo import formats", "errors is not allowed to import checkpoints_zoo.formats"),
        ("formats/at.py", "from ..sources import x", "formats is not allowed to import checkpoints_zoo.sources"),
        (
            "sources/at.py",
            "def late():\n    import checkpoints_zoo.collection",
            "sources is not allowed to import checkpoints_zoo.collection",
        ),
        (
            "networks/at.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from checkpoints_zoo.images import ImageData",
            "networks is not allowed to import checkpoints_zoo.images",
        ),
        (
            "evaluation/metrics/at.py",
            "from checkpoints_zoo.errors import ZooError",
            "evaluation.metrics is not allowed to import checkpoints_zoo.errors",
        ),
        ("cli/at.py", "from tests.support import tiny", "checkpoints_zoo is not allowed to import tests"),
        ("common/__init__.py", "", "common"),  # belongs to no room
    ],
)
def test_a_wrong_import_breaks_a_contract(rooms: Path, tmp_path: Path, file: str, code: str, broken: str) -> None:
    shutil.copytree(rooms, tmp_path, dirs_exist_ok=True)
    (tmp_path / PACKAGE / file).parent.mkdir(exist_ok=True)
    (tmp_path / PACKAGE / file).write_text(code + "\n")
    done = lint_imports(tmp_path)
    assert (done.returncode == 0) == (not broken), done.stdout + done.stderr
    assert broken in " ".join((done.stdout + done.stderr).split())


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(PACKAGE)
    order = graphlib.TopologicalSorter({m: graph.find_modules_directly_imported_by(m) for m in graph.modules})
    order.prepare()


def run_python(code: str, *arguments: str) -> dict[str, object]:
    """Run code in a fresh interpreter, and return the JSON object on its last line."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


IMPORT_ALL = """
import importlib, json, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(json.dumps({"loaded": sorted({"torch", "pandas"} & set(sys.modules))}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", ["formats", "sources"])
def test_bytes_are_moved_without_torch_and_pandas(room: str) -> None:
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / PACKAGE / room).rglob("*.py")]
    modules = [".".join(file.parts).removesuffix(".__init__") for file in files]
    assert len(modules) > 5
    assert run_python(IMPORT_ALL, *modules) == {"loaded": []}


@pytest.mark.slow
def test_a_heavy_import_would_be_noticed() -> None:
    assert run_python(IMPORT_ALL, "pandas") == {"loaded": ["pandas"]}


RUN_COMMAND = """
import json, sys
from checkpoints_zoo.cli.main import main
sys.argv[0] = "zoo-cli"
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print()
print(json.dumps({"exit": code or 0, "loaded": sorted({"torch", "pandas", "huggingface_hub"} & set(sys.modules))}))
"""


@pytest.mark.slow
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


@pytest.mark.slow
def test_download_imports_no_torch(tmp_path: Path) -> None:
    done = run_python(RUN_COMMAND, "download", "convnet-digits", "--members", "0-1", "--dest", str(tmp_path / "copy"))
    assert done["exit"] == 0
    assert "torch" not in done["loaded"]  # type: ignore[operator]  # pandas is imported by pyarrow itself


WRONG_NAMES = """
import json, sys
from checkpoints_zoo.cli.main import main
codes = []
for command in ("evaluate", "predict", "plot", "pairwise", "report", "mmd", "align", "compact"):
    try:
        codes.append(main([command, "convnet-digts"]))
    except SystemExit as stop:
        codes.append(stop.code)
print()
print(json.dumps({"exit": min(codes), "loaded": sorted({"torch", "pandas"} & set(sys.modules))}))
"""


@pytest.mark.slow
def test_a_wrong_name_is_told_before_torch_is_imported() -> None:
    done = run_python(WRONG_NAMES)
    assert done["loaded"] == []
    assert done["exit"]  # Each command failed.


LIST_CATALOG = """
import json, sys
from checkpoints_zoo.cli.main import main
try:
    main(["list"])
except SystemExit as stop:
    print()
    print(json.dumps({"exit": stop.code or 0, "loaded": sorted({"pyarrow", "duckdb", "ssl"} & set(sys.modules))}))
"""


def test_the_catalog_is_listed_without_what_reads_manifests() -> None:
    """`zoo-cli list` takes hardly more time than the imports of click and pyarrow alone."""
    assert run_python(LIST_CATALOG) == {"exit": 0, "loaded": []}
