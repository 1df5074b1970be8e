"""Parts of benchmarks/gpu.py, run in this process on small numbers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = ("facts", "engine", "load", "step", "exact", "conv")


def run_part(part: str, *options: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Run a part; return its rows, the last of which are its figures, and check that none failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OUT", raising=False)
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setattr(sys, "argv", ["gpu.py", part, "--tiny", *options])
        try:
            runpy.run_path(str(BENCHMARKS / "gpu.py"), run_name="__main__")
        finally:
            sys.modules.pop("synthetic", None)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if "failed" in row] == []
    assert {row["part"] for row in rows} == {part}
    assert rows[-1]["what"] == "figures"
    assert rows[-1].get("loaded_bits_equal", True)
    assert rows[-1].get("exact_bits_equal", True)
    return rows
