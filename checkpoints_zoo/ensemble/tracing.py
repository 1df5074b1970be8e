"""From a module to the steps of its network, where all its operations are known to treat members apart.

A module that does anything else has no program, and runs through its own code instead: control flow that depends on
values, hooks, operations across channels, random numbers, layers that keep something between calls.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

import torch
from torch import fx, nn

from checkpoints_zoo.ensemble.building import Builder
from checkpoints_zoo.ensemble.program import Program
from checkpoints_zoo.ensemble.values import Unknown

# What torch.fx, and code that meets its stand-ins for tensors, raise; and copies of what can't be copied.
_UNTRACEABLE = (
    fx.proxy.TraceError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, NameError,
    AssertionError, LookupError,
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_one_at_a_time = Lock()  # torch.fx puts its own code into all modules while it traces, and takes it out afterwards


class _Tracer(fx.Tracer):
    """Record what a module does, and let modules that run in other threads meanwhile do what they do."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return super().call_module(m, forward, args, kwargs) if get_ident() == self.thread else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if get_ident() == self.thread else attr_val


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
        with _one_at_a_time:
            graph = _Tracer().trace(twin)
    except _UNTRACEABLE:
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
