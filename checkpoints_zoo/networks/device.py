"""Devices: check that a device exists, query its free memory, and set the number of torch's threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from checkpoints_zoo.errors import TooLargeError, UsageError

P = ParamSpec("P")
T = TypeVar("T")
SMALL_MEMBER_BYTES = 2**22  # Number of bytes of a member below which one thread is faster than several.
# Mean number of floating-point operations of a layer in a step's forward pass below which one thread trains faster.
# Measured beside twelve other processes on two cores: a step takes 5 to 370 times as long on two threads as on one.
SMALL_LAYER_FLOPS = 2**23


def check_device(device: str | torch.device) -> torch.device:
    """Check that a device exists; return it, with its index if it is a GPU ("cuda" is "cuda:0").

    Raises:
        UsageError: the device does not exist.
    """
    try:
        checked = torch.device(device)
        if checked.type == "meta":
            raise RuntimeError("a device without memory")
        checked = torch.empty(0, device=checked).device
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
    """Return the free memory of a device in bytes, or None if the free memory is unknown.

    Memory that torch holds for its next tensors counts as free.
    """
    if device.type == "cuda":
        held_nbytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held_nbytes
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


def on_current_stream(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """Return the function for another thread to call, so that its work on a GPU goes to the stream that is current now.

    The caller may then use the function's results without waiting, and their memory is not reused too early.
    """
    if device.type != "cuda":
        return function
    stream = torch.cuda.current_stream(device)

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.stream(stream):
            return function(*args, **kwargs)

    return run


def fits_easily(nbytes: int, device: torch.device) -> bool:
    """Say whether `nbytes` are less than a quarter of a device's free memory; true if the free memory is unknown."""
    free = free_bytes(device)
    return free is None or 4 * nbytes < free


# Words of the errors by which torch, cuDNN and cuBLAS say that memory ran out.
_OUT_OF_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory|_ALLOC(ATION)?_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out.

    A CUDA graph whose capture ran out of memory raises an error of its own about the capture; the first error is its
    context.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if "captur" in str(error) and error.__context__ is not None:
        return is_out_of_memory(error.__context__)
    return _OUT_OF_MEMORY.search(str(error)) is not None


@contextmanager
def exact_float32() -> Iterator[None]:
    """Keep convolutions and products of float32 tensors from TF32, which rounds operands to 10 bits, while the `with`
    block runs.

    torch allows TF32 in convolutions on a GPU by default. The settings belong to the whole process.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=torch.backends.cudnn.deterministic,
            allow_tf32=False,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


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
