"""Weight matching: the permutations of a network's units that bring its weights closest to another's.

Ainsworth et al. 2023 (arXiv 2209.04836), matching weights and merging many models, on the symmetry table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.device import one_thread
from checkpoints_zoo.symmetry.applying import check_element, check_single, permute, stacked_in
from checkpoints_zoo.symmetry.canonical.matching import Matched, Matcher, counted, wider
from checkpoints_zoo.symmetry.canonical.products import dot
from checkpoints_zoo.symmetry.elements import Element
from checkpoints_zoo.symmetry.table import Table

_SMALL = 1 << 20  # weights of a member whose operations are too small for a second thread
_SWEEPS = 100  # at most, of a match to a mean


@dataclass(frozen=True)
class Matching:
    """Permutations that match members to a reference.

    Args:
        permutations: group -> int64 (member, unit), as `symmetry.permute` takes them: unit u becomes what unit
            permutation[u] was.
        objective: (member), the inner product of the reference's and the permuted member's weights, in float64, over
            tensors that move, but for running statistics and integers.
        sweeps: (member), how many were taken over the groups.
        visits: (member), how many times a group was looked at; one isn't where nothing beside it has moved since.
        converged: (member), whether no group was left that could gain.
    """

    permutations: Mapping[str, Tensor]
    objective: Tensor
    sweeps: Tensor
    visits: Tensor
    converged: Tensor

    def __len__(self) -> int:
        return len(self.objective)


def match(
    table: Table,
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    *,
    start: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    most: int = 100,
) -> Matching:
    """Match members to a reference: raise the inner product of their weights by permuting groups; return what moves.

    Groups are visited in an order drawn for each sweep. A visit finds the best permutation of one group while all
    others stay, by linear assignment; those that it moves in blocks go along, each block arranged as is best for it.
    What a visit changes has to gain, so the objective never falls. A member's result depends on the seed, on it and on
    the reference, not on the members beside it.

    Args:
        table: of the network.
        params: name -> (member, *shape): all tensors that move, but for running statistics and integers, which don't
            count. Computed in float32, or float64 if any tensor is.
        reference: name -> (*shape).
        start: group -> permutation to start from, (unit) or (member, unit); groups that are missing start as they are.
        seed: of the order of visits.
        most: sweeps at most.

    Raises:
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.
        UsageError: tensors without a member axis, a reference with one, or no permutations to start from.
        DamagedError: a weight that is not finite.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> table, weights = symmetries(net, torch.zeros(1, 1)), net.state_dict()
    >>> swapped = permute(table, weights, {"0": torch.tensor([1, 0])})
    >>> match(table, {name: tensor[None] for name, tensor in swapped.items()}, weights).permutations["0"].tolist()
    [[1, 0]]
    """
    members = stacked_in(table, params)
    check_single(table, reference, "reference")
    begin = dict(start or {})
    check_element(table, Element(begin), members)
    _check_most(most)
    stacked, fixed = counted(table, params, "members"), counted(table, reference, "reference")
    wide = wider(*(tensor.dtype for network in (stacked, fixed) for tensor in network.values()))
    with torch.no_grad(), one_thread(_is_small(fixed)):
        matcher = Matcher(table, {name: tensor.to(wide) for name, tensor in fixed.items()})
        found, objectives = [], []
        for i in range(members):
            # A copy: how a product is rounded may depend on where a tensor begins in memory.
            own = {name: tensor[i].to(fixed[name].device, wide, copy=True) for name, tensor in stacked.items()}
            first = {name: p if p.ndim == 1 else p[i] for name, p in begin.items()}
            found.append(matcher.match(own, first, seed, most, f"the member at position {i}"))
            objectives.append(matcher.objective(own, found[-1].permutations))
    return _joined(table, found, objectives)


def match_mean(
    table: Table, params: Mapping[str, Tensor], *, seed: int = 0, most: int = 100
) -> tuple[Matching, dict[str, Tensor]]:
    """Match members to one another, each to the mean of the others; return what moves, and the mean of what moved.

    Passes over members in an order drawn for each. In the first one, the first member stays, and each that follows is
    matched to the mean of those before it; then each is to the mean of all others, until nothing changes. The sum of
    inner products of all pairs never falls. The result depends on the seed and on the order of the members.

    Args:
        table: of the network.
        params: name -> (member, *shape), as for `match`; what doesn't count there is averaged too.
        seed: of the orders of members and of visits.
        most: passes at most.

    Returns:
        The matching, with sweeps and visits of all passes, and its objective with the mean of the other members; and
        name -> (*shape), the mean in float32 or wider, of integers the first member's.

    Raises:
        LayoutError, UsageError, DamagedError: see `match`; there have to be members.
    """
    members = stacked_in(table, params)
    _check_most(most)
    if not members:
        raise UsageError("members", expected="at least one", found="none")
    stacked = counted(table, params, "members")
    with torch.no_grad(), one_thread(_is_small(stacked, members)):
        moved, mean = _joined(table, *_merge(table, stacked, members, seed, most)), {}
        for name, tensor in params.items():
            placed = permute(table, {name: tensor}, moved.permutations)[name]
            mean[name] = _sum(placed).div(members).to(wider(placed.dtype)) if tensor.is_floating_point() else placed[0]
    return moved, mean


def _merge(
    table: Table, params: Mapping[str, Tensor], members: int, seed: int, most: int
) -> tuple[list[Matched], list[float]]:
    """Match each member to the mean of the others, until nothing changes; return what was found, and objectives."""
    wide, generator = wider(*(tensor.dtype for tensor in params.values())), np.random.default_rng(seed)
    total = {name: torch.zeros_like(tensor[0], dtype=torch.float64) for name, tensor in params.items()}
    as_it_is = {name: torch.arange(group.size) for name, group in table.groups.items()}
    found: dict[int, Matched] = {}
    seen, changes, passes, ended = [-1] * members, 0, 0, False
    while not ended and passes < most:
        passes, before = passes + 1, changes
        for i in generator.permutation(members).tolist():
            if seen[i] == changes:
                continue
            own = {name: tensor[i].to(wide) for name, tensor in params.items()}
            last = found.get(i, Matched(as_it_is, 0, 0, True))
            placed = permute(table, own, last.permutations)
            if i in found:
                _add(total, placed, -1)
            others, now = len(found) - (i in found), last
            if others:
                matcher = Matcher(table, {name: (t / others).to(wide) for name, t in total.items()}, "the mean")
                now = matcher.match(own, last.permutations, seed, _SWEEPS, f"the member at position {i}")
            moved = any(not torch.equal(p, now.permutations[name]) for name, p in last.permutations.items())
            _add(total, permute(table, own, now.permutations) if moved else placed, 1)
            changes += moved or i not in found
            seen[i] = changes
            found[i] = replace(now, sweeps=last.sweeps + now.sweeps, visits=last.visits + now.visits) if others else now
        ended = changes == before
    objectives = []
    for i in range(members):
        own = permute(table, {name: tensor[i].to(wide) for name, tensor in params.items()}, found[i].permutations)
        objectives.append(sum(dot(total[name] - own[name], own[name]) for name in own) / max(1, members - 1))
    return [replace(found[i], converged=ended and found[i].converged) for i in range(members)], objectives


def _add(total: Mapping[str, Tensor], params: Mapping[str, Tensor], sign: int) -> None:
    for name, tensor in params.items():
        total[name].add_(tensor, alpha=sign)


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum over members in float64, without a copy of all of them in it."""
    total = torch.zeros_like(tensor[0], dtype=torch.float64)
    for member in tensor:
        total += member
    return total


def _check_most(most: int) -> None:
    if most < 1:
        raise UsageError("most", expected="at least one sweep", found=repr(most))


def _is_small(params: Mapping[str, Tensor], members: int = 1) -> bool:
    return sum(tensor.numel() for tensor in params.values()) < _SMALL * members


def _joined(table: Table, found: Sequence[Matched], objectives: Sequence[float]) -> Matching:
    return Matching(
        permutations={
            name: torch.stack([f.permutations[name] for f in found])
            if found
            else torch.empty(0, group.size, dtype=torch.int64)
            for name, group in table.groups.items()
        },
        objective=torch.tensor(objectives, dtype=torch.float64),
        sweeps=torch.tensor([f.sweeps for f in found], dtype=torch.int64),
        visits=torch.tensor([f.visits for f in found], dtype=torch.int64),
        converged=torch.tensor([f.converged for f in found], dtype=torch.bool),
    )
