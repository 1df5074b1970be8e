"""The CUDA code, on simulated cards: each part runs in a process of its own, whose torch sees them (tests/simgpu)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CI
from tests.simgpu.build import environment, missing_part

ROOT = Path(__file__).parents[2]
TRAINING = "gpu/test_gpu_training.py"
# part -> (number of cards, folders and files)
PARTS = {
    "gpu": (1, ["gpu/test_gpu.py", "gpu/test_gpu_memory.py", "gpu/test_gpu_methods.py", TRAINING]),
    "two": (
        2,
        [
            "simgpu/test_simulator.py",
            "simgpu/test_memory_errors.py",
            "simgpu/test_counts.py",
            "simgpu/test_training_counts.py",
            "simgpu/test_entry_points.py",
            "simgpu/test_gpu_script.py",
            "gpu/test_gpu_graphs.py",
        ],
    ),
    "methods": (
        2,
        ["simgpu/test_methods_and_training.py", f"{TRAINING}::test_a_second_gpu_trains_the_same_members"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_on_simulated_cards(part: str) -> None:
    if missing := missing_part():
        text = f"simulated cards need {missing}"
        if CI:
            pytest.fail(text)
        pytest.skip(text)
    devices, files = PARTS[part]
    own = {name: value for name, value in environment(devices).items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.simgpu.plugin", "-n", "0", "-q", "--tb=short"]
    run = subprocess.run(
        [*command, "-m", "gpu or simgpu", *(f"tests/{file}" for file in files)],
        cwd=ROOT, env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if run.returncode:
        pytest.fail(f"{' '.join(command)}\n{run.stdout}", pytrace=False)


def test_every_file_has_a_part() -> None:
    found = {f"{path.parent.name}/{path.name}" for path in (ROOT / "tests").glob("*gpu/test_*.py")}
    assert found <= {file for _, files in PARTS.values() for file in files}
