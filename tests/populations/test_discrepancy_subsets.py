"""MMD² of subsets is the mean of the subsets' double sums; the test permutes within subsets, and runs stay together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.populations.kernels import draw_permutations
from tests.populations.test_discrepancy import double_sum
from tests.support.few_draws import DRAWS, noisy

WIDTH = 10.0
WIDTHS = {"gaussian": [WIDTH]}


def flat(members: Collection) -> np.ndarray:
    names = [name for name, _ in members[0].model().named_parameters()]
    stacked = members.stack()
    return np.concatenate([stacked[name].flatten(1).double().numpy() for name in names], axis=1)


def test_value_and_p_are_those_of_subsets() -> None:
    members = zoo.load("convnet-digits", n=23)
    first, second = members[:13], members[13:]
    found = zoo.mmd(first, second, subset_size=8, widths=WIDTHS, permutations=50, seed=5)
    x, y = flat(first), flat(second)
    statistics = np.zeros(51)
    for subset in range(3):  # 23 members in subsets of 8: every third member of either set
        both = np.r_[x[subset::3], y[subset::3]]
        counts = len(x[subset::3]), len(y[subset::3])
        for split, chosen in enumerate(draw_permutations(*counts, 50, 5 ^ subset).T.bool().numpy()):
            statistics[split] += double_sum(both[chosen], both[~chosen], "gaussian", WIDTH) / 3
    assert (found.subsets, found.members) == (3, (13, 10))
    assert found.value == pytest.approx(statistics[0], abs=1e-6)
    assert found.p_value == (1 + int((statistics[1:] >= statistics[0] - 1e-9).sum())) / 51
    assert json.loads(found.to_json())["subsets"] == 3
    assert "13 against 10 members in 3 subsets; 50 permutations." in found.to_text()


@pytest.mark.slow
def test_one_subset_is_the_whole() -> None:
    members = zoo.load("convnet-digits", n=9)
    assert zoo.mmd(members, permutations=20, subset_size=9) == zoo.mmd(members, permutations=20)
    small = zoo.ns(members, permute="max", permutations=20, subset_size=5)
    views = [members[start::2].canonicalize(scale="unit-norm", permute="max") for start in (0, 1)]
    assert small.mmd.subsets == small.ns.subsets == 2
    assert small.ns == zoo.mmd(*views, permutations=20, subset_size=5)


def test_runs_stay_together_and_a_subset_has_two_of_each_set(tmp_path: Path) -> None:
    draws = noisy(zoo.load("convnet-digits", n=9), "swag", tmp_path, 0.4, runs=9)
    first, second = draws[: 5 * DRAWS], draws[5 * DRAWS :]
    found = zoo.mmd(first, second, subset_size=4, widths=WIDTHS, permutations=30)
    assert found.subsets == 2
    x, y = flat(first), flat(second)
    values = []
    for runs_of_x, runs_of_y in (((0, 2, 4), (0, 2)), ((1, 3), (1, 3))):
        parts = [
            np.concatenate([weights[run * DRAWS : (run + 1) * DRAWS] for run in runs])
            for weights, runs in ((x, runs_of_x), (y, runs_of_y))
        ]
        values.append(double_sum(parts[0], parts[1], "gaussian", WIDTH))
    assert found.value == pytest.approx(np.mean(values), abs=1e-6)
    assert found.p_value is not None
    assert (
        zoo.mmd(first, draws[4 * DRAWS :], subset_size=6, permutations=3).p_value is None
    )  # both sets have draws of a run


@pytest.mark.parametrize("size", [3, -4, 4.5, "8", True, float("nan")])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match="size of subsets: expected 4 members or more, two of each set; found"):
        zoo.mmd(zoo.load("convnet-digits", n=4), subset_size=size)


@pytest.mark.slow
def test_p_values_are_uniform_under_the_null() -> None:
    members = zoo.load("convnet-digits")
    random = np.random.default_rng(0)
    p_values = []
    for seed in range(40):
        chosen = members.take(random.permutation(len(members))[:16].tolist())
        result = zoo.mmd(chosen, subset_size=8, groups={"bias": ["fc2.bias"]}, permutations=19, seed=seed)
        p_values.append(result["bias"].p_value)
    # Each of 20 values is as likely; P(6 or fewer, or 34 or more, of 40 at most 0.5) < 1e-5.
    assert 6 < sum(p <= 0.5 for p in p_values) < 34
    assert len(set(p_values)) > 5
    assert torch.tensor(p_values).min() >= 0.05
