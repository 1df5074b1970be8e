"""Order units with equal keys and equal slices: refine colours, then search.

Units of different colours are known to differ. The next colour of a unit depends on its colour, the colours of its
block and of the units inside it, and the entries of its slices with the colours of the units on the other axes (the
refinement of Weisfeiler and Leman). If units of one colour cannot swap places, each of them gets a colour of its own in
turn, and the order with the largest tensors wins (as in McKay & Piperno 2014, arXiv 1301.1493).

This is one file, because the search refines at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import permute
from checkpoints_zoo.symmetry.canonical.slices import (
    Members,
    Slices,
    are_close,
    find_placements,
    number_close_values,
    ordered_bits,
)
from checkpoints_zoo.symmetry.canonical.ties import Cells

Colours = dict[str, Tensor]  # Group -> colour of each unit, (unit): whole numbers from 0 on without gaps.
Orders = dict[str, Tensor]  # Group -> order of the units, (member, unit).
MOST_ORDERS = 400  # Largest number of orders that are tried for one member.


class Search:
    """The search for the order of the units of one member.

    Args:
        member: the member, with the order of the units that are sorted so far.
        joint_groups: groups that are ordered together, movers first.
        sort_rest: function that sorts all later groups, and returns the permutations of all groups. The second argument
            of `sort_rest` says whether to try only the first of several units of one colour.
        order_counter: counter of the orders tried, shared by all searches for the member.
    """

    def __init__(
        self,
        member: Members,
        joint_groups: Sequence[str],
        sort_rest: Callable[[Members, bool], Orders],
        order_counter: list[int],
    ) -> None:
        self.member, self.joint_groups, self.sort_rest, self.order_counter = (
            member,
            joint_groups,
            sort_rest,
            order_counter,
        )
        self._refining = Refining(member)
        self._symmetries: list[dict[str, list[int]]] = []

    def find_best_orders(self, colours: Colours, first_unit_only: bool) -> Orders:
        """Refine colours; return the best permutations of all groups."""
        return self._best_orders(self._refining.refine(colours), (), first_unit_only)

    def _best_orders(
        self, colours: Colours, separated_units: tuple[tuple[str, int], ...], first_unit_only: bool
    ) -> Orders:
        """Return the best permutations for refined colours.

        Args:
            separated_units: (group, unit) pairs to which the search gave a colour of their own.
        """
        group, units = self._find_tied_units(colours)
        if not units:
            return self.sort_rest(_sort_by_colour(self.member, self.joint_groups, colours), first_unit_only)
        colours_of_separated = {
            unit: self._refining.refine(colours | {group: _separate_unit(colours[group], unit)}) for unit in units
        }
        largest_counts = max(map(_colour_counts, colours_of_separated.values()))
        first_unit, *other_units = (
            unit for unit in units if _colour_counts(colours_of_separated[unit]) == largest_counts
        )
        best_orders = self._best_orders(
            colours_of_separated[first_unit], (*separated_units, (group, first_unit)), first_unit_only
        )
        tried_orders = [] if first_unit_only else [(first_unit, best_orders, self._permuted_tensors(best_orders))]
        for unit in () if first_unit_only else other_units:
            if self.order_counter[0] >= MOST_ORDERS:
                break
            orbit = self._orbit(group, unit, separated_units)
            if any(other in orbit for other, *_ in tried_orders):
                continue
            units_on_path = (*separated_units, (group, unit))
            orders_of_first = self._best_orders(colours_of_separated[unit], units_on_path, True)
            permuted_tensors = self._permuted_tensors(orders_of_first)
            if not self._equals_earlier(orders_of_first, permuted_tensors, tried_orders):
                orders = self._best_orders(colours_of_separated[unit], units_on_path, False)
                permuted_tensors = self._permuted_tensors(orders)
                if all(
                    _compare_tensors(permuted_tensors, other, self.member.tolerance) > 0 for *_, other in tried_orders
                ):
                    best_orders = orders
                tried_orders.append((unit, orders, permuted_tensors))
        return best_orders

    def _equals_earlier(
        self, orders: Orders, permuted_tensors: list[Tensor], tried_orders: list[tuple[int, Orders, list[Tensor]]]
    ) -> bool:
        """Return whether an earlier order gives the same tensors; record the symmetry between the two orders."""
        for _, earlier_orders, earlier_tensors in tried_orders:
            if _compare_tensors(permuted_tensors, earlier_tensors, self.member.tolerance) == 0:
                symmetry_to_earlier = {
                    n: torch.empty_like(p[0]).scatter(0, p[0], earlier_orders[n][0]) for n, p in orders.items()
                }
                self._symmetries += [
                    {n: p.tolist() for n, p in symmetry.items()}
                    for symmetry in (symmetry_to_earlier, _invert_permutations(symmetry_to_earlier))
                ]
                return True
        return False

    def _orbit(self, group: str, unit: int, separated_units: tuple[tuple[str, int], ...]) -> set[int]:
        """Return the orbit of a unit under the known symmetries that keep all separated units in place."""
        permutations_of_group = [s[group] for s in self._symmetries if all(s[g][u] == u for g, u in separated_units)]
        orbit = new_units = {unit}
        while new_units:
            new_units = {symmetry[u] for symmetry in permutations_of_group for u in new_units} - orbit
            orbit = orbit | new_units
        return orbit

    def _permuted_tensors(self, orders: Orders) -> list[Tensor]:
        self.order_counter[0] += 1
        return _values_to_compare(self.member, permute(self.member.table, self.member.params, orders))

    def _find_tied_units(self, colours: Colours) -> tuple[str, list[int]]:
        """Return a group and units of one colour that cannot swap places; no units if there are none."""
        for group in self.joint_groups:
            size, blocks = self.member.table.groups[group].size, self.member.table.groups[group].blocks
            # Units of one colour in different blocks can't take each other's places, so only units in one block are
            # compared.
            block_of_unit = torch.arange(blocks, device=self.member.device).repeat_interleave(size // blocks)
            cell_of_unit = colours[group] * blocks + block_of_unit
            for cell in (cell_of_unit.bincount() > 1).nonzero()[:, 0].tolist():
                tied_units: list[int] = []
                for unit in (cell_of_unit == cell).nonzero()[:, 0].tolist():
                    if not any(_can_swap(self.member, colours, group, other, unit) for other in tied_units):
                        tied_units.append(unit)
                if len(tied_units) > 1:
                    return group, tied_units
        return "", []


def _invert_permutations(permutations: Orders) -> Orders:
    return {name: p.argsort() for name, p in permutations.items()}


def _colour_counts(colours: Colours) -> list[list[int]]:
    """Return the number of units of each colour, which no permutation changes."""
    return [group_colours.bincount().tolist() for group_colours in colours.values()]


class Refining:
    """Refines the colours of the units of one member, for all groups that are not sorted yet."""

    def __init__(self, member: Members) -> None:
        self._member = member
        self._groups = {name: group for name, group in member.table.groups.items() if not member.is_sorted(name)}
        sizes = {name: group.size for name, group in self._groups.items()}
        self._slices = {
            name: [
                _CodedSlices(Slices(member, placement), sizes)
                for placement in find_placements(member.table, group)
                if placement.parts == 1
            ]
            for name, group in self._groups.items()
        }

    def refine(self, colours: Colours) -> Colours:
        """Refine colours until none changes; return the colours of all groups.

        Args:
            colours: the colours to start from. Units of a missing group start with one colour.
        """
        uniform_colours = {
            n: torch.zeros(g.size, dtype=torch.int64, device=self._member.device) for n, g in self._groups.items()
        }
        refined_colours = {name: colours.get(name, uniform_colours[name]) for name in self._groups}
        colour_count = -1
        while colour_count != (colour_count := sum(map(_count_colours, refined_colours.values()))):
            for name, present_colours in refined_colours.items():
                if _count_colours(present_colours) < len(present_colours):
                    refined_colours[name] = self._next_colours(name, refined_colours)
        return refined_colours

    def _next_colours(self, group_name: str, colours: Colours) -> Tensor:
        """Return the next colours of the units of a group."""
        present_colours = colours[group_name]
        code_columns = [
            *_block_colours(self._member, group_name, colours),
            *(slices.sorted_codes(colours) for slices in self._slices[group_name]),
        ]
        order = present_colours.argsort(stable=True)
        cells = Cells(order, order, present_colours[order], order)
        cells.split(torch.cat([c.reshape(len(present_colours), -1) for c in code_columns], 1)[order])
        next_colours = torch.empty_like(present_colours)
        next_colours[cells.unit] = cells.cell
        return next_colours


def _count_colours(colours: Tensor) -> int:
    return int(colours.max()) + 1


def _block_colours(member: Members, group_name: str, colours: Colours) -> Iterator[Tensor]:
    """Yield the sorted colours of the units inside each unit of a group, and the colours of the blocks of the group."""
    group = member.table.groups[group_name]
    for inner_name, inner_group in member.table.groups.items():
        if inner_group.mover == group_name:
            yield colours[inner_name].reshape(group.size, -1).sort(-1)[0]
    units_per_block = group.size // group.blocks
    if group.mover in colours:
        yield colours[group.mover].repeat_interleave(units_per_block)
    elif group.mover in member.order:
        yield member.order[group.mover][0].argsort().repeat_interleave(units_per_block)
    else:
        yield torch.arange(group.blocks, device=member.device).repeat_interleave(units_per_block)


class _CodedSlices:
    """The slices of one member as whole numbers, to be combined with the colours of the units on the other axes."""

    def __init__(self, slices: Slices, group_sizes: Mapping[str, int]) -> None:
        member, group = slices.members, slices.members.table.groups[slices.move.group]
        units = torch.arange(group.size, device=member.device)
        entries = slices.entries(torch.zeros_like(units), units)
        labels = torch.arange(len(slices), device=member.device) if slices.labels is None else slices.labels
        if member.tolerance:
            self.base = number_close_values(slices.codes(torch.zeros_like(units), units), labels, member.tolerance)
        else:
            tensor = member.params[slices.placement.tensor]
            values, ranks = torch.unique(~ordered_bits(tensor.reshape(-1)), return_inverse=True)
            self.base = torch.unique(labels * len(values) + ranks[entries], return_inverse=True)[1]
        start_of_group, next_start = {}, 1
        for name, size in group_sizes.items():
            start_of_group[name] = next_start
            next_start += size
        self.others = [places.reshape(-1)[entries] for places in _units_on_other_axes(slices, start_of_group)]

    def sorted_codes(self, colours: Colours) -> Tensor:
        """Return the slices of all units as sorted numbers, (unit, entry)."""
        codes = self.base
        if self.others:
            colour_of_unit = torch.cat(
                [self.base.new_zeros(1), *(group_colours + 1 for group_colours in colours.values())]
            )
            for unit_of_entry in self.others:
                codes = codes * (int(colour_of_unit.max()) + 1) + colour_of_unit[unit_of_entry]
        ordered: Tensor = codes.sort(-1)[0]
        return ordered


def _units_on_other_axes(slices: Slices, start_of_group: dict[str, int]) -> Iterator[Tensor]:
    """Yield for each other axis with unsorted units the unit of each entry of the tensor."""
    axes, device = slices.axes, slices.members.device
    for axis in range(len(axes.shape)):
        moves = [move for move in axes.moves if move.axis == axis and move.group in start_of_group]
        if axis == slices.move.axis or not moves:
            continue
        if moves[0].within:
            rows, columns = axes.shape[:2]
            block = torch.arange(rows, device=device)[:, None].div(rows // moves[0].within, rounding_mode="floor")
            unit = start_of_group[moves[0].group] + block * columns + torch.arange(columns, device=device)
            shape = (rows, columns, *[1] * (len(axes.shape) - 2))
        else:
            unit = torch.zeros(axes.shape[axis], dtype=torch.int64, device=device)
            for move in moves:
                size = slices.members.table.groups[move.group].size
                units = start_of_group[move.group] + torch.arange(size, device=device).repeat_interleave(move.span)
                unit[move.offset : move.offset + len(units)] = units
            shape = tuple(n if i == axis else 1 for i, n in enumerate(axes.shape))
        yield unit.reshape(shape).expand(axes.shape)


def _separate_unit(colours: Tensor, unit: int) -> Tensor:
    """Give one unit a new colour, right before the other units of its old colour; return the colours."""
    colour = colours[unit]
    result = torch.where(colours >= colour, colours + 1, colours)
    result[unit] = colour
    return result


def _can_swap(member: Members, colours: Colours, group: str, unit: int, other_unit: int) -> bool:
    """Return whether two units, with the units inside them, can swap places without a change of any tensor."""
    swaps: Orders = {}
    _add_swaps(member, colours, group, [(unit, other_unit)], swaps)
    moving_tensors = {
        n: t for n, t in member.params.items() if any(m.group in swaps for m in member.table.tensors[n].moves)
    }
    swapped_tensors = permute(member.table, moving_tensors, swaps)
    return (
        _compare_tensors(
            _values_to_compare(member, moving_tensors), _values_to_compare(member, swapped_tensors), member.tolerance
        )
        == 0
    )


def _values_to_compare(member: Members, params: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the entries of each tensor as numbers in the order of its values: `ordered_bits`, or the values themselves
    in float64 if a tolerance allows rounding errors."""
    if not member.tolerance:
        return [ordered_bits(tensor).flatten() for tensor in params.values()]
    return [tensor.flatten().double() + member.table.tensors[name].shift for name, tensor in params.items()]


def _add_swaps(member: Members, colours: Colours, group: str, pairs: list[tuple[int, int]], swaps: Orders) -> None:
    """Set a group's order in `swaps` to one that swaps the two units of each pair; set the orders of the groups
    inside its units in the same way."""
    swaps[group] = torch.arange(member.table.groups[group].size, device=member.device)
    for unit, other_unit in pairs:
        swaps[group][[unit, other_unit]] = swaps[group][[other_unit, unit]]
    for name, inner_group in member.table.groups.items():
        if inner_group.mover == group:
            units_by_colour = colours[name].reshape(inner_group.blocks, -1).argsort(dim=-1, stable=True)
            units_per_block = inner_group.size // inner_group.blocks
            inner_units_of_pairs = (
                ((units_by_colour[i] + i * units_per_block).tolist() for i in pair) for pair in pairs
            )
            _add_swaps(
                member,
                colours,
                name,
                [inner_pair for left, right in inner_units_of_pairs for inner_pair in zip(left, right, strict=True)],
                swaps,
            )


def _sort_by_colour(member: Members, joint_groups: Sequence[str], colours: Colours) -> Members:
    """Return a member with the units of the joint groups sorted by colour."""
    sorted_member = Members(member.table, member.params, member.free, dict(member.order), tolerance=member.tolerance)
    for name in reversed(joint_groups):
        group = member.table.groups[name]
        order_in_blocks = colours[name].reshape(group.blocks, -1).argsort(dim=-1, stable=True)
        starts = torch.arange(0, group.size, group.size // group.blocks, device=member.device)
        sorted_member.set_order_in_blocks(joint_groups, name, (order_in_blocks + starts[:, None]).reshape(1, -1))
    sorted_member.move_blocks(joint_groups)
    return sorted_member


def _compare_tensors(tensors: list[Tensor], other_tensors: list[Tensor], tolerance: float) -> int:
    """Compare two members by the first entry that differs; return 1 if `tensors` has the larger entry, -1 if the
    smaller, 0 if all entries are equal."""
    for tensor, other_tensor in zip(tensors, other_tensors, strict=True):
        is_different = ~are_close(tensor, other_tensor, tolerance) if tolerance else tensor != other_tensor
        if bool(is_different.any()):
            position = int(is_different.byte().argmax())
            return 1 if bool(tensor[position] > other_tensor[position]) else -1
    return 0
