"""Labels of the axes of a traced network: runs of units that one permutation moves, with their scales.

An axis is a sequence of segments. One permutation moves the units of a segment (`Space`), and a product of powers of
factors multiplies its entries (see `scales`). If two axes are joined, or an axis is pinned, the spaces of the axes
change at once. As in union-find, a joined space refers to the space that replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

from checkpoints_zoo.symmetry.deriving.scales import (
    Product,
    equate_products,
    factor_of_part,
    magnitudes_of,
    resolve_product,
    signs_of,
)


class IncompatibleAxes(ValueError):
    """Raised if two axes should move together, or an axis is split, in a way that the groups of this package lack."""


@dataclass(eq=False)
class Space:
    """A set of units that one permutation moves.

    Args:
        size: number of units.
        serial: serial number. If two spaces are joined, the older space stays.
        name: name of the layer that opened the space.
        pinned: whether the units must keep their order.
        blocks: the space whose units are blocks of equally many consecutive units of this space; None: no blocks.
        is_blocks: whether each unit of this space is a block of consecutive units of another space, whose `blocks` is
            this space.
        stream: whether an addition joined the outputs of several layers in this space.
        writers: (serial number, tensor name, axis) of each kernel that writes the units.
        start: position of the first unit in the larger space from which this space was cut; None if it was not cut.
        replaced_by: the axis that replaces this space, once it was joined or cut.
    """

    size: int
    serial: int
    name: str
    pinned: bool = False
    blocks: Space | None = None
    is_blocks: bool = False
    stream: bool = False
    writers: list[tuple[int, str, int]] = field(default_factory=list)
    start: int | None = None
    replaced_by: tuple[Segment, ...] | None = None

    @property
    def label(self) -> str:
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.start + self.size}]"


@dataclass(frozen=True)
class Segment:
    """A run of consecutive entries of an axis: `span` entries for each unit of one space, all multiplied by one product
    of factors."""

    space: Space
    span: int
    scale: Product

    @property
    def length(self) -> int:
        return self.space.size * self.span


Axis = tuple[Segment, ...]


def axis_length(axis: Axis) -> int:
    """Return the number of entries that an axis has."""
    return sum(segment.length for segment in axis)


def pin_scale(axis: Axis) -> None:
    """Fix the scale of an axis at 1, its sign included."""
    for segment in resolve_axis(axis):
        equate_products(segment.scale, {})


def pin_magnitude(axis: Axis) -> None:
    """Fix the scale of an axis up to its sign."""
    for segment in resolve_axis(axis):
        equate_products(magnitudes_of(segment.scale), {})


def pin_sign(axis: Axis) -> None:
    """Fix the sign of the scale of an axis."""
    for segment in resolve_axis(axis):
        equate_products(signs_of(segment.scale), {})


def pin_axis(axis: Axis) -> None:
    """Forbid all permutations of the entries of an axis, and fix their scale at 1."""
    for segment in resolve_axis(axis):
        equate_products(segment.scale, {})
        pin_space(segment.space)


def pin_space(space: Space) -> None:
    """Forbid all permutations of the units of a space, and of its blocks."""
    for segment in resolve_axis((Segment(space, 1, {}),)):
        segment.space.pinned = True
        if segment.space.blocks is not None:
            pin_space(segment.space.blocks)


def is_fixed(axis: Axis) -> bool:
    """Return whether an axis neither moves nor scales."""
    return all(segment.space.pinned and not segment.scale for segment in resolve_axis(axis))


def resolve_axis(axis: Axis) -> Axis:
    """Replace joined and cut spaces and factors; return the current axis."""
    return tuple(resolved for segment in axis for resolved in _resolve_segment(segment))


def _resolve_segment(segment: Segment) -> Iterator[Segment]:
    replaced_by = segment.space.replaced_by
    if replaced_by is None:
        yield replace(segment, scale=resolve_product(segment.scale))
        return
    start, total = 0, segment.length
    for part in replaced_by:
        stop = start + part.length * segment.span
        scale = {
            factor_of_part(f, Fraction(start, total), Fraction(stop, total)): p
            for f, p in resolve_product(segment.scale).items()
        }
        yield from _resolve_segment(Segment(part.space, part.span * segment.span, scale))
        start = stop


def cut_axis(axis: Axis, position: int) -> tuple[Axis, Axis]:
    """Cut an axis before entry `position`; return both parts.

    Raises:
        IncompatibleAxes: the cut goes through a unit, or through units that blocks hold together.
    """
    segments_before, segments_after = [], []
    for segment in resolve_axis(axis):
        if 0 < position < segment.length:
            segments_before += [(halves := _cut_segment(segment, position))[0]]
            segments_after += [halves[1]]
        else:
            (segments_before if position > 0 else segments_after).append(segment)
        position -= segment.length
    return tuple(segments_before), tuple(segments_after)


def _cut_segment(segment: Segment, position: int) -> tuple[Segment, Segment]:
    """Cut a segment before its entry `position`; return both parts. The space of the segment is cut in all other
    segments too."""
    space, units_before_cut = segment.space, Fraction(position, segment.span)
    if units_before_cut.denominator > 1 and space.pinned:
        equate_products(segment.scale, {})
        sizes = (position, segment.length - position)
        left_segment, right_segment = (Segment(replace(space, size=n, blocks=None), 1, {}) for n in sizes)
        return left_segment, right_segment
    if units_before_cut.denominator > 1 or ((space.blocks or space.is_blocks) and not space.pinned):
        raise IncompatibleAxes(f"a cut through units of {space.label!r} that move together")
    segments = []
    for start, stop in ((0, int(units_before_cut)), (int(units_before_cut), space.size)):
        first_unit = (space.start or 0) + start
        part_space = replace(space, size=stop - start, start=first_unit, blocks=None, is_blocks=False)
        part_space.writers = list(space.writers)
        segments.append(Segment(part_space, 1, {}))
    space.replaced_by = tuple(segments)
    left_segment, right_segment = _resolve_segment(segment)
    return left_segment, right_segment


def join_axes(first_axis: Axis, second_axis: Axis) -> Iterator[tuple[Segment, Segment]]:
    """Give two axes of one length the same permutation; yield pairs of their segments, which differ only in scale.

    Raises:
        IncompatibleAxes: no permutation group fits the units or blocks of both axes.
    """
    if axis_length(first_axis) != axis_length(second_axis):
        raise IncompatibleAxes(
            f"two axes of different lengths, {axis_length(first_axis)} and {axis_length(second_axis)} entries"
        )
    while (first_ends := _segment_ends(first_axis)) != (second_ends := _segment_ends(second_axis)):
        cut_position = min(first_ends ^ second_ends)
        if cut_position in second_ends:
            first_axis = sum(cut_axis(first_axis, cut_position), ())
        else:
            second_axis = sum(cut_axis(second_axis, cut_position), ())
    for a, b in zip(resolve_axis(first_axis), resolve_axis(second_axis), strict=True):
        _join_segments(a, b)
    yield from zip(resolve_axis(first_axis), resolve_axis(second_axis), strict=True)


def _segment_ends(axis: Axis) -> set[int]:
    return set(accumulate(segment.length for segment in resolve_axis(axis)))


def _join_segments(segment: Segment, other_segment: Segment) -> None:
    (segment,), (other_segment,) = (
        resolve_axis((segment,)),
        resolve_axis((other_segment,)),
    )  # The join of an earlier pair may have replaced these segments.
    if segment.space is other_segment.space and segment.span == other_segment.span:
        return
    is_pinned = segment.space.pinned or other_segment.space.pinned
    if is_pinned:
        pin_space(segment.space)
        pin_space(other_segment.space)
    if segment.span == other_segment.span:
        kept_space, replaced_space = sorted((segment.space, other_segment.space), key=lambda s: s.serial)
        if replaced_space.blocks is not None and not is_pinned:
            assign_blocks(kept_space, replaced_space.blocks)
        replaced_space.replaced_by = (Segment(kept_space, 1, {}),)
    else:
        replaced_space, kept_space = (
            (segment.space, other_segment.space)
            if segment.span < other_segment.span
            else (other_segment.space, segment.space)
        )
        span_ratio = Fraction(max(segment.span, other_segment.span), min(segment.span, other_segment.span))
        if is_pinned and span_ratio.denominator > 1:
            equate_products(segment.scale, {})
            equate_products(other_segment.scale, {})
            return
        if span_ratio.denominator > 1 or ((replaced_space.blocks or replaced_space.is_blocks) and not is_pinned):
            raise IncompatibleAxes(
                f"units of {replaced_space.label!r} and {kept_space.label!r} that span {segment.span} and"
                f" {other_segment.span} entries"
            )
        replaced_space.replaced_by = (Segment(kept_space, int(span_ratio), {}),)
    kept_space.stream |= replaced_space.stream
    kept_space.is_blocks |= replaced_space.is_blocks
    kept_space.writers = sorted({*kept_space.writers, *replaced_space.writers})


def current_space(space: Space) -> Space:
    """Return the space that replaces a joined space; a pinned space if the space was cut."""
    segments = resolve_axis((Segment(space, 1, {}),))
    is_uncut = len(segments) == 1 and segments[0].span == 1
    return segments[0].space if is_uncut else Space(space.size, space.serial, space.name, pinned=True)


def split_into_blocks(space: Space, block_count: int) -> Space:
    """Split a space into `block_count` blocks that move as wholes; return the space of the blocks.

    Raises:
        IncompatibleAxes: the space has other blocks already, and they do not nest with the new blocks.
    """
    space = current_space(space)
    if block_count == space.size:
        return space
    if space.size % block_count:
        raise IncompatibleAxes(f"a split of the {space.size} units of {space.label!r} into {block_count} equal blocks")
    outer_blocks = None if space.blocks is None else current_space(space.blocks)
    if outer_blocks is not None and outer_blocks.size >= block_count:
        if outer_blocks.size % block_count:
            raise IncompatibleAxes(
                f"{block_count} blocks of the units of {space.label!r}, which lie in {outer_blocks.size} blocks already"
            )
        return split_into_blocks(outer_blocks, block_count)
    new_blocks = Space(block_count, space.serial, f"{space.label} blocks", space.pinned, is_blocks=True)
    if outer_blocks is not None:
        assign_blocks(new_blocks, outer_blocks)
    space.blocks = new_blocks
    return new_blocks


def assign_blocks(space: Space, blocks: Space) -> None:
    """Split a space into blocks that the units of another space move.

    Raises:
        IncompatibleAxes: the space has other blocks already, and they do not nest with the new blocks.
    """
    space, blocks = current_space(space), current_space(blocks)
    if space.blocks is None and space.size != blocks.size and space.size % blocks.size == 0:
        space.blocks, blocks.is_blocks = blocks, True
        if space.pinned:
            pin_space(blocks)
    else:
        present_blocks = split_into_blocks(space, blocks.size)
        for _ in join_axes((Segment(present_blocks, 1, {}),), (Segment(blocks, 1, {}),)):
            pass
