"""Derive a program (a list of steps) from a module, if every operation is known to compute each member on its own.

Members that run side by side share one tensor, in one of two layouts. In the channel layout they lie along the
channels, (batch, member·channel, …); in the batch layout along the batch axis, (member·batch, …). `program` has the
steps of the first, `batch_layout` those of the second.

A module has no program, and is run by its own code, if it has control flow that depends on values, hooks, operations
across inputs, random numbers, or layers that keep state between calls.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from checkpoints_zoo.networks.ensemble.operations import add_call
from checkpoints_zoo.networks.ensemble.program import Program
from checkpoints_zoo.networks.ensemble.program_builder import ProgramBuilder
from checkpoints_zoo.networks.ensemble.traced import UnknownOperation
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer

_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def derive_program(module: nn.Module, input_rank: int) -> Program | None:
    """Derive the program of a module in eval mode; return the program, or None if the module has none.

    Args:
        module: the module, which is neither run nor changed.
        input_rank: number of axes of the inputs, including the batch axis.
    """
    layers = list(module.modules())
    if any(m.training or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOK_ATTRIBUTES) for m in layers):
        return None
    try:
        traced_copy, untraced_copy = copy.deepcopy(module), copy.deepcopy(module)
        graph = Tracer().record_graph(traced_copy)
    except TRACE_ERRORS:
        return None
    pairs = zip(traced_copy.modules(), untraced_copy.modules(), strict=True)
    if not all(_is_unchanged(vars(untraced), vars(traced)) for traced, untraced in pairs):
        return None  # The call changed attributes of the module, so a trace may not hold for the next call.
    try:
        return ProgramBuilder(traced_copy, input_rank).build(graph, add_call)
    except UnknownOperation:
        return None


def _is_unchanged(value_before: Any, value_after: Any) -> bool:
    """Say whether an attribute of a module is the same before and after a trace; values of two types count as
    different."""
    if type(value_before) is not type(value_after):
        return False
    if isinstance(value_before, dict):
        return value_before.keys() == value_after.keys() and all(
            _is_unchanged(value_before[k], value_after[k]) for k in value_before
        )
    if isinstance(value_before, list | tuple):
        return len(value_before) == len(value_after) and all(
            _is_unchanged(x, y) for x, y in zip(value_before, value_after, strict=True)
        )
    if isinstance(value_before, bool | int | float | str | set | frozenset | torch.dtype | None):
        return bool(value_before == value_after)
    return True
