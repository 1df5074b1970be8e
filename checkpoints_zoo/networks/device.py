"""Devices: check that a device exists, query its free memory, and set the number of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from checkpoints_zoo.errors import TooLargeError, UsageError

SMALL_MEMBER_BYTES = 2**22  # Number of bytes of a member below which one thread is faster than several.
# Mean number of floating-point operations of a layer in a step's forward pass below which one thread trains faster.
# Measured beside twelve other processes on two cores: a step takes 5 to 370 times as long on two threads as on one.
SMALL_LAYER_FLOPS = 2**23


def check_device(device: str | torch.device) -> torch.device:
    """Check that a device exists; return it.

    Raises:
        UsageError: the device does not exist.
    """
    try:
        checked = torch.device(device)
        if checked.type == "meta":
            raise RuntimeError("a device without memory")
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(
            f"device {str(device)!r}", expected="a device of this machine", found=str(error).split("\n")[0]
        ) from error
    return checked


def check_memory(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> None:
    """Check that stacked tensors fit into memory.

    Raises:
        TooLargeError: the tensors need more memory than is free.
    """
    needed = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items())
    if (free := free_if_short(needed, device)) is not None:
        members = next(iter(shapes.values()))[0]
        raise TooLargeError(
            f"{members} stacked members on {device}",
            expected=f"at most {free:,} bytes, the memory that is free",
            found=f"{needed:,}",
            do=f"Use .batches({max(1, members * free // (2 * needed))}), a smaller dtype, or fewer members",
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if the free memory is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def free_if_short(needed_bytes: int, device: torch.device | None = None) -> int | None:
    """Return the number of free bytes of a device (the CPU by default) if they are fewer than needed.

    The result None means that the needed bytes are free, or that the free memory is unknown.
    """
    free = free_bytes(torch.device("cpu") if device is None else device)
    return free if free is not None and needed_bytes > free else None


def fits_easily(nbytes: int, device: torch.device) -> bool:
    """Say whether `nbytes` are less than a quarter of a device's free memory; true if the free memory is unknown."""
    free = free_bytes(device)
    return free is None or 4 * nbytes < free


def flops_per_layer(module: nn.Module, inputs: Tensor) -> float:
    """Count the floating-point operations of a forward pass, and divide them by the number of layers with weight
    matrices; return the quotient."""
    layer_count = sum(any(p.ndim > 1 for p in layer.parameters(recurse=False)) for layer in module.modules())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(inputs)
    total: int = counter.get_total_flops()
    return total / max(1, layer_count)


@contextmanager
def one_thread(is_small: bool = True) -> Iterator[None]:
    """Let torch compute on one thread while the `with` block runs, because a second thread slows down work on small
    tensors.

    On a busy machine a second thread costs much more, because every operation waits until it is scheduled. The number
    of threads belongs to the whole process; it is restored at the end of the block. A number that the user has set
    (OMP_NUM_THREADS, `torch.set_num_threads`) is the largest number that is used.

    Args:
        is_small: whether the tensors are small, so that one thread is used; if false, nothing changes.
    """
    thread_count = torch.get_num_threads()
    if is_small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)
