"""Worth k members: curves with known answers; means over runs and p-values of several runs against scipy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from checkpoints_zoo.methods.comparing.equivalent_size import EquivalentSize, FigureCurve, equivalent_size
from checkpoints_zoo.methods.comparing.estimates import Estimate, mean_over_runs


def curve_of(limit: float, b: float, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> FigureCurve:
    return FigureCurve(sizes, [limit + b / k for k in sizes], limit)


@given(st.floats(-1, 1), st.floats(0.01, 1), st.booleans(), st.floats(1, 200))
def test_a_figure_of_k_members_is_worth_k(limit: float, b: float, rising: bool, size: float) -> None:
    curve = curve_of(limit, -b if rising else b)
    value = limit + (-b if rising else b) / size
    assert curve.equal_ensemble_size(value) == pytest.approx(size, rel=1e-6)
    assert curve.equal_ensemble_size(limit + (-b if rising else b) * 1.5) == 0
    assert curve.equal_ensemble_size(limit - (-b if rising else b)) == math.inf


def test_worth_in_words_and_where_it_says_nothing() -> None:
    curve = curve_of(0.1, 0.8)
    placed = equivalent_size(curve, Estimate(0.3, 0.2, 0.5))
    assert placed is not None
    assert (placed.members, placed.low, placed.high) == pytest.approx((4, 2, 8))
    assert (str(placed), placed.short) == ("4 [2, 8]", "4 [2, 8]")
    words = {
        Estimate(1.0, 0.8, 1.2): ("less than 1", "<1 [<1, 1.1]"),
        Estimate(0.12, 0.08, 0.16): ("more than 16 (the limit is 0.1)", ">16 [13, >16]"),
        Estimate(0.05): ("more than 16 (the limit is 0.1)", ">16"),
    }
    for estimate, (long, short) in words.items():
        placed = equivalent_size(curve, estimate)
        assert placed is not None
        assert (str(placed), placed.short) == (long, short)
        assert EquivalentSize.from_json(json.loads(json.dumps(placed.to_json(), allow_nan=False))) == placed
    uneven = FigureCurve((1, 2, 4, 8), (0.9, 0.98, 0.96, 1.0), 1.0)  # regression: sizes 2 and 4 both 0.97
    assert uneven.falling_distances() == pytest.approx([0.1, 0.03, 0.03, 0.0])
    assert uneven.equal_ensemble_size(0.97) == 4
    assert equivalent_size(curve, Estimate(math.nan)) is None
    assert equivalent_size(FigureCurve((1, 2), (0.5, 0.5), 0.5), Estimate(0.5)) is None


def test_means_over_runs() -> None:
    random = np.random.default_rng(0)
    values = random.normal(0.3, 0.05, 7)
    estimate = mean_over_runs("nll", values.tolist())
    assert (estimate.low, estimate.high) == pytest.approx(
        stats.t.interval(0.95, 6, values.mean(), stats.sem(values)), rel=1e-12
    )
    assert mean_over_runs("accuracy", [0.99, 0.9999, 0.98]).high == 1.0  # cut at the range
    one = mean_over_runs("nll", [0.2])
    assert (one.value, one.low, one.high) == (0.2, None, None)
