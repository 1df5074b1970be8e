"""Weight matching: find the symmetry of a network that brings its weights closest to another network's weights.

The methods are weight matching and the merging of many models by Ainsworth et al. 2023 (arXiv 2209.04836), applied to a
symmetry table. Networks with attention have matrices beside permutations, see `attention_matching`.

This is one file, because matching to a reference and to a mean give one result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.device import one_thread
from checkpoints_zoo.symmetry.applying import check_element, check_unstacked, count_stacked_members, permute
from checkpoints_zoo.symmetry.canonical import attention_matching
from checkpoints_zoo.symmetry.canonical.head_balancing import is_stream
from checkpoints_zoo.symmetry.canonical.matching import Matcher, MemberMatch, compute_dtype, l2_norm, matched_tensors
from checkpoints_zoo.symmetry.canonical.products import inner_product
from checkpoints_zoo.symmetry.composing import compose, inverse
from checkpoints_zoo.symmetry.elements import Element
from checkpoints_zoo.symmetry.table import Table, keep_parts

_FEW_WEIGHTS = 1 << 20  # Number of weights of all members below which one thread is faster.
_MOST_SWEEPS = 100  # Largest number of sweeps when a member is matched to a mean.


USING = ("units", "heads", "matrices", "streams")


@dataclass(frozen=True)
class Matching:
    """Symmetries that match members to a reference.

    Args:
        element: the symmetry of each member, as `symmetry.apply` takes it: permutations alone, except for networks with
            attention.
        objective: (member), the inner product of the weights of the reference and the permuted member, in float64, over
            all permuted tensors without running statistics and integers; with attention over all weights in the normal
            form of `attention_matching`.
        sweeps: (member), number of sweeps over the groups.
        visits: (member), number of visits; each visit optimises the permutation of one group. A group is visited again
            only after a group in the same tensors has been permuted.
        converged: (member), whether at the end no permutation of one group could raise the objective.
    """

    element: Element
    objective: Tensor
    sweeps: Tensor
    visits: Tensor
    converged: Tensor

    @property
    def permutations(self) -> Mapping[str, Tensor]:
        """Group -> int64 (member, unit), as `symmetry.permute` takes them: unit u becomes the former unit
        permutation[u]."""
        return self.element.permutations

    def __len__(self) -> int:
        return len(self.objective)


def match_weights(
    table: Table,
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    *,
    start: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    most: int = 100,
) -> Matching:
    """Match members to a reference by symmetries that raise the inner product of the weights; return the symmetries.

    Each sweep visits the groups in random order. A visit finds the best permutation of one group by linear assignment,
    while all other permutations stay; if the group moves blocks of other groups, their units get the best order as
    well. A visit changes a permutation only if the change raises the objective, so the objective never falls. The
    result of a member depends on the seed, the member and the reference, not on other members.

    The members of networks with attention get the shifts, scales and balance of the reference, and rotations inside
    heads and of streams, see `attention_matching`: a member that a symmetry has made of the reference becomes the
    reference.

    Args:
        table: the network's symmetry table, see `restrict`.
        params: parameters, name -> (member, *shape), including all permuted tensors. Running statistics and integers
            are not compared, and may be missing. Computations are in float32, or in float64 if a tensor is float64.
        reference: parameters of the reference, name -> (*shape).
        start: group -> permutation to start from, (unit) or (member, unit). All other groups start unpermuted. Not for
            networks with attention.
        seed: seed of the random order in which groups are visited.
        most: largest number of sweeps over the groups.

    Raises:
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.
        UsageError: the tensors have no member axis, the reference has one, or a permutation to start from is invalid.
        DamagedError: a weight is not finite.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> table, weights = symmetries(net, torch.zeros(1, 1)), net.state_dict()
    >>> swapped = permute(table, weights, {"0": torch.tensor([1, 0])})
    >>> stacked = {name: tensor[None] for name, tensor in swapped.items()}
    >>> match_weights(table, stacked, weights).permutations["0"].tolist()
    [[1, 0]]
    """
    member_count = count_stacked_members(table, params)
    check_unstacked(table, reference, "reference")
    start_permutations = dict(start or {})
    check_element(table, Element(start_permutations), member_count)
    _check_sweep_limit(most)
    if table.is_continuous:
        if start:
            raise UsageError("start", expected=f"none: {table.network} has attention", found="permutations")
        return _match_with_matrices(table, params, reference, most)
    stacked, reference_tensors = (
        matched_tensors(table, params, "members"),
        matched_tensors(table, reference, "reference"),
    )
    wide_dtype = compute_dtype(
        *(tensor.dtype for network in (stacked, reference_tensors) for tensor in network.values())
    )
    with torch.no_grad(), one_thread(_has_few_weights(reference_tensors)):
        matcher = Matcher(table, {name: tensor.to(wide_dtype) for name, tensor in reference_tensors.items()})
        matches, objectives = [], []
        for i in range(member_count):
            # The tensor is copied, because the rounding of a product may depend on the address of a tensor.
            weights = {
                name: tensor[i].to(reference_tensors[name].device, wide_dtype, copy=True)
                for name, tensor in stacked.items()
            }
            start_of_member = {name: p if p.ndim == 1 else p[i] for name, p in start_permutations.items()}
            matches.append(matcher.match(weights, start_of_member, seed, most, f"the member at position {i}"))
            objectives.append(matcher.objective(weights, matches[-1].permutations))
    return _stack_matches(table, matches, objectives)


def _match_with_matrices(
    table: Table, params: Mapping[str, Tensor], reference: Mapping[str, Tensor], most: int
) -> Matching:
    stacked, single = matched_tensors(table, params, "members"), matched_tensors(table, reference, "reference")
    for tensors, name_in_errors in ((stacked, "the members"), (single, "the reference")):
        l2_norm(tensors, name_in_errors)
    with torch.no_grad():
        members, element = attention_matching.normal_form(table, stacked)
        normal, of_reference = attention_matching.normal_form(
            table, {name: tensor[None] for name, tensor in single.items()}
        )
        found = attention_matching.match(table, members, {name: tensor[0] for name, tensor in normal.items()}, most)
        element = compose(table, compose(table, element, found.element), inverse(table, of_reference.select(0)))
    return Matching(element, found.objective, found.sweeps, found.visits, found.converged)


def restrict(table: Table, using: str | None) -> Table:
    """Return a table with some of the symmetries of a network with attention.

    Args:
        table: the network's symmetry table.
        using: "units": permutations of hidden units; "heads": of heads as well; "matrices": and matrices inside heads,
            shifts and scales; "streams" or None: and rotations and permutations of residual streams, which is all.

    Raises:
        UsageError: the value is unknown, or the network has no attention.
    """
    if using is None:
        return table
    if using not in USING or not table.is_continuous:
        found = repr(using)[:80] if using not in USING else f"{using!r}, but {table.network} has no attention"
        raise UsageError("using", expected=f"{', '.join(map(repr, USING))}, or None", found=found)
    level = USING.index(using)
    heads = {name for one in attention_matching.attentions(table) for name in (one.outer, one.inner)}
    return keep_parts(
        table,
        groups={n for n, g in table.groups.items() if (level > 0 or n not in heads) and (level > 2 or not g.stream)},
        scales=table.scales if level > 1 else (),
        signs=table.signs if level > 1 else (),
        matrices={n for n, m in table.matrices.items() if level > 2 or (level == 2 and not is_stream(m))},
        shifts=table.shifts if level > 1 else (),
    )


def match_mean(
    table: Table, params: Mapping[str, Tensor], *, seed: int = 0, most: int = 100
) -> tuple[Matching, dict[str, Tensor]]:
    """Match each member to the mean of the other members; return the symmetries, and the mean of the matched members.

    The members and the mean of networks with attention are in the normal form of `attention_matching`.

    Each pass visits the members in random order. In the first pass, the first member stays, and each later member is
    matched to the mean of the members before it. In each later pass, each member is matched to the mean of all other
    members, until nothing changes. The sum of the inner products of all pairs of members never falls. The result
    depends on the seed and on the order of the members.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), as in `match_weights`. Tensors that are not compared in the
            matching are averaged as well.
        seed: seed of the random orders in which members and groups are visited.
        most: largest number of passes over the members.

    Returns:
        The matching, with the sweeps and visits of all passes, and with the mean of the other members as reference of
        the objective; and the mean, name -> (*shape) in float32 or wider. Integer tensors are copied from the first
        member.

    Raises:
        LayoutError, DamagedError: for the same reasons as in `match_weights`.
        UsageError: for the same reasons as in `match_weights`, and if there are no members.
    """
    member_count = count_stacked_members(table, params)
    _check_sweep_limit(most)
    if not member_count:
        raise UsageError("members", expected="at least one", found="none")
    if table.is_continuous:
        return _match_mean_with_matrices(table, params, seed, most)
    stacked = matched_tensors(table, params, "members")
    with torch.no_grad(), one_thread(_has_few_weights(stacked, member_count)):
        matching, mean = _stack_matches(table, *_match_to_means(table, stacked, member_count, seed, most)), {}
        for name, tensor in params.items():
            permuted = permute(table, {name: tensor}, matching.permutations)[name]
            mean[name] = (
                _sum_over_members(permuted).div(member_count).to(compute_dtype(permuted.dtype))
                if tensor.is_floating_point()
                else permuted[0]
            )
    return matching, mean


def _match_mean_with_matrices(
    table: Table, params: Mapping[str, Tensor], seed: int, most: int
) -> tuple[Matching, dict[str, Tensor]]:
    stacked = matched_tensors(table, params, "members")
    l2_norm(stacked, "the members")
    with torch.no_grad():
        matches = attention_matching.match_to_means(table, stacked, most, np.random.default_rng(seed))
        mean = {name: tensor[0] for name, tensor in params.items() if name not in stacked}
        mean |= {name: t.mean(0).to(compute_dtype(params[name].dtype)) for name, t in matches.tensors.items()}
    return Matching(*matches[1:]), mean


def _match_to_means(
    table: Table, params: Mapping[str, Tensor], member_count: int, seed: int, most_passes: int
) -> tuple[list[MemberMatch], list[float]]:
    """Match each member to the mean of the other members, until nothing changes; return the matches and the
    objectives."""
    wide_dtype, generator = compute_dtype(*(tensor.dtype for tensor in params.values())), np.random.default_rng(seed)
    param_sums = {name: torch.zeros_like(tensor[0], dtype=torch.float64) for name, tensor in params.items()}
    identity_permutations = {name: torch.arange(group.size) for name, group in table.groups.items()}
    matches: dict[int, MemberMatch] = {}
    change_count_at_match, change_count, pass_count, has_ended = [-1] * member_count, 0, 0, False
    while not has_ended and pass_count < most_passes:
        pass_count, change_count_before = pass_count + 1, change_count
        for i in generator.permutation(member_count).tolist():
            if change_count_at_match[i] == change_count:
                continue
            weights = {name: tensor[i].to(wide_dtype) for name, tensor in params.items()}
            last_match = matches.get(i, MemberMatch(identity_permutations, 0, 0, True))
            permuted = permute(table, weights, last_match.permutations)
            if i in matches:
                _add_params(param_sums, permuted, -1)
            other_count, new_match = len(matches) - (i in matches), last_match
            if other_count:
                matcher = Matcher(
                    table, {name: (t / other_count).to(wide_dtype) for name, t in param_sums.items()}, "the mean"
                )
                new_match = matcher.match(
                    weights, last_match.permutations, seed, _MOST_SWEEPS, f"the member at position {i}"
                )
            has_moved = any(
                not torch.equal(p, new_match.permutations[name]) for name, p in last_match.permutations.items()
            )
            _add_params(param_sums, permute(table, weights, new_match.permutations) if has_moved else permuted, 1)
            change_count += has_moved or i not in matches
            change_count_at_match[i] = change_count
            matches[i] = (
                replace(
                    new_match, sweeps=last_match.sweeps + new_match.sweeps, visits=last_match.visits + new_match.visits
                )
                if other_count
                else new_match
            )
        has_ended = change_count == change_count_before
    objectives = []
    for i in range(member_count):
        weights = permute(
            table, {name: tensor[i].to(wide_dtype) for name, tensor in params.items()}, matches[i].permutations
        )
        objectives.append(
            sum(inner_product(param_sums[name] - weights[name], weights[name]) for name in weights)
            / max(1, member_count - 1)
        )
    return [replace(matches[i], converged=has_ended and matches[i].converged) for i in range(member_count)], objectives


def _add_params(param_sums: Mapping[str, Tensor], params: Mapping[str, Tensor], sign: int) -> None:
    for name, tensor in params.items():
        param_sums[name].add_(tensor, alpha=sign)


def _sum_over_members(tensor: Tensor) -> Tensor:
    """Return the sum over members in float64, without a float64 copy of all members."""
    sum_of_members = torch.zeros_like(tensor[0], dtype=torch.float64)
    for member in tensor:
        sum_of_members += member
    return sum_of_members


def _check_sweep_limit(most: int) -> None:
    if most < 1:
        raise UsageError("most", expected="at least one sweep", found=repr(most))


def _has_few_weights(params: Mapping[str, Tensor], member_count: int = 1) -> bool:
    return sum(tensor.numel() for tensor in params.values()) < _FEW_WEIGHTS * member_count


def _stack_matches(table: Table, matches: Sequence[MemberMatch], objectives: Sequence[float]) -> Matching:
    return Matching(
        element=Element(
            {
                name: torch.stack([match.permutations[name] for match in matches])
                if matches
                else torch.empty(0, group.size, dtype=torch.int64)
                for name, group in table.groups.items()
            }
        ),
        objective=torch.tensor(objectives, dtype=torch.float64),
        sweeps=torch.tensor([match.sweeps for match in matches], dtype=torch.int64),
        visits=torch.tensor([match.visits for match in matches], dtype=torch.int64),
        converged=torch.tensor([match.converged for match in matches], dtype=torch.bool),
    )
