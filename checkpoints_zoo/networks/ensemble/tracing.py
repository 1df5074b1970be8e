"""From a module to the steps of its network, where all its operations are known to treat members apart.

A module that does anything else has no program, and runs through its own code instead: control flow that depends on
values, hooks, operations across channels, random numbers, layers that keep something between calls.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from checkpoints_zoo.networks.ensemble.building import Builder
from checkpoints_zoo.networks.ensemble.program import Program
from checkpoints_zoo.networks.ensemble.values import Unknown
from checkpoints_zoo.networks.tracing import UNTRACEABLE, Tracer

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def program_of(module: nn.Module, rank: int) -> Program | None:
    """Derive the program of a module in eval mode; return None where it has none.

    Args:
        module: it is neither run nor changed.
        rank: of its inputs, the batch axis included.
    """
    layers = list(module.modules())
    if any(m.training or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS) for m in layers):
        return None
    try:
        twin, untouched = copy.deepcopy(module), copy.deepcopy(module)
        graph = Tracer().record(twin)
    except UNTRACEABLE:
        return None
    pairs = zip(twin.modules(), untouched.modules(), strict=True)
    if not all(_same(vars(a), vars(b)) for a, b in pairs):
        return None  # it keeps something between calls: one trace says nothing about the next call
    try:
        return Builder(twin, rank).build(graph)
    except Unknown:
        return None


def _same(a: Any, b: Any) -> bool:
    """Say whether two copies of what a module keeps are the same, as far as they can be compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | int | float | str | set | frozenset | torch.dtype | None):
        return bool(a == b)
    return True
