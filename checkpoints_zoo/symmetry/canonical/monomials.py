"""The mass of a network as a sum of monomials in its scales.

Every squared entry of a tensor is multiplied by squares of powers of scales. Entries that share them are summed first
(a kernel over its window, a linear layer over the places that a flattened unit spans), which leaves a matrix over two
axes for each pair of scales, a vector for each scale alone, and a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.table import Axes, Power, Table

WEIGHTS = ("weight", "gain")
BIASES = ("bias", "offset")
_PIECE = 1 << 16  # entries squared at once: 512 KB


@dataclass(frozen=True)
class Part:
    """A scale's power along one side of a block.

    Args:
        scale: its name.
        power: of its values.
        units: (cell), which value each cell takes; None: cell c takes value c.
    """

    scale: str
    power: float
    units: Tensor | None


Side = tuple[Part, ...]


@dataclass
class Block:
    """Monomials of one kind: row r, column c has mass[:, r, c] times the squares of both sides' powers.

    Args:
        rows, columns: the powers along both; no parts: 1.
        mass: (member, row, column), not negative.
    """

    rows: Side
    columns: Side
    mass: Tensor


@dataclass
class Monomials:
    """The mass of stacked members as a function of their scales.

    Args:
        sizes: how many values each free scale has.
        blocks: whose sum it is, with the constant.
        constant: (member), what no free scale touches.
    """

    sizes: dict[str, int]
    blocks: list[Block]
    constant: Tensor


def collect(
    table: Table, params: Mapping[str, Tensor], names: Collection[str], free: Collection[str], dtype: torch.dtype
) -> Monomials:
    """Sum the squares of all entries that share their powers of scales; return the monomials.

    Args:
        table: of the network.
        params: name -> (member, *shape).
        names: of the tensors that have mass.
        free: names of the scales that may change; all others are 1.
        dtype: of the sums.
    """
    tensors = [params[name] for name in names]
    members, device = (len(tensors[0]), tensors[0].device) if tensors else (0, torch.device("cpu"))
    result = Monomials(
        {name: table.scales[name].size for name in free}, [], torch.zeros(members, dtype=dtype, device=device)
    )
    merged: dict[tuple[tuple[str, float], ...], Block] = {}
    for name, tensor in zip(names, tensors, strict=True):
        axes = table.tensors[name]
        powers = tuple(power for power in axes.powers if power.scale in result.sizes)
        if not powers:
            result.constant += _squares(tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None], dtype)
            continue
        for block in _blocks(axes, powers, table, tensor, dtype):
            parts = (*block.rows, *block.columns)
            key = tuple((part.scale, part.power) for part in parts)
            if not parts:
                result.constant += block.mass.sum((1, 2))
            elif any(part.units is not None for part in parts):
                result.blocks.append(block)
            elif key in merged:
                merged[key].mass += block.mass
            else:
                result.blocks.append(merged.setdefault(key, block))
    return result


def _squares(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum squares over the last axis in a wider dtype, a piece that fits the cache at a time; return the sums."""
    *shape, length = tensor.shape
    rows = tensor.reshape(-1, length)
    sums = torch.empty(len(rows), dtype=dtype, device=tensor.device)
    if length == 1:
        return sums.copy_(rows[:, 0]).square_().reshape(shape)
    step, ones = max(1, _PIECE // max(1, length)), torch.ones(length, dtype=dtype, device=tensor.device)
    wide = torch.empty(min(step, len(rows)), length, dtype=dtype, device=tensor.device)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        torch.mv(wide[: len(piece)].copy_(piece).square_(), ones, out=sums[start : start + step])
    return sums.reshape(shape)


def _blocks(axes: Axes, powers: tuple[Power, ...], table: Table, tensor: Tensor, dtype: torch.dtype) -> Iterator[Block]:
    """Sum a tensor's squares; yield its blocks, one unless its powers leave out entries."""
    whole = all(p.length == axes.shape[p.axis] and not p.within for p in powers)
    if not whole or len({p.axis for p in powers}) != len(powers) or len(powers) > 2:
        yield from _irregular(axes, powers, table, tensor, dtype)
        return
    powers = tuple(sorted(powers, key=lambda power: power.axis))
    # (member, before, value, span, between, value, span, behind): sums over all but members and values.
    view, start = [len(tensor)], 0
    for power in powers:
        size = table.scales[power.scale].size
        view += [prod(axes.shape[start : power.axis]), size, power.length // size]
        start = power.axis + 1
    kept = [0, 2] if len(powers) == 1 else [0, 2, 5]
    view.append(prod(axes.shape[start:]))
    others = [i for i in range(len(view)) if i not in kept]
    mass = _squares(tensor.reshape(view).permute(*kept, *others).flatten(len(kept)), dtype)
    rows, *columns = [(Part(p.scale, p.power, None),) for p in powers]
    yield Block(rows, columns[0] if columns else (), mass if columns else mass[..., None])


def _irregular(
    axes: Axes, powers: tuple[Power, ...], table: Table, tensor: Tensor, dtype: torch.dtype
) -> Iterator[Block]:
    """Sum a tensor's squares over cells, entries of which all powers have one value each; yield blocks of one column.

    That is for kernels whose inputs several layers write, grouped kernels, and products of scales.
    """
    scaled = sorted({p.axis for p in powers} | ({0} if any(p.within for p in powers) else set()))
    lengths = [axes.shape[i] for i in scaled]
    others = [i + 1 for i in range(len(axes.shape)) if i not in scaled]
    summed = tensor.permute(0, *(i + 1 for i in scaled), *others).reshape(len(tensor), prod(lengths), -1)
    grid = torch.meshgrid(*map(torch.arange, lengths), indexing="ij")
    units = []
    for power in powers:
        entry = grid[scaled.index(power.axis)] - power.offset
        if power.within:
            per_block = axes.shape[0] // power.within
            entry = entry + grid[0].div(per_block, rounding_mode="floor") * axes.shape[power.axis]
        inside = (entry >= 0) & (entry < power.length)
        value = (entry * table.scales[power.scale].size).div(power.length, rounding_mode="floor")
        units.append(torch.where(inside, value, -1).flatten())
    cells, places = torch.unique(torch.stack(units), dim=1, return_inverse=True)
    mass = torch.zeros(len(tensor), cells.shape[1], dtype=dtype, device=tensor.device)
    mass.index_add_(1, places.to(tensor.device), _squares(summed, dtype))
    for pattern in torch.unique(cells >= 0, dim=1).T:
        chosen = ((cells >= 0) == pattern[:, None]).all(0).nonzero()[:, 0]
        side = _merged(
            Part(p.scale, p.power, cells[i, chosen].to(tensor.device)) for i, p in enumerate(powers) if pattern[i]
        )
        yield Block(side, (), mass[:, chosen.to(tensor.device), None])


def _merged(parts: Iterable[Part]) -> Side:
    """Add the powers of a scale that fall on the same cells; return what is left."""
    result: list[Part] = []
    for part in parts:
        for i, other in enumerate(result):
            if other.scale == part.scale and torch.equal(_known(other), _known(part)):
                result[i] = Part(part.scale, part.power + other.power, part.units)
                break
        else:
            result.append(part)
    return tuple(part for part in result if part.power)


def _known(part: Part) -> Tensor:
    return torch.empty(0) if part.units is None else part.units
