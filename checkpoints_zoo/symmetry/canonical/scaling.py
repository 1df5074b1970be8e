"""Unit-norm scaling: the weights of each unit get norm 1, and the gain of each norm becomes 1 or -1.

As in the code of Laurent et al. 2024 (arXiv 2310.08287), the columns of a row are first divided by the scales of their
inputs, and a bias is scaled together with its row but does not count in the norm of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import count_stacked_members, rescale_tensor
from checkpoints_zoo.symmetry.table import Axes, Power, Scale, Table

_SQUARES_AT_ONCE = 1 << 21  # Largest number of entries squared at once (16 MB).


class UnitNorm(NamedTuple):
    """Scaled members.

    Args:
        tensors: rescaled parameters, name -> (member, *shape).
        scales: scale -> float64 (member, value), the applied factors.
        unscaled: scale -> (member, value), whether a row is 0, or too small for a norm of 1 in its dtype. The factor of
            a row that is 0 or too small is 1, so that members which differ only in the scales of such rows stay
            different.
    """

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]
    unscaled: dict[str, Tensor]


def unit_norm(table: Table, params: Mapping[str, Tensor], *, approximate: bool = False) -> UnitNorm:
    """Scale each unit so that the row of its first writer has L2 norm 1; return the tensors and the scales.

    The first writer of a scale is a kernel or a norm's gain. Such a gain becomes 1 or -1. All weights that share a
    factor count as one row. The network's function stays the same: a running variance v becomes (v + eps) λ² - eps.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), including all tensors with scales. Tensors of narrower dtypes than
            float32 are returned in float32, because rounding the scaled weights to float16 would change the function.
        approximate: whether to change approximate scales as well. Approximate scales keep the network's function only
            if the norms have eps = 0.

    Raises:
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.
        UsageError: the tensors have no member axis, or a scale has no row of weights.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[3.0, 4.0]]]), "2.weight": torch.tensor([[[2.0]]])}
    >>> tensors, scales, unscaled = unit_norm(symmetries(net, torch.zeros(1, 2)), weights)
    >>> [round(float(t), 6) for t in (*tensors["0.weight"].flatten(), tensors["2.weight"], scales["0"])]
    [0.6, 0.8, 10.0, 0.2]
    """
    scales_to_fix = {name: scale for name, scale in table.scales.items() if scale.exact or approximate}
    check_rows(table, approximate)
    if params:
        count_stacked_members(table, params)
    for name, axes in table.tensors.items():
        if name not in params and any(exponent.scale in scales_to_fix for exponent in axes.powers):
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    scales: dict[str, Tensor] = {}
    is_unscaled: dict[str, Tensor] = {}
    for name, scale in _topological_order(table, scales_to_fix):
        norms, exponent, smallest_norm = _row_norms(table, params, scale, scales)
        is_unscaled[name] = ~(norms > smallest_norm)
        scales[name] = torch.where(is_unscaled[name], 1.0, norms.pow(-1 / exponent))
    tensors = {
        name: rescale_tensor(table.tensors[name], _widen_to_float32(tensor), scales) for name, tensor in params.items()
    }
    for name, scale in scales_to_fix.items():
        _round_to_signs(table, tensors, scale, is_unscaled[name])
    return UnitNorm(tensors, scales, is_unscaled)


def check_rows(table: Table, approximate: bool) -> None:
    """Refuse scales without rows of weights of their own, as inside a product of two parameters (W + B @ A).

    Raises:
        UsageError: a scale has no row of weights.
    """
    for name, scale in table.scales.items():
        if (scale.exact or approximate) and not scale.writers:
            raise UsageError(
                "scale",
                expected="None: 'unit-norm' needs a row of weights for each scale",
                found=f"scale {name!r} of {table.network} inside a product of parameters",
                do="Multiply the parameters first, and give the product as one weight",
            )


def _topological_order(table: Table, scales: Mapping[str, Scale]) -> Iterator[tuple[str, Scale]]:
    """Yield scales in topological order: each scale after the other scales that multiply the rows of its first
    writer."""
    remaining_scales = dict(scales)
    while remaining_scales:
        ready_scales = (
            name
            for name, scale in remaining_scales.items()
            if not _scales_of_rows(table, scale) & remaining_scales.keys()
        )
        name = next(ready_scales, next(iter(remaining_scales)))
        yield name, remaining_scales.pop(name)


def _scales_of_rows(table: Table, scale: Scale) -> set[str]:
    """Return the other scales that multiply the rows of the first writer of a scale."""
    (name, axis), *_ = scale.writers
    axes = table.tensors[name]
    row_entries = {entry for p in _row_powers(axes, scale, axis) for entry in range(p.offset, p.offset + p.length)}
    return {
        p.scale
        for p in axes.powers
        if p.scale != scale.name
        and (p.axis != axis or not row_entries.isdisjoint(range(p.offset, p.offset + p.length)))
    }


def _round_to_signs(table: Table, tensors: Mapping[str, Tensor], scale: Scale, is_unscaled: Tensor) -> None:
    """Round rows of one entry, such as gains, to exactly 1 or -1."""
    (name, axis), *_ = scale.writers
    (power, *more), tensor = _row_powers(table.tensors[name], scale, axis), tensors[name]
    if not more and prod(tensor.shape[1:]) == power.length == scale.size:
        tensor.copy_(tensor.where(is_unscaled.reshape(tensor.shape), tensor.sign()))


def _widen_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _row_norms(
    table: Table, params: Mapping[str, Tensor], scale: Scale, scales: Mapping[str, Tensor]
) -> tuple[Tensor, float, float]:
    """Return the norms of the rows that a scale multiplies, (member, value), its exponent in these norms, and the
    largest norm that counts as 0."""
    (name, axis), *_ = scale.writers
    axes, tensor = table.tensors[name], params[name]
    row_powers = _row_powers(axes, scale, axis)
    squares = _sum_squares(axes, tensor)
    leading_shape = squares.shape[1:]
    doubled_powers = tuple(Power(p.axis, p.scale, 2 * p.power, p.offset, p.length, p.within) for p in axes.powers)
    squares = rescale_tensor(Axes(tuple(leading_shape), axes.role, 0.0, (), doubled_powers), squares, scales)
    squared_norms = torch.zeros(len(tensor), scale.size, dtype=torch.float64, device=tensor.device)
    for power in row_powers:
        squares_of_rows = squares.narrow(axis + 1, power.offset, power.length).movedim(axis + 1, 1)
        squared_norms += squares_of_rows.reshape(
            len(tensor), scale.size, prod(squares_of_rows.shape[1:]) // scale.size
        ).sum(-1)
    # The square of a scale has to stay in the range of the dtype: running variances are multiplied by it.
    smallest_norm = torch.finfo(_widen_to_float32(tensor).dtype).tiny ** 0.5
    return squared_norms.sqrt(), row_powers[0].power, smallest_norm


def _row_powers(axes: Axes, scale: Scale, axis: int) -> list[Power]:
    """Return the powers of a scale along the rows of its first writer."""
    powers = [p for p in axes.powers if p.scale == scale.name and p.axis == axis]
    return [p for p in powers if p.power == max(p.power for p in powers)]


def _sum_squares(axes: Axes, tensor: Tensor) -> Tensor:
    """Return the squares of all entries, summed over the axes behind the last axis with a scale."""
    last_scaled_axis = max(power.axis for power in axes.powers)
    leading_shape = axes.shape[: last_scaled_axis + 1]
    result = torch.empty(len(tensor), *leading_shape, dtype=torch.float64, device=tensor.device)
    for member_slice in _member_chunks(len(tensor), prod(axes.shape)):
        wide_squares = tensor[member_slice].to(torch.float64, copy=True).square_()
        result[member_slice] = wide_squares.reshape(-1, *leading_shape, prod(axes.shape[last_scaled_axis + 1 :])).sum(
            -1
        )
    return result


def _member_chunks(member_count: int, entries_per_member: int) -> Iterator[slice]:
    step = max(1, _SQUARES_AT_ONCE // max(1, entries_per_member))
    return (slice(start, start + step) for start in range(0, member_count, step))
