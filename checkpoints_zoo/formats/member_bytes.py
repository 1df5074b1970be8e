"""Whether files have the members' tensors where the manifest says: by the shard's header, or the member's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.layout import Layout, TensorSpec, content_hash
from checkpoints_zoo.formats.safetensors import Header, check_own_header, read_header, stamp_of

# Members' bytes, read in pieces through one reused buffer.


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


@lru_cache(maxsize=64)
def _header(path: Path, stamp: tuple[int, ...]) -> Header:
    return read_header(path)


def check_against_files(locations: Sequence[Location]) -> None:
    """Check that the files have the members' tensors where the manifest says."""
    headers: dict[Path, Header] = {}
    expected: dict[int, list[tuple[str, str, tuple[int, ...], int, int]]] = {}  # worked out once a layout
    alike: set[tuple[int, bytes]] = set()
    for x in locations:
        if x.layout.lead:
            _check_own(x, alike)
            continue
        if x.path not in headers:
            headers[x.path] = _header(x.path, stamp_of(x.path))
        get, prefix, base = headers[x.path].tensors.get, x.prefix, x.offset - headers[x.path].data_start
        if id(x.layout) not in expected:
            expected[id(x.layout)] = [
                (t.name, t.dtype, t.shape, t.offset, t.offset + t.nbytes) for t in x.layout.tensors
            ]
        for at, (name, dtype, shape, begin, end) in enumerate(expected[id(x.layout)]):
            if get(prefix + name) != (dtype, shape, base + begin, base + end):
                raise _elsewhere(x, x.layout.tensors[at], get(prefix + name), base + begin)


def _check_own(x: Location, alike: set[tuple[int, bytes]]) -> None:
    """Check a member of an archive, which has a header of its own before its tensors.

    Args:
        x: of the member.
        alike: (layout, header) of members that were found right: the next one is likely the same to the byte.
    """
    layout = x.layout
    begin, size = x.offset - layout.lead, x.path.stat().st_size
    if begin < 0 or x.offset + layout.nbytes > size:
        raise DamagedError(
            f"member {x.member} in file {x.path}",
            expected=f"bytes {begin:,} to {x.offset + layout.nbytes:,}, as the manifest says",
            found=f"a file of {size:,} bytes",
            do="Get the file again",
            member=x.member,
            path=x.path,
        )
    raw = bytes(fill(x, begin, buffer(layout.lead)))
    if (id(layout), raw) not in alike:
        check_own_header(raw, layout, f"member {x.member} in file {x.path}")
        alike.add((id(layout), raw))


def _elsewhere(
    x: Location, t: TensorSpec, found: tuple[str, tuple[int, ...], int, int] | None, begin: int
) -> DamagedError:
    return DamagedError(
        f"member {x.member} in file {x.path}",
        expected=f"tensor {x.prefix + t.name!r}, {t.dtype} {list(t.shape)} at {begin}, as the manifest says",
        found="no such tensor" if found is None else f"{found[0]} {list(found[1])} at {found[2]}",
        do="Manifest and file do not belong together; get the source again",
        member=x.member,
        tensor=t.name,
        path=x.path,
    )
