"""The named rule that turns a member's seed into the seeds of everything random in its training.

Nothing depends on the state of a generator that lives through a run: each epoch has seeds of its own, so a
run that goes on after a kill draws what an uninterrupted one would.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive(seed: int, purpose: str) -> int:
    """Derive a seed in [0, 2^31) for a purpose: the first 32 bits of sha256("<purpose>|<seed>"), modulo 2^31.

    >>> derive(7, "init") == int(hashlib.sha256(b"init|7").hexdigest()[:8], 16) % 2**31
    True
    """
    return int(hashlib.sha256(f"{purpose}|{seed}".encode()).hexdigest()[:8], 16) % 2**31


def generator(seed: int) -> torch.Generator:
    """Give the generator of a seed."""
    return torch.Generator().manual_seed(seed)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Give the generator that a purpose's seed has for one epoch."""
    return generator(derive(seed, f"epoch {epoch}"))


def epoch_order(member: int, epoch: int, inputs: int) -> Tensor:
    """Give the order (input,) in which a member sees the inputs in an epoch."""
    return torch.randperm(inputs, generator=epoch_generator(derive(member, "order"), epoch))


def epoch_choices(member: int, epoch: int, inputs: int, views: int) -> Tensor:
    """Give the augmented view (input,) that a member sees of each input in an epoch."""
    chosen = epoch_generator(derive(member, "augment"), epoch)
    return torch.randint(views, (inputs,), generator=chosen)
