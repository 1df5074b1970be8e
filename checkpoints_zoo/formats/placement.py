"""Whether files have the members' tensors where the manifest says: by the shard's header, or the member's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.header import Header, check_own_header, read_header, stamp_of
from checkpoints_zoo.formats.layout import TensorSpec
from checkpoints_zoo.formats.pieces import Location, buffer, fill


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
