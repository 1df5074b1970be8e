"""What the first bytes of a file say of it, and whether that is wrong for a file of its name."""

from __future__ import annotations

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.safetensors import header_length, parse_header, what_is
from checkpoints_zoo.sources.archives.tar import BLOCK, header_at, is_header, leads_out

SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
WEIGHTS = (SAFETENSORS, *PICKLED, ".npy", ".npz", ".h5", ".hdf5", ".gguf", ".onnx", ".msgpack")
GZIPPED = (".tgz", ".tar.gz")
ARCHIVES = (*GZIPPED, ".tar")
# Formats that a file with a pickle's name may have, and that run nothing.
HARMLESS = (b"GGUF", b"\x93NUMPY", b"\x89HDF\r\n\x1a\n")

Said = tuple[str, str]  # kind, text


class _Beyond(Exception):
    """Bytes that were not read."""


def is_weights(path: str) -> bool:
    """Say whether a file's name is one of weights."""
    return path.lower().endswith(WEIGHTS)


def is_archive(path: str) -> bool:
    """Say whether a file's name is one of archives."""
    return path.lower().endswith(ARCHIVES)


def problem(path: str, size: int, first: bytes) -> Said | None:
    """Say what is wrong with a file of weights or an archive; return (kind, text), None for nothing.

    Args:
        path: its name.
        size: in bytes.
        first: its first bytes. Of a safetensors header that is longer, only the length is checked.
    """
    if size == 0:
        return "empty", "a file without a byte"
    known = what_is(first)
    if known.startswith("a Git LFS pointer"):
        return "pointer", known
    if known == "a web page":
        return "page", known
    name = path.lower()
    if said := _pickle(name, first, known):
        return "pickle", said
    if name.endswith(SAFETENSORS):
        return _header(path, size, first)
    if is_archive(path):
        return _archive(path, size, first)
    return None


def remark(path: str, first: bytes) -> str:
    """Say what is unusual about an archive, and not wrong; return "" for nothing."""
    name = path.lower()
    if name.endswith(GZIPPED) and is_header(first[:BLOCK]):
        return "a plain tar, not a gzipped one: members can be read one by one"
    if name.endswith(".tar") and first.startswith(b"\x1f\x8b"):
        return "a gzipped tar: it can only be read as a whole"
    return ""


def _pickle(name: str, first: bytes, known: str) -> str:
    """Say by which bytes or name a file is a pickle; return "" if it is none."""
    if first.startswith(b"PK\x03\x04") and b"data.pkl" in first[:512]:
        return "a torch pickle in a zip archive, by its first bytes"
    if known == "a Python pickle":
        return "a Python pickle, by its first bytes"
    if first.startswith(b"\x93NUMPY") and b"|O" in first[:512]:
        return "a NumPy file of pickled objects, by its first bytes"
    if name.endswith(PICKLED) and not (first.startswith(HARMLESS) or _is_safetensors(first)):
        return f"a pickle, by its name; its first bytes are {known or 'of no format that is known'}"
    return ""


def _is_safetensors(first: bytes) -> bool:
    return first[8:9] == b"{" and int.from_bytes(first[:8], "little") < 2**32


def _header(path: str, size: int, first: bytes) -> Said | None:
    try:
        length = header_length(first, size, path)
        if len(first) < 8 + length:
            return None if _is_safetensors(first) else ("header", "expected a safetensors header; found other bytes")
        if not parse_header(first, size, path).tensors:
            return "empty", "a safetensors file without a tensor"
    except DamagedError as error:
        return "header", f"expected {error.expected}; found {error.found}"
    return None


def _archive(path: str, size: int, first: bytes) -> Said | None:
    """Look at an archive's first headers, as far as they were read."""
    if first.startswith(b"\x1f\x8b"):
        return None
    if not is_header(first[:BLOCK]):
        return "archive", "expected a tar, gzipped or not; found other bytes"

    def take(offset: int, length: int) -> bytes:
        if offset + length > len(first):
            raise _Beyond
        return first[offset : offset + length]

    at = 0
    try:
        while (header := header_at(take, at, size, path)) is not None:
            if leads_out(header.name):
                return "archive", f"expected names that stay in its folder; found {header.name[:200]!r}"
            if not header.kind:
                content = first[header.data : header.end]
                said = _pickle(header.name.lower(), content, what_is(content))
                return ("pickle", f"its first file, {header.name[:200]!r}, is {said}") if said else None
            at = header.end
    except DamagedError as error:
        return "archive", f"expected {error.expected}; found {error.found}"
    except _Beyond:
        return None
    return None
