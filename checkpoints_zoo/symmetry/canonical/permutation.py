"""Sorted units: one network for all that permutations make of it.

Laurent et al. 2024 (arXiv 2310.08287): their code sorts by the first weight of each unit, their text by the largest.
Keys are whole numbers whose rising order is the falling order of weights or norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import permute, stacked_in
from checkpoints_zoo.symmetry.canonical.lines import Lines, Members, Placement, bits
from checkpoints_zoo.symmetry.canonical.refining import Colours, Orders, Search
from checkpoints_zoo.symmetry.canonical.ties import Cells, alone, settle
from checkpoints_zoo.symmetry.table import Group, Table

KEYS = ("first", "max", "norm")
_CHUNK = 1 << 17  # entries squared at once: 512 KB
_GATHERED = 1 << 20  # entries of lines at once: 8 MB
_RUN = 64  # entries added up in the weights' own precision
_SHORT = 32  # rows up to this length are summed entry by entry


def sort(
    table: Table, params: Mapping[str, Tensor], key: str = "first", streams: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sort all units by falling keys, group by group; return the tensors and the permutations.

    Networks that differ by a permutation of the sorted groups give the same tensors, bit for bit. Groups are sorted in
    topological order, within the blocks that hold them; blocks that no layer writes go by the keys of what they hold,
    the largest first. Ties are broken by the rest of the unit: rows, biases and norms whose other units are in order
    (the first writer's row first), each the first entry that differs; then tensors whose other units aren't in order
    yet, their entries sorted; then what is told apart by these units' own entries in turn, and where that isn't enough
    (twins that feed twins) the order that leads to the largest tensors. -0.0 comes after 0.0. Units that can change
    places without a change of any tensor stay in the order they were in.

    The one exception are members of which `refining.MOST` orders were tried: it takes many units that differ from one
    another only in how they are wired among themselves, as in a network of adjacency matrices. Their function is kept.

    Args:
        table: of the network.
        params: name -> (member, *shape), all tensors that move. No entry may be NaN.
        key: what the row of a unit's first writer is measured by, once its columns are sorted: "first", its first
            weight; "max", its largest weight; "norm", its L2 norm, in float64.
        streams: whether units of residual streams are sorted as well, or only inner channels.

    Raises:
        UsageError: another key, or tensors without a member axis.
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[2.0], [1.0], [2.0]]]), "2.weight": torch.tensor([[[5.0, 6.0, 7.0]]])}
    >>> tensors, permutations = sort(symmetries(net, torch.zeros(1, 1)), weights)
    >>> tensors["0.weight"].flatten().tolist(), tensors["2.weight"].flatten().tolist(), permutations["0"].tolist()
    ([2.0, 2.0, 1.0], [7.0, 5.0, 6.0], [[2, 0, 1]])
    """
    if key not in KEYS:
        raise UsageError("key", expected=" or ".join(map(repr, KEYS)), found=repr(key))
    count = stacked_in(table, params) if params else None
    free = _free(table, streams)
    moving = {n: a for n, a in table.tensors.items() if any(move.group in free for move in a.moves)}
    for name in moving:
        if name not in params:
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    if not free:
        return dict(params), {}
    with torch.no_grad():
        members = Members(table, {name: params[name].detach() for name in moving}, free)
        order = _follow(members, False, _turns(table, free), key) if count else _none(table, free, members.device)
    permutations = {name: order[name] for name in table.groups if name in free}
    return permute(table, params, permutations), permutations


def _none(table: Table, free: frozenset[str], device: torch.device) -> Orders:
    return {name: torch.empty(0, table.groups[name].size, dtype=torch.int64, device=device) for name in free}


def _free(table: Table, streams: bool) -> frozenset[str]:
    """Return the groups to sort: of inner channels those that hold no units of streams."""
    still: set[str | None] = set() if streams else {name for name, group in table.groups.items() if group.stream}
    for name in reversed(list(table.groups)):
        if name in still:
            still.add(table.groups[name].mover)
    return frozenset(name for name in table.groups if name not in still)


def _turns(table: Table, free: frozenset[str]) -> list[list[str]]:
    """Return groups in the order they are sorted in; one without writers together with the first that it holds."""
    turns: list[list[str]] = []
    placed: set[str] = set()
    for name in table.groups:
        if name in free and name not in placed:
            turns.append(_chain(table, name) if not table.groups[name].writers else [name])
            placed.update(turns[-1])
    return turns


def _chain(table: Table, name: str) -> list[str]:
    """Return a group, then what it holds, down to the first group with writers; itself alone if there is none."""
    for other in table.groups.values():
        if other.mover == name:
            below = [other.name] if other.writers else _chain(table, other.name)
            if table.groups[below[-1]].writers:
                return [name, *below]
    return [name]


def _follow(members: Members, greedy: bool, turns: list[list[str]], key: str, tried: list[int] | None = None) -> Orders:
    """Sort all groups of turns that aren't sorted yet; return the permutations of all."""
    done: dict[int, Orders] = {}
    busy = torch.ones(len(members), dtype=torch.bool, device=members.device)
    for turn in turns:
        if turn[0] in members.order:
            continue
        for member in _arrange(members, turn, key, busy).nonzero()[:, 0].tolist():
            one, counter = members.one(member), [0] if tried is None else tried
            follow = partial(_follow, turns=turns, key=key, tried=counter)
            done[member] = Search(one, turn, follow, counter).run(_colours(one, turn, key), greedy)
            busy[member] = False
        members.close(turn)
    for member, order in done.items():
        for name, permutation in order.items():
            members.order[name][member] = permutation[0]
    return members.order


def _arrange(members: Members, turn: list[str], key: str, busy: Tensor) -> Tensor:
    """Sort a turn's groups inside the blocks they lie in; return which members have units left that are told apart by
    no line, (member).

    Args:
        busy: (member), whose ties are looked at.
    """
    table, last = members.table, turn[-1]
    open_ = torch.zeros_like(busy)
    found = keys(members, table.groups[last], key)
    for name in reversed(turn):
        group = table.groups[name]
        own = found
        if name != last:
            # A group without writers goes by the keys of what it holds, the largest first.
            own = _held(found, members.inner[last], group.size)
        noted, cells = _sorted(group, own, busy & ~open_)
        if len(cells):
            open_ |= settle(members, group, cells, noted)
        members.place(turn, name, noted.reshape(len(members), -1))
    return open_


def _held(keys: Keys, inner: Tensor, size: int) -> Keys:
    """Return the keys of so many units by those of the units they hold, which lie in this order, (member, unit)."""
    held = keys.every().gather(1, inner).reshape(len(inner), size, -1)
    return Keys(held[..., 0], exact=lambda m, u: held[m, u])


def _sorted(group: Group, keys: Keys, busy: Tensor) -> tuple[Tensor, Cells]:
    """Sort units by keys inside their blocks; return which is where, flat, and ties."""
    members, step = len(keys.rough), group.size // group.blocks
    values, order = keys.rough.reshape(members, group.blocks, step).sort(dim=-1, stable=True)
    noted = (order + torch.arange(0, group.size, step, device=order.device)[:, None]).flatten()
    tied = keys.may_tie(values[..., :-1], values[..., 1:]) & busy[:, None, None]
    before = torch.zeros_like(order, dtype=torch.bool)
    behind = torch.zeros_like(before)
    before[..., 1:] = behind[..., :-1] = tied
    place = (before | behind).flatten().nonzero()[:, 0]
    member = place.div(group.size, rounding_mode="floor")
    cells = Cells(noted[place], member, (~before).flatten().cumsum(0)[place], place)
    if keys.exact is not None and len(cells):
        found = keys.exact(member, cells.unit)
        cells.split(found.reshape(len(cells), -1))
        noted[cells.place] = cells.unit
        cells = cells.taken(~alone(cells))
    return noted, cells


def _colours(one: Members, turn: list[str], key: str) -> Colours:
    """Return the colours that keys give to one member's units."""
    group = one.table.groups[turn[-1]]
    return {group.name: torch.unique(keys(one, group, key).every()[0], return_inverse=True)[1]}


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
    placement = Placement(name, move, 1)
    if key == "first":
        return Keys(_first(members, group, placement))
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

    return Keys(-_rough_squares(rows, wide), may_tie, lambda m, u: ~bits(_squares(members, placement, m, u)))


def _first(members: Members, group: Group, placement: Placement) -> Tensor:
    line, (m, u) = Lines(members, placement), _units(len(members), group.size, members.device)
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


def _squares(members: Members, placement: Placement, m: Tensor, u: Tensor) -> Tensor:
    """Return sums of squares of units' lines in float64, (unit).

    Each is summed by the same operations in an order that no permutation changes, wherever its row lies: a library's
    sum need not do so, and equal rows have to have equal norms.
    """
    axes = members.table.tensors[placement.tensor]
    last = max(move.axis for move in axes.moves)
    behind = prod(axes.shape[last + 1 :])
    rows = members.params[placement.tensor].reshape(-1, behind)
    line = Lines(members, placement, len(axes.shape) - last - 1)
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
