"""Minimal mass: against cvxpy, against scipy on a brute-force objective, and against what a minimum has to be."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import checkpoints_zoo as zoo
from checkpoints_zoo.symmetry import symmetries
from checkpoints_zoo.symmetry.applying import rescale
from checkpoints_zoo.symmetry.canonical import mass
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass, minimal_mass
from checkpoints_zoo.symmetry.elements import random_element
from tests.support.mass_oracles import (
    BOUNDED,
    EVERY,
    HAVE_MASS,
    Params,
    mass_of,
    member_of,
    minimum_by_cvxpy,
    minimum_by_scipy,
    random_members,
)


@pytest.fixture(scope="module")
def digits() -> zoo.Collection:
    return zoo.load("convnet-digits")


@pytest.fixture(scope="module")
def digits_mass(digits: zoo.Collection) -> MinimalMass:
    return zoo.minimal_mass(digits)


def objective_of_digits(state: Params) -> tuple[Any, int]:
    """The objective of one convnet-digits member, from its layers; return it and its number of variables."""
    weights = {n: t[0].double().numpy() ** 2 for n, t in state.items()}
    first = weights["conv1.weight"].sum((1, 2, 3))
    second = weights["conv2.weight"].sum((2, 3))
    third = weights["fc1.weight"].reshape(32, 16, 4).sum(2)  # a unit of conv2 spans four entries
    last = weights["fc2.weight"].sum(0)

    def objective(t: np.ndarray) -> float:
        u, v, w = np.exp(2 * t[:8]), np.exp(2 * t[8:24]), np.exp(2 * t[24:])
        return float(first @ u + v @ second @ (1 / u) + w @ third @ (1 / v) + last @ (1 / w))

    return objective, 56


CVXPY_NETS = ("convnet-digits", "mlp", "stream", "grouped_input", "upsampled", "deep")


@pytest.mark.slow
@pytest.mark.parametrize("name", CVXPY_NETS)
def test_the_minimum_equals_that_of_cvxpy(
    name: str, oracle: Callable[[str], ModuleType], digits: zoo.Collection
) -> None:
    cvxpy = oracle("cvxpy")
    if name == "convnet-digits":
        table, params = symmetries(name), digits[:3].stack()
    else:
        table, params, *_ = random_members(name, 2, spread=0.5)
    result = minimal_mass(table, params)
    assert result.converged.all()
    for i in range(len(result)):
        assert float(result.after[i]) == pytest.approx(minimum_by_cvxpy(cvxpy, table, member_of(params, i)), rel=1e-6)


@pytest.mark.slow
def test_the_minimum_with_biases_equals_that_of_cvxpy(oracle: Callable[[str], ModuleType]) -> None:
    table, params, *_ = random_members("mlp", 1, spread=0.5)
    roles = (*HAVE_MASS, "bias", "offset")
    result = minimal_mass(table, params, biases=True)
    assert float(result.before) == pytest.approx(float(mass_of(table, params, roles)), rel=1e-12)
    assert float(result.after) == pytest.approx(minimum_by_cvxpy(oracle("cvxpy"), table, params, roles), rel=1e-6)
    assert float(result.after) > float(minimal_mass(table, params).after) * 1.01


def test_the_objective_of_digits_is_the_one_written_by_hand(digits: zoo.Collection, digits_mass: MinimalMass) -> None:
    state = digits[5:6].stack()
    objective, size = objective_of_digits(state)
    assert objective(np.zeros(size)) == pytest.approx(float(digits_mass.before[5]), rel=1e-12)
    at = torch.cat([digits_mass.scales[name][5].log() for name in ("conv1", "conv2", "fc1")]).numpy()
    assert objective(at) == pytest.approx(float(digits_mass.after[5]), rel=1e-12)
    for seed in range(20):
        step = np.random.default_rng(seed).normal(size=size)
        assert objective(at + 0.05 * step) > objective(at)


def test_one_hidden_layer_has_a_closed_form() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    table = symmetries(net, torch.zeros(1, 3, dtype=torch.float64))
    rows, columns = (net[0].weight.square().sum(1), net[2].weight.square().sum(0))
    result = minimal_mass(table, {n: t[None] for n, t in net.state_dict().items()})
    torch.testing.assert_close(result.after[0], (2 * (rows * columns).sqrt()).sum().detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(result.scales["0"][0], (columns / rows).detach() ** 0.25, rtol=1e-12, atol=0)
    assert float(result.residual) < 1e-14


@pytest.mark.parametrize("name", BOUNDED)
def test_the_minimum_equals_that_of_scipy_over_all_entries(name: str) -> None:
    table, params, *_ = random_members(name, 3, spread=0.4, seed=11)
    result = minimal_mass(table, params)
    for i in range(3):
        assert float(result.after[i]) == pytest.approx(minimum_by_scipy(table, member_of(params, i)), rel=1e-6)


@pytest.mark.slow
@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=8),
    seed=st.integers(0, 2**31 - 1),
    spread=st.floats(0, 1.5),
)
@settings(max_examples=15)
def test_random_chains_reach_the_minimum(widths: list[int], seed: int, spread: float) -> None:
    layers: list[nn.Module] = []
    for n, m in zip([3, *widths], [*widths, 2], strict=True):
        layers += [nn.Linear(n, m), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    generator = torch.Generator().manual_seed(seed)
    table = symmetries(net, torch.zeros(1, 3))
    drawn = {n: torch.randn(2, *t.shape, generator=generator, dtype=torch.float64) for n, t in net.state_dict().items()}
    params = rescale(table, drawn, random_element(table, generator, members=2, spread=spread).scales)
    result = minimal_mass(table, params)
    assert result.converged.all()
    assert (result.history.diff(dim=0) <= 1e-14 * result.before).all()
    for i in range(2):
        assert float(result.after[i]) == pytest.approx(minimum_by_scipy(table, member_of(drawn, i)), rel=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_rescaled_networks_have_one_minimum(name: str) -> None:
    table, params, *_ = random_members(name, 2)
    moved = rescale(table, params, random_element(table, torch.Generator().manual_seed(3), members=2).scales)
    one_way, other = minimal_mass(table, params), minimal_mass(table, moved)
    torch.testing.assert_close(one_way.after, other.after, rtol=2e-6, atol=1e-12)
    assert one_way.degenerate == other.degenerate
    assert one_way.dead == other.dead
    assert (other.history.diff(dim=0) <= 1e-14 * other.before).all()


@pytest.mark.parametrize("name", EVERY)
def test_the_scales_reach_the_minimum_and_leave_the_function(name: str) -> None:
    table, params, net, inputs = random_members(name, 2, spread=0.5)
    result = minimal_mass(table, params)
    total = mass_of(table, params)
    torch.testing.assert_close(result.before + result.unbounded, total, rtol=1e-12, atol=0)
    moved = rescale(table, params, result.scales)
    again = minimal_mass(table, moved)
    torch.testing.assert_close(again.before, result.after, rtol=1e-12, atol=1e-14)
    if not result.degenerate and not any(result.dead):
        torch.testing.assert_close(mass_of(table, moved), result.after, rtol=1e-12, atol=0)
    for i in range(2):
        before, after = (
            functional_call(net, {n: t[i] for n, t in p.items()}, inputs, tie_weights=False) for p in (params, moved)
        )
        for key in before if isinstance(before, dict) else ():
            torch.testing.assert_close(after[key], before[key], rtol=1e-10, atol=1e-10)
        if isinstance(before, Tensor):
            torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "mixer", "stream", "gated"])
def test_a_mass_far_above_its_minimum_converges(name: str) -> None:
    table, params, *_ = random_members(name, 8, seed=5)
    generator = torch.Generator().manual_seed(0)
    moved = rescale(table, params, random_element(table, generator, members=8, spread=3).scales)
    result = minimal_mass(table, moved)
    assert (result.before / result.after).max() > 1e4
    torch.testing.assert_close(result.after, minimal_mass(table, params).after, rtol=1e-6, atol=0)


def test_every_digits_member_is_far_above_its_minimum(digits_mass: MinimalMass) -> None:
    assert len(digits_mass) == 64
    assert digits_mass.converged.all()
    assert (digits_mass.excess / 100 > 10 * digits_mass.residual).all()
    assert (digits_mass.residual < 1e-3).all()
    assert digits_mass.sweeps.max() < 20
    assert (digits_mass.history.diff(dim=0) <= 1e-14 * digits_mass.before).all()
    assert (digits_mass.degenerate, digits_mass.dead, digits_mass.held) == ({}, ({},) * 64, ())
    torch.testing.assert_close(digits_mass.history[-1], digits_mass.after)


def test_a_minimum_has_no_excess(digits: zoo.Collection, digits_mass: MinimalMass) -> None:
    table = symmetries("convnet-digits")
    params = {n: t.double() for n, t in digits.stack().items()}
    again = minimal_mass(table, rescale(table, params, digits_mass.scales))
    torch.testing.assert_close(again.before, digits_mass.after, rtol=1e-12, atol=0)
    assert (again.excess.abs() < 1e-4).all()


@pytest.mark.parametrize("name", ["mlp", "stream", "deep", "grouped", "gated", "two_readers"])
def test_a_mass_does_not_depend_on_other_members(name: str) -> None:
    table, params, *_ = random_members(name, 3, spread=0.5)
    together = minimal_mass(table, params)
    for i in range(3):
        alone = minimal_mass(table, member_of(params, i))
        assert int(alone.sweeps) == int(together.sweeps[i])
        torch.testing.assert_close(alone.after[0], together.after[i], rtol=1e-12, atol=0)
        for scale, values in alone.scales.items():
            torch.testing.assert_close(values[0], together.scales[scale][i], rtol=1e-9, atol=0)


def test_members_are_balanced_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table, params, *_ = random_members("stream", 5, spread=0.5)
    together = minimal_mass(table, params)
    monkeypatch.setitem(mass._ENTRIES_AT_ONCE, "cpu", 2000)
    apart = minimal_mass(table, params)
    torch.testing.assert_close(apart.after, together.after, rtol=1e-12, atol=0)
    assert apart.history.shape == together.history.shape
    assert apart.ids == together.ids == tuple(range(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_storage_is_computed_in_float64(dtype: torch.dtype) -> None:
    table, params, *_ = random_members("stream", 2)
    stored = {n: t.to(dtype) for n, t in params.items()}
    # Squares of weights that float16 can't hold.
    stored["conv1.weight"][:, 0] *= 2e-4
    wide = minimal_mass(table, {n: t.double() for n, t in stored.items()})
    narrow = minimal_mass(table, stored)
    assert narrow.after.dtype == torch.float64
    torch.testing.assert_close(narrow.after, wide.after, rtol=1e-12, atol=0)


def test_parameters_that_ask_for_gradients_are_taken() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    params = {n: t[None] for n, t in net.named_parameters()}
    result = minimal_mass(symmetries(net, torch.zeros(1, 2)), params)
    assert not result.after.requires_grad
    assert not result.after.is_inference()
    assert not result.scales["0"].is_inference()
