"""Members' bytes, read in pieces through one reused buffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.layout import Layout, content_hash

BUFFER_BYTES = 2**20  # small enough for the cache: what was read is converted and checked from there


@dataclass(frozen=True, slots=True)
class Location:
    """Where one snapshot's bytes lie.

    Args:
        member: its id, for errors.
        prefix: what stands before its tensor names in the file ("000123/").
        path: the file.
        offset: of the first byte in the file.
        layout: of the bytes.
    """

    member: int
    prefix: str
    path: Path
    offset: int
    layout: Layout


def read(
    locations: Sequence[Location], buffer_bytes: int = BUFFER_BYTES
) -> Iterator[tuple[list[Location], memoryview]]:
    """Read members' bytes in pieces through one reused buffer; yield (members, their bytes one after another).

    The bytes are only good until the next piece is asked for.

    Raises:
        DamagedError: a file is cut.
    """
    for group in groups(locations, buffer_bytes):
        size = sum(x.layout.nbytes for x in group)
        there = group[0].path.stat().st_size
        if there < group[0].offset + size:  # before memory is asked for
            raise _cut(group[0], group[0].offset + size, there)
        yield group, fill(group[0], group[0].offset, buffer(size))


def groups(locations: Sequence[Location], most: int) -> Iterator[list[Location]]:
    """Join neighbours in one file into groups of at most so many bytes, or of one member."""
    group: list[Location] = []
    for x in locations:
        last = group[-1] if group else x
        joins = x.layout is last.layout and x.path == last.path and x.offset == last.offset + last.layout.nbytes
        if group and not (joins and (len(group) + 1) * x.layout.nbytes <= most):
            yield group
            group = []
        group.append(x)
    if group:
        yield group


_kept = threading.local()


def buffer(size: int) -> memoryview:
    """Return this thread's buffer, grown to so many bytes: fresh memory costs more than reading into old."""
    if len(getattr(_kept, "buffer", b"")) < size:
        _kept.buffer = memoryview(bytearray(max(size, BUFFER_BYTES)))
    kept: memoryview = _kept.buffer
    return kept[:size]


def fill(location: Location, offset: int, buffer: memoryview) -> memoryview:
    """Read bytes of a file into the buffer; return it."""
    with location.path.open("rb", buffering=0) as file:
        read_at(file, location, offset, buffer)
    return buffer


def read_at(file: FileIO, location: Location, offset: int, buffer: memoryview) -> None:
    file.seek(offset)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise _cut(location, offset + len(buffer), offset + done)
        done += count


def _cut(location: Location, expected: int, found: int) -> DamagedError:
    return DamagedError(
        f"file {location.path}",
        expected=f"{expected:,} bytes or more",
        found=f"{found:,}",
        do="Get the file again",
        member=location.member,
        path=location.path,
    )


def hash_members(locations: Sequence[Location]) -> list[str]:
    """Hash members' contents from their bytes; return 64 hex digits each."""
    hashes = []
    for group, raw in read(locations):
        size = group[0].layout.nbytes
        hashes += [content_hash(x.layout, raw[i * size : (i + 1) * size]) for i, x in enumerate(group)]
    return hashes
