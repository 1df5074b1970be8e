"""The pages on evaluation and on stored predictions cannot go stale: their code and their commands run."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo.predictions.prediction_sets import SCHEMA, SetDescription
from tests.support.commands import run
from tests.support.reports import measure_few

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("evaluation", "predictions")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "count", "made"), [("evaluation", 4, ["curves.png", "report.png"]), ("predictions", 2, ["out"])]
)
def test_the_code_runs(page: str, count: int, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGES[page], flags=re.DOTALL)
    assert len(blocks) == count
    for at, (language, code) in enumerate(blocks):
        if language == "python":
            exec(compile(code, f"{page}.md, block {at}", "exec"), scope)
        else:
            for line in code.splitlines():
                result = run(*shlex.split(line, comments=True)[1:])
                assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == made


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[page]):
        assert (DOCS / target).is_file(), target


def test_the_format_is_that_of_the_code() -> None:
    cells = re.findall(r"^\| (`[^|]*`) \|", PAGES["predictions"], flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([^`]*)`", cell)]
    files = [name for name in named if "." in name]
    assert [*files, *SCHEMA.names] == named[: len(files) + len(SCHEMA)]
    assert sorted(named[len(files) + len(SCHEMA) :]) == sorted(f.name for f in fields(SetDescription))
