"""Rules of operations on entries: activations, arithmetic, pooling, sums.

An activation r with r(sx) = s r(x) for all s > 0 keeps the scale. Any other activation fixes the scale at 1. Sums and
products join the units of their arguments. A sum also gives both arguments one scale; the scale of a product is the
product of both scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from checkpoints_zoo.symmetry.deriving.labels import (
    Axis,
    Segment,
    axis_length,
    is_fixed,
    join_axes,
    pin_axis,
    pin_magnitude,
    pin_scale,
    pin_sign,
    resolve_axis,
)
from checkpoints_zoo.symmetry.deriving.scales import equate_products, multiply_products
from checkpoints_zoo.symmetry.deriving.values import Labelled, Step, multiply_axes


def linear(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of dropout, negation and casts to a wider float: keep permutations, scales and signs."""
    return x


def homogeneous(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of relu and abs: keep permutations and scales, and fix signs."""
    for axis in x.axes:
        pin_sign(axis)
    return x


def odd(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of tanh and sin: keep permutations and signs, and fix the scale up to the sign."""
    for axis in x.axes:
        pin_magnitude(axis)
    return x


def hardtanh(step: Step, x: Labelled, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Labelled:
    """Rule of hardtanh, which clamps to an interval."""
    return clamp(step, x, min_val, max_val)


def pointwise(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of any function of single entries, and of softmax, which commutes with permutations: fix the scale at 1."""
    if any(isinstance(option, Labelled) for option in (*options, *named.values())):
        step.refuse("a function of several tensors")
    for axis in x.axes:
        pin_scale(axis)
    return x


def alpha_dropout(step: Step, x: Labelled, p: float = 0.5, *training: bool, **named: Any) -> Labelled:
    """Rule of alpha dropout: keep the scale in eval mode. In training mode, dropped entries get a constant value, which
    fixes the scale."""
    is_training = any(training[:1]) or named.get("training", named.get("train", False))
    return pointwise(step, x) if is_training else linear(step, x)


def clamp(step: Step, x: Labelled, min: Any = None, max: Any = None, **named: Any) -> Labelled:
    """Rule of clamp: keep the scale if the only bound is zero, and the sign if the interval is symmetric."""
    if isinstance(min, Labelled) or isinstance(max, Labelled):
        step.refuse("bounds that are tensors")
    bounds = [bound for bound in (min, max) if bound is not None]
    if len(bounds) == 2 and bounds[0] == -bounds[1]:
        return odd(step, x)
    return homogeneous(step, x) if bounds == [0] else pointwise(step, x)


def threshold(step: Step, x: Labelled, threshold: float, value: float, inplace: bool = False) -> Labelled:
    """Rule of threshold: keep the scale if the threshold and the value are zero, as in relu; in all other cases fix the
    scale."""
    return homogeneous(step, x) if threshold == value == 0 else pointwise(step, x)


def prelu(step: Step, x: Labelled, weight: Labelled) -> Labelled:
    """Rule of prelu: keep the scale, and fix the sign. The slopes move with the channels (axis 1)."""
    weight.role = "slope"
    pin_scale(weight.axes[0])
    if weight.shape[0] > 1:
        for _ in join_axes(x.axes[1], weight.axes[0]):
            pass
    return homogeneous(step, x)


def add(step: Step, x: Any, y: Any, *, alpha: float = 1) -> Labelled:
    """Rule of addition and subtraction: both arguments get one permutation and one scale. The sum of two layers is a
    stream."""
    return _add_labels(step, x, y, makes_stream=True)


def maximum(step: Step, x: Any, y: Any = None, *options: Any, **named: Any) -> Labelled:
    """Rule of maximum and minimum of two tensors: both get one permutation and one scale, because max(sx, sy) = s
    max(x, y)."""
    if not (isinstance(x, Labelled) and isinstance(y, Labelled)):
        step.refuse("a maximum over an axis")
    return homogeneous(step, _add_labels(step, x, y, makes_stream=False))


def _add_labels(step: Step, x: Any, y: Any, makes_stream: bool) -> Labelled:
    if not (isinstance(x, Labelled) and isinstance(y, Labelled)):
        value, number = (x, y) if isinstance(x, Labelled) else (y, x)
        return linear(step, value) if number == 0 else pointwise(step, value)
    _pin_scalars(x, y)
    axes = []
    for x_axis, y_axis in _broadcast_pairs(step, x, y):
        if axis_length(x_axis) == axis_length(y_axis):
            for a, b in join_axes(x_axis, y_axis):
                equate_products(a.scale, b.scale)
                a.space.stream |= makes_stream and not (x.state_name or y.state_name)
        else:
            x_axis, y_axis = sorted((x_axis, y_axis), key=axis_length)
            (single,) = resolve_axis(x_axis)
            for segment in resolve_axis(y_axis):
                equate_products(segment.scale, single.scale)
        axes.append(resolve_axis(y_axis))
    return Labelled(tuple(axes))


def multiply(step: Step, x: Any, y: Any) -> Labelled:
    """Rule of multiplication: both arguments get one permutation, and their scales multiply."""
    return _multiply_labels(step, x, y, 1)


def divide(step: Step, x: Any, y: Any, rounding_mode: str | None = None) -> Labelled:
    """Rule of division, which is multiplication by the inverse."""
    if rounding_mode is not None:
        step.refuse("a division that rounds")
    return _multiply_labels(step, x, y, -1)


def _multiply_labels(step: Step, x: Any, y: Any, power: int) -> Labelled:
    if not isinstance(y, Labelled):
        return linear(step, x)
    if not isinstance(x, Labelled):
        return raise_to(step, y, power)
    _pin_scalars(x, y)
    if power == -1:
        y = raise_to(step, y, -1)
    axes = []
    for x_axis, y_axis in _broadcast_pairs(step, x, y):
        if axis_length(x_axis) == axis_length(y_axis):
            axes.append(multiply_axes(step, x_axis, y_axis))
        else:
            x_axis, y_axis = sorted((x_axis, y_axis), key=axis_length)
            (single,) = resolve_axis(x_axis)
            axes.append(
                tuple(Segment(s.space, s.span, multiply_products(s.scale, single.scale)) for s in resolve_axis(y_axis))
            )
    return Labelled(tuple(axes))


def raise_to(step: Step, x: Labelled, exponent: Any) -> Labelled:
    """Rule of powers: (sx)^p = s^p x^p."""
    if not isinstance(exponent, int | float):
        step.refuse("an exponent that is a tensor")
    power = Fraction(exponent).limit_denominator(64)
    if float(power) != exponent or not exponent:
        return pointwise(step, x)
    if power.denominator > 1:
        x = homogeneous(step, x)  # A negative number has no fractional power.
    return Labelled(
        tuple(
            tuple(Segment(s.space, s.span, multiply_products({}, s.scale, last_power=power)) for s in resolve_axis(a))
            for a in x.axes
        )
    )


def power_rule(exponent: float) -> Callable[..., Labelled]:
    """Return the rule of a function that raises to a fixed power."""

    def rule(step: Step, x: Labelled) -> Labelled:
        return raise_to(step, x, exponent)

    return rule


def _pin_scalars(*values: Labelled) -> None:
    """Fix the scale of axes of one entry in parameters and buffers, because scales of other axes have the same
    effect."""
    for value in values:
        if value.state_name:
            value.role = value.role or "other"
            for axis in value.axes:
                if axis_length(axis) == 1:
                    pin_scale(axis)


def _broadcast_pairs(step: Step, x: Labelled, y: Labelled) -> list[tuple[Axis, Axis]]:
    """Pair the axes of two tensors from the last one on, as broadcasting does."""
    rank = max(len(x.axes), len(y.axes))
    pad = [(*(step.fixed_axis(1) for _ in range(rank - len(v.axes))), *v.axes) for v in (x, y)]
    return list(zip(*pad, strict=True))


def pool(dimensions: int, step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of pooling and resizing along the last axes, the positions in a feature map."""
    if len(step.shape) != len(x.axes):
        step.refuse("pooling that also returns indices")
    first = len(x.axes) - dimensions
    for axis in x.axes[first:]:
        pin_axis(axis)
    return Labelled((*x.axes[:first], *(step.fixed_axis(size) for size in step.shape[first:])))


def max_pool(dimensions: int, step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of max pooling, which fixes signs."""
    return pool(dimensions, step, homogeneous(step, x))


def resize(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of resizing a feature map along all axes after the second, which is the channel axis."""
    return pool(len(x.axes) - 2, step, x)


def reduce_axes(
    step: Step, x: Labelled, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Labelled:
    """Rule of sums and means over axes: the order of entries does not matter; the scale of these axes is fixed at 1."""
    rank = len(x.axes)
    dims = range(rank) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    reduced_axes = {d % rank for d in dims}
    for d in reduced_axes:
        pin_scale(x.axes[d])
    axes = [
        (step.fixed_axis(1) if i in reduced_axes else axis)
        for i, axis in enumerate(x.axes)
        if keepdim or i not in reduced_axes
    ]
    return Labelled(tuple(axes))


def reduce_to_extreme(step: Step, x: Labelled, *options: Any, **named: Any) -> Labelled:
    """Rule of the largest or smallest entry over axes: as in `reduce_axes`, and signs are fixed."""
    return reduce_axes(step, homogeneous(step, x), *options, **named)


def pad(step: Step, x: Labelled, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Labelled:
    """Rule of padding: padding with zeros keeps the scale. Zeros that are added to the channels are pinned."""
    if mode == "constant" and value:
        pointwise(step, x)
    axes = list(x.axes)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = axes[-1 - i]
        if is_fixed(axis):
            axes[-1 - i] = step.fixed_axis(step.shape[-1 - i])
        elif (before, after) != (0, 0):
            if mode != "constant" or min(before, after) < 0:
                step.refuse("padding of channels with copies of channels, or a negative padding")
            sides = [step.fixed_axis(n) if n else () for n in (before, after)]
            axes[-1 - i] = (*sides[0], *axis, *sides[1])
    return Labelled(tuple(axes))
