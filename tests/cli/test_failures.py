"""How commands end: one line and one exit code a kind of error, and nothing heavy loaded on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

import checkpoints_zoo as zoo
from checkpoints_zoo import errors
from checkpoints_zoo.cli import main
from checkpoints_zoo.formats import catalog
from tests.support.commands import ROOT, catalog_of, process, run, two_collections, values
from tests.support.scenarios import Built, build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return two_collections(tmp_path_factory.mktemp("cli") / "out")


@pytest.fixture
def listed(tiny: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """The same, and a catalog that says where `tiny` lies."""
    monkeypatch.setattr(catalog, "CATALOG_FOLDER", catalog_of(tiny, tmp_path / "catalog"))
    return tiny


ERRORS: list[tuple[list[str], int, str]] = [
    (["shwo"], 2, "No such command 'shwo'. Did you mean 'show'? See `zoo-cli --help`."),
    (["frobnicate"], 2, "No such command 'frobnicate'. See `zoo-cli --help`."),
    (["show"], 2, "Missing argument 'NAME'. See `zoo-cli show --help`."),
    (["show", "tiny", "-n", "many"], 2, "Invalid value for '-n': 'many' is not a valid integer."
     " See `zoo-cli show --help`."),
    (["show", "tiny", "-n", "6"], 2, "number of members of tiny: expected n from 1 to 5, as many as there are;"
     " found n=6."),
    (["show", "tiny", "--where", "test_accuracy > 1"], 2, "where 'test_accuracy > 1': "),
    (["show", "tiny", "--columns", "member,sead"], 2, "column 'sead': expected a column of the manifest; found none"
     " such. Did you mean seed or created or schedule?"),
    (["evaluate", "tiny", "--sizes", "1,x"], 2, "Invalid value for '--sizes': '1,x' is no list of whole numbers such"
     " as 1,8,64. See `zoo-cli evaluate --help`."),
    (["evaluate", "tiny", "--plot", "x.jpg"], 2, "Invalid value for '--plot': 'x.jpg' "
     "does not end in .png or .pdf or .svg."
     " See `zoo-cli evaluate --help`."),
    (["plot", "tiny", "-o", "x.jpg"], 2, "Invalid value for '-o' / '--out': 'x.jpg' "
     "does not end in .png or .pdf or .svg."
     " See `zoo-cli plot --help`."),
    (["plot", "tiny"], 2, "Missing option '-o' / '--out'. See `zoo-cli plot --help`."),
    (["show", "tinny"], 3, "collection 'tinny': expected a name in the catalog (tiny); found no such name."
     " Did you mean tiny?"),
    (["show", "tiny", "--members", "7"], 3, "member 7 of tiny: expected an id among 0-4; found 7."),
    (["list", "--source", "/nowhere"], 3, "source /nowhere: expected a folder with manifests/NAME.parquet in it;"
     " found nothing there. Give the folder that holds manifests/ and shards/."),
    (["verify", "tinny"], 3, "collection 'tinny': expected a name in the catalog (tiny); found no such name."
     " Did you mean tiny?"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "text"), ERRORS, ids=[" ".join(a) for a, *_ in ERRORS])
def test_an_error_is_one_line_and_a_code(listed: Built, arguments: list[str], code: int, text: str) -> None:
    result = run(*arguments)
    line = [line for line in result.stderr.splitlines() if not line.endswith("…")]
    assert line[0] == f"zoo-cli: error: {text}" or (text[-1] == " " and line[0].startswith(f"zoo-cli: error: {text}"))
    assert len(line) == 1
    assert (result.exit_code, result.stdout) == (code, "")


def test_a_citation_of_a_source_that_has_changed(tiny: Built) -> None:
    citation = values(run("show", "tiny", "--source", tiny.root, "--format", "json"))["citation"]
    result = run("show", f"{citation[:-8]}00000000")
    assert result.exit_code == 4
    assert result.stderr.startswith("zoo-cli: error: citation of tiny: expected ")
    assert run("show", citation, "-n", "1").exit_code == 2


KINDS: dict[type[Exception], int] = {
    errors.UsageError: 2, errors.SelectionError: 2, errors.TooLargeError: 2, errors.WorkerError: 2,
    errors.CollectionNotFound: 3, errors.MemberNotFound: 3, errors.SourceNotFound: 3,
    errors.LockedError: 3, errors.DamagedError: 4, errors.FormatError: 4, errors.LayoutError: 4,
    errors.NetworkError: 5, errors.AccessError: 3, errors.StorageError: 3,
    ConnectionError: 5, TimeoutError: 5, PermissionError: 3, ConnectionResetError: 5,
}  # fmt: skip


def test_every_kind_of_error_has_a_code() -> None:
    assert set(errors.ZooError.__subclasses__()) <= set(KINDS)
    for kind, code in KINDS.items():
        assert main.exit_code(kind("thing")) == code, kind
    assert set(KINDS.values()) | {0, 1, 70, 130, 141} == set(main.MEANING_OF_CODE)


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Result:
    def raises() -> None:
        raise error

    monkeypatch.setattr(catalog, "collections", raises)
    return run("list")


def test_a_bug_of_ours_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fails(monkeypatch, KeyError("offset"))
    assert (result.exit_code, result.stdout) == (70, "")
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2] == "KeyError: 'offset'"
    assert lines[-1] == (
        f"zoo-cli: error: a bug of ours (KeyError in checkpoints-zoo {zoo.__version__}): please report it, "
        "with the lines above"
    )


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fails(monkeypatch, KeyboardInterrupt())
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "zoo-cli: interrupted")


def test_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    result = fails(monkeypatch, ConnectionError("no route to the Hub"))
    assert (result.exit_code, result.stderr) == (5, "zoo-cli: error: no route to the Hub\n")


HEAVY = """
import sys
from checkpoints_zoo.cli.main import main
try:
    main()
finally:
    names = {"torch", "pandas", "huggingface_hub", "matplotlib", "duckdb", "rich", "sklearn"}
    print("loaded:", *sorted(names & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [(["--help"], ""), (["list"], ""), (["--version"], ""), (["demo", "--help"], ""), (["evaluate", "--help"], "")],
)
def test_light_commands_load_nothing_heavy(arguments: list[str], loaded: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, f"loaded: {loaded}".strip())
    assert done.stdout


@pytest.mark.slow
def test_codes_and_streams_of_a_real_process(tiny: Built, tmp_path: Path) -> None:
    done = process("list", "--source", tiny.root, "--format", "json")
    assert (done.returncode, len(json.loads(done.stdout)), done.stderr) == (0, 2, "")
    done = process("show", "nothing", "--source", tiny.root)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("zoo-cli: error: collection 'nothing': expected a name in source file://")
    broken = build(tmp_path, members=[0])
    broken.shard.write_bytes(broken.shard.read_bytes()[:-9])
    done = process("verify", tmp_path, "--sample", "0")
    assert done.returncode == 1
    assert "member 0 of tiny: bytes: " in done.stdout


@pytest.mark.slow
def test_nobody_reads_the_output(tiny: Built) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        for arguments in (["list", "--source", str(tiny.root)], ["--help"]):
            done = process(*arguments, stdout=closed)
            assert (done.returncode, done.stderr) == (141, ""), arguments


def test_a_terminal_without_the_signs(tiny: Built) -> None:
    done = process(
        "show", "wide", "--source", tiny.root, environment={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert "\\u2026 and 3 more" in done.stdout
