"""The page on GPUs cannot go stale: its code runs, its tables and the hours in training/README.md are the numbers'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.make import gpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
NUMBERS = json.loads((ROOT / "docs" / "studies" / "gpu-h200.json").read_text(encoding="utf-8"))


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "gpu.md", "exec"), scope)
    assert capsys.readouterr().out == code.rpartition("# ")[2]


def test_the_tables_are_the_numbers() -> None:
    assert gpu.page() == PAGE, "run `python -m docs.make docs/gpu.md`"
    loop, graph = (
        next(r["ms"] for r in NUMBERS["ensembles"] if r["way"] == way and r["net"] == "ResNet-18")
        for way in ("loop over modules", "graph")
    )
    assert f"| graph | {graph:.1f} | {loop / graph:.1f} |" in PAGE


def test_the_hours_are_those_of_the_steps() -> None:
    """9,216 members × 390 steps × 75 epochs, and 64 stacks × 390 steps × 164 epochs, at the measured milliseconds."""
    hours = {"resnet18-cifar10": 9216 * 390 * 75, "resnet20-frn-silu-cifar10": 64 * 390 * 164}
    readme = (ROOT / "training" / "README.md").read_text(encoding="utf-8")
    for recipe, collection in (("resnet18-cifar10", "resnet18-cifar100"), ("resnet20-frn-silu-cifar10",) * 2):
        [ms] = [
            r["ms"]
            for r in NUMBERS["steps"]
            if r["recipe"] == recipe and r["captured"] and r["deterministic"] and r["changes"] == {}
        ]
        wanted = f"{hours[recipe] * ms / 3.6e6:.0f}"
        assert re.search(rf"`{collection}`, [\d,]+ members \| [\d,]+ \| {wanted} \|", PAGE)
        assert re.search(rf"`{collection}` \|.*\| {wanted} h \|", readme)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
