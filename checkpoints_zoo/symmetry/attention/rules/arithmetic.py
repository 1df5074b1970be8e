"""The rules of sums, products entry by entry, powers and averages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.attention.frames import FIXED, ONE, ZERO, Limit
from checkpoints_zoo.symmetry.attention.labels import Gain, Label, Parameter, fixed, padded, varies
from checkpoints_zoo.symmetry.attention.rules.attention import add_to_scores, multiply_scores
from checkpoints_zoo.symmetry.attention.trace import Trace


def add(trace: Trace, x: Any, y: Any, alpha: float = 1) -> Label:
    """Add two activations: they have one frame."""
    if not _is_tensor(x) or not _is_tensor(y):
        operand, number = (x, y) if _is_tensor(x) else (y, x)
        return _add_number(trace, operand, number)
    a, b = trace.value(x), trace.value(y)
    if a.core is not None or b.core is not None:
        return add_to_scores(trace, a, b, x, y)
    if a.is_mixed or b.is_mixed:
        return _add_mixed(trace, a, b)
    a, b = _joinable(trace, a), _joinable(trace, b)
    first, second = torch.broadcast_tensors(a.coordinates, b.coordinates)
    trace.frames.join(first, second)
    return Label(torch.where(first >= 0, first, torch.where((first == ZERO) | (second >= 0), second, first)))


def _add_number(trace: Trace, operand: Any, number: Any) -> Label:
    if isinstance(operand, Parameter) and isinstance(number, int | float):
        label = trace.value(operand)
        record = trace.value_records[operand.tensor]
        if len(trace.node.all_input_nodes[0].users) == 1 and operand.view.numel() == record.coordinates.numel():
            record.shift += number
            return label
    label = trace.value(operand)
    if label.core is not None or not number:
        return label
    return trace.one(label)


def _joinable(trace: Trace, label: Label) -> Label:
    """Prepare an activation for a sum. The gain of a layer that only this sum reads becomes part of the layer."""
    if label.gain is not None and not label.is_mixed:
        sources = {trace.frames.source[c] for c in label.coordinates.unique().tolist() if c >= 0}
        source = next(iter(sources))
        if len(sources) == 1 and source in trace.outputs and _is_only_read_here(trace, label):
            return Label(_take_gain_into_layer(trace, label, source))
    return trace.plain(label)


def _is_only_read_here(trace: Trace, label: Label) -> bool:
    node = next((n for n in trace.node.all_input_nodes if trace.labels[n] is label), None)
    while node is not None and len(node.users) == 1:
        label_of_node = trace.labels[node]
        if isinstance(label_of_node, Label) and label_of_node.gain is None:
            return True
        node = next((n for n in node.all_input_nodes if isinstance(trace.labels[n], Label)), None)
    return False


def _take_gain_into_layer(trace: Trace, label: Label, source: int) -> Tensor:
    assert label.gain is not None
    records = trace.outputs.pop(source)
    old = records[0].coordinates
    new = trace.frames.new(len(old), trace.frames.names[source])
    for record in records:
        record.coordinates, record.gain = new, label.gain.record
    trace.frames.tie(new, label.gain.record.coordinates)
    lookup = torch.full((int(old.max()) + 1,), FIXED)
    lookup[old] = new
    return lookup[label.coordinates.clamp(min=0)]


def _add_mixed(trace: Trace, a: Label, b: Label) -> Label:
    a, b = trace.without_gain(a), trace.without_gain(b)
    a, b = (replace(v, coordinates=v.coordinates.expand(trace.shape)) for v in (a, b))
    if not a.more and not b.more and torch.equal(a.coordinates, b.coordinates):
        trace.plain(b)
        return trace.plain(a)  # The units stay apart, as in x + 0.1 x³.
    terms = [(a.coordinates, a.factors), *a.more, (b.coordinates, b.factors), *b.more]
    (first, factor), *more = terms
    return Label(first, factor, tuple((c.expand(trace.shape), f) for c, f in more))


def subtract(trace: Trace, x: Any, y: Any, alpha: float = 1) -> Label:
    """Subtract two activations: they have one frame."""
    return add(trace, x, negate(trace, y) if _is_tensor(y) else -y)


def subtract_from(trace: Trace, x: Any, y: Any, alpha: float = 1) -> Label:
    """Subtract an activation from another one, or from a number."""
    return subtract(trace, y, x, alpha)


def negate(trace: Trace, x: Any) -> Any:
    """Multiply by -1."""
    return -x if isinstance(x, Tensor) else multiply(trace, x, -1.0)


def multiply(trace: Trace, x: Any, y: Any) -> Label:
    """Multiply two activations, or an activation by numbers."""
    if not _is_tensor(x) or not _is_tensor(y):
        operand, number = (x, y) if _is_tensor(x) else (y, x)
        label = trace.value(operand)
        if label.core is not None or isinstance(number, Tensor) or not isinstance(number, int | float):
            return label
        return _scale(trace, label, torch.full([1] * label.coordinates.ndim, float(number), dtype=torch.float64))
    for operand, other in ((x, y), (y, x)):
        if isinstance(other, Parameter) and not isinstance(operand, Parameter):
            label = trace.value(operand)
            if not label.is_fixed and label.core is None:
                label = replace(label, coordinates=label.coordinates.expand(trace.shape))
                return multiply_by_parameter(trace, label, other)
    a, b = trace.value(x), trace.value(y)
    if a.core is not None or b.core is not None:
        return multiply_scores(trace, a, b, x, y)
    if a.is_fixed or b.is_fixed:
        label, other, operand = (b, a, x) if a.is_fixed else (a, b, y)
        label = replace(label, coordinates=label.coordinates.expand(trace.shape))
        if isinstance(operand, Tensor):
            return _scale(trace, label, operand.double())
        is_same = [
            size == 1
            for i, size in enumerate(padded(other.coordinates.shape, len(trace.shape)))
            if varies(label.coordinates, i)
        ]
        return label if all(is_same) else trace.one(label)
    if _is_gain(trace, b) or _is_gain(trace, a):
        gain, label = (b, a) if _is_gain(trace, b) else (a, b)
        label = replace(label, coordinates=label.coordinates.expand(trace.shape))
        return multiply_by_parameter(trace, label, gain)
    return multiply_labels(trace, trace.plain(a), trace.plain(b))


def multiply_by_parameter(trace: Trace, label: Label, weight: Any) -> Label:
    """Multiply an activation by a vector: the vector stays beside the coordinates as long as it can."""
    label = trace.without_gain(label)
    value = trace.value(weight)
    coordinates = value.coordinates.expand(label.coordinates.shape)
    record = trace.record_of(coordinates)
    if record is None or label.more or label.factor is not None:
        return multiply_labels(trace, trace.plain(label), Label(coordinates))
    trace.frames.claim_units(coordinates, Limit.NONE)
    trace.frames.tie(label.coordinates, coordinates)
    trace.roles[record.tensor] = "gain"
    return replace(label, gain=Gain(record, coordinates))


def _is_gain(trace: Trace, label: Label) -> bool:
    """Return whether an activation is a parameter, to which a number was added at most."""
    sources = {trace.frames.source[c] for c in label.coordinates.unique().tolist() if c >= 0}
    records = {trace.frames.source[int(r.coordinates[0])] for r in trace.value_records.values()}
    return len(sources) == 1 and sources <= records and label.gain is None and not label.is_mixed


def multiply_labels(trace: Trace, a: Label, b: Label) -> Label:
    """Multiply two activations entry by entry: they move together, and one of them keeps its scales."""
    first, second = torch.broadcast_tensors(a.coordinates, b.coordinates)
    trace.frames.claim_units(first, Limit.NONE)
    trace.frames.claim_units(second, Limit.NONE)
    if not all(trace.frames.limit_of(c) & ONE == ONE for c in first.unique().tolist() if c >= 0):
        first, second = second, first
    trace.frames.claim_units(first, ONE)
    trace.frames.tie(first, second)
    return Label(torch.where(second >= 0, second, first))


def _scale(trace: Trace, label: Label, numbers: Tensor) -> Label:
    """Multiply an activation by numbers that are known."""
    if label.is_fixed:
        return fixed(trace.shape)
    factor = numbers.expand(label.coordinates.shape) * label.factors
    more = tuple((c, f * numbers) for c, f in label.more)
    return replace(label, factor=factor, more=more)


def divide(trace: Trace, x: Any, y: Any, **options: Any) -> Label:
    """Divide an activation by numbers."""
    if _is_tensor(y) and not (isinstance(y, Tensor) or trace.value(y).is_fixed):
        return multiply_labels(trace, trace.one(trace.value(x)), trace.one(trace.value(y)))
    return multiply(trace, x, y.reciprocal() if isinstance(y, Tensor) else (1 / y if isinstance(y, int | float) else y))


def power(trace: Trace, x: Any, exponent: Any) -> Label:
    """Raise to a power. The mean of squares over an axis keeps the orthogonal matrices."""
    label = trace.value(x)
    if exponent == 2 and label.gain is None and not label.is_mixed:
        return replace(label, squares=True)
    return trace.one(label)


def square(trace: Trace, x: Any) -> Label:
    """Square an activation, as a power of two does."""
    return power(trace, x, 2)


def mean(trace: Trace, x: Any, dims: Any = None, keepdim: bool = False, **options: Any) -> Label:
    """Average over axes: of positions, or of the squares of all coordinates of an axis."""
    label = trace.value(x)
    rank = label.coordinates.ndim
    axes = sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank)))
    if label.squares and axes == [rank - 1]:
        trace.claim_norm(label.coordinates, Limit.NORM)
        return fixed(trace.shape)
    label = trace.plain(label)
    if label.core is not None:
        return fixed(trace.shape)  # An average of attention weights over heads does not tell them apart.
    if any(varies(label.coordinates, axis) for axis in axes):
        kept = label.coordinates
        for axis in axes:
            if not varies(label.coordinates, axis):
                continue
            if all(bool((kept.select(axis, i) == kept.select(axis, 0)).all()) for i in range(kept.shape[axis])):
                continue
            first = kept.narrow(axis, 0, 1).expand_as(kept)
            if _is_feature_axis(trace, kept, axis):
                trace.one(label)
                return fixed(trace.shape)
            trace.frames.join(first, kept)
    coordinates = label.coordinates
    for axis in axes:
        coordinates = coordinates.narrow(axis, 0, 1)
    return Label(coordinates.reshape(trace.shape))


def _is_feature_axis(trace: Trace, coordinates: Tensor, axis: int) -> bool:
    """Return whether one layer's coordinates differ along an axis, as opposed to positions of several layers."""
    row = coordinates.movedim(axis, -1).reshape(-1, coordinates.shape[axis])[0]
    sources = [trace.frames.source[c] for c in row.unique().tolist() if c >= 0]
    return len(sources) > len(set(sources))


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, Label | Parameter | Tensor)
