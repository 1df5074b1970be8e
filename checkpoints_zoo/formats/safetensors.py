"""Shards: safetensors files of many members, one contiguous range of bytes each.

The safetensors library orders tensors by dtype, which would tear a member with float32 statistics in two; a short
writer of our own keeps it together. Any reader opens the file and sees named tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from checkpoints_zoo.errors import DamagedError, StorageError, UsageError, ZooError
from checkpoints_zoo.formats.layout import ELEMENT_BYTES, PAD, Layout, good_shape, is_counter

# Headers of safetensors files, read with distrust and written for shards.


HEADER_ALIGNMENT = 4096
LARGEST_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: (dtype, shape, begin, end) of each tensor, counted from `data_start`."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    data_start: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def what_is(first: bytes) -> str:
    """Name what a file that is no safetensors file seems to be, by its first bytes; return "" if unknown."""
    if first[8:9] == b"{":  # whatever the length before it looks like
        return ""
    start = first[:512].lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it points to"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page"
    if first.startswith(b"PK\x03\x04"):
        return "a zip archive (a torch pickle perhaps)"
    if first.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "a Python pickle"
    if first.startswith(b"\x1f\x8b"):
        return "a gzip file"
    return ""


def parse_header(prefix: bytes, size: int, path: str | Path) -> Header:
    """Read the header of a safetensors file and check it against the file's size; return it.

    Args:
        prefix: the first bytes of the file, at least up to the end of the header.
        size: bytes of the whole file.
        path: what to call the file in errors.

    Raises:
        DamagedError: the file is cut, something else, or its offsets overlap, leave holes or leave the file.
    """

    def damaged(expected: str, found: str, tensor: str | None = None) -> DamagedError:
        what = f"tensor {tensor!r} in the header of {path}" if tensor else f"header of {path}"
        return DamagedError(what, expected=expected, found=found, do="Get the file again", path=path, tensor=tensor)

    if kind := what_is(prefix):
        raise DamagedError(
            f"file {path}", expected="a safetensors file", found=kind, do="Get the file again", path=path
        )
    length = header_length(prefix, size, path)
    try:
        values = json.loads(prefix[8 : 8 + length].decode())
        "".join(values).encode()  # JSON can spell names that are no text
        metadata = values.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
            raise ValueError("__metadata__ must be text by name")
        rows = sorted(
            ((*v["data_offsets"], name, v["dtype"], tuple(v["shape"])) for name, v in values.items()),
            key=lambda r: (r[0], r[1]),
        )
        if not all(type(b) is int and type(e) is int and good_shape(shape) for b, e, _, _, shape in rows):
            raise ValueError("offsets and shapes must be whole numbers, none huge or negative")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("JSON with dtype, shape and data_offsets of each tensor", repr(error)[:200]) from error
    tensors, at, room = {}, 0, size - 8 - length
    for begin, end, name, dtype, shape in rows:
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise damaged(f"a dtype among {', '.join(ELEMENT_BYTES)}", repr(dtype)[:40], name)
        wanted = math.prod(shape) * ELEMENT_BYTES[dtype]
        if end - begin != wanted:
            raise damaged(f"{wanted:,} bytes for {dtype} {list(shape)}", f"offsets [{begin}, {end}]", name)
        if begin != at:
            kind = "overlaps" if begin < at else "leaves a hole after"
            raise damaged(f"offsets that start at {at}", f"[{begin}, {end}], which {kind} the tensor before", name)
        if end > room:
            raise damaged(f"offsets within the {room:,} bytes of tensors", f"[{begin}, {end}]", name)
        tensors[name], at = (dtype, shape, begin, end), end
    if at != room:
        raise damaged(f"{at:,} bytes of tensors", f"{room:,}: the file is cut, or more was appended")
    return Header(tensors, 8 + length, metadata)


def header_length(prefix: bytes, size: int, path: str | Path) -> int:
    """Read the length of a safetensors header from the first eight bytes; return it, checked against the file."""
    length = struct.unpack("<Q", prefix[:8])[0] if len(prefix) >= 8 else None
    if length is not None and 2 <= length <= min(LARGEST_HEADER, size - 8):
        return int(length)
    raise DamagedError(
        f"file {path}",
        expected=f"a safetensors header within its {size:,} bytes",
        found="too few bytes for one" if length is None else f"a header length of {length:,}",
        do="The file is cut or no safetensors file; get it again",
        path=path,
    )


def read_header(path: Path) -> Header:
    """Read and check the header of a local safetensors file; return it.

    Raises:
        DamagedError: see `parse_header`.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(512)
        if not what_is(prefix):
            length = header_length(prefix, size, path)
            prefix += file.read(max(0, 8 + length - len(prefix)))
    return parse_header(prefix, size, path)


def check_own_header(raw: bytes, layout: Layout, path: str | Path) -> None:
    """Compare the header that a member of an archive has of its own with its layout.

    Args:
        raw: the header's bytes, as many as the layout's lead.
        layout: of the member.
        path: what to call the member in errors.

    Raises:
        DamagedError: it is no safetensors header, or one with other tensors; the first of them is named.
    """
    header = parse_header(raw, layout.lead + layout.nbytes, path)
    found = {name: (dtype, shape, begin) for name, (dtype, shape, begin, _) in header.tensors.items()}
    wanted = {}
    for t in layout.tensors:
        shape = t.shape if t.stored_shape is None else t.stored_shape
        wanted[t.stored or t.name] = t.dtype, shape, t.offset
    if found == wanted and header.data_start == layout.lead:
        return
    name = next((n for n in {**wanted, **found} if found.get(n) != wanted.get(n)), None)
    raise DamagedError(
        f"header of {path}",
        expected=f"tensors that begin at byte {layout.lead}" if name is None else _tensor_text(name, wanted),
        found=f"byte {header.data_start}" if name is None else _tensor_text(name, found),
        do="Index the archive again",
        tensor=name,
        path=path,
    )


def _tensor_text(name: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str:
    if name not in tensors:
        return f"no tensor {name!r}"
    dtype, shape, begin = tensors[name]
    return f"tensor {name!r}, {dtype} {list(shape)} at {begin}"


def prefix(member: int, epoch: int | None = None) -> str:
    """Return what stands before a snapshot's tensor names in a shard; epoch None for the final one.

    >>> prefix(123), prefix(123, 40)
    ('000123/', '000123@40/')
    """
    return f"{member:06d}/" if epoch is None else f"{member:06d}@{epoch}/"


def shard_header(layout: Layout, prefixes: Iterable[str]) -> bytes:
    """Write the header of a shard whose members lie one after another; return its bytes, 4,096-aligned.

    Args:
        layout: of every member.
        prefixes: what stands before the tensor names of each member ("000123/").
    """
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for prefix in prefixes:
        for t in layout.tensors:
            offsets = [start + t.offset, start + t.offset + t.nbytes]
            tensors[prefix + t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
        if layout.pad:
            offsets = [start + layout.payload, start + layout.nbytes]
            tensors[prefix + PAD] = {"dtype": "U8", "shape": [layout.pad], "data_offsets": offsets}
        start += layout.nbytes
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = len(text) + -(8 + len(text)) % HEADER_ALIGNMENT
    return struct.pack("<Q", length) + text.ljust(length)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what differs once a file was changed or replaced: its time of change can't be set by hand."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


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
