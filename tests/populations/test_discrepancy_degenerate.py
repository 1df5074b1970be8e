"""MMD² and its test on degenerate sets, and on real weights under the null: against double sums and uniformity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.populations.kernels import draw_permutations
from tests.populations.test_discrepancy import assert_double_sums, double_sum, drawn, flat
from tests.support.weight_stacks import mmd_of_stacks

Stacked = dict[str, Tensor]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TWICE = normal(3, 20)[torch.tensor([0, 1, 1, 2, 0])]
FAR = torch.cat([torch.zeros(1, 30), 10 + normal(3, 30, scale=1e-2)])
WIDTHS = {"gaussian": [0.5, 2.0], "laplace": [1.0]}
SIGNS = torch.sign(normal(6, 4, seed=2))  # members that are often the same


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (normal(2, 5), normal(2, 5, seed=1)),  # the fewest members
        (normal(2, 5), normal(2, 5)),
        (normal(9, 1), normal(2, 1, seed=1)),  # one weight
        (TWICE, TWICE),
        (TWICE, normal(4, 20, seed=1)),
        (SIGNS, -SIGNS),
        (torch.zeros(3, 7), torch.ones(4, 7)),
        (torch.zeros(3, 7), torch.zeros(4, 7)),
        (normal(4, 30, scale=1e4).half(), normal(5, 30, seed=1, scale=1e4).half()),
        (normal(4, 30, scale=1e-7), normal(5, 30, seed=1, scale=1e-7)),  # nearer than the least bandwidth
        (normal(4, 30, scale=1e-300).double() * 1e-300, normal(5, 30).double()),
        (FAR, FAR.flip(0) + normal(4, 30, seed=7, scale=1e-2)),  # near each other, far from the first
        (torch.cat([normal(4, 5000), 1e3 * normal(4, 1)], 1), normal(3, 5001, seed=3)),
    ],
    ids=["two", "same", "one", "twice", "half", "signs", "ends", "zero", "large", "tiny", "nothing", "far", "uneven"],
)
def test_degenerate_sets_are_the_double_sums(first: Tensor, second: Tensor) -> None:
    a, b = {"w": first}, {"w": second}
    found = mmd_of_stacks(a, b, permutations=29)
    assert_double_sums(found, a, b, {"w": ["w"]})
    for group in found.groups.values():
        assert 1 / 30 <= group.p_value <= 1
        assert all(-2 <= value <= 2 for value in group.values)
    swapped = mmd_of_stacks(b, a, permutations=29)
    assert swapped["w"].values == pytest.approx(found["w"].values, abs=1e-9)


def test_a_p_value_counts_relabellings_that_tie() -> None:
    """Members of two kinds: many relabellings are as far apart as the sets, and all of those count."""
    first, second = ({"w": torch.tensor(x, dtype=torch.float32)[:, None]} for x in ([0, 0, 0, 1], [1, 1, 0, 1]))
    found = mmd_of_stacks(first, second, permutations=200, widths={"gaussian": [1.5]}, seed=1)["w"]
    every = np.r_[flat(first, ["w"]), flat(second, ["w"])]
    values = [
        double_sum(every[c], every[~c], "gaussian", 1.5) for c in draw_permutations(4, 4, 200, 1).T.bool().numpy()
    ]
    reached = sum(v >= values[0] - 1e-9 for v in values[1:])
    assert 20 < reached < 200
    assert found.p_value == (1 + reached) / 201


@pytest.fixture(scope="module")
def stacks() -> tuple[Stacked, Stacked]:
    """Weights of 64 trained members, as they are stored and canonical."""
    members = zoo.load("convnet-digits")
    views = members, members.canonicalize(scale="unit-norm", permute="first")
    stored, canonical = ({name: t.clone() for name, t in view.stack().items()} for view in views)
    return stored, canonical


@pytest.mark.slow
def test_p_values_of_trained_members_are_uniform_before_and_after_removing_symmetries(
    stacks: tuple[Stacked, Stacked],
) -> None:
    """Ten members drawn at random and halved at random: given the ten, each p-value of 1/20 to 1 is as likely."""
    random = np.random.default_rng(0)
    for stacked in stacks:
        found = []
        for seed in range(60):
            drawn_members = torch.tensor(random.permutation(64)[:10])
            halves = [{n: t[drawn_members[some]] for n, t in stacked.items()} for some in (slice(0, 5), slice(5, 10))]
            tested = mmd_of_stacks(
                *halves, groups={"conv1": ["conv1.weight", "conv1.bias"]}, permutations=19, seed=seed
            )
            found.append([tested["conv1"].p_value, tested.p_value])
        for values in np.array(found).T:
            counts = np.bincount(np.rint(values * 20).astype(int) - 1, minlength=20).reshape(5, 4).sum(1)
            assert stats.chisquare(counts).pvalue > 0.002
            assert abs(np.mean(values <= 0.1) - 0.1) < 4 * math.sqrt(0.09 / len(values))


@pytest.mark.slow
def test_p_values_of_members_that_are_often_the_same_are_no_smaller_than_uniform() -> None:
    random = torch.Generator().manual_seed(0)
    found = []
    for seed in range(150):
        sets = [{"w": torch.randint(2, (5, 2), generator=random).float()} for _ in range(2)]
        found.append(mmd_of_stacks(*sets, permutations=39, seed=seed, widths=WIDTHS).p_value)
    for level in (0.05, 0.1, 0.25, 0.5):
        assert np.mean(np.array(found) <= level) <= level + 3 * math.sqrt(level * (1 - level) / len(found))


def test_weights_that_are_not_finite_are_refused() -> None:
    good, bad = {"v": normal(3, 4), "w": normal(3, 4)}, {"v": normal(3, 4, seed=1), "w": normal(3, 4, seed=2)}
    for value in (math.inf, math.nan):
        bad["w"][1, 2] = value
        with pytest.raises(UsageError) as error:
            mmd_of_stacks(good, bad)
        text = "weights of two sets of members: expected finite ones, with finite squares; found others in 'w'."
        assert str(error.value) == text


def test_an_estimate_has_no_bias() -> None:
    """The mean of MMD² over all ways to halve the same members is that of no difference: below 0 by the pairs' own."""
    members = drawn(6)
    found = []
    for chosen in range(1 << 5):
        first = [i for i in range(6) if (2 * chosen + 1) >> i & 1]
        if len(first) == 3:
            second = [i for i in range(6) if i not in first]
            halves = [{n: t[some] for n, t in members.items()} for some in (first, second)]
            found.append(mmd_of_stacks(*halves, permutations=1, widths={"laplace": [60.0]}).value)
    assert len(found) == 10
    # Every pair is within a half in 4 of 10 splits and across in 6: the shares of pairs they are averaged over.
    assert np.mean(found) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("given", [object(), "convnet-digits", torch.zeros(3)])
def test_what_has_no_weights_is_refused(given: Any) -> None:
    members = zoo.load("convnet-digits", n=4)
    for pair in ((given, None), (members, given)):
        with pytest.raises(UsageError, match=r"^sets of members, whose .*: expected a Collection; found "):
            zoo.mmd(*pair)
