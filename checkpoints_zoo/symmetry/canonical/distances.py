"""How far networks are apart: squared distances of weights, and the transpositions of the permutations between them.

Xiao, Liu, Bamler 2023 (arXiv 2401.00611) report the pair (‖W₀ − P·W₁‖², NoT(P)), P the permutation that matches W₁.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import check_single, members_of, permute, stacked_in
from checkpoints_zoo.symmetry.canonical.alignment import match
from checkpoints_zoo.symmetry.canonical.matching import STATISTICS, wider
from checkpoints_zoo.symmetry.table import Table

_CHUNK = 1 << 18  # entries that are made float64 at once
_TOGETHER = 1 << 26  # entries of the points of a line that are matched at once

ALL, GROUP, TENSOR = "all", "group", "tensor"


def transpositions(permutation: Tensor) -> Tensor:
    """Return how many swaps of two units make a permutation, at least: its units less its cycles; int64 (...).

    Args:
        permutation: int64 (..., unit).

    Raises:
        UsageError: it is none.

    >>> transpositions(torch.tensor([[0, 1, 2], [1, 0, 2], [1, 2, 0]])).tolist()
    [0, 1, 2]
    """
    places = torch.arange(permutation.shape[-1], device=permutation.device) if permutation.ndim else None
    if places is None or permutation.dtype != torch.int64 or not bool((permutation.sort(-1)[0] == places).all()):
        raise UsageError(
            "permutation",
            expected="int64, each unit once along the last axis",
            found=f"{str(permutation.dtype).removeprefix('torch.')} {tuple(permutation.shape)}: "
            f"{permutation.flatten()[:8].tolist()}",
        )
    # Each unit learns the least unit of its cycle, from twice as far along it at each step.
    least, ahead = torch.minimum(permutation, places), permutation
    for _ in range(max(0, len(places) - 1).bit_length()):
        ahead = ahead.gather(-1, ahead)
        least = torch.minimum(least, least.gather(-1, ahead))
    return len(places) - (least == places).sum(-1)


def transpositions_of(permutations: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the transpositions of permutations, group -> int64 (...); blocks that are moved count by their units.

    Args:
        permutations: group -> int64 (..., unit), as in `Matching.permutations`.
    """
    return {name: transpositions(p) for name, p in permutations.items()}


def total_transpositions(permutations: Mapping[str, Tensor]) -> Tensor:
    """Return the number of transpositions (NoT) of all groups together, int64 (...).

    Args:
        permutations: group -> int64 (..., unit), at least one.
    """
    return torch.stack([transpositions(p) for p in permutations.values()]).sum(0)


@overload
def squared_distance(
    table: Table, params: Mapping[str, Tensor], reference: Mapping[str, Tensor], per: Literal["all"] = ...,
    *, statistics: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def squared_distance(
    table: Table, params: Mapping[str, Tensor], reference: Mapping[str, Tensor], per: Literal["group", "tensor"],
    *, statistics: bool = ...,
) -> dict[str, Tensor]: ...  # fmt: skip


def squared_distance(
    table: Table,
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    per: Literal["all", "group", "tensor"] = "all",
    *,
    statistics: bool = False,
) -> Tensor | dict[str, Tensor]:
    """Return the squared Euclidean distance of members to a reference, (member) in float64: one, or one a name.

    Args:
        table: of the network.
        params: name -> (member, *shape), all tensors of floating point; permute them before.
        reference: name -> (*shape).
        per: "all" for one distance; "tensor" for one a tensor; "group" for one a group, of all tensors that it moves.
            A tensor between two groups counts in full for both, and one that none moves for neither: the distances of
            groups don't add up to the whole.
        statistics: whether running statistics count.

    Raises:
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.
        UsageError: tensors without a member axis, or a reference with one.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Linear(2, 1)
    >>> table, weights = symmetries(net, torch.zeros(1, 2)), net.state_dict()
    >>> squared_distance(table, {name: tensor[None] + 1 for name, tensor in weights.items()}, weights).round().tolist()
    [3.0]
    """
    members = stacked_in(table, params)
    check_single(table, reference, "reference")
    if per not in (ALL, GROUP, TENSOR):
        raise UsageError("per", expected="all, group or tensor", found=repr(per))
    each: dict[str, Tensor] = {}
    for name, axes in table.tensors.items():
        known = [part[name] for part in (params, reference) if name in part]
        if (axes.role in STATISTICS and not statistics) or not all(t.is_floating_point() for t in known):
            continue
        if len(known) < 2:
            # What is not there at all may be a counter, which members don't hold.
            if not known and not axes.moves and axes.role == "other":
                continue
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
        each[name] = _squares(known[0].detach(), known[1].detach())
    if per == TENSOR:
        return each
    if per == GROUP:
        none = torch.zeros(members, dtype=torch.float64)
        moved = {name: {move.group for move in table.tensors[name].moves} for name in each}
        return {group: sum((each[n] for n in each if group in moved[n]), start=none) for group in table.groups}
    return sum(each.values(), start=torch.zeros(members, dtype=torch.float64))


def _squares(stacked: Tensor, fixed: Tensor) -> Tensor:
    """Return squared distances, (member), some entries of some members at a time."""
    members, width = len(stacked), max(1, fixed.numel())
    flat, other = stacked.reshape(members, -1), fixed.reshape(-1).to(stacked.device)
    result = torch.zeros(members, dtype=torch.float64, device=stacked.device)
    rows, columns = max(1, _CHUNK // width), min(width, _CHUNK)
    for start in range(0, members, rows):
        for at in range(0, fixed.numel(), columns):
            part = flat[start : start + rows, at : at + columns].double() - other[at : at + columns].double()
            result[start : start + rows] += part.square_().sum(1)
    return result.cpu()


@dataclass(frozen=True)
class Line:
    """What matching makes of the networks on the straight line between two, W_λ = (1 − λ)·W₀ + λ·W₁.

    Args:
        points: (point), λ.
        distance: (point), ‖W₀ − P_λ·W_λ‖², P_λ the permutations that match W_λ to W₀.
        unmoved: (point), ‖W₀ − W_λ‖².
        distances: group -> (point), as `squared_distance` counts them.
        transpositions: group -> (point), of P_λ.
        permutations: group -> (point, unit), P_λ.
    """

    points: Tensor
    distance: Tensor
    unmoved: Tensor
    distances: Mapping[str, Tensor]
    transpositions: Mapping[str, Tensor]
    permutations: Mapping[str, Tensor]

    @property
    def total(self) -> Tensor:
        """Transpositions of all groups, (point)."""
        return sum(self.transpositions.values(), start=torch.zeros(len(self.points), dtype=torch.int64))


def along(
    table: Table,
    start: Mapping[str, Tensor],
    end: Mapping[str, Tensor],
    points: int | Sequence[float] = 25,
    *,
    seed: int = 0,
    most: int = 100,
) -> Line:
    """Match networks on the straight line between two back to its start; return distances and transpositions.

    Each point is matched by itself, from unpermuted units on.

    Args:
        table: of the network.
        start, end: name -> (*shape).
        points: λ of each point, or how many from 0 to 1.
        seed, most: as for `match`.

    Raises:
        LayoutError, UsageError, DamagedError: as for `match`.
    """
    if members_of(table, start) is not None or members_of(table, end) is not None:
        raise UsageError("ends of the line", expected="networks without a member axis", found="stacked tensors")
    chosen = (
        torch.linspace(0, 1, points, dtype=torch.float64).tolist()
        if isinstance(points, int)
        else [float(p) for p in points]
    )
    if not chosen:
        raise UsageError("points", expected="at least one", found="none")
    # Counters and masks don't count, and have no points between them.
    floats = {name: tensor for name, tensor in start.items() if tensor.is_floating_point()}
    first = {name: _wide(tensor, end[name]) for name, tensor in floats.items() if name in end}
    size = max(1, _TOGETHER // max(1, sum(tensor.numel() for tensor in first.values())))
    distances, unmoved, groups, found = [], [], [], []
    for at in range(0, len(chosen), size):
        line = {
            n: torch.stack([t.lerp(end[n].detach().to(t), p) for p in chosen[at : at + size]]) for n, t in first.items()
        }
        found.append(match(table, line, first, seed=seed, most=most).permutations)
        moved = permute(table, line, found[-1])
        distances.append(squared_distance(table, moved, first))
        unmoved.append(squared_distance(table, line, first))
        groups.append(squared_distance(table, moved, first, "group"))
    permutations = _joined(table, found)
    return Line(
        points=torch.tensor(chosen, dtype=torch.float64),
        distance=torch.cat(distances),
        unmoved=torch.cat(unmoved),
        distances=_joined(table, groups),
        transpositions=transpositions_of(permutations),
        permutations=permutations,
    )


def _wide(start: Tensor, end: Tensor) -> Tensor:
    return start.detach().to(wider(start.dtype, end.dtype)) if start.is_floating_point() else start


def _between(start: Tensor, end: Tensor, share: float) -> Tensor:
    """Return a point between two tensors; integers stay as they are at the start."""
    return start.lerp(end.to(start), share) if start.is_floating_point() else start


def _joined(table: Table, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in table.groups}
