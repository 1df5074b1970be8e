"""Rules of layers with kernels and of norms. A kernel opens a permutation group and a scale on its output axis.

Kernels are (out, in, *window), as in torch. The sum over inputs joins the input axis of a kernel with the axis that the
kernel reads; the scales of both axes are inverse to each other (Laurent et al. 2024, arXiv 2310.08287).

This is one file, because all of these rules join, open or scale the axes of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpoints_zoo.symmetry.deriving.labels import (  # fmt: skip
    Axis,
    Segment,
    Space,
    assign_blocks,
    axis_length,
    join_axes,
    pin_axis,
    pin_magnitude,
    pin_scale,
    resolve_axis,
    split_into_blocks,
)
from checkpoints_zoo.symmetry.deriving.scales import (
    equate_products,
    magnitudes_of,
    multiply_products,
    signs_of,
    tie_values,
)
from checkpoints_zoo.symmetry.deriving.values import (
    Labelled,
    Step,
    contract_axes,
    equate_axes,
    multiply_axes,
    open_output,
)


def linear(step: Step, x: Labelled, weight: Labelled, bias: Labelled | None = None) -> Labelled:
    """Rule of linear layers: contract the last axis with a kernel (out, in)."""
    weight.role = "weight"
    contract_axes(x.axes[-1], weight.axes[-1])
    return Labelled((*x.axes[:-1], _add_bias(open_output(step, weight.axes[0]), bias, x.axes[:-1])))


def embedding(
    step: Step,
    indices: Labelled,
    weight: Labelled,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *options: Any,
    **named: Any,
) -> Labelled:
    """Rule of embeddings: the rows of the table keep their order, and the entries of a row are the output units.

    The argument `max_norm` fixes the scale up to its sign, because long rows are shortened when they are read.
    """
    weight.role = "weight"
    pin_axis(weight.axes[0])
    if max_norm is not None:
        pin_magnitude(weight.axes[1])
    return Labelled((*indices.axes, open_output(step, weight.axes[1])))


def matmul(step: Step, x: Labelled, y: Labelled) -> Labelled:
    """Rule of matrix products: contract the last axis of x with the second to last axis of y, and multiply all axes
    before them."""
    if len(x.axes) < 2 or len(y.axes) < 2:
        step.refuse("a product with a vector")
    contract_axes(x.axes[-1], y.axes[-2])
    stack_axis_count = max(len(x.axes), len(y.axes)) - 2
    stack_axes = [
        _multiply_optional_axes(step, *(_axis_or_none(v.axes[:-2], i - stack_axis_count) for v in (x, y)))
        for i in range(stack_axis_count)
    ]
    for value in (x, y):
        value.role = value.role or ("weight" if value.state_name else "")
    return Labelled((*stack_axes, open_output(step, x.axes[-2]), open_output(step, y.axes[-1])))


def _axis_or_none(axes: tuple[Axis, ...], index: int) -> Axis | None:
    return axes[index] if -index <= len(axes) else None


def _multiply_optional_axes(step: Step, first_axis: Axis | None, second_axis: Axis | None) -> Axis:
    """Multiply two axes, of which one may be missing or have a single entry; return the joint axis."""
    present_axes = [axis for axis in (first_axis, second_axis) if axis is not None]
    long_axes = [axis for axis in present_axes if axis_length(axis) > 1] or present_axes[-1:]
    for axis in present_axes:
        if axis_length(axis) == 1:
            pin_scale(axis)
    return long_axes[0] if len(long_axes) == 1 else multiply_axes(step, long_axes[0], long_axes[1])


def convolution(
    dimensions: int, step: Step, x: Labelled, weight: Labelled, bias: Labelled | None = None, groups: int = 1
) -> Labelled:
    """Rule of convolutions: contract the channel axis with a kernel (out, in / groups, *window). The axes of positions
    in the feature map are pinned."""
    channel_axis = len(x.axes) - dimensions - 1
    for axis in (*x.axes[channel_axis + 1 :], *weight.axes[2:]):
        pin_axis(axis)
    weight.role = "weight"
    if groups == 1:
        contract_axes(x.axes[channel_axis], weight.axes[1])
        rows = open_output(step, weight.axes[0])
    elif weight.shape[1] == 1:
        rows = _depthwise_rows(step, x.axes[channel_axis], weight, groups)
    else:
        rows = _grouped_rows(step, x.axes[channel_axis], weight, groups)
    position_axes = (step.fixed_axis(size) for size in step.shape[channel_axis + 1 :])
    return Labelled((*x.axes[:channel_axis], _add_bias(rows, bias, x.axes[:channel_axis]), *position_axes))


def transposed_convolution(
    dimensions: int, step: Step, x: Labelled, weight: Labelled, bias: Labelled | None = None, groups: int = 1
) -> Labelled:
    """Rule of transposed convolutions: contract the channel axis with a kernel (in, out, *window). The axes of
    positions in the feature map are pinned."""
    if groups != 1:
        step.refuse(f"{groups} groups")
    channel_axis = len(x.axes) - dimensions - 1
    for axis in (*x.axes[channel_axis + 1 :], *weight.axes[2:]):
        pin_axis(axis)
    weight.role = "weight"
    contract_axes(x.axes[channel_axis], weight.axes[0])
    rows = open_output(step, weight.axes[1])
    position_axes = (step.fixed_axis(size) for size in step.shape[channel_axis + 1 :])
    return Labelled((*x.axes[:channel_axis], _add_bias(rows, bias, x.axes[:channel_axis]), *position_axes))


def _add_bias(output_axis: Axis, bias: Labelled | None, other_axes: tuple[Axis, ...]) -> Axis:
    """Add a bias to an output axis; return the axis. The bias is the same for all entries of the other axes, so these
    axes cannot scale."""
    if bias is None:
        return resolve_axis(output_axis)
    bias.role = "bias"
    for axis in other_axes:
        pin_scale(axis)
    return equate_axes(output_axis, bias.axes[0])


def _depthwise_rows(step: Step, input_axis: Axis, weight: Labelled, groups: int) -> Axis:
    """Return the output axis of a kernel in which each input channel writes one block of rows (depthwise: one row)."""
    pin_axis(weight.axes[1])
    if weight.shape[0] == groups:
        return multiply_axes(step, input_axis, weight.axes[0], is_kernel=True)
    (segment, *more_segments) = resolve_axis(input_axis)
    if more_segments:
        pin_axis(input_axis)
        assign_blocks(_single_space(step, weight.axes[0]), Space(groups, next(step.serials), "", pinned=True))
        return open_output(step, weight.axes[0])
    assign_blocks(_single_space(step, weight.axes[0]), _split_axis_into_blocks(step, input_axis, groups))
    rows = resolve_axis(weight.axes[0])
    # The scale of an input channel is the scale of all rows of its block.
    row_axis = (Segment(rows[0].space, rows[0].span, multiply_products({}, segment.scale)),)
    return multiply_axes(step, row_axis, rows, is_kernel=True)


def _grouped_rows(step: Step, input_axis: Axis, weight: Labelled, groups: int) -> Axis:
    """Return the output axis of a kernel in which each block of input channels writes one block of rows."""
    pin_axis(weight.axes[1])
    blocks = _split_axis_into_blocks(step, input_axis, groups)
    if weight.shape[0] == groups:
        for _ in join_axes(weight.axes[0], (Segment(blocks, 1, {}),)):
            pass
    else:
        assign_blocks(_single_space(step, weight.axes[0]), blocks)
    if weight.within is None:
        inverse_scale_axis = tuple(
            Segment(s.space, s.span, multiply_products({}, s.scale, last_power=-1)) for s in resolve_axis(input_axis)
        )
        weight.within = (groups, inverse_scale_axis)
    else:
        contract_axes(input_axis, weight.within[1])
    return open_output(step, weight.axes[0])


def _split_axis_into_blocks(step: Step, axis: Axis, block_count: int) -> Space:
    """Split the units of an axis into blocks; return the space of the blocks."""
    (segment, *more_segments) = resolve_axis(axis)
    if all(s.space.pinned for s in (segment, *more_segments)):
        return Space(block_count, next(step.serials), "", pinned=True)
    if more_segments or segment.span > 1:
        step.refuse("groups of channels that several layers write")
    return split_into_blocks(segment.space, block_count)


def _single_space(step: Step, axis: Axis) -> Space:
    """Return the space of an axis of one segment."""
    (segment, *more_segments) = resolve_axis(axis)
    if more_segments or segment.span > 1:
        step.refuse("a kernel that is used in several ways")
    return segment.space


def remove_scale(step: Step, axis: Axis, is_exact: bool, *tensors: Labelled | None) -> Axis:
    """Record that a norm undoes the scale of an axis; return the axis without the scale, but with its sign.

    Args:
        is_exact: whether the norm undoes the scale exactly for any eps.
        tensors: tensors of the norm layer; the layer's name is taken from their names.
    """
    layer_name = next(
        (value.layer for value in tensors if value is not None and value.state_name), step.layer or step.operation
    )
    for segment in resolve_axis(axis):
        for factor in magnitudes_of(segment.scale):
            factor.norms[layer_name] = factor.norms.get(layer_name, True) and is_exact
    return tuple(Segment(segment.space, segment.span, signs_of(segment.scale)) for segment in resolve_axis(axis))


def apply_affine(step: Step, axis: Axis, gain: Labelled | None, *offsets: Labelled | None) -> Axis:
    """Multiply an axis by a gain, and add offsets; return the axis.

    Args:
        gain: the gain, (channel) or (1, channel, 1, 1).
        offsets: the offsets, (channel) or (1, channel, 1, 1) each. A threshold counts as an offset: max(sx, st) = s
            max(x, t).
    """
    for value, role in ((gain, "gain"), *((offset, "offset") for offset in offsets)):
        if value is None:
            continue
        value.role = role
        channels = _channel_axis(value)
        axis = multiply_axes(step, axis, channels) if role == "gain" else equate_axes(axis, channels)
    return axis


def _channel_axis(norm_tensor: Labelled) -> Axis:
    """Return the channel axis of a tensor of a norm, (channel) or (1, channel, 1, 1)."""
    if len(norm_tensor.axes) == 1:
        return norm_tensor.axes[0]
    for axis in (norm_tensor.axes[0], *norm_tensor.axes[2:]):
        pin_scale(axis)
    return norm_tensor.axes[1]


def batch_norm(
    step: Step,
    x: Labelled,
    gain: Labelled | None,
    offset: Labelled | None,
    mean: Labelled | None,
    variance: Labelled | None,
    eps: float,
) -> Labelled:
    """Rule of batch norm: normalise channels (axis 1) by running statistics, or by batch statistics if there are no
    running statistics."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    if mean is not None and variance is not None:
        mean.role, variance.role = "mean", "variance"
        equate_axes(x.axes[1], mean.axes[0])
        for a, b in join_axes(x.axes[1], variance.axes[0]):
            equate_products(b.scale, multiply_products({}, a.scale, last_power=2))
        if variance.shift not in (0.0, eps):
            step.refuse("one variance for norms with several eps")
        variance.shift = eps
    channels = remove_scale(step, x.axes[1], mean is not None, gain, mean)
    return Labelled((x.axes[0], apply_affine(step, channels, gain, offset), *x.axes[2:]))


def response_norm(step: Step, x: Labelled, gain: Labelled | None, *offsets: Labelled | None) -> Labelled:
    """Rule of filter response norm (Singh & Krishnan 2020) and instance norm: normalise each channel (axis 1) over its
    map."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    channels = remove_scale(step, x.axes[1], False, gain)
    return Labelled((x.axes[0], apply_affine(step, channels, gain, *offsets), *x.axes[2:]))


def group_norm(step: Step, x: Labelled, groups: int, gain: Labelled | None, offset: Labelled | None) -> Labelled:
    """Rule of group norm (Wu & He 2018): blocks of channels (axis 1) move as wholes, and one scale of each block is
    undone."""
    for axis in (x.axes[0], *x.axes[2:]):
        pin_scale(axis)
    if groups == 1:
        _tie_axis(x.axes[1])
    channels_per_group = x.shape[1] // groups
    for segment in resolve_axis(x.axes[1]) if groups > 1 else ():
        if segment.length % channels_per_group:
            step.refuse(
                f"groups of {channels_per_group} channels across the ends of what {segment.space.name!r} writes"
            )
        groups_in_segment = segment.length // channels_per_group
        for factor in segment.scale:
            tie_values(factor, groups_in_segment)
        if segment.space.pinned or segment.span % channels_per_group == 0 or groups_in_segment == 1:
            continue
        if channels_per_group % segment.span:
            step.refuse(f"groups of {channels_per_group} channels through units of {segment.span}")
        split_into_blocks(segment.space, groups_in_segment)
    channels = remove_scale(step, x.axes[1], False, gain)
    return Labelled((x.axes[0], apply_affine(step, channels, gain, offset), *x.axes[2:]))


def layer_norm(step: Step, x: Labelled, axis_count: int, gain: Labelled | None, offset: Labelled | None) -> Labelled:
    """Rule of layer norm (Ba et al. 2016): normalise over the last `axis_count` axes together."""
    rank = len(x.axes)
    return axes_norm(step, x, range(rank - axis_count, rank), gain, offset)


def axes_norm(step: Step, x: Labelled, axes: Sequence[int], gain: Labelled | None, offset: Labelled | None) -> Labelled:
    """Rule of a norm over several axes at once: their units move freely, and the norm undoes one scale for all of them.

    Args:
        axes: numbers of the axes, in rising order.
        gain, offset: gain and offset of the norm, with the shape of the normalised axes.
    """
    if len(axes) > 1:
        for i in axes:
            pin_scale(x.axes[i])
    _tie_axis(x.axes[axes[0]])
    result = [remove_scale(step, axis, False, gain) for axis in x.axes]
    # The norm adds one offset to every entry of the other axes, so these axes must not change sign.
    if offset is not None:
        for i in set(range(len(x.axes))) - set(axes):
            pin_scale(result[i])
    for value, role in ((gain, "gain"), (offset, "offset")):
        if value is None:
            continue
        value.role = role
        for axis, i in zip(value.axes, axes, strict=True):
            if len(axes) > 1:
                pin_scale(axis)
            result[i] = multiply_axes(step, result[i], axis) if role == "gain" else equate_axes(result[i], axis)
    return Labelled(tuple(result))


def _tie_axis(axis: Axis) -> None:
    """Give all entries of an axis the same scale."""
    scales = [segment.scale for segment in resolve_axis(axis)]
    for factor in (factor for scale in scales for factor in scale):
        tie_values(factor, 1)
    for scale in scales[1:]:
        equate_products(scale, scales[0])
