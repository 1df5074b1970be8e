"""Units that keys and lines alone can't tell apart: colours are refined until nothing changes, then tried in turn.

Colours say which units have been told apart. A unit's next colour follows from its own, that of the block it lies in,
those of the units it holds, and from the entries of its lines with the colours of the units on their other axes
(Weisfeiler and Leman's refinement). Where units of one colour are left that can't change places, each is set apart in
turn, and the order that leads to the largest tensors wins (as in McKay & Piperno 2014, arXiv 1301.1493).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import permute
from checkpoints_zoo.symmetry.canonical.lines import Lines, Members, bits, placements
from checkpoints_zoo.symmetry.canonical.ties import Cells

Colours = dict[str, Tensor]  # group -> (unit), from 0 on without gaps
Orders = dict[str, Tensor]  # group -> (member, unit)
MOST = 400  # orders tried for one member


class Search:
    """The search for one member's order.

    Args:
        one: the member, and what is known of its order.
        turn: groups whose order is to be found together; movers first.
        follow: sorts all groups behind these, and returns the permutations of all; given whether to try the first only
            of units that can't be told apart.
        tried: how many orders were tried, shared by all searches for the member.
    """

    def __init__(
        self, one: Members, turn: Sequence[str], follow: Callable[[Members, bool], Orders], tried: list[int]
    ) -> None:
        self.one, self.turn, self.follow, self.tried = one, turn, follow, tried
        self._refining = Refining(one)
        self._symmetries: list[dict[str, list[int]]] = []

    def run(self, colours: Colours, greedy: bool) -> Orders:
        """Refine colours, and return the permutations of all groups that they lead to."""
        return self._run(self._refining.refined(colours), (), greedy)

    def _run(self, colours: Colours, prefix: tuple[tuple[str, int], ...], greedy: bool) -> Orders:
        """Return the permutations that refined colours lead to.

        Args:
            prefix: units that were set apart so far.
        """
        group, units = self._alike(colours)
        if not units:
            return self.follow(_ordered(self.one, self.turn, colours), greedy)
        apart = {unit: self._refining.refined(colours | {group: _apart(colours[group], unit)}) for unit in units}
        most = max(map(_trace, apart.values()))
        first, *others = (unit for unit in units if _trace(apart[unit]) == most)
        best = self._run(apart[first], (*prefix, (group, first)), greedy)
        seen = [] if greedy else [(first, best, self._result(best))]
        for unit in () if greedy else others:
            if self.tried[0] >= MOST:
                break
            orbit = self._orbit(group, unit, prefix)
            if any(other in orbit for other, *_ in seen):
                continue
            path = (*prefix, (group, unit))
            probe = self._run(apart[unit], path, True)
            result = self._result(probe)
            if not self._meets(probe, result, seen):
                order = self._run(apart[unit], path, False)
                result = self._result(order)
                if all(_difference(result, other) > 0 for *_, other in seen):
                    best = order
                seen.append((unit, order, result))
        return best

    def _meets(self, order: Orders, result: list[Tensor], seen: list[tuple[int, Orders, list[Tensor]]]) -> bool:
        """Say whether an order was seen with the same result: what leads from one to the other is a symmetry."""
        for _, other, its in seen:
            if _difference(result, its) == 0:
                leads = {n: torch.empty_like(p[0]).scatter(0, p[0], other[n][0]) for n, p in order.items()}
                self._symmetries += [{n: p.tolist() for n, p in way.items()} for way in (leads, _back(leads))]
                return True
        return False

    def _orbit(self, group: str, unit: int, prefix: tuple[tuple[str, int], ...]) -> set[int]:
        """Return where symmetries that leave the units of a prefix in place can bring a unit."""
        known = [s[group] for s in self._symmetries if all(s[g][u] == u for g, u in prefix)]
        orbit = new = {unit}
        while new:
            new = {leads[u] for leads in known for u in new} - orbit
            orbit = orbit | new
        return orbit

    def _result(self, order: Orders) -> list[Tensor]:
        self.tried[0] += 1
        return [bits(t).flatten() for t in permute(self.one.table, self.one.params, order).values()]

    def _alike(self, colours: Colours) -> tuple[str, list[int]]:
        """Return units of one colour, no two of which can change places; none if there are none."""
        for group in self.turn:
            size, blocks = self.one.table.groups[group].size, self.one.table.groups[group].blocks
            # Units of one colour in different blocks don't compete for places.
            block = torch.arange(blocks, device=self.one.device).repeat_interleave(size // blocks)
            cells = colours[group] * blocks + block
            for cell in (cells.bincount() > 1).nonzero()[:, 0].tolist():
                apart: list[int] = []
                for unit in (cells == cell).nonzero()[:, 0].tolist():
                    if not any(_can_swap(self.one, colours, group, other, unit) for other in apart):
                        apart.append(unit)
                if len(apart) > 1:
                    return group, apart
        return "", []


def _back(permutations: Orders) -> Orders:
    return {name: p.argsort() for name, p in permutations.items()}


def _trace(colours: Colours) -> list[list[int]]:
    """Return how many units have each colour: the same for members that differ by a permutation."""
    return [own.bincount().tolist() for own in colours.values()]


class Refining:
    """What refines the colours of one member's units, but for those that are sorted."""

    def __init__(self, one: Members) -> None:
        self._one = one
        self._groups = {name: group for name, group in one.table.groups.items() if not one.sorted(name)}
        sizes = {name: group.size for name, group in self._groups.items()}
        self._lines = {
            name: [
                _Coded(Lines(one, placement), sizes)
                for placement in placements(one.table, group)
                if placement.parts == 1
            ]
            for name, group in self._groups.items()
        }

    def refined(self, colours: Colours) -> Colours:
        """Refine colours until none changes; return those of all groups.

        Args:
            colours: to begin with; groups that are missing have one.
        """
        blank = {n: torch.zeros(g.size, dtype=torch.int64, device=self._one.device) for n, g in self._groups.items()}
        result = {name: colours.get(name, blank[name]) for name in self._groups}
        before = -1
        while before != (before := sum(map(_number, result.values()))):
            for name, own in result.items():
                if _number(own) < len(own):
                    result[name] = self._next(name, result)
        return result

    def _next(self, name: str, colours: Colours) -> Tensor:
        """Return the next colours of a group's units."""
        own = colours[name]
        columns = [*_around(self._one, name, colours), *(line.codes(colours) for line in self._lines[name])]
        order = own.argsort(stable=True)
        cells = Cells(order, order, own[order], order)
        cells.split(torch.cat([c.reshape(len(own), -1) for c in columns], 1)[order])
        result = torch.empty_like(own)
        result[cells.unit] = cells.cell
        return result


def _number(colours: Tensor) -> int:
    return int(colours.max()) + 1


def _around(one: Members, name: str, colours: Colours) -> Iterator[Tensor]:
    """Yield the colours of the units that a group's units hold, in rising order, and of the blocks they lie in."""
    group = one.table.groups[name]
    for held, other in one.table.groups.items():
        if other.mover == name:
            yield colours[held].reshape(group.size, -1).sort(-1)[0]
    inside = group.size // group.blocks
    if group.mover in colours:
        yield colours[group.mover].repeat_interleave(inside)
    elif group.mover in one.order:
        yield one.order[group.mover][0].argsort().repeat_interleave(inside)
    else:
        yield torch.arange(group.blocks, device=one.device).repeat_interleave(inside)


class _Coded:
    """A placement's lines of one member as numbers, with the colours of the units on their other axes."""

    def __init__(self, line: Lines, sizes: Mapping[str, int]) -> None:
        one, group = line.members, line.members.table.groups[line.move.group]
        units = torch.arange(group.size, device=one.device)
        entries = line.entries(torch.zeros_like(units), units)
        values, ranks = torch.unique(~bits(one.params[line.placement.tensor].reshape(-1)), return_inverse=True)
        labels = torch.arange(len(line), device=one.device) if line.labels is None else line.labels
        self.own = torch.unique(labels * len(values) + ranks[entries], return_inverse=True)[1]
        starts, at = {}, 1
        for name, size in sizes.items():
            starts[name] = at
            at += size
        self.others = [places.reshape(-1)[entries] for places in _units_on(line, starts)]

    def codes(self, colours: Colours) -> Tensor:
        """Return the numbers of all units' lines in rising order, (unit, entry)."""
        result = self.own
        if self.others:
            every = torch.cat([self.own.new_zeros(1), *(own + 1 for own in colours.values())])
            for places in self.others:
                result = result * (int(every.max()) + 1) + every[places]
        found: Tensor = result.sort(-1)[0]
        return found


def _units_on(line: Lines, starts: dict[str, int]) -> Iterator[Tensor]:
    """Yield for each other axis with units that aren't sorted yet which unit each entry of the tensor lies in."""
    axes, device = line.axes, line.members.device
    for axis in range(len(axes.shape)):
        moves = [move for move in axes.moves if move.axis == axis and move.group in starts]
        if axis == line.move.axis or not moves:
            continue
        if moves[0].within:
            rows, columns = axes.shape[:2]
            block = torch.arange(rows, device=device)[:, None].div(rows // moves[0].within, rounding_mode="floor")
            unit = starts[moves[0].group] + block * columns + torch.arange(columns, device=device)
            shape = (rows, columns, *[1] * (len(axes.shape) - 2))
        else:
            unit = torch.zeros(axes.shape[axis], dtype=torch.int64, device=device)
            for move in moves:
                size = line.members.table.groups[move.group].size
                own = starts[move.group] + torch.arange(size, device=device).repeat_interleave(move.span)
                unit[move.offset : move.offset + len(own)] = own
            shape = tuple(n if i == axis else 1 for i, n in enumerate(axes.shape))
        yield unit.reshape(shape).expand(axes.shape)


def _apart(colours: Tensor, unit: int) -> Tensor:
    """Give one unit a colour of its own, before those it shared one with; return the colours."""
    mine = colours[unit]
    result = torch.where(colours >= mine, colours + 1, colours)
    result[unit] = mine
    return result


def _can_swap(one: Members, colours: Colours, group: str, a: int, b: int) -> bool:
    """Say whether no tensor changes when two units, with all they hold, change places."""
    swaps: Orders = {}
    _swap(one, colours, group, [(a, b)], swaps)
    moving = {n: t for n, t in one.params.items() if any(m.group in swaps for m in one.table.tensors[n].moves)}
    return all(bool((bits(t) == bits(moving[n])).all()) for n, t in permute(one.table, moving, swaps).items())


def _swap(one: Members, colours: Colours, group: str, pairs: list[tuple[int, int]], swaps: Orders) -> None:
    swaps[group] = torch.arange(one.table.groups[group].size, device=one.device)
    for a, b in pairs:
        swaps[group][[a, b]] = swaps[group][[b, a]]
    for name, held in one.table.groups.items():
        if held.mover == group:
            by_colour = colours[name].reshape(held.blocks, -1).argsort(dim=-1, stable=True)
            step = held.size // held.blocks
            sides = (((by_colour[i] + i * step).tolist() for i in pair) for pair in pairs)
            _swap(one, colours, name, [both for left, right in sides for both in zip(left, right, strict=True)], swaps)


def _ordered(one: Members, turn: Sequence[str], colours: Colours) -> Members:
    """Return a member with a turn's groups in the order of their colours."""
    result = Members(one.table, one.params, one.free, dict(one.order))
    for name in reversed(turn):
        group = one.table.groups[name]
        inner = colours[name].reshape(group.blocks, -1).argsort(dim=-1, stable=True)
        starts = torch.arange(0, group.size, group.size // group.blocks, device=one.device)
        result.place(turn, name, (inner + starts[:, None]).reshape(1, -1))
    result.close(turn)
    return result


def _difference(one: list[Tensor], other: list[Tensor]) -> int:
    """Return 1, 0 or -1: whether tensors are larger than others in the first entry that differs, equal or smaller."""
    for a, b in zip(one, other, strict=True):
        differs = a != b
        if bool(differs.any()):
            at = int(differs.byte().argmax())
            return 1 if bool(a[at] > b[at]) else -1
    return 0
