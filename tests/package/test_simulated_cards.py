"""The CUDA code, on two simulated cards: the tests run in a process whose torch sees them (tests/simgpu)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CI
from tests.simgpu.build import environment, missing_part

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_on_simulated_cards() -> None:
    if missing := missing_part():
        text = f"simulated cards need {missing}"
        if CI:
            pytest.fail(text)
        pytest.skip(text)
    own = {name: value for name, value in environment(2).items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.simgpu.plugin", "-n", "0", "-q", "--tb=short"]
    run = subprocess.run(
        [*command, "-m", "gpu or simgpu", "tests/simgpu", "tests/gpu"],
        cwd=ROOT, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if run.returncode:
        pytest.fail(f"{' '.join(command)}\n{run.stdout}", pytrace=False)
