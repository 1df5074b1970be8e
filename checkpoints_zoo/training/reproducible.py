"""What keeps a member a function of its seed on a GPU too, and torch's generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Let a GPU's convolutions give the same bits every time, and float32 be float32, while the block runs.

    cuDNN is kept from algorithms that add in any order, from choosing by a stopwatch, and from TF32.

    Args:
        device: that the block computes on; nothing changes for others than GPUs.
    """
    if device.type != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's own generators of the CPU and of a device, and set them back at the block's end.

    As torch.random.fork_rng with torch.manual_seed, but that other devices are left alone: that takes a tenth of a
    millisecond and more, every step.

    Args:
        seed: for both.
        device: that the block computes on.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        at = torch.cuda.current_device() if device.index is None else device.index  # type: ignore[redundant-expr]
        generators.append(torch.cuda.default_generators[at])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
