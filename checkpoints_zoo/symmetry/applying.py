"""Apply symmetries to parameters: pure functions on the tensors of one member or of stacked members.

The shapes of tensors, compared with the shapes in the table, show whether the tensors have a leading member axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.elements import Element, check_symmetry
from checkpoints_zoo.symmetry.matrices import turn
from checkpoints_zoo.symmetry.shifting import shift
from checkpoints_zoo.symmetry.table import Axes, Move, Table

_INDICES_AT_ONCE = 1 << 18  # Largest number of indices in one gather: their 2 MB fit into the cache.


def apply(table: Table, params: Mapping[str, Tensor], element: Element) -> dict[str, Tensor]:
    """Apply a symmetry to tensors: shifts, matrices, scales, signs, then permutations; return new tensors in the same
    dtypes.

    See `shift`, `turn`, `rescale`, `flip` and `permute` for the arguments and errors.
    """
    if element.matrices or element.shifts:
        check_element(table, element, count_members(table, params))
    shifted = shift(table, params, element.shifts) if element.shifts else params
    turned = turn(table, shifted, element.matrices) if element.matrices else shifted
    return permute(table, flip(table, rescale(table, turned, element.scales), element.signs), element.permutations)


def permute(table: Table, params: Mapping[str, Tensor], permutations: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Permute the units of each group along all axes that have these units; return the tensors. Tensors without a
    permuted axis are returned unchanged.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`, or `(member, *shape)` if stacked; names may be missing.
        permutations: group -> permutation, int64 (unit) for all members, or (member, unit): new unit u is the former
            unit permutation[u]. The units of all other groups keep their order.

    Raises:
        LayoutError: a tensor is unknown to the table or has another shape.
        UsageError: a permutation is invalid, or has another number of members than the tensors.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> table = symmetries(net, torch.zeros(1, 1))
    >>> swapped = permute(table, net.state_dict(), {"0": torch.tensor([1, 0])})
    >>> bool((swapped["2.weight"] == net[2].weight.flip(1)).all())
    True
    """
    check_symmetry(table, Element(permutations, {}))
    members = count_members(table, params)
    _check_members(members, permutations)
    return {name: permute_tensor(table.tensors[name], tensor, permutations) for name, tensor in params.items()}


def rescale(table: Table, params: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply tensors by powers of scales; return the products. Tensors without a scale are returned unchanged.

    A scale s turns a running variance v into (v + eps) * s**2 - eps. Products are computed in float32, or in float64
    for float64 tensors and variances, then rounded to the dtype of the tensor.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`, or `(member, *shape)` if stacked; names may be missing.
        scales: name of a scale -> positive factors (value) for all members, or (member, value). All other scales are 1.

    Raises:
        LayoutError: a tensor is unknown to the table or has another shape.
        UsageError: a scale is unknown, not positive, or has another number of members than the tensors.
    """
    check_symmetry(table, Element({}, scales))
    _check_members(count_members(table, params), scales)
    return {name: rescale_tensor(table.tensors[name], tensor, scales) for name, tensor in params.items()}


def flip(table: Table, params: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply tensors by signs; return the products. Tensors without a sign are returned unchanged.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`, or `(member, *shape)` if stacked; names may be missing.
        signs: name of a sign -> factors 1 or -1, (value) for all members, or (member, value). All other signs are 1.

    Raises:
        LayoutError: a tensor is unknown to the table or has another shape.
        UsageError: the table has no sign of this name, a value of a sign is not 1 or -1, or signs and tensors have
            different numbers of members.
    """
    check_symmetry(table, Element(signs=signs))
    _check_members(count_members(table, params), signs)
    return {name: flip_tensor(table.tensors[name], tensor, signs) for name, tensor in params.items()}


def flip_tensor(axes: Axes, tensor: Tensor, signs: Mapping[str, Tensor]) -> Tensor:
    """Multiply one tensor by its signs, as `flip` does for all tensors; return the product."""
    return rescale_tensor(Axes(axes.shape, axes.role, 0.0, axes.moves, axes.signs), tensor, signs)


def count_members(table: Table, params: Mapping[str, Tensor]) -> int | None:
    """Check tensors against a table; return the number of stacked members, or None if there is no member axis.

    Raises:
        LayoutError: a tensor is unknown to the table, has another shape, or stacks another number of members.
    """
    name_of_count: dict[int | None, str] = {}
    for name, tensor in params.items():
        if name not in table.tensors:
            raise LayoutError(f"tensor {name!r}", expected=f"a tensor of {table.network}", found="another", tensor=name)
        shape, leading_axis_count = table.tensors[name].shape, tensor.ndim - len(table.tensors[name].shape)
        if leading_axis_count not in (0, 1) or tuple(tensor.shape[leading_axis_count:]) != shape:
            raise LayoutError(
                f"tensor {name!r}",
                expected=f"{shape}, or (member, *{shape})",
                found=str(tuple(tensor.shape)),
                tensor=name,
            )
        name_of_count.setdefault(len(tensor) if leading_axis_count else None, name)
    if len(name_of_count) > 1:
        (first_count, first_name), (second_count, second_name) = list(name_of_count.items())[:2]
        descriptions = [
            f"{n!r} of {'one member' if m is None else f'{m} stacked'}"
            for m, n in ((first_count, first_name), (second_count, second_name))
        ]
        raise LayoutError(
            "tensors", expected="one number of members", found=" and ".join(descriptions), tensor=second_name
        )
    return next(iter(name_of_count), None)


def count_stacked_members(table: Table, params: Mapping[str, Tensor]) -> int:
    """Check stacked tensors against a table; return the number of members.

    Raises:
        LayoutError: for the same reasons as in `count_members`.
        UsageError: the tensors have no member axis.
    """
    member_count = count_members(table, params)
    if member_count is None:
        raise UsageError(
            "tensors", expected="(member, *shape)", found="no member axis", do="Stack them: tensor[None] of one"
        )
    return member_count


def check_unstacked(table: Table, params: Mapping[str, Tensor], name_in_errors: str) -> None:
    """Check that tensors have no member axis.

    Args:
        name_in_errors: name of the tensors in the text of the error.

    Raises:
        LayoutError: for the same reasons as in `count_members`.
        UsageError: the tensors have a member axis.
    """
    if count_members(table, params) is not None:
        raise UsageError(name_in_errors, expected="one network without a member axis", found="stacked tensors")


def check_element(table: Table, element: Element, member_count: int | None) -> None:
    """Check that an element belongs to the symmetry group of a table, and has a row for each member.

    Raises:
        UsageError: the element does not belong to the group, or has another number of rows.
    """
    check_symmetry(table, element)
    _check_members(member_count, element.permutations)
    _check_members(member_count, element.scales)
    _check_members(member_count, element.signs)
    _check_members(member_count, element.shifts)
    _check_members(member_count, {name: values.flatten(-3) for name, values in element.matrices.items()})


def _check_members(member_count: int | None, values_by_name: Mapping[str, Tensor]) -> None:
    for name, value in values_by_name.items():
        if value.ndim == 2 and len(value) != member_count:
            found = f"{len(value)} for {'one member without a member axis' if member_count is None else member_count}"
            raise UsageError(f"values of {name!r}", expected="as many rows as members", found=found)


def permute_tensor(axes: Axes, tensor: Tensor, permutations: Mapping[str, Tensor]) -> Tensor:
    """Permute the axes of one tensor, as `permute` does for all tensors; return the tensor."""
    moves = [move for move in axes.moves if move.group in permutations]
    if not moves:
        return tensor
    leading_axis_count = tensor.ndim - len(axes.shape)
    source_entries_by_axis = {
        i: source_entries(axes, i, moves, permutations, tensor.device) for i in {move.axis for move in moves}
    }
    if all(source_entries_by_axis[i].ndim == 1 for i in source_entries_by_axis):
        for i, index in source_entries_by_axis.items():
            tensor = tensor.index_select(i + leading_axis_count, index)
        return tensor
    return _gather_rows(axes, tensor, source_entries_by_axis)


def source_entries(
    axes: Axes, axis: int, moves: list[Move], permutations: Mapping[str, Tensor], device: torch.device
) -> Tensor:
    """Return the position before the permutation of each entry of an axis: (entry) or (member, entry); (member, row,
    entry) for the input axis of a grouped kernel."""
    size = axes.shape[axis]
    entries_of_runs, next_entry = [], 0
    moves_on_axis = sorted((m for m in moves if m.axis == axis), key=lambda m: m.offset)
    if (
        moves_on_axis[0].span == 1
        and not moves_on_axis[0].within
        and permutations[moves_on_axis[0].group].shape[-1] == size
    ):
        return permutations[moves_on_axis[0].group].to(device)
    for move in moves_on_axis:
        p = permutations[move.group].to(device)
        if move.within:
            # The rows of a block share their entries, so (member, block, column) is repeated for each row of a block.
            columns = p.reshape(*p.shape[:-1], move.within, size) % size
            return columns.reshape(-1, move.within, size).repeat_interleave(axes.shape[0] // move.within, 1)
        entries = (p[..., None] * move.span + torch.arange(move.span, device=device)).flatten(-2) + move.offset
        entries_of_runs += [torch.arange(next_entry, move.offset, device=device), entries]
        next_entry = move.offset + entries.shape[-1]
    entries_of_runs.append(torch.arange(next_entry, size, device=device))
    leading_shape = max((run_entries.shape[:-1] for run_entries in entries_of_runs), key=len)
    return torch.cat([run_entries.expand(*leading_shape, -1) for run_entries in entries_of_runs], -1)


def _gather_rows(axes: Axes, tensor: Tensor, source_entries_by_axis: Mapping[int, Tensor]) -> Tensor:
    """Permute the rows of a tensor; return the new tensor. A row holds all entries behind the last permuted axis."""
    stacked = tensor if tensor.ndim > len(axes.shape) else tensor[None]
    last_permuted_axis = max(source_entries_by_axis)
    rows_per_member, width = prod(axes.shape[: last_permuted_axis + 1]), prod(axes.shape[last_permuted_axis + 1 :])
    source_rows = stacked.reshape(-1, width)
    members_at_once = max(1, _INDICES_AT_ONCE // rows_per_member)
    member_ranges = [
        range(start, min(start + members_at_once, len(stacked))) for start in range(0, len(stacked), members_at_once)
    ]
    if tensor.requires_grad:
        return torch.cat(
            [source_rows.index_select(0, _row_indices(axes, source_entries_by_axis, c)) for c in member_ranges]
        ).reshape(tensor.shape)
    result = torch.empty_like(source_rows)
    for c in member_ranges:
        torch.index_select(
            source_rows,
            0,
            _row_indices(axes, source_entries_by_axis, c),
            out=result[c.start * rows_per_member : c.stop * rows_per_member],
        )
    return result.reshape(tensor.shape)


def _row_indices(axes: Axes, source_entries_by_axis: Mapping[int, Tensor], member_range: range) -> Tensor:
    """Return for each new row of some members the number of the old row; rows are numbered over all members."""
    device = next(iter(source_entries_by_axis.values())).device
    row_index = torch.arange(member_range.start, member_range.stop, device=device)
    for axis, size in enumerate(axes.shape[: max(source_entries_by_axis) + 1]):
        entries = source_entries_by_axis.get(axis, torch.arange(size, device=device))
        if entries.ndim > 1 and len(entries) > 1:
            entries = entries[member_range.start : member_range.stop]
        if entries.ndim == 2:
            entries = entries.reshape(-1, *[1] * axis, size)
        row_index = row_index[..., None] * size + entries
    return row_index.flatten()


def rescale_tensor(axes: Axes, tensor: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    """Multiply one tensor by its powers of scales, as `rescale` does for all tensors; return the product."""
    powers = [power for power in axes.powers if power.scale in scales]
    if not powers:
        return tensor
    leading_axis_count = tensor.ndim - len(axes.shape)
    dtype = torch.float64 if axes.shift or tensor.dtype == torch.float64 else torch.float32
    result = tensor.to(dtype, copy=True)
    if axes.shift:
        result += axes.shift
    for power in powers:
        values = scales[power.scale].to(tensor.device, torch.float64).pow(power.power).to(dtype)
        values = values.repeat_interleave(power.length // values.shape[-1], -1)
        if power.within:
            # The rows of a block share their entries, so (member, block, column) is repeated for each row of a block.
            columns = axes.shape[1]
            values_of_rows = torch.ones(*values.shape[:-1], power.within * columns, dtype=dtype, device=tensor.device)
            values_of_rows[..., power.offset : power.offset + power.length] = values
            values = values_of_rows.reshape(*values.shape[:-1], power.within, columns)
            values = values.repeat_interleave(axes.shape[0] // power.within, -2)
            scaled_part, behind_axis_count = result, len(axes.shape) - 2
        else:
            scaled_part = result.narrow(power.axis + leading_axis_count, power.offset, power.length)
            behind_axis_count = len(axes.shape) - power.axis - 1
            values = values.reshape(*values.shape[:-1], *[1] * power.axis, values.shape[-1])
        scaled_part *= values.reshape(*values.shape, *[1] * behind_axis_count)
    if axes.shift:
        result -= axes.shift
    return result.to(tensor.dtype)
