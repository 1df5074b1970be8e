"""The rules of operations that only move entries, such as `view`, or change nothing, such as dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.attention.frames import ZERO, Limit
from checkpoints_zoo.symmetry.attention.labels import Gain, Label, Parameter
from checkpoints_zoo.symmetry.attention.trace import (
    Trace,
    operands_in,
    operation_name,
    operation_stem,
    replace_operands,
    run_node,
)

# Views, which a parameter may pass before its first use.
_VIEWS = frozenset([
    "view", "transpose", "permute", "t", "mT", "numpy_T", "slice", "select", "chunk", "split", "split_with_sizes",
    "unsqueeze", "squeeze", "alias",
])  # fmt: skip
# Operations that only move entries.
MOVES = _VIEWS | frozenset([
    "reshape", "_unsafe_view", "broadcast_to", "expand", "narrow", "cat", "stack", "unbind", "roll", "flatten",
    "unflatten", "contiguous", "clone", "index", "repeat", "repeat_interleave", "movedim", "pad", "constant_pad_nd",
    "index_select",
])  # fmt: skip
# Moves that leave the matrices of scores in their order.
_KEEP_HEADS = frozenset(["view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "contiguous", "clone", "alias"])
# Operations that change nothing.
SAME = frozenset(["dropout", "to", "type_as", "_to_copy", "detach", "lift_fresh_copy"])


def same(trace: Trace, x: Any, *options: Any, **named: Any) -> Label:
    """Rule of dropout and of casts, which change nothing."""
    return trace.value(x)


def nothing(trace: Trace, *arguments: Any, **options: Any) -> None:
    """Rule of checks, which have no result."""


def move(trace: Trace, *arguments: Any, **options: Any) -> Any:
    """Rule of operations that only move entries: they move the coordinates alike."""
    node, operands = trace.node, list(operands_in((arguments, options)))
    stem = operation_stem(node)
    if stem in _VIEWS and len(operands) == 1 and isinstance(operands[0], Parameter):
        views = run_node(node, (operands[0].view, *arguments[1:]), options)
        if isinstance(views, Tensor):
            return Parameter(operands[0].tensor, views)
        return tuple(Parameter(operands[0].tensor, view) for view in views)
    if isinstance(arguments[0], tuple | list):
        arguments = ([trace.value(operand) for operand in arguments[0]], *arguments[1:])
        operands = list(operands_in((arguments, options)))
    labels = [trace.value(operand) for operand in operands]
    if any(label.squares for label in labels):
        labels = [trace.one(label) if label.squares else label for label in labels]
    if operation_name(node).startswith("aten.index.Tensor") and any(
        isinstance(index, Label | Parameter) for index in (arguments[1] or ())
    ):
        if all(label.is_fixed for label in labels):
            return trace.fixed_result()
        trace.refuse("an index that is computed from inputs")
    with_gain = [label for label in labels if label.gain is not None]
    if with_gain and (len({id(label.gain.record) for label in with_gain if label.gain}) > 1 or len(labels) > 1):
        labels, with_gain = [trace.without_gain(label) for label in labels], []
    cores = {id(label.core): label.core for label in labels if label.core is not None}
    terms = max(len(label.more) for label in labels)
    has_factor = any(label.factor is not None for label in labels)

    def moved(parts: Sequence[Tensor]) -> Any:
        remaining = iter(parts)
        swapped = replace_operands((arguments, options), lambda operand: next(remaining))
        return run_node(node, *swapped)

    def each(parts: Sequence[Tensor]) -> list[Tensor]:
        result = moved(parts)
        return [result] if isinstance(result, Tensor) else list(result)

    coordinates = each([label.coordinates.contiguous() for label in labels])
    factors = each([label.factors.contiguous() for label in labels]) if has_factor or terms else None
    more = []
    for i in range(terms):
        pair = [label.more[i] if i < len(label.more) else _no_term(label) for label in labels]
        more.append((each([c.contiguous() for c, _ in pair]), each([f.expand(c.shape).contiguous() for c, f in pair])))
    gains = each([with_gain[0].gain.coordinates.contiguous()]) if with_gain and with_gain[0].gain else None
    core = next(iter(cores.values()), None) if len(cores) == 1 else None
    if core is not None and (len(labels) > 1 or stem not in _KEEP_HEADS):
        # The matrices of scores may be in another order, or beside scores of another kind.
        core.pinned = True
        for label in labels:
            trace.frames.limit(label.coordinates, Limit.PINNED)
    result = tuple(
        Label(
            coordinates[j],
            factors[j] if factors else None,
            tuple((c[j], f[j]) for c, f in more),
            Gain(with_gain[0].gain.record, gains[j]) if gains and with_gain[0].gain else None,
            core=core,
        )
        for j in range(len(coordinates))
    )
    return result[0] if isinstance(node.meta["val"], Tensor) else result


def _no_term(label: Label) -> tuple[Tensor, Tensor]:
    """Return a term (coordinates, factors) that adds nothing."""
    shape = label.coordinates.shape
    return torch.full((), ZERO).expand(shape), torch.zeros((), dtype=torch.float64).expand(shape)
