"""docs/data.md says what the package reads, and its code runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from checkpoints_zoo.images import CLASSES, DATASETS
from docs.make.data import SOURCES, page

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE, "run `python -m docs.make`"


def test_every_set_and_every_label_is_there() -> None:
    table = PAGE.partition("## By name")[2].partition("## Labels")[0]
    assert [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")] == list(DATASETS)
    assert list(SOURCES) == list(CLASSES)
    blocks = re.findall(r"\*\*(\S+)\*\* \((\d+)\).*?```\n(.*?)```", PAGE, flags=re.DOTALL)
    assert {name: tuple(" ".join(text.split()).split(", ")) for name, _, text in blocks} == dict(CLASSES)
    assert all(int(count) == len(CLASSES[name]) for name, count, _ in blocks)


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Callable[[str], ModuleType]) -> None:
    oracle("datasets").disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 7
    for at, code in enumerate(blocks):
        exec(compile(code, f"data.md, block {at}", "exec"), scope)
