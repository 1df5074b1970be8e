"""Labels of axes while a network is traced: runs of units that one permutation moves, with their scales.

An axis is a row of segments. A segment is a run of entries whose units one permutation moves (`Space`), and which
are multiplied by a product of powers of factors (see `scales`). That two axes move as one, or that one of them
stays, is written into the spaces at once: as in union-find, they remember where they went.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

from checkpoints_zoo.symmetry.deriving.scales import Product, equate, piece, settled


class Unjoinable(ValueError):
    """Two axes, or an axis and a cut, that no permutation group of this package fits."""


@dataclass(eq=False)
class Space:
    """Units that are permuted as one.

    Args:
        size: how many.
        born: the order of appearance: the oldest of joined spaces stays.
        name: of the layer that opened it.
        pinned: whether its units keep their places.
        blocks: units of this space each hold as many consecutive units of ours, and move them; None: no blocks.
        split: whether it is the `blocks` of others.
        stream: whether an addition joined what layers write.
        writers: (order, tensor, axis) of kernels that write it.
        start: of a piece, the number of its first unit among those of the whole.
        into: the axis that it has become.
    """

    size: int
    born: int
    name: str
    pinned: bool = False
    blocks: Space | None = None
    split: bool = False
    stream: bool = False
    writers: list[tuple[int, str, int]] = field(default_factory=list)
    start: int | None = None
    into: tuple[Segment, ...] | None = None

    @property
    def label(self) -> str:
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.start + self.size}]"


@dataclass(frozen=True)
class Segment:
    """A run of size * span entries of an axis: each unit of the space spans as many consecutive ones."""

    space: Space
    span: int
    scale: Product

    @property
    def length(self) -> int:
        return self.space.size * self.span


Axis = tuple[Segment, ...]


def length(axis: Axis) -> int:
    """Return the number of an axis's entries."""
    return sum(segment.length for segment in axis)


def pin_scale(axis: Axis) -> None:
    """Fix an axis's scale at 1."""
    for segment in resolved(axis):
        equate(segment.scale, {})


def pin(axis: Axis) -> None:
    """Fix the places and the scale of an axis's entries."""
    for segment in resolved(axis):
        equate(segment.scale, {})
        pin_space(segment.space)


def pin_space(space: Space) -> None:
    """Fix a space's units, and the blocks they lie in."""
    for segment in resolved((Segment(space, 1, {}),)):
        segment.space.pinned = True
        if segment.space.blocks is not None:
            pin_space(segment.space.blocks)


def fixed(axis: Axis) -> bool:
    """Say whether an axis neither moves nor scales."""
    return all(segment.space.pinned and not segment.scale for segment in resolved(axis))


def resolved(axis: Axis) -> Axis:
    """Follow spaces and factors to where they went; return the axis as it is now."""
    return tuple(now for segment in axis for now in _followed(segment))


def _followed(segment: Segment) -> Iterator[Segment]:
    into = segment.space.into
    if into is None:
        yield replace(segment, scale=settled(segment.scale))
        return
    start, total = 0, segment.length
    for part in into:
        stop = start + part.length * segment.span
        scale = {piece(f, Fraction(start, total), Fraction(stop, total)): p for f, p in settled(segment.scale).items()}
        yield from _followed(Segment(part.space, part.span * segment.span, scale))
        start = stop


def cut(axis: Axis, at: int) -> tuple[Axis, Axis]:
    """Cut an axis before entry `at`; return both parts.

    Raises:
        Unjoinable: the cut goes through a unit, or through units that blocks hold together.
    """
    first, last = [], []
    for segment in resolved(axis):
        if 0 < at < segment.length:
            first += [(halves := _halves(segment, at))[0]]
            last += [halves[1]]
        else:
            (first if at > 0 else last).append(segment)
        at -= segment.length
    return tuple(first), tuple(last)


def _halves(segment: Segment, at: int) -> tuple[Segment, Segment]:
    """Cut a segment before its entry `at`, and with it all that its space is in; return both parts."""
    space, units = segment.space, Fraction(at, segment.span)
    if units.denominator > 1 and space.pinned:
        equate(segment.scale, {})
        sizes = (at, segment.length - at)
        left, right = (Segment(replace(space, size=n, blocks=None), 1, {}) for n in sizes)
        return left, right
    if units.denominator > 1 or ((space.blocks or space.split) and not space.pinned):
        raise Unjoinable(f"a cut through units of {space.label!r} that move together")
    parts = []
    for start, stop in ((0, int(units)), (int(units), space.size)):
        first_unit = (space.start or 0) + start
        part = replace(space, size=stop - start, start=first_unit, blocks=None, split=False)
        part.writers = list(space.writers)
        parts.append(Segment(part, 1, {}))
    space.into = tuple(parts)
    left, right = _followed(segment)
    return left, right


def joined(one: Axis, other: Axis) -> Iterator[tuple[Segment, Segment]]:
    """Make two axes of one length move as one; yield their segments, pairwise alike but for their scales.

    Raises:
        Unjoinable: their units or blocks fit in no common group.
    """
    if length(one) != length(other):
        raise Unjoinable(f"axes of {length(one)} and {length(other)} entries")
    while (ends := _ends(one)) != (others := _ends(other)):
        at = min(ends ^ others)
        if at in others:
            one = sum(cut(one, at), ())
        else:
            other = sum(cut(other, at), ())
    for a, b in zip(resolved(one), resolved(other), strict=True):
        _join(a, b)
    yield from zip(resolved(one), resolved(other), strict=True)


def _ends(axis: Axis) -> set[int]:
    return set(accumulate(segment.length for segment in resolved(axis)))


def _join(a: Segment, b: Segment) -> None:
    (a,), (b,) = resolved((a,)), resolved((b,))  # an earlier pair may have moved them
    if a.space is b.space and a.span == b.span:
        return
    pinned = a.space.pinned or b.space.pinned
    if pinned:
        pin_space(a.space)
        pin_space(b.space)
    if a.span == b.span:
        old, new = sorted((a.space, b.space), key=lambda s: s.born)
        if new.blocks is not None and not pinned:
            hold(old, new.blocks)
        new.into = (Segment(old, 1, {}),)
    else:
        new, old = (a.space, b.space) if a.span < b.span else (b.space, a.space)
        span = Fraction(max(a.span, b.span), min(a.span, b.span))
        if pinned and span.denominator > 1:
            equate(a.scale, {})
            equate(b.scale, {})
            return
        if span.denominator > 1 or ((new.blocks or new.split) and not pinned):
            raise Unjoinable(f"units of {new.label!r} and {old.label!r} that span {a.span} and {b.span} entries")
        new.into = (Segment(old, int(span), {}),)
    old.stream |= new.stream
    old.split |= new.split
    old.writers = sorted({*old.writers, *new.writers})


def root(space: Space) -> Space:
    """Follow a space to where it went; return that one, or pinned units where it was cut."""
    segments = resolved((Segment(space, 1, {}),))
    whole = len(segments) == 1 and segments[0].span == 1
    return segments[0].space if whole else Space(space.size, space.born, space.name, pinned=True)


def blocked(space: Space, count: int) -> Space:
    """Keep a space's units in `count` blocks that move as wholes; return the space of the blocks.

    Raises:
        Unjoinable: it is kept in blocks already that don't nest with these.
    """
    space = root(space)
    if count == space.size:
        return space
    if space.size % count:
        raise Unjoinable(f"{count} blocks of the {space.size} units of {space.label!r}")
    outer = None if space.blocks is None else root(space.blocks)
    if outer is not None and outer.size >= count:
        if outer.size % count:
            raise Unjoinable(
                f"{count} blocks of the units of {space.label!r}, which lie in {outer.size} blocks already"
            )
        return blocked(outer, count)
    inner = Space(count, space.born, f"{space.label} blocks", space.pinned, split=True)
    if outer is not None:
        hold(inner, outer)
    space.blocks = inner
    return inner


def hold(space: Space, blocks: Space) -> None:
    """Keep a space's units in blocks that the units of another space move.

    Raises:
        Unjoinable: it is kept in blocks already that don't nest with these.
    """
    space, blocks = root(space), root(blocks)
    if space.blocks is None and space.size != blocks.size and space.size % blocks.size == 0:
        space.blocks, blocks.split = blocks, True
        if space.pinned:
            pin_space(blocks)
    else:
        own = blocked(space, blocks.size)
        for _ in joined((Segment(own, 1, {}),), (Segment(blocks, 1, {}),)):
            pass
