"""Memory that is short: recognised, halved, said."""

from __future__ import annotations

import warnings

import torch

from checkpoints_zoo.errors import SmallerChunk, TooLargeError


def out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory was asked for which isn't there."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in words or "can't allocate memory" in words)


def halved(members: int, device: torch.device) -> int:
    """Warn that only half as many members fit; return how many."""
    half = max(1, members // 2)
    warnings.warn(
        f"not enough memory on {device} for {members} members at once: {half} at a time from now on",
        SmallerChunk,
        stacklevel=5,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return half


def too_large(device: torch.device, batch: int) -> TooLargeError:
    return TooLargeError(
        f"one member on {device}",
        expected="memory for its weights and activations",
        found=f"less than a batch of {batch} needs",
        do="Give a smaller batch",
    )
