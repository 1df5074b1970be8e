"""Sorted units: one network for all that permutations make of it.

Laurent et al. 2024 (arXiv 2310.08287): their code sorts by the first weight of each unit, their text by the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import members_of, permute
from checkpoints_zoo.symmetry.canonical.keys import Keys
from checkpoints_zoo.symmetry.canonical.keys import keys as keys_of
from checkpoints_zoo.symmetry.canonical.lines import Members
from checkpoints_zoo.symmetry.canonical.refining import Colours, Orders, Search
from checkpoints_zoo.symmetry.canonical.ties import Cells, alone, settle
from checkpoints_zoo.symmetry.table import Group, Table

KEYS = ("first", "max", "norm")


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
    count = members_of(table, params)
    if count is None and params:
        raise UsageError(
            "tensors", expected="(member, *shape)", found="no member axis", do="Stack them: tensor[None] of one"
        )
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
    found = keys_of(members, table.groups[last], key)
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
    return {group.name: torch.unique(keys_of(one, group, key).every()[0], return_inverse=True)[1]}
