"""The rules of functions of single entries, such as relu, gelu and tanh."""

from __future__ import annotations

from typing import Any

from checkpoints_zoo.symmetry.attention.frames import Limit
from checkpoints_zoo.symmetry.attention.labels import Label
from checkpoints_zoo.symmetry.attention.trace import Trace


def relu(trace: Trace, x: Any) -> Label:
    """Apply relu: permutations and positive scales stay."""
    label = trace.plain(trace.value(x))
    trace.frames.claim_units(label.coordinates, Limit.POSITIVE)
    return label


def odd_function(trace: Trace, x: Any) -> Label:
    """Apply an odd function to single entries: permutations and signs stay."""
    label = trace.plain(trace.value(x))
    trace.frames.claim_units(label.coordinates, Limit.NORM)
    return label


def unit_function(trace: Trace, x: Any, *options: Any, **named: Any) -> Label:
    """Apply a function to single entries: only permutations stay."""
    label = trace.value(x)
    return label if label.is_fixed else trace.one(label)
