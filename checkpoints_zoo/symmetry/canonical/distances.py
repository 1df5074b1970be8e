"""Distances between networks: squared distances of weights, and numbers of transpositions of permutations.

Xiao, Liu, Bamler 2023 (arXiv 2401.00611) report the pair (‖W₀ − P·W₁‖², NoT(P)), P the permutation that matches W₁.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import check_unstacked, count_stacked_members
from checkpoints_zoo.symmetry.canonical.matching import STATISTIC_ROLES
from checkpoints_zoo.symmetry.table import Table

_ENTRIES_AT_ONCE = 1 << 18  # Largest number of entries converted to float64 at once.


def transpositions(permutation: Tensor) -> Tensor:
    """Return the smallest number of swaps of two units that make up a permutation, int64 (...): units - cycles.

    Args:
        permutation: one or more permutations, int64 (..., unit).

    Raises:
        UsageError: a row is no permutation.

    >>> transpositions(torch.tensor([[0, 1, 2], [1, 0, 2], [1, 2, 0]])).tolist()
    [0, 1, 2]
    """
    units = torch.arange(permutation.shape[-1], device=permutation.device) if permutation.ndim else None
    if units is None or permutation.dtype != torch.int64 or not bool((permutation.sort(-1)[0] == units).all()):
        raise UsageError(
            "permutation",
            expected="int64, each unit once along the last axis",
            found=f"{str(permutation.dtype).removeprefix('torch.')} {tuple(permutation.shape)}: "
            f"{permutation.flatten()[:8].tolist()}",
        )
    # Each unit learns the least unit of its cycle; each step looks twice as far along the cycle.
    least_unit_of_cycle, next_units = torch.minimum(permutation, units), permutation
    for _ in range(max(0, len(units) - 1).bit_length()):
        next_units = next_units.gather(-1, next_units)
        least_unit_of_cycle = torch.minimum(least_unit_of_cycle, least_unit_of_cycle.gather(-1, next_units))
    return len(units) - (least_unit_of_cycle == units).sum(-1)


def squared_distance(table: Table, params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """Return the squared Euclidean distance of each member to a reference, float64 (member).

    Running statistics do not count.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), including all tensors of floating point. Permute them first.
        reference: parameters of the reference, name -> (*shape).

    Raises:
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.
        UsageError: the tensors have no member axis, or the reference has one.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Linear(2, 1)
    >>> table, weights = symmetries(net, torch.zeros(1, 2)), net.state_dict()
    >>> squared_distance(table, {name: tensor[None] + 1 for name, tensor in weights.items()}, weights).round().tolist()
    [3.0]
    """
    total = torch.zeros(count_stacked_members(table, params), dtype=torch.float64)
    check_unstacked(table, reference, "reference")
    for name, axes in table.tensors.items():
        present = [tensors[name] for tensors in (params, reference) if name in tensors]
        if axes.role in STATISTIC_ROLES or not all(t.is_floating_point() for t in present):
            continue
        if len(present) == 2:
            total += _sum_squared_differences(present[0].detach(), present[1].detach())
        elif present or axes.moves or axes.role != "other":  # A tensor that both networks lack may be a counter.
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    return total


def _sum_squared_differences(stacked: Tensor, reference: Tensor) -> Tensor:
    """Return the sum of the squared differences between a stacked tensor and one reference tensor, (member). Memory
    stays small: at most `_ENTRIES_AT_ONCE` entries are in float64 at once."""
    members, width = len(stacked), max(1, reference.numel())
    flat, other = stacked.reshape(members, -1), reference.reshape(-1).to(stacked.device)
    result = torch.zeros(members, dtype=torch.float64, device=stacked.device)
    rows, columns = max(1, _ENTRIES_AT_ONCE // width), min(width, _ENTRIES_AT_ONCE)
    for start in range(0, members, rows):
        for at in range(0, reference.numel(), columns):
            part = flat[start : start + rows, at : at + columns].double() - other[at : at + columns].double()
            result[start : start + rows] += part.square_().sum(1)
    return result.cpu()
