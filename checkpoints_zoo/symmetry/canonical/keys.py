"""What units are sorted by: whole numbers whose rising order is the falling order of weights or norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.lines import Lines, Members, View, bits
from checkpoints_zoo.symmetry.table import Group

_CHUNK = 1 << 17  # entries squared at once: 512 KB
_GATHERED = 1 << 20  # entries of lines at once: 8 MB
_RUN = 64  # entries added up in the weights' own precision
_SHORT = 32  # rows up to this length are summed entry by entry


@dataclass(frozen=True)
class Keys:
    """The keys of a group's units.

    Args:
        rough: (member, unit), in the order of the keys but for those that may be tied.
        may_tie: of values of `rough` and the next larger ones, whether their keys' order is not theirs.
        exact: the keys of some members' units, (unit), as whole numbers; None: they are `rough`.
    """

    rough: Tensor
    may_tie: Callable[[Tensor, Tensor], Tensor] = torch.eq
    exact: Callable[[Tensor, Tensor], Tensor] | None = None

    def every(self) -> Tensor:
        """Return the keys of all units, (member, unit)."""
        if self.exact is None:
            return self.rough
        members, size = self.rough.shape
        m, u = _units(members, size, self.rough.device)
        return self.exact(m, u).reshape(self.rough.shape)


def keys(members: Members, group: Group, key: str) -> Keys:
    """Return the keys of a group's units in the tensor of its first writer.

    Args:
        key: "first", "max" or "norm".
    """
    if not group.writers:
        return Keys(torch.zeros(len(members), group.size, dtype=torch.int64, device=members.device))
    name, axis = group.writers[0]
    move = next(m for m in members.table.tensors[name].moves if m.group == group.name and m.axis == axis)
    view = View(name, move, 1)
    if key == "first":
        return Keys(_first(members, group, view))
    rows = members.params[name].narrow(axis + 1, move.offset, group.size * move.span).movedim(axis + 1, 1)
    rows = rows.reshape(len(rows), group.size, -1)
    if key == "max":
        largest = rows.amax(-1)
        return Keys(~bits(largest.where(largest != 0, 0)))
    wide = torch.float64 if rows.itemsize > 4 else torch.float32
    # What a sum of squares can be off by, relative and where squares are too small to be told from 0.
    off, least = 3 * (_RUN + 4) * torch.finfo(wide).eps, 1e16 * torch.finfo(wide).tiny

    def may_tie(one: Tensor, other: Tensor) -> Tensor:
        return ~(-one > -other * (1 + off) + least)

    return Keys(-_rough_squares(rows, wide), may_tie, lambda m, u: ~bits(_squares(members, view, m, u)))


def _first(members: Members, group: Group, view: View) -> Tensor:
    line, (m, u) = Lines(members, view), _units(len(members), group.size, members.device)
    codes = line.codes(m, u, 0, 1) if line.labels is None else line.settled(line.codes(m, u))[:, :1]
    return codes.reshape(len(members), group.size)


def _units(members: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return members and units of all members' units, (member and unit)."""
    m = torch.arange(members, device=device).repeat_interleave(size)
    return m, torch.arange(size, device=device).repeat(members)


def _rough_squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums of squares over the last axis in float64: of short runs in that dtype, then of these."""
    flat, length = rows.flatten(0, 1), rows.shape[2]
    runs = length // _RUN * _RUN
    result = torch.empty(len(flat), dtype=torch.float64, device=rows.device)
    step = max(1, _CHUNK // max(1, length))
    wide = torch.empty(min(step, len(flat)), length, dtype=dtype, device=rows.device)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        squares = wide[: len(part)].copy_(part).square_()
        total = squares[:, runs:].sum(1).double()
        if runs:
            total += squares[:, :runs].unflatten(1, (-1, _RUN)).sum(2).sum(1, dtype=torch.float64)  # type: ignore[no-untyped-call]
        result[start : start + step] = total
    return result.reshape(rows.shape[:2])


def _squares(members: Members, view: View, m: Tensor, u: Tensor) -> Tensor:
    """Return sums of squares of units' lines in float64, (unit).

    Each is summed by the same operations in an order that no permutation changes, wherever its row lies: a library's
    sum need not do so, and equal rows have to have equal norms.
    """
    axes = members.table.tensors[view.tensor]
    last = max(move.axis for move in axes.moves)
    behind = prod(axes.shape[last + 1 :])
    rows = members.params[view.tensor].reshape(-1, behind)
    line = Lines(members, view, len(axes.shape) - last - 1)
    result = torch.empty(len(m), dtype=torch.float64, device=m.device)
    step = max(1, _GATHERED // max(1, len(line) * behind))
    for start in range(0, len(m), step):
        entries = line.entries(m[start : start + step], u[start : start + step])
        sums = _summed(rows[entries.flatten()]).reshape(entries.shape)
        result[start : start + step] = _folded(line.settled(sums))
    return result


def _summed(rows: Tensor) -> Tensor:
    """Return the sums of squares of rows (row, entry) in float64."""
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
