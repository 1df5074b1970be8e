"""The slice of a unit: the entries of a tensor that belong to the unit, in an order that no permutation changes.

The entries are in the order of the units on the other axes of the tensor, if the other axes are sorted. If the units on
another axis are not sorted yet, each entry has a label. Entries with different labels are in order; the order of
entries with equal labels is not known yet.

This is one file, because most of it is one class, `Slices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import source_entries
from checkpoints_zoo.symmetry.table import Axes, Group, Move, Table

_ENTRIES_AT_ONCE = 1 << 20  # Largest number of entries compared at once.


@dataclass(frozen=True)
class Placement:
    """One axis of a tensor that has the units of a group, or the units inside them.

    Args:
        tensor: name of the tensor in the state dict.
        move: the move of the group itself, or of a group whose blocks the group moves.
        parts: number of units of the moved group inside one unit of the group; 1 for the group itself.
    """

    tensor: str
    move: Move
    parts: int


@dataclass
class Members:
    """Stacked members, and the order of the units that are sorted so far.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape).
        free: the groups to sort. Units of all other groups keep their order.
        order: group -> (member, unit), permutations of the groups sorted so far.
        inner: group -> (member, unit), permutations of the units inside each block, for groups whose blocks do not have
            their final places yet.
        tolerance: largest difference of values that count as equal, as a share of the larger value, see
            `number_close_values`; 0: values are equal only bit for bit.
    """

    table: Table
    params: Mapping[str, Tensor]
    free: frozenset[str]
    order: dict[str, Tensor] = field(default_factory=dict)
    inner: dict[str, Tensor] = field(default_factory=dict)
    tolerance: float = 0.0

    def __len__(self) -> int:
        return len(next(iter(self.params.values())))

    @property
    def device(self) -> torch.device:
        return next(iter(self.params.values())).device

    def select(self, member: int) -> Members:
        """Return one member, with a member axis of length 1."""
        member_slice = slice(member, member + 1)
        params = {name: tensor[member_slice] for name, tensor in self.params.items()}
        order = {name: p[member_slice] for name, p in self.order.items()}
        return Members(self.table, params, self.free, order, tolerance=self.tolerance)

    def is_sorted(self, group: str) -> bool:
        """Return whether the units of a group have their final places."""
        return group not in self.free or group in self.order

    def set_order_in_blocks(self, joint_groups: Sequence[str], group_name: str, order_in_blocks: Tensor) -> None:
        """Set the order of a group's units inside its blocks; the joint groups inside the units move with them.

        Args:
            joint_groups: groups that are sorted together, movers first.
            group_name: name of the group whose units are ordered.
            order_in_blocks: (member, unit), a permutation that leaves the blocks in place.
        """
        self.inner[group_name] = order_in_blocks
        for inner_name in joint_groups[joint_groups.index(group_name) + 1 :]:
            self.inner[inner_name] = permute_blocks(self.inner[inner_name], order_in_blocks)

    def move_blocks(self, joint_groups: Sequence[str]) -> None:
        """Move the blocks of joint groups with their mover; after that, all units of these groups have their final
        places."""
        block_order = self.order.get(self.table.groups[joint_groups[0]].mover or "")
        for name in joint_groups:
            order_in_blocks = self.inner.pop(name)
            self.order[name] = order_in_blocks if block_order is None else permute_blocks(order_in_blocks, block_order)


def permute_blocks(order_in_blocks: Tensor, block_order: Tensor) -> Tensor:
    """Return a permutation inside blocks (member, unit) with the blocks permuted by `block_order` (member, block)."""
    by_block = order_in_blocks.reshape(*block_order.shape, order_in_blocks.shape[1] // block_order.shape[1])
    return by_block.gather(1, block_order[..., None].expand_as(by_block)).flatten(1)


def order_by_block(permutation: Tensor, block_count: int) -> Tensor:
    """Return the permuted units of each block, blocks by their former numbers, (member, block, unit)."""
    by_block = permutation.reshape(len(permutation), block_count, permutation.shape[1] // block_count)
    old_blocks = by_block[..., 0].div(by_block.shape[2], rounding_mode="floor")
    return by_block.gather(1, old_blocks.argsort(1)[..., None].expand_as(by_block))


def find_placements(table: Table, group: Group) -> list[Placement]:
    """List the axes that have the units of a group or the units inside them, those of its first writer first."""
    inner_sizes = {group.name: group.size}
    for other in table.groups.values():
        if other.mover in inner_sizes:
            inner_sizes[other.name] = other.size
    result = [
        Placement(name, move, inner_sizes[move.group] // group.size)
        for name, axes in table.tensors.items()
        for move in axes.moves
        # A unit that has a whole block of the inputs of a grouped kernel also has the rows of this block.
        if move.group in inner_sizes and not (move.within and inner_sizes[move.group] // group.size >= axes.shape[1])
    ]
    first_writer = group.writers[0] if group.writers else None
    return sorted(result, key=lambda placement: (placement.tensor, placement.move.axis) != first_writer)


def ordered_bits(values: Tensor) -> Tensor:
    """Return whole numbers that sort like the values; -0.0 comes right before 0.0."""
    if not values.is_floating_point():
        return values.short() if values.dtype in (torch.bool, torch.uint8) else values
    integer_bits = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    return integer_bits ^ ((integer_bits >> (8 * values.itemsize - 1)) & torch.iinfo(integer_bits.dtype).max)


def are_close(values: Tensor, other_values: Tensor, tolerance: float) -> Tensor:
    """Return whether values differ by at most `tolerance` times the larger magnitude."""
    return (values - other_values).abs() <= tolerance * torch.maximum(values.abs(), other_values.abs())


def number_close_values(values: Tensor, class_numbers: Tensor, tolerance: float) -> Tensor:
    """Return whole numbers that sort like the floats inside each class; neighbours that are close get one number.

    Rounding moves values by less than the tolerance. Rounding therefore changes none of the returned numbers, unless
    two neighbours are almost exactly the tolerance apart.

    Args:
        values: floats of any shape.
        class_numbers: class number of each value, in the same shape. Values of different classes get different numbers.
        tolerance: largest difference of close neighbours, as a share of the larger magnitude.
    """
    flat_values, classes = values.flatten(), class_numbers.expand(values.shape).flatten()
    order = flat_values.argsort(stable=True)
    order = order[classes[order].argsort(stable=True)]
    sorted_values, classes = flat_values[order], classes[order]
    starts_new_number = torch.zeros_like(order)
    starts_new_number[1:] = ~are_close(sorted_values[1:], sorted_values[:-1], tolerance) | (classes[1:] != classes[:-1])
    return torch.empty_like(order).scatter_(0, order, starts_new_number.cumsum(0)).reshape(values.shape)


class Slices:
    """The slices of units along one axis of a tensor.

    Args:
        members: the stacked members, with the order of the units that are sorted so far.
        placement: the axis.
        summed_axes: number of last axes of the tensor that were summed over.
    """

    def __init__(self, members: Members, placement: Placement, summed_axes: int = 0) -> None:
        full = members.table.tensors[placement.tensor]
        self.axes = Axes(full.shape[: len(full.shape) - summed_axes], full.role, full.shift, full.moves, full.powers)
        self.members, self.placement, self.move = members, placement, placement.move
        shape = list(self.axes.shape)
        shape[self.move.axis] = placement.parts * self.move.span
        if self.move.within:
            shape[0] //= self.move.within
        self.shape = tuple(shape)
        self._others = {i: self._order_on_axis(i) for i in range(len(shape)) if i != self.move.axis}
        self.labels = self._entry_labels()

    def __len__(self) -> int:
        return prod(self.shape)

    def entries(self, members: Tensor, units: Tensor, first_entry: int = 0, end_entry: int | None = None) -> Tensor:
        """Return the flat positions in the tensor of the slices' entries from `first_entry` to before `end_entry`,
        (unit, entry).

        Args:
            members: (unit), index of the member that each unit belongs to.
            units: (unit), index of each unit in its group.
        """
        device = members.device
        if end_entry is None:
            rank, size = len(self.shape), len(self)
            indices = [torch.arange(n, device=device).view(-1, *[1] * (rank - i - 1)) for i, n in enumerate(self.shape)]
        else:
            size, remaining_index, indices = (
                end_entry - first_entry,
                torch.arange(first_entry, end_entry, device=device),
                [],
            )
            for n in reversed(self.shape):
                indices.insert(0, remaining_index % n)
                remaining_index = remaining_index.div(n, rounding_mode="floor")
        trailing_sizes = [1] * max(index.ndim for index in indices)
        m, u = members.view(-1, *trailing_sizes), units.view(-1, *trailing_sizes)
        flat_positions, row_positions = m, m
        for i, n in enumerate(self.axes.shape):
            positions_on_axis = (
                self._positions_on_moved_axis(m, u, indices[i])
                if i == self.move.axis
                else self._positions_on_other_axis(i, m, u, row_positions, indices[i])
            )
            row_positions = positions_on_axis if i == 0 else row_positions
            flat_positions = flat_positions * n + positions_on_axis
        return flat_positions.expand(len(members), *flat_positions.shape[1:]).reshape(len(members), size)

    def codes(self, members: Tensor, units: Tensor, first_entry: int = 0, end_entry: int | None = None) -> Tensor:
        """Return numbers for the entries of slices, (unit, entry): whole numbers, floats if there is a tolerance.

        A larger number means a smaller value.
        """
        tensor = self.members.params[self.placement.tensor]
        values = tensor.reshape(-1)[self.entries(members, units, first_entry, end_entry)]
        return -self._add_eps(values) if self.members.tolerance else ~ordered_bits(values)

    def _add_eps(self, values: Tensor) -> Tensor:
        """Return values in float64. The eps of the norm is added to a running variance."""
        return values.double() + self.axes.shift

    def differ(self, members: Tensor, units: Tensor, other_units: Tensor) -> Tensor:
        """Return whether the slices of units differ from the slices of other units of the same members, (unit)."""
        tensor, move = self.members.params[self.placement.tensor], self.move
        is_different = torch.empty(len(units), dtype=torch.bool, device=units.device)
        units_at_once = max(1, _ENTRIES_AT_ONCE // len(self))
        if not move.within:
            length = self.members.table.groups[move.group].size * move.span
            rows_of_units = tensor.narrow(move.axis + 1, move.offset, length).movedim(move.axis + 1, 1)
            rows_of_units = rows_of_units.unflatten(1, (-1, self.placement.parts * move.span))  # type: ignore[no-untyped-call]
        for start in range(0, len(units), units_at_once):
            m, u, v = (x[start : start + units_at_once] for x in (members, units, other_units))
            if self.members.tolerance:
                codes, other_codes = (
                    self.codes(m, x) if move.within else self._add_eps(rows_of_units[m, x]).flatten(1) for x in (u, v)
                )
                is_different[start : start + units_at_once] = ~are_close(
                    codes, other_codes, self.members.tolerance
                ).all(1)
            else:
                codes, other_codes = (
                    self.codes(m, x) if move.within else ordered_bits(rows_of_units[m, x]).flatten(1) for x in (u, v)
                )
                is_different[start : start + units_at_once] = (codes != other_codes).any(1)
        return is_different

    def sort_unordered(self, codes: Tensor) -> Tensor:
        """Sort codes (unit, entry) by label, and codes with equal labels by value; return the sorted codes."""
        if self.labels is None:
            return codes
        codes, order = codes.sort(-1)
        return codes.gather(-1, self.labels[order].argsort(dim=-1, stable=True))

    def _positions_on_moved_axis(self, member_index: Tensor, unit_index: Tensor, index: Tensor) -> Tensor:
        """Return the positions of a slice's entries on the axis along which its group moves."""
        span, parts = self.move.span, self.placement.parts
        unit = unit_index * parts + index.div(span, rounding_mode="floor")
        order_in_blocks = self.members.inner.get(self.move.group) if parts > 1 else None
        unit = unit if order_in_blocks is None else order_in_blocks[member_index, unit]
        return unit % self.axes.shape[1] if self.move.within else self.move.offset + unit * span + index % span

    def _positions_on_other_axis(
        self, axis: int, member_index: Tensor, unit_index: Tensor, row: Tensor, index: Tensor
    ) -> Tensor:
        """Return the positions of a slice's entries on one of the tensor's other axes, before the axis is permuted."""
        order, move = self._others[axis]
        rows = self.axes.shape[0]
        if self.move.within and axis == 0:
            block = (unit_index * self.placement.parts).div(self.axes.shape[1], rounding_mode="floor")
            return block * (rows // self.move.within) + index if order is None else order[member_index, block, index]
        if order is None:
            return index
        if move is None:
            return order[member_index, index]
        block = row.div(rows // move.within, rounding_mode="floor")
        return order[member_index, block, index] % self.axes.shape[1]

    def _order_on_axis(self, axis: int) -> tuple[Tensor | None, Move | None]:
        """Return the order of entries on one of the tensor's other axes, (member, entry) or (member, block, entry);
        None if the entries keep their order."""
        moves = [m for m in self.axes.moves if m.axis == axis and m.group in self.members.order]
        if not moves:
            return None, None
        if self.move.within and axis == 0:
            return order_by_block(self.members.order[moves[0].group], self.move.within), None
        if moves[0].within:
            return order_by_block(self.members.order[moves[0].group], moves[0].within), moves[0]
        return source_entries(self.axes, axis, moves, self.members.order, self.members.device), None

    def _entry_labels(self) -> Tensor | None:
        """Return a label for each entry, (entry); None if the order of all entries is known."""
        entry_labels, has_known_order = torch.zeros((), dtype=torch.int64, device=self.members.device), True
        for axis, size in enumerate(self.shape):
            labels = torch.arange(size, device=self.members.device)
            if axis == self.move.axis:
                if self.placement.parts > 1 and self.move.group not in self.members.inner:
                    labels, has_known_order = labels % self.move.span, False
            else:
                for move in self.axes.moves:
                    if move.axis == axis and not self.members.is_sorted(move.group):
                        has_known_order, is_in_block = False, bool(move.within or (self.move.within and axis == 0))
                        stop = (
                            size
                            if is_in_block
                            else move.offset + self.members.table.groups[move.group].size * move.span
                        )
                        labels[move.offset : stop] = (
                            size
                            + move.offset
                            + (labels[move.offset : stop] - move.offset) % (1 if is_in_block else move.span)
                        )
            entry_labels = entry_labels[..., None] * 2 * size + labels
        return None if has_known_order else entry_labels.flatten()
