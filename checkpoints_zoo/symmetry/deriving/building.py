"""From the labels of a finished trace to the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from checkpoints_zoo.symmetry.deriving.labels import Segment, Space, resolved, root
from checkpoints_zoo.symmetry.deriving.scales import Factor, tie
from checkpoints_zoo.symmetry.deriving.values import Value
from checkpoints_zoo.symmetry.table import Axes, Group, Move, Power, Scale, Table

T = TypeVar("T", Space, Factor)


class _Run(NamedTuple):
    """A segment of a tensor's axis, and where it starts."""

    axis: int
    offset: int
    segment: Segment
    within: int


def build(network: str, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Value]) -> Table:
    """Collect what moves and scales; return the table.

    Args:
        network: its name.
        shapes: of all its tensors, by name.
        values: of those that the trace met.
    """
    runs = {name: list(_runs(values[name])) if name in values else [] for name in shapes}
    every = [run.segment for found in runs.values() for run in found]
    spaces = _named(_moving(segment.space for segment in every))
    for segment in every:
        for factor in segment.scale:
            _follow_units(factor, segment)
    factors = _named(factor for segment in every for factor in segment.scale)
    movers = {f: spaces.get(mover) for segment in every for f in segment.scale if (mover := _mover(f, segment))}
    tensors = {}
    for name, shape in shapes.items():
        value = values.get(name, Value(()))
        moves = [
            Move(run.axis, spaces[run.segment.space], run.offset, run.segment.span, run.within)
            for run in runs[name]
            if run.segment.space in spaces
        ]
        powers = [
            Power(run.axis, factors[f], float(p), run.offset, run.segment.length, run.within)
            for run in runs[name]
            for f, p in run.segment.scale.items()
        ]
        tensors[name] = Axes(shape, value.role or "other", value.shift, tuple(moves), tuple(powers))
    groups = {name: _group(name, space, spaces) for space, name in spaces.items()}
    scales = {
        name: Scale(
            name,
            f.count,
            movers.get(f),
            all(f.norms.values()),
            tuple(f.norms),
            _noted(f),
        )
        for f, name in factors.items()
    }
    return Table(network, tensors, groups, scales)


def _runs(value: Value) -> Iterator[_Run]:
    inner = value.within
    for i, axis in enumerate(value.axes):
        blocks, own = inner if inner and i == 1 else (0, axis)
        offset = 0
        for segment in resolved(own):
            yield _Run(i, offset, segment, blocks)
            offset += segment.length


def _moving(spaces: Iterable[Space]) -> Iterator[Space]:
    """Yield spaces that move, and the spaces of the blocks they lie in."""
    for space in spaces:
        outer: Space | None = space
        while outer is not None:
            if not outer.pinned and outer.size > 1:
                yield outer
            outer = None if outer.blocks is None else root(outer.blocks)


def _named(found: Iterable[T]) -> dict[T, str]:
    """Name spaces or factors after their layers, in the order they were opened; blocks come before what they hold."""
    ordered = sorted(set(found), key=lambda x: (x.born, getattr(x, "size", 0)))
    names: dict[T, str] = {}
    taken: set[str] = set()
    for x in ordered:
        own = x.label or "input"
        name, number = own, 1
        while name in taken:
            number += 1
            name = f"{own} #{number}"
        taken.add(name)
        names[x] = name
    return names


def _follow_units(factor: Factor, segment: Segment) -> None:
    """Make a factor one value for all where its values follow neither units nor blocks, so that these can move."""
    if _mover(factor, segment) is None and not segment.space.pinned:
        tie(factor, 1)


def _mover(factor: Factor, segment: Segment) -> Space | None:
    """Return the space whose units carry a factor's values with them."""
    space: Space | None = segment.space
    while space is not None and factor.count > 1:
        if factor.count % space.size == 0:
            return space
        space = None if space.blocks is None else root(space.blocks)
    return None


def _group(name: str, space: Space, spaces: Mapping[Space, str]) -> Group:
    outer = None if space.blocks is None else root(space.blocks)
    writers = _noted(space)
    blocks, mover = (1, None) if outer is None else (outer.size, spaces.get(outer))
    return Group(name, space.size, blocks, mover, space.stream and len(writers) > 1, writers)


def _noted(x: Space | Factor) -> tuple[tuple[str, int], ...]:
    return tuple((tensor, axis) for _, tensor, axis in sorted(set(x.writers)))
