"""What normalisation does to labels: units stay in their group, the scale before it is undone, gains open a new one.

With running statistics the scale is undone exactly: the mean moves along, and the variance so that
variance + eps is multiplied by the square. Without, eps has no buffer to move along: the symmetry is approximate,
and exact only at eps = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from checkpoints_zoo.symmetry.deriving.labels import Axis, Segment, blocked, joined, pin_scale, resolved
from checkpoints_zoo.symmetry.deriving.scales import equate, tie, times
from checkpoints_zoo.symmetry.deriving.values import Step, Value, same, scaled_by


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
