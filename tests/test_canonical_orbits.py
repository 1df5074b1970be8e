"""Canonical maps: one network for a whole orbit, the same function, and units sorted as a plain loop sorts them.

Random elements of the symmetry group take a network to another one of its orbit; both have to become the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.canonical.maps import canonicalize
from checkpoints_zoo.canonical.permutation import KEYS
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry import Element, Table, apply, inverse, permute, random_element
from tests.symmetry_nets import EVERY, NETS, randomised, table_of, without_eps

Params = dict[str, Tensor]
seeds = st.integers(0, 2**31 - 1)
keys = st.sampled_from(KEYS)
ARCHITECTURES = ["convnet", "resnet8", "optunet", "resnet20"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stacked(name: str, seed: int, members: int = 2) -> Params:
    """Random float64 members of a net."""
    states = [randomised(EVERY[name][0](), seed + i).state_dict() for i in range(members)]
    return {n: torch.stack([state[n] for state in states]) for n in states[0]}


def coarse(params: Params, seed: int, dtype: torch.dtype = torch.float16) -> Params:
    """The same tensors with values from a few numbers, both zeros among them: nearly all keys are tied."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-1.0, -0.0, 0.0, 0.5], dtype=dtype)
    return {
        n: values[torch.randint(4, t.shape, generator=generator)] if t.is_floating_point() else t
        for n, t in params.items()
    }


def twinned(table: Table, params: Params) -> Params:
    """The same members, the second unit of each group with the first one's incoming row."""
    changed = {n: t.clone() for n, t in params.items()}
    for name, group in table.groups.items():
        for tensor, axis in group.writers:
            move = next(m for m in table.tensors[tensor].moves if m.group == name and m.axis == axis)
            rows = changed[tensor].movedim(axis + 1, 1)
            if group.size // group.blocks > 1:
                first = rows[:, move.offset : move.offset + move.span].clone()
                rows[:, move.offset + move.span : move.offset + 2 * move.span] = first
    return changed


def same_bits(one: Params, other: Params) -> bool:
    return all(one[n].numpy().tobytes() == other[n].contiguous().numpy().tobytes() for n in one)


def moved(table: Table, params: Params, seed: int) -> Params:
    members = len(next(iter(params.values())))
    drawn = random_element(table, torch.Generator().manual_seed(seed), members=members)
    return permute(table, params, drawn.permutations)


def sorts_to_the_same(name: str, params: Params, key: str, seed: int) -> None:
    table = table_of(name)
    first, element = canonicalize(table, params, permute=key, streams=True)
    second, _ = canonicalize(table, moved(table, params, seed), permute=key, streams=True)
    assert same_bits(first, second)
    assert same_bits(first, permute(table, params, element.permutations))
    assert same_bits(params, apply(table, first, inverse(table, element)))
    again, still = canonicalize(table, first, permute=key, streams=True)
    assert same_bits(first, again)
    assert not element.scales
    assert not still.scales


@pytest.mark.parametrize("name", [*NETS, *ARCHITECTURES])
@settings(max_examples=4, deadline=None)
@given(seed=seeds, key=keys)
def test_all_of_an_orbit_become_one(name: str, seed: int, key: str) -> None:
    sorts_to_the_same(name, stacked(name, seed), key, seed)


@pytest.mark.parametrize("name", [*NETS, *ARCHITECTURES])
@settings(max_examples=4, deadline=None)
@given(seed=seeds, key=keys)
def test_with_units_of_equal_incoming_rows(name: str, seed: int, key: str) -> None:
    sorts_to_the_same(name, twinned(table_of(name), stacked(name, seed)), key, seed)


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=4, deadline=None)
@given(seed=seeds, key=keys, dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_with_nearly_all_keys_tied(name: str, seed: int, key: str, dtype: torch.dtype) -> None:
    sorts_to_the_same(name, coarse(stacked(name, seed), seed, dtype), key, seed)


def test_dead_units_that_are_all_alike() -> None:
    params = {n: torch.zeros_like(t) for n, t in stacked("mlp", 0).items()}
    sorts_to_the_same("mlp", params, "first", 0)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("streams", [False, True])
def test_the_function_stays(name: str, streams: bool) -> None:
    build, shape = EVERY[name]
    net, x = randomised(build(), 5), torch.randn(4, *shape, dtype=torch.float64)
    for scale, key in ((None, "norm"), ("unit-norm", None), ("unit-norm", "max")):
        changed, _ = canonicalize(table_of(name), net.state_dict(), scale=scale, permute=key, streams=streams)
        other = build().double().eval()
        other.load_state_dict(changed, strict=True)
        with torch.no_grad():
            before, after = (y if isinstance(y, dict) else {"": y} for y in (net(x), other(x)))
        for n, tensor in before.items():
            torch.testing.assert_close(after[n], tensor, rtol=1e-9, atol=1e-10 * float(tensor.abs().max()))


def without_zeros(params: Params) -> Params:
    return {n: t.where(t != 0, 0.7) if t.is_floating_point() else t for n, t in params.items()}


def assert_near(one: Params, other: Params, tolerance: float) -> None:
    for n, tensor in one.items():
        size = float(tensor.abs().max()) if tensor.is_floating_point() else 0.0
        torch.testing.assert_close(other[n], tensor, rtol=10 * tolerance, atol=tolerance * max(size, 1.0))


@pytest.mark.parametrize("name", [*NETS, "convnet", "resnet8"])
@settings(max_examples=2, deadline=None)
@given(seed=seeds)
def test_scaled_orbits_become_one(name: str, seed: int) -> None:
    table, params = table_of(name), without_zeros(stacked(name, seed))
    drawn = random_element(table, torch.Generator().manual_seed(seed), members=2)
    scaled = apply(table, params, Element({}, drawn.scales))
    first, element = canonicalize(table, params, scale="unit-norm")
    assert_near(first, canonicalize(table, scaled, scale="unit-norm")[0], 1e-9)
    assert_near(params, apply(table, first, inverse(table, element)), 1e-9)
    # Keys of units differ by far more than the rounding.
    both = [
        canonicalize(table, p, scale="unit-norm", permute="max", streams=True)[0]
        for p in (params, permute(table, scaled, drawn.permutations))
    ]
    assert_near(both[0], both[1], 1e-9)
    narrow = [{n: t.float() if t.is_floating_point() else t for n, t in p.items()} for p in (params, scaled)]
    ends = [canonicalize(table, p, scale="unit-norm")[0] for p in narrow]
    assert {t.dtype for t in ends[0].values() if t.is_floating_point()} == {torch.float32}
    assert_near(ends[0], ends[1], 1e-5)


def test_rows_have_norm_one_and_gains_are_signs() -> None:
    members = zoo.load("resnet8-digits", n=3)
    table = members.symmetry_table
    params = members.stack(dtype=torch.float64)
    first = next(n for n, axes in table.tensors.items() if axes.role == "gain")
    params[first] = params[first].clone()
    params[first][:, 1] *= -1
    params[first][:, 2] = 0
    changed, element = canonicalize(table, params, scale="unit-norm")
    assert torch.equal(changed[first][:, 1].sign(), params[first][:, 1].sign())
    assert bool((changed[first][:, 2] == 0).all())
    for scale in table.scales.values():
        if not scale.exact:
            continue
        tensor, axis = scale.writers[0]
        rows = (
            changed[tensor].movedim(axis + 1, 1).flatten(2) if changed[tensor].ndim > 2 else changed[tensor][..., None]
        )
        norms = rows.norm(dim=2)
        wanted = torch.where((rows == 0).all(2), 0.0, 1.0).double()
        torch.testing.assert_close(norms, wanted, rtol=1e-9, atol=1e-12)
    assert all(bool((s > 0).all()) and s.dtype == torch.float64 for s in element.scales.values())


def sorted_as_the_authors_do(state: dict[str, np.ndarray], layers: list[str]) -> dict[str, np.ndarray]:
    """Sort each layer's output channels by their first weight, descending, the columns of the next one with them."""
    changed = dict(state)
    for layer, following in pairwise(layers):
        weight = changed[f"{layer}.weight"]
        order = np.argsort(-weight.reshape(len(weight), -1)[:, 0].astype(np.float64), kind="stable")
        changed[f"{layer}.weight"] = weight[order]
        changed[f"{layer}.bias"] = changed[f"{layer}.bias"][order]
        after = changed[f"{following}.weight"]
        columns = after.reshape(len(after), len(weight), -1)[:, order]
        changed[f"{following}.weight"] = columns.reshape(after.shape)
    return changed


def test_the_default_key_is_the_authors_loop() -> None:
    members = zoo.load("convnet-digits", n=4)
    found = members.canonicalize(permute="first").stack()
    layers = [n.removesuffix(".weight") for n in found if n.endswith(".weight")]
    for i in range(4):
        state = {n: t[i].numpy() for n, t in members.stack().items()}
        wanted = sorted_as_the_authors_do(state, layers)
        assert all(np.array_equal(found[n][i].numpy(), wanted[n]) for n in wanted)


def test_streams_stay_unless_asked_for() -> None:
    members = zoo.load("resnet8-digits", n=2)
    table = members.symmetry_table
    inner, both = (members.canonicalize(permute="max", streams=s).symmetries().permutations for s in (False, True))
    streams = {n for n, g in table.groups.items() if g.stream}
    assert streams
    assert set(both) == set(table.groups)
    assert set(inner) == set(table.groups) - streams


def test_dtypes_and_one_member() -> None:
    table = table_of("mlp")
    params = {n: t.half() for n, t in stacked("mlp", 0).items()}
    assert {t.dtype for t in canonicalize(table, params, permute="max")[0].values()} == {torch.float16}
    scaled, element = canonicalize(table, params, scale="unit-norm", permute="max")
    assert {t.dtype for t in scaled.values()} == {torch.float32}
    one, alone = canonicalize(table, {n: t[1] for n, t in params.items()}, scale="unit-norm", permute="max")
    assert all(torch.equal(one[n], scaled[n][1]) for n in one)
    assert all(torch.equal(alone.permutations[n], p[1]) for n, p in element.permutations.items())
    assert canonicalize(table, params) == (params, Element({}, {}))


def test_approximate_scales_are_exact_without_eps() -> None:
    build, shape = EVERY["resnet20"]
    net = without_eps(randomised(build(), 0))
    table = table_of("resnet20")
    exact, _ = canonicalize(table, net.state_dict(), scale="unit-norm")
    changed, _ = canonicalize(table, net.state_dict(), scale="unit-norm", approximate=True)
    assert any(not torch.equal(exact[n], t) for n, t in changed.items())
    other = without_eps(build().double().eval())
    other.load_state_dict(changed, strict=True)
    x = torch.randn(2, *shape, dtype=torch.float64)
    with torch.no_grad():
        before, after = net(x), other(x)
    assert float((before - after).abs().max()) < 2e-7 * float(before.abs().max())  # timm's norm computes in float32


def test_refusals() -> None:
    table, params = table_of("mlp"), stacked("mlp", 0)
    with pytest.raises(UsageError, match=r"permute: expected 'first', 'max', 'norm', or None; found 'last'\."):
        canonicalize(table, params, permute="last")
    with pytest.raises(UsageError, match=r"scale: expected 'unit-norm', or None; found 'unit'\."):
        canonicalize(table, params, scale="unit")
    with pytest.raises(LayoutError, match="expected it, as"):
        canonicalize(table, {n: t for n, t in params.items() if n != "0.weight"}, permute="max")
