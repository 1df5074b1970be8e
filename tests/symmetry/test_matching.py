"""Linear assignment: against all permutations, and against scipy on the matrix as it is."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.optimize import linear_sum_assignment

from checkpoints_zoo.symmetry.canonical import matching
from checkpoints_zoo.symmetry.canonical.matching import smoothed_potentials, solve_assignment

EPS = np.finfo(np.float64).eps


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take numbers off rows and columns of small matrices too."""
    monkeypatch.setattr(matching, "_SMALL_GROUP", 0)


def check_assignment(gains: np.ndarray) -> None:
    """Check that an assignment is as good as scipy's, but for what float64 can't tell apart."""
    found = solve_assignment(gains)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(len(gains)))
    wide = gains.astype(np.float64)
    best = linear_sum_assignment(wide, maximize=True)[1]
    rows = np.arange(len(gains))
    ours, theirs = math.fsum(wide[rows, found]), math.fsum(wide[rows, best])
    assert abs(ours - theirs) <= 8 * len(gains) * EPS * np.abs(wide).max()


def square_matrices(values: st.SearchStrategy[float], most: int = 9) -> st.SearchStrategy[np.ndarray]:
    shapes = st.integers(1, most).map(lambda n: (n, n))
    return shapes.flatmap(lambda shape: arrays.arrays(np.float64, shape, elements=values))


MATRICES = st.one_of(
    square_matrices(st.integers(-3, 3).map(float)),  # ties
    square_matrices(st.integers(0, 1).map(float)),
    square_matrices(st.floats(-1, 1)),
    square_matrices(st.floats(-1e150, 1e150)),
    square_matrices(
        st.builds(lambda sign, power: sign * 10.0**power, st.sampled_from([-1, 0, 1]), st.integers(-150, 150))
    ),
)


@pytest.mark.slow
@given(MATRICES)
@settings(max_examples=150, deadline=None)
def test_small_matrices_without_reduction(gains: np.ndarray) -> None:
    check_assignment(gains)


@pytest.mark.slow
@given(gains=MATRICES)
@settings(max_examples=200, deadline=None)
def test_small_matrices_with_reduction(gains: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matching, "_SMALL_GROUP", 0)
        check_assignment(gains)


@pytest.mark.slow
@given(gains=square_matrices(st.integers(-9, 9).map(float), most=6))
@settings(max_examples=100, deadline=None)
def test_no_permutation_is_better(gains: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matching, "_SMALL_GROUP", 0)
        rows = np.arange(len(gains))
        best = max(gains[rows, list(p)].sum() for p in permutations(range(len(gains))))
        assert gains[rows, solve_assignment(gains)].sum() == best


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [96, 130])
def test_large_matrices(size: int, dtype: type) -> None:
    rng = np.random.default_rng(size)
    noise = rng.standard_normal((size, size))
    planted = noise + 30 * np.eye(size)[rng.permutation(size)]
    # What coordinate descent meets: columns and rows that differ in size, and a few that are alike.
    products = noise * rng.exponential(size=(size, 1)) * rng.exponential(size=size) + 5 * rng.standard_normal(size)
    twins = products.copy()
    twins[:, size // 2 :] = twins[:, : size - size // 2]
    constant = noise * (rng.random((size, 1)) < 0.5)
    wide = noise * 10.0 ** rng.uniform(-18, 18, (size, 1))
    for gains in (noise, planted, products, twins, constant, wide, np.rint(noise), np.zeros((size, size))):
        check_assignment(np.ascontiguousarray(gains.astype(dtype)))


def test_reduced_costs_are_small_along_the_best_assignment() -> None:
    gains = torch.from_numpy(np.random.default_rng(0).standard_normal((128, 128)))
    rows, columns = smoothed_potentials(gains)
    left = (rows[:, None] + columns - gains).numpy()
    best = linear_sum_assignment(gains.numpy(), maximize=True)[1]
    along, others = left[np.arange(128), best], np.median(left)
    assert along.mean() < 0.1 * others


def test_one_unit_and_constant_gains(reduced: None) -> None:
    assert solve_assignment(np.array([[3.0]])).tolist() == [0]
    assert sorted(solve_assignment(np.full((5, 5), -2.0)).tolist()) == [0, 1, 2, 3, 4]
