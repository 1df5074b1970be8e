"""Members of gzipped archives, which can only be read from front to back: streamed once and laid aside until written.

OUT/.import/NAME/KEY/000007.safetensors     a member's file, by its position: no name in an archive becomes a file's
OUT/.import/NAME/KEY/index.json             what the archive holds, once it was read to its end
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

from checkpoints_zoo.errors import FormatError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.interop.ingest.origin import Origin, Say
from checkpoints_zoo.sources import archives, fetching, hub
from checkpoints_zoo.sources.archives import Entry, Head, Index
from checkpoints_zoo.sources.archives.tar import BLOCK
from checkpoints_zoo.sources.ranges import Remote

PIECE = 2**23  # bytes of one range


def key_of(origin: Origin, inside: str) -> str:
    """Name the folder that an archive's members are laid aside in: another one once the archive has changed."""
    if origin.repo is None:
        stat = (origin.root / inside).stat()
        stamp = f"{inside} {stat.st_size} {stat.st_mtime_ns}"
    else:
        stamp = f"{origin.repo} {inside}"
    return hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def staged(origin: Origin, aside: Path, say: Say) -> dict[str, Index]:
    """Stream the gzipped archives of an origin that were not streamed before; return their indexes by path.

    Args:
        origin: whose archives they are.
        aside: folder for their members.
        say: told of each archive.

    Raises:
        DamagedError: an archive that is cut, or has a damaged member.
        NetworkError, AccessError: a repo that can't be read.
    """
    return {p: _staged(origin, p, aside / key_of(origin, p), say) for p in origin.archives if p in origin.gzips}


def _staged(origin: Origin, inside: str, folder: Path, say: Say) -> Index:
    known = folder / "index.json"
    if known.is_file():
        try:
            return Index.from_json(catalog.read_json(known))
        except FormatError:
            pass  # of another version: streamed again
    say(f"{inside}: a gzipped archive, read once from front to back …")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    heads: dict[tuple[Any, ...], int] = {}
    kinds, entries, at = list[Head](), list[Entry](), 0
    with _opened(origin, inside) as file:
        for position, (name, header, raw) in enumerate(archives.stream(file, inside)):
            tensors = tuple((n, dtype, shape) for n, (dtype, shape, _, _) in header.tensors.items())
            key = (header.data_start, tensors)
            if key not in heads:
                heads[key] = len(kinds)
                kinds.append(Head(header.data_start, tensors))
            # The index is that of the members one behind the other: their places in the archive say nothing.
            entries.append(Entry(name, at, at + BLOCK, heads[key], True))
            at += BLOCK + len(raw)
            (folder / f"{position:06d}.safetensors").write_bytes(raw)
    index = Index(inside, at, "tar", tuple(kinds), tuple(entries))
    catalog.write_json(index.to_json(), known)
    return index


def _opened(origin: Origin, inside: str) -> IO[bytes]:
    if origin.repo is None:
        return (origin.root / inside).open("rb")
    if path := hub.cached(origin.repo, inside):
        return path.open("rb")
    return BufferedReader(_Ranges(fetching.remote(origin.repo, inside)), PIECE)


class _Ranges(RawIOBase):
    """A file of a repo, read on and on by ranges: nothing of it is kept."""

    def __init__(self, remote: Remote) -> None:
        self.remote, self.at = remote, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.remote.bytes_at(self.at, min(len(buffer), self.remote.size - self.at))
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


def places(origin: Origin, aside: Path) -> Callable[[str], Path]:
    """Return what finds the file of a path in an origin's rows, on this disk."""
    keys = {p: key_of(origin, p) for p in origin.gzips}

    def place(inside: str) -> Path:
        name, mark, position = inside.rpartition("!")
        if mark and name in keys:
            return aside / keys[name] / f"{int(position):06d}.safetensors"
        return origin.root / inside

    return place
