"""Collect the labels of a traced network into a symmetry table: groups, scales and signs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from checkpoints_zoo.symmetry.deriving.labels import Segment, Space, current_space, resolve_axis
from checkpoints_zoo.symmetry.deriving.scales import Factor, magnitudes_of, signs_of, tie_values
from checkpoints_zoo.symmetry.deriving.values import Labelled
from checkpoints_zoo.symmetry.table import Axes, Group, Move, Power, Scale, Sign, Table

T = TypeVar("T", Space, Factor)


def build_table(network: str, shapes: Mapping[str, tuple[int, ...]], labels_by_tensor: Mapping[str, Labelled]) -> Table:
    """Collect the groups and scales of all tensors; return the table.

    Args:
        network: name of the network.
        shapes: shapes of all tensors of the state dict, by name.
        labels_by_tensor: labels of the tensors that the trace used, by name.
    """
    placed_segments = {
        name: list(_placed_segments(labels_by_tensor[name])) if name in labels_by_tensor else [] for name in shapes
    }
    segments = [placed_segment.segment for placed in placed_segments.values() for placed_segment in placed]
    name_of_space = _unique_names(_movable_spaces(segment.space for segment in segments))
    for segment in segments:
        for factor in segment.scale:
            _tie_unless_moved(factor, segment)
    name_of_factor = _unique_names(factor for segment in segments for factor in magnitudes_of(segment.scale))
    name_of_sign = _unique_names(factor for segment in segments for factor in signs_of(segment.scale))
    mover_of_factor = {
        f: name_of_space.get(mover)
        for segment in segments
        for f in segment.scale
        if (mover := _space_moving_factor(f, segment))
    }
    tensors = {}
    for name, shape in shapes.items():
        value = labels_by_tensor.get(name, Labelled(()))
        moves = [
            Move(
                placed_segment.axis,
                name_of_space[placed_segment.segment.space],
                placed_segment.offset,
                placed_segment.segment.span,
                placed_segment.within,
            )
            for placed_segment in placed_segments[name]
            if placed_segment.segment.space in name_of_space
        ]
        powers, sign_powers = (
            tuple(
                Power(
                    placed_segment.axis,
                    names[f],
                    float(p),
                    placed_segment.offset,
                    placed_segment.segment.length,
                    placed_segment.within,
                )
                for placed_segment in placed_segments[name]
                for f, p in placed_segment.segment.scale.items()
                if f in names
            )
            for names in (name_of_factor, name_of_sign)
        )
        tensors[name] = Axes(shape, value.role or "other", value.shift, tuple(moves), powers, sign_powers)
    groups = {name: _make_group(name, space, name_of_space) for space, name in name_of_space.items()}
    scales = {
        name: Scale(
            name,
            f.count,
            mover_of_factor.get(f),
            all(f.norms.values()),
            tuple(f.norms),
            _sorted_writers(f),
        )
        for f, name in name_of_factor.items()
    }
    table_signs = {name: Sign(name, f.count, mover_of_factor.get(f)) for f, name in name_of_sign.items()}
    return Table(network, tensors, groups, scales, table_signs)


class _PlacedSegment(NamedTuple):
    """A segment of an axis of a tensor, and the position of its first entry on the axis."""

    axis: int
    offset: int
    segment: Segment
    within: int


def _placed_segments(tensor_label: Labelled) -> Iterator[_PlacedSegment]:
    blocks_and_inputs = tensor_label.within
    for i, axis in enumerate(tensor_label.axes):
        blocks, inputs = blocks_and_inputs if blocks_and_inputs and i == 1 else (0, axis)
        offset = 0
        for segment in resolve_axis(inputs):
            yield _PlacedSegment(i, offset, segment, blocks)
            offset += segment.length


def _movable_spaces(spaces: Iterable[Space]) -> Iterator[Space]:
    """Yield the spaces that are not pinned, and the spaces of their blocks."""
    for space in spaces:
        present_space: Space | None = space
        while present_space is not None:
            if not present_space.pinned and present_space.size > 1:
                yield present_space
            present_space = None if present_space.blocks is None else current_space(present_space.blocks)


def _unique_names(spaces_or_factors: Iterable[T]) -> dict[T, str]:
    """Name spaces or factors after their layers, in order of appearance; blocks come before the units inside them."""
    spaces_or_factors_in_order = sorted(set(spaces_or_factors), key=lambda x: (x.serial, getattr(x, "size", 0)))
    names: dict[T, str] = {}
    used_names: set[str] = set()
    for x in spaces_or_factors_in_order:
        base_name = x.label or "input"
        name, number = base_name, 1
        while name in used_names:
            number += 1
            name = f"{base_name} #{number}"
        used_names.add(name)
        names[x] = name
    return names


def _tie_unless_moved(factor: Factor, segment: Segment) -> None:
    """Give a factor one value for all units, so that they can move, unless its values move with the units or their
    blocks."""
    if _space_moving_factor(factor, segment) is None and not segment.space.pinned:
        tie_values(factor, 1)


def _space_moving_factor(factor: Factor, segment: Segment) -> Space | None:
    """Return the space whose permutation also moves the values of a factor; None if there is no such space."""
    space: Space | None = segment.space
    while space is not None and factor.count > 1:
        if factor.count % space.size == 0:
            return space
        space = None if space.blocks is None else current_space(space.blocks)
    return None


def _make_group(group_name: str, space: Space, space_names: Mapping[Space, str]) -> Group:
    block_space = None if space.blocks is None else current_space(space.blocks)
    writers = _sorted_writers(space)
    blocks, mover = (1, None) if block_space is None else (block_space.size, space_names.get(block_space))
    return Group(group_name, space.size, blocks, mover, space.stream and len(writers) > 1, writers)


def _sorted_writers(space_or_factor: Space | Factor) -> tuple[tuple[str, int], ...]:
    return tuple((tensor, axis) for _, tensor, axis in sorted(set(space_or_factor.writers)))
