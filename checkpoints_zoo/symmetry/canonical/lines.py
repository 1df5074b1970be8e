"""A unit's lines: the entries of a tensor that belong to it, in an order that no permutation changes.

Entries lie in the order of the units on the tensor's other axes, once these are sorted. Where they are not, each entry
has a label that says what is known of its place, and entries of one label are in no order yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import places_on
from checkpoints_zoo.symmetry.table import Axes, Group, Move, Table

_CHUNK = 1 << 20  # entries compared at once


@dataclass(frozen=True)
class Placement:
    """Where a group's units, or those they hold, lie in a tensor.

    Args:
        tensor: its name.
        move: of the group itself, or of one whose blocks it moves.
        parts: how many units of the move's group a unit holds; 1 of the group itself.
    """

    tensor: str
    move: Move
    parts: int


@dataclass
class Members:
    """Stacked members, and what is known of their order.

    Args:
        table: of the network.
        params: name -> (member, *shape).
        free: groups that are sorted; all others stay.
        order: group -> (member, unit), permutations of those sorted so far.
        inner: group -> (member, unit), permutations inside the blocks of groups whose blocks aren't sorted yet.
    """

    table: Table
    params: Mapping[str, Tensor]
    free: frozenset[str]
    order: dict[str, Tensor] = field(default_factory=dict)
    inner: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.params.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def one(self, member: int) -> Members:
        """Return one of them."""
        rows = slice(member, member + 1)
        params = {name: tensor[rows] for name, tensor in self.params.items()}
        return Members(self.table, params, self.free, {name: p[rows] for name, p in self.order.items()})

    def sorted(self, group: str) -> bool:
        """Say whether a group's units have their places."""
        return group not in self.free or group in self.order

    def place(self, turn: Sequence[str], name: str, inner: Tensor) -> None:
        """Note a group's order inside the blocks it lies in, and let the groups of the turn that it holds follow.

        Args:
            turn: groups sorted together; movers first.
            inner: (member, unit), a permutation that leaves the blocks in place.
        """
        self.inner[name] = inner
        for held in turn[turn.index(name) + 1 :]:
            self.inner[held] = carried(self.inner[held], inner)

    def close(self, turn: Sequence[str]) -> None:
        """Let the blocks that a turn's groups lie in follow their mover; all units then have their places."""
        blocks = self.order.get(self.table.groups[turn[0]].mover or "")
        for name in turn:
            inner = self.inner.pop(name)
            self.order[name] = inner if blocks is None else carried(inner, blocks)


def carried(inner: Tensor, blocks: Tensor) -> Tensor:
    """Return a permutation inside blocks (member, unit) with the blocks (member, block) in their order."""
    own = inner.reshape(*blocks.shape, inner.shape[1] // blocks.shape[1])
    return own.gather(1, blocks[..., None].expand_as(own)).flatten(1)


def by_block(permutation: Tensor, blocks: int) -> Tensor:
    """Return, for each block as numbered before, its units in their order, (member, block, unit)."""
    own = permutation.reshape(len(permutation), blocks, permutation.shape[1] // blocks)
    before = own[..., 0].div(own.shape[2], rounding_mode="floor")
    return own.gather(1, before.argsort(1)[..., None].expand_as(own))


def placements(table: Table, group: Group) -> list[Placement]:
    """List where a group's units lie, and those of the groups they hold; those of its first writer come first."""
    held = {group.name: group.size}
    for other in table.groups.values():
        if other.mover in held:
            held[other.name] = other.size
    found = [
        Placement(name, move, held[move.group] // group.size)
        for name, axes in table.tensors.items()
        for move in axes.moves
        # A whole block of a grouped kernel's inputs lies in rows that the unit holds as well.
        if move.group in held and not (move.within and held[move.group] // group.size >= axes.shape[1])
    ]
    first = group.writers[0] if group.writers else None
    return sorted(found, key=lambda placement: (placement.tensor, placement.move.axis) != first)


def bits(values: Tensor) -> Tensor:
    """Return whole numbers in the order of values; -0.0 comes right before 0.0."""
    if not values.is_floating_point():
        return values.short() if values.dtype in (torch.bool, torch.uint8) else values
    whole = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    return whole ^ ((whole >> (8 * values.itemsize - 1)) & torch.iinfo(whole.dtype).max)


class Lines:
    """The lines that a placement gives to units.

    Args:
        members: and their order as it is now.
        placement: of the units.
        behind: how many of the tensor's last axes were summed over.
    """

    def __init__(self, members: Members, placement: Placement, behind: int = 0) -> None:
        full = members.table.tensors[placement.tensor]
        self.axes = Axes(full.shape[: len(full.shape) - behind], full.role, full.shift, full.moves, full.powers)
        self.members, self.placement, self.move = members, placement, placement.move
        shape = list(self.axes.shape)
        shape[self.move.axis] = placement.parts * self.move.span
        if self.move.within:
            shape[0] //= self.move.within
        self.shape = tuple(shape)
        self._others = {i: self._other(i) for i in range(len(shape)) if i != self.move.axis}
        self.labels = self._labels()

    def __len__(self) -> int:
        return prod(self.shape)

    def entries(self, members: Tensor, units: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return where entries start to stop of units' lines lie in the tensor, flat, (unit, entry).

        Args:
            members, units: (unit), whose lines.
        """
        device = members.device
        if stop is None:
            rank, size = len(self.shape), len(self)
            own = [torch.arange(n, device=device).view(-1, *[1] * (rank - i - 1)) for i, n in enumerate(self.shape)]
        else:
            size, rest, own = stop - start, torch.arange(start, stop, device=device), []
            for n in reversed(self.shape):
                own.insert(0, rest % n)
                rest = rest.div(n, rounding_mode="floor")
        trailing = [1] * max(index.ndim for index in own)
        m, u = members.view(-1, *trailing), units.view(-1, *trailing)
        result, row = m, m
        for i, n in enumerate(self.axes.shape):
            at = self._own(m, u, own[i]) if i == self.move.axis else self._place(i, m, u, row, own[i])
            row = at if i == 0 else row
            result = result * n + at
        return result.expand(len(members), *result.shape[1:]).reshape(len(members), size)

    def codes(self, members: Tensor, units: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return whole numbers in the falling order of the entries' values, (unit, entry)."""
        tensor = self.members.params[self.placement.tensor]
        return ~bits(tensor.reshape(-1)[self.entries(members, units, start, stop)])

    def differ(self, members: Tensor, units: Tensor, others: Tensor) -> Tensor:
        """Say whether units' lines differ from those of others of the same members, as they lie, (unit)."""
        tensor, move = self.members.params[self.placement.tensor], self.move
        result = torch.empty(len(units), dtype=torch.bool, device=units.device)
        step = max(1, _CHUNK // len(self))
        if not move.within:
            length = self.members.table.groups[move.group].size * move.span
            own = tensor.narrow(move.axis + 1, move.offset, length).movedim(move.axis + 1, 1)
            own = own.unflatten(1, (-1, self.placement.parts * move.span))  # type: ignore[no-untyped-call]
        for start in range(0, len(units), step):
            m, u, v = (x[start : start + step] for x in (members, units, others))
            one, other = (self.codes(m, x) if move.within else bits(own[m, x]).flatten(1) for x in (u, v))
            result[start : start + step] = (one != other).any(1)
        return result

    def settled(self, codes: Tensor) -> Tensor:
        """Return codes (unit, entry) by label, and in rising order where entries share one."""
        if self.labels is None:
            return codes
        codes, order = codes.sort(-1)
        return codes.gather(-1, self.labels[order].argsort(dim=-1, stable=True))

    def _own(self, m: Tensor, u: Tensor, index: Tensor) -> Tensor:
        span, parts = self.move.span, self.placement.parts
        unit = u * parts + index.div(span, rounding_mode="floor")
        inner = self.members.inner.get(self.move.group) if parts > 1 else None
        unit = unit if inner is None else inner[m, unit]
        return unit % self.axes.shape[1] if self.move.within else self.move.offset + unit * span + index % span

    def _place(self, axis: int, m: Tensor, u: Tensor, row: Tensor, index: Tensor) -> Tensor:
        """Return where entries of another axis lie, before anything moved."""
        order, move = self._others[axis]
        rows = self.axes.shape[0]
        if self.move.within and axis == 0:
            block = (u * self.placement.parts).div(self.axes.shape[1], rounding_mode="floor")
            return block * (rows // self.move.within) + index if order is None else order[m, block, index]
        if order is None:
            return index
        if move is None:
            return order[m, index]
        block = row.div(rows // move.within, rounding_mode="floor")
        return order[m, block, index] % self.axes.shape[1]

    def _other(self, axis: int) -> tuple[Tensor | None, Move | None]:
        """Return the order of another axis's entries, (member, entry) or (member, block, entry)."""
        moves = [m for m in self.axes.moves if m.axis == axis and m.group in self.members.order]
        if not moves:
            return None, None
        if self.move.within and axis == 0:
            return by_block(self.members.order[moves[0].group], self.move.within), None
        if moves[0].within:
            return by_block(self.members.order[moves[0].group], moves[0].within), moves[0]
        return places_on(self.axes, axis, moves, self.members.order, self.members.device), None

    def _labels(self) -> Tensor | None:
        """Return what is known of each entry's place, (entry); None: all of it."""
        result, known = torch.zeros((), dtype=torch.int64, device=self.members.device), True
        for axis, size in enumerate(self.shape):
            own = torch.arange(size, device=self.members.device)
            if axis == self.move.axis:
                if self.placement.parts > 1 and self.move.group not in self.members.inner:
                    own, known = own % self.move.span, False
            else:
                for move in self.axes.moves:
                    if move.axis == axis and not self.members.sorted(move.group):
                        known, within = False, bool(move.within or (self.move.within and axis == 0))
                        stop = size if within else move.offset + self.members.table.groups[move.group].size * move.span
                        own[move.offset : stop] = (
                            size + move.offset + (own[move.offset : stop] - move.offset) % (1 if within else move.span)
                        )
            result = result[..., None] * 2 * size + own
        return None if known else result.flatten()
