"""Calls of aten's operations: what an operation's schema says, and the tensors among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

# torch's own code for CUDA runs these on a simulated card, too: they compute nothing.
NATIVE = {
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "resize_", "record_stream", "is_pinned",
    "_pin_memory", "detach", "lift_fresh", "_has_compatible_shallow_copy_type", "set_", "squeeze_", "unsqueeze_",
    "transpose_", "t_", "as_strided_", "swapdims_", "swapaxes_", "detach_", "resize_as_", "requires_grad_",
}  # fmt: skip
DRAWS_WITHOUT_GENERATOR = {
    "randn", "rand", "randint", "randperm", "native_dropout", "rand_like", "randn_like", "randint_like",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """What is known of an operation before it is called.

    Args:
        name: its name without that of the overload.
        is_native: whether it computes nothing, so that torch's own code can run it.
        is_view: whether its result shares the memory of its operand.
        is_composite: whether torch can take it apart into other operations.
        draws: whether it draws random numbers.
        changes: (position, name) of each argument that it writes.
        returns_changed: for each result, whether it is an argument that was written.
    """

    name: str
    is_native: bool
    is_view: bool
    is_composite: bool
    draws: bool
    changes: tuple[tuple[int, str], ...]
    returns_changed: tuple[bool, ...]

    def changed(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the arguments of a call that it writes: tensors, or lists of tensors."""
        return [kwargs[name] if name in kwargs else args[i] for i, name in self.changes]


@cache
def operation_of(func: OpOverload[..., Any]) -> Operation:
    """Return what the schema of an operation says."""
    schema, name = func._schema, func.overloadpacket.__name__
    changes = [
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    draws = name in DRAWS_WITHOUT_GENERATOR or any(a.name == "generator" for a in schema.arguments)
    returns = tuple(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    is_native = name in NATIVE
    is_composite = not is_native and func._can_decompose()
    return Operation(name, is_native, bool(func.is_view), is_composite, draws, tuple(changes), returns)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, in lists, too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace the tensors among arguments by what a function makes of them; return the arguments."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(function, each) for each in value])
    if isinstance(value, dict):
        return {name: map_tensors(function, each) for name, each in value.items()}
    return value
