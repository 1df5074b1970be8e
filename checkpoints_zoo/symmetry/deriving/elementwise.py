"""What operations on entries do to labels: activations, arithmetic, pooling, sums.

An activation r with r(sx) = s r(x) for s > 0 keeps the scale; any other fixes it at 1. Units that meet in a sum or
product move as one; in a sum their scales are one as well, in a product they multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from checkpoints_zoo.symmetry.deriving.labels import Axis, Segment, fixed, joined, length, pin, pin_scale, resolved
from checkpoints_zoo.symmetry.deriving.scales import equate, times
from checkpoints_zoo.symmetry.deriving.values import Step, Value, scaled_by


def homogeneous(step: Step, x: Value, *options: Any, **named: Any) -> Value:
    """Keep everything: relu, dropout, a cast."""
    return x


def pointwise(step: Step, x: Value, *options: Any, **named: Any) -> Value:
    """Fix the scale: any function of single entries, and softmax, which commutes with permutations."""
    if any(isinstance(option, Value) for option in (*options, *named.values())):
        step.refuse("a function of several tensors")
    for axis in x.axes:
        pin_scale(axis)
    return x


def clamp(step: Step, x: Value, min: Any = None, max: Any = None, **named: Any) -> Value:
    """Keep the scale where the only bound is zero."""
    if isinstance(min, Value) or isinstance(max, Value):
        step.refuse("bounds that are tensors")
    bounds = [bound for bound in (min, max) if bound is not None]
    return homogeneous(step, x) if bounds == [0] else pointwise(step, x)


def threshold(step: Step, x: Value, threshold: float, value: float, inplace: bool = False) -> Value:
    """Keep the scale where both numbers are zero: that is relu."""
    return homogeneous(step, x) if threshold == value == 0 else pointwise(step, x)


def prelu(step: Step, x: Value, weight: Value) -> Value:
    """Keep the scale; slopes move with the channels (axis 1)."""
    weight.role = "slope"
    pin_scale(weight.axes[0])
    if weight.shape[0] > 1:
        for _ in joined(x.axes[1], weight.axes[0]):
            pass
    return x


def add(step: Step, x: Any, y: Any, *, alpha: float = 1) -> Value:
    """Add or subtract: both move and scale as one. What two layers wrote becomes a stream."""
    return _summed(step, x, y, stream=True)


def extreme(step: Step, x: Any, y: Any = None, *options: Any, **named: Any) -> Value:
    """Take the larger or smaller: both move and scale as one, as max(sx, sy) = s max(x, y)."""
    if not (isinstance(x, Value) and isinstance(y, Value)):
        step.refuse("a maximum over an axis")
    return _summed(step, x, y, stream=False)


def _summed(step: Step, x: Any, y: Any, stream: bool) -> Value:
    if not (isinstance(x, Value) and isinstance(y, Value)):
        value, number = (x, y) if isinstance(x, Value) else (y, x)
        return homogeneous(step, value) if number == 0 else pointwise(step, value)
    _forget_scalars(x, y)
    axes = []
    for one, other in _pairs(step, x, y):
        if length(one) == length(other):
            for a, b in joined(one, other):
                equate(a.scale, b.scale)
                a.space.stream |= stream and not (x.state or y.state)
        else:
            one, other = sorted((one, other), key=length)
            (single,) = resolved(one)
            for segment in resolved(other):
                equate(segment.scale, single.scale)
        axes.append(resolved(other))
    return Value(tuple(axes))


def multiply(step: Step, x: Any, y: Any) -> Value:
    """Multiply: a gate moves with what it gates, and their scales multiply."""
    return _product(step, x, y, 1)


def divide(step: Step, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    """Divide: as `multiply`, by the inverse."""
    if rounding_mode is not None:
        step.refuse("a division that rounds")
    return _product(step, x, y, -1)


def _product(step: Step, x: Any, y: Any, power: int) -> Value:
    if not isinstance(y, Value):
        return homogeneous(step, x)
    if not isinstance(x, Value):
        return raised(step, y, power)
    _forget_scalars(x, y)
    if power == -1:
        y = raised(step, y, -1)
    axes = []
    for one, other in _pairs(step, x, y):
        if length(one) == length(other):
            axes.append(scaled_by(step, one, other))
        else:
            one, other = sorted((one, other), key=length)
            (single,) = resolved(one)
            axes.append(tuple(Segment(s.space, s.span, times(s.scale, single.scale)) for s in resolved(other)))
    return Value(tuple(axes))


def raised(step: Step, x: Value, exponent: Any) -> Value:
    """Raise to a power: (sx)^p = s^p x^p."""
    if not isinstance(exponent, int | float):
        step.refuse("an exponent that is a tensor")
    power = Fraction(exponent).limit_denominator(64)
    if float(power) != exponent or not exponent:
        return pointwise(step, x)
    return Value(
        tuple(tuple(Segment(s.space, s.span, times({}, s.scale, power=power)) for s in resolved(a)) for a in x.axes)
    )


def power_of(exponent: float) -> Callable[..., Value]:
    """Return the rule of a function that raises to a fixed power."""

    def rule(step: Step, x: Value) -> Value:
        return raised(step, x, exponent)

    return rule


def _forget_scalars(*values: Value) -> None:
    """Fix the scale of state tensors' axes of one entry: it would repeat what other axes' scales can do."""
    for value in values:
        if value.state:
            value.role = value.role or "other"
            for axis in value.axes:
                if length(axis) == 1:
                    pin_scale(axis)


def _pairs(step: Step, x: Value, y: Value) -> list[tuple[Axis, Axis]]:
    """Pair axes from the last one on, as broadcasting does."""
    rank = max(len(x.axes), len(y.axes))
    padded = [(*(step.still(1) for _ in range(rank - len(v.axes))), *v.axes) for v in (x, y)]
    return list(zip(*padded, strict=True))


def pooled(dimensions: int, step: Step, x: Value, *options: Any, **named: Any) -> Value:
    """Pool or resize the last axes, which are the map's places."""
    if len(step.shape) != len(x.axes):
        step.refuse("pooling that also returns places")
    kept = len(x.axes) - dimensions
    for axis in x.axes[kept:]:
        pin(axis)
    return Value((*x.axes[:kept], *(step.still(size) for size in step.shape[kept:])))


def resized(step: Step, x: Value, *options: Any, **named: Any) -> Value:
    """Resize a map's places, all axes after the second."""
    return pooled(len(x.axes) - 2, step, x)


def reduced(
    step: Step, x: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """Sum, average or take the largest over axes: the order there doesn't matter, the scale is fixed at 1."""
    rank = len(x.axes)
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    gone = {d % rank for d in dims}
    for d in gone:
        pin_scale(x.axes[d])
    axes = [(step.still(1) if i in gone else axis) for i, axis in enumerate(x.axes) if keepdim or i not in gone]
    return Value(tuple(axes))


def padded(step: Step, x: Value, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """Pad axes: zeros keep the scale; beside channels, they keep their places."""
    if mode == "constant" and value:
        pointwise(step, x)
    axes = list(x.axes)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        own = axes[-1 - i]
        if fixed(own):
            axes[-1 - i] = step.still(step.shape[-1 - i])
        elif (before, after) != (0, 0):
            if mode != "constant" or min(before, after) < 0:
                step.refuse("padding of channels with their own entries, or a cut")
            sides = [step.still(n) if n else () for n in (before, after)]
            axes[-1 - i] = (*sides[0], *own, *sides[1])
    return Value(tuple(axes))
