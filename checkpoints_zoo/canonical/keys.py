"""What units are sorted by: whole numbers whose rising order is the falling order of weights or norms."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.canonical.lines import Lines, Members, View, bits
from checkpoints_zoo.symmetry.table import Group

_CHUNK = 1 << 20  # entries squared at once: 8 MB
_SHORT = 32  # rows up to this length are summed entry by entry


def keys(members: Members, group: Group, key: str) -> Tensor:
    """Return the keys of a group's units in the tensor of its first writer, (member, unit).

    Args:
        key: "first", "max" or "norm".
    """
    name, axis = group.writers[0]
    axes = members.table.tensors[name]
    move = next(m for m in axes.moves if m.group == group.name and m.axis == axis)
    view = View(name, move, 1)
    if key == "max":
        rows = members.params[name].narrow(axis + 1, move.offset, group.size * move.span).movedim(axis + 1, 1)
        largest = rows.reshape(len(rows), group.size, -1).amax(-1)
        return ~bits(largest.where(largest != 0, 0))
    if key == "norm":
        return _norms(members, group, view)
    line, (m, u) = Lines(members, view), _units(0, len(members), group.size, members.device)
    codes = line.codes(m, u, 0, 1) if line.labels is None else line.settled(line.codes(m, u))[:, :1]
    return codes.reshape(len(members), group.size)


def _norms(members: Members, group: Group, view: View) -> Tensor:
    """Return keys by the sum of squares, in float64, summed in an order that no permutation changes."""
    tensor, axes = members.params[view.tensor], members.table.tensors[view.tensor]
    last = max(move.axis for move in axes.moves)
    lead, behind = axes.shape[: last + 1], prod(axes.shape[last + 1 :])
    line = Lines(members, view, len(axes.shape) - last - 1)
    result = torch.empty(len(members), group.size, dtype=torch.float64, device=tensor.device)
    step = max(1, _CHUNK // max(1, prod(axes.shape)))
    for start in range(0, len(members), step):
        rows = _summed(tensor[start : start + step].reshape(-1, behind))
        m, u = _units(start, min(start + step, len(tensor)), group.size, tensor.device)
        own = rows[line.entries(m, u) - start * prod(lead)]
        result[start : start + step] = _folded(line.settled(own)).reshape(-1, group.size)
    return ~bits(result)


def _units(start: int, stop: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return members and units of all members from start to stop, (member and unit)."""
    m = torch.arange(start, stop, device=device).repeat_interleave(size)
    return m, torch.arange(size, device=device).repeat(stop - start)


def _summed(rows: Tensor) -> Tensor:
    """Return the sums of squares of rows (row, entry) in float64.

    Each is summed by the same operations in the same order, wherever it lies: a library's sum need not do so.
    """
    if rows.shape[1] > _SHORT:
        return _folded(rows.to(torch.float64, copy=True).square_())
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for i in range(rows.shape[1]):
        total += rows[:, i].to(torch.float64, copy=True).square_()
    return total


def _folded(rows: Tensor) -> Tensor:
    """Add the last half of rows (row, entry) to the first until one entry is left, in place; return it."""
    left = rows.shape[1]
    while left > 1:
        half = left // 2
        rows[:, :half] += rows[:, left - half : left]
        left -= half
    return rows[:, 0]
