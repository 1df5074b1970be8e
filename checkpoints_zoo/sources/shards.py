"""Shards that a copy writes: members read one by one, checked, and brought into our layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import manifest, member_bytes, safetensors
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.formats.safetensors import prefix, shard_header
from checkpoints_zoo.formats.selection import Key, format_ids

Row = dict[str, Any]


@dataclass
class Piece:
    """A snapshot in a shard that is to be written.

    Args:
        row: of the new manifest, which gets the place and the hash.
        at: its position among the rows to be copied, None for one that lies in the folder already.
        sha256: what its content must hash to, None where nobody knows.
    """

    row: Row
    at: int | None
    sha256: str | None

    @property
    def key(self) -> Key:
        """The member, and the epoch where it is not the final one."""
        return self.row["member"], None if self.row["final"] else self.row["epoch"]

    @property
    def prefix(self) -> str:
        return prefix(*self.key)


@dataclass
class Shard:
    """A shard that is to be written: its number, the key of its layout, and its snapshots in order."""

    number: int
    key: str
    layout: Layout
    pieces: list[Piece] = field(default_factory=list)

    @property
    def prefixes(self) -> list[str]:
        return [piece.prefix for piece in self.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return safetensors.first_offset(self.layout, self.prefixes) + len(self.pieces) * self.layout.nbytes


def written(folder: Path, shard: Shard, locations: Sequence[Location], name: str) -> Path:
    """Write a shard, unless it is there; return its path."""
    if like(folder, shard):  # of members that nobody has hashed before
        for piece, x in zip(shard.pieces, locations, strict=True):
            piece.sha256 = piece.sha256 or content_hash(x.layout, _read(x))
        if path := finished(folder, shard):
            return path
    members = _members(shard, locations, name)
    return safetensors.stream_shard(folder, shard.number, shard.layout, shard.prefixes, members)


def finished(folder: Path, shard: Shard) -> Path | None:
    """Look for a shard that an earlier copy has written whole; return its path, None where there is none."""
    wanted = [piece.sha256 for piece in shard.pieces]
    if None in wanted:
        return None
    start, step = safetensors.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for path in like(folder, shard):
        places = enumerate(shard.pieces)
        there = [Location(p.row["member"], p.prefix, path, start + i * step, shard.layout) for i, p in places]
        if member_bytes.hash_members(there) == wanted:
            return path
    return None


def like(folder: Path, shard: Shard) -> list[Path]:
    """List the files that have a shard's number, header and size; return their paths."""
    header = shard_header(shard.layout, shard.prefixes)
    size, found = len(header) + len(shard.pieces) * shard.layout.nbytes, []
    for path in sorted(folder.glob(f"{shard.number:05d}-*.safetensors")):
        if path.stat().st_size == size:
            with path.open("rb") as file:
                if file.read(len(header)) == header:
                    found.append(path)
    return found


def _members(shard: Shard, locations: Sequence[Location], name: str) -> Iterator[safetensors.Bytes]:
    """Read a shard's members one by one and check each; yield their bytes as they are to lie in it."""
    for piece, location in zip(shard.pieces, locations, strict=True):
        raw = _read(location)
        digest = content_hash(location.layout, raw)
        if piece.sha256 not in (None, digest):
            raise DamagedError(
                f"member {format_ids([piece.key])} of {name} in file {location.path}",
                expected=f"sha256 {str(piece.sha256)[:16]}…, as its row says",
                found=f"{digest[:16]}…",
                do="Its shard was not written. Get the member again, or leave it out",
                collection=name,
                member=location.member,
                path=location.path,
            )
        piece.sha256 = digest
        yield raw if location.layout == shard.layout else safetensors.repack(location.layout, raw, shard.layout)


def _read(location: Location) -> memoryview:
    return next(iter(member_bytes.read([location])))[1]


def place(shard: Shard, inside: str) -> None:
    """Write down in the rows of a shard's members where they lie now."""
    start, step = safetensors.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for i, piece in enumerate(shard.pieces):
        where = (inside, start + i * step, step, shard.key, shard.layout.dtype)
        piece.row.update(zip(manifest.LOCATION, where, strict=True))
        piece.row["sha256"] = piece.sha256
