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
from checkpoints_zoo.sources.archives.tar import LARGEST_FILE_NBYTES, damage_error, header_at, tidy_name
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file

LARGEST_UNPACKING_RATIO = 200  # Largest ratio of unpacked to gzipped size; gzipped weights stay below it.
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
        DamagedError: the file is cut short, or unpacks to more than `LARGEST_UNPACKING_RATIO` times its size.
        StorageError: the disk is full.
    """
    tar_path = cache_folder / "unpacked" / f"{content_key}.tar"
    if not _is_intact(tar_path, check):
        tar_path.parent.mkdir(parents=True, exist_ok=True)
        with cache.hold_key_lock(cache_folder, f"unpacked {content_key}"):
            if not _is_intact(tar_path):  # Another process may have unpacked the file in the meantime.
                delete_file(tar_path, cache.hash_record_path(tar_path))
                _unpack(gzip_path, tar_path)
    return tar_path


def _is_intact(tar_path: Path, check: bool = False) -> bool:
    """Say whether an unpacked tar exists and has the hash that was recorded when it was unpacked. A tar whose hash is
    recorded is not read again, unless `check` is true."""
    if not tar_path.is_file():
        return False
    hash_record = HashRecord(tar_path, cache.hash_record_path(tar_path), check)
    if hash_record.hashes:
        return True
    with tar_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if hash_record.old_hashes.get("") != digest:
        return False
    hash_record.add("", digest)
    hash_record.save()
    return True


def _unpack(gzip_path: Path, tar_path: Path) -> None:
    largest_nbytes, digest = gzip_path.stat().st_size * LARGEST_UNPACKING_RATIO + 2**20, hashlib.sha256()
    try:
        with gzip.open(gzip_path) as gzipped_file, replace_file(tar_path, "wb", sync=True) as tar_file:
            while piece := gzipped_file.read(2**20):
                if tar_file.tell() + len(piece) > largest_nbytes:
                    expected = f"at most {LARGEST_UNPACKING_RATIO} times its size when unpacked"
                    raise DamagedError(f"archive {gzip_path}", expected=expected, found="more", path=gzip_path)
                tar_file.write(piece)
                digest.update(piece)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedError(
            f"archive {gzip_path}", expected="a whole gzip file", found=str(error), do="Get it again", path=gzip_path
        ) from error
    except OSError as error:
        raise disk.disk_full_error(tar_path.parent, error) from error
    hash_record = HashRecord(tar_path, cache.hash_record_path(tar_path))
    hash_record.add("", digest.hexdigest())
    hash_record.save()


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
        stream_reader, file_start = _ForwardReader(unpacked_file, archive), 0
        while True:
            stream_reader.drop_before(file_start)
            tar_header = header_at(stream_reader.read_exactly, file_start, LARGEST_FILE_NBYTES, archive)
            if tar_header is None:
                break
            contents = Contents(archive)
            entry = contents.add(tar_header, stream_reader.read_exactly)
            if damaged_member := next((other for other in contents.others if other.is_damaged_member), None):
                raise DamagedError(damaged_member.reason.rstrip("."), path=archive)
            if entry:
                if tar_header.size > largest_nbytes:
                    expected = f"at most {largest_nbytes:,} bytes a member"
                    raise damage_error(archive, file_start, expected, f"{tar_header.size:,} for {tar_header.name!r}")
                file_bytes = stream_reader.read_exactly(tar_header.data_offset, tar_header.size)
                yield (
                    tidy_name(tar_header.name),
                    parse_header(file_bytes, tar_header.size, f"{tar_header.name!r} in {archive}"),
                    file_bytes,
                )
            file_start = tar_header.end
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
        pieces, needed_nbytes = [self.buffer], offset + length - self.buffer_start
        available_nbytes = len(self.buffer)
        # Read piece by piece, so that a false size in a header costs no memory.
        while available_nbytes < needed_nbytes:
            pieces.append(self._read(min(PIECE_BYTES, needed_nbytes - available_nbytes)))
            available_nbytes += len(pieces[-1])
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
        while bytes_left > 0 and (rest_bytes := self._read(PIECE_BYTES)):
            bytes_left -= len(rest_bytes)
