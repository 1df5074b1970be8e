"""What layers with kernels do to labels: they open a permutation group and a scale on their output axis.

Kernels are (out, in, *window), as torch keeps them. The sum over inputs makes a kernel's input axis move with the
axis it reads, and scale by the inverse (Laurent et al. 2024, arXiv 2310.08287).
"""

from __future__ import annotations

from typing import Any

from checkpoints_zoo.symmetry.deriving.labels import (  # fmt: skip
    Axis,
    Segment,
    Space,
    blocked,
    hold,
    joined,
    length,
    pin,
    pin_scale,
    resolved,
)
from checkpoints_zoo.symmetry.deriving.scales import times
from checkpoints_zoo.symmetry.deriving.values import Step, Value, contract, opened, same, scaled_by


def linear(step: Step, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Contract the last axis with a kernel (out, in)."""
    weight.role = "weight"
    contract(x.axes[-1], weight.axes[-1])
    return Value((*x.axes[:-1], _biased(opened(step, weight.axes[0]), bias, x.axes[:-1])))


def embedding(step: Step, indices: Value, weight: Value, *options: Any, **named: Any) -> Value:
    """Look rows of a table up: they keep their order, their entries are the output's units."""
    weight.role = "weight"
    pin(weight.axes[0])
    return Value((*indices.axes, opened(step, weight.axes[1])))


def matmul(step: Step, x: Value, y: Value) -> Value:
    """Contract the last axis of one with the last but one of the other; axes before those are multiplied."""
    if len(x.axes) < 2 or len(y.axes) < 2:
        step.refuse("a product with a vector")
    contract(x.axes[-1], y.axes[-2])
    ranks = max(len(x.axes), len(y.axes)) - 2
    lead = [_product(step, *(_axis(v.axes[:-2], i - ranks) for v in (x, y))) for i in range(ranks)]
    for value in (x, y):
        value.role = value.role or ("weight" if value.state else "")
    return Value((*lead, opened(step, x.axes[-2]), opened(step, y.axes[-1])))


def _axis(axes: tuple[Axis, ...], i: int) -> Axis | None:
    return axes[i] if -i <= len(axes) else None


def _product(step: Step, one: Axis | None, other: Axis | None) -> Axis:
    """Multiply two axes of which one may be missing, or have one entry for all."""
    present = [axis for axis in (one, other) if axis is not None]
    long = [axis for axis in present if length(axis) > 1] or present[-1:]
    for axis in present:
        if length(axis) == 1:
            pin_scale(axis)
    return long[0] if len(long) == 1 else scaled_by(step, long[0], long[1])


def convolution(
    dimensions: int, step: Step, x: Value, weight: Value, bias: Value | None = None, groups: int = 1
) -> Value:
    """Contract the channel axis with a kernel (out, in / groups, *window); the map's places stay."""
    channel = len(x.axes) - dimensions - 1
    for axis in (*x.axes[channel + 1 :], *weight.axes[2:]):
        pin(axis)
    weight.role = "weight"
    if groups == 1:
        contract(x.axes[channel], weight.axes[1])
        rows = opened(step, weight.axes[0])
    elif weight.shape[1] == 1:
        rows = _one_input_each(step, x.axes[channel], weight, groups)
    else:
        rows = _blocks_of_inputs(step, x.axes[channel], weight, groups)
    places = (step.still(size) for size in step.shape[channel + 1 :])
    return Value((*x.axes[:channel], _biased(rows, bias, x.axes[:channel]), *places))


def transposed_convolution(
    dimensions: int, step: Step, x: Value, weight: Value, bias: Value | None = None, groups: int = 1
) -> Value:
    """Contract the channel axis with a kernel (in, out, *window); the map's places stay."""
    if groups != 1:
        step.refuse(f"{groups} groups")
    channel = len(x.axes) - dimensions - 1
    for axis in (*x.axes[channel + 1 :], *weight.axes[2:]):
        pin(axis)
    weight.role = "weight"
    contract(x.axes[channel], weight.axes[0])
    rows = opened(step, weight.axes[1])
    places = (step.still(size) for size in step.shape[channel + 1 :])
    return Value((*x.axes[:channel], _biased(rows, bias, x.axes[:channel]), *places))


def _biased(rows: Axis, bias: Value | None, others: tuple[Axis, ...]) -> Axis:
    """Add a bias to an output axis; return it. It is one for all other axes: these can't scale."""
    if bias is None:
        return resolved(rows)
    bias.role = "bias"
    for axis in others:
        pin_scale(axis)
    return same(rows, bias.axes[0])


def _one_input_each(step: Step, inputs: Axis, weight: Value, groups: int) -> Axis:
    """Let each input channel write its own block of rows (depthwise: of one row); return the output axis."""
    pin(weight.axes[1])
    if weight.shape[0] == groups:
        return scaled_by(step, inputs, weight.axes[0], writes=True)
    (segment, *more) = resolved(inputs)
    if more:
        pin(inputs)
        hold(_single(step, weight.axes[0]), Space(groups, next(step.births), "", pinned=True))
        return opened(step, weight.axes[0])
    hold(_single(step, weight.axes[0]), _blocks(step, inputs, groups))
    rows = resolved(weight.axes[0])
    # A channel's scale is that of all entries of its block of rows.
    spread = (Segment(rows[0].space, rows[0].span, times({}, segment.scale)),)
    return scaled_by(step, spread, rows, writes=True)


def _blocks_of_inputs(step: Step, inputs: Axis, weight: Value, groups: int) -> Axis:
    """Let each block of input channels write its own block of rows; return the output axis."""
    pin(weight.axes[1])
    blocks = _blocks(step, inputs, groups)
    if weight.shape[0] == groups:
        for _ in joined(weight.axes[0], (Segment(blocks, 1, {}),)):
            pass
    else:
        hold(_single(step, weight.axes[0]), blocks)
    if weight.within is None:
        inverse = tuple(Segment(s.space, s.span, times({}, s.scale, power=-1)) for s in resolved(inputs))
        weight.within = (groups, inverse)
    else:
        contract(inputs, weight.within[1])
    return opened(step, weight.axes[0])


def _blocks(step: Step, inputs: Axis, groups: int) -> Space:
    """Keep an axis's units in blocks; return the space of the blocks."""
    (segment, *more) = resolved(inputs)
    if all(s.space.pinned for s in (segment, *more)):
        return Space(groups, next(step.births), "", pinned=True)
    if more or segment.span > 1:
        step.refuse("groups of channels that several layers write side by side")
    return blocked(segment.space, groups)


def _single(step: Step, axis: Axis) -> Space:
    """Return the space of an axis of one segment."""
    (segment, *more) = resolved(axis)
    if more or segment.span > 1:
        step.refuse("a kernel that is used in several ways")
    return segment.space
