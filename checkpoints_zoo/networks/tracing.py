"""Recording what a module does with torch.fx, one module at a time, while modules in other threads do what they do.

torch.fx puts its own code into all modules of the process while it traces, and takes it out afterwards: two traces at
once would leave it there, and a module that ran meanwhile would meet stand-ins that are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any

from torch import fx, nn

# What torch.fx, and code that meets its stand-ins for tensors, raise; and copies of what can't be copied.
UNTRACEABLE = (
    fx.proxy.TraceError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, NameError,
    AssertionError, LookupError,
)  # fmt: skip

_one_at_a_time = Lock()


class Tracer(fx.Tracer):
    """Record what a module does, its parameters and buffers as they are named."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def record(self, module: nn.Module) -> fx.Graph:
        """Trace a module; return the graph.

        Raises:
            those of UNTRACEABLE: what it does can't be traced.
        """
        with _one_at_a_time:
            return self.trace(module)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        return self.call_own(m, forward, args, kwargs)

    def call_own(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a layer of the module that is traced; return what stands for its result."""
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if get_ident() == self.thread else attr_val
