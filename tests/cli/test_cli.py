"""The commands that read manifests only, the help, and the reference."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import click
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import COMMANDS, Output, main
from checkpoints_zoo.formats import catalog
from docs.make import cli
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


def test_list_shows_the_catalog(listed: Built) -> None:
    result = run("list")
    assert result.stdout == (
        "name  members  architecture  dataset     bytes  licence     source\n"
        f"tiny        5  convnet       digits   73.16 kB  Apache-2.0  {listed.root}\n"
    )
    assert result.stderr == ""
    assert values(run("list", "--format", "json")) == [
        {
            "name": "tiny", "members": 5, "architecture": "convnet", "dataset": "digits", "bytes": 73160,
            "licence": "Apache-2.0", "source": str(listed.root),
        }
    ]  # fmt: skip


def test_list_shows_a_folder(tiny: Built) -> None:
    found = values(run("list", "--source", tiny.root, "--format", "json"))
    assert [(x["name"], x["members"], x["bytes"]) for x in found] == [
        ("tiny", 5, sum(r["nbytes"] for r in tiny.rows)),
        ("wide", 23, 23 * tiny.rows[0]["nbytes"]),
    ]


def test_list_shows_the_others_beside_a_damaged_one(tmp_path: Path) -> None:
    good, bad = (build(tmp_path, members=[0], name=name) for name in ("good", "bad"))
    bad.json.write_text("{")
    result = run("list", "--source", tmp_path)
    assert result.exit_code == 4
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["name", good.name]
    assert result.stderr.startswith(f"zoo-cli: error: description {bad.json}: expected JSON; found ")
    assert result.stderr.count("\n") == 1


def test_list_of_an_empty_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "CATALOG_FOLDER", tmp_path)
    assert (run("list").stdout, run("list").stderr) == ("", "no collections\n")
    assert values(run("list", "--format", "json")) == []


# show


def test_show_describes_and_tabulates(listed: Built) -> None:
    result = run("show", "tiny", "--where", "seed > 8 and member < 4", "--columns", "member,seed,test_accuracy")
    assert result.exit_code == 0
    about, rows = result.stdout.split("\n\n")
    facts = dict(line.split(maxsplit=1) for line in about.splitlines())
    assert facts["members"] == "2 of 5"
    assert facts["architecture"] == "convnet"
    assert facts["bytes"] == "29.26 kB"
    assert facts["citation"].startswith(f"{listed.root.as_uri()}@")
    assert "/tiny#2-3~" in facts["citation"]
    assert rows == "member  seed  test_accuracy\n     2     9         90.2 %\n     3    10         90.3 %\n"
    assert result.stderr == ""


def test_show_in_json_has_every_row_and_column(tiny: Built) -> None:
    found = values(run("show", "wide", "--source", tiny.root, "--format", "json"))
    rows = found.pop("rows")
    assert [r["member"] for r in rows] == list(range(23))
    assert [r["test_accuracy"] for r in rows] == [0.9 + m / 1000 for m in range(23)]
    assert set(rows[0]) > {"member", "seed", "sha256", "path", "offset", "created"}
    assert rows[0]["created"] is None
    assert (found["members"], found["of"], found["classes"]) == (23, 23, list("0123456789"))


def test_show_writes_times(tmp_path: Path) -> None:
    import pyarrow as pa

    from tests.support.scenarios import SCHEMA

    built = build(tmp_path, members=[0, 1])
    built.rows[0]["created"] = 1_767_323_045
    built.write(SCHEMA.append(pa.field("created", pa.timestamp("s", tz="UTC"))))
    columns = ("--source", tmp_path, "--columns", "created")
    found = values(run("show", "tiny", *columns, "--format", "json"))["rows"]
    assert found == [{"created": "2026-01-02T03:04:05+00:00"}, {"created": None}]
    assert run("show", "tiny", *columns).stdout.splitlines()[-2:] == ["2026-01-02 03:04", "-"]


def test_show_limits_what_people_see(tiny: Built) -> None:
    lines = run("show", "wide", "--source", tiny.root).stdout.splitlines()
    assert lines[-1] == "… and 3 more (`--format json` gives all)"
    assert [line.split()[0] for line in lines[-22:-2]] == [str(m) for m in range(20)]
    assert "more" not in run("show", "wide", "--source", tiny.root, "-n", "20").stdout


def test_show_selects_as_load_does(tiny: Built) -> None:
    place = ("--source", tiny.root, "--format", "json")
    for options, selection in (
        (("-n", "3"), {"n": 3}),
        (("-n", "3", "--sample", "1"), {"n": 3, "sample": 1}),
        (("--members", "4,0-1"), {"members": "4,0-1"}),
        (("--where", "split = 'test'"), {"where": "split = 'test'"}),
    ):
        found = values(run("show", "wide", *options, *place))
        members = zoo.load("wide", source=tiny.root, **selection)  # type: ignore[arg-type]
        assert found["citation"] == members.citation
        assert [r["member"] for r in found["rows"]] == members.ids
        assert values(run("show", members.citation, "--format", "json"))["rows"] == found["rows"]


def test_names_from_a_source_do_not_steer_the_terminal(tmp_path: Path) -> None:
    built = build(tmp_path, members=[0])
    built.description["title"] = "red \x1b[31m and\nanother line"
    built.write()
    shown = run("show", "tiny", "--source", tmp_path).stdout
    assert "title         red \\x1b[31m and another line\n" in shown
    assert "\x1b" not in run("show", "tiny", "--source", tmp_path, "--format", "json").stdout
    assert run("show", "t\x1b[31m", "--source", tmp_path).stderr.count("\x1b") == 0


def test_help_lines_are_the_commands_own() -> None:
    text = run("--help").stdout
    for name, (_, line, _) in COMMANDS.items():
        command = main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert (command.help or "").split("\n")[0] == line
        assert f"  {name} " in text
    assert run().stdout == text
    assert run("--version").stdout == f"zoo-cli, version {zoo.__version__}\n"


def test_no_command_hides_a_builtin() -> None:
    assert not {command.defined_in for command in COMMANDS.values()} & set(dir(builtins))


def test_every_command_prints_json_too() -> None:
    for name in COMMANDS:
        command = main.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert "--format" in {option for p in command.params for option in p.opts}
        assert all(p.help for p in command.params if isinstance(p, click.Option)), name


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == cli.page(), "run `python -m docs.make`"


def test_json_holds_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    Output("json").data({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "x"}


@pytest.mark.slow
def test_no_command_colours_what_it_prints() -> None:
    """So NO_COLOR (no-color.org) is respected; the commands are told here that the terminal has colours."""
    for words in (["--help"], ["list"], ["show", "convnet-digits"], ["show", "nothing"], ["show", "--nothing"]):
        done = process(
            *words, environment={"NO_COLOR": "1", "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "TERM": "xterm"}
        )
        assert "\x1b" not in done.stdout + done.stderr


def test_show_prints_an_entry_for_bibtex() -> None:
    result = run("show", "convnet-digits", "-n", "2", "--bibtex")
    assert result.stdout == zoo.load("convnet-digits", n=2).bibtex + "\n"
    assert values(run("show", "convnet-digits", "-n", "2", "--bibtex", "--format", "json")) == {
        "bibtex": zoo.load("convnet-digits", n=2).bibtex
    }
