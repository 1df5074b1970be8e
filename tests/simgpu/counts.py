"""Counts of what the host asks of the simulated cards: launches, waits, bytes.

A launch is an operation of aten that is no view and computes at least one value; a convolution with a bias counts
twice, since cuDNN adds the bias in a pass of its own. An operation reads each operand once and writes each result once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Counts:
    """What happened in a `with counting()` block, in all threads.

    Args:
        launches: operations that the host queued one by one; captured and replayed operations are not among them.
        replays: replays of CUDA graphs.
        replayed_launches: operations that these replays held.
        captures: for each captured graph, its operations by name, which count as launches do.
        operations: launches by the operation's name.
        read, written: bytes that operations, replayed ones too, read and wrote on the cards.
        to_card, from_card: bytes that were copied between host and cards.
        waits: (operation, place in the code) -> how often the host waited for a card.
        synchronisations: calls that wait for a stream, an event or a card.
    """

    launches: int = 0
    replays: int = 0
    replayed_launches: int = 0
    captures: list[Counter[str]] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    read: int = 0
    written: int = 0
    to_card: int = 0
    from_card: int = 0
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    synchronisations: int = 0

    @property
    def host_waits(self) -> int:
        """How often the host waited: for values, and by calls that wait."""
        return self.waits.total() + self.synchronisations


ACTIVE: list[Counts] = []  # The counts of the blocks that run now.


@contextmanager
def counting() -> Iterator[Counts]:
    """Count while the `with` block runs; yield the counts."""
    from tests.simgpu.cards import synchronisation_count

    counts, before = Counts(), synchronisation_count()
    ACTIVE.append(counts)
    try:
        yield counts
    finally:
        ACTIVE.remove(counts)
        counts.synchronisations = synchronisation_count() - before
