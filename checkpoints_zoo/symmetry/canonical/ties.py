"""Break ties between units: cells hold units with equal keys, and the slices of the units split the cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.slices import Members, Slices, find_placements, number_close_values
from checkpoints_zoo.symmetry.table import Group

_CODES_AT_ONCE = 1 << 22  # Largest number of codes compared at once.
_FIRST_ENTRIES = 4  # Number of entries of a slice that are compared first, because they break most ties.


@dataclass
class Cells:
    """Units in cells: a cell is a run of places whose units may still swap.

    The order of the cells is known; the order inside a cell is not.

    Args:
        unit: (unit), index of each unit in its group.
        member: (unit), index of the member that each unit belongs to.
        cell: (unit), number of the cell of each unit, in rising order.
        place: (unit), place of each unit in the flat order of all members.
    """

    unit: Tensor
    member: Tensor
    cell: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.unit)

    def select(self, is_selected: Tensor) -> Cells:
        """Return the selected units in their cells; a cell must be selected as a whole or not at all."""
        return Cells(self.unit[is_selected], self.member[is_selected], self.cell[is_selected], self.place[is_selected])

    def concatenate(self, other_cells: Cells) -> Cells:
        """Append the cells of another object to the cells of this object; return one new object."""
        later_numbers = other_cells.cell + int(self.cell[-1]) + 1 if len(self) else other_cells.cell
        tensor_pairs = (
            (self.unit, other_cells.unit),
            (self.member, other_cells.member),
            (self.cell, later_numbers),
            (self.place, other_cells.place),
        )
        return Cells(*(torch.cat(pair) for pair in tensor_pairs))

    def first_in_cell(self) -> Tensor:
        """Return the position of the first unit of the cell of each unit, (unit)."""
        positions = torch.arange(len(self), device=self.cell.device)
        is_first_in_cell = torch.ones_like(self.cell, dtype=torch.bool)
        is_first_in_cell[1:] = self.cell[1:] != self.cell[:-1]
        return positions.where(is_first_in_cell, 0).cummax(0)[0]

    def sort(self, codes: Tensor) -> Tensor:
        """Sort units inside their cells by codes (unit), and split the cells; return the new order, (unit)."""
        order = codes.argsort(stable=True)
        order = order[self.cell[order].argsort(stable=True)]
        cell, code = self.cell[order], codes[order]
        starts_cell = torch.zeros_like(cell)
        starts_cell[1:] = (cell[1:] != cell[:-1]) | (code[1:] != code[:-1])
        self.unit, self.cell = self.unit[order], starts_cell.cumsum(0)
        return order

    def split(self, codes: Tensor, tolerance: float = 0.0) -> None:
        """Sort units inside their cells by rows of codes (unit, column), column by column, and split the cells.

        Args:
            codes: the rows of codes: whole numbers, or floats to be compared within the tolerance.
            tolerance: see `slices.number_close_values`.
        """
        if not codes.is_floating_point():
            self._split(codes)
            return
        last_cell_before = -1
        while len(self) and last_cell_before != (last_cell_before := int(self.cell[-1])):
            columns = torch.arange(codes.shape[1], device=codes.device)
            class_numbers = self.cell[:, None] + (last_cell_before + 1) * columns
            codes = codes[self._split(number_close_values(codes, class_numbers, tolerance))]

    def _split(self, codes: Tensor) -> Tensor:
        """Sort units inside cells by integers (unit, column), and split the cells; return the new order, (unit)."""
        order, last_column = torch.arange(len(self), device=codes.device), codes.shape[1] - 1
        while len(self) and codes.shape[1]:
            first_units, sorted_codes = self.first_in_cell(), codes[order]
            is_different = sorted_codes != sorted_codes[first_units]
            first_different_column = torch.where(is_different.any(1), is_different.byte().argmax(1), last_column + 1)
            # Each cell is sorted by the first column in which its units differ.
            column_of_cell = first_different_column.scatter_reduce(0, first_units, first_different_column, "amin")[
                first_units
            ]
            if not bool((column_of_cell <= last_column).any()):
                break
            code_in_column = sorted_codes.gather(1, column_of_cell.clamp(max=last_column)[:, None])[:, 0]
            order = order[self.sort(torch.where(column_of_cell <= last_column, code_in_column, 0))]
        return order


def are_alone(cells: Cells) -> Tensor:
    """Return whether each unit is the only one of its cell, (unit)."""
    is_first_in_cell = cells.first_in_cell() == torch.arange(len(cells), device=cells.cell.device)
    return is_first_in_cell & torch.cat([is_first_in_cell[1:], is_first_in_cell.new_ones(1)])[: len(cells)]


def break_ties(members: Members, group: Group, cells: Cells, order: Tensor) -> Tensor:
    """Break ties by the slices of units, and write the order; return whether a member has ties left, (member).

    Slices with a known order of entries come first, then slices whose entries have no known order and are therefore
    sorted. Units that can swap places without a change of any tensor count as ordered.

    Args:
        cells: cells of two or more units.
        order: (place), the unit at each place. It is changed.
    """
    unordered_slices: list[Slices] = []
    has_open_tie = torch.zeros(len(members), dtype=torch.bool, device=members.device)
    for placement in find_placements(members.table, group):
        slices = Slices(members, placement)
        if slices.labels is not None:
            unordered_slices.append(slices)
            continue
        cells = _split_cells_by_entries(slices, cells, 0, min(_FIRST_ENTRIES, len(slices)), order)
        if not len(cells):
            return has_open_tie
        # Most of the remaining units have equal slices, dead units for instance.
        is_different = _has_different_slices([slices], cells)
        split_cells = _split_cells_by_entries(slices, cells.select(is_different), _FIRST_ENTRIES, len(slices), order)
        cells = cells.select(~is_different).concatenate(split_cells)
        if not len(cells):
            return has_open_tie
    for cell_chunk in _cell_chunks(
        _select_distinguishable(unordered_slices, group, cells),
        max((len(slices) for slices in unordered_slices), default=1),
    ):
        for slices in unordered_slices:
            if len(cell_chunk):
                cell_chunk.split(
                    slices.sort_unordered(slices.codes(cell_chunk.member, cell_chunk.unit)), members.tolerance
                )
                cell_chunk = _write_order(cell_chunk, order)
        has_open_tie[_select_distinguishable(unordered_slices, group, cell_chunk).member] = True
    return has_open_tie


def _split_cells_by_entries(slices: Slices, cells: Cells, first_entry: int, end_entry: int, order: Tensor) -> Cells:
    """Split cells by the entries of slices from `first_entry` to before `end_entry`; return the cells with ties
    left."""
    entries_at_once = _FIRST_ENTRIES
    while first_entry < end_entry and len(cells):
        chunk_end = min(first_entry + max(1, min(entries_at_once, _CODES_AT_ONCE // len(cells))), end_entry)
        cells.split(slices.codes(cells.member, cells.unit, first_entry, chunk_end), slices.members.tolerance)
        cells = _write_order(cells, order)
        first_entry, entries_at_once = chunk_end, entries_at_once * 16
    return cells


def _write_order(cells: Cells, order: Tensor) -> Cells:
    """Write the order of the units into `order`; return the cells with ties left."""
    order[cells.place] = cells.unit
    return cells.select(~are_alone(cells))


def _select_distinguishable(unordered_slices: list[Slices], group: Group, cells: Cells) -> Cells:
    """Return the cells whose units cannot swap places without a change of some tensor.

    Args:
        unordered_slices: the only slices in which units of a cell may differ.
    """
    if any(_swap_moves_other_axes(slices, group) for slices in unordered_slices):
        return cells
    return cells.select(_has_different_slices(unordered_slices, cells))


def _has_different_slices(all_slices: list[Slices], cells: Cells) -> Tensor:
    """Return for each unit whether its cell contains units whose slices differ, (unit) bool."""
    first_units, is_different = cells.first_in_cell(), torch.zeros_like(cells.cell, dtype=torch.bool)
    for slices in all_slices:
        is_different |= slices.differ(cells.member, cells.unit, cells.unit[first_units])
    numbers = is_different.byte()
    return numbers.scatter_reduce(0, first_units, numbers, "amax")[first_units] > 0


def _swap_moves_other_axes(slices: Slices, group: Group) -> bool:
    """Return whether a swap of two units also moves entries of their slices along other axes."""
    table = slices.members.table
    group_and_inner = {group.name}
    for other in table.groups.values():
        if other.mover in group_and_inner:
            group_and_inner.add(other.name)
    return any(move.group in group_and_inner and move.axis != slices.move.axis for move in slices.axes.moves)


def _cell_chunks(cells: Cells, entries_per_slice: int) -> Iterator[Cells]:
    """Yield a few cells at a time, so that their slices of `entries_per_slice` entries need little memory."""
    units_at_once, chunk_start = max(2, 4 * _CODES_AT_ONCE // entries_per_slice), 0
    while chunk_start < len(cells):
        chunk_end = min(chunk_start + units_at_once, len(cells))
        is_in_last_cell = cells.cell == cells.cell[chunk_end - 1]
        if chunk_end < len(cells) and bool(is_in_last_cell[chunk_end]):
            cell_start = int(is_in_last_cell.nonzero()[0])
            chunk_end = cell_start if cell_start > chunk_start else int(is_in_last_cell.nonzero()[-1]) + 1
        yield cells.select(torch.arange(chunk_start, chunk_end, device=cells.cell.device))
        chunk_start = chunk_end
