"""Sort units: choose one network for all networks that permutations turn into each other.

Laurent et al. 2024 (arXiv 2310.08287) sort by the first weight of each unit in their code, and by the largest weight in
their text. Sorting keys are whole numbers; a larger key means a smaller weight or norm.

This is one file, because it is one sort: its keys, its blocks and its ties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import count_stacked_members, permute
from checkpoints_zoo.symmetry.canonical.refining import Colours, Orders, Search
from checkpoints_zoo.symmetry.canonical.slices import (
    Members,
    Placement,
    Slices,
    are_close,
    number_close_values,
    ordered_bits,
)
from checkpoints_zoo.symmetry.canonical.ties import Cells, are_alone, break_ties
from checkpoints_zoo.symmetry.table import Group, Table

SORTING_KEYS = ("first", "max", "norm")
_SQUARES_AT_ONCE = 1 << 17  # Largest number of entries squared at once (512 KB).
_GATHERED_AT_ONCE = 1 << 20  # Largest number of entries of slices gathered at once (8 MB).
_ENTRIES_PER_RUN = 64  # Number of entries that are added up in the precision of the weights.
_SHORT_ROW = 32  # Rows up to this length are summed entry by entry.


def sort_units(
    table: Table, params: Mapping[str, Tensor], key: str = "first", streams: bool = False, tolerance: float = 0.0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sort all units by falling keys, group by group; return the tensors and the permutations.

    Networks that differ by a permutation of the sorted groups give the same tensors, bit for bit. Groups are sorted in
    topological order, inside their blocks. A group of blocks without a writer is sorted by the keys of the units inside
    the blocks, the largest key first. Units with equal keys are ordered by their other tensors:

    (1) rows, biases and norms whose other axes are sorted already, the row of the first writer first, are compared by
    the first entry that differs;
    (2) tensors whose other axes are not sorted yet are compared by their sorted entries;
    (3) colour refinement (see `refining`) separates units that are connected to units that differ;
    (4) a search through the orders that are left chooses the order with the largest tensors.

    -0.0 comes after 0.0. Units that can swap places without a change of any tensor keep their order.

    After `refining.MOST_ORDERS` orders of one member, the search stops with the best order so far. Only members with
    many units that differ in nothing but their connections to each other need so many orders, such as networks of
    adjacency matrices. Any order keeps the function of the member.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), including all tensors with a permuted axis. No entry may be NaN.
        key: the key of the row that the first writer has for a unit, after its columns are sorted: "first" weight,
            "max" (largest) weight, or L2 "norm" in float64.
        streams: whether to sort the units of residual streams as well.
        tolerance: two values count as equal if their difference is at most this share of the larger value. A tolerance
            is needed for rescaled tensors, whose equal units differ by rounding errors. With a tolerance, permuted
            networks give tensors that are equal within the tolerance, not bit for bit.

    Raises:
        UsageError: the key is unknown, or the tensors have no member axis.
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[2.0], [1.0], [2.0]]]), "2.weight": torch.tensor([[[5.0, 6.0, 7.0]]])}
    >>> tensors, permutations = sort_units(symmetries(net, torch.zeros(1, 1)), weights)
    >>> tensors["0.weight"].flatten().tolist(), tensors["2.weight"].flatten().tolist(), permutations["0"].tolist()
    ([2.0, 2.0, 1.0], [7.0, 5.0, 6.0], [[2, 0, 1]])
    """
    if key not in SORTING_KEYS:
        raise UsageError("key", expected=" or ".join(map(repr, SORTING_KEYS)), found=repr(key))
    member_count = count_stacked_members(table, params) if params else None
    groups_to_sort = _sortable_groups(table, streams)
    axes_of_moving = {n: a for n, a in table.tensors.items() if any(move.group in groups_to_sort for move in a.moves)}
    for name in axes_of_moving:
        if name not in params:
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    if not groups_to_sort:
        return dict(params), {}
    with torch.no_grad():
        members = Members(
            table, {name: params[name].detach() for name in axes_of_moving}, groups_to_sort, tolerance=tolerance
        )
        orders = (
            _sort_remaining(members, False, _list_joint_groups(table, groups_to_sort), key)
            if member_count
            else _empty_orders(table, groups_to_sort, members.device)
        )
    permutations = {name: orders[name] for name in table.groups if name in groups_to_sort}
    return permute(table, params, permutations), permutations


def _empty_orders(table: Table, groups_to_sort: frozenset[str], device: torch.device) -> Orders:
    return {name: torch.empty(0, table.groups[name].size, dtype=torch.int64, device=device) for name in groups_to_sort}


def _sortable_groups(table: Table, streams: bool) -> frozenset[str]:
    """Return the groups to sort: all groups, or only the groups of inner channels whose blocks hold no units of
    residual streams."""
    excluded_groups: set[str | None] = (
        set() if streams else {name for name, group in table.groups.items() if group.stream}
    )
    for name in reversed(list(table.groups)):
        if name in excluded_groups:
            excluded_groups.add(table.groups[name].mover)
    return frozenset(name for name in table.groups if name not in excluded_groups)


def _list_joint_groups(table: Table, groups_to_sort: frozenset[str]) -> list[list[str]]:
    """Return lists of joint groups (groups that are sorted together), in sorting order. A group without writers is
    sorted together with the first group inside its blocks."""
    joint_groups_in_order: list[list[str]] = []
    listed_groups: set[str] = set()
    for name in table.groups:
        if name in groups_to_sort and name not in listed_groups:
            joint_groups_in_order.append(
                _groups_sorted_together(table, name) if not table.groups[name].writers else [name]
            )
            listed_groups.update(joint_groups_in_order[-1])
    return joint_groups_in_order


def _groups_sorted_together(table: Table, group_name: str) -> list[str]:
    """Return a group and the groups inside its blocks, down to the first group with writers; only the group itself if
    no such group exists."""
    for other in table.groups.values():
        if other.mover == group_name:
            groups_below = [other.name] if other.writers else _groups_sorted_together(table, other.name)
            if table.groups[groups_below[-1]].writers:
                return [group_name, *groups_below]
    return [group_name]


def _sort_remaining(
    members: Members,
    first_unit_only: bool,
    all_joint_groups: list[list[str]],
    key_kind: str,
    order_counter: list[int] | None = None,
) -> Orders:
    """Sort all groups that are not sorted yet; return the permutations of all groups."""
    orders_by_member: dict[int, Orders] = {}
    is_unsorted = torch.ones(len(members), dtype=torch.bool, device=members.device)
    for joint_groups in all_joint_groups:
        if joint_groups[0] in members.order:
            continue
        for member in _sort_joint_groups(members, joint_groups, key_kind, is_unsorted).nonzero()[:, 0].tolist():
            one_member, counter = members.select(member), [0] if order_counter is None else order_counter
            sort_rest = partial(
                _sort_remaining, all_joint_groups=all_joint_groups, key_kind=key_kind, order_counter=counter
            )
            orders_by_member[member] = Search(one_member, joint_groups, sort_rest, counter).find_best_orders(
                _initial_colours(one_member, joint_groups, key_kind), first_unit_only
            )
            is_unsorted[member] = False
        members.move_blocks(joint_groups)
    for member, orders in orders_by_member.items():
        for name, permutation in orders.items():
            members.order[name][member] = permutation[0]
    return members.order


def _sort_joint_groups(members: Members, joint_groups: list[str], key_kind: str, is_unsorted: Tensor) -> Tensor:
    """Sort the units of joint groups inside their blocks; return whether a member has ties left, (member).

    Args:
        is_unsorted: (member), whether a member still needs sorting.
    """
    table, last_group = members.table, joint_groups[-1]
    has_open_tie = torch.zeros_like(is_unsorted)
    last_keys = unit_keys(members, table.groups[last_group], key_kind)
    for name in reversed(joint_groups):
        group = table.groups[name]
        keys = last_keys
        if name != last_group:
            # A group without writers is sorted by the keys of the units inside its blocks, the largest key first.
            keys = _keys_of_blocks(last_keys, members.inner[last_group], group.size)
        order, cells = _sort_in_blocks(group, keys, is_unsorted & ~has_open_tie)
        if len(cells):
            has_open_tie |= break_ties(members, group, cells, order)
        members.set_order_in_blocks(joint_groups, name, order.reshape(len(members), -1))
    return has_open_tie


def _keys_of_blocks(keys: Keys, unit_order: Tensor, block_count: int) -> Keys:
    """Return a key for each of `block_count` blocks: the sorted keys of the block's units.

    Args:
        unit_order: (member, unit), the order of the units inside the blocks.
    """
    unit_keys_in_blocks = keys.of_all_units().gather(1, unit_order).reshape(len(unit_order), block_count, -1)
    may_tie = keys.may_tie if keys.tolerance else torch.eq
    return Keys(unit_keys_in_blocks[..., 0], may_tie, lambda m, u: unit_keys_in_blocks[m, u], keys.tolerance)


def _sort_in_blocks(group: Group, keys: Keys, is_unsorted: Tensor) -> tuple[Tensor, Cells]:
    """Sort units by keys inside their blocks; return the unit at each place, flat over members, and the ties."""
    member_count, units_per_block = len(keys.approximate_keys), group.size // group.blocks
    sorted_keys, order_in_blocks = keys.approximate_keys.reshape(member_count, group.blocks, units_per_block).sort(
        dim=-1, stable=True
    )
    order = (
        order_in_blocks + torch.arange(0, group.size, units_per_block, device=order_in_blocks.device)[:, None]
    ).flatten()
    ties_with_right = keys.may_tie(sorted_keys[..., :-1], sorted_keys[..., 1:]) & is_unsorted[:, None, None]
    ties_with_previous = torch.zeros_like(order_in_blocks, dtype=torch.bool)
    ties_with_next = torch.zeros_like(ties_with_previous)
    ties_with_previous[..., 1:] = ties_with_next[..., :-1] = ties_with_right
    tied_places = (ties_with_previous | ties_with_next).flatten().nonzero()[:, 0]
    member_of_place = tied_places.div(group.size, rounding_mode="floor")
    cells = Cells(
        order[tied_places], member_of_place, (~ties_with_previous).flatten().cumsum(0)[tied_places], tied_places
    )
    if keys.exact_keys is not None and len(cells):
        exact_keys = keys.exact_keys(member_of_place, cells.unit)
        cells.split(exact_keys.reshape(len(cells), -1), keys.tolerance)
        order[cells.place] = cells.unit
        cells = cells.select(~are_alone(cells))
    return order, cells


def _initial_colours(member: Members, joint_groups: list[str], key_kind: str) -> Colours:
    """Return a colour (whole number) for each unit of one member: units with equal keys get equal colours."""
    group = member.table.groups[joint_groups[-1]]
    keys = unit_keys(member, group, key_kind).of_all_units()[0]
    if member.tolerance:
        return {group.name: number_close_values(keys, torch.zeros_like(keys), member.tolerance)}
    return {group.name: torch.unique(keys, return_inverse=True)[1]}


@dataclass(frozen=True)
class Keys:
    """The sorting keys of the units of a group.

    Args:
        approximate_keys: (member, unit), numbers whose order is the order of the keys, except for possible ties.
        may_tie: function (values of `approximate_keys`, next larger values) -> whether the two keys may be equal or in
            the other order.
        exact_keys: function (members (unit), units (unit)) -> keys, whole numbers (unit); None if `approximate_keys`
            holds the keys.
        tolerance: largest difference of keys that count as equal, as a share of the larger key, see
            `slices.number_close_values`.
    """

    approximate_keys: Tensor
    may_tie: Callable[[Tensor, Tensor], Tensor] = torch.eq
    exact_keys: Callable[[Tensor, Tensor], Tensor] | None = None
    tolerance: float = 0.0

    def of_all_units(self) -> Tensor:
        """Return the keys of all units, (member, unit)."""
        if self.exact_keys is None:
            return self.approximate_keys
        members, size = self.approximate_keys.shape
        m, u = _all_units(members, size, self.approximate_keys.device)
        return self.exact_keys(m, u).reshape(self.approximate_keys.shape)


def unit_keys(members: Members, group: Group, key_kind: str) -> Keys:
    """Return the keys of the units of a group, in the tensor of its first writer.

    Args:
        key_kind: kind of the sorting key, "first", "max" or "norm".
    """
    if not group.writers:
        return Keys(torch.zeros(len(members), group.size, dtype=torch.int64, device=members.device))
    name, axis = group.writers[0]
    move = next(m for m in members.table.tensors[name].moves if m.group == group.name and m.axis == axis)
    placement = Placement(name, move, 1)
    if members.tolerance:
        are_equal = partial(are_close, tolerance=members.tolerance)
        return Keys(_rough_keys(members, group, placement, key_kind), are_equal, tolerance=members.tolerance)
    if key_kind == "first":
        return Keys(_first_codes(members, group, placement))
    rows = _writer_rows(members, group, placement)
    if key_kind == "max":
        largest_entries = rows.amax(-1)
        return Keys(~ordered_bits(largest_entries.where(largest_entries != 0, 0)))
    sum_dtype = torch.float64 if rows.itemsize > 4 else torch.float32
    # The relative and the absolute rounding error of a sum of squares.
    relative_error, absolute_error = (
        3 * (_ENTRIES_PER_RUN + 4) * torch.finfo(sum_dtype).eps,
        1e16 * torch.finfo(sum_dtype).tiny,
    )

    def may_tie(smaller_value: Tensor, larger_value: Tensor) -> Tensor:
        return ~(-smaller_value > -larger_value * (1 + relative_error) + absolute_error)

    return Keys(
        -_rough_squares(rows, sum_dtype), may_tie, lambda m, u: ~ordered_bits(_exact_squares(members, placement, m, u))
    )


def _writer_rows(members: Members, group: Group, placement: Placement) -> Tensor:
    """Return the rows of units, (member, unit, entry)."""
    axis, move = placement.move.axis, placement.move
    rows = members.params[placement.tensor].narrow(axis + 1, move.offset, group.size * move.span).movedim(axis + 1, 1)
    return rows.reshape(len(rows), group.size, -1)


def _rough_keys(members: Members, group: Group, placement: Placement, key_kind: str) -> Tensor:
    """Return keys that are compared within the tolerance of the members, float64 (member, unit)."""
    if key_kind == "first":
        return _first_codes(members, group, placement)
    rows = _writer_rows(members, group, placement).double()
    return -(rows.amax(-1) if key_kind == "max" else torch.linalg.vector_norm(rows, dim=-1))


def _first_codes(members: Members, group: Group, placement: Placement) -> Tensor:
    slices, (m, u) = Slices(members, placement), _all_units(len(members), group.size, members.device)
    codes = slices.codes(m, u, 0, 1) if slices.labels is None else slices.sort_unordered(slices.codes(m, u))[:, :1]
    return codes.reshape(len(members), group.size)


def _all_units(member_count: int, unit_count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the member and the number of each unit of all members, (member * unit) each."""
    m = torch.arange(member_count, device=device).repeat_interleave(unit_count)
    return m, torch.arange(unit_count, device=device).repeat(member_count)


def _rough_squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums of squares over the last axis: short runs in `dtype`, then the sums of runs in float64."""
    flat_rows, length = rows.flatten(0, 1), rows.shape[2]
    entries_in_runs = length // _ENTRIES_PER_RUN * _ENTRIES_PER_RUN
    result = torch.empty(len(flat_rows), dtype=torch.float64, device=rows.device)
    rows_at_once = max(1, _SQUARES_AT_ONCE // max(1, length))
    square_buffer = torch.empty(min(rows_at_once, len(flat_rows)), length, dtype=dtype, device=rows.device)
    for start in range(0, len(flat_rows), rows_at_once):
        row_chunk = flat_rows[start : start + rows_at_once]
        squares = square_buffer[: len(row_chunk)].copy_(row_chunk).square_()
        row_sums = squares[:, entries_in_runs:].sum(1).double()
        if entries_in_runs:
            runs = squares[:, :entries_in_runs].reshape(len(row_chunk), -1, _ENTRIES_PER_RUN)
            row_sums += runs.sum(2).sum(1, dtype=torch.float64)
        result[start : start + rows_at_once] = row_sums
    return result.reshape(rows.shape[:2])


def _exact_squares(members: Members, placement: Placement, member_of: Tensor, units: Tensor) -> Tensor:
    """Return the sum of squares of each unit's slice in float64, (unit).

    Equal rows need equal norms, bit for bit. Each row is therefore summed by the same operations, in an order that
    does not depend on permutations or on the place of the row. The sum functions of torch do not promise equal sums for
    equal rows.

    Args:
        members: the stacked members.
        placement: axis of a tensor that has the group's units.
        member_of: (unit), index of the member that each unit belongs to.
        units: (unit), index of each unit in its group.
    """
    axes = members.table.tensors[placement.tensor]
    last_moved_axis = max(move.axis for move in axes.moves)
    entries_per_row = prod(axes.shape[last_moved_axis + 1 :])
    rows = members.params[placement.tensor].reshape(-1, entries_per_row)
    slices = Slices(members, placement, len(axes.shape) - last_moved_axis - 1)
    result = torch.empty(len(member_of), dtype=torch.float64, device=member_of.device)
    units_at_once = max(1, _GATHERED_AT_ONCE // max(1, len(slices) * entries_per_row))
    for start in range(0, len(member_of), units_at_once):
        row_numbers = slices.entries(member_of[start : start + units_at_once], units[start : start + units_at_once])
        row_sums = _sum_row_squares(rows[row_numbers.flatten()]).reshape(row_numbers.shape)
        result[start : start + units_at_once] = _fold_sum(slices.sort_unordered(row_sums))
    return result


def _sum_row_squares(rows: Tensor) -> Tensor:
    """Return the sums of squares of rows (row, entry) in float64."""
    if rows.shape[1] > _SHORT_ROW:
        return _fold_sum(rows.to(torch.float64, copy=True).square_())
    row_sums = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for i in range(rows.shape[1]):
        row_sums += rows[:, i].to(torch.float64, copy=True).square_()
    return row_sums


def _fold_sum(rows: Tensor) -> Tensor:
    """Sum rows (row, entry) in place by repeatedly adding their last half to their first half; return the sums."""
    length = rows.shape[1]
    while length > 1:
        half_length = length // 2
        rows[:, :half_length] += rows[:, length - half_length : length]
        length -= half_length
    return rows[:, 0]
