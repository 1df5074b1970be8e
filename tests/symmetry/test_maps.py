"""Canonical maps send all networks that differ by a symmetry to one, keep its function, and can be undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry import Table, apply, inverse, permute, symmetries
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from checkpoints_zoo.symmetry.canonical.permutation import sort_units
from tests.support.canonical_cases import NETS, identical, random_members, random_symmetry, sorted_groups, table_of
from tests.support.symmetry_nets import randomised, without_eps
from tests.support.symmetry_programs import Program

LARGE = ("resnet8", "resnet20", "convnet")
seeds = st.integers(0, 2**31 - 1)
keys = st.sampled_from(["first", "max", "norm"])
dtypes = st.sampled_from([torch.float16, torch.float32, torch.float64])


def check_orbit(table: Table, seed: int, key: str, streams: bool, dtype: torch.dtype, tied: bool) -> None:
    """Check that members and what a random permutation makes of them are sorted into the same, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    params = random_members(table, generator, 2, dtype, tied)
    found, permutations = sort_units(table, params, key, streams)
    moved = permute(table, params, random_symmetry(table, generator, 2, streams).permutations)
    again = sort_units(table, moved, key, streams)[0]
    assert all(identical(again[name], tensor) for name, tensor in found.items())
    twice = sort_units(table, found, key, streams)[0]
    assert all(identical(twice[name], tensor) for name, tensor in found.items())
    back = permute(table, found, {name: p.argsort(-1) for name, p in permutations.items()})
    assert all(identical(back[name], tensor) for name, tensor in params.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETS if name not in LARGE])
@settings(max_examples=4)
@given(seed=seeds, key=keys, streams=st.booleans(), dtype=dtypes, tied=st.sampled_from([True, True, False]))
def test_permuted_networks_have_one_canonical_form(
    name: str, seed: int, key: str, streams: bool, dtype: torch.dtype, tied: bool
) -> None:
    check_orbit(table_of(name), seed, key, streams, dtype, tied)


@pytest.mark.parametrize("name", LARGE)
@settings(max_examples=3)
@given(seed=seeds, key=keys, streams=st.booleans(), dtype=dtypes, tied=st.booleans())
def test_permuted_architectures_have_one_canonical_form(
    name: str, seed: int, key: str, streams: bool, dtype: torch.dtype, tied: bool
) -> None:
    check_orbit(table_of(name), seed, key, streams, dtype, tied)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=seeds, key=keys, streams=st.booleans(), dtype=dtypes, tied=st.booleans())
def test_permuted_random_programs_have_one_canonical_form(
    seed: int, key: str, streams: bool, dtype: torch.dtype, tied: bool
) -> None:
    try:
        table = symmetries(Program(seed), torch.zeros(2, 3, 4, 4))
    except SymmetryError:
        assume(False)
    check_orbit(table, seed, key, streams, dtype, tied)


def with_positive_weights(net: nn.Module, seed: int) -> dict[str, Tensor]:
    """Draw a net's state in float64, without zeros: nothing is left unscaled."""
    state = randomised(net, seed).state_dict()
    return {n: torch.where(t == 0, 0.7, t) if t.is_floating_point() else t for n, t in state.items()}


def least_gap(table: Table, tensors: dict[str, Tensor], key: str, streams: bool) -> float:
    """Return the least difference between the keys of two units that a sort compares."""
    least = float("inf")
    for name in sorted_groups(table, streams):
        group = table.groups[name]
        for tensor, axis in group.writers[:1]:
            move = next(m for m in table.tensors[tensor].moves if m.group == name and m.axis == axis)
            rows = tensors[tensor].narrow(axis + 1, move.offset, group.size * move.span).movedim(axis + 1, 1)
            rows = rows.reshape(len(rows), group.blocks, group.size // group.blocks, -1)
            found = rows[..., 0] if key == "first" else rows.amax(-1)
            least = min(least, float(found.sort(-1)[0].diff(dim=-1).amin()) if found.shape[-1] > 1 else least)
    return least


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETS if name != "resnet20"])
@settings(max_examples=3)
@given(
    seed=seeds, key=st.sampled_from(["first", "max"]), streams=st.booleans(), dtype=st.sampled_from([*TOLERANCES]),
    approximate=st.booleans(),
)  # fmt: skip
def test_scaled_and_permuted_networks_have_one_canonical_form(
    name: str, seed: int, key: str, streams: bool, dtype: torch.dtype, approximate: bool
) -> None:
    table, generator = table_of(name), torch.Generator().manual_seed(seed)
    params = {n: t[None] for n, t in with_positive_weights(NETS[name][0](), seed).items()}
    options: dict[str, Any] = {"streams": streams, "approximate": approximate}
    exact, _ = canonicalize(table, params, scale="unit-norm", permute=key, **options)
    assume(least_gap(table, exact, key, streams) > 30 * TOLERANCES[dtype])
    members = {n: t.to(dtype) if t.is_floating_point() else t for n, t in params.items()}
    found, used = canonicalize(table, members, scale="unit-norm", permute=key, **options)
    drawn_ = random_symmetry(table, generator, 1, streams, approximate=approximate)
    moved = apply(table, {n: t.double() if t.is_floating_point() else t for n, t in members.items()}, drawn_)
    moved = {n: t.to(members[n].dtype) for n, t in moved.items()}
    again, _ = canonicalize(table, moved, scale="unit-norm", permute=key, **options)
    for n, t in found.items():
        check_close(again[n], t, TOLERANCES[dtype])
    back = apply(table, found, inverse(table, used))
    forth = apply(table, members, used)
    for n, t in members.items():
        check_close(back[n], t, TOLERANCES[dtype] / 5)
        check_close(forth[n], found[n], TOLERANCES[dtype] / 5)
    twice, _ = canonicalize(table, found, scale="unit-norm", permute=key, **options)
    for n, t in found.items():
        check_close(twice[n], t, TOLERANCES[dtype] / 5)


def check_close(one: Tensor, other: Tensor, bound: float) -> None:
    """Compare relative to a tensor's largest entry: a variance near -eps has no digits of its own."""
    assert one.dtype == other.dtype
    if one.is_floating_point() and one.numel():
        assert float((one.double() - other.double()).abs().max()) <= bound * max(1.0, float(other.double().abs().max()))
    else:
        assert torch.equal(one, other)


def outputs(net: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    net.load_state_dict(state)
    with torch.no_grad():
        y = net.double().eval()(x)
    return torch.cat([t.flatten() for t in (y.values() if isinstance(y, dict) else [y])])


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=3)
@given(seed=seeds, scale=st.sampled_from([None, "unit-norm"]), streams=st.booleans())
def test_the_function_stays(name: str, seed: int, scale: str | None, streams: bool) -> None:
    """Gains are of both signs, some of them zero; a member without a member axis."""
    build, shape = NETS[name]
    net, x = (
        build().double(),
        torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    )
    state = {n: t.clone() for n, t in randomised(net, seed).state_dict().items()}
    before = outputs(net, state, x)
    found, used = canonicalize(table_of(name), state, scale=scale, permute="first", streams=streams)
    assert (outputs(net, found, x) - before).abs().max() <= 1e-10 * before.abs().max()
    assert all(p.ndim == 1 for p in (*used.permutations.values(), *used.scales.values()))


@pytest.mark.parametrize("name", ["group_normed", "layer_normed", "residual_group_normed", "owned", "resnet20"])
def test_approximate_scales_keep_the_function_without_eps(name: str) -> None:
    build, shape = NETS[name]
    net, x = without_eps(build()), torch.randn(3, *shape, dtype=torch.float64)
    state = {n: t.clone() for n, t in randomised(net, 1).state_dict().items()}
    before = outputs(net, state, x)
    found, used = canonicalize(table_of(name), state, scale="unit-norm", permute="max", approximate=True)
    bound = 2e-6 if name == "resnet20" else 1e-10  # timm's filter response norm computes in float32
    assert (outputs(net, found, x) - before).abs().max() <= bound * before.abs().max()
    assert used.scales.keys() == table_of(name).scales.keys()


def test_without_options_nothing_changes() -> None:
    table = table_of("mlp")
    params = random_members(table, torch.Generator().manual_seed(0), 2, torch.float16, False)
    found, used = canonicalize(table, params)
    assert (used.permutations, used.scales) == ({}, {})
    assert all(found[n] is t for n, t in params.items())
