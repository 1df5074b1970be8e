"""The script for a GPU takes the steps of all its parts on small numbers on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {
    "card", "torch", "load_share_of_pinned_copy", "loaded_bits_equal", "r18_hours_9216", "r20_hours_1024",
    "exact_bits_equal", "failed",
}  # fmt: skip


@pytest.mark.slow
def test_all_parts_run_on_small_numbers(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu", "--tiny"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    figures = json.loads(output.splitlines()[-1])
    assert set(figures) >= FIGURES
    assert figures["failed"] == []
    assert figures["card"] == "cpu"
    assert figures["loaded_bits_equal"]
    assert figures["exact_bits_equal"]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"facts", "engine", "load", "step", "exact", "conv"}
