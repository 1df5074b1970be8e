"""benchmarks/gpu.py on a simulated card: all parts take their steps on small numbers."""

from __future__ import annotations

import pytest

from tests.support.gpu_script import PARTS, run_part

pytestmark = pytest.mark.simgpu


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_part(part, capsys=capsys)
