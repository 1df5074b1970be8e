"""Compose and invert elements of a symmetry group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import flip_tensor, permute_tensor, rescale_tensor
from checkpoints_zoo.symmetry.elements import Element
from checkpoints_zoo.symmetry.matrices import permute_matrices, turn_tensor
from checkpoints_zoo.symmetry.shifting import collect_vector, spread_vector
from checkpoints_zoo.symmetry.table import Scale, Sign, Table


def inverse(table: Table, element: Element) -> Element:
    """Return the symmetry that undoes a given symmetry, up to rounding."""
    inverse_permutations = {name: p.argsort(-1) for name, p in element.permutations.items()}
    scales = {
        n: permute_scale(table.scales[n], table, s.reciprocal(), element.permutations)
        for n, s in element.scales.items()
    }
    signs = {n: permute_scale(table.signs[n], table, s, element.permutations) for n, s in element.signs.items()}
    matrices = {
        n: permute_matrices(table.matrices[n], table, torch.linalg.inv(m), element.permutations)
        for n, m in element.matrices.items()
    }
    linear = Element(element.permutations, element.scales, element.signs, element.matrices)
    shifts = {name: -vector for name, vector in map_shifts(table, element.shifts, linear).items()}
    return Element(inverse_permutations, scales, signs, matrices, shifts)


def compose(table: Table, first: Element, second: Element) -> Element:
    """Return the symmetry that applies `first`, then `second`."""
    permutations = dict(first.permutations)
    for name, p in second.permutations.items():
        permutations[name] = _gather_on_last_axis(first.permutations[name], p) if name in first.permutations else p
    # The scales of `second` are in the order of the permuted units; they are needed in the order before the
    # permutation.
    inverses = {name: p.argsort(-1) for name, p in first.permutations.items()}
    scales, signs = dict(first.scales), dict(first.signs)
    for composed, second_factors, table_scales in (
        (scales, second.scales, table.scales),
        (signs, second.signs, table.signs),
    ):
        for name, values in second_factors.items():
            moved_values = permute_scale(table_scales[name], table, values, inverses)
            composed[name] = composed[name] * moved_values if name in composed else moved_values
    matrices = dict(first.matrices)
    for name, values in second.matrices.items():
        moved = permute_matrices(table.matrices[name], table, values, inverses)
        matrices[name] = matrices[name] @ moved if name in matrices else moved
    linear = Element(first.permutations, first.scales, first.signs, first.matrices)
    shifts = dict(first.shifts)
    for name, vector in map_shifts(table, second.shifts, inverse(table, linear)).items():
        shifts[name] = shifts[name] + vector if name in shifts else vector
    return Element(permutations, scales, signs, matrices, shifts)


def map_shifts(table: Table, shifts: Mapping[str, Tensor], element: Element) -> dict[str, Tensor]:
    """Return shifts whose effect after an element without shifts is that of given shifts before it.

    Args:
        table: the network's symmetry table.
        shifts: name -> vector (entry) or (member, entry).
        element: the element. Its own shifts are left out.
    """
    parts_and_ranks = (
        (element.permutations, 1), (element.scales, 1), (element.signs, 1), (element.matrices, 3),
    )  # fmt: skip
    rows = [len(v) for part, rank in parts_and_ranks for v in part.values() if v.ndim > rank]
    mapped = {}
    for name, vector in shifts.items():
        one = table.shifts[name]
        axes, tensor = spread_vector(table, one, vector.double().reshape(-1, one.size))
        tensor = tensor.expand(max([len(tensor), *rows]), *tensor.shape[1:])
        tensor = turn_tensor([t for t in axes.turns if t.matrix in element.matrices], tensor, element.matrices, {})
        tensor = flip_tensor(axes, rescale_tensor(axes, tensor, element.scales), element.signs)
        result = collect_vector(table, one, permute_tensor(axes, tensor, element.permutations))
        mapped[name] = result if rows or vector.ndim == 2 else result[0]
    return mapped


def permute_scale(
    scale: Scale | Sign, table: Table, scale_values: Tensor, permutations: Mapping[str, Tensor]
) -> Tensor:
    """Return the values of a scale or sign (..., value) in the order of the permuted units."""
    if scale.group is None or scale.group not in permutations:
        return scale_values
    values_per_unit = scale.size // table.groups[scale.group].size
    p = permutations[scale.group].to(scale_values.device)
    entries = (p[..., None] * values_per_unit + torch.arange(values_per_unit, device=p.device)).flatten(-2)
    return _gather_on_last_axis(scale_values, entries)


def _gather_on_last_axis(values: Tensor, positions: Tensor) -> Tensor:
    """Gather values along the last axis; return the gathered values. The values or the positions may have no member
    axis."""
    leading_shape = max(values.shape[:-1], positions.shape[:-1], key=len)
    return values.expand(*leading_shape, -1).gather(-1, positions.expand(*leading_shape, -1))
