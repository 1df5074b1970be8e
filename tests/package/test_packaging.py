"""What ships: the same files by every road, and a wheel that works far from the clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.hub import Hub
from tests.support.core_commands import check_core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "checkpoints_zoo"
LINKS = ("cards", "manifests")
SHIPPED_WITH_THE_SOURCE = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "tests/package/test_packaging.py",
}
TIES = {
    *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"),
    *("UV_PROJECT_ENVIRONMENT", "UV_RUN_RECURSION_DEPTH", "UV_SYSTEM_PYTHON", "UV_NO_CACHE"),
    "UV_COMPILE_BYTECODE",  # all there is in an environment
}

# The package as an installer sees it, found without importing it.
LIST_INSTALLED = f"""
import importlib.util, json, os
top = importlib.util.find_spec({PACKAGE!r}).submodule_search_locations[0]
walked = os.walk(top, followlinks=True)
files = [os.path.join(folder, name) for folder, _, names in walked for name in names]
print(json.dumps([os.path.relpath(file, top) for file in files]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a stranger to this checkout's environment, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in TIES}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def uv(*arguments: str | Path, cwd: Path) -> str:
    """Run uv, from its cache alone if that is enough."""
    found = os.environ.get("UV") or shutil.which("uv")
    command = [found] if found else [sys.executable, "-m", "uv"]
    try:
        return run(*command, *arguments, "--offline", cwd=cwd)
    except AssertionError:
        return run(*command, *arguments, cwd=cwd)


def package_files(names: list[str], top: str) -> set[str]:
    """Return the package's files among some names, relative to the package, without compiled leftovers."""
    below = [name.removeprefix(top) for name in names if name.startswith(top) and not name.endswith("/")]
    return {name for name in below if "__pycache__" not in name}


def files_below(folder: Path) -> list[str]:
    """Return every file below a folder, behind links as well, relative to it."""
    walked = os.walk(folder, followlinks=True)
    return [Path(top, name).relative_to(folder).as_posix() for top, _, names in walked for name in names]


def new_environment(folder: Path) -> Path:
    """Make an empty virtual environment, and return its Python."""
    uv("venv", "--python", sys.executable, folder, cwd=folder.parent)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a commit of the working tree would hold: files tracked or not yet, none that is ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git clone to tell the project's files from what lies beside them")
    listing = run("git", "-c", "safe.directory=*", "ls-files", "-coz", "--exclude-standard", cwd=ROOT)
    copy = tmp_path_factory.mktemp("clone")
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():  # a file deleted but not committed is still listed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the sdist, the wheel from it, and the wheel straight from the clone."""
    through, straight = tmp_path_factory.mktemp("through-sdist"), tmp_path_factory.mktemp("straight")
    uv("build", "--out-dir", through, cwd=clone)
    uv("build", "--wheel", "--out-dir", straight, cwd=clone)
    (sdist,), (wheel,), (straight_wheel,) = (
        through.glob("*.tar.gz"),
        through.glob("*.whl"),
        straight.glob("*.whl"),
    )
    return {"sdist": sdist, "wheel from the sdist": wheel, "wheel from the clone": straight_wheel}


@pytest.mark.slow
def test_the_package_has_the_same_files_by_every_road(clone: Path, built: dict[str, Path], tmp_path: Path) -> None:
    expected = package_files(files_below(clone / PACKAGE), "")
    assert {"__init__.py", "py.typed", "errors.py"} <= expected
    for folder in LINKS:
        assert any(name.startswith(f"{folder}/") for name in expected), f"{folder}/ is empty"

    with tarfile.open(built["sdist"]) as sdist:
        top = f"{os.path.commonpath(sdist.getnames())}/"
        assert package_files(sdist.getnames(), f"{top}{PACKAGE}/") == expected
        assert not [member.name for member in sdist.getmembers() if not member.isreg()]
        assert {f"{top}{name}" for name in SHIPPED_WITH_THE_SOURCE} <= set(sdist.getnames())
    for wheel in ("wheel from the sdist", "wheel from the clone"):
        names = zipfile.ZipFile(built[wheel]).namelist()
        assert package_files(names, f"{PACKAGE}/") == expected, wheel
        rest = {name.partition("/")[0] for name in names} - {PACKAGE}
        assert rest == {f"{PACKAGE}-{metadata.version(PACKAGE)}.dist-info"}, wheel

    python = new_environment(tmp_path / "editable")
    uv("pip", "install", "--no-deps", "--python", python, "--editable", clone, cwd=tmp_path)
    assert package_files(json.loads(run(python, "-c", LIST_INSTALLED, cwd=tmp_path)), "") == expected


@pytest.mark.slow
def test_the_wheels_of_both_roads_hold_the_same_bytes(built: dict[str, Path]) -> None:
    through, straight = (zipfile.ZipFile(built[f"wheel from the {road}"]) for road in ("sdist", "clone"))
    assert {entry.filename: entry.CRC for entry in through.infolist()} == {
        entry.filename: entry.CRC for entry in straight.infolist()
    }


def install(wheel: Path, extras: str, folder: Path) -> tuple[Path, set[str]]:
    """Install the wheel into an environment that has what its metadata requires, and no more; return the environment's
    Python and the names of the packages that are required.

    What it requires is linked from this environment: copies would be compiled anew, which takes a minute.
    """
    # The versions already here: nothing new is fetched. Without local parts (+cpu), which no registry has.
    here = {found.name: found.version.partition("+")[0] for found in metadata.distributions()}
    (folder / "constraints.txt").write_text("".join(f"{name}=={version}\n" for name, version in here.items()))
    (folder / "wheel.txt").write_text(f"{PACKAGE}{extras} @ {wheel.as_uri()}\n")
    python = new_environment(folder / "environment")
    asked = ("pip", "compile", "--quiet", "--python", python, "--no-annotate", "--no-header")
    resolved = uv(*asked, "--constraints", "constraints.txt", "wheel.txt", cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    required = {line.partition("==")[0] for line in resolved.splitlines() if "==" in line}
    for distribution in map(metadata.distribution, required):
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).exists():  # two packages may share a folder
                (site / top).symlink_to(distribution.locate_file(top))
    uv("pip", "install", "--no-deps", "--python", python, wheel, cwd=folder)
    return python, required


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with torch; return its `zoo-cli`."""
    python, required = install(built["wheel from the sdist"], "[torch]", tmp_path_factory.mktemp("installed"))
    assert {"torch", "timm", "duckdb"} <= required
    return python.with_name("zoo-cli")


@pytest.mark.slow
def test_the_wheel_without_extras_does_the_cores_part(
    built: dict[str, Path], hub: Hub, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The packages are counted without the wheel itself; docs/install.md states their number and size."""
    python, required = install(built["wheel from the sdist"], "", tmp_path_factory.mktemp("core"))
    assert len(required) <= 25, sorted(required)
    check_core(python, "", hub, tmp_path)


# Runs commands, a JSON list of lists of words, in one process, and prints a list of the JSON that each has printed.
# Of each size, five random ensembles are measured.
RUN_COMMANDS = """
import contextlib, io, json, sys
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.evaluation import evaluating

evaluating.evaluate.__kwdefaults__["subsets"] = 5

printed = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(words)
        except SystemExit as stop:
            assert not stop.code, (words, stop.code)
    printed.append(json.loads(out.getvalue()))
print(json.dumps(printed))
"""


@pytest.mark.slow
def test_the_wheel_does_its_demo_trains_merges_verifies_and_evaluates(installed: Path, tmp_path: Path) -> None:
    """Away from the clone, in one process; a newcomer's demo has all members."""
    listed = json.loads(run(installed, "list", "--format", "json", cwd=tmp_path))
    assert "convnet-digits" in {line["name"] for line in listed}
    train = ("train", "convnet-digits", "--set", "epochs=2", "--set", "stack_width=2", "--members")
    source = ("convnet-digits", "--source", "merged")
    commands = [
        ("demo", "--out", "demo"), ("recipes",), (*train, "0-1", "--out", "here"), (*train, "2-3", "--out", "there"),
        ("train-merge", "here", "there", "--out", "merged"), ("verify", *source), ("evaluate", *source),
    ]  # fmt: skip
    words = json.dumps([(*command, "--format", "json") for command in commands])
    demo, recipes, *_, verified, evaluated = json.loads(
        run(installed.with_name("python"), "-c", RUN_COMMANDS, words, cwd=tmp_path)
    )
    of = {(f["of"], f["members"], f["figure"]): f["value"] for f in demo["figures"]}
    assert of["ensemble", 64, "accuracy"] > of["mean of members", 1, "accuracy"]
    assert of["ensemble", 64, "nll"] < of["mean of members", 1, "nll"]
    assert of["ensemble", 64, "auroc"] >= 0.98
    (picture,) = (tmp_path / "demo").iterdir()
    assert picture.name == "zoo-demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {path.name for path in tmp_path.iterdir()} == {"demo", "here", "there", "merged"}
    assert "convnet-digits" in {row["recipe"] for row in recipes}
    assert [line["members"] for line in verified["checked"]] == [4]
    assert verified["problems"] == []
    figures = {(f["of"], f["members"], f["figure"]): f["value"] for f in evaluated["figures"]}
    assert 0.5 < figures["ensemble", 4, "accuracy"] <= 1  # a tenth is chance


def test_the_data_folders_are_links_in_a_clone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked sdist has real folders")
    assert {name: (ROOT / PACKAGE / name).readlink() for name in LINKS} == {name: Path("..", name) for name in LINKS}


@pytest.mark.parametrize("name", ["manifests/x.parquet", "manifests/x.json", "shards/x/00000-3f9a1c2b.safetensors"])
def test_git_does_not_ignore_embedded_data(name: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git clone")
    path = f"{PACKAGE}/embedded/{name}"
    command = ["git", "-c", "safe.directory=*", "check-ignore", "--no-index", "--quiet", path]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 1


def test_the_citation_names_both_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], citation["title"]) == ("1.2.0", "checkpoints_zoo")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"]
    assert f"\n## {project['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["license"] == metadata.metadata(PACKAGE)["License-Expression"] == "Apache-2.0"
    assert [reference["identifiers"][0]["value"] for reference in citation["references"]] == [
        "arXiv:2310.08287",
        "arXiv:2401.00611",
    ]
