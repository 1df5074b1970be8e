"""Match networks with attention to a reference: heads and units by assignment, matrices by Procrustes.

The members and the reference are brought to a normal form first: without shifts, with gains of 1 and balanced heads.
What is left of the matrices are rotations. A visit finds the best ones of one attention, or of a stream, while all
others stay, with the best places of its heads: the gain of a pair of heads is the sum of the singular values of their
inner products (Schönemann 1966). Visits of all members run at once.

Axes: (member, new head, old head, matrices of a head, unit, unit).

This is one file, because most of it is the visits of one search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import apply
from checkpoints_zoo.symmetry.canonical.head_balancing import (
    as_matrices,
    balance_matrices,
    is_stream,
    keeps_other_axes,
    rows_of_turns,
)
from checkpoints_zoo.symmetry.canonical.matching import solve_assignment
from checkpoints_zoo.symmetry.canonical.scaling import unit_norm
from checkpoints_zoo.symmetry.canonical.shifts import remove_shifts
from checkpoints_zoo.symmetry.canonical.signs import fix_signs
from checkpoints_zoo.symmetry.composing import compose
from checkpoints_zoo.symmetry.elements import Element, identity_element
from checkpoints_zoo.symmetry.matrices import centred_basis
from checkpoints_zoo.symmetry.table import Axes, Matrix, Move, Table

_LEAST_GAIN = 1e-15  # Smallest gain of a visit that counts, as a share of the product of both networks' norms.
_LEAST_SWEEP = 1e-12  # Smallest gain of a sweep after which another one follows, as the same share.
_SWEEPS_OF_A_PASS = 4  # Sweeps for a member that is matched again, since the mean moves as well.
_LEAST_PASS = 1e-6  # Smallest gain of a member in a pass over all members that counts, as a share of its objective.
_MOST_ROUNDS = 4  # Rounds of assignment and Procrustes for heads that share keys and values.

Params = Mapping[str, Tensor]


class Matches(NamedTuple):
    """Members that are matched to a reference.

    Args:
        tensors: the matched members, name -> (member, *shape).
        element: the symmetry that was applied to each member.
        objective: (member), the inner product with the reference.
        sweeps, visits: (member), how many there were.
        converged: (member), whether the last sweep raised the objective no more.
    """

    tensors: dict[str, Tensor]
    element: Element
    objective: Tensor
    sweeps: Tensor
    visits: Tensor
    converged: Tensor


def normal_form(table: Table, params: Params) -> tuple[dict[str, Tensor], Element]:
    """Remove shifts, scales and the signs of gains, and balance heads; return the tensors in float64, and the element.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape).
    """
    tensors = {name: tensor.double() for name, tensor in params.items()}
    tensors, shifts = remove_shifts(table, tensors)
    with_rows = {name: scale for name, scale in table.scales.items() if scale.writers}
    tensors, scales, _ = unit_norm(replace(table, scales=with_rows), tensors)
    tensors, signs = fix_signs(table, tensors)
    tensors, matrices, _ = balance_matrices(table, tensors)
    return tensors, Element(scales=scales, signs=signs, matrices=matrices, shifts=shifts)


def match(table: Table, params: Params, reference: Params, most: int, is_matched: bool = False) -> Matches:
    """Match members in normal form to a reference in normal form; return the matches.

    Args:
        table: the network's symmetry table.
        params: parameters of the members, name -> float64 (member, *shape).
        reference: parameters of the reference, name -> float64 (*shape).
        most: largest number of sweeps.
        is_matched: whether the members are nearly matched. If not, their streams are first turned, and sorted, by the
            weights that no other symmetry changes.
    """
    return _Search(table, params, reference).run(most, is_matched)


def match_to_means(table: Table, params: Params, most: int, generator: np.random.Generator) -> Matches:
    """Match each member to the mean of the others, in normal form, until nothing changes; return the matches.

    The first pass matches each member to the mean of the members before it. Then all members are matched to their mean
    at once, which takes little longer than one member. That mean has a part of each member itself, so the last passes
    match one member after the other to the mean of the others.

    Args:
        table: the network's symmetry table.
        params: parameters of the members, name -> (member, *shape).
        most: largest number of passes over the members: of those one after the other, the first one included, and of
            those at once. With 1, no pass shows that nothing changes, so no member has converged.
        generator: source of the random order of the members.
    """
    tensors, element = normal_form(table, params)
    member_count = len(next(iter(tensors.values())))
    device = next(iter(tensors.values())).device
    element = compose(table, element, identity_element(table, member_count, device))
    zeros = torch.zeros(member_count, dtype=torch.int64, device=device)
    matches = _split(Matches(tensors, element, zeros.double(), zeros, zeros, zeros == 0))
    first, *rest = generator.permutation(member_count).tolist()
    total = {name: tensor[0] for name, tensor in matches[first].tensors.items()}
    for count, i in enumerate(rest, 1):
        matches[i], _ = _improve(table, matches[i], {n: t / count for n, t in total.items()}, most, is_matched=False)
        total = {name: tensor + matches[i].tensors[name][0] for name, tensor in total.items()}
    together = _join(matches)
    for _ in range(most):
        mean = {name: tensor.mean(0) for name, tensor in together.tensors.items()}
        together, has_improved = _improve(table, together, mean, _SWEEPS_OF_A_PASS)
        if not has_improved:
            break
    matches, has_improved = _split(together), True
    total = {name: tensor.sum(0) for name, tensor in together.tensors.items()}
    for _ in range(most - 1):
        has_improved = False
        for i in generator.permutation(member_count).tolist() if member_count > 1 else []:
            others = {name: tensor - matches[i].tensors[name][0] for name, tensor in total.items()}
            mean = {name: tensor / (member_count - 1) for name, tensor in others.items()}
            matches[i], is_better = _improve(table, matches[i], mean, min(most, _SWEEPS_OF_A_PASS))
            has_improved |= is_better
            total = {name: tensor + matches[i].tensors[name][0] for name, tensor in others.items()}
        if not has_improved:
            break
    return _join(matches)._replace(converged=torch.full((member_count,), not has_improved, device=device))


def _improve(table: Table, matches: Matches, mean: Params, most: int, is_matched: bool = True) -> tuple[Matches, bool]:
    """Match members anew; return the matches, and whether the objective of a member rose by a share that counts."""
    before = sum((_inner(mean[n][None], t) for n, t in matches.tensors.items()), torch.zeros(()))
    found = match(table, matches.tensors, mean, most, is_matched)
    anew = found._replace(
        element=compose(table, matches.element, found.element), sweeps=matches.sweeps + found.sweeps,
        visits=matches.visits + found.visits,
    )  # fmt: skip
    return anew, bool((found.objective - before > _LEAST_PASS * before.abs()).any())


def _split(matches: Matches) -> list[Matches]:
    """Return the matches of each member apart."""
    tensors, element, *numbers = matches
    return [
        Matches(
            {n: t[i : i + 1] for n, t in tensors.items()},
            element.select(slice(i, i + 1)),
            *(x[i : i + 1] for x in numbers),
        )
        for i in range(len(matches.sweeps))
    ]


def _join(matches: Sequence[Matches]) -> Matches:
    """Return the matches of several groups of members as one."""
    all_tensors, elements, *numbers = zip(*matches, strict=True)
    tensors = {name: torch.cat([one[name] for one in all_tensors]) for name in all_tensors[0]}
    return Matches(tensors, Element.concatenate(elements), *map(torch.cat, numbers))


@dataclass(frozen=True)
class _Attention:
    """Heads that move together, with the matrices inside them.

    Args:
        outer: group of the heads, or of keys and values that several heads share; None: they stay in place.
        inner: group of the heads that share keys and values; None: there are none.
        families: groups of matrices.
    """

    outer: str | None
    inner: str | None
    families: tuple[Matrix, ...]


class _Search:
    """The present state of matching some members to a reference."""

    def __init__(self, table: Table, params: Params, reference: Params) -> None:
        self.table = table
        self.reference = {name: tensor[None] for name, tensor in reference.items()}
        self.members = dict(params)
        self.member_count, self.device = len(next(iter(params.values()))), next(iter(params.values())).device
        self.is_moving = torch.ones(self.member_count, dtype=torch.bool, device=self.device)
        self.visits = torch.zeros(self.member_count, dtype=torch.int64, device=self.device)
        self.identity = identity_element(table, self.member_count, self.device)
        self.element = Element(self.identity.permutations, matrices=self.identity.matrices)
        norms = (_norms(self.reference)[0] * _norms(self.members)).clamp(min=1e-300)
        self.least_gain, self.least_sweep = _LEAST_GAIN * norms, _LEAST_SWEEP * norms
        self.streams = [matrix for matrix in table.matrices.values() if is_stream(matrix)]
        self.attentions = attentions(table)
        in_heads = {name for one in self.attentions for name in (one.outer, one.inner)}
        movers = {group.mover for group in table.groups.values()}
        self.units = [name for name in table.groups if name not in in_heads | movers]

    def run(self, most: int, is_matched: bool) -> Matches:
        """Visit streams, attentions and groups of units until nothing changes; return the matches."""
        if not is_matched:
            for matrix in self.streams:
                self._take(self._rotation(matrix, fixed_only=True), always=True)
            for group in self.units:
                if self.table.groups[group].stream:
                    self._take(self._order(group, fixed_only=True), always=True)
        sweep_counts = torch.zeros(self.member_count, dtype=torch.int64, device=self.device)
        for _ in range(most):
            gains = self._zeros(self.member_count)
            for one in self.attentions:
                gains += self._take(self._heads(one))
            for group in self.units:
                gains += self._take(self._order(group))
            for matrix in self.streams:
                gains += self._take(self._rotation(matrix))
            sweep_counts += self.is_moving
            self.is_moving &= gains > self.least_sweep
            if not bool(self.is_moving.any()):
                break
        objective = sum(
            (_inner(self.reference[name], self.members[name]) for name in self.members), self._zeros(self.member_count)
        )
        return Matches(self.members, self.element, objective, sweep_counts, self.visits, ~self.is_moving)

    def _take(self, proposal: Element, always: bool = False) -> Tensor:
        """Apply a proposal to the members whose objective it raises; return the gains (member)."""
        moved = apply(self.table, self.members, proposal)
        changed = [name for name in self.members if moved[name] is not self.members[name]]
        gains = sum(
            (_inner(self.reference[n], moved[n] - self.members[n]) for n in changed), torch.zeros_like(self.least_gain)
        )
        is_better = self.is_moving if always else self.is_moving & (gains > self.least_gain)
        self.visits += self.is_moving
        if not bool(is_better.any()):
            return torch.zeros_like(gains)
        for name in changed:
            self.members[name] = torch.where(_as_rank(is_better, moved[name].ndim), moved[name], self.members[name])
        self.element = compose(self.table, self.element, self._only_for(is_better, proposal))
        return torch.where(is_better, gains, 0.0)

    def _only_for(self, chosen: Tensor, proposal: Element) -> Element:
        """Return a proposal that is the identity for the members that are not chosen, (member)."""
        pairs = zip(proposal.parts(), self.identity.parts(), strict=True)
        return Element(
            *({n: torch.where(_as_rank(chosen, v.ndim), v, same[n]) for n, v in part.items()} for part, same in pairs)
        )

    # Proposals: the best symmetry of one kind.

    def _rotation(self, matrix: Matrix, fixed_only: bool = False) -> Element:
        """Return the best rotation of a stream.

        Args:
            matrix: the rotations.
            fixed_only: whether only weights count that nothing else moves.
        """
        products = self._zeros(self.member_count, 1, matrix.size, matrix.size)
        for (axes, one, x), (_, _, y) in zip(
            self._rows(matrix, self.reference), self._rows(matrix, self.members), strict=True
        ):
            if not fixed_only or keeps_other_axes(axes, one):
                products = products + y @ x.mT
        return Element(matrices={matrix.name: best_rotations(matrix, products)[1]})

    def _rows(self, matrix: Matrix, params: Params) -> list[tuple]:  # type: ignore[type-arg]
        return list(rows_of_turns(self.table, params, matrix.name))

    def _order(self, group: str, fixed_only: bool = False) -> Element:
        """Return the best order, and signs, of units that permutations move; for `fixed_only` see `_rotation`."""
        one = self.table.groups[group]
        sign = next((s for s in self.table.signs.values() if s.group == group and s.size == one.size), None)
        products = self._zeros(2, self.member_count, one.size, one.size)
        for name, axes in self.table.tensors.items():
            for move in axes.moves:
                if move.group == group and name in self.members and not (fixed_only and _moves_elsewhere(axes, move)):
                    same = [p for p in axes.signs if sign is not None and (p.scale, p.axis) == (sign.name, move.axis)]
                    is_odd = sum(p.offset <= move.offset < p.offset + p.length for p in same) % 2
                    products[is_odd] += self._products(name, move, one.size)
        gains = products[0] + products[1].abs()
        width = one.size // one.blocks
        order = torch.cat([assign(gains[:, b : b + width, b : b + width]) + b for b in range(0, one.size, width)], -1)
        if sign is None:
            return Element({group: order})
        chosen = products[1].gather(2, order[..., None])[..., 0]
        signs = torch.ones_like(chosen).scatter(1, order, torch.where(chosen < 0, -1.0, 1.0).double())
        return Element({group: order}, signs={sign.name: signs})

    def _products(self, name: str, move: Move, count: int) -> Tensor:
        """Return the inner products of the units of the reference and of the members, (member, unit, unit)."""
        x, y = (_units(tensors[name], move, count) for tensors in (self.reference, self.members))
        return torch.einsum("uc,mvc->muv", x[0], y)

    def _heads(self, one: _Attention) -> Element:
        """Return the best places of the heads of an attention, with the best matrices inside them."""
        table, count = self.table, 1 if one.outer is None else self.table.groups[one.outer].size
        inner = 1 if one.inner is None else table.groups[one.inner].size // count
        m = self.member_count
        # Inner products of what all heads of a place share, and of what each of them has.
        shared = {f.name: self._zeros(m, count, count, f.count // count, f.size, f.size) for f in one.families}
        single = {f.name: self._zeros(m, count, count, inner, inner, f.count // count, f.size, f.size)
                  for f in one.families if inner > 1}  # fmt: skip
        for f in one.families:
            for (_, turn, x), (_, _, y) in zip(self._rows(f, self.reference), self._rows(f, self.members), strict=True):
                blocks_of_copies = set(Counter(turn.copies).values())
                blocks = blocks_of_copies.pop() if len(blocks_of_copies) == 1 else 1
                xs, ys = (rows.reshape(len(rows), count, -1, f.size, blocks, rows.shape[-1] // blocks)
                          for rows in (x, y))  # fmt: skip
                if inner > 1 and blocks == inner:
                    single[f.name] += torch.einsum("mvekjc,uelic->muvijekl", ys, xs[0])
                else:
                    shared[f.name] += torch.einsum("mvekbc,uelbc->muvekl", ys, xs[0])
        plain, plain_single = self._plain_products(one, count, inner)
        chosen = {f.name: best_rotations(f, shared[f.name]) for f in one.families}
        orders = self._zeros(m, count, count, inner).long()
        if inner > 1:
            for _ in range(_MOST_ROUNDS):
                gains = plain_single + sum(
                    (torch.einsum("muvekl,muvijekl->muvij", chosen[f.name][1], single[f.name]) for f in one.families),
                    torch.zeros_like(plain_single),
                )
                last, orders = orders, assign(gains)
                for f in one.families:
                    index = orders[..., None, None, None, None].expand(*orders.shape, 1, *single[f.name].shape[5:])
                    picked = single[f.name].gather(4, index)[:, :, :, :, 0].sum(3)
                    chosen[f.name] = best_rotations(f, shared[f.name] + picked)
                if torch.equal(last, orders):
                    break
            plain = plain + plain_single.gather(4, orders[..., None])[..., 0].sum(-1)
        place_gains = plain + sum((chosen[f.name][0].sum(-1) for f in one.families), torch.zeros_like(plain))
        places = assign(place_gains)  # (member, new head)
        permutations = {} if one.outer is None else {one.outer: places}
        rows, new = torch.arange(m, device=self.device)[:, None], torch.arange(count, device=self.device)
        if one.inner is not None:
            inside = orders[rows, new, places]
            permutations[one.inner] = (places[..., None] * inner + inside).flatten(1)
        matrices = {}
        for f in one.families:
            best = chosen[f.name][1][rows, new, places]  # (member, new head, …), in the places of the old heads below
            in_place = torch.empty_like(best)
            in_place[rows, places] = best
            matrices[f.name] = in_place.flatten(1, 2)
        return Element(permutations, matrices=matrices)

    def _plain_products(self, one: _Attention, count: int, inner: int) -> tuple[Tensor, Tensor]:
        """Return the inner products of what heads have beside their matrices: (member, head, head), and (member, head,
        head, inner head, inner head)."""
        plain = self._zeros(self.member_count, count, count)
        single = self._zeros(self.member_count, count, count, inner, inner)
        families = {f.name for f in one.families}
        for name, axes in self.table.tensors.items():
            for move in axes.moves:
                if (
                    name not in self.members
                    or move.group not in (one.outer, one.inner)
                    or _is_turned(axes, move, families)
                ):
                    continue
                if move.group == one.outer:
                    plain += self._products(name, move, count)
                else:
                    products = self._products(name, move, count * inner)
                    single += products.reshape(-1, count, inner, count, inner).transpose(2, 3)
        return plain, single

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


def best_rotations(matrix: Matrix, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest inner products (…) that rotations of a group reach, and these rotations (…, unit, unit).

    Args:
        matrix: the group. Rotations of the kind "invertible" are all orthogonal matrices.
        products: inner products of the units of a member and of the reference, (…, unit, unit).
    """
    if matrix.kind in ("complex", "turn"):
        number = torch.complex(products[..., 0, 0] + products[..., 1, 1], products[..., 0, 1] - products[..., 1, 0])
        length = number.abs()
        return length, as_matrices(torch.where(length > 0, number / length.clamp(min=1e-300), 1.0))
    if matrix.kind != "centred orthogonal":
        u, values, v = torch.linalg.svd(products)
        return values.sum(-1), u @ v
    basis = centred_basis(matrix.size).to(products.device)
    u, values, v = torch.linalg.svd(basis.T @ products @ basis)
    return values.sum(-1), basis @ u @ v @ basis.T + 1 / matrix.size


def assign(gains: Tensor) -> Tensor:
    """Return the permutations (…, new) that maximise the sums of gains (…, new, old)."""
    flat = gains.reshape(-1, *gains.shape[-2:]).cpu().numpy()
    orders = [torch.from_numpy(solve_assignment(one)) for one in flat]
    return torch.stack(orders).reshape(gains.shape[:-1]).to(gains.device)


def attentions(table: Table) -> list[_Attention]:
    """Collect the heads that move together."""
    families: dict[tuple[str | None, str | None], list[Matrix]] = {}
    for matrix in table.matrices.values():
        if is_stream(matrix):
            continue
        inner = {
            move.group
            for axes in table.tensors.values()
            for move in axes.moves
            if move.group != matrix.group and _is_turned(axes, move, {matrix.name})
        }
        key = matrix.group, min(inner, default=None)
        families.setdefault(key if any(key) else (None, matrix.name), []).append(matrix)
    return [
        _Attention(outer, inner if inner in table.groups else None, tuple(matrices))
        for (outer, inner), matrices in families.items()
    ]


def _moves_elsewhere(axes: Axes, move: Move) -> bool:
    """Return whether symmetries change other axes of a parameter than the one that a permutation moves."""
    strides = torch.empty(axes.shape, device="meta").stride()
    steps = {strides[other.axis] for other in axes.moves} | {one.part.stride[one.axis] for one in axes.turns}
    return steps != {strides[move.axis]}


def _is_turned(axes: Axes, move: Move, families: set[str]) -> bool:
    """Return whether matrices map the entries of an axis that a permutation moves."""
    strides = torch.empty(axes.shape, device="meta").stride()
    stride = strides[move.axis]
    for one in axes.turns:
        if one.matrix in families and one.part.stride[one.axis] == stride:
            first = one.part.offset // stride % axes.shape[move.axis]
            if any(first + entry == move.offset for block in one.entries for entry in block):
                return True
    return False


def _units(tensor: Tensor, move: Move, count: int) -> Tensor:
    """Return the entries (member, unit, entry) of the units that a permutation moves along an axis."""
    part = tensor.narrow(move.axis + 1, move.offset, count * move.span).movedim(move.axis + 1, 1)
    return part.reshape(len(tensor), count, -1)


def _as_rank(values: Tensor, rank: int) -> Tensor:
    return values.reshape(-1, *[1] * (rank - 1))


def _inner(first: Tensor, second: Tensor) -> Tensor:
    """Return the inner product of each member's tensors, (member)."""
    return (first * second).reshape(len(second), -1).sum(-1)


def _norms(params: Params) -> Tensor:
    return torch.stack([tensor.flatten(1).square().sum(-1) for tensor in params.values()]).sum(0).sqrt()
