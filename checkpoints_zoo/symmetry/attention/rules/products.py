"""The rules of products of matrices: by kernels, of queries with keys, of attention weights with values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checkpoints_zoo.symmetry.attention.labels import Gain, Label, Parameter, fixed, varies
from checkpoints_zoo.symmetry.attention.rules.arithmetic import add
from checkpoints_zoo.symmetry.attention.rules.attention import add_to_scores, attend, heads_of, score
from checkpoints_zoo.symmetry.attention.rules.layers import linear
from checkpoints_zoo.symmetry.attention.trace import Trace


def matmul(trace: Trace, x: Any, y: Any) -> Label:
    """Multiply stacks of matrices: queries by keys, attention weights by values, or an activation by a kernel."""
    if isinstance(y, Parameter) and y.view.ndim == 2 and not isinstance(x, Parameter):
        return linear(trace, x, Parameter(y.tensor, y.view.T))
    a, b = trace.value(x), trace.value(y)
    if a.is_fixed and b.is_fixed:
        return fixed(trace.shape)
    heads = trace.shape[:-2]
    if a.core is not None:
        rows = heads_of(a.core, trace.shape)
        return attend(trace, a.core, b, heads, rows)
    moves_inside = varies(a.coordinates, a.coordinates.ndim - 1), varies(b.coordinates, b.coordinates.ndim - 2)
    if any(moves_inside) and not b.is_fixed and not a.is_fixed:
        b = _transposed(b)
        core, rows = score(trace, a, b, heads)
        if bool((rows != heads_of(core, trace.shape)).any()):
            core.pinned = True
        return replace(fixed(trace.shape), core=core)
    if a.is_fixed and not moves_inside[1]:
        # Positions are mixed by fixed numbers.
        b = trace.plain(b)
        trace.frames.join(b.coordinates.narrow(-2, 0, 1).expand_as(b.coordinates), b.coordinates)
        return Label(b.coordinates.narrow(-2, 0, 1).expand(trace.shape))
    trace.refuse("a product of these activations")


def baddbmm(trace: Trace, bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Label:
    """Multiply stacks of matrices, and add."""
    result = matmul(trace, x, y)
    a, b = result, trace.value(bias)
    return add_to_scores(trace, a, b, result, bias) if a.core is not None else add(trace, result, bias)


def addmm(trace: Trace, bias: Any, x: Any, weight: Any) -> Label:
    """Contract the last axis with a kernel (in, out), and add a bias."""
    if not isinstance(weight, Parameter):
        return baddbmm(trace, bias, x, weight)
    return linear(trace, x, Parameter(weight.tensor, weight.view.T), bias)


def _transposed(label: Label) -> Label:
    gain = label.gain and Gain(label.gain.record, label.gain.coordinates.mT)
    more = tuple((c.mT, f.expand(c.shape).mT) for c, f in label.more)
    return Label(label.coordinates.mT, None if label.factor is None else label.factors.mT, more, gain)
