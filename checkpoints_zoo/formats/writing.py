"""Shards: safetensors files of many members, one contiguous range of bytes each.

The safetensors library orders tensors by dtype, which would tear a member with float32 statistics in two; a short
writer of our own keeps it together. Any reader opens the file and sees named tensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from checkpoints_zoo.errors import StorageError, UsageError, ZooError
from checkpoints_zoo.formats.header import shard_header
from checkpoints_zoo.formats.layout import Layout, is_counter

LARGEST_SHARD = 2_000_000_000
MOST_TENSORS = 32_000
Bytes = bytes | bytearray | memoryview


def members_per_shard(layout: Layout, snapshots: int = 1) -> int:
    """Return how many consecutive member ids a shard holds: the fewer of 2 GB and about 32,000 tensors."""
    tensors = len(layout.tensors) + bool(layout.pad)
    nbytes = max(1, layout.nbytes)  # a net may have nothing but empty tensors
    return max(1, min(LARGEST_SHARD // (nbytes * snapshots), MOST_TENSORS // (tensors * snapshots)))


def write_shard(folder: Path, number: int, layout: Layout, members: Sequence[tuple[str, Bytes]]) -> Path:
    """Write a shard of members that are in memory; return its path.

    Args:
        folder, number, layout: as in `stream_shard`.
        members: (prefix, bytes) in the order they are to lie in.

    Raises:
        UsageError: as in `stream_shard`.
    """
    return stream_shard(folder, number, layout, [key for key, _ in members], (raw for _, raw in members))


def stream_shard(folder: Path, number: int, layout: Layout, prefixes: Sequence[str], members: Iterable[Bytes]) -> Path:
    """Write a shard under a name that holds its number and content hash, by rename; return its path.

    The same members give the same bytes and so the same name; other bytes never take a name that was used.

    Args:
        folder: where to; it is made.
        number: of the shard.
        layout: of every member.
        prefixes: of the members, in the order they are to lie in.
        members: their bytes, one in memory at a time.

    Raises:
        UsageError: a prefix twice, more or fewer members than prefixes, or bytes that are not as many as the layout's.
    """
    expected = f"each once, with {layout.nbytes:,} bytes"
    if len(set(prefixes)) < len(prefixes):
        raise UsageError(f"members of shard {number}", expected=expected, found="others")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{number:05d}.{os.getpid()}.tmp"
    header = shard_header(layout, prefixes)
    digest, count = hashlib.sha256(header), 0
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for member in members:
                count += 1
                if len(member) != layout.nbytes or count > len(prefixes):
                    raise UsageError(f"members of shard {number}", expected=expected, found="others")
                file.write(member)
                digest.update(member)
            if count < len(prefixes):
                raise UsageError(f"members of shard {number}", expected=f"{len(prefixes)}", found=f"{count}")
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{number:05d}-{digest.hexdigest()[:8]}.safetensors"
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def first_offset(layout: Layout, prefixes: Sequence[str]) -> int:
    """Return where the first member begins in a shard of these members."""
    return len(shard_header(layout, prefixes))


def sharded(layout: Layout) -> Layout:
    """Return the layout that members of any layout get in a shard: our order, statistics in float32, no counters.

    Nothing of that changes a value, so the content hash stays.
    """
    kept = [t for t in layout.tensors if not is_counter(t.name)]
    kinds = ["F32" if t.is_statistic and t.dtype in ("F16", "BF16") else t.dtype for t in kept]
    return Layout.of(((t.name, kind, t.shape) for t, kind in zip(kept, kinds, strict=True)), layout.rebuilt)


def repack(layout: Layout, member: Bytes, target: Layout) -> bytearray:
    """Bring a member's bytes from its layout into the one that `sharded` gives for it; return them.

    Args:
        layout: that they lie in.
        member: the bytes, from its first tensor on.
        target: `sharded(layout)`.
    """
    out = bytearray(target.nbytes)
    stored = {t.name: t for t in layout.tensors}
    for t in target.tensors:
        was = stored[t.name]
        raw = np.frombuffer(member, np.uint8, count=was.nbytes, offset=was.offset)
        if was.dtype != t.dtype:
            halves = raw.view("<u2").astype("<u4") << np.uint32(16)
            raw = (halves if was.dtype == "BF16" else raw.view("<f2").astype("<f4")).view(np.uint8)
        out[t.offset : t.offset + t.nbytes] = raw.data
    return out


def check_room(root: Path, needed: int) -> None:
    """Check that a folder's disk has room for so many bytes.

    Raises:
        StorageError: it has not.
    """
    free = shutil.disk_usage(root).free
    if free < needed:
        raise StorageError(
            f"folder {root}", expected=f"room for {needed:,} bytes", found=f"{free:,} bytes free",
            do="Free some, or give a folder on another disk", path=root,
        )  # fmt: skip


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_folder(root: Path) -> None:
    """Make a folder, and check that files can be written into it, before work whose results belong there.

    Raises:
        StorageError: they can't.
    """
    with writing_into(root), TemporaryFile(dir=root):
        pass


@contextmanager
def writing_into(root: Path) -> Iterator[None]:
    """Make a folder, and turn errors of its disk into a StorageError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except ZooError:
        raise
    except OSError as error:
        found = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        expected, do = "one that can be written to, with room", "Run it again once it is: what is there stays"
        raise StorageError(f"folder {root}", expected=expected, found=found, do=do, path=root) from error
