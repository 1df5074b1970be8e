"""benchmarks/gpu.py on a simulated card: all parts take their steps on small numbers."""

from __future__ import annotations

import pytest

from tests.support.gpu_script import PARTS, run_part

pytestmark = pytest.mark.simgpu
FIGURES = {
    "card", "torch", "load_share_of_pinned_copy", "loaded_bits_equal", "r18_hours_9216", "r20_hours_1024",
    "exact_bits_equal",
}  # fmt: skip


def test_all_parts_run_on_small_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {key for part in PARTS for key in run_part(part, capsys=capsys)[-1]}
    assert figures >= FIGURES
