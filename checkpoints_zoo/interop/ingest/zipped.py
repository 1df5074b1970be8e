"""The zip archives that torch.save writes: whole, nothing compressed, one list of files, the checksums right."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

from checkpoints_zoo.errors import DamagedError


def check_plain(path: Path) -> None:
    """Check that a zip archive is whole and holds no more bytes than it has itself: a few could else fill all memory.

    Raises:
        DamagedError: it is cut, or can't be listed; it is compressed, as torch.save never does; or its files overlap.
    """
    try:
        with zipfile.ZipFile(path) as file:
            script = any("/code/" in name for name in file.namelist())
            held = sum(one.file_size for one in file.infolist())
            packed = any(one.compress_type != zipfile.ZIP_STORED for one in file.infolist())
    except (NotImplementedError, ValueError, OSError) as error:  # torch's own reader may still unpack it
        found = f"one that can't be listed ({type(error).__name__}: {error})"[:200]
        expected = "a zip archive as torch.save writes it"
        raise DamagedError(f"file {path}", expected=expected, found=found, path=path) from error
    except zipfile.BadZipFile as error:
        found = f"{path.stat().st_size:,} bytes without the end that a zip archive has"
        raise DamagedError(f"file {path}", expected="a whole file of torch.save", found=found, path=path) from error
    if not _one_directory(path):
        found, expected = (
            "another list of them, or bytes after it",
            "a zip archive with one list of its files, at its end",
        )
        raise DamagedError(f"file {path}", expected=expected, found=found, path=path)
    if script or packed or held > path.stat().st_size:
        found = f"{held:,} bytes packed into {path.stat().st_size:,}"
        raise DamagedError(
            f"file {path}",
            expected="a zip archive as torch.save writes it, nothing compressed",
            found="a TorchScript module, which is code" if script else found,
            path=path,
        )


def _one_directory(path: Path) -> bool:
    """Say whether the list of a zip archive's files lies where its end says, and right before it.

    zipfile takes the one right before the end, torch the one at the offset that the end names.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 98))
        tail = file.read()
    at, (length, offset) = size - 22, struct.unpack("<2I", tail[-10:-2])
    if tail[-42:-38] == b"PK\x06\x07":  # of 64 bits, as torch.save writes it: a record of 56 bytes, and where it lies
        at = size - 98
        if tail[:4] != b"PK\x06\x06" or struct.unpack("<Q", tail[-34:-26])[0] != at:
            return False
        length, offset = struct.unpack("<2Q", tail[-58:-42])
    return tail[-22:-18] == b"PK\x05\x06" and bool(offset + length == at)


def checksum_problem(path: Path) -> str:
    """Compare a file of torch.save with the checksums in it; return what is wrong, "" where nothing is or none are.

    torch.load does not look at them.
    """
    try:
        with zipfile.ZipFile(path) as file:
            summed = any(one.CRC for one in file.infolist())  # none with torch.serialization.set_crc32_options(False)
            changed = file.testzip() if summed else None
    except zipfile.BadZipFile:  # of before version 1.6
        return ""
    return "" if changed is None else f"values that are not those that were saved, by the checksum of {changed}"
