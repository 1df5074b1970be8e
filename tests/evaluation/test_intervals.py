"""Intervals against their formulas by hand, and against simulated populations whose answers are known.

One figure of many populations is a vector of figures: one call then gives hundreds of intervals.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import Interval, bootstrap_mean, jackknife, subset_band

INPUTS, CLASSES = 40, 3
# Student's two-sided 95 % quantile by number of members, from printed tables.
T = {6: 2.570582, 20: 2.093024, 200: 1.971957}
FIGURES = ["accuracy", "NLL", "Brier", "mutual information", "disagreement"]


@pytest.fixture(scope="module")
def world() -> tuple[Tensor, Tensor]:
    """Fix the inputs: what the mean member answers, logits (input, class), and the labels (input,)."""
    generator = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(INPUTS, CLASSES, generator=generator)
    return logits, torch.multinomial(logits.softmax(-1), 1, generator=generator).flatten()


def train(world: tuple[Tensor, Tensor], populations: int, members: int, seed: int) -> Tensor:
    """Draw members around the mean one, and return probabilities (population, member, input, class)."""
    generator = torch.Generator().manual_seed(seed)
    bias = 0.3 * torch.randn(populations, members, 1, CLASSES, generator=generator)
    noise = torch.randn(populations, members, INPUTS, CLASSES, generator=generator)
    return (world[0] + bias + noise).softmax(-1)


def measure(probs: Tensor, labels: Tensor) -> Tensor:
    """Measure the ensemble of each population, and return (figure, population) values, float64."""
    mean, members = probs.mean(1), probs.shape[1]
    right = mean[:, torch.arange(INPUTS), labels]
    indicator = torch.nn.functional.one_hot(labels, CLASSES)
    entropies = [-(p * p.log()).sum(-1) for p in (mean, probs)]
    votes = torch.nn.functional.one_hot(probs.argmax(-1), CLASSES).double().mean(1)
    return torch.stack(
        [
            (mean.argmax(-1) == labels).double().mean(-1),
            -right.log().double().mean(-1),
            (mean - indicator).square().sum(-1).double().mean(-1),
            (entropies[0] - entropies[1].mean(1)).double().mean(-1),
            (1 - votes.square().sum(-1)).mean(-1) * (members / max(members - 1, 1)),
        ]
    )


def coverage(intervals: list[Interval], answers: Tensor) -> np.ndarray:
    """Compare with answers (answer, figure, population), and return the share inside for each figure."""
    low, high = (torch.tensor([getattr(i, side) for i in intervals]) for side in ("low", "high"))
    shape = answers.shape[1:]
    inside = (low.reshape(shape) <= answers) & (answers <= high.reshape(shape))
    return inside.double().mean((0, 2)).numpy()


def bounds(intervals: list[Interval]) -> Tensor:
    """Stack low, value and high, and return (3, figure)."""
    return torch.tensor([[i.low, i.value, i.high] for i in intervals], dtype=torch.float64).T


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 24])
def test_band_covers_a_fresh_ensemble_at_its_rate(world: tuple[Tensor, Tensor], size: int) -> None:
    """Three new ensembles for each of 300 populations: 0.04 is three standard errors of a share of 300.

    The accuracy of an ensemble jumps: subsets of more than N/2 exaggerate that, and its band is too wide.
    """
    members = train(world, 300, 32, seed=size)
    fresh = torch.stack([measure(train(world, 300, size, seed=100 + s), world[1]) for s in range(3)])
    band = subset_band(lambda chosen: measure(members[:, chosen], world[1]).flatten(), 32, size, subsets=50)
    covered = dict(zip(FIGURES, coverage(band, fresh), strict=True))
    if size == 1:  # one member has no diversity
        del covered["mutual information"], covered["disagreement"]
    if size == 24:
        assert 0.95 < covered.pop("accuracy") <= 1
    assert covered == pytest.approx(dict.fromkeys(covered, 0.95), abs=0.04)
    if size == 24:  # the raw spread of overlapping subsets would be far too narrow
        shrink = math.sqrt((1 - 24 / 32) / (1 + 24 / 32))
        raw = [Interval(v, v - shrink * (v - a), v + shrink * (b - v)) for a, v, b in bounds(band).T.tolist()]
        assert coverage(raw, fresh).max() < 0.75


@pytest.mark.slow
@pytest.mark.parametrize("members", [8, 16, 32])
def test_jackknife_covers_the_expected_figure_of_so_many_members_at_its_rate(
    world: tuple[Tensor, Tensor], members: int
) -> None:
    """Smooth, jumping (accuracy) and biased (mutual information) figures alike, to three standard errors."""
    sample = train(world, 300, members, seed=members)
    fresh = [measure(train(world, 300, members, seed=200 + s), world[1]).mean(-1) for s in range(8)]
    expected = torch.stack(fresh).mean(0)[None, :, None].expand(1, -1, 300)
    intervals = jackknife(lambda chosen: measure(sample[:, chosen], world[1]).flatten(), members, subsets=50)
    covered = dict(zip(FIGURES, coverage(intervals, expected), strict=True))
    assert covered == pytest.approx(dict.fromkeys(covered, 0.95), abs=0.04)


@pytest.mark.parametrize("members", [3, 4, 8, 32])
def test_all_intervals_cover_normal_means_at_their_rate_however_few_the_members(members: int) -> None:
    """Populations of normal figures, mean 0: band of one fresh member, jackknife and bootstrap of the mean."""
    populations = 2000
    generator = torch.Generator().manual_seed(members)
    values = torch.randn(members, populations, dtype=torch.float64, generator=generator)
    fresh = torch.randn(populations, dtype=torch.float64, generator=generator)
    band = bounds(subset_band(lambda chosen: values[chosen].mean(0), members, 1))
    mean = bounds(jackknife(lambda chosen: values[chosen].mean(0), members))
    resampled = bounds([bootstrap_mean(column, resamples=400) for column in values[:, :500].T])
    assert float(((band[0] <= fresh) & (fresh <= band[2])).double().mean()) == pytest.approx(0.95, abs=0.02)
    assert float(((mean[0] <= 0) & (mean[2] >= 0)).double().mean()) == pytest.approx(0.95, abs=0.02)
    # Few members have few distinct resamples: the percentiles are coarse.
    covered = float(((resampled[0] <= 0) & (resampled[2] >= 0)).double().mean())
    assert covered == pytest.approx(0.95, abs=0.035)


@pytest.mark.slow
def test_bootstrap_covers_the_population_mean_at_its_rate() -> None:
    """Skewed members, as losses are: exponential, mean 1; 0.04 is over three standard errors."""
    samples = torch.empty(400, 64).exponential_(generator=torch.Generator().manual_seed(0))
    intervals = [bootstrap_mean(values, resamples=400) for values in samples]
    covered = np.mean([i.low <= 1 <= i.high for i in intervals])
    assert covered == pytest.approx(0.95, abs=0.04)


@pytest.mark.slow
@given(st.lists(st.floats(-100, 100), min_size=3, max_size=40), st.integers(0, 2**31))
def test_bootstrap_is_deterministic_and_holds_the_mean_of_equal_values(values: list[float], seed: int) -> None:
    interval = bootstrap_mean(torch.tensor(values, dtype=torch.float64), seed=seed, resamples=50)
    assert interval == bootstrap_mean(torch.tensor(values, dtype=torch.float64), seed=seed, resamples=50)
    assert interval.value == pytest.approx(np.mean(values), abs=1e-9)
    equal = bootstrap_mean(torch.full((3,), values[0], dtype=torch.float64), seed=seed, resamples=50)
    assert (equal.low, equal.value, equal.high) == pytest.approx((values[0],) * 3, abs=1e-9)


def test_bootstrap_width_is_that_of_the_standard_error() -> None:
    """It is 2 t standard errors wide, s over N - 1, but for the resampling."""
    values = torch.randn(200, generator=torch.Generator().manual_seed(3)).double()
    interval = bootstrap_mean(values, resamples=20_000)
    expected = 2 * T[200] * float(values.std()) / math.sqrt(200)
    assert interval.high - interval.low == pytest.approx(expected, rel=0.03)


def test_band_and_jackknife_are_their_formulas_on_random_subsets() -> None:
    """The figure records what it is asked for."""
    values = torch.randn(20, generator=torch.Generator().manual_seed(4)).double()
    asked: list[list[int]] = []

    def figure(chosen: Tensor) -> Tensor:
        asked.append(chosen.tolist())
        return torch.stack([values[chosen].mean(), values[chosen].max()])

    band = subset_band(figure, 20, 5, subsets=100)
    assert all(len(set(chosen)) == 5 and max(chosen) < 20 for chosen in asked)
    assert len(asked) == 100
    for i, reduce in enumerate([np.mean, np.max]):
        by_hand = [reduce(values[chosen].numpy()) for chosen in asked]
        half = T[20] * np.std(by_hand, ddof=1) * math.sqrt((1 + 5 / 20) / (1 - 5 / 20))
        expected = (np.mean(by_hand) - half, np.mean(by_hand), np.mean(by_hand) + half)
        assert (band[i].low, band[i].value, band[i].high) == pytest.approx(expected, rel=1e-5)

    asked.clear()
    interval = jackknife(figure, 20, subsets=100, delete=6)[0]
    assert asked[0] == list(range(20))
    assert {len(chosen) for chosen in asked[1:]} == {14}
    half = T[20] * np.std([values[c].mean() for c in asked[1:]], ddof=1) * math.sqrt(14 / 6)
    mean = float(values.mean())
    expected = (mean - half, mean, mean + half)
    assert (interval.low, interval.value, interval.high) == pytest.approx(expected, rel=1e-5)
    asked.clear()
    jackknife(figure, 19)
    assert {len(chosen) for chosen in asked[1:]} == {10}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_few_subsets_are_measured_once_each_and_a_mean_then_has_the_exact_width(size: int) -> None:
    values = torch.randn(6, generator=torch.Generator().manual_seed(5)).double()
    asked: list[tuple[int, ...]] = []

    def figure(chosen: Tensor) -> Tensor:
        asked.append(tuple(chosen.tolist()))
        return values[chosen].mean().reshape(1)

    interval = subset_band(figure, 6, size)[0]
    assert asked == list(itertools.combinations(range(6), size))
    half = T[6] * float(values.std()) * math.sqrt(1 / size + 1 / 6)
    assert interval.high - interval.value == pytest.approx(half, rel=1e-5)
    interval = jackknife(figure, 6, delete=size)[0]
    assert interval.high - interval.value == pytest.approx(T[6] * float(values.std()) / math.sqrt(6), rel=1e-5)


def test_single_members_are_measured_once_each_however_many() -> None:
    asked: list[int] = []
    subset_band(lambda chosen: asked.append(int(chosen)) or chosen.double(), 300, 1, subsets=10)
    assert asked == list(range(300))


def test_seed_alone_decides_the_subsets() -> None:
    values = torch.randn(30, generator=torch.Generator().manual_seed(6))

    def figure(chosen: Tensor) -> Tensor:
        return values[chosen].amax().reshape(1)

    for measured in (partial(subset_band, figure, 30, 7), partial(jackknife, figure, 30)):
        first = measured(seed=1)
        torch.manual_seed(99)
        assert measured(seed=1) == first != measured(seed=2)


@pytest.mark.parametrize("members", [1, 2])
def test_too_few_members_have_no_bounds(members: int) -> None:
    values = torch.tensor([0.25, 0.75])[:members]
    without = Interval(float(values.mean()), None, None)
    assert without.level == 0.95
    assert bootstrap_mean(values) == without
    assert jackknife(lambda chosen: values[chosen].mean().reshape(1), members) == [without]
    if members == 2:
        assert subset_band(lambda chosen: values[chosen], 2, 1) == [without]


def test_figures_without_a_finite_spread_have_no_bounds() -> None:
    values = torch.tensor([1.0, 2.0, math.inf, 3.0])
    assert bootstrap_mean(values) == Interval(math.inf, None, None)
    without = [Interval(math.inf, None, None)]
    assert subset_band(lambda chosen: values[chosen], 4, 1) == without
    assert jackknife(lambda chosen: values[chosen].mean().reshape(1), 4) == without
    undefined = subset_band(lambda chosen: torch.tensor([math.nan, 1.0]), 4, 2)
    assert math.isnan(undefined[0].value)
    assert undefined[0].low is undefined[0].high is None
    assert undefined[1] == Interval(1.0, 1.0, 1.0)


def test_interval_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Interval(0.5, 0.4, 0.6).value = 0.7  # type: ignore[misc]


def one(chosen: Tensor) -> Tensor:
    """Return one figure."""
    return torch.ones(1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: subset_band(one, 8, 8),
            "size: expected 1 to 7 of 8 members; found 8. Use jackknife for all members.",
        ),
        (
            lambda: subset_band(one, 8, 0),
            "size: expected 1 to 7 of 8 members; found 0. Use jackknife for all members.",
        ),
        (
            lambda: subset_band(one, 8, 2, subsets=1),
            "subsets: expected at least 2; found 1. Give more subsets.",
        ),
        (lambda: jackknife(one, 0), "members: expected at least 1; found 0. Give more members."),
        (
            lambda: jackknife(one, 8, delete=8),
            "delete: expected 1 to 7 of 8 members; found 8. Leave it out.",
        ),
        (
            lambda: jackknife(lambda chosen: torch.ones(()), 8),
            "figure: expected (figure,) values, as many each time; found shape (). Stack its figures.",
        ),
        (
            lambda: jackknife(lambda chosen: torch.ones(len(chosen)), 8, delete=1),
            "figure: expected (figure,) values, as many each time; found shape (7,). Stack its figures.",
        ),
        (
            lambda: bootstrap_mean(torch.ones(2, 3)),
            "values: expected axes (member,); found shape (2, 3). Reshape it, one axis for each name.",
        ),
        (
            lambda: bootstrap_mean(torch.tensor([1.0, math.nan, 1.0])),
            "values: expected no NaN; found 1 in 3 values. Check the weights of the members.",
        ),
        (
            lambda: bootstrap_mean(torch.ones(0)),
            "values: expected at least one value; found shape (0,). Check what was selected before it.",
        ),
        (
            lambda: bootstrap_mean(torch.ones(3), resamples=0),
            "resamples: expected at least 1; found 0. Give more resamples.",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        call()
    assert str(error.value) == text
