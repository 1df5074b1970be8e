"""Rules of views, cuts and concatenations: they merge, split, reorder and concatenate axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from checkpoints_zoo.symmetry.deriving.labels import (
    Axis,
    Segment,
    axis_length,
    cut_axis,
    is_fixed,
    join_axes,
    pin_scale,
    resolve_axis,
)
from checkpoints_zoo.symmetry.deriving.scales import equate_products, tie_values
from checkpoints_zoo.symmetry.deriving.values import Labelled, Step


def reshape(step: Step, x: Labelled, *sizes: Any, **named: Any) -> Labelled:
    """Rule of reshape: merge and split axes by their lengths; a flattened channel spans all its positions in the
    map."""
    if any(isinstance(size, torch.dtype) for size in (*sizes, *named.values())):
        return _fixed_view(step, x)
    old_axes, new_sizes = list(x.axes), list(step.shape)
    axes: list[Axis] = []
    while old_axes or new_sizes:
        axes_to_merge, split_shape = old_axes[:1], new_sizes[:1]
        del old_axes[:1], new_sizes[:1]
        while (merged_length := prod(axis_length(a) for a in axes_to_merge)) != (
            shape_length := prod(split_shape)
        ) or not (axes_to_merge and split_shape):
            if merged_length < shape_length or (merged_length == shape_length and not axes_to_merge):
                axes_to_merge.append(old_axes.pop(0)) if old_axes else axes_to_merge.append(step.fixed_axis(1))
            else:
                split_shape.append(new_sizes.pop(0)) if new_sizes else split_shape.append(1)
        axes += _split_axis(step, _merge_axes(step, axes_to_merge), split_shape)
    for axis in axes[len(step.shape) :]:
        pin_scale(axis)
    return Labelled(tuple(axes[: len(step.shape)]), x.state_name, x.role)


def _fixed_view(step: Step, x: Labelled) -> Labelled:
    """View the bits of a fixed tensor as another dtype."""
    if not x.is_fixed:
        step.refuse("a view of the bits as another dtype")
    return Labelled(tuple(step.fixed_axis(size) for size in step.shape))


def _merge_axes(step: Step, axes: list[Axis]) -> Axis:
    """Merge axes into one axis; the last of the merged axes varies fastest."""
    merged_axis = axes[0]
    for next_axis in axes[1:]:
        if axis_length(merged_axis) == 1 or axis_length(next_axis) == 1:
            pin_scale(merged_axis if axis_length(merged_axis) == 1 else next_axis)
            merged_axis = next_axis if axis_length(merged_axis) == 1 else merged_axis
        elif is_fixed(next_axis):
            merged_axis = tuple(
                Segment(s.space, s.span * axis_length(next_axis), s.scale) for s in resolve_axis(merged_axis)
            )
        elif all(segment.space.pinned for segment in resolve_axis(merged_axis)):
            pin_scale(merged_axis)
            merged_axis = resolve_axis(next_axis) * axis_length(merged_axis)
        else:
            step.refuse("a view that merges two axes whose units move")
    return resolve_axis(merged_axis)


def _split_axis(step: Step, axis: Axis, shape: list[int]) -> list[Axis]:
    """Split an axis into axes of given lengths; the last of the new axes varies fastest."""
    long_axes = [i for i, size in enumerate(shape) if size > 1]
    if len(long_axes) <= 1:
        kept_index = long_axes[0] if long_axes else 0
        return [axis if i == kept_index else step.fixed_axis(1) for i in range(len(shape))]
    if is_fixed(axis):
        return [step.fixed_axis(size) for size in shape]
    span = prod(shape[long_axes[0] + 1 :])
    if any(segment.span % span for segment in resolve_axis(axis)):
        step.refuse("a view that splits an axis whose units move")
    for segment in resolve_axis(axis):
        for factor in segment.scale:
            tie_values(factor, segment.length // span)
    long_axis = tuple(Segment(s.space, s.span // span, s.scale) for s in resolve_axis(axis))
    return [long_axis if i == long_axes[0] else step.fixed_axis(size) for i, size in enumerate(shape)]


def permute_axes(step: Step, x: Labelled, *dims: Any) -> Labelled:
    """Reorder all axes."""
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return Labelled(tuple(x.axes[d] for d in order), x.state_name, x.role)


def transpose(step: Step, x: Labelled, dim0: int = 0, dim1: int = 1) -> Labelled:
    """Rule of transpose: swap two axes, by default those of a matrix."""
    axes = list(x.axes)
    if len(axes) > 1:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return Labelled(tuple(axes), x.state_name, x.role)


def expand(step: Step, x: Labelled, *sizes: Any) -> Labelled:
    """Rule of expand, which repeats axes of one entry."""
    new_axis_count = len(step.shape) - len(x.axes)
    axes = [step.fixed_axis(size) for size in step.shape[:new_axis_count]]
    for axis, size in zip(x.axes, step.shape[new_axis_count:], strict=True):
        if axis_length(axis) != size:
            pin_scale(axis)
        axes.append(axis if axis_length(axis) == size else step.fixed_axis(size))
    return Labelled(tuple(axes), x.state_name, x.role)


def concatenate(step: Step, tensors: Sequence[Labelled], dim: int = 0) -> Labelled:
    """Rule of concatenation of tensors along one axis. All other axes of the tensors get one permutation and one
    scale."""
    first, *other_tensors = tensors
    dim %= len(first.axes)
    for i, axis in enumerate(first.axes):
        for other in other_tensors if i != dim else ():
            for a, b in join_axes(axis, other.axes[i]):
                equate_products(a.scale, b.scale)
    joined_axis = tuple(segment for value in tensors for segment in resolve_axis(value.axes[dim]))
    return Labelled(tuple(joined_axis if i == dim else axis for i, axis in enumerate(first.axes)))


def stack(step: Step, tensors: Sequence[Labelled], dim: int = 0) -> Labelled:
    """Rule of stacking tensors along a new axis, whose entries are pinned."""
    dim %= len(step.shape)
    tensors_with_new_axis = [Labelled((*v.axes[:dim], step.fixed_axis(1), *v.axes[dim:])) for v in tensors]
    return concatenate(step, tensors_with_new_axis, dim)


def split_into_parts(step: Step, x: Labelled, sizes: Any, dim: int = 0) -> tuple[Labelled, ...]:
    """Rule of splitting an axis into consecutive parts; units do not move from one part to another."""
    dim %= len(x.axes)
    remaining_axis, parts = x.axes[dim], []
    for shape in step.shape:
        part, remaining_axis = cut_axis(remaining_axis, shape[dim])
        parts.append(Labelled((*x.axes[:dim], part, *x.axes[dim + 1 :])))
    return tuple(parts)


def take_index(step: Step, x: Labelled, index: Any) -> Labelled:
    """Rule of indexing, which takes slices and single entries. On axes whose units move, a slice has to be
    consecutive."""
    index = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is None or i is Ellipsis or type(i) in (int, slice)) for i in index):
        if x.is_fixed and all(i.is_fixed for i in index if isinstance(i, Labelled)):
            return Labelled(tuple(step.fixed_axis(size) for size in step.shape))
        step.refuse("an index that is a tensor")
    if Ellipsis in index:
        ellipsis_position, indexed_axis_count = (
            index.index(Ellipsis),
            sum(i is not None and i is not Ellipsis for i in index),
        )
        index[ellipsis_position : ellipsis_position + 1] = [slice(None)] * (len(x.axes) - indexed_axis_count)
    axes, remaining_axes = [], list(x.axes)
    for i in index:
        if i is None:
            axes.append(step.fixed_axis(1))
        elif isinstance(i, slice):
            axes.append(_slice_axis(step, remaining_axes.pop(0), i))
        else:
            axis = remaining_axes.pop(0)
            pin_scale(_slice_axis(step, axis, slice(i % axis_length(axis), i % axis_length(axis) + 1)))
    return Labelled((*axes, *remaining_axes))


def _slice_axis(step: Step, axis: Axis, entries: slice) -> Axis:
    entry_range = range(*entries.indices(axis_length(axis)))
    if len(entry_range) == axis_length(axis):
        return axis
    if is_fixed(axis):
        return step.fixed_axis(len(entry_range))
    if entry_range.step != 1 or not entry_range:
        step.refuse("a slice of units that are not consecutive")
    return cut_axis(cut_axis(axis, entry_range.stop)[0], entry_range.start)[1]


def narrow(step: Step, x: Labelled, dim: int, start: int, length: int) -> Labelled:
    """Rule of narrow, which takes consecutive entries of one axis."""
    dim %= len(x.axes)
    axis = _slice_axis(step, x.axes[dim], slice(start, start + length))
    return Labelled((*x.axes[:dim], axis, *x.axes[dim + 1 :]))
