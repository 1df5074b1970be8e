"""Permuted initialisations: so many transpositions, from the member's seed, of a network that stays the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.symmetry import random_transpositions, symmetries
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from tests.support.matching_oracles import count_swaps

SMALL = dataclasses.replace(convnet_digits(), stack_width=2)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 8), seed=st.integers(0, 1000))
def test_as_many_transpositions_as_asked_for(count: int, seed: int) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    drawn = random_transpositions(symmetries(net, torch.zeros(1, 2)), count, torch.Generator().manual_seed(seed))
    assert sum(count_swaps(p.tolist()) for p in drawn.values()) == count


def test_every_single_transposition_is_as_likely() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    table, generator = symmetries(net, torch.zeros(1, 2)), torch.Generator().manual_seed(0)
    drawn = [random_transpositions(table, 1, generator) for _ in range(1200)]
    seen = [(tuple(p["0"].tolist()), tuple(p["2"].tolist())) for p in drawn]
    counts = [seen.count(one) for one in set(seen)]
    # One swap of the two units, three of the three: 300 each; a standard deviation is 15.
    assert len(counts) == 4
    assert all(225 < count < 375 for count in counts)


def test_more_than_there_are_is_refused() -> None:
    table = symmetries(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(1, 2))
    with pytest.raises(UsageError, match=r"transpositions of Sequential: expected 0 to 3; found 4\."):
        random_transpositions(table, 4, torch.Generator())
    with pytest.raises(UsageError, match="init_permutation of recipe 'convnet-digits': expected a whole number from 0"):
        dataclasses.replace(SMALL, init_permutation=-1)


def test_blocks_of_grouped_convolutions_stay() -> None:
    grouped = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(5, 2),
    )  # fmt: skip
    table = symmetries(grouped, torch.zeros(1, 1, 1, 1))
    drawn = random_transpositions(table, 4, torch.Generator().manual_seed(0))
    assert list(drawn) == ["4"]
    with pytest.raises(UsageError, match=r"transpositions of optunet: expected 0 to 0; found 1\."):
        random_transpositions(symmetries("optunet"), 1, torch.Generator())


@pytest.mark.parametrize("recipe", [SMALL, dataclasses.replace(resnet8_digits(), stack_width=2)], ids=lambda r: r.name)
def test_a_member_starts_as_the_same_function_with_other_weights(recipe) -> None:  # type: ignore[no-untyped-def]
    plain, permuted = (
        initial_state(recipe, [5, 6]),
        initial_state(dataclasses.replace(recipe, init_permutation=9), [5, 6]),
    )
    module = build_architecture(recipe.architecture, **recipe.arguments).double().eval()
    inputs = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for i in range(2):
        logits = [
            functional_call(module, {n: t[i].double() for n, t in (state.params | state.buffers).items()}, (inputs,))
            for state in (plain, permuted)
        ]
        torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)
    moved = [not torch.equal(plain.params[n], permuted.params[n]) for n in plain.params]
    assert any(moved)
    # A function of the seed alone, whatever company it has.
    again = initial_state(dataclasses.replace(recipe, init_permutation=9), [6, 7])
    assert all(torch.equal(permuted.params[n][1], again.params[n][0]) for n in again.params)


def test_training_is_equivariant_and_another_order_is_not() -> None:
    # With the same images in the same order a permuted start ends as the permuted network: a study needs others.
    short = dataclasses.replace(SMALL, epochs=1, batch_size=200, init_seed=1)
    data = images.load("digits", "train")
    ends = []
    for recipe in (short, dataclasses.replace(short, init_permutation=30)):
        state = initial_state(recipe, [1, 2])
        assert list(train_epochs(recipe, [1, 2], state, data)) == [1]
        ends.append(state.params)
    names = [n for n, t in ends[0].items() if t.ndim > 2]

    def sorted_values(state: dict[str, torch.Tensor], name: str, member: int) -> torch.Tensor:
        return state[name][member].flatten().sort().values

    for name in names:
        torch.testing.assert_close(sorted_values(ends[0], name, 0), sorted_values(ends[1], name, 0), rtol=0, atol=1e-5)
    assert any(not torch.allclose(ends[0][name][0], ends[1][name][0]) for name in names)
    other = [sorted_values(ends[0], n, 0).sub(sorted_values(ends[0], n, 1)).abs().max() for n in names]
    assert max(other) > 1e-3


def test_one_initialisation_for_all() -> None:
    state = initial_state(dataclasses.replace(SMALL, init_seed=5), [5, 6])
    own = initial_state(SMALL, [5, 6])
    assert all(torch.equal(t[0], t[1]) and torch.equal(t[0], own.params[n][0]) for n, t in state.params.items())
    assert any(not torch.equal(t[1], own.params[n][1]) for n, t in state.params.items())


def test_the_recipe_s_hash_covers_it_and_older_hashes_stay() -> None:
    assert dataclasses.replace(SMALL, init_permutation=1).hash != SMALL.hash
    assert dataclasses.replace(SMALL, init_seed=0).hash != SMALL.hash
    assert not {"init_permutation", "init_seed"} & set(SMALL.to_json())
    assert dataclasses.replace(SMALL, init_permutation=1).to_json()["init_permutation"] == 1
