"""The page on evaluation cannot go stale: its code and its commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "evaluation.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 4
    for at, (language, code) in enumerate(blocks):
        if language == "python":
            exec(compile(code, f"evaluation.md, block {at}", "exec"), scope)
        else:
            for line in code.splitlines():
                result = run(*shlex.split(line)[1:])
                assert result.exit_code == 0, result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["curves.png", "report.png"]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (DOCS / target).is_file(), target
