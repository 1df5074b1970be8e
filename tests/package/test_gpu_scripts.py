"""The script for a GPU runs each part in a process of its own; tests/simgpu runs the parts on small numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpu_script import PARTS

ROOT = Path(__file__).parents[2]
# Stands for Python in gpu.sh: runs the part "facts" and the code after the parts. Another part leaves a row, then dies.
PYTHON = """#!/bin/bash
echo "$*" >>"$OUT/calls"
[[ $1 == - || $2 == facts ]] && exec {python} "$@"
echo '{{"part": "'$2'", "at": 1.0, "what": "figures", "'$2'_key": true}}' >>"$OUT/gpu.jsonl"
[[ $2 == engine ]] && echo '{{"part": "engine", "at": 1.0, "what": "a cell", "failed": "why"}}' >>"$OUT/gpu.jsonl"
kill -9 $$
"""


@pytest.mark.slow
def test_the_script_runs_each_part_whatever_becomes_of_the_others(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": str(python)}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--device", "cpu", "--tiny"]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    ended = {line.split(":")[0]: line.split()[3] for line in lines[:-1]}
    assert ended == {"facts": "0,"} | dict.fromkeys(set(PARTS) - {"facts"}, "137,")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[1] for call in calls[:-1]} == set(PARTS)
    assert all(call.endswith("--device cpu --tiny") for call in calls[:-1])
    figures = json.loads(lines[-1])
    assert (figures.pop("card"), figures.pop("failed")) == ("cpu", ["engine: a cell"])
    assert {key for key in figures if key.endswith("_key")} == {f"{part}_key" for part in PARTS if part != "facts"}
