"""Ties between units: cells of equal keys, and the lines that split them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.lines import Lines, Members, placements
from checkpoints_zoo.symmetry.table import Group

_CHUNK = 1 << 22  # codes compared at once
_FIRST = 4  # entries of a line that are looked at first: most ties end there


@dataclass
class Cells:
    """Units in cells, each a run of places; the order of cells is found, that of units within one isn't.

    Args:
        unit: (unit), which unit is where.
        member: (unit), whose it is.
        cell: (unit), the number of its cell, not falling.
        place: (unit), where the order is to be noted, flat.
    """

    unit: Tensor
    member: Tensor
    cell: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.unit)

    def taken(self, which: Tensor) -> Cells:
        """Return the cells of some units, all of a cell's or none."""
        return Cells(self.unit[which], self.member[which], self.cell[which], self.place[which])

    def joined(self, other: Cells) -> Cells:
        """Return the cells of both."""
        after = other.cell + int(self.cell[-1]) + 1 if len(self) else other.cell
        pairs = ((self.unit, other.unit), (self.member, other.member), (self.cell, after), (self.place, other.place))
        return Cells(*(torch.cat(pair) for pair in pairs))

    def first(self) -> Tensor:
        """Return the place among these of the first unit of each one's cell, (unit)."""
        here = torch.arange(len(self), device=self.cell.device)
        starts = torch.ones_like(self.cell, dtype=torch.bool)
        starts[1:] = self.cell[1:] != self.cell[:-1]
        return here.where(starts, 0).cummax(0)[0]

    def sort(self, codes: Tensor) -> Tensor:
        """Sort units within cells by codes (unit), and split the cells; return the units' new order, (unit)."""
        order = codes.argsort(stable=True)
        order = order[self.cell[order].argsort(stable=True)]
        cell, code = self.cell[order], codes[order]
        starts = torch.zeros_like(cell)
        starts[1:] = (cell[1:] != cell[:-1]) | (code[1:] != code[:-1])
        self.unit, self.cell = self.unit[order], starts.cumsum(0)
        return order

    def split(self, codes: Tensor) -> None:
        """Sort units within cells by rows of codes (unit, column), the first column first, and split the cells."""
        rows, last = torch.arange(len(self), device=codes.device), codes.shape[1] - 1
        while len(self) and codes.shape[1]:
            first, mine = self.first(), codes[rows]
            differs = mine != mine[first]
            column = torch.where(differs.any(1), differs.byte().argmax(1), last + 1)
            # Each cell goes by the first column in which any of its units differs.
            least = column.scatter_reduce(0, first, column, "amin")[first]
            if not bool((least <= last).any()):
                break
            code = mine.gather(1, least.clamp(max=last)[:, None])[:, 0]
            rows = rows[self.sort(torch.where(least <= last, code, 0))]


def alone(cells: Cells) -> Tensor:
    """Say which units are the only ones of their cell, (unit)."""
    starts = cells.first() == torch.arange(len(cells), device=cells.cell.device)
    return starts & torch.cat([starts[1:], starts.new_ones(1)])[: len(cells)]


def settle(members: Members, group: Group, cells: Cells, noted: Tensor) -> Tensor:
    """Break ties, and note the order found; return which members have units that this can't tell apart, (member).

    Lines all of whose entries have their places come first, then those in which entries of other units are in no
    order yet, sorted. Units that can change places without a change of any tensor need no order.

    Args:
        cells: two units or more each.
        noted: (place), which unit is where; written to.
    """
    loose: list[Lines] = []
    open_ = torch.zeros(len(members), dtype=torch.bool, device=members.device)
    for placement in placements(members.table, group):
        line = Lines(members, placement)
        if line.labels is not None:
            loose.append(line)
            continue
        cells = _split_by(line, cells, 0, min(_FIRST, len(line)), noted)
        if not len(cells):
            return open_
        # What is left are mostly units with equal lines, such as dead ones.
        differs = _differing([line], cells)
        others = _split_by(line, cells.taken(differs), _FIRST, len(line), noted)
        cells = cells.taken(~differs).joined(others)
        if not len(cells):
            return open_
    for part in _parts(_told_apart(loose, group, cells), max((len(line) for line in loose), default=1)):
        for line in loose:
            if len(part):
                part.split(line.settled(line.codes(part.member, part.unit)))
                part = _noted(part, noted)
        open_[_told_apart(loose, group, part).member] = True
    return open_


def _split_by(line: Lines, cells: Cells, start: int, stop: int, noted: Tensor) -> Cells:
    """Split cells by some entries of a line; return the cells that are left."""
    width = _FIRST
    while start < stop and len(cells):
        until = min(start + max(1, min(width, _CHUNK // len(cells))), stop)
        cells.split(line.codes(cells.member, cells.unit, start, until))
        cells = _noted(cells, noted)
        start, width = until, width * 16
    return cells


def _noted(cells: Cells, noted: Tensor) -> Cells:
    """Note the order; return the cells that are left."""
    noted[cells.place] = cells.unit
    return cells.taken(~alone(cells))


def _told_apart(loose: list[Lines], group: Group, cells: Cells) -> Cells:
    """Return cells of units that differ in some place; units of the others can change places.

    Args:
        loose: the only lines in which units of a cell may differ.
    """
    if any(_meets_itself(line, group) for line in loose):
        return cells
    return cells.taken(_differing(loose, cells))


def _differing(lines: list[Lines], cells: Cells) -> Tensor:
    """Say which units lie in cells whose units' lines differ, (unit)."""
    first, differs = cells.first(), torch.zeros_like(cells.cell, dtype=torch.bool)
    for line in lines:
        differs |= line.differ(cells.member, cells.unit, cells.unit[first])
    whole = differs.byte()
    return whole.scatter_reduce(0, first, whole, "amax")[first] > 0


def _meets_itself(line: Lines, group: Group) -> bool:
    """Say whether a swap of units moves entries of their lines along other axes."""
    table = line.members.table
    held = {group.name}
    for other in table.groups.values():
        if other.mover in held:
            held.add(other.name)
    return any(move.group in held and move.axis != line.move.axis for move in line.axes.moves)


def _parts(cells: Cells, length: int) -> Iterator[Cells]:
    """Yield cells a few at a time, so that lines of that length stay small."""
    most, start = max(2, 4 * _CHUNK // length), 0
    while start < len(cells):
        stop = min(start + most, len(cells))
        same = cells.cell == cells.cell[stop - 1]
        if stop < len(cells) and bool(same[stop]):
            begins = int(same.nonzero()[0])
            stop = begins if begins > start else int(same.nonzero()[-1]) + 1
        yield cells.taken(torch.arange(start, stop, device=cells.cell.device))
        start = stop
