"""Files whose bytes are made on request: a 23 GB archive takes no disk and no time."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

BLOCK = 32  # bytes of one Philox counter


@dataclass(frozen=True)
class Virtual:
    """A file that is a function.

    Attributes:
        size: in bytes.
        read: (offset, length) -> bytes, always the same; called from several threads.
        sha: what the Hub lists as its sha256: any stable 64 hex digits.
    """

    size: int
    read: Callable[[int, int], bytes]
    sha: str


def described(text: str) -> str:
    """Return the sha256 of a file's description, in place of that of its bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def noise(seed: int, size: int, odd: int = 0xFF) -> Virtual:
    """Make a file of pseudo-random bytes, the same at every reading, and return it.

    Args:
        seed: another seed, other bytes.
        size: in bytes.
        odd: a mask for the bytes at odd positions. 0xBF makes every float16, bfloat16 and float32 finite
            (between -2 and 2), 0x3F makes them positive as well.

    >>> file = noise(7, 10**12)
    >>> file.read(10**11 + 5, 4) == file.read(10**11, 9)[5:]
    True
    """

    def read(offset: int, length: int) -> bytes:
        length = max(0, min(length, size - offset))
        first, last = offset // BLOCK, -(-(offset + length) // BLOCK)
        words = np.random.Philox(key=seed, counter=first).random_raw((last - first) * BLOCK // 8)
        raw = words.astype("<u8", copy=False).view(np.uint8)
        if odd != 0xFF:
            raw[1::2] &= odd
        start = offset - first * BLOCK
        return raw[start : start + length].tobytes()

    return Virtual(size, read, described(f"noise {seed} {size} {odd}"))


def filled(size: int, byte: int = 0) -> Virtual:
    """Make a file of one byte, repeated, and return it."""

    def read(offset: int, length: int) -> bytes:
        return bytes([byte]) * max(0, min(length, size - offset))

    return Virtual(size, read, described(f"filled {byte} {size}"))


def joined(*parts: bytes | Virtual) -> Virtual:
    """Put literal bytes and virtual files one behind the other, and return the whole.

    >>> joined(b"ab", filled(3, ord("-")), b"cd").read(1, 5)
    b'b---c'
    """
    files = [part for part in parts if (part.size if isinstance(part, Virtual) else len(part))]
    sizes = [part.size if isinstance(part, Virtual) else len(part) for part in files]
    ends = list(accumulate(sizes))

    def read(offset: int, length: int) -> bytes:
        pieces, i = [], bisect_right(ends, offset)
        while length > 0 and i < len(files):
            part, start = files[i], offset - (ends[i] - sizes[i])
            piece = part.read(start, length) if isinstance(part, Virtual) else part[start : start + length]
            pieces.append(piece)
            offset, length, i = offset + len(piece), length - len(piece), i + 1
        return b"".join(pieces)

    names = [part.sha if isinstance(part, Virtual) else hashlib.sha256(part).hexdigest() for part in files]
    return Virtual(ends[-1] if ends else 0, read, described(f"joined {names}"))
