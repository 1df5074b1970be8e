"""MMD² between two sets of weights, against double sums; its test, against what a test must do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.populations.discrepancy import MMD, mmd, ns
from checkpoints_zoo.populations.kernels import (
    bandwidths,
    choose_kernels,
    draw_permutations,
    measure_distances,
    p_value_of_largest,
    permuted_mmd2,
    tensors_by_layer,
    unbiased_mmd2,
)
from checkpoints_zoo.symmetry import Element, random_element
from tests.support.weight_stacks import mmd_of_stacks

Stacked = dict[str, Tensor]


def drawn(members: int, shift: float = 0, seed: int = 0) -> Stacked:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv.weight": (3, 2, 2), "conv.bias": (3,), "fc.weight": (4, 50)}
    return {n: shift + torch.randn(members, *shape, generator=generator) for n, shape in shapes.items()}


def flat(stacked: Stacked, names: list[str]) -> np.ndarray:
    return np.concatenate([stacked[n].flatten(1).double().numpy() for n in names], axis=1)


def double_sum(x: np.ndarray, y: np.ndarray, kernel: str, width: float) -> float:
    """The estimate as it is written down, a pair of members at a time."""

    def k(a: np.ndarray, b: np.ndarray) -> float:
        if kernel == "laplace":
            return math.exp(-float(np.abs(a - b).sum()) / width)
        return math.exp(-float(((a - b) ** 2).sum()) / width**2)

    m, n = len(x), len(y)
    within_x = sum(k(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    within_y = sum(k(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    across = sum(k(a, b) for a in x for b in y) / (m * n)
    return within_x + within_y - 2 * across


def assert_double_sums(found: MMD, first: Stacked, second: Stacked, groups: dict[str, list[str]]) -> None:
    groups = groups | {"all": list(first)}
    assert list(found.groups) == list(groups)
    for name, names in groups.items():
        x, y = flat(first, names), flat(second, names)
        group = found[name]
        assert group.weights == x.shape[1]
        for (kernel, width), value in zip(group.kernels, group.values, strict=True):
            assert value == pytest.approx(double_sum(x, y, kernel, width), abs=1e-6)
        assert group.value == pytest.approx(np.mean(group.values), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_estimate_is_the_double_sum(dtype: torch.dtype) -> None:
    first, second = (
        {n: t.to(dtype) for n, t in drawn(m, shift, s).items()} for m, shift, s in ((7, 0, 1), (5, 0.3, 2))
    )
    found = mmd_of_stacks(first, second, permutations=9)
    groups = {"conv": ["conv.weight", "conv.bias"], "fc": ["fc.weight"]}
    assert_double_sums(found, first, second, groups)
    assert [k for k, _ in found["fc"].kernels] == ["gaussian"] * 10 + ["laplace"] * 10
    assert (found.members, found.permutations, found.value) == ((7, 5), 9, found["all"].value)


def test_groups_and_bandwidths_of_ones_own() -> None:
    first, second = drawn(4, 0, 1), drawn(6, 0.5, 2)
    by_tensor = mmd_of_stacks(first, second, groups="tensor", permutations=9)
    assert_double_sums(by_tensor, first, second, {n: [n] for n in first})
    widths = {"laplace": [3.0, 40.0], "gaussian": [5.0]}
    own = mmd_of_stacks(first, second, groups={"weights": ["conv.weight", "fc.weight"]}, widths=widths, permutations=9)
    assert own["weights"].kernels == (("laplace", 3.0), ("laplace", 40.0), ("gaussian", 5.0))
    both = {n: t for n, t in first.items() if n != "conv.bias"}
    assert_double_sums(own, both, second, {"weights": list(both)})


def test_near_members_far_from_zero_lose_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = ({"w": 1000 + 1e-3 * torch.randn(6, 3000, generator=generator)} for _ in range(2))
    found = mmd_of_stacks(first, second, widths={"gaussian": [0.05, 0.1], "laplace": [2.0, 5.0]}, permutations=9)
    assert_double_sums(found, first, second, {"w": ["w"]})


def test_distances_of_blocks_are_those_of_the_whole() -> None:
    stacked = {n: t.half() for n, t in drawn(11).items()}
    calls = []

    def blocks(start: int) -> Iterator[Stacked]:
        calls.append(start)
        for at in range(start, 11, 4):
            yield {n: t[at : at + 4] for n, t in stacked.items()}

    found = measure_distances(blocks, 11, tensors_by_layer(stacked), torch.device("cpu"))
    assert calls == [0, 4, 8, 11]
    for name, names in {"conv": ["conv.weight", "conv.bias"], "fc": ["fc.weight"], "all": list(stacked)}.items():
        x = flat(stacked, names)
        np.testing.assert_allclose(found[name].l2, cdist(x, x, "sqeuclidean"), rtol=1e-12, atol=0)
        np.testing.assert_allclose(found[name].l1, cdist(x, x, "cityblock"), rtol=1e-6, atol=0)


def test_bandwidths_are_those_of_mmdagg() -> None:
    def theirs(values: np.ndarray) -> list[float]:
        """As the published code has it."""
        ordered = np.sort(values)
        least = ordered[0] if ordered[0] >= 0.1 else max(ordered[int(np.floor(len(ordered) * 0.05))], 0.1)
        low, high = least / 2, max(ordered[-1], 0.3) * 2
        power = (high / low) ** (1 / 9)
        return [power**i * low for i in range(10)]

    random = np.random.default_rng(0)
    for values in (random.uniform(1, 5, 99), random.uniform(0, 5, 99), np.zeros(3), np.array([0.2]), np.array([1e6])):
        assert bandwidths(torch.tensor(values)).tolist() == pytest.approx(theirs(values), rel=1e-12)


def test_bandwidths_from_pairs_across_leave_out_those_within() -> None:
    first, second = drawn(5, 0, 1), drawn(4, 3, 2)
    names = list(first)
    x, y = flat(first, names), flat(second, names)
    found = mmd_of_stacks(first, second, grid="cross", permutations=9)["all"].kernels
    across = cdist(x, y)
    assert found[0][1] == pytest.approx(across.min() / 2, rel=1e-6)
    assert found[9][1] == pytest.approx(across.max() * 2, rel=1e-6)
    second_alone = mmd_of_stacks(first, second, grid="second", permutations=9)["all"].kernels
    within = cdist(y, y)[np.triu_indices(4, 1)]
    assert (second_alone[0][1], second_alone[9][1]) == pytest.approx((within.min() / 2, within.max() * 2), rel=1e-6)
    together = cdist(np.r_[x, y], np.r_[x, y], "cityblock")[np.triu_indices(9, 1)]
    pooled = mmd_of_stacks(first, second, permutations=9)["all"].kernels
    assert (pooled[10][1], pooled[19][1]) == pytest.approx((together.min() / 2, together.max() * 2), rel=1e-6)


def p_values(shift: float, draws: int, members: tuple[int, int] = (6, 9), permutations: int = 99) -> list[float]:
    found = []
    for seed in range(draws):
        random = torch.Generator().manual_seed(seed)
        # Heavy tails, so that kernels differ in what they see.
        sets = [torch.randn(m, 12, generator=random) / torch.rand(m, 1, generator=random).sqrt() for m in members]
        sets[1] += shift
        together = {"w": torch.cat(sets)}
        groups, place = {"w": ["w"]}, torch.device("cpu")
        distances = measure_distances(lambda start, t=together: [] if start else [t], sum(members), groups, place)["w"]
        found.append(
            p_value_of_largest(
                permuted_mmd2(
                    distances,
                    choose_kernels(distances, members[0], "pooled", None),
                    draw_permutations(*members, permutations, seed),
                )
            )
        )
    return found


@pytest.mark.slow
def test_p_values_are_uniform_under_the_null_and_small_where_the_sets_differ() -> None:
    found = p_values(0, 120)
    # Steps of 1/100, each as likely: spread over its step, uniform on 0 to 1.
    spread = np.array(found) - np.random.default_rng(0).uniform(0, 0.01, len(found))
    assert stats.kstest(spread, "uniform").pvalue > 0.01
    for level in (0.05, 0.1, 0.5):  # four standard errors
        assert abs(np.mean(np.array(found) <= level) - level) < 4 * math.sqrt(level * (1 - level) / len(found))
    assert np.mean(np.array(p_values(2.0, 12)) <= 0.05) > 0.9


def test_p_value_is_the_share_of_relabellings_that_are_as_far_apart() -> None:
    first, second = drawn(5, 0, 3), drawn(4, 0.4, 4)
    found = mmd_of_stacks(first, second, permutations=60, widths={"gaussian": [15.0]}, seed=7)["all"]
    names = list(first)
    x = np.r_[flat(first, names), flat(second, names)]
    values = [
        double_sum(x[chosen], x[~chosen], "gaussian", 15.0)
        for chosen in draw_permutations(5, 4, 60, 7).T.bool().numpy()
    ]
    assert values[0] == pytest.approx(found.value, abs=1e-6)
    assert found.p_value == (1 + sum(v >= values[0] - 1e-12 for v in values[1:])) / 61


def test_seeds_give_the_same_and_choices_are_of_the_size_of_the_set() -> None:
    first, second = drawn(5, 0, 3), drawn(4, 0.2, 4)
    a, b, c = (mmd_of_stacks(first, second, permutations=200, seed=s) for s in (1, 1, 2))
    assert a == b
    assert (a.value, a.p_value) != (c.value, c.p_value)
    drawn_sets = draw_permutations(5, 4, 200, 1)
    assert drawn_sets.shape == (9, 201)
    assert bool((drawn_sets.sum(0) == 5).all())
    assert drawn_sets[:, 0].tolist() == [1] * 5 + [0] * 4


def test_the_same_members_twice_are_no_further_apart_than_any() -> None:
    members = drawn(6)
    found = mmd_of_stacks(members, members, permutations=99)
    for group in found.groups.values():
        assert max(group.values) <= 0
        assert group.p_value > 0.9


def test_constant_weights_have_no_distance_and_the_least_bandwidths() -> None:
    same = {"w": torch.full((4, 7), 0.3)}
    found = mmd_of_stacks(same, same, permutations=19)["all"]
    assert found.values == pytest.approx([0] * 20, abs=1e-15)
    assert found.p_value == 1
    assert [w for _, w in found.kernels[::9][:2]] == pytest.approx([0.05, 0.6])


def test_the_unbiased_estimate_of_a_kernel_by_hand() -> None:
    kernel = torch.tensor([[1.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 1.0]])
    kernel = torch.block_diag(kernel, torch.ones(1))
    kernel[3, :3] = kernel[:3, 3] = 0.2
    found = unbiased_mmd2(kernel, torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0]]))
    assert found.tolist() == pytest.approx(
        [0.5 + 0.2 - 2 * (0.1 + 0.2 + 0.3 + 0.2) / 4, 0.1 + 0.2 - 2 * (0.5 + 0.2 + 0.3 + 0.2) / 4], abs=1e-7
    )


ONE = {"w": torch.zeros(1, 3)}
TWO = {"w": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("second", "more", "text"),
    [
        (ONE, {}, "sets of members: expected two members or more in each; found 2 and 1."),
        (TWO, {"permutations": 0}, "permutations: expected 1 or more; found 0."),
        (TWO, {"groups": "block"}, "groups of tensors: expected 'layer', 'tensor' or a mapping; found 'block'."),
        (
            TWO, {"groups": {"a": ["v"]}},
            "group 'a' of tensors: expected names among w, and another name of the group than 'all'; found 'v'.",
        ),
        (
            TWO, {"groups": {"all": ["w"]}},
            "group 'all' of tensors: expected names among w, and another name of the group than 'all';"
            " found the name 'all'.",
        ),
        (TWO, {"grid": "all"}, "grid of bandwidths: expected 'pooled', 'cross' or 'second'; found 'all'."),
        (
            TWO, {"widths": {"gaussian": [0.0]}},
            "widths of kernels: expected positive bandwidths of 'gaussian' or 'laplace'; found {'gaussian': [0.0]}.",
        ),
        (
            TWO, {"widths": {}},
            "widths of kernels: expected positive bandwidths of 'gaussian' or 'laplace'; found {}.",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_compared_is_refused(second: Stacked, more: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        mmd_of_stacks(TWO, second, **more)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"v": torch.zeros(2, 3)}, "tensor 'w': expected shape (3,) for every member; found no such tensor."),
        ({"w": torch.zeros(2, 4)}, "tensor 'w': expected shape (3,) for every member; found shape (4,)."),
    ],
)
def test_members_of_another_architecture_are_refused(second: Stacked, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        mmd_of_stacks(TWO, second)
    assert str(error.value) == text


def test_collections_in_small_memory_give_what_stacks_give() -> None:
    members = zoo.load("convnet-digits", n=14)
    first, second = members[:8], members[8:]
    found = mmd(first, second, permutations=50, memory=12 * members.nbytes // 14)
    stacks = [{n: t.clone() for n, t in c.stack().items()} for c in (first, second)]
    plain = mmd_of_stacks(*stacks, permutations=50)
    assert list(found.groups) == list(plain.groups)
    for name, group in found.groups.items():
        assert group.values == pytest.approx(plain[name].values, abs=1e-9)
        assert (group.weights, group.p_value) == (plain[name].weights, plain[name].p_value)
    assert (found.first, found.second) == (first.citation, second.citation)
    frame = found.to_frame()
    assert list(frame.columns) == ["group", "weights", "kernel", "bandwidth", "mmd2", "mean_mmd2", "p_value"]
    assert len(frame) == 20 * len(found.groups)
    facts = json.loads(found.to_json())
    assert (facts["members"], facts["permutations"], len(facts["groups"])) == ([8, 6], 50, len(frame))


@pytest.mark.slow
def test_statistics_of_norms_are_no_weights() -> None:
    members = zoo.load("resnet8-digits", n=4)
    found = mmd(members[:2], members[2:], groups="tensor", permutations=3, widths={"gaussian": [5.0]})
    assert not [name for name in found.groups if "running" in name or "num_batches" in name]
    parameters = sum(p.numel() for p in members._skeleton().parameters())
    assert found["all"].weights == parameters == sum(g.weights for n, g in found.groups.items() if n != "all")


def test_removing_symmetries_brings_together_what_they_had_moved_apart() -> None:
    members = zoo.load("convnet-digits", n=20)
    table = members.symmetry_table
    element = random_element(table, torch.Generator().manual_seed(1), members=10)
    moved = members[10:].transform(Element(element.permutations))
    found = ns(members[:10], moved, scale=None, permute="norm", permutations=99)
    plain = mmd(*(members[s].canonicalize(permute="norm") for s in (slice(0, 10), slice(10, 20))), permutations=99)
    assert found.ns["all"].values == pytest.approx(plain["all"].values, abs=1e-6)
    assert (found.scale, found.permute) == (None, "norm")
    assert found.mmd["all"].values == mmd(members[:10], moved, permutations=99)["all"].values
    assert found.mmd.value != pytest.approx(found.ns.value, abs=1e-6)
