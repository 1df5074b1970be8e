"""Reading of gzipped archives: they are unpacked once into the member cache, or read once from start to end."""

from __future__ import annotations

import gzip
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
from checkpoints_zoo.sources.archives.tar import LARGEST, damage_error, header_at, tidy_name

MOST_GROWTH = 200  # Largest ratio of a gzipped file's unpacked size to its size; weights never exceed it.
PIECE = 2**20
LARGEST_MEMBER = 2**33
MOST_AFTER = 2**26  # Largest number of bytes read after the tar's end mark to reach gzip's checksum.


def unpack_once(path: Path, key: str, cache_folder: Path) -> Path:
    """Unpack a gzipped file unless this was done before; return the path of the tar.

    Args:
        path: path of the gzipped file.
        key: text that identifies the content of the file.
        cache_folder: folder of the cache that the tar is written into.

    Raises:
        DamagedError: the file is cut short, or unpacks to more than `MOST_GROWTH` times its size.
        StorageError: the disk is full.
    """
    target = cache_folder / "unpacked" / f"{key}.tar"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked_key(cache_folder, f"unpacked {key}"):
            if not target.is_file():  # Another process may have unpacked the file in the meantime.
                _unpack(path, target)
    return target


def _unpack(archive: Path, unpacked_file: Path) -> None:
    limit = archive.stat().st_size * MOST_GROWTH + 2**20
    try:
        with gzip.open(archive) as packed, replace_file(unpacked_file, "wb") as file:
            while raw := packed.read(2**20):
                if file.tell() + len(raw) > limit:
                    expected = f"at most {MOST_GROWTH} times its size unpacked"
                    raise DamagedError(f"archive {archive}", expected=expected, found="more", path=archive)
                file.write(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedError(
            f"archive {archive}", expected="a whole gzip file", found=str(error), do="Get it again", path=archive
        ) from error
    except OSError as error:
        raise disk.disk_full(unpacked_file.parent, error) from error


def stream_members(file: IO[bytes], name: str, largest: int = LARGEST_MEMBER) -> Iterator[tuple[str, Header, bytes]]:
    """Read a gzipped tar from start to end; yield (name, header, bytes of the file) of each member, one in memory at a
    time.

    Args:
        file: the gzipped tar, opened for reading bytes.
        name: name of the archive, for error texts.
        largest: largest number of bytes that a member may have.

    Raises:
        DamagedError: the archive is cut short, is no gzipped tar, or has a damaged or too large member.
    """
    with gzip.GzipFile(fileobj=file) as unpacked:
        stream_reader, start = _ForwardReader(unpacked, name), 0
        while True:
            stream_reader.forget(start)
            header = header_at(stream_reader.take, start, LARGEST, name)
            if header is None:
                break
            contents = Contents(name)
            member = contents.add(header, stream_reader.take)
            if broken := next((other for other in contents.others if other.member), None):
                raise DamagedError(broken.why.rstrip("."), path=name)
            if member:
                if header.size > largest:
                    expected = f"at most {largest:,} bytes a member"
                    raise damage_error(name, start, expected, f"{header.size:,} for {header.name!r}")
                raw = stream_reader.take(header.data, header.size)
                yield tidy_name(header.name), parse_header(raw, header.size, f"{header.name!r} in {name}"), raw
            start = header.end
        stream_reader.finish(MOST_AFTER)


@dataclass
class _ForwardReader:
    """A stream that can only be read forward, with a buffer of the bytes that `forget` has not dropped yet."""

    file: gzip.GzipFile
    name: str
    begin: int = 0
    kept: bytes = b""

    def _read(self, length: int) -> bytes:
        try:
            return self.file.read(length)
        except (OSError, EOFError, zlib.error) as error:
            at = self.begin + len(self.kept)
            raise damage_error(self.name, at, "a whole gzip file", str(error) or "its end") from error

    def take(self, offset: int, length: int) -> bytes:
        pieces, end = [self.kept], offset + length - self.begin
        available = len(self.kept)
        while available < end:  # Read piece by piece, so that a false size in a header costs no memory.
            pieces.append(self._read(min(PIECE, end - available)))
            available += len(pieces[-1])
            if not pieces[-1]:
                raise damage_error(self.name, offset, f"{length:,} bytes more", "the end of the tar: it is cut")
        self.kept = b"".join(pieces)
        return self.kept[offset - self.begin :][:length]

    def forget(self, start: int) -> None:
        """Drop all buffered bytes before an offset."""
        while self.begin + len(self.kept) < start:
            self.begin, self.kept = self.begin + len(self.kept), b""
            self.kept = self._read(min(PIECE, start - self.begin))
            if not self.kept:
                raise damage_error(self.name, start, "an end mark of zeros", "the end of the tar: it is cut")
        self.begin, self.kept = start, self.kept[start - self.begin :]

    def finish(self, most: int) -> None:
        """Read the bytes after the tar's end mark, so that gzip checks its checksum."""
        while most > 0 and (raw := self._read(PIECE)):
            most -= len(raw)
