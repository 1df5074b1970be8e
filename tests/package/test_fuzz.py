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


@pytest.mark.slow
def test_mutated_files_and_hostile_strings_break_nothing(tmp_path: Path) -> None:
    # In a process of its own: an audit hook stays, and a parser that crashes ends its process.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--files", "132", "--strings", "135"],
        cwd=ROOT, env={**os.environ, "HF_HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["cases"] == 267


@pytest.mark.slow
def test_hostile_strings_of_a_source_break_no_command(tmp_path: Path) -> None:
    """Case 1 of the reported ones: a part of the cases of `python -m tests.hostile_strings`, drawn by a seed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile_strings", "--share", "0.00003", "--only", *QUICK],
        cwd=ROOT, env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["cases"] > 60


@pytest.mark.slow
def test_hostile_strings_of_a_hub_break_no_command(tmp_path: Path) -> None:
    """Cases 2 and 22: a part of the cases of `python -m tests.hostile_hub`, by the quick commands."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile_hub", "--share", "0.0001", "--only", *QUICK],
        cwd=ROOT, env={**os.environ, "HF_HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["cases"] > 55


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
