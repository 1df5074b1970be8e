"""Headers of safetensors files, read with distrust and written for shards."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.layout import ELEMENT_BYTES, PAD, Layout, good_shape

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
