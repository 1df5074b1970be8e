"""Headers of tar files in the formats ustar, pax, GNU and the oldest one. Every used field of a header is checked.

`tarfile.TarInfo.frombuf` is not used: it accepts the sizes "-5", "0o5" and "1_0", refuses a header whose unused mode or
owner is not a number, and appends the times in an old GNU header to the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints_zoo.errors import DamagedError

BLOCK_BYTES = 512
LARGEST_EXTRA_BYTES = 2**20  # Largest number of bytes of pax records and long names before one file.
LARGEST_RECORD_COUNT = 8  # Largest number of pax records and long names before one file.
LARGEST_FILE_NBYTES = 2**62

# Function (offset, length) -> exactly `length` bytes of the archive.
ReadExactly = Callable[[int, int], bytes]

OTHER_KINDS = {
    "1": "a hard link", "2": "a symbolic link", "3": "a device", "4": "a device", "5": "a folder", "6": "a pipe",
}  # fmt: skip
LINK_KINDS = (OTHER_KINDS["1"], OTHER_KINDS["2"])
_PAX_LENGTH = re.compile(rb"([0-9]{1,8}) ")


@dataclass(frozen=True, slots=True)
class TarHeader:
    """The header of one file in a tar.

    Args:
        name: name of the file without "./" and doubled slashes, otherwise unchecked.
        start: offset in the archive of the file's first block; pax records and long names come before the file's
            header.
        data_offset: offset in the archive of the first byte of the file's contents.
        size: size of the file's contents, in bytes.
        kind: "" for a plain file, else a noun such as "folder" or "link".
    """

    name: str
    start: int
    data_offset: int
    size: int
    kind: str

    @property
    def end(self) -> int:
        """Offset of the next file in the archive."""
        return self.data_offset + padded_size(self.size)


def padded_size(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def damage_error(
    archive: str, offset: int, expected: str, found: str, do: str = "Get the archive again"
) -> DamagedError:
    return DamagedError(f"archive {archive} at byte {offset:,}", expected=expected, found=found, do=do, path=archive)


def is_header(block: bytes) -> bool:
    """Say whether a block of 512 bytes has the checksum of a tar header."""
    if len(block) < BLOCK_BYTES or not block.rstrip(b"\0"):
        return False
    stored_checksum = re.match(rb" *([0-7]{1,7})[ \0]", block[148:156])
    summed_block = block[:148] + b" " * 8 + block[156:BLOCK_BYTES]
    # Some old programs computed the checksum over signed bytes.
    return stored_checksum is not None and int(stored_checksum[1], 8) in (
        sum(summed_block),
        sum(b - 256 * (b > 127) for b in summed_block),
    )


def header_at(read_exactly: ReadExactly, offset: int, archive_nbytes: int, archive: str) -> TarHeader | None:
    """Read the header of the file at an offset of a tar; return it, or None at the end mark.

    Args:
        read_exactly: function (offset, length) -> bytes that reads the archive.
        offset: offset of the file's first block in the archive.
        archive_nbytes: size of the archive in bytes; `LARGEST_FILE_NBYTES` if it is unknown.
        archive: name of the archive in error texts.

    Raises:
        DamagedError: there is no header at the offset, the header is inconsistent, or the file exceeds the archive.
    """
    block_start, extra_nbytes, long_name, pax_records = offset, 0, "", dict[str, str]()
    for _ in range(LARGEST_RECORD_COUNT + 1):
        block = read_exactly(block_start, BLOCK_BYTES)
        if block_start == offset and not block.rstrip(b"\0"):
            return None
        if not is_header(block):
            raise damage_error(archive, block_start, "the header of a file", "none, by its checksum")
        type_flag, content_nbytes = (
            block[156:157].decode("latin-1"),
            _parse_number(block[124:136], block_start, archive),
        )
        if type_flag not in "xXgLK":
            return _build_header(
                block,
                type_flag,
                content_nbytes,
                TarHeader(pax_records.get("path", long_name), offset, block_start, 0, ""),
                archive_nbytes,
                archive,
                pax_records,
            )
        extra_nbytes += content_nbytes
        if extra_nbytes > LARGEST_EXTRA_BYTES:
            raise damage_error(
                archive,
                block_start,
                f"at most {LARGEST_EXTRA_BYTES:,} bytes of records before a file",
                f"{extra_nbytes:,}",
            )
        record_bytes = read_exactly(block_start + BLOCK_BYTES, content_nbytes)
        if type_flag in "xXg":
            new_records = _parse_pax(record_bytes, block_start, archive)
            if type_flag == "g" and new_records.keys() & {"path", "size"}:
                raise damage_error(archive, block_start, "a path and a size for one file", "one for all files")
            pax_records |= new_records if type_flag != "g" else {}
        elif type_flag == "L":
            long_name = _decode_text(record_bytes)
        block_start += BLOCK_BYTES + padded_size(content_nbytes)
    raise damage_error(archive, offset, f"at most {LARGEST_RECORD_COUNT} records before a file", "more")


def _build_header(
    block: bytes,
    type_flag: str,
    content_nbytes: int,
    partial_header: TarHeader,
    archive_nbytes: int,
    archive: str,
    pax_records: dict[str, str],
) -> TarHeader:
    """Combine the header block of a file with the pax records and long names before the block; return the header."""
    header_start, name = partial_header.data_offset, partial_header.name or _decode_text(block[:100])
    if not partial_header.name and block[257:263] == b"ustar\0" and (prefix := _decode_text(block[345:500])):
        name = f"{prefix}/{name}"
    if "size" in pax_records:
        if not re.fullmatch("[0-9]{1,18}", pax_records["size"]):
            raise damage_error(archive, header_start, "a size in the pax records", repr(pax_records["size"][:40]))
        content_nbytes = int(pax_records["size"])
    if type_flag == "S" or any(key.startswith("GNU.sparse") for key in pax_records):
        raise damage_error(
            archive,
            header_start,
            "whole files",
            f"a sparse one, {name[:200]!r}",
            "Unpack it and give the files' folder",
        )
    kind = "" if type_flag in "0\0007" else OTHER_KINDS.get(type_flag, f"of the unknown kind {type_flag!r}")
    if type_flag == "\0" and name.endswith("/"):
        kind = OTHER_KINDS["5"]
    data_offset = header_start + BLOCK_BYTES
    # Headers of links and folders may state a size, but no contents follow.
    content_nbytes = 0 if kind and type_flag in "123456\0" else content_nbytes
    if data_offset + content_nbytes > archive_nbytes:
        expected = f"the {content_nbytes:,} bytes of {name[:200]!r} within the archive's {archive_nbytes:,}"
        raise damage_error(archive, header_start, expected, "an archive that is cut, or a wrong size")
    return TarHeader(tidy_name(name), partial_header.start, data_offset, content_nbytes, kind)


def tidy_name(file_name: str) -> str:
    """Remove "./" and doubled slashes from a file's name; return the name."""
    tidied_name = "/".join(part for part in file_name.split("/") if part not in ("", "."))
    return f"/{tidied_name}" if file_name.startswith("/") else tidied_name


def leads_out(file_name: str) -> bool:
    """Say whether a file's name would lead out of the folder in which a tar is unpacked."""
    return file_name.startswith("/") or ".." in file_name.split("/")


def _decode_text(field_bytes: bytes) -> str:
    return field_bytes.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _parse_number(field_bytes: bytes, offset: int, archive: str) -> int:
    """Parse a size field, which is an octal number, or a number in base 256 for large sizes; return the size."""
    if field_bytes[0] in (0x80, 0xFF):
        value = int.from_bytes(field_bytes[1:], "big") - (
            256 ** (len(field_bytes) - 1) if field_bytes[0] == 0xFF else 0
        )
    else:
        digits = field_bytes.partition(b"\0")[0].strip(b" ")
        if not re.fullmatch(rb"[0-7]*", digits):
            raise damage_error(archive, offset, "a size in octal digits", repr(field_bytes))
        value = int(digits or b"0", 8)
    if not 0 <= value < LARGEST_FILE_NBYTES:
        raise damage_error(archive, offset, "a size that a file can have", f"{value:,}")
    return value


def _parse_pax(pax_bytes: bytes, offset: int, archive: str) -> dict[str, str]:
    """Parse pax records, "LENGTH KEY=VALUE\\n" each; return the values by key."""
    value_of_key, record_start = {}, 0
    while record_start < len(pax_bytes) and pax_bytes[record_start:].strip(b"\0"):
        match = _PAX_LENGTH.match(pax_bytes, record_start)
        record_end = record_start + int(match[1]) if match else 0
        key, equals_sign, value = pax_bytes[match.end() : record_end - 1].partition(b"=") if match else (b"", b"", b"")
        if (
            not match
            or record_end > len(pax_bytes)
            or record_end <= match.end()
            or pax_bytes[record_end - 1 : record_end] != b"\n"
            or not equals_sign
        ):
            raise damage_error(
                archive, offset, "pax records of the stated length", repr(pax_bytes[record_start : record_start + 40])
            )
        value_of_key[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        record_start = record_end
    return value_of_key
