"""Members beyond memory: read chunk by chunk, the next one while one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from checkpoints_zoo.networks import device as devices
from checkpoints_zoo.networks.ensemble.running import halved, out_of_memory

Stacked = dict[str, Tensor]
Read = Callable[[range, torch.device, torch.dtype | None], Stacked]
T = TypeVar("T")


class Stream:
    """Members that are read whenever they are used.

    Args:
        read: gives the stacked tensors of members at consecutive positions, on a device and in a dtype.
        count: how many members there are.
        chunk: how many are read at a time.
        device, dtype: where and what they are to be.
    """

    def __init__(self, read: Read, count: int, chunk: int, device: torch.device, dtype: torch.dtype | None) -> None:
        self.read, self.count, self.chunk = read, count, chunk
        self.device, self.dtype = device, dtype

    def each(self, use: Callable[[range, Stacked], T]) -> Iterator[T]:
        """Read chunk by chunk; yield what `use` makes of each.

        Where memory is short, for reading or for using, chunks are half as large from there on, and a warning says so.
        """
        at, part = 0, self._part(0)
        with ThreadPoolExecutor(1, thread_name_prefix="zoo-read") as reader:
            coming = reader.submit(self._read, part)
            while part:
                following = None
                try:
                    stacked = coming.result()
                    if after := self._part(part.stop):
                        following = reader.submit(self._read, after)
                    made = use(part, stacked)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error) or len(part) == 1:
                        raise
                else:
                    at, part = part.stop, after
                    del stacked  # not held while its results are used
                    if following is not None:
                        coming = following
                    yield made
                    continue
                stacked = {}
                if following is not None:
                    wait([following])
                self.chunk = halved(len(part), self.device)
                part = self._part(at)
                coming = reader.submit(self._read, part)

    def _part(self, start: int) -> range:
        return range(start, min(start + self.chunk, self.count))

    def _read(self, part: range) -> Stacked:
        return self.read(part, self.device, self.dtype)

    def one(self, at: int) -> Stacked:
        """Read one member; return name -> (1, …)."""
        return self._read(range(at, at + 1))

    def part(self, positions: range) -> Stream:
        """Return a stream of some of the members."""

        def read(some: range, device: torch.device, dtype: torch.dtype | None) -> Stacked:
            chosen = positions[some.start : some.stop]
            if chosen.step == 1:
                return self.read(chosen, device, dtype)
            parts = [self.read(range(i, i + 1), device, dtype) for i in chosen]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

        return Stream(read, len(positions), self.chunk, self.device, self.dtype)

    def on(self, device: torch.device, dtype: torch.dtype | None) -> Stream:
        """Return a stream of the same members on another device, in another dtype."""
        return Stream(self.read, self.count, self.chunk, device, dtype)


def chunk_that_fits(one: Stacked, members: int, device: torch.device) -> int:
    """Return how many members to read at a time: two such chunks take half of the memory that is free.

    Args:
        one: the stacked tensors of one member.
        members: how many there are.
        device: whose memory it is.
    """
    each = sum(t.numel() * t.element_size() for t in one.values())
    free = devices.free_bytes(device)
    return members if free is None else max(1, min(members, free // max(1, 4 * each)))
