"""Canonical weights, alignment and minimal mass of networks with attention, on random elements of their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.symmetry import Element, Table, apply, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_mean, match_weights, restrict
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from checkpoints_zoo.symmetry.canonical.mass import minimal_mass
from checkpoints_zoo.symmetry.table import Axes
from tests.support.attention_nets import INDICES, Decoder, drawn

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def decoder() -> Table:
    return symmetries(Decoder(), INDICES)


def stacked(weights: Mapping[str, Tensor], members: int) -> Weights:
    return {name: tensor.expand(members, *tensor.shape).contiguous() for name, tensor in weights.items()}


def furthest(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def output(weights: Weights) -> Tensor:
    with torch.no_grad():
        result: Tensor = functional_call(Decoder(), weights, (INDICES,))
    return result


OPTIONS = [
    {"heads": "balanced"},
    {"heads": "balanced", "permute": "first"},
    {"heads": "balanced", "permute": "norm"},
    {"heads": "balanced", "permute": "max", "scale": "unit-norm"},
    {"heads": "balanced", "permute": "first", "scale": "unit-norm", "streams": True},
]


def removed(table: Table, element: Element, options: dict[str, str | bool]) -> Element:
    """Return the part of an element that a canonical map with these options removes."""
    streams = {name for name, matrix in table.matrices.items() if "orthogonal" in matrix.kind}
    kept = {name: m for name, m in element.matrices.items() if "streams" in options or name not in streams}
    element = replace(element, matrices=kept)
    element = element if "scale" in options else replace(element, scales={}, signs={})
    return element if "permute" in options else replace(element, permutations={})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_canonical_weights_are_the_same_on_an_orbit(decoder: Table, options: dict[str, str | bool]) -> None:
    weights, generator = drawn(Decoder()), torch.Generator().manual_seed(9)
    canonical, applied = canonicalize(decoder, weights, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output(canonical), output(weights), rtol=1e-12, atol=1e-12)
    assert furthest(apply(decoder, weights, applied), canonical) < 1e-13
    elements = random_element(decoder, generator, members=5, condition=10.0)
    moved = apply(decoder, stacked(weights, 5), removed(decoder, elements, options))
    again, _ = canonicalize(decoder, moved, **options)  # type: ignore[arg-type]
    for name, tensor in again.items():
        assert float((tensor - canonical[name]).abs().max()) < 1e-8


def test_canonical_weights_are_balanced_and_without_redundant_biases(decoder: Table) -> None:
    """Read off the tensors, by hand: keys and values have no bias, and both factors the same Gram matrix."""
    weights, _ = canonicalize(decoder, drawn(Decoder()), heads="balanced", scale="unit-norm")
    for name in ("attention.k.bias", "attention.v.bias", "norms.0.bias", "norms.1.bias"):
        assert float(weights[name].abs().max()) < 1e-14
    gain = weights["norms.0.weight"]
    torch.testing.assert_close(gain, torch.ones_like(gain))
    q = torch.cat([weights["attention.q.weight"], weights["attention.q.bias"][:, None]], 1)
    k, v, o = (weights[f"attention.{name}.weight"] for name in "kvo")
    for written, read in ((q, k), (v, o.T)):
        for head in (slice(0, 4), slice(4, 8)):
            grams = [side[head] @ side[head].T for side in (written, read)]
            torch.testing.assert_close(*grams, rtol=0, atol=1e-12)
            torch.testing.assert_close(grams[0], torch.diag(grams[0].diagonal()), rtol=0, atol=1e-12)
    assert float(o.sum(0).abs().max()) < 1e-13  # Only norms read the stream.
    assert float(q[:, :-1].sum(1).abs().max()) < 1e-13  # The norm's result has mean zero.


def test_a_head_of_lower_rank_stays_as_it_is(decoder: Table) -> None:
    weights = drawn(Decoder())
    weights["attention.k.weight"][0] = weights["attention.k.weight"][1]
    weights["attention.k.bias"][0] = weights["attention.k.bias"][1]
    canonical, element = canonicalize(decoder, weights, heads="balanced")
    first, second = (element.matrices["attention.q"][head].abs() for head in (0, 1))
    torch.testing.assert_close(first, torch.eye(4, dtype=torch.float64))
    assert not torch.allclose(second, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(output(canonical), output(weights), rtol=1e-12, atol=1e-12)


def test_half_precision_is_widened(decoder: Table) -> None:
    halves = {name: tensor.half() for name, tensor in drawn(Decoder()).items()}
    canonical, _ = canonicalize(decoder, halves, heads="balanced", permute="first")
    assert {tensor.dtype for tensor in canonical.values()} == {torch.float32}
    wide, _ = canonicalize(decoder, {n: t.double() for n, t in halves.items()}, heads="balanced", permute="first")
    assert furthest({n: t.double() for n, t in canonical.items()}, wide) < 1e-5


def test_integers_stay(decoder: Table) -> None:
    table = replace(decoder, tensors={**decoder.tensors, "places_used": Axes((4,), "other", 0.0, (), ())})
    weights = drawn(Decoder()) | {"places_used": torch.arange(4)}
    canonical, _ = canonicalize(table, weights, heads="balanced", scale="unit-norm", permute="first")
    assert torch.equal(canonical["places_used"], torch.arange(4))
    matching = match_weights(table, stacked(weights, 1), weights)
    assert torch.equal(apply(table, stacked(weights, 1), matching.element)["places_used"][0], torch.arange(4))


def test_an_unknown_way_is_refused(decoder: Table) -> None:
    with pytest.raises(UsageError, match="heads: expected 'balanced', or None; found 'sorted'"):
        canonicalize(decoder, drawn(Decoder()), heads="sorted")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-3)], ids=str)
def test_planted_elements_are_undone(decoder: Table, dtype: torch.dtype, tolerance: float) -> None:
    weights = drawn(Decoder())
    elements = random_element(decoder, torch.Generator().manual_seed(10), members=20, condition=10.0)
    moved = {name: tensor.to(dtype) for name, tensor in apply(decoder, stacked(weights, 20), elements).items()}
    matching = match_weights(decoder, moved, weights)
    back = apply(decoder, {name: tensor.double() for name, tensor in moved.items()}, matching.element)
    for name, tensor in back.items():
        apart = (tensor - weights[name]).flatten(1).norm(dim=1)
        assert float(apart.max()) < tolerance * float(weights[name].norm())
    assert bool(matching.converged.all())


def test_members_are_matched_as_one_by_one(decoder: Table) -> None:
    reference, members = drawn(Decoder(), 1), [drawn(Decoder(), seed) for seed in (2, 3, 4)]
    together = match_weights(decoder, {n: torch.stack([m[n] for m in members]) for n in reference}, reference)
    for i, member in enumerate(members):
        alone = match_weights(decoder, stacked(member, 1), reference)
        for part, other in zip(together.element.parts(), alone.element.parts(), strict=True):
            for name in part:
                torch.testing.assert_close(part[name][i], other[name][0], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(together.objective[i], alone.objective[0])
        moved = apply(decoder, member, together.element.select(i))
        torch.testing.assert_close(output(moved), output(member), rtol=1e-9, atol=1e-9)


def test_more_symmetries_bring_members_closer(decoder: Table) -> None:
    reference, member = drawn(Decoder(), 1), drawn(Decoder(), 2)
    distances, objectives = [], []
    for using in ("units", "heads", "matrices", "streams"):
        table = restrict(decoder, using)
        matching = match_weights(table, stacked(member, 1), reference)
        moved = apply(table, member, matching.element.select(0))
        torch.testing.assert_close(output(moved), output(member), rtol=1e-9, atol=1e-9)
        distances.append(sum(float((moved[n] - reference[n]).square().sum()) for n in reference))
        objectives.append(float(matching.objective))
    stored = sum(float((member[n] - reference[n]).square().sum()) for n in reference)
    assert distances[1] <= distances[0] < stored
    assert objectives[3] > objectives[2]  # Both are measured in the normal form.


def test_members_of_one_orbit_have_one_mean(decoder: Table) -> None:
    weights = drawn(Decoder())
    elements = random_element(decoder, torch.Generator().manual_seed(11), members=4)
    matching, mean = match_mean(decoder, apply(decoder, stacked(weights, 4), elements))
    aligned = apply(decoder, apply(decoder, stacked(weights, 4), elements), matching.element)
    for name, tensor in aligned.items():
        assert float((tensor - mean[name]).abs().max()) < 1e-4
    torch.testing.assert_close(output(mean), output(weights), rtol=1e-4, atol=1e-4)
    assert bool(matching.converged.all())


def test_bad_input_is_named(decoder: Table) -> None:
    weights = drawn(Decoder())
    with pytest.raises(UsageError, match="start: expected none"):
        match_weights(decoder, stacked(weights, 1), weights, start={"attention heads": torch.arange(2)})
    with pytest.raises(
        UsageError, match="using: expected 'units', 'heads', 'matrices', 'streams', or None; found 'all'"
    ):
        restrict(decoder, "all")
    broken = stacked(weights, 1)
    broken["up.bias"][0, 0] = torch.nan
    with pytest.raises(DamagedError, match=r"up\.bias.*finite"):
        match_weights(decoder, broken, weights)


def test_the_mass_inside_heads_is_twice_the_sum_of_singular_values(decoder: Table) -> None:
    """With all scales held, beside what no matrix changes: computed from the whole products, by hand."""
    weights = drawn(Decoder())
    mass = minimal_mass(decoder, stacked(weights, 1), hold=list(decoder.scales))
    expected = sum(float(t.square().sum()) for n, t in weights.items() if t.ndim > 1 and "attention" not in n)
    expected += sum(float(t.square().sum()) for n, t in weights.items() if n.startswith("norms") and "weight" in n)
    q, k, v, o = (weights[f"attention.{name}.weight"] for name in "qkvo")
    for head in (slice(0, 4), slice(4, 8)):
        for product in (q[head].T @ k[head], v[head].T @ o[:, head].T):
            expected += 2 * float(torch.linalg.svdvals(product).sum())
    assert float(mass.after) == pytest.approx(expected, rel=1e-12)
    assert float(mass.residual) < 1e-13
    assert bool(mass.converged.all())
    assert bool(mass.attained.all())
    assert "Products of heads: 4 in each member, 0 of a lower rank" in str(mass)


@pytest.mark.parametrize("biases", [False, True])
def test_no_scales_and_matrices_give_a_smaller_mass(decoder: Table, biases: bool) -> None:
    weights, generator = drawn(Decoder()), torch.Generator().manual_seed(12)
    result = minimal_mass(decoder, stacked(weights, 1), biases=biases)
    least = apply(decoder, stacked(weights, 1), Element({}, result.scales, {}, result.matrices, result.shifts))
    torch.testing.assert_close(output({n: t[0] for n, t in least.items()}), output(weights), rtol=1e-11, atol=1e-11)

    def mass(tensors: Mapping[str, Tensor]) -> Tensor:
        counted = {n: t for n, t in tensors.items() if biases or t.ndim > 2 or ("norms" in n and "weight" in n)}
        return torch.stack([tensor.flatten(1).square().sum(1) for tensor in counted.values()]).sum(0)

    torch.testing.assert_close(mass(least), result.after, rtol=1e-12, atol=0)
    assert float(result.residual) < 1e-4
    for spread, condition in ((0.5, 10.0), (0.1, 1.5), (0.01, 1.05)):
        element = random_element(decoder, generator, members=50, spread=spread, condition=condition)
        heads = {n: m for n, m in element.matrices.items() if decoder.matrices[n].kind == "invertible"}
        moved = apply(decoder, {n: t.expand(50, *t.shape[1:]) for n, t in least.items()},
                      Element(scales=element.scales, matrices=heads))  # fmt: skip
        assert bool((mass(moved) >= result.after * (1 - 1e-5)).all())


def test_the_least_mass_is_the_same_on_an_orbit(decoder: Table) -> None:
    weights, generator = drawn(Decoder()), torch.Generator().manual_seed(13)
    element = random_element(decoder, generator, members=3, condition=10.0)
    heads = {n: m for n, m in element.matrices.items() if decoder.matrices[n].kind == "invertible"}
    moved = apply(decoder, stacked(weights, 3), Element(element.permutations, element.scales, element.signs, heads))
    masses = [minimal_mass(decoder, tensors, tolerance=1e-10).after for tensors in (stacked(weights, 1), moved)]
    torch.testing.assert_close(masses[1], masses[0].expand(3), rtol=1e-6, atol=0)


def test_a_head_of_lower_rank_is_named(decoder: Table) -> None:
    weights = drawn(Decoder())
    weights["attention.v.weight"][5] = weights["attention.v.weight"][4]
    mass = minimal_mass(decoder, stacked(weights, 1))
    assert mass.unbalanced["attention.v"].tolist() == [[False, True]]
    assert not bool(mass.attained.any())
    assert "4 in each member, 1 of a lower rank stay as they are" in str(mass)
