"""Mutated pickles against the reader that runs nothing: `python -m tests.fuzz_pickles --count 100000` reports.

A pickle passes if it is read, or refused by a FormatError or DamagedError; if memory stays below twice the pickle plus
64 MB; and if an audit hook of Python and `sys.modules` see no import, call of the system, file or socket. A seed makes
the same pickles again.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import tracemalloc
from collections import Counter, OrderedDict
from typing import Any

import numpy as np

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats.pickled_arrays import read_pickled_arrays
from tests.support.hmc_bucket import haiku_mapping

PROTOCOLS = (2, 3, 4, 5)
MEMORY = 64 << 20  # bytes beside twice the pickle
WATCHED = ("import", "exec", "compile", "open", "os.", "subprocess.", "pickle.", "socket.", "ctypes.", "marshal.")
OPCODES = b"(.0aebhjtuRcC}])Nqr\x81\x85\x86\x87\x8a\x8c\x93\x94\x95\x96\x97"


def originals() -> list[bytes]:
    """Return pickles of arrays and of haiku's mappings, of protocols 2 to 5."""
    arrays = {
        "params": {"conv": {"w": np.ones((2, 3), np.float32), "b": np.arange(4)}, "n": [1, 2.5, None, "x", b"y"]},
        "state": (np.bool_(True), np.asfortranarray(np.zeros((2, 2), ">f8")), OrderedDict(a=1), -(2**70)),
    }
    with haiku_mapping() as kind:
        mapping = {"params": kind({"frn": kind({"tau": np.zeros((3, 1, 1, 1, 2), np.float32)})}), "net_state": kind({})}
        return [pickle.dumps(value, protocol) for value in (arrays, mapping) for protocol in PROTOCOLS]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change, insert, delete or repeat some bytes of a pickle."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(4)
        opcode = rng.choice(OPCODES)
        if kind == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at:at] = bytes([opcode])
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 9)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
    return bytes(changed)


def fuzz(count: int, seed: int) -> Counter[str]:
    """Read mutated pickles; return how many were read, and refused by each error.

    Raises:
        AssertionError: memory was taken beyond the bound, or something was imported, opened or run.
    """
    rng, pickles, counts = random.Random(seed), originals(), Counter[str]()
    events: list[tuple[str, Any]] = []
    watching = True

    def note(event: str, arguments: Any) -> None:
        if watching and event.startswith(WATCHED):
            events.append((event, arguments))

    modules = set(sys.modules)
    tracemalloc.start()
    sys.addaudithook(note)
    try:
        for number in range(count):
            content = mutated(rng.choice(pickles), rng)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read_pickled_arrays(content, "mutated")
                counts["read"] += 1
            except (FormatError, DamagedError) as error:
                counts[type(error).__name__] += 1
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 2 * len(content) + MEMORY, f"pickle {number} took {peak:,} bytes: {content!r}"
    finally:
        watching = False
        tracemalloc.stop()
    assert not events, events[:3]
    assert set(sys.modules) == modules, set(sys.modules) - modules
    return counts


def main() -> None:
    """Read the command line, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts = fuzz(arguments.count, arguments.seed)
    print(f"{arguments.count:,} pickles: " + ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
