"""Rules of a card that a CPU does not know: tensors on one device, generators of the device, calls that wait."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

COPIES = {"copy_", "_to_copy", "_foreach_copy_", "set_", "lift_fresh"}  # These take tensors of several devices.
# The host needs their values, or the number of their results.
WAITING = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "bincount",
    "unique_consecutive", "repeat_interleave",
}  # fmt: skip
INDEX_WRITES = {"index_put", "index_put_", "_index_put_impl_"}
TAKE_SCALARS = {"where", "masked_fill", "masked_fill_", "fill_"}


class Mismatch(RuntimeError):
    """Tensors or generators of unequal devices meet in one operation."""


class Waited(RuntimeError):
    """The host waits where `torch.cuda.set_sync_debug_mode("error")` forbids it."""


class NotCapturable(RuntimeError):
    """The host waits while a graph is captured."""


def place_in_code() -> str:
    """Return file and line of the innermost frame of the package, its tests or its benchmarks."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/tests/simgpu/" not in path or "/test_" in path:
            for folder in ("/checkpoints_zoo/", "/tests/", "/benchmarks/"):
                if folder in path:
                    return f"{folder[1:]}{path.rpartition(folder)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def check_devices(func: OpOverload[..., Any], args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Check that the tensors of an operation lie on one device, as far as a card asks for it.

    Raises:
        Mismatch: they do not.
    """
    if len({t.device for t in tensors}) < 2:
        return
    name = func.overloadpacket.__name__
    on_cards = [t for t in tensors if t.is_cuda]
    on_host = [t for t in tensors if not t.is_cuda]
    if not on_cards or name in COPIES:
        return
    if len({t.device for t in on_cards if t.dim()}) > 1:
        raise Mismatch(f"{place_in_code()}: {func}: tensors on {', '.join(sorted({str(t.device) for t in on_cards}))}")
    if not on_host:
        return
    if name == "index":
        if args[0].is_cuda:
            return  # indices may lie on the host
    elif name in INDEX_WRITES:
        if args[0].is_cuda and (args[2].is_cuda or args[2].dim() == 0):
            return
    elif all(t.dim() == 0 for t in on_host) and (torch.Tag.pointwise in func.tags or name in TAKE_SCALARS):
        return
    raise Mismatch(
        f"{place_in_code()}: {func}: Expected all tensors to be on the same device, but found at least two devices, "
        f"{on_cards[0].device} and cpu!"
    )


def check_generator(func: OpOverload[..., Any], generator: torch.Generator | None, device_type: str) -> None:
    """Check that a generator is of the device that draws.

    Raises:
        Mismatch: it is of another device.
    """
    if generator is not None and generator.device.type != device_type:
        raise Mismatch(
            f"{place_in_code()}: {func}: Expected a {device_type!r} device type for generator but found "
            f"{generator.device.type!r}"
        )


def waits(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether the host waits for a card in an operation."""
    name = func.overloadpacket.__name__
    if name == "_to_copy":
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        if source.device.type == target.type:
            return False
        return not (kwargs.get("non_blocking") and (target.type == "cpu" or source.is_pinned()))
    if name == "copy_":
        target, source = args[:2]
        if target.device.type == source.device.type:
            return False
        without_waiting = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return not (without_waiting and (source if source.device.type == "cpu" else target).is_pinned())
    if name == "index" or name in INDEX_WRITES:
        indices = [i for i in args[1] if i is not None]
        return any(i.dtype in (torch.bool, torch.uint8) or i.device.type == "cpu" for i in indices)
    return name in WAITING and func is not torch.ops.aten.repeat_interleave.self_int
