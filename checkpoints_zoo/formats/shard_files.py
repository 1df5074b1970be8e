"""Shards: safetensors files that hold many members; the bytes of each member are contiguous.

This file has four parts: parsing of headers, reading of members' bytes through one reused buffer, writing of shards by
rename, and the checks of members that `verify` and `publish` share. This is one
file, because each part needs the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.formats.disk import temporary_name
from checkpoints_zoo.formats.layout import (
    ELEMENT_BYTES,
    PAD_NAME,
    Layout,
    TensorSpec,
    content_hash,
    is_counter,
    is_possible_shape,
    tensors_not_finite,
)

HEADER_ALIGNMENT = 4096
LARGEST_HEADER_NBYTES = 100_000_000  # Largest number of bytes of a header; the safetensors library has the same limit.
LARGEST_SHARD_NBYTES = 2_000_000_000
LARGEST_TENSOR_COUNT = 32_000
# Size of the read buffer: small enough for the processor's cache, so that the bytes are converted and checked there.
BUFFER_BYTES = 2**20
# Sampling methods that may give the same weights twice in one run: a Markov chain keeps its weights if a proposal is
# rejected, and dropout of few units may drop the same units again.
REPEATING_METHODS = ("dropout", "hmc", "sghmc", "sgld")

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file: (dtype, shape, start, end) of each tensor, where start and end are counted from
    `data_start`."""

    tensors: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    data_start: int
    metadata: Mapping[str, str] = field(default_factory=dict)


def guess_kind(first_bytes: bytes) -> str:
    """Guess the kind of a file that is not a safetensors file from its first bytes; return a phrase, "" if the kind is
    unknown."""
    # The file has a safetensors header, even if its first bytes look like those of another kind of file.
    if first_bytes[8:9] == b"{":
        return ""
    lowercase_start = first_bytes[:512].lstrip().lower()
    if lowercase_start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it points to"
    if lowercase_start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page"
    if first_bytes.startswith(b"PK\x03\x04"):
        return "a zip archive (a torch pickle perhaps)"
    if first_bytes.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "a Python pickle"
    if first_bytes.startswith(b"\x1f\x8b"):
        return "a gzip file"
    return ""


def parse_header(prefix: bytes, file_nbytes: int, path: str | Path) -> Header:
    """Read the header of a safetensors file, and check it against the file's size; return the header.

    Args:
        prefix: the first bytes of the file, at least up to the end of the header.
        file_nbytes: size of the whole file in bytes.
        path: the file's name in error texts.

    Raises:
        DamagedError: the file is cut short or not a safetensors file, or tensors overlap, leave gaps or exceed the
            file.
    """

    def damage_error(expected: str, found: str, tensor: str | None = None) -> DamagedError:
        subject = f"tensor {tensor!r} in the header of {path}" if tensor else f"header of {path}"
        return DamagedError(subject, expected=expected, found=found, do="Get the file again", path=path, tensor=tensor)

    if kind := guess_kind(prefix):
        raise DamagedError(
            f"file {path}", expected="a safetensors file", found=kind, do="Get the file again", path=path
        )
    header_nbytes = header_length(prefix, file_nbytes, path)
    try:
        tensor_values = json.loads(prefix[8 : 8 + header_nbytes].decode())
        "".join(tensor_values).encode()  # The names of tensors in JSON may be invalid Unicode.
        metadata = tensor_values.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
            raise ValueError("__metadata__ must map names to texts")
        rows = sorted(
            ((*v["data_offsets"], name, v["dtype"], tuple(v["shape"])) for name, v in tensor_values.items()),
            key=lambda r: (r[0], r[1]),
        )
        if not all(type(b) is int and type(e) is int and is_possible_shape(shape) for b, e, _, _, shape in rows):
            raise ValueError("offsets and shapes must be whole numbers, neither huge nor negative")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damage_error("JSON with dtype, shape and data_offsets of each tensor", repr(error)[:200]) from error
    tensors, expected_start, data_nbytes = {}, 0, file_nbytes - 8 - header_nbytes
    for start, end, name, dtype, shape in rows:
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise damage_error(f"a dtype among {', '.join(ELEMENT_BYTES)}", repr(dtype)[:40], name)
        expected_nbytes = math.prod(shape) * ELEMENT_BYTES[dtype]
        if end - start != expected_nbytes:
            raise damage_error(
                f"{expected_nbytes:,} bytes for {dtype} {list(shape)}", f"offsets [{start}, {end}]", name
            )
        if start != expected_start:
            kind = "overlaps" if start < expected_start else "leaves a hole after"
            raise damage_error(
                f"offsets that start at {expected_start}", f"[{start}, {end}], which {kind} the tensor before", name
            )
        if end > data_nbytes:
            raise damage_error(f"offsets within the {data_nbytes:,} bytes of tensors", f"[{start}, {end}]", name)
        tensors[name], expected_start = (dtype, shape, start, end), end
    if expected_start != data_nbytes:
        raise damage_error(
            f"{expected_start:,} bytes of tensors", f"{data_nbytes:,}: the file is cut, or more was appended"
        )
    return Header(tensors, 8 + header_nbytes, metadata)


def header_length(prefix: bytes, file_nbytes: int, path: str | Path) -> int:
    """Read the length of a safetensors header from the file's first eight bytes, and check it against the file's size;
    return the length."""
    header_nbytes = struct.unpack("<Q", prefix[:8])[0] if len(prefix) >= 8 else None
    if header_nbytes is not None and 2 <= header_nbytes <= min(LARGEST_HEADER_NBYTES, file_nbytes - 8):
        return int(header_nbytes)
    raise DamagedError(
        f"file {path}",
        expected=f"a safetensors header within its {file_nbytes:,} bytes",
        found="too few bytes for a header" if header_nbytes is None else f"a header length of {header_nbytes:,}",
        do="The file is cut or no safetensors file; get it again",
        path=path,
    )


def read_header(path: Path) -> Header:
    """Read and check the header of a local safetensors file; return the header.

    Raises:
        DamagedError: for the same reasons as in `parse_header`.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        prefix = file.read(512)
        if not guess_kind(prefix):
            length = header_length(prefix, size, path)
            prefix += file.read(max(0, 8 + length - len(prefix)))
    return parse_header(prefix, size, path)


def check_own_header(header_bytes: bytes, layout: Layout, path: str | Path) -> None:
    """Compare the safetensors header in front of a member in an archive with the member's layout.

    Args:
        header_bytes: bytes of the header; there are `layout.header_nbytes` of them.
        layout: layout of the member.
        path: the member's name in error texts.

    Raises:
        DamagedError: the bytes are not a safetensors header, or a tensor differs; the error names the first such
            tensor.
    """
    header = parse_header(header_bytes, layout.header_nbytes + layout.nbytes, path)
    actual_tensors = {name: (dtype, shape, begin) for name, (dtype, shape, begin, _) in header.tensors.items()}
    expected_tensors = {}
    for t in layout.tensors:
        shape = t.shape if t.stored_shape is None else t.stored_shape
        expected_tensors[t.stored or t.name] = t.dtype, shape, t.offset
    if actual_tensors == expected_tensors and header.data_start == layout.header_nbytes:
        return
    name = next(
        (n for n in {**expected_tensors, **actual_tensors} if actual_tensors.get(n) != expected_tensors.get(n)), None
    )
    raise DamagedError(
        f"header of {path}",
        expected=f"tensors that begin at byte {layout.header_nbytes}"
        if name is None
        else _tensor_text(name, expected_tensors),
        found=f"byte {header.data_start}" if name is None else _tensor_text(name, actual_tensors),
        do="Index the archive again",
        tensor=name,
        path=path,
    )


def _tensor_text(tensor_name: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> str:
    if tensor_name not in tensors:
        return f"no tensor {tensor_name!r}"
    dtype, shape, tensor_start = tensors[tensor_name]
    return f"tensor {tensor_name!r}, {dtype} {list(shape)} at {tensor_start}"


@dataclass(frozen=True, slots=True)
class Location:
    """The location of one snapshot's bytes.

    Args:
        member: id of the member, for error texts.
        prefix: prefix of the member's tensor names in the file ("000123/").
        path: path of the file that contains the bytes.
        offset: position of the member's first byte in the file.
        layout: layout of the member's bytes.
    """

    member: int
    prefix: str
    path: Path
    offset: int
    layout: Layout


def read_members(
    locations: Sequence[Location], buffer_bytes: int = BUFFER_BYTES
) -> Iterator[tuple[list[Location], memoryview]]:
    """Read members' bytes through one reused buffer; yield (locations of some members, the bytes of these members).

    The yielded bytes are valid until the next step of the iterator.

    Raises:
        DamagedError: a file is shorter than the members' locations need.
    """
    for group in group_adjacent(locations, buffer_bytes):
        group_nbytes = sum(x.layout.nbytes for x in group)
        file_nbytes = group[0].path.stat().st_size
        if file_nbytes < group[0].offset + group_nbytes:  # Check the size of the file before memory is allocated.
            raise _cut_error(group[0], group[0].offset + group_nbytes, file_nbytes)
        yield group, read_into(group[0], group[0].offset, reused_buffer(group_nbytes))


def group_adjacent(locations: Sequence[Location], largest_nbytes: int) -> Iterator[list[Location]]:
    """Group members whose bytes follow each other in a file; yield groups of at most `largest_nbytes` bytes, or of one
    member."""
    group: list[Location] = []
    for location in locations:
        last_location = group[-1] if group else location
        is_adjacent = (
            location.layout is last_location.layout
            and location.path == last_location.path
            and location.offset == last_location.offset + last_location.layout.nbytes
        )
        if group and not (is_adjacent and (len(group) + 1) * location.layout.nbytes <= largest_nbytes):
            yield group
            group = []
        group.append(location)
    if group:
        yield group


_thread_buffer = threading.local()


def reused_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` bytes of a buffer that each thread reuses: allocating memory would take longer than reading."""
    if len(getattr(_thread_buffer, "buffer", b"")) < nbytes:
        _thread_buffer.buffer = memoryview(bytearray(max(nbytes, BUFFER_BYTES)))
    memory: memoryview = _thread_buffer.buffer
    return memory[:nbytes]


def read_into(location: Location, offset: int, buffer: memoryview) -> memoryview:
    """Fill a buffer with bytes of a location's file, from an offset on; return the buffer."""
    with location.path.open("rb", buffering=0) as file:
        read_at(file, location, offset, buffer)
    return buffer


def read_at(file: FileIO, location: Location, offset: int, buffer: memoryview) -> None:
    file.seek(offset)
    read_nbytes = 0
    while read_nbytes < len(buffer):
        new_nbytes = file.readinto(buffer[read_nbytes:])
        if not new_nbytes:
            raise _cut_error(location, offset + len(buffer), offset + read_nbytes)
        read_nbytes += new_nbytes


def _cut_error(location: Location, expected_nbytes: int, found_nbytes: int) -> DamagedError:
    return DamagedError(
        f"file {location.path}",
        expected=f"{expected_nbytes:,} bytes or more",
        found=f"{found_nbytes:,}",
        do="Get the file again",
        member=location.member,
        path=location.path,
    )


def hash_members(locations: Sequence[Location]) -> list[str]:
    """Hash the contents of members; return the hash of each member, 64 hex digits."""
    content_hashes = []
    for group, raw in read_members(locations):
        size = group[0].layout.nbytes
        content_hashes += [content_hash(x.layout, raw[i * size : (i + 1) * size]) for i, x in enumerate(group)]
    return content_hashes


def tensor_prefix(member: int, epoch: int | None = None) -> str:
    """Return the prefix of a snapshot's tensor names in a shard; epoch None means the final snapshot.

    >>> tensor_prefix(123), tensor_prefix(123, 40)
    ('000123/', '000123@40/')
    """
    return f"{member:06d}/" if epoch is None else f"{member:06d}@{epoch}/"


def shard_header(layout: Layout, prefixes: Iterable[str]) -> bytes:
    """Build the header of a shard; return the header's bytes, padded to a multiple of 4,096.

    Args:
        layout: the layout that all members have.
        prefixes: prefix of each member's tensor names ("000123/").
    """
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for prefix in prefixes:
        for t in layout.tensors:
            offsets = [start + t.offset, start + t.offset + t.nbytes]
            tensors[prefix + t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
        if layout.pad:
            offsets = [start + layout.payload_nbytes, start + layout.nbytes]
            tensors[prefix + PAD_NAME] = {"dtype": "U8", "shape": [layout.pad], "data_offsets": offsets}
        start += layout.nbytes
    header_json = json.dumps(tensors, separators=(",", ":")).encode()
    padded_length = len(header_json) + -(8 + len(header_json)) % HEADER_ALIGNMENT
    return struct.pack("<Q", padded_length) + header_json.ljust(padded_length)


def first_offset(layout: Layout, prefixes: Sequence[str]) -> int:
    """Return the offset in the file at which the first member of a shard begins."""
    return len(shard_header(layout, prefixes))


def members_per_shard(layout: Layout, most_snapshots: int = 1) -> int:
    """Return the number of members in each shard, which holds at most 2 GB and at most 32,000 tensors."""
    tensor_count = len(layout.tensors) + bool(layout.pad)
    nbytes = max(1, layout.nbytes)  # A network may have only empty tensors.
    return max(
        1,
        min(LARGEST_SHARD_NBYTES // (nbytes * most_snapshots), LARGEST_TENSOR_COUNT // (tensor_count * most_snapshots)),
    )


def write_shard(
    folder: Path, shard_number: int, layout: Layout, prefixes_and_bytes: Sequence[tuple[str, Bytes]]
) -> Path:
    """Write a shard of members that are in memory; return the path of the shard.

    Args:
        folder, shard_number, layout: the same arguments as in `stream_shard`.
        prefixes_and_bytes: (prefix of the tensor names, bytes) of each member, in the order of the shard.

    Raises:
        UsageError: for the same reasons as in `stream_shard`.
    """
    return stream_shard(
        folder, shard_number, layout, [key for key, _ in prefixes_and_bytes], (raw for _, raw in prefixes_and_bytes)
    )


def stream_shard(
    folder: Path, shard_number: int, layout: Layout, prefixes: Sequence[str], members_bytes: Iterable[Bytes]
) -> Path:
    """Write a shard under the name NUMBER-HASH.safetensors, by rename; return the path of the shard.

    The file name depends only on the number and the bytes of the shard.

    Args:
        folder: folder of the new shard; a missing folder is made.
        shard_number: number of the shard, with which the file name begins.
        layout: the layout that all members have.
        prefixes: prefix of each member's tensor names ("000123/"), in the order of the members in the shard.
        members_bytes: iterator over the bytes of each member; one member is in memory at a time.

    Raises:
        UsageError: a prefix occurs twice, there are more members than prefixes or fewer, or a member's number of bytes
            differs from the layout.
    """
    expected = f"each once, with {layout.nbytes:,} bytes"
    if len(set(prefixes)) < len(prefixes):
        raise UsageError(f"members of shard {shard_number}", expected=expected, found="others")
    folder.mkdir(parents=True, exist_ok=True)
    temporary_path = temporary_name(
        folder / f"{shard_number:05d}"
    )  # The final name of the shard contains the hash of its content.
    header = shard_header(layout, prefixes)
    digest, member_count = hashlib.sha256(header), 0
    try:
        with temporary_path.open("wb") as file:
            file.write(header)
            for member_bytes in members_bytes:
                member_count += 1
                if len(member_bytes) != layout.nbytes or member_count > len(prefixes):
                    raise UsageError(f"members of shard {shard_number}", expected=expected, found="others")
                file.write(member_bytes)
                digest.update(member_bytes)
            if member_count < len(prefixes):
                raise UsageError(
                    f"members of shard {shard_number}", expected=f"{len(prefixes)}", found=f"{member_count}"
                )
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{shard_number:05d}-{digest.hexdigest()[:8]}.safetensors"
        temporary_path.replace(path)
    finally:
        temporary_path.unlink(missing_ok=True)
    return path


def shard_layout(layout: Layout) -> Layout:
    """Return the layout that members get in a shard: tensors ordered by element size, statistics in float32, no integer
    counters.

    The values do not change, so the content hash stays the same.
    """
    tensors = [t for t in layout.tensors if not is_counter(t.name)]
    dtypes = ["F32" if t.is_statistic and t.dtype in ("F16", "BF16") else t.dtype for t in tensors]
    return Layout.of(
        ((t.name, kind, t.shape) for t, kind in zip(tensors, dtypes, strict=True)), layout.rebuilt_counters
    )


def repack(layout: Layout, member_bytes: Bytes, target_layout: Layout) -> bytearray:
    """Rearrange a member's bytes from its layout to `shard_layout(layout)`; return the rearranged bytes.

    Args:
        layout: present layout of the bytes.
        member_bytes: bytes of the member, from its first tensor on.
        target_layout: layout of the rearranged bytes, `shard_layout(layout)`.
    """
    repacked_bytes = bytearray(target_layout.nbytes)
    old_specs = {spec.name: spec for spec in layout.tensors}
    for new_spec in target_layout.tensors:
        old_spec = old_specs[new_spec.name]
        raw = np.frombuffer(member_bytes, np.uint8, count=old_spec.nbytes, offset=old_spec.offset)
        if old_spec.dtype != new_spec.dtype:
            float32_bits = raw.view("<u2").astype("<u4") << np.uint32(16)
            raw = (float32_bits if old_spec.dtype == "BF16" else raw.view("<f2").astype("<f4")).view(np.uint8)
        repacked_bytes[new_spec.offset : new_spec.offset + new_spec.nbytes] = raw.data
    return repacked_bytes


@dataclass(frozen=True)
class Problem:
    """A problem that a check has found in a member's bytes or rows.

    Args:
        collection: name of the collection.
        member: id of the member; None for a problem of the whole collection.
        kind: kind of the problem: "bytes", "hash", "finite", "duplicate" or "accuracy".
        text: text of the form "expected …; found …".
    """

    collection: str
    member: int | None
    kind: str
    text: str

    def __str__(self) -> str:
        subject = self.collection if self.member is None else f"member {self.member} of {self.collection}"
        return f"{subject}: {self.kind}: {self.text}"


def check_bytes(
    location: Location, expected_hash: str | None, check_finite: bool = True
) -> tuple[list[tuple[str, str]], str]:
    """Check one member's location, hash and values; return (kind, text) of each problem, and the hash of the member.

    Args:
        location: location of the member's bytes.
        expected_hash: content hash (sha256) that the manifest states; None to leave the comparison out.
        check_finite: whether the member's values must be finite.

    Raises:
        DamagedError: the file does not have the member's tensors at the location.
    """
    check_against_files([location])
    _, raw = next(iter(read_members([location])))
    digest = content_hash(location.layout, raw)
    problems = []
    if expected_hash is not None and digest != expected_hash:
        problems.append(
            ("hash", f"expected sha256 {expected_hash[:16]}…; found {digest[:16]}…: the bytes have changed.")
        )
    if check_finite and (names := tensors_not_finite(location.layout, raw)):
        problems.append(("finite", f"expected finite weights; found others in {', '.join(names[:3])}."))
    return problems, digest


def check_hashes(locations: Sequence[Location], hashes: Sequence[str | None]) -> None:
    """Check members' bytes against the hashes in their manifest rows.

    Args:
        locations: locations of the members' bytes.
        hashes: content hash of each member according to the manifest; None where the manifest has no hash.

    Raises:
        DamagedError: the bytes of a member have another hash; the error names the first such member.
    """
    for location, expected_hash in zip(locations, hashes, strict=True):
        _, digest = check_bytes(location, None, check_finite=False)
        if expected_hash not in (None, digest):
            raise DamagedError(
                f"member {location.member} in file {location.path}",
                expected=f"sha256 {str(expected_hash)[:16]}… in the {location.layout.nbytes:,} bytes "
                f"at {location.offset:,}",
                found=f"{digest[:16]}…",
                do="Get the source again, or tell its producer",
                member=location.member,
                path=location.path,
            )


def check_against_files(locations: Sequence[Location]) -> None:
    """Check that files have members' tensors at the members' locations, by the headers of the files."""
    header_of_path: dict[Path, Header] = {}
    expected_tensors: dict[int, list[tuple[str, str, tuple[int, ...], int, int]]] = {}  # by layout
    checked_headers: set[tuple[int, bytes]] = set()
    for location in locations:
        if location.layout.header_nbytes:
            _check_member_header(location, checked_headers)
            continue
        if location.path not in header_of_path:
            header_of_path[location.path] = _read_header_once(location.path, file_stamp(location.path))
        tensor_of_name, prefix, member_data_start = (
            header_of_path[location.path].tensors.get,
            location.prefix,
            location.offset - header_of_path[location.path].data_start,
        )
        if id(location.layout) not in expected_tensors:
            expected_tensors[id(location.layout)] = [
                (t.name, t.dtype, t.shape, t.offset, t.offset + t.nbytes) for t in location.layout.tensors
            ]
        for tensor_position, (name, dtype, shape, start, end) in enumerate(expected_tensors[id(location.layout)]):
            if tensor_of_name(prefix + name) != (dtype, shape, member_data_start + start, member_data_start + end):
                raise _misplaced_error(
                    location,
                    location.layout.tensors[tensor_position],
                    tensor_of_name(prefix + name),
                    member_data_start + start,
                )


@lru_cache(maxsize=64)
def _read_header_once(path: Path, stamp: tuple[int, ...]) -> Header:
    return read_header(path)


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after any change or replacement of a file: inode, size, mtime and ctime, which users
    can't set."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _check_member_header(location: Location, checked_headers: set[tuple[int, bytes]]) -> None:
    """Check the header in front of a member in an archive.

    Args:
        location: location of the member.
        checked_headers: pairs (layout, header) that passed the check; most headers are equal, so each different header
            is compared once.
    """
    layout = location.layout
    header_start, file_nbytes = location.offset - layout.header_nbytes, location.path.stat().st_size
    if header_start < 0 or location.offset + layout.nbytes > file_nbytes:
        raise DamagedError(
            f"member {location.member} in file {location.path}",
            expected=f"bytes {header_start:,} to {location.offset + layout.nbytes:,}, as the manifest says",
            found=f"a file of {file_nbytes:,} bytes",
            do="Get the file again",
            member=location.member,
            path=location.path,
        )
    header_bytes = bytes(read_into(location, header_start, reused_buffer(layout.header_nbytes)))
    if (id(layout), header_bytes) not in checked_headers:
        check_own_header(header_bytes, layout, f"member {location.member} in file {location.path}")
        checked_headers.add((id(layout), header_bytes))


def _misplaced_error(
    location: Location, tensor: TensorSpec, found: tuple[str, tuple[int, ...], int, int] | None, expected_start: int
) -> DamagedError:
    return DamagedError(
        f"member {location.member} in file {location.path}",
        expected=f"tensor {location.prefix + tensor.name!r}, {tensor.dtype} {list(tensor.shape)} at {expected_start}, "
        "as the manifest says",
        found="no such tensor" if found is None else f"{found[0]} {list(found[1])} at {found[2]}",
        do="Manifest and file do not belong together; get the source again",
        member=location.member,
        tensor=tensor.name,
        path=location.path,
    )


def find_duplicates(collections: Iterable[tuple[str, pa.Table, Sequence[str | None]]]) -> list[Problem]:
    """Find members with equal weights; return the problems. Samples of one run may be equal if the method can repeat
    weights.

    Args:
        collections: for each collection (name, manifest rows, content hash of each row); rows whose hash is None are
            ignored.
    """
    first_with_hash: dict[str, tuple[int, tuple[str, str | None, int | None]]] = {}
    problems = []
    for name, rows, hashes in collections:
        columns = (rows.column(c).to_pylist() for c in ("member", "method", "run"))
        for member, method, run, member_hash in zip(*columns, hashes, strict=True):
            origin = (name, method, run)
            if member_hash is None:
                continue
            if member_hash not in first_with_hash:
                first_with_hash[member_hash] = member, origin
            elif method not in REPEATING_METHODS or first_with_hash[member_hash][1] != origin:
                first_member, (collection, *_) = first_with_hash[member_hash]
                other_text = f"member {first_member}{'' if collection == name else f' of {collection}'}"
                text = f"expected weights of its own; found those of {other_text}."
                problems.append(Problem(name, member, "duplicate", text))
    return problems
