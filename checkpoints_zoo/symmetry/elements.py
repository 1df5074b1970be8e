"""Elements of a network's symmetry group: permutations and scales, drawn, inverted and composed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.table import Group, Scale, Table


@dataclass(frozen=True)
class Element:
    """One symmetry, or one a member: scales are applied first, then permutations.

    Args:
        permutations: group -> int64 (unit) or (member, unit): unit u becomes what unit permutation[u] was.
            A group that is missing stays.
        scales: scale -> positive (value) or (member, value). A scale that is missing is 1.
    """

    permutations: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)


def random_element(
    table: Table,
    generator: torch.Generator,
    *,
    members: int | None = None,
    approximate: bool = False,
    spread: float = 0.5,
) -> Element:
    """Draw a symmetry, its permutations uniform over the group; return it.

    Args:
        table: of the network.
        generator: on the CPU.
        members: how many to draw, one a member; None for one without a member axis.
        approximate: whether to scale before norms without running statistics as well.
        spread: standard deviation of the logarithms of the scales.
    """
    count = 1 if members is None else members
    permutations: dict[str, Tensor] = {}
    for name in table.groups:
        _draw(table, name, permutations, count, generator)
    scales = {
        name: (spread * torch.randn(count, scale.size, generator=generator, dtype=torch.float64)).exp()
        for name, scale in table.scales.items()
        if scale.exact or approximate
    }
    drawn = Element({name: permutations[name] for name in table.groups}, scales)
    if members is not None:
        return drawn
    return Element({n: p[0] for n, p in drawn.permutations.items()}, {n: s[0] for n, s in scales.items()})


def _draw(table: Table, name: str, drawn: dict[str, Tensor], count: int, generator: torch.Generator) -> None:
    group = table.groups[name]
    if name in drawn:
        return
    inside = group.size // group.blocks
    keys = torch.rand(count, group.blocks, inside, generator=generator, dtype=torch.float64)
    places = keys.argsort(-1)
    blocks = torch.arange(group.blocks).expand(count, -1)
    if group.mover is not None:
        _draw(table, group.mover, drawn, count, generator)
        blocks = drawn[group.mover]
    drawn[name] = (blocks[..., None] * inside + places).reshape(count, group.size)


def random_transpositions(table: Table, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw permutations that need `count` transpositions in all; return group -> int64 (unit).

    Each transposition joins two cycles of a group, drawn at random among all pairs of units that lie in different
    ones, so that none undoes another. Groups whose units are kept together in blocks stay, and those that move
    another's blocks.

    Args:
        table: of the network.
        count: from 0 to the sum of units - 1 over the groups.
        generator: on the CPU.

    Raises:
        UsageError: more than there can be, or fewer than 0.

    Source: the number of transpositions of a permutation, Xiao, Liu, Bamler 2023 (arXiv 2401.00611).
    """
    movers = {group.mover for group in table.groups.values()}
    free = {n: g.size for n, g in table.groups.items() if g.blocks == 1 and n not in movers and g.writers}
    most = sum(size - 1 for size in free.values())
    if not 0 <= count <= most:
        raise UsageError(f"transpositions of {table.network}", expected=f"0 to {most:,}", found=f"{count:,}")
    drawn = {name: torch.arange(size) for name, size in free.items()}
    cycles = {name: torch.arange(size) for name, size in free.items()}
    names = list(free)
    while count:
        # A pair of different units of any group, each pair alike; then again if they are of one cycle.
        pairs = torch.tensor([size * (size - 1) for size in free.values()], dtype=torch.float64)
        name = names[int(torch.multinomial(pairs, 1, generator=generator))]
        a, b = torch.randperm(free[name], generator=generator)[:2].tolist()
        p, cycle = drawn[name], cycles[name]
        if cycle[a] != cycle[b]:
            p[[a, b]] = p[[b, a]]
            cycle[cycle == cycle[b]] = int(cycle[a])
            count -= 1
    return drawn


def inverse(table: Table, element: Element) -> Element:
    """Return the symmetry that undoes another: `apply` of both, in either order, changes nothing but by rounding."""
    back = {name: p.argsort(-1) for name, p in element.permutations.items()}
    scales = {n: moved(table.scales[n], table, s.reciprocal(), element.permutations) for n, s in element.scales.items()}
    return Element(back, scales)


def compose(table: Table, first: Element, second: Element) -> Element:
    """Return the symmetry that does what `first` and then `second` do."""
    permutations = dict(first.permutations)
    for name, p in second.permutations.items():
        permutations[name] = _taken(first.permutations[name], p) if name in first.permutations else p
    # The second's scales act on units that the first has moved: put them back to where the units were.
    back = {name: p.argsort(-1) for name, p in first.permutations.items()}
    scales = dict(first.scales)
    for name, s in second.scales.items():
        own = moved(table.scales[name], table, s, back)
        scales[name] = scales[name] * own if name in scales else own
    return Element(permutations, scales)


def moved(scale: Scale, table: Table, values: Tensor, permutations: Mapping[str, Tensor]) -> Tensor:
    """Return a scale's values (..., value) in the order that permutations bring their units into."""
    if scale.group is None or scale.group not in permutations:
        return values
    per = scale.size // table.groups[scale.group].size
    p = permutations[scale.group].to(values.device)
    entries = (p[..., None] * per + torch.arange(per, device=p.device)).flatten(-2)
    return _taken(values, entries)


def _taken(values: Tensor, places: Tensor) -> Tensor:
    """Gather along the last axis, where either may lack the member axis."""
    lead = max(values.shape[:-1], places.shape[:-1], key=len)
    return values.expand(*lead, -1).gather(-1, places.expand(*lead, -1))


def check(table: Table, element: Element) -> None:
    """Check that an element is a symmetry of a table's network.

    Raises:
        UsageError: a name that the table lacks, no permutation or one that tears blocks apart, a scale not positive.
    """
    for name, p in element.permutations.items():
        group = table.groups.get(name)
        if group is None:
            raise UsageError(
                f"permutation {name!r}", expected=f"a group among {', '.join(table.groups)}", found=repr(name)
            )
        _check_permutation(group, p, element.permutations)
    for group in table.groups.values():
        if group.mover in element.permutations and group.name not in element.permutations:
            _check_permutation(group, torch.arange(group.size), element.permutations)
    for name, s in element.scales.items():
        scale = table.scales.get(name)
        if scale is None:
            raise UsageError(f"scale {name!r}", expected=f"one among {', '.join(table.scales)}", found=repr(name))
        if s.ndim not in (1, 2) or s.shape[-1] != scale.size or not bool(((s > 0) & s.isfinite()).all()):
            raise UsageError(
                f"scale {name!r}", expected=f"{scale.size} positive values, or (member, {scale.size})", found=_seen(s)
            )


def _check_permutation(group: Group, p: Tensor, others: Mapping[str, Tensor]) -> None:
    thing = f"permutation {group.name!r}"
    places = torch.arange(group.size, device=p.device)
    if (
        p.dtype != torch.int64
        or p.ndim not in (1, 2)
        or p.shape[-1] != group.size
        or not bool((p.sort(-1)[0] == places).all())
    ):
        raise UsageError(
            thing, expected=f"each of 0-{group.size - 1} once, int64, or a row of them a member", found=_seen(p)
        )
    if group.blocks > 1:
        inside = group.size // group.blocks
        default = torch.arange(group.blocks)
        wanted = others.get(group.mover, default) if group.mover is not None else default
        held = p.div(inside, rounding_mode="floor") == wanted.to(p.device).repeat_interleave(inside, -1)
        if not bool(held.all()):
            order = f"in the order that {group.mover!r} gives" if group.mover else "in place"
            raise UsageError(thing, expected=f"{group.blocks} blocks that stay together, {order}", found=_seen(p))


def _seen(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}: {values.flatten()[:8].tolist()}"
