"""The page on transformers: its numbers are those of the result file, and the file's agree with formulas by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from docs.make.transformers import MEASURED, PAGE, interval_over_members, page

COUNTS = json.loads(MEASURED.read_text(encoding="utf-8"))["counts"]
BARRIERS = json.loads(MEASURED.read_text(encoding="utf-8"))["barriers"]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m docs.make docs/transformers.md`"


def test_the_counts_are_those_of_formulas() -> None:
    """Heads of width k have 2 k² numbers; rotary pairs 2 a pair; streams the rotations that the norms leave."""

    def log10_factorial(n: int) -> float:
        return math.lgamma(n + 1) / math.log(10)

    assert COUNTS["BERT base"]["inside heads"] == COUNTS["GPT-2 (124M)"]["inside heads"] == 12 * 12 * 2 * 64**2
    assert COUNTS["ViT-B/16"]["inside heads"] == 12 * 12 * 2 * 64**2
    assert COUNTS["ViT-B/16"]["streams"] == 767 * 766 // 2
    assert COUNTS["BERT base"]["streams"] == COUNTS["GPT-2 (124M)"]["streams"] == 0
    units = 12 * (log10_factorial(12) + log10_factorial(3072))
    assert COUNTS["ViT-B/16"]["log10_permutations"] == pytest.approx(units, rel=1e-9)
    assert COUNTS["GPT-2 (124M)"]["log10_permutations"] == pytest.approx(units + log10_factorial(768), rel=1e-9)
    # A quarter of the 64 units of a head turn, in 8 pairs; the other 48 do not.
    assert COUNTS["Pythia 70M"]["inside heads"] == 6 * 8 * (2 * 8 + 48**2 + 64**2)
    assert COUNTS["Pythia 70M"]["streams"] == 511 * 510 // 2
    # Four key/value heads a layer, shared by eight heads each.
    assert COUNTS["TinyLlama 1.1B"]["inside heads"] == 22 * 4 * (2 * 32 + 64**2)
    assert COUNTS["TinyLlama 1.1B"]["streams"] == 2048 * 2047 // 2
    assert COUNTS["Qwen3 0.6B"]["inside heads"] == 28 * 8 * 128**2
    assert COUNTS["Qwen3 0.6B"]["streams"] == 0


def test_all_pairs_are_measured() -> None:
    for measured in BARRIERS.values():
        assert len(measured["barriers"]) == 32 * 31 // 2
        assert measured["low"] < measured["mean"] < measured["high"]
        assert measured["mean"] == pytest.approx(np.mean(measured["barriers"]), abs=1e-4)


def test_the_interval_resamples_members() -> None:
    """Against a plain loop that draws members, with numpy."""
    generator = np.random.default_rng(0)
    effects = generator.normal(size=20)
    square = effects[:, None] + effects[None] + 0.1 * generator.normal(size=(20, 20))
    means = []
    for _ in range(4000):
        drawn = generator.integers(20, size=20)
        values = [square[min(i, j), max(i, j)] for a, i in enumerate(drawn) for j in drawn[a + 1 :] if i != j]
        means.append(np.mean(values))
    found = interval_over_members(torch.from_numpy(square))
    assert found == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.05)
