"""benchmarks/gpu.py on a simulated card: all parts take their steps on small numbers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.simgpu


@pytest.mark.parametrize("part", ["facts", "engine", "load", "step", "exact", "conv"])
def test_a_part_runs(part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["gpu.py", part, "--tiny"])
    try:
        runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")
    finally:
        sys.modules.pop("synthetic", None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if "failed" in row] == []
    assert rows[-1]["what"] == "figures"
    assert rows[-1].get("loaded_bits_equal", True)
    assert rows[-1].get("exact_bits_equal", True)
