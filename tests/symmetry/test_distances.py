"""Transpositions against a search through all permutations, squared distances against sums written out."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry import symmetries
from checkpoints_zoo.symmetry.canonical.distances import squared_distance, transpositions

Params = dict[str, Tensor]


def swaps_needed(size: int) -> dict[tuple[int, ...], int]:
    """Search outwards from the identity, a swap a step; return each permutation's distance."""
    found, edge = {tuple(range(size)): 0}, [tuple(range(size))]
    while edge:
        following = []
        for p in edge:
            for i, j in combinations(range(size), 2):
                q = list(p)
                q[i], q[j] = q[j], q[i]
                if tuple(q) not in found:
                    found[tuple(q)] = found[p] + 1
                    following.append(tuple(q))
        edge = following
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_transpositions_are_the_fewest_swaps(size: int) -> None:
    every = list(permutations(range(size)))
    expected = swaps_needed(size)
    assert transpositions(torch.tensor(every)).tolist() == [expected[p] for p in every]


def cycles(permutation: list[int]) -> int:
    left, count = set(range(len(permutation))), 0
    while left:
        count, at = count + 1, left.pop()
        while permutation[at] in left:
            at = permutation[at]
            left.discard(at)
    return count


@pytest.mark.slow
@given(st.integers(1, 70).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=1, max_size=4)))
@settings(max_examples=100, deadline=None)
def test_transpositions_are_units_minus_cycles(batch: list[list[int]]) -> None:
    expected = [len(p) - cycles(p) for p in batch]
    assert transpositions(torch.tensor(batch)).tolist() == expected
    assert transpositions(torch.tensor([batch, batch])).tolist() == [expected, expected]


@pytest.mark.parametrize("size", [2, 3, 511, 512, 513])
def test_one_cycle_of_all_units(size: int) -> None:
    assert int(transpositions(torch.arange(size).roll(1))) == size - 1
    assert int(transpositions(torch.arange(size).roll(-1))) == size - 1


def test_bad_permutations_are_refused() -> None:
    text = r"permutation: expected int64, each unit once along the last axis; found int64 \(3,\): \[0, 0, 2\]\."
    with pytest.raises(UsageError, match=text):
        transpositions(torch.tensor([0, 0, 2]))
    for wrong in (torch.tensor(0), torch.tensor([0.0, 1.0]), torch.tensor([[0, 1], [1, 2]])):
        with pytest.raises(UsageError, match="each unit once"):
            transpositions(wrong)


@pytest.fixture(scope="module")
def digits() -> Params:
    return zoo.load("resnet8-digits", n=3).stack()


def by_hand(params: Params, reference: Params, name: str) -> np.ndarray:
    difference = params[name].double().numpy() - reference[name].double().numpy()
    return np.einsum("mk,mk->m", *[difference.reshape(len(difference), -1)] * 2)


def test_distances_are_sums_of_squares(digits: Params) -> None:
    table, reference = symmetries("resnet8-digits"), {name: tensor[0] for name, tensor in digits.items()}
    weights = [name for name in digits if "running" not in name]
    whole = squared_distance(table, digits, reference)
    assert whole.dtype == torch.float64
    assert whole[0] == 0
    np.testing.assert_allclose(whole, sum(by_hand(digits, reference, n) for n in weights), rtol=1e-12)


def test_distances_of_large_tensors_and_small_dtypes() -> None:
    net = torch.nn.Linear(700, 800)  # more entries than are taken at once
    table = symmetries(net, torch.zeros(1, 700))
    generator = torch.Generator().manual_seed(0)
    reference = {name: torch.randn(t.shape, generator=generator).half() for name, t in net.state_dict().items()}
    stacked = {name: torch.randn(2, *t.shape, generator=generator).half() for name, t in reference.items()}
    expected = sum(by_hand(stacked, reference, name) for name in reference)
    np.testing.assert_allclose(squared_distance(table, stacked, reference), expected, rtol=1e-12)


def test_bad_arguments_of_distances_are_refused(digits: Params) -> None:
    table, reference = symmetries("resnet8-digits"), {name: tensor[0] for name, tensor in digits.items()}
    with pytest.raises(UsageError, match=r"tensors: expected \(member, \*shape\); found no member axis"):
        squared_distance(table, reference, reference)
    with pytest.raises(UsageError, match="reference: expected one network without a member axis; found stacked"):
        squared_distance(table, digits, digits)
    for missing in ("conv1.weight", "fc.bias"):
        fewer = {name: tensor for name, tensor in reference.items() if name != missing}
        with pytest.raises(LayoutError, match=f"tensor '{missing}': expected it, as resnet8-digits has it; found none"):
            squared_distance(table, digits, fewer)
        fewer = {name: tensor for name, tensor in digits.items() if name != missing}
        with pytest.raises(LayoutError, match=f"tensor '{missing}'"):
            squared_distance(table, fewer, reference)
