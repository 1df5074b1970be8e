"""Devices: whether one is there, and whether something fits into its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from checkpoints_zoo.errors import TooLargeError, UsageError

SMALL_MEMBER_BYTES = 2**22  # bytes of a member whose operations are too small for a second thread


def check_device(device: str | torch.device) -> torch.device:
    """Check that a device is there; return it.

    Raises:
        UsageError: it is not.
    """
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise RuntimeError("a device without memory")
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(
            f"device {str(device)!r}", expected="a device of this machine", found=str(error).split("\n")[0]
        ) from error
    return found


def check_memory(shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, torch.dtype], device: torch.device) -> None:
    """Check that stacked tensors will fit into memory.

    Raises:
        TooLargeError: they will not.
    """
    needed = sum(torch.Size(shape).numel() * kinds[name].itemsize for name, shape in shapes.items())
    if (free := free_if_short(needed, device)) is not None:
        members = next(iter(shapes.values()))[0]
        raise TooLargeError(
            f"{members} stacked members on {device}",
            expected=f"at most {free:,} bytes, the memory that is free",
            found=f"{needed:,}",
            do=f"Use .batches({max(1, members * free // (2 * needed))}), a smaller dtype, or fewer members",
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, None where it can't be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def free_if_short(needed: int, device: torch.device | None = None) -> int | None:
    """Return the free memory of a device, the CPU by default, if fewer bytes are free than needed.

    None says that there is room, or that it can't be told.
    """
    free = free_bytes(torch.device("cpu") if device is None else device)
    return free if free is not None and needed > free else None


def fits_easily(nbytes: int, device: torch.device) -> bool:
    """Say whether so many bytes are less than a quarter of a device's free memory, as far as it can be told."""
    free = free_bytes(device)
    return free is None or 4 * nbytes < free


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """Let torch compute on one thread while the block runs: on small tensors, waking a second one costs more.

    On a busy machine much more: every operation waits for a thread that is not scheduled. The number of threads is
    the process's, so other threads' operations are concerned while the block runs; it is set back at its end.

    Args:
        when: whether the tensors are small; if not, nothing changes.
    """
    threads = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
