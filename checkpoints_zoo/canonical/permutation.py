"""Sorted units: one network for all that permutations make of it.

Laurent et al. 2024 (arXiv 2310.08287): their code sorts by the first weight of each unit, their text by the largest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoints_zoo.canonical.keys import keys as keys_of
from checkpoints_zoo.canonical.lines import Members
from checkpoints_zoo.canonical.refining import Colours, Orders, Search
from checkpoints_zoo.canonical.ties import Cells, settle
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import members_of, permute
from checkpoints_zoo.symmetry.table import Group, Table

KEYS = ("first", "max", "norm")


def sort(
    table: Table, params: Mapping[str, Tensor], key: str = "first", streams: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sort all units by falling keys, group by group; return the tensors and the permutations.

    Args:
        table: of the network.
        params: name -> (member, *shape), all tensors that move.
        key: what the row of a unit's first writer is measured by, once its columns are sorted: "first", its first
            weight; "max", its largest weight; "norm", its L2 norm, in float64.
        streams: whether units of residual streams are sorted as well, or only inner channels.

    Raises:
        UsageError: another key, or tensors without a member axis.
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.
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
        order = _follow(members, _turns(table, free), key) if count else _none(table, free, members.device)
    permutations = {name: order[name] for name in table.groups if name in free}
    return permute(table, params, permutations), permutations


def _none(table: Table, free: frozenset[str], device: torch.device) -> Orders:
    return {name: torch.empty(0, table.groups[name].size, dtype=torch.int64, device=device) for name in free}


def _free(table: Table, streams: bool) -> frozenset[str]:
    """Return the groups to sort: of inner channels those that hold no units of streams."""
    still: set[str | None] = set() if streams else {name for name, group in table.groups.items() if group.stream}
    for name, group in reversed(table.groups.items()):
        if name in still:
            still.add(group.mover)
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


def _follow(
    members: Members, turns: list[list[str]], key: str, greedy: bool = False, tried: list[int] | None = None
) -> Orders:
    """Sort all groups of turns that aren't sorted yet; return the permutations of all."""
    done: dict[int, Orders] = {}
    busy = torch.ones(len(members), dtype=torch.bool, device=members.device)
    for i, turn in enumerate(turns):
        if turn[0] in members.order:
            continue
        for member in _arrange(members, turn, key, busy).nonzero()[:, 0].tolist():
            counter = [0] if tried is None else tried

            def follow(one: Members, greedy: bool, counter: list[int] = counter) -> Orders:
                return _follow(one, turns, key, greedy, counter)

            one = members.one(member)
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
    found = _keys(members, table.groups[last], key)
    for name in reversed(turn):
        group = table.groups[name]
        # A group without writers goes by the keys of what it holds, the largest first.
        own = found if name == last else found.gather(1, members.inner[last])
        noted, cells = _sorted(group, own.reshape(len(own), group.size, -1), busy & ~open_)
        if len(cells):
            open_ |= settle(members, group, cells, noted)
        members.place(turn, name, noted.reshape(len(members), -1))
    return open_


def _keys(members: Members, group: Group, key: str) -> Tensor:
    if group.writers:
        return keys_of(members, group, key)
    return torch.zeros(len(members), group.size, dtype=torch.int64, device=members.device)


def _sorted(group: Group, keys: Tensor, busy: Tensor) -> tuple[Tensor, Cells]:
    """Sort units by rows of keys (member, unit, column) inside their blocks; return which is where, flat, and ties."""
    members, step = len(keys), group.size // group.blocks
    first = keys[..., 0].reshape(members, group.blocks, step)
    values, order = first.sort(dim=-1, stable=True)
    noted = (order + torch.arange(0, group.size, step, device=keys.device)[:, None]).flatten()
    tied = values[..., 1:] == values[..., :-1]
    before, behind = torch.zeros_like(first, dtype=torch.bool), torch.zeros_like(first, dtype=torch.bool)
    before[..., 1:] = behind[..., :-1] = tied & busy[:, None, None]
    place = (before | behind).flatten().nonzero()[:, 0]
    member = place.div(group.size, rounding_mode="floor")
    cells = Cells(noted[place], member, (~before).flatten().cumsum(0)[place], place)
    if keys.shape[2] > 1 and len(cells):
        cells.split(keys[member, cells.unit])
        noted[cells.place] = cells.unit
    return noted, cells


def _colours(one: Members, turn: list[str], key: str) -> Colours:
    """Return the colours that keys give to one member's units."""
    group = one.table.groups[turn[-1]]
    return {group.name: torch.unique(_keys(one, group, key)[0], return_inverse=True)[1]}
