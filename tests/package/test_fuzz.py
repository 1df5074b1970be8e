"""Mutated files and hostile strings, a part of the cases of `python -m tests.fuzz`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fuzz
from tests.support.commands import ROOT

QUICK = ("list", "show", "download", "audit", "card")  # commands that compute nothing


# Runs modules, each in a process forked from this one, which has imported what takes seconds, and no client of the Hub:
# an audit hook stays in its process, and a parser that crashes ends it.
FORKING = """
import json, os, runpy, sys
import matplotlib.pyplot, pandas, pyarrow.parquet, sklearn.datasets, torch

for module, words, variables in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        os.environ |= variables
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"{module}: exit code {code}")
"""
# Module, words, environment, and how many cases are run at least.
PARTS = (
    ("tests.fuzz", ["--files", "132", "--strings", "135"], {}, 267),
    ("tests.hostile_strings", ["--share", "0.00003", "--only", *QUICK], {"HF_HUB_OFFLINE": "0"}, 61),
    ("tests.hostile_hub", ["--share", "0.0001", "--only", *QUICK], {}, 56),
)


@pytest.mark.slow
def test_mutated_files_and_hostile_strings_break_nothing(tmp_path: Path) -> None:
    """Cases 1, 2 and 22 of the reported ones, a part of the cases of each module, drawn by a seed."""
    jobs = [(module, words, {"HF_HOME": str(tmp_path / module), **variables}) for module, words, variables, _ in PARTS]
    done = subprocess.run(
        [sys.executable, "-c", FORKING], input=json.dumps(jobs), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [json.loads(line)["cases"] for line in done.stdout.splitlines() if line.startswith('{"cases"')]
    assert all(count >= least for count, (*_, least) in zip(counts, PARTS, strict=True)), counts


def test_a_fault_is_seen(tmp_path: Path) -> None:
    report, outside = fuzz.Report(), tmp_path / "outside"

    def leaves_a_file() -> None:
        outside.write_text("here")

    def raises_raw() -> None:
        raise KeyError("no error of ours")

    watch = fuzz.Watch(tmp_path / "inside")
    for use in (leaves_a_file, raises_raw, lambda: None):
        fuzz.run_case(report, watch, use.__name__, "kind", use, 0)
    watch.inside.append("/")  # the hook stays in this process: it is to see nothing any more
    assert [text.split(":")[0] for text in report.failures] == ["leaves_a_file", "raises_raw"]
    assert str(outside) in report.failures[0]


def test_a_case_is_a_function_of_its_seed() -> None:
    raw = bytes(range(256)) * 20
    cases = [fuzz.mutate(raw, random.Random(f"0/{i}")) for i in range(50)]
    assert cases == [fuzz.mutate(raw, random.Random(f"0/{i}")) for i in range(50)]
    assert sum(case != raw for case in cases) > 40
