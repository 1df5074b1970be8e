"""Seeds: the rule that derives all random numbers of a member's training from its seed.

Each epoch has its own seeds, so no generator lives through a run: a run that was killed and resumed draws the same
numbers as one without interruption. `deterministic` makes a GPU compute the same bits each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def derive_seed(seed: int, purpose: str) -> int:
    """Derive a seed in [0, 2^31) for a purpose: the first 32 bits of sha256("<purpose>|<seed>"), modulo 2^31.

    >>> derive_seed(7, "init") == int(hashlib.sha256(b"init|7").hexdigest()[:8], 16) % 2**31
    True
    """
    return int(hashlib.sha256(f"{purpose}|{seed}".encode()).hexdigest()[:8], 16) % 2**31


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator with a seed."""
    return torch.Generator().manual_seed(seed)


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return the generator of one epoch, from the seed of a purpose."""
    return seeded_generator(derive_seed(seed, f"epoch {epoch}"))


def epoch_order(member: int, epoch: int, input_count: int) -> Tensor:
    """Return the order (input,) of the inputs for a member in an epoch."""
    return torch.randperm(input_count, generator=epoch_generator(derive_seed(member, "order"), epoch))


def epoch_views(member: int, epoch: int, input_count: int, view_count: int) -> Tensor:
    """Return the numbers (input,) of the views of the inputs for a member in an epoch."""
    view_generator = epoch_generator(derive_seed(member, "augment"), epoch)
    return torch.randint(view_count, (input_count,), generator=view_generator)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make convolutions on a GPU deterministic and exact to float32 while the block runs.

    cuDNN uses no algorithm with a random order of sums, chooses none by timing, and does not round to TF32.

    Args:
        device: torch device on which the `with` block computes; only GPUs are affected.
    """
    if device.type != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@contextmanager
def seed_torch(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators of the CPU and of a device; restore them at the end of the block.

    torch.random.fork_rng with torch.manual_seed does the same, but for all devices, which takes 0.1 ms or more in every
    step.

    Args:
        seed: seed of the CPU's and the device's generator.
        device: torch device on which the `with` block computes.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        device_index = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
        generators.append(torch.cuda.default_generators[device_index])
    states = [seeded_generator.get_state() for seeded_generator in generators]
    for seeded_generator in generators:
        seeded_generator.manual_seed(seed)
    try:
        yield
    finally:
        for seeded_generator, state in zip(generators, states, strict=True):
            seeded_generator.set_state(state)
