"""Reading of gzipped archives: they are unpacked once into the member cache, or read once from start to end."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.shard_files import Header, parse_header
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.archives.contents import Contents
from checkpoints_zoo.sources.archives.tar import LARGEST_SIZE, damage_error, header_at, tidy_name
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file

LARGEST_GROWTH = 200  # Largest ratio of unpacked to gzipped size; gzipped weights stay below it.
PIECE_BYTES = 2**20
LARGEST_MEMBER_BYTES = 2**33
LARGEST_REST_BYTES = 2**26  # Largest number of bytes that are read after the tar's end mark, to reach gzip's checksum.


def unpack_once(gzip_path: Path, content_key: str, cache_folder: Path, check: bool = False) -> Path:
    """Unpack a gzipped file unless this was done before; return the path of the tar.

    A tar that has changed since it was unpacked is deleted, and the gzipped file is unpacked again.

    Args:
        gzip_path: path of the gzipped file.
        content_key: text that identifies the content of the gzipped file.
        cache_folder: folder of the cache into which the tar is written.
        check: whether an unpacked tar is hashed again even if its hash is recorded.

    Raises:
        DamagedError: the file is cut short, or unpacks to more than `LARGEST_GROWTH` times its size.
        StorageError: the disk is full.
    """
    tar_path = cache_folder / "unpacked" / f"{content_key}.tar"
    if not _is_intact(tar_path, check):
        tar_path.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked_key(cache_folder, f"unpacked {content_key}"):
            if not _is_intact(tar_path):  # Another process may have unpacked the file in the meantime.
                delete_file(tar_path, cache.record_path(tar_path))
                _unpack(gzip_path, tar_path)
    return tar_path


def _is_intact(tar_path: Path, check: bool = False) -> bool:
    """Say whether an unpacked tar exists and has the hash that was recorded when it was unpacked. A tar whose hash is
    recorded is not read again, unless `check` is true."""
    if not tar_path.is_file():
        return False
    record = HashRecord(tar_path, cache.record_path(tar_path), check)
    if record.hashes:
        return True
    with tar_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if record.old_hashes.get("") != digest:
        return False
    record.add("", digest)
    record.save()
    return True


def _unpack(archive: Path, unpacked_file: Path) -> None:
    largest_nbytes, digest = archive.stat().st_size * LARGEST_GROWTH + 2**20, hashlib.sha256()
    try:
        with gzip.open(archive) as gzipped_file, replace_file(unpacked_file, "wb", sync=True) as file:
            while piece := gzipped_file.read(2**20):
                if file.tell() + len(piece) > largest_nbytes:
                    expected = f"at most {LARGEST_GROWTH} times its size when unpacked"
                    raise DamagedError(f"archive {archive}", expected=expected, found="more", path=archive)
                file.write(piece)
                digest.update(piece)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedError(
            f"archive {archive}", expected="a whole gzip file", found=str(error), do="Get it again", path=archive
        ) from error
    except OSError as error:
        raise disk.disk_full_error(unpacked_file.parent, error) from error
    record = HashRecord(unpacked_file, cache.record_path(unpacked_file))
    record.add("", digest.hexdigest())
    record.save()


def stream_members(
    file: IO[bytes], archive: str, largest_nbytes: int = LARGEST_MEMBER_BYTES
) -> Iterator[tuple[str, Header, bytes]]:
    """Read a gzipped tar from start to end; yield (name, header, bytes of the file) of each member; only one member is
    in memory at a time.

    Args:
        file: the gzipped tar, opened for reading bytes.
        archive: name of the archive, for error texts.
        largest_nbytes: largest number of bytes that a member may have.

    Raises:
        DamagedError: the archive is cut short, is no gzipped tar, or has a damaged or too large member.
    """
    with gzip.GzipFile(fileobj=file) as unpacked_file:
        stream_reader, start = _ForwardReader(unpacked_file, archive), 0
        while True:
            stream_reader.drop_before(start)
            header = header_at(stream_reader.read_exactly, start, LARGEST_SIZE, archive)
            if header is None:
                break
            contents = Contents(archive)
            member = contents.add(header, stream_reader.read_exactly)
            if damaged_member := next((other for other in contents.others if other.member), None):
                raise DamagedError(damaged_member.why.rstrip("."), path=archive)
            if member:
                if header.size > largest_nbytes:
                    expected = f"at most {largest_nbytes:,} bytes a member"
                    raise damage_error(archive, start, expected, f"{header.size:,} for {header.name!r}")
                raw = stream_reader.read_exactly(header.data_offset, header.size)
                yield tidy_name(header.name), parse_header(raw, header.size, f"{header.name!r} in {archive}"), raw
            start = header.end
        stream_reader.read_rest(LARGEST_REST_BYTES)


@dataclass
class _ForwardReader:
    """A stream that can only be read forward, with a buffer of the bytes that `drop_before` has not dropped yet."""

    file: gzip.GzipFile
    name: str
    buffer_start: int = 0
    buffer: bytes = b""

    def _read(self, length: int) -> bytes:
        try:
            return self.file.read(length)
        except (OSError, EOFError, zlib.error) as error:
            position = self.buffer_start + len(self.buffer)
            raise damage_error(self.name, position, "a whole gzip file", str(error) or "its end") from error

    def read_exactly(self, offset: int, length: int) -> bytes:
        pieces, end = [self.buffer], offset + length - self.buffer_start
        available_bytes = len(self.buffer)
        while available_bytes < end:  # Read piece by piece, so that a false size in a header costs no memory.
            pieces.append(self._read(min(PIECE_BYTES, end - available_bytes)))
            available_bytes += len(pieces[-1])
            if not pieces[-1]:
                raise damage_error(self.name, offset, f"{length:,} bytes more", "the end of the tar: it is cut")
        self.buffer = b"".join(pieces)
        return self.buffer[offset - self.buffer_start :][:length]

    def drop_before(self, offset: int) -> None:
        """Drop all buffered bytes before an offset."""
        while self.buffer_start + len(self.buffer) < offset:
            self.buffer_start, self.buffer = self.buffer_start + len(self.buffer), b""
            self.buffer = self._read(min(PIECE_BYTES, offset - self.buffer_start))
            if not self.buffer:
                raise damage_error(self.name, offset, "an end mark of zeros", "the end of the tar: it is cut")
        self.buffer_start, self.buffer = offset, self.buffer[offset - self.buffer_start :]

    def read_rest(self, bytes_left: int) -> None:
        """Read the bytes after the tar's end mark, so that gzip checks the checksum."""
        while bytes_left > 0 and (raw := self._read(PIECE_BYTES)):
            bytes_left -= len(raw)
