"""Members matched to one another: planted permutations, and what has to hold of the mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry import permute, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_mean, match_weights
from tests.support.matching_oracles import Params, add_noise, check_equal, inner_product, stack_members, state_of
from tests.support.symmetry_nets import table_of


def test_matching_permuted_copies_to_their_mean_undoes_the_permutations() -> None:
    table, reference = table_of("resnet8"), state_of("resnet8", 0)
    near = [add_noise(reference, 0.05, s) for s in range(6)]
    element = random_element(table, torch.Generator().manual_seed(0), members=6)
    moved = permute(table, stack_members(*near), element.permutations)
    found, mean = match_mean(table, moved, seed=3)
    assert found.converged.all()
    # All are in one frame, and which one doesn't matter: bring it to the reference's.
    back = permute(table, moved, found.permutations)
    frame = match_weights(table, stack_members(mean), reference).permutations
    for name, tensor in permute(table, back, {g: p.expand(6, -1) for g, p in frame.items()}).items():
        assert torch.equal(tensor, torch.stack([state[name] for state in near]))
    for name, tensor in back.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(mean[name], tensor.double().mean(0).float(), rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(mean[name], tensor[0])
    others = {n: (t.double().sum(0) - t[2]) / 5 for n, t in back.items()}
    expected = inner_product(table, {n: t[2:3] for n, t in back.items()}, others)[0]
    np.testing.assert_allclose(found.objective[2], expected, rtol=1e-9)


@pytest.fixture(scope="module")
def digits() -> Params:
    return zoo.load("convnet-digits", n=8).stack()


@pytest.mark.slow
def test_no_member_can_be_brought_closer_to_the_mean_of_the_others(digits: Params) -> None:
    table = symmetries("convnet-digits")
    found, mean = match_mean(table, digits, seed=1)
    assert found.converged.all()
    again, twice = match_mean(table, digits, seed=1)
    check_equal(found, again)
    assert all(torch.equal(tensor, twice[name]) for name, tensor in mean.items())
    back = permute(table, digits, found.permutations)
    for i in range(8):
        others = {n: ((t.double().sum(0) - t[i]) / 7).float() for n, t in back.items()}
        still = match_weights(table, {n: t[i : i + 1] for n, t in back.items()}, others).permutations
        assert all(torch.equal(p[0], torch.arange(p.shape[1])) for p in still.values())


@pytest.mark.slow
def test_each_pass_brings_members_closer(digits: Params) -> None:
    table, unmoved = symmetries("convnet-digits"), 0.0
    found = [match_mean(table, digits, seed=1, most=most)[0] for most in (1, 2, 3, 4)]
    sums = [float(one.objective.sum()) for one in found]
    assert sums == sorted(sums)
    assert not found[0].converged.any()
    for i in range(8):
        others = {n: (t.double().sum(0) - t[i]) / 7 for n, t in digits.items()}
        unmoved += float(inner_product(table, {n: t[i : i + 1] for n, t in digits.items()}, others)[0])
    assert sums[-1] > 1.5 * unmoved


def test_matching_one_member_and_no_members_to_their_mean() -> None:
    table, state = table_of("mlp"), state_of("mlp", 0)
    found, mean = match_mean(table, stack_members(state))
    assert found.permutations["0"].tolist() == [list(range(7))]
    assert all(torch.equal(mean[name], tensor) for name, tensor in state.items())
    mean["0.weight"].requires_grad_()[0, found.permutations["0"][0, :5]].sum().backward()  # no inference tensors
    with pytest.raises(UsageError, match="members: expected at least one; found none"):
        match_mean(table, {n: t[None][:0] for n, t in state.items()})
    with pytest.raises(UsageError, match=r"tensors: expected \(member, \*shape\); found no member axis"):
        match_mean(table, state)
