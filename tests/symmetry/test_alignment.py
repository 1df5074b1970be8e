"""Weight matching: planted permutations, all permutations of tiny nets, and a plain descent that shares no code."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, LayoutError, SymmetryError, UsageError
from checkpoints_zoo.symmetry import inverse, permute, random_element, symmetries
from checkpoints_zoo.symmetry.canonical import products
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from tests.support.matching_oracles import (
    Params,
    add_noise,
    check_equal,
    counted_tensors,
    inner_product,
    match_by_descent,
    mlp,
    stack_members,
    state_of,
)
from tests.support.symmetry_nets import EVERY, randomised, table_of
from tests.support.symmetry_programs import Program

PLANTED = [name for name in EVERY if name != "functional"]  # its few weights have another maximum nearby


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_permutations_are_found(name: str) -> None:
    table, reference = table_of(name), state_of(name, 1)
    element = random_element(table, torch.Generator().manual_seed(2), members=3)
    near = add_noise(reference, 0.05, 3)
    moved = permute(table, stack_members(reference, near, near), element.permutations)
    found = match_weights(table, moved, reference)
    back = permute(table, moved, found.permutations)
    for i, expected in enumerate((reference, near, near)):
        assert all(torch.equal(back[n][i], t) for n, t in expected.items())
    assert found.converged.all()
    np.testing.assert_allclose(found.objective, inner_product(table, back, reference), rtol=1e-12)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_planted_permutations_of_random_networks_are_found(seed: int) -> None:
    torch.manual_seed(seed)
    net = Program(seed)
    try:
        table = symmetries(net, torch.zeros(1, 3, 4, 4))
    except SymmetryError:
        return  # an operation that has none
    reference = {n: t.float() if t.is_floating_point() else t for n, t in permuted_copies(net, seed).items()}
    element = random_element(table, torch.Generator().manual_seed(seed), members=2)
    moved = permute(table, stack_members(reference, reference), element.permutations)
    back = permute(table, moved, match_weights(table, moved, reference).permutations)
    assert all(torch.equal(back[n][i], t) for n, t in reference.items() for i in range(2))


@pytest.mark.slow
def test_planted_permutations_of_resnet18_are_found() -> None:
    from checkpoints_zoo.networks.modules import build_architecture

    table = symmetries("resnet18")
    torch.manual_seed(0)
    reference = build_architecture("resnet18").state_dict()
    element = random_element(table, torch.Generator().manual_seed(1), members=1)
    moved = permute(table, stack_members(add_noise(reference, 0.5, 2)), element.permutations)
    found = match_weights(table, moved, reference)
    for group, p in inverse(table, element).permutations.items():
        assert torch.equal(found.permutations[group], p)
    assert found.converged.all()


def permuted_copies(net: nn.Module, seed: int) -> Params:
    return {n: t.clone() for n, t in randomised(net, seed).state_dict().items()}


@pytest.mark.parametrize("seed", range(5))
def test_one_hidden_layer_equals_the_best_of_all_permutations(seed: int) -> None:
    table, net = mlp(3, 5, 2)
    reference, params = (permuted_copies(net, s) for s in (seed, 50 + seed))
    a, b = (np.concatenate([p["0.weight"], p["0.bias"][:, None], p["2.weight"].T], 1) for p in (reference, params))
    best = max(permutations(range(5)), key=lambda p: float((a * b[list(p)]).sum()))
    found = match_weights(table, stack_members(params), reference)
    assert found.permutations["0"].tolist() == [list(best)]
    assert found.sweeps.tolist() == [1]


@pytest.mark.parametrize("seed", range(5))
def test_two_hidden_layers_match_a_plain_descent_to_a_local_optimum(seed: int) -> None:
    table, net = mlp(2, 4, 3, 2)
    reference, params = (permuted_copies(net, s) for s in (seed, 50 + seed))
    found = match_weights(table, stack_members(params), reference, seed=seed)
    theirs, sweeps = match_by_descent(table, reference, params, seed)
    assert {name: p[0].tolist() for name, p in found.permutations.items()} == theirs
    assert sweeps - 1 <= int(found.sweeps) <= sweeps
    assert int(found.visits) <= 2 * sweeps
    for group, size in (("0", 4), ("2", 3)):
        every = torch.tensor(list(permutations(range(size))))
        tried = {g: every if g == group else p.expand(len(every), -1) for g, p in found.permutations.items()}
        moved = permute(table, stack_members(*[params] * len(every)), tried)
        assert inner_product(table, moved, reference).max() <= float(found.objective) + 1e-12 * abs(
            float(found.objective)
        )


@pytest.mark.parametrize("name", ["resnet8-digits", "convnet-digits"])
def test_trained_members_match_a_plain_descent(name: str) -> None:
    table, params = symmetries(name), zoo.load(name, n=3).stack()
    reference = {n: t[0] for n, t in params.items()}
    found = match_weights(table, params, reference, seed=7)
    for i in range(3):
        theirs, _ = match_by_descent(table, reference, {n: t[i] for n, t in params.items()}, 7)
        assert {g: p[i].tolist() for g, p in found.permutations.items()} == theirs
    after = inner_product(table, permute(table, params, found.permutations), reference)
    np.testing.assert_allclose(found.objective, after, rtol=1e-12)
    assert (after[1:] > 1.2 * inner_product(table, params, reference)[1:]).all()


@pytest.mark.parametrize("seed", range(5))
def test_blocks_and_their_units_match_the_best_of_all_permutations(seed: int) -> None:
    table, (reference, params) = table_of("optunet"), (state_of("optunet", s, torch.float64) for s in (seed, 50 + seed))
    fixed, own = ({n: t.numpy() for n, t in p.items()} for p in (reference, params))
    outer = np.einsum("uchw,vchw->uv", *(p["conv1.weight"] for p in (fixed, own)))
    inside = np.einsum("uchw,vchw->uv", *(p["conv2.weight"] for p in (fixed, own)))
    inside += fixed["fc.weight"].T @ own["fc.weight"]
    best = (-np.inf, [0], [0])
    for first, second in ((0, 1), (1, 0)):
        value, units = outer[0, first] + outer[1, second], list[int]()
        for new, old in ((0, first), (1, second)):
            tried = [[5 * old + i for i in order] for order in permutations(range(5))]
            sums = [sum(inside[5 * new + i, v] for i, v in enumerate(order)) for order in tried]
            value, units = value + max(sums), units + tried[int(np.argmax(sums))]
        best = max(best, (value, [first, second], units))
    found = match_weights(table, stack_members(params), reference)
    assert found.permutations["conv1"].tolist() == [best[1]]
    assert found.permutations["conv2"].tolist() == [best[2]]
    np.testing.assert_allclose(found.objective, best[0], rtol=1e-12)


# Without those where a tensor has one group on two axes, or two groups of one mover: a swap there isn't one visit.
LINKED = ("shared", "dense", "grouped", "group_normed", "owned")
INDEPENDENT = [name for name in EVERY if name not in (*LINKED, "resnet20-bias")]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_no_swap_of_two_units_gains(name: str) -> None:
    table, reference, params = table_of(name), state_of(name, 0), state_of(name, 1)
    found = match_weights(table, stack_members(params), reference)
    assert found.converged.all()
    assert float(found.objective) >= inner_product(table, stack_members(params), reference)
    matched = {n: t[0] for n, t in permute(table, stack_members(params), found.permutations).items()}
    for group in table.groups.values():
        if any(other.mover == group.name for other in table.groups.values()):
            continue
        inside = group.size // group.blocks
        pairs = [(i, j) for i in range(group.size) for j in range(i) if i // inside == j // inside]
        pairs = random.Random(0).sample(pairs, min(20, len(pairs)))
        swaps = torch.arange(group.size).repeat(len(pairs), 1)
        for row, (i, j) in enumerate(pairs):
            swaps[row, [i, j]] = torch.tensor([j, i])
        if pairs:
            moved = permute(table, {n: t.expand(len(pairs), *t.shape) for n, t in matched.items()}, {group.name: swaps})
            assert inner_product(table, moved, reference).max() <= float(found.objective) + 1e-6 * abs(
                float(found.objective)
            )


@pytest.mark.parametrize("name", LINKED)
def test_each_change_of_a_visit_raises_the_objective(name: str) -> None:
    table, members = table_of(name), [state_of(name, s) for s in range(1, 4)]
    reference, params = state_of(name, 0), stack_members(*members)
    last = inner_product(table, params, reference)
    for most in range(1, 5):
        found = match_weights(table, params, reference, most=most)
        now = inner_product(table, permute(table, params, found.permutations), reference)
        np.testing.assert_allclose(found.objective, now, rtol=1e-12)
        assert (now >= last).all()
        last = now
    assert match_weights(table, params, reference).converged.all()


@pytest.mark.slow
def test_a_match_does_not_depend_on_other_members() -> None:
    table, params = symmetries("resnet8-digits"), zoo.load("resnet8-digits", n=5).stack()
    reference = {n: t[4] for n, t in params.items()}
    whole, again = match_weights(table, params, reference, seed=5), match_weights(table, params, reference, seed=5)
    turned = match_weights(table, {n: t.flip(0) for n, t in params.items()}, reference, seed=5)
    for i in range(5):
        alone = match_weights(table, {n: t[i : i + 1] for n, t in params.items()}, reference, seed=5)
        for other, j in ((again, i), (turned, 4 - i), (alone, 0)):
            for group, p in whole.permutations.items():
                assert torch.equal(p[i], other.permutations[group][j])
            assert whole.objective[i] == other.objective[j]
            assert (whole.sweeps[i], whole.visits[i]) == (other.sweeps[j], other.visits[j])
    orders = {int(match_weights(table, params, reference, seed=s).visits.sum()) for s in range(6)}
    assert len(orders) > 1  # the seed draws the order of visits


def test_updated_products_equal_products_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    table, params = symmetries("resnet8-digits"), zoo.load("resnet8-digits", n=6).stack()
    reference = {n: t[0] for n, t in params.items()}
    found = []
    for small in (0, 1 << 30):
        monkeypatch.setattr(products, "_SMALL_TENSOR", small)
        found.append(match_weights(table, params, reference))
    check_equal(*found)


def test_matching_starts_from_the_given_permutations() -> None:
    table, params = symmetries("resnet8-digits"), zoo.load("resnet8-digits", n=3).stack()
    reference = {n: t[0] for n, t in params.items()}
    found = match_weights(table, params, reference)
    again = match_weights(table, params, reference, start=found.permutations, seed=9)
    check_equal(found, again)
    assert again.sweeps.tolist() == [1, 1, 1]
    assert again.visits.tolist() == [len(table.groups)] * 3
    # One for all, and only some groups.
    one = {"conv1": found.permutations["conv1"][1]}
    rows = {"conv1": one["conv1"].expand(3, -1)}
    check_equal(match_weights(table, params, reference, start=one), match_weights(table, params, reference, start=rows))
    still = match_weights(table, params, reference, start=random_element(table, torch.Generator()).permutations, most=1)
    assert not still.converged.all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    table, params = symmetries("convnet-digits"), zoo.load("convnet-digits", n=6).stack()
    rounded = {n: t.to(dtype) for n, t in params.items()}
    one = match_weights(table, rounded, {n: t[0] for n, t in rounded.items()})
    wide = {n: t.to(torch.float64) for n, t in rounded.items()}
    other = match_weights(table, wide, {n: t[0] for n, t in wide.items()})
    check_equal(one, other)


def test_equal_units_keep_their_places() -> None:
    table, net = mlp(3, 6, 4, 2)
    reference = {n: torch.zeros_like(t) for n, t in net.state_dict().items()}
    found = match_weights(table, stack_members({n: torch.ones_like(t) for n, t in reference.items()}), reference)
    assert {g: p.tolist() for g, p in found.permutations.items()} == {"0": [list(range(6))], "2": [list(range(4))]}
    assert found.visits.tolist() == [2]
    # Pairs of units that nothing tells apart.
    twins = {n: t[torch.arange(len(t)) // 2 * 2] for n, t in randomised(net, 0).float().state_dict().items()}
    found = match_weights(table, stack_members(add_noise(twins, 0.5, 1), twins), twins)
    assert found.converged.all()


def test_statistics_and_counters_do_not_count() -> None:
    table, reference, params = table_of("resnet8"), state_of("resnet8", 0), stack_members(state_of("resnet8", 1))
    found = match_weights(table, params, reference)
    fewer = {n: t for n, t in params.items() if n in counted_tensors(table)}
    check_equal(found, match_weights(table, fewer, {n: t for n, t in reference.items() if n in counted_tensors(table)}))


def test_no_groups_and_no_members() -> None:
    net = nn.Linear(2, 3)
    found = match_weights(symmetries(net, torch.zeros(1, 2)), stack_members(net.state_dict()), net.state_dict())
    assert (dict(found.permutations), found.objective.tolist(), found.converged.tolist()) == ({}, [0.0], [True])
    table, reference = table_of("mlp"), state_of("mlp", 0)
    none = match_weights(table, {n: t[None][:0] for n, t in reference.items()}, reference)
    assert len(none) == 0
    assert none.permutations["0"].shape == (0, 7)


def check_refused(text: str, kind: type[Exception], **changes: Any) -> None:
    reference = state_of("mlp", 0)
    told = {"params": stack_members(state_of("mlp", 1), state_of("mlp", 2)), "reference": reference} | changes
    with pytest.raises(kind, match=text):
        match_weights(table_of("mlp"), told.pop("params"), told.pop("reference"), **told)


def test_bad_arguments_are_refused() -> None:
    state, pair = state_of("mlp", 0), stack_members(state_of("mlp", 1), state_of("mlp", 2))
    check_refused(r"tensors: expected \(member, \*shape\); found no member axis\. Stack them", UsageError, params=state)
    check_refused("reference: expected one network without a member axis; found stacked", UsageError, reference=pair)
    fewer = {n: t for n, t in state.items() if n != "2.weight"}
    check_refused("tensor '2.weight' of the reference: expected it, as Sequential has it", LayoutError, reference=fewer)
    check_refused("tensor '2.weight' of the members: expected it", LayoutError, params=stack_members(fewer))
    check_refused(
        "tensor 'odd': expected a tensor of Sequential", LayoutError, reference=state | {"odd": torch.zeros(1)}
    )
    wrong = state | {"0.bias": torch.zeros(6)}
    check_refused(
        r"tensor '0.bias': expected \(7,\), or \(member, \*\(7,\)\); found \(6,\)", LayoutError, reference=wrong
    )
    damaged = {n: t.clone() for n, t in pair.items()}
    damaged["2.weight"][1, 0, 0] = float("nan")
    check_refused(
        "tensor '2.weight' of the member at position 1: expected finite weights; found others", DamagedError,
        params=damaged,
    )  # fmt: skip
    infinite = state | {"0.bias": torch.full((7,), float("inf"))}
    check_refused("tensor '0.bias' of the reference: expected finite weights", DamagedError, reference=infinite)
    large = state | {"0.bias": torch.full((7,), 1e25)}
    check_refused(
        "weights of the reference: expected a norm below 1.8e.19, so .*Give them in float64",
        UsageError,
        reference=large,
    )
    check_refused("most: expected at least one sweep; found 0", UsageError, most=0)
    check_refused(r"permutation '0': expected each of 0-6 once, int64", UsageError, start={"0": torch.arange(6)})
    check_refused("permutation 'x': expected a group among", UsageError, start={"x": torch.arange(6)})
    check_refused(
        "values of '0': expected as many rows as members; found 3",
        UsageError,
        start={"0": torch.arange(7).repeat(3, 1)},
    )
    torn = {"conv2": torch.arange(10).roll(1)}
    with pytest.raises(UsageError, match="permutation 'conv2': expected 2 blocks that stay together"):
        match_weights(table_of("optunet"), stack_members(state_of("optunet", 1)), state_of("optunet", 0), start=torn)
