"""What layers with kernels do to labels: they open a permutation group and a scale on their output axis.

Kernels are (out, in, *window), as torch keeps them. The sum over inputs makes a kernel's input axis move with the
axis it reads, and scale by the inverse (Laurent et al. 2024, arXiv 2310.08287).
"""

from __future__ import annotations

from collections.abc import Sequence
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
from checkpoints_zoo.symmetry.deriving.scales import equate, tie, times
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


def undone(step: Step, axis: Axis, exact: bool, *own: Value | None) -> Axis:
    """Note that a layer, named by its own tensors, undoes an axis's scale; return the axis without it."""
    layer = next((value.layer for value in own if value is not None and value.state), step.layer or step.operation)
    for segment in resolved(axis):
        for factor in segment.scale:
            factor.norms[layer] = factor.norms.get(layer, True) and exact
    return tuple(Segment(segment.space, segment.span, {}) for segment in resolved(axis))


def affine(step: Step, axis: Axis, gain: Value | None, *offsets: Value | None) -> Axis:
    """Multiply an axis by a gain and add offsets to it; return it.

    Args:
        gain: its last axis is the channels'; other axes have one entry.
        offsets: likewise; a threshold is one: max(sx, st) is s max(x, t).
    """
    for value, role in ((gain, "gain"), *((offset, "offset") for offset in offsets)):
        if value is None:
            continue
        value.role = role
        own = _channels(value)
        axis = scaled_by(step, axis, own) if role == "gain" else same(axis, own)
    return axis


def _channels(value: Value) -> Axis:
    """Return the one axis of a norm's tensor that has the channels, (channel) or (1, channel, 1, 1)."""
    if len(value.axes) == 1:
        return value.axes[0]
    for axis in (value.axes[0], *value.axes[2:]):
        pin_scale(axis)
    return value.axes[1]


def batch_norm(
    step: Step,
    x: Value,
    gain: Value | None,
    offset: Value | None,
    mean: Value | None,
    variance: Value | None,
    eps: float,
) -> Value:
    """Normalise channels (axis 1) by running statistics, or by the batch's where there are none."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    if mean is not None and variance is not None:
        mean.role, variance.role = "mean", "variance"
        same(x.axes[1], mean.axes[0])
        for a, b in joined(x.axes[1], variance.axes[0]):
            equate(b.scale, times({}, a.scale, power=2))
        if variance.shift not in (0.0, eps):
            step.refuse("one variance for norms with several eps")
        variance.shift = eps
    channels = undone(step, x.axes[1], mean is not None, gain, mean)
    return Value((x.axes[0], affine(step, channels, gain, offset), *x.axes[2:]))


def response_norm(step: Step, x: Value, gain: Value | None, *offsets: Value | None) -> Value:
    """Normalise each channel (axis 1) over its own map: filter response norm (Singh & Krishnan 2020), instance norm."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    channels = undone(step, x.axes[1], False, gain)
    return Value((x.axes[0], affine(step, channels, gain, *offsets), *x.axes[2:]))


def group_norm(step: Step, x: Value, groups: int, gain: Value | None, offset: Value | None) -> Value:
    """Normalise blocks of channels (axis 1): these move as wholes, and one scale a block is undone (Wu & He 2018)."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    if groups == 1:
        _tied(x.axes[1])
    size = x.shape[1] // groups
    for segment in resolved(x.axes[1]) if groups > 1 else ():
        if segment.length % size:
            step.refuse(f"groups of {size} channels across the ends of what {segment.space.name!r} writes")
        count = segment.length // size
        for factor in segment.scale:
            tie(factor, count)
        if segment.space.pinned or segment.span % size == 0 or count == 1:
            continue
        if size % segment.span:
            step.refuse(f"groups of {size} channels through units of {segment.span}")
        blocked(segment.space, count)
    channels = undone(step, x.axes[1], False, gain)
    return Value((x.axes[0], affine(step, channels, gain, offset), *x.axes[2:]))


def layer_norm(step: Step, x: Value, count: int, gain: Value | None, offset: Value | None) -> Value:
    """Normalise over the last `count` axes together (Ba et al. 2016)."""
    rank = len(x.axes)
    return axes_norm(step, x, range(rank - count, rank), gain, offset)


def axes_norm(step: Step, x: Value, axes: Sequence[int], gain: Value | None, offset: Value | None) -> Value:
    """Normalise over axes together: their units move freely, one scale for all of them is undone.

    Args:
        axes: their numbers, rising.
        gain, offset: of the shape of those axes.
    """
    if len(axes) > 1:
        for i in axes:
            pin_scale(x.axes[i])
    _tied(x.axes[axes[0]])
    result = [undone(step, axis, False, gain) for axis in x.axes]
    for value, role in ((gain, "gain"), (offset, "offset")):
        if value is None:
            continue
        value.role = role
        for own, i in zip(value.axes, axes, strict=True):
            if len(axes) > 1:
                pin_scale(own)
            result[i] = scaled_by(step, result[i], own) if role == "gain" else same(result[i], own)
    return Value(tuple(result))


def _tied(axis: Axis) -> None:
    """Give all entries of an axis one scale."""
    scales = [segment.scale for segment in resolved(axis)]
    for factor in (factor for scale in scales for factor in scale):
        tie(factor, 1)
    for scale in scales[1:]:
        equate(scale, scales[0])
