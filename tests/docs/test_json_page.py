"""The page on `--format json`: made of what the commands print, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints_zoo.cli.main import COMMANDS
from docs.make import json_output
from docs.make.json_output import TYPES, page
from tests.support.commands import run, values
from tests.support.report_pages import draw_only
from tests.support.reports import draw_nothing, measure_few

PAGE = Path(__file__).resolve().parents[2] / "docs" / "json.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m docs.make docs/json.md`"
    assert list(json.loads(TYPES.read_text(encoding="utf-8"))) == list(COMMANDS)


def test_the_page_has_the_keys_of_a_command() -> None:
    """Read off the page, and off what the command prints."""
    section = PAGE.read_text(encoding="utf-8").split("## zoo-cli download\n")[1].split("## ")[0]
    keys = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    printed = values(run("download", "convnet-digits", "-n", "2", "--dry-run", "--format", "json"))
    assert printed.keys() == keys - {"dest", "shards", "dest_bytes", "cache_bytes"}


@pytest.mark.slow
def test_the_types_are_those_that_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)
    draw_nothing(monkeypatch)
    draw_only(monkeypatch)
    assert json_output.types_of_commands() == json.loads(TYPES.read_text(encoding="utf-8"))
