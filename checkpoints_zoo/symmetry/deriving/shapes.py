"""What views, cuts and concatenations do to labels: axes are merged, split, reordered and put side by side."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from checkpoints_zoo.symmetry.deriving.labels import Axis, Segment, cut, fixed, joined, length, pin_scale, resolved
from checkpoints_zoo.symmetry.deriving.scales import equate, tie
from checkpoints_zoo.symmetry.deriving.values import Step, Value


def reshaped(step: Step, x: Value, *sizes: Any, **named: Any) -> Value:
    """Merge and split axes as their lengths say: a map's places become the span of its channel."""
    old, new = list(x.axes), list(step.shape)
    axes: list[Axis] = []
    while old or new:
        merged, shape = old[:1], new[:1]
        del old[:1], new[:1]
        while (here := prod(length(a) for a in merged)) != (there := prod(shape)) or not (merged and shape):
            if here < there or (here == there and not merged):
                merged.append(old.pop(0)) if old else merged.append(step.still(1))
            else:
                shape.append(new.pop(0)) if new else shape.append(1)
        axes += _split(step, _merged(step, merged), shape)
    for axis in axes[len(step.shape) :]:
        pin_scale(axis)
    return Value(tuple(axes[: len(step.shape)]), x.state, x.role)


def _merged(step: Step, axes: list[Axis]) -> Axis:
    """Merge axes into one, the last one fastest."""
    result = axes[0]
    for inner in axes[1:]:
        if length(result) == 1 or length(inner) == 1:
            pin_scale(result if length(result) == 1 else inner)
            result = inner if length(result) == 1 else result
        elif fixed(inner):
            result = tuple(Segment(s.space, s.span * length(inner), s.scale) for s in resolved(result))
        elif all(segment.space.pinned for segment in resolved(result)):
            pin_scale(result)
            result = resolved(inner) * length(result)
        else:
            step.refuse("a view that merges two axes whose units move")
    return resolved(result)


def _split(step: Step, axis: Axis, shape: list[int]) -> list[Axis]:
    """Split an axis by lengths, the last one fastest."""
    long = [i for i, size in enumerate(shape) if size > 1]
    if len(long) <= 1:
        at = long[0] if long else 0
        return [axis if i == at else step.still(1) for i in range(len(shape))]
    if fixed(axis):
        return [step.still(size) for size in shape]
    span = prod(shape[long[0] + 1 :])
    if any(segment.span % span for segment in resolved(axis)):
        step.refuse("a view that splits an axis whose units move")
    for segment in resolved(axis):
        for factor in segment.scale:
            tie(factor, segment.length // span)
    outer = tuple(Segment(s.space, s.span // span, s.scale) for s in resolved(axis))
    return [outer if i == long[0] else step.still(size) for i, size in enumerate(shape)]


def permuted(step: Step, x: Value, *dims: Any) -> Value:
    """Reorder all axes."""
    order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return Value(tuple(x.axes[d] for d in order), x.state, x.role)


def transposed(step: Step, x: Value, dim0: int = 0, dim1: int = 1) -> Value:
    """Swap two axes (of a matrix, unless named)."""
    axes = list(x.axes)
    if len(axes) > 1:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return Value(tuple(axes), x.state, x.role)


def expanded(step: Step, x: Value, *sizes: Any) -> Value:
    """Repeat axes of one entry."""
    missing = len(step.shape) - len(x.axes)
    axes = [step.still(size) for size in step.shape[:missing]]
    for axis, size in zip(x.axes, step.shape[missing:], strict=True):
        if length(axis) != size:
            pin_scale(axis)
        axes.append(axis if length(axis) == size else step.still(size))
    return Value(tuple(axes), x.state, x.role)


def concatenated(step: Step, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Put axes side by side: groups side by side; all other axes move and scale as one."""
    first, *others = tensors
    dim %= len(first.axes)
    for i, axis in enumerate(first.axes):
        for other in others if i != dim else ():
            for a, b in joined(axis, other.axes[i]):
                equate(a.scale, b.scale)
    together = tuple(segment for value in tensors for segment in resolved(value.axes[dim]))
    return Value(tuple(together if i == dim else axis for i, axis in enumerate(first.axes)))


def stacked(step: Step, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Put tensors behind one another on a new axis, along which nothing moves."""
    dim %= len(step.shape)
    grown = [Value((*v.axes[:dim], step.still(1), *v.axes[dim:])) for v in tensors]
    return concatenated(step, grown, dim)


def parts(step: Step, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    """Cut an axis into consecutive parts, whose units no longer mix."""
    dim %= len(x.axes)
    rest, result = x.axes[dim], []
    for shape in step.shape:
        part, rest = cut(rest, shape[dim])
        result.append(Value((*x.axes[:dim], part, *x.axes[dim + 1 :])))
    return tuple(result)


def indexed(step: Step, x: Value, index: Any) -> Value:
    """Take slices and single entries; where units move, consecutive ones only."""
    index = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is None or i is Ellipsis or type(i) in (int, slice)) for i in index):
        if x.fixed and all(i.fixed for i in index if isinstance(i, Value)):
            return Value(tuple(step.still(size) for size in step.shape))
        step.refuse("an index that is a tensor")
    if Ellipsis in index:
        at, given = index.index(Ellipsis), sum(i is not None and i is not Ellipsis for i in index)
        index[at : at + 1] = [slice(None)] * (len(x.axes) - given)
    axes, rest = [], list(x.axes)
    for i in index:
        if i is None:
            axes.append(step.still(1))
        elif isinstance(i, slice):
            axes.append(_sliced(step, rest.pop(0), i))
        else:
            axis = rest.pop(0)
            pin_scale(_sliced(step, axis, slice(i % length(axis), i % length(axis) + 1)))
    return Value((*axes, *rest))


def _sliced(step: Step, axis: Axis, taken: slice) -> Axis:
    places = range(*taken.indices(length(axis)))
    if len(places) == length(axis):
        return axis
    if fixed(axis):
        return step.still(len(places))
    if places.step != 1 or not places:
        step.refuse("a slice that leaves out units between others")
    return cut(cut(axis, places.stop)[0], places.start)[1]


def narrowed(step: Step, x: Value, dim: int, start: int, length: int) -> Value:
    """Take consecutive entries of one axis."""
    dim %= len(x.axes)
    axis = _sliced(step, x.axes[dim], slice(start, start + length))
    return Value((*x.axes[:dim], axis, *x.axes[dim + 1 :]))
