"""Headers of tar files: ustar, pax, GNU and the oldest format. Every field of a header that is used is checked.

`tarfile.TarInfo.frombuf` is not used: it accepts the sizes "-5", "0o5" and "1_0", refuses a header whose mode or owner
is no number although nothing depends on them, and adds the times in an old GNU header to the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints_zoo.errors import DamagedError

BLOCK = 512
MOST_EXTRA = 2**20  # Largest number of bytes of pax records and long names before one file.
MOST_RECORDS = 8  # Largest number of pax records and long names before one file.
LARGEST = 2**62

# Function (offset, length) -> exactly `length` bytes of the archive.
ReadExactly = Callable[[int, int], bytes]

OTHER_KINDS = {
    "1": "a hard link", "2": "a symbolic link", "3": "a device", "4": "a device", "5": "a folder", "6": "a pipe",
}  # fmt: skip
LINKS = (OTHER_KINDS["1"], OTHER_KINDS["2"])
_PAX_LENGTH = re.compile(rb"([0-9]{1,8}) ")


@dataclass(frozen=True, slots=True)
class TarHeader:
    """The header of one file in a tar.

    Args:
        name: name of the file without "./" and doubled slashes, otherwise unchecked.
        start: offset of the first block that belongs to the file; pax records and long names come before its header.
        data: offset of the first byte of the file's contents.
        size: size of the file's contents, in bytes.
        kind: "" for a plain file, else a noun such as "folder" or "link".
    """

    name: str
    start: int
    data: int
    size: int
    kind: str

    @property
    def end(self) -> int:
        """Offset of the next file in the archive."""
        return self.data + padded_size(self.size)


def padded_size(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def damage_error(archive: str, at: int, expected: str, found: str, do: str = "Get the archive again") -> DamagedError:
    return DamagedError(f"archive {archive} at byte {at:,}", expected=expected, found=found, do=do, path=archive)


def is_header(block: bytes) -> bool:
    """Say whether a block of 512 bytes is the header of a file in a tar, by its checksum."""
    if len(block) < BLOCK or not block.rstrip(b"\0"):
        return False
    stored = re.match(rb" *([0-7]{1,7})[ \0]", block[148:156])
    rest = block[:148] + b" " * 8 + block[156:BLOCK]
    # Some old programs computed the checksum over signed bytes.
    return stored is not None and int(stored[1], 8) in (sum(rest), sum(b - 256 * (b > 127) for b in rest))


def header_at(read_exactly: ReadExactly, start: int, size: int, archive: str) -> TarHeader | None:
    """Read the header of the file at an offset of a tar; return it, or None at the end mark.

    Args:
        read_exactly: reads the archive.
        start: the offset.
        size: size of the archive in bytes; `LARGEST` if it is unknown.
        archive: name of the archive in error texts.

    Raises:
        DamagedError: there is no header at the offset, it is inconsistent, or the file exceeds the archive.
    """
    at, extra_bytes, long_name, pax = start, 0, "", dict[str, str]()
    for _ in range(MOST_RECORDS + 1):
        block = read_exactly(at, BLOCK)
        if at == start and not block.rstrip(b"\0"):
            return None
        if not is_header(block):
            raise damage_error(archive, at, "the header of a file", "none, by its checksum")
        kind, count = block[156:157].decode("latin-1"), _parse_number(block[124:136], at, archive)
        if kind not in "xXgLK":
            return _build_header(
                block, kind, count, TarHeader(pax.get("path", long_name), start, at, 0, ""), size, archive, pax
            )
        extra_bytes += count
        if extra_bytes > MOST_EXTRA:
            raise damage_error(
                archive, at, f"at most {MOST_EXTRA:,} bytes of records before a file", f"{extra_bytes:,}"
            )
        raw = read_exactly(at + BLOCK, count)
        if kind in "xXg":
            records = _parse_pax(raw, at, archive)
            if kind == "g" and records.keys() & {"path", "size"}:
                raise damage_error(archive, at, "a path and a size for one file", "one for all files")
            pax |= records if kind != "g" else {}
        elif kind == "L":
            long_name = _decode(raw)
        at += BLOCK + padded_size(count)
    raise damage_error(archive, start, f"at most {MOST_RECORDS} records before a file", "more")


def _build_header(
    block: bytes, kind: str, count: int, partial_header: TarHeader, size: int, archive: str, pax: dict[str, str]
) -> TarHeader:
    """Combine the header block of a file with the pax records and long names before it; return the header."""
    at, name = partial_header.data, partial_header.name or _decode(block[:100])
    if not partial_header.name and block[257:263] == b"ustar\0" and (prefix := _decode(block[345:500])):
        name = f"{prefix}/{name}"
    if "size" in pax:
        if not re.fullmatch("[0-9]{1,18}", pax["size"]):
            raise damage_error(archive, at, "a size in the pax records", repr(pax["size"][:40]))
        count = int(pax["size"])
    if kind == "S" or any(key.startswith("GNU.sparse") for key in pax):
        raise damage_error(
            archive, at, "whole files", f"a sparse one, {name[:200]!r}", "Unpack it and give the files' folder"
        )
    kind_text = "" if kind in "0\0007" else OTHER_KINDS.get(kind, f"of kind {kind!r}, which nobody knows")
    if kind == "\0" and name.endswith("/"):
        kind_text = OTHER_KINDS["5"]
    data = at + BLOCK
    # Headers of links and folders may state a size, but no contents follow.
    count = 0 if kind_text and kind in "123456\0" else count
    if data + count > size:
        expected = f"the {count:,} bytes of {name[:200]!r} within the archive's {size:,}"
        raise damage_error(archive, at, expected, "an archive that is cut, or a wrong size")
    return TarHeader(tidy_name(name), partial_header.start, data, count, kind_text)


def tidy_name(name: str) -> str:
    """Remove "./" and doubled slashes from a name; return it."""
    parts = "/".join(part for part in name.split("/") if part not in ("", "."))
    return f"/{parts}" if name.startswith("/") else parts


def leads_out(name: str) -> bool:
    """Say whether a file's name would lead out of the folder in which a tar is unpacked."""
    return name.startswith("/") or ".." in name.split("/")


def _decode(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _parse_number(field: bytes, at: int, archive: str) -> int:
    """Parse a size field: an octal number, or in base 256 for large sizes; return the size."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    else:
        digits = field.partition(b"\0")[0].strip(b" ")
        if not re.fullmatch(rb"[0-7]*", digits):
            raise damage_error(archive, at, "a size in octal digits", repr(field))
        value = int(digits or b"0", 8)
    if not 0 <= value < LARGEST:
        raise damage_error(archive, at, "a size that a file can have", f"{value:,}")
    return value


def _parse_pax(raw: bytes, at: int, archive: str) -> dict[str, str]:
    """Parse pax records, "LENGTH KEY=VALUE\\n" each; return the values by key."""
    records, begin = {}, 0
    while begin < len(raw) and raw[begin:].strip(b"\0"):
        match = _PAX_LENGTH.match(raw, begin)
        end = begin + int(match[1]) if match else 0
        key, equals, value = raw[match.end() : end - 1].partition(b"=") if match else (b"", b"", b"")
        if not match or end > len(raw) or end <= match.end() or raw[end - 1 : end] != b"\n" or not equals:
            raise damage_error(archive, at, "pax records of the length they say", repr(raw[begin : begin + 40]))
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        begin = end
    return records
