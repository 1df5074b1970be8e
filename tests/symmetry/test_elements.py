"""Symmetries against the function itself: it stays; nothing else keeps it; they undo and follow each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry import apply, compose, inverse, permute, random_element, symmetries
from tests.support.symmetry_nets import EVERY, NETS, randomised, table_of, without_eps
from tests.support.symmetry_programs import Program

seeds = st.integers(0, 2**31 - 1)


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    """All outputs of a net in one row."""
    with torch.no_grad():
        y = net(x)
    return torch.cat([t.flatten() for t in (y.values() if isinstance(y, dict) else [y])])


def output_change(name: str, seed: int, *, approximate: bool = False, eps: bool = True) -> float:
    """Apply a random symmetry to a random net; return how much its outputs change, relative to the largest one."""
    build, shape = EVERY[name]
    kept = (lambda net: net) if eps else without_eps
    net = kept(randomised(build(), seed))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    before = outputs(net, x)
    element = random_element(table_of(name), generator, approximate=approximate)
    moved = apply(table_of(name), net.state_dict(), element)
    # Of a few units, a random permutation may be the identity.
    stays = not (element.scales or element.signs) and all(
        torch.equal(p, p.sort()[0]) for p in element.permutations.values()
    )
    assert stays != any(not torch.equal(moved[n], t) for n, t in net.state_dict().items())
    other = kept(build().double().eval())
    other.load_state_dict(moved, strict=True)
    return ((outputs(other, x) - before).abs().max() / before.abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("name", NETS)
@settings(max_examples=8)
@given(seed=seeds)
def test_exact_symmetries_keep_the_function(name: str, seed: int) -> None:
    assert output_change(name, seed) < 1e-10


@pytest.mark.parametrize(
    "name", ["convnet", "resnet8", "optunet", "optunet-355", "resnet20", "resnet20-bias", "perceptron"]
)
def test_exact_symmetries_keep_the_function_of_the_architectures(name: str) -> None:
    assert max(output_change(name, seed) for seed in range(3)) < 1e-10


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=seeds)
def test_symmetries_of_random_programs(seed: int) -> None:
    try:
        table = symmetries(Program(seed), torch.zeros(2, 3, 4, 4))
    except SymmetryError:
        assume(False)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 3, 4, 4, generator=generator, dtype=torch.float64)
    # At eps = 0 a map that is constant is divided by its rounding errors; at 1e-20 they stay below 1e-6.
    for approximate, bound in ((False, 1e-10), (True, 1e-5)):
        net = randomised(Program(seed), seed)
        if approximate:
            without_eps(net, 1e-20)
        before = outputs(net, x)
        element = random_element(table, generator, approximate=approximate, spread=0.3)
        net.load_state_dict(apply(table, net.state_dict(), element), strict=True)
        assert (outputs(net, x) - before).abs().max() <= bound * before.abs().max()


APPROXIMATE = ["group_normed", "layer_normed", "residual_group_normed", "owned", "resnet20", "resnet20-bias"]


@pytest.mark.slow
@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_scales_are_exact_without_eps(name: str) -> None:
    bound = 2e-7 if name.startswith("resnet20") else 1e-10  # timm's filter response norm computes in float32
    assert max(output_change(name, seed, approximate=True, eps=False) for seed in range(3)) < bound
    assert max(output_change(name, seed, approximate=True) for seed in range(3)) > 3 * bound


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
@settings(max_examples=3)
@given(seed=seeds)
def test_inverse_and_composition(name: str, seed: int) -> None:
    table, generator = table_of(name), torch.Generator().manual_seed(seed)
    params = randomised(NETS[name][0](), seed).state_dict()
    one, two = (random_element(table, generator, approximate=True) for _ in range(2))
    moved = permute(table, params, one.permutations)
    back = permute(table, moved, inverse(table, one).permutations)
    assert all(torch.equal(back[n], t) for n, t in params.items())
    back = apply(table, apply(table, params, one), inverse(table, one))
    forth = apply(table, apply(table, params, inverse(table, one)), one)
    twice = apply(table, apply(table, params, one), two)
    once = apply(table, params, compose(table, one, two))
    for n, t in params.items():
        torch.testing.assert_close(back[n], t, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(forth[n], t, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(twice[n], once[n], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "grouped_input"])
def test_there_are_no_other_scalings(name: str) -> None:
    """A scaling of rows and columns that keeps the function lies in the null space of its derivative.

    That space is larger at points where a unit is never or always active: the least over a few points counts.
    """
    build, shape = EVERY[name]
    found = []
    for seed in range(4):
        net = randomised(build(), seed)
        with torch.no_grad():
            for t in net.state_dict().values():
                t[t.abs() < 0.1] = 0.7
        generator = torch.Generator().manual_seed(seed)
        x = 3 * torch.randn(60, *shape, generator=generator, dtype=torch.float64)
        every = net(x).flatten()
        chosen = torch.randperm(len(every), generator=generator)[:200]
        params = list(net.parameters())
        rows = [torch.autograd.grad(value, params, retain_graph=True) for value in every[chosen]]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        scalings = torch.stack([scaling for i in range(len(params)) for scaling in scaled_entries(params, i)])
        found.append(rank(scalings) - rank(scalings @ jacobian.T))
    assert min(found) == table_of(name).scaling_freedom


def scaled_entries(params: list[nn.Parameter], i: int) -> Iterator[Tensor]:
    """Yield the directions in which rows, then columns, of one parameter are scaled, as vectors of all parameters."""
    for axis in range(min(params[i].ndim, 2)):
        for entry in range(params[i].shape[axis]):
            parts = [torch.zeros_like(p) for p in params]
            parts[i].select(axis, entry).copy_(params[i].detach().select(axis, entry))
            yield torch.cat([part.flatten() for part in parts])


def rank(rows: Tensor) -> int:
    values = torch.linalg.svdvals(rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30))
    return int((values > values[0] * 1e-9).sum())


def test_random_elements_are_uniform_over_all_permutations() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1, groups=2), nn.ReLU(), nn.Conv2d(2, 1, 1))
    table = symmetries(net, torch.zeros(1, 1, 2, 2))
    drawn = random_element(table, torch.Generator().manual_seed(0), members=4000).permutations
    seen = Counter(map(tuple, torch.cat([drawn[name] for name in table.groups], 1).tolist()))
    assert len(seen) == round(10 ** table.log10_permutations()) == 2 * 2**2
    assert max(abs(n - 500) for n in seen.values()) < 5 * math.sqrt(500)
