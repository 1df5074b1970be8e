"""The rules of layers: linear layers, convolutions, embeddings, and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from checkpoints_zoo.symmetry.attention.frames import Limit
from checkpoints_zoo.symmetry.attention.labels import Label, Parameter, Record, fixed
from checkpoints_zoo.symmetry.attention.rules.arithmetic import multiply_by_parameter
from checkpoints_zoo.symmetry.attention.trace import Trace


def linear(trace: Trace, x: Any, weight: Any, bias: Any = None) -> Label:
    """Contract the last axis with a kernel (out, in)."""
    label = trace.value(x)
    if not isinstance(weight, Parameter):
        trace.refuse("a kernel that is computed from other tensors")
    is_known = trace.is_kernel(weight.tensor)
    if weight.tensor in trace.value_records and not is_known:
        trace.refuse(f"kernel {weight.tensor!r}, which is added elsewhere")
    if label.core is not None:
        label.core.pinned = True  # A product over heads tells them apart.
        for operand in (weight, bias):
            for record in trace.axes(operand) if isinstance(operand, Parameter) else ():
                trace.frames.limit(record.coordinates, Limit.PINNED)
        return replace(fixed(trace.shape), core=label.core)
    rows, columns = trace.axes(weight)
    if rows.gain is not None or columns.gain is not None:
        trace.refuse(f"kernel {weight.tensor!r}, which is used beside a gain and again")
    label = _contracted(trace, label, columns, is_known)
    if not label.is_fixed:
        row = trace.rows(label.coordinates)
        trace.frames.claim([row])
        trace.frames.join(row, columns.coordinates, dual=True)
    else:
        trace.frames.limit(columns.coordinates, Limit.PINNED)
    written = [rows]
    if bias is not None:
        written += _add_bias(trace, rows.coordinates, bias)
    if not is_known:
        trace.outputs[trace.frames.source[int(rows.coordinates[0])]] = written
    return Label(rows.coordinates.expand(*label.coordinates.shape[:-1], -1))


def _contracted(trace: Trace, label: Label, columns: Record, is_known: bool) -> Label:
    """Prepare an activation for its product with a kernel; return its label without a gain."""
    if label.gain is not None and not label.more and label.factor is None and not is_known:
        columns.gain = label.gain.record
        return replace(label, gain=None)
    return trace.plain(label)


def _add_bias(trace: Trace, output: Tensor, bias: Any) -> list[Record]:
    """Let a bias have the coordinates of the output of a layer; return the records of the bias."""
    if isinstance(bias, Parameter) and bias.tensor not in trace.value_records:
        (record,) = trace.axes(bias)
        trace.frames.join(output, record.coordinates)
        return [record]
    value = trace.value(bias)
    trace.frames.join(output, trace.plain(value).coordinates)
    return []


def embedding(trace: Trace, weight: Any, indices: Any, *options: Any) -> Label:
    """Look up rows of a table: rows keep their order, and their entries are coordinates."""
    rows, columns = trace.axes(weight)
    trace.frames.limit(rows.coordinates, Limit.PINNED)
    return Label(columns.coordinates.expand(trace.shape))


def conv2d(
    trace: Trace, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Label:  # fmt: skip
    """Contract the axis of channels, after the batch, with a kernel (out, in, *window)."""
    if groups != 1 or not isinstance(weight, Parameter):
        trace.refuse(f"{groups} groups")
    label = trace.plain(trace.value(x))
    rows, columns, *window = trace.axes(weight)
    for record in window:
        trace.frames.limit(record.coordinates, Limit.PINNED)
    if label.is_fixed:
        trace.frames.limit(columns.coordinates, Limit.PINNED)
    else:
        row = trace.rows(label.coordinates.movedim(1, -1))
        trace.frames.claim([row])
        trace.frames.join(row, columns.coordinates, dual=True)
    if bias is not None:
        _add_bias(trace, rows.coordinates, bias)
    back = [1] * (len(trace.shape) - 2)
    return Label(rows.coordinates.reshape(-1, *back).expand(trace.shape))


def layer_norm(
    trace: Trace, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, *options: Any
) -> Label:
    """Normalise over the last axis: matrices keep the norm, and the vector of ones."""
    if len(shape) != 1:
        trace.refuse("a norm over several axes")
    label = trace.plain(trace.value(x))
    trace.claim_norm(label.coordinates, Limit.NORM | Limit.MEAN)
    return _affine(trace, label, weight, bias)


def rms_norm(trace: Trace, x: Any, shape: Sequence[int], weight: Any = None, *options: Any) -> Label:
    """Divide by the root of the mean square over the last axis: matrices keep the norm."""
    if len(shape) != 1:
        trace.refuse("a norm over several axes")
    label = trace.plain(trace.value(x))
    trace.claim_norm(label.coordinates, Limit.NORM)
    return _affine(trace, label, weight, None)


def _affine(trace: Trace, label: Label, weight: Any, bias: Any) -> Label:
    if weight is not None:
        label = multiply_by_parameter(trace, label, weight)
    if bias is not None:
        offset = trace.value(bias).coordinates.expand(label.coordinates.shape)
        trace.frames.join(label.coordinates, offset)
        record = trace.record_of(offset)
        if record is not None:
            trace.roles[record.tensor] = "offset"
            if label.gain is not None:
                record.gain, record.is_divided = label.gain.record, True
    return label
