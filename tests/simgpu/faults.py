"""Errors of CUDA's libraries, injected: memory that runs out, under each of the names that torch gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

OUT_OF_MEMORY: dict[str, Callable[[], BaseException]] = {
    "allocator": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "runtime": lambda: RuntimeError("CUDA error: out of memory"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn-internal": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@dataclass
class Fault:
    """An error that an operation raises.

    Args:
        operation: name of the operation in aten.
        error: makes the error.
        when: says of the operation's arguments whether it fails; None always.
        times: number of times that the error is raised; None without end.
    """

    operation: str
    error: Callable[[], BaseException]
    when: Callable[..., bool] | None = None
    times: int | None = None


ACTIVE: list[Fault] = []


@contextmanager
def failing(
    operation: str,
    error: Callable[[], BaseException],
    when: Callable[..., bool] | None = None,
    times: int | None = None,
) -> Iterator[None]:
    """Let an operation on a card fail while the `with` block runs; the arguments are those of `Fault`."""
    fault = Fault(operation, error, when, times)
    ACTIVE.append(fault)
    try:
        yield
    finally:
        ACTIVE.remove(fault)


def raise_injected(operation: str, arguments: tuple[Any, ...]) -> None:
    """Raise the error that is injected into an operation, if there is one."""
    for fault in ACTIVE:
        if fault.operation == operation and fault.times != 0 and (fault.when is None or fault.when(*arguments)):
            fault.times = None if fault.times is None else fault.times - 1
            raise fault.error()
