"""The mass of a network as a sum of monomials in its scales.

Scales multiply each squared entry of a tensor by a product of powers. Entries with the same product are summed first (a
kernel over its window, a linear layer over the span of each flattened unit). After this sum, there is one matrix for
each pair of scales, one vector for each single scale, and a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.table import Axes, Power, Table

WEIGHT_ROLES = ("weight", "gain")
BIAS_ROLES = ("bias", "offset")
_ENTRIES_AT_ONCE = 1 << 16  # Largest number of entries squared at once (512 KB).


@dataclass(frozen=True)
class ScalePower:
    """The power of a scale along one axis of a block.

    Args:
        scale: name of the scale along the axis.
        power: exponent of the scale's values.
        units: (cell), index of the scale's value in each cell; None: cell c has value c.
    """

    scale: str
    power: float
    units: Tensor | None


PowerProduct = tuple[ScalePower, ...]


@dataclass
class Block:
    """A matrix of monomials: mass[:, r, c] times the squared product of the powers of row r and column c.

    Args:
        rows: powers of scales along the rows; empty if no scale acts on rows.
        columns: powers of scales along the columns; empty if no scale acts on columns.
        mass: sums of squared weights, (member, row, column).
    """

    rows: PowerProduct
    columns: PowerProduct
    mass: Tensor


@dataclass
class Monomials:
    """The mass of stacked members as a function of their scales.

    Args:
        sizes: name of each free scale -> number of its values.
        blocks: the blocks. The mass of a member is the sum of all blocks plus the constant.
        constant: (member), the mass that no free scale changes.
    """

    sizes: dict[str, int]
    blocks: list[Block]
    constant: Tensor


def collect_monomials(
    table: Table,
    params: Mapping[str, Tensor],
    tensor_names: Collection[str],
    free_scales: Collection[str],
    dtype: torch.dtype,
) -> Monomials:
    """Sum the squares of all entries that share their powers of scales; return the monomials.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape).
        tensor_names: names of the tensors with mass.
        free_scales: names of the free scales. All other scales are 1.
        dtype: dtype in which squares are summed.
    """
    tensors = [params[name] for name in tensor_names]
    member_count, device = (len(tensors[0]), tensors[0].device) if tensors else (0, torch.device("cpu"))
    result = Monomials(
        {name: table.scales[name].size for name in free_scales},
        [],
        torch.zeros(member_count, dtype=dtype, device=device),
    )
    block_of_powers: dict[tuple[tuple[str, float], ...], Block] = {}
    for name, tensor in zip(tensor_names, tensors, strict=True):
        axes = table.tensors[name]
        powers = tuple(power for power in axes.powers if power.scale in result.sizes)
        if not powers:
            result.constant += _sum_squares(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None], dtype)
            continue
        for block in _sum_into_blocks(axes, powers, table, tensor, dtype):
            scale_powers = (*block.rows, *block.columns)
            powers_key = tuple((scale_power.scale, scale_power.power) for scale_power in scale_powers)
            if not scale_powers:
                result.constant += block.mass.sum((1, 2))
            elif any(scale_power.units is not None for scale_power in scale_powers):
                result.blocks.append(block)
            elif powers_key in block_of_powers:
                block_of_powers[powers_key].mass += block.mass
            else:
                result.blocks.append(block_of_powers.setdefault(powers_key, block))
    return result


def _sum_squares(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum squares over the last axis in `dtype`, in pieces that fit into the cache; return the sums."""
    *shape, length = tensor.shape
    rows = tensor.reshape(-1, length)
    sums = torch.empty(len(rows), dtype=dtype, device=tensor.device)
    if length == 1:
        return sums.copy_(rows[:, 0]).square_().reshape(shape)
    rows_at_once, ones = (
        max(1, _ENTRIES_AT_ONCE // max(1, length)),
        torch.ones(length, dtype=dtype, device=tensor.device),
    )
    square_buffer = torch.empty(min(rows_at_once, len(rows)), length, dtype=dtype, device=tensor.device)
    for start in range(0, len(rows), rows_at_once):
        piece = rows[start : start + rows_at_once]
        torch.mv(square_buffer[: len(piece)].copy_(piece).square_(), ones, out=sums[start : start + rows_at_once])
    return sums.reshape(shape)


def _sum_into_blocks(
    axes: Axes, powers: tuple[Power, ...], table: Table, tensor: Tensor, dtype: torch.dtype
) -> Iterator[Block]:
    """Sum the squares of a tensor; yield its blocks: one block, unless some powers leave out entries."""
    powers_cover_axes = all(p.length == axes.shape[p.axis] and not p.within for p in powers)
    if not powers_cover_axes or len({p.axis for p in powers}) != len(powers) or len(powers) > 2:
        yield from _sum_squares_in_cells(axes, powers, table, tensor, dtype)
        return
    powers = tuple(sorted(powers, key=lambda power: power.axis))
    # The axes are (member, before, value, span, between, value, span, behind): sum over all axes except members and
    # values.
    view_shape, start = [len(tensor)], 0
    for power in powers:
        size = table.scales[power.scale].size
        view_shape += [prod(axes.shape[start : power.axis]), size, power.length // size]
        start = power.axis + 1
    kept_axes = [0, 2] if len(powers) == 1 else [0, 2, 5]
    view_shape.append(prod(axes.shape[start:]))
    summed_axes = [i for i in range(len(view_shape)) if i not in kept_axes]
    mass = _sum_squares(tensor.reshape(view_shape).permute(*kept_axes, *summed_axes).flatten(len(kept_axes)), dtype)
    rows, *columns = [(ScalePower(p.scale, p.power, None),) for p in powers]
    yield Block(rows, columns[0] if columns else (), mass if columns else mass[..., None])


def _sum_squares_in_cells(
    axes: Axes, powers: tuple[Power, ...], table: Table, tensor: Tensor, dtype: torch.dtype
) -> Iterator[Block]:
    """Sum the squares of a tensor over cells, in which each power has one value; yield blocks of one column.

    Cells are needed for kernels whose inputs several layers write, for grouped kernels, and for products of scales.
    """
    scaled_axes = sorted({p.axis for p in powers} | ({0} if any(p.within for p in powers) else set()))
    scaled_lengths = [axes.shape[i] for i in scaled_axes]
    other_axes = [i + 1 for i in range(len(axes.shape)) if i not in scaled_axes]
    entries_by_cell = tensor.permute(0, *(i + 1 for i in scaled_axes), *other_axes).reshape(
        len(tensor), prod(scaled_lengths), -1
    )
    grid = torch.meshgrid(*map(torch.arange, scaled_lengths), indexing="ij")
    units = []
    for power in powers:
        entry = grid[scaled_axes.index(power.axis)] - power.offset
        if power.within:
            rows_per_block = axes.shape[0] // power.within
            entry = entry + grid[0].div(rows_per_block, rounding_mode="floor") * axes.shape[power.axis]
        is_scaled = (entry >= 0) & (entry < power.length)
        unit = (entry * table.scales[power.scale].size).div(power.length, rounding_mode="floor")
        units.append(torch.where(is_scaled, unit, -1).flatten())
    cells, cell_of_entry = torch.unique(torch.stack(units), dim=1, return_inverse=True)
    mass = torch.zeros(len(tensor), cells.shape[1], dtype=dtype, device=tensor.device)
    mass.index_add_(1, cell_of_entry.to(tensor.device), _sum_squares(entries_by_cell, dtype))
    for has_power in torch.unique(cells >= 0, dim=1).T:
        chosen_cells = ((cells >= 0) == has_power[:, None]).all(0).nonzero()[:, 0]
        scale_powers = _merge_powers(
            ScalePower(p.scale, p.power, cells[i, chosen_cells].to(tensor.device))
            for i, p in enumerate(powers)
            if has_power[i]
        )
        yield Block(scale_powers, (), mass[:, chosen_cells.to(tensor.device), None])


def _merge_powers(scale_powers: Iterable[ScalePower]) -> PowerProduct:
    """Add the powers of one scale on the same cells; return the powers that are not 0."""
    result: list[ScalePower] = []
    for part in scale_powers:
        for i, other in enumerate(result):
            if other.scale == part.scale and torch.equal(_units_or_empty(other), _units_or_empty(part)):
                result[i] = ScalePower(part.scale, part.power + other.power, part.units)
                break
        else:
            result.append(part)
    return tuple(part for part in result if part.power)


def _units_or_empty(scale_power: ScalePower) -> Tensor:
    return torch.empty(0) if scale_power.units is None else scale_power.units
