"""Indexing of a tar: the index is predicted from a few headers if the headers are regular, else every header is
read.

This is one file, because an index whose prediction fails is made by the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources.archives.contents import LARGEST_HEADER_NBYTES, Contents, Entry, Index, predict_file_names
from checkpoints_zoo.sources.archives.tar import (
    BLOCK_BYTES,
    LARGEST_EXTRA_BYTES,
    ReadExactly,
    damage_error,
    header_at,
    is_header,
    padded_size,
)

# Function (offset, length) -> bytes of a file, fewer bytes at its end; the function is called from several threads.
ReadRange = Callable[[int, int], bytes]

FIRST_READ_BYTES = 2**16  # Number of bytes of the first read of an archive.
SMALL_MEMBER_BYTES = 2**18  # If members are smaller than this number of bytes, PIECE_BYTES bytes are read at once.
PIECE_BYTES = 2**20
SMALLEST_READ_BYTES = 2**14
SAMPLED_MEMBER_COUNT = 27
LARGEST_FILE_COUNT = 2**20


def index_archive(read: ReadRange, archive_nbytes: int, archive: str, threads: int = 8) -> Index:
    """Index an archive by reading few of its bytes; return the index.

    If all sampled headers have one size and their names are in numeric or alphabetic order, the other headers are
    predicted; `is_as_predicted` checks the prediction when a member is read. If the headers are irregular, all of them
    are read.

    Args:
        read: function (offset, length) -> bytes that makes one request; it is called from several threads.
        archive_nbytes: size of the archive, in bytes.
        archive: name of the archive, for errors.
        threads: number of parallel reads; 1 reads in the calling thread.

    Raises:
        DamagedError: the file is neither a tar nor a gzipped file, or the tar is cut short or inconsistent.
    """
    first_bytes = read(0, min(archive_nbytes, FIRST_READ_BYTES))
    if first_bytes[:2] == b"\x1f\x8b":
        return Index(archive, archive_nbytes, "gzip")
    if not is_header(first_bytes[:BLOCK_BYTES]) and first_bytes[:BLOCK_BYTES] != bytes(BLOCK_BYTES):
        raise damage_error(
            archive, 0, "a tar, or a gzipped one", guess_kind(first_bytes) or f"something else: {first_bytes[:16]!r}"
        )
    stream_reader = _BufferedReader(read, archive_nbytes, archive, threads, {0: first_bytes})
    return _predict_index(stream_reader) or _index_by_walking(
        _BufferedReader(
            read,
            archive_nbytes,
            archive,
            threads,
            stream_reader.piece_at_offset,
            spare_reads=-len(stream_reader.piece_at_offset),
        )
    )


def walk_archive(read: ReadRange, archive_nbytes: int, archive: str, threads: int = 8) -> Index:
    """Read all headers of a tar one after another; return its index.

    There are at most 2 N + 4 reads for N files. If file sizes repeat, the next headers are read in parallel.

    Args:
        read, archive_nbytes, archive, threads: the same arguments as in `index_archive`.

    Raises:
        DamagedError: for the same reasons as in `index_archive`.
    """
    return _index_by_walking(_BufferedReader(read, archive_nbytes, archive, threads, {}))


def is_as_predicted(entry_bytes: bytes, entry: Entry, index: Index) -> bool:
    """Say whether the headers in front of a member's tensors agree with the index.

    Args:
        entry_bytes: bytes of the archive from `entry.start` to the member's first tensor, or further.
        entry: entry of the member in the index.
        index: the index of the archive.
    """
    contents = Contents(index.name)
    try:
        read_exactly = _reader_of_piece(entry_bytes, entry.start, index.name)
        file = header_at(read_exactly, entry.start, index.size, index.name)
        found_entry = file and contents.add(file, read_exactly)
    except DamagedError:
        return False
    expected_header = index.headers[entry.header_number]
    return bool(
        found_entry
        and (found_entry.name, found_entry.data_offset) == (entry.name, entry.data_offset)
        and contents.headers == [expected_header]
    )


def _reader_of_piece(archive_piece: bytes, piece_offset: int, archive: str) -> ReadExactly:
    """Return a function (offset, length) -> bytes of an archive that reads from one piece in memory; the piece starts
    at offset `piece_offset` of the archive."""

    def read_from_piece(offset: int, length: int) -> bytes:
        piece_bytes = archive_piece[offset - piece_offset :][:length]
        if len(piece_bytes) < length:
            raise damage_error(archive, offset, f"{length:,} bytes", f"{len(piece_bytes):,}")
        return piece_bytes

    return read_from_piece


@dataclass
class _BufferedReader:
    """A reader of an archive with two buffers: the piece of bytes at the current file, and pieces that were read ahead.

    Args:
        read, size, name, threads: the same arguments as in `index_archive`.
        piece_at_offset: offset in the archive -> bytes that were read there before.
        spare_reads: number of further reads ahead that are allowed; this limits the reads to two for each file.
    """

    read: ReadRange
    size: int
    name: str
    threads: int
    piece_at_offset: dict[int, bytes]
    spare_reads: int = 0
    piece_start: int = 0
    piece: bytes = b""
    read_nbytes: int = FIRST_READ_BYTES
    largest_header_nbytes: int = BLOCK_BYTES  # Largest number of bytes that the headers of one file took so far.
    file_count: int = 0
    pieces_to_read_ahead: int = 1
    pieces_ahead: dict[int, bytes] = field(default_factory=dict)
    file_distances: list[int] = field(default_factory=list)

    def move_to(self, offset: int) -> None:
        """Move the reader to the file that begins at an offset of the archive."""
        needed_end = min(offset + self.largest_header_nbytes, self.size)
        if self.piece_start <= offset and needed_end <= self.piece_start + len(self.piece):
            return
        if offset not in self.piece_at_offset and offset not in self.pieces_ahead:
            self.pieces_to_read_ahead = 1 if self.pieces_ahead else self.pieces_to_read_ahead
            self._read_from(offset)
        known_piece = self.piece_at_offset.get(offset)
        self.piece_start, self.piece = offset, self.pieces_ahead.pop(offset) if known_piece is None else known_piece

    def _read_from(self, offset: int) -> None:
        """Read a piece at an offset; if file sizes repeat, also read the pieces at the next files, in parallel."""
        piece_count = 0
        distances_repeat = (
            len(self.file_distances) == 2 and self.file_distances[0] == self.file_distances[1] > self.read_nbytes
        )
        if distances_repeat and self.threads > 1:
            piece_count = max(0, min(self.pieces_to_read_ahead, self.spare_reads))
            self.pieces_to_read_ahead = min(2 * self.pieces_to_read_ahead, 32)
        offsets = [offset, *(offset + i * self.file_distances[0] for i in range(1, piece_count + 1))]
        new_offsets = [
            piece_offset
            for piece_offset in offsets
            if piece_offset < self.size and piece_offset not in self.piece_at_offset
        ]
        self.spare_reads -= len(new_offsets) - 1
        self.pieces_ahead = dict(zip(new_offsets, self.read_pieces(new_offsets, self.read_nbytes), strict=True))

    def read_pieces(self, starts: list[int], length: int) -> list[bytes]:
        """Read pieces of the same length at several offsets of the archive in parallel; return the pieces."""

        def read_piece(start: int) -> bytes:
            return self._read_exactly(start, min(length, self.size - start))

        if len(starts) == 1 or self.threads == 1:
            return [read_piece(start) for start in starts]
        with ThreadPoolExecutor(min(self.threads, len(starts)), thread_name_prefix="zoo-archive") as pool:
            return list(pool.map(read_piece, starts))

    def _read_exactly(self, offset: int, length: int) -> bytes:
        read_bytes = self.read(offset, length)
        if len(read_bytes) != length:
            raise damage_error(self.name, offset, f"{length:,} bytes", f"{len(read_bytes):,}")
        return read_bytes

    def read_exactly(self, offset: int, length: int) -> bytes:
        """Return bytes of the archive at the current file; bytes that are not in a buffer are read."""
        offset_in_piece, piece_nbytes = offset - self.piece_start, len(self.piece)
        if offset + length > self.size:
            raise damage_error(
                self.name, offset, f"{length:,} bytes more", f"{max(0, self.size - offset):,}: it is cut"
            )
        if offset_in_piece + length > piece_nbytes:
            # Pax records and the tensor header have limited sizes: if few reads are left, one read gets both.
            extra_nbytes = FIRST_READ_BYTES if self.spare_reads > 0 else LARGEST_EXTRA_BYTES + LARGEST_HEADER_NBYTES
            read_end = min(offset_in_piece + length + extra_nbytes, self.size - self.piece_start)
            self.piece += self._read_exactly(self.piece_start + piece_nbytes, read_end - piece_nbytes)
            self.spare_reads -= 1
        return self.piece[offset_in_piece : offset_in_piece + length]

    def update_after_file(self, file_start: int, file_end: int, header_end: int) -> None:
        """After a file was read, update the distances between files and the number of bytes to read at each file."""
        self.file_count += 1
        self.spare_reads += 1
        self.file_distances = [*self.file_distances[-1:], file_end - file_start]
        if self.file_count > LARGEST_FILE_COUNT:
            raise damage_error(self.name, file_start, f"at most {LARGEST_FILE_COUNT:,} files", "more")
        self.largest_header_nbytes = max(self.largest_header_nbytes, padded_size(header_end - file_start))
        members_are_small = len(self.file_distances) == 2 and max(self.file_distances) < SMALL_MEMBER_BYTES
        self.read_nbytes = PIECE_BYTES if members_are_small else max(self.largest_header_nbytes, SMALLEST_READ_BYTES)


def _read_next_file(stream_reader: _BufferedReader, file_offset: int, contents: Contents) -> int | None:
    """Read the header of the file at an offset; return the offset of the next file, None at the archive's end mark."""
    if file_offset >= stream_reader.size:
        raise damage_error(
            stream_reader.name, file_offset, "an end mark of zeros", "the end of the archive: the archive is cut"
        )
    stream_reader.move_to(file_offset)
    file = header_at(stream_reader.read_exactly, file_offset, stream_reader.size, stream_reader.name)
    if file is None:
        return None
    entry = contents.add(file, stream_reader.read_exactly)
    header_nbytes = contents.headers[entry.header_number].header_nbytes if entry else 0
    stream_reader.update_after_file(file_offset, file.end, file.data_offset + header_nbytes)
    return file.end


def _index_by_walking(stream_reader: _BufferedReader) -> Index:
    contents, start = Contents(stream_reader.name), 0
    while (next_start := _read_next_file(stream_reader, start, contents)) is not None:
        start = next_start
    if not contents.entries:
        has_pickles = any(other.name.lower().endswith((".pt", ".pth", ".ckpt")) for other in contents.others)
        count_text = f"none among {len(contents.others)} files"
        raise DamagedError(
            f"archive {stream_reader.name}", expected="safetensors files in the tar", path=stream_reader.name,
            found=f"{count_text}, but files of torch.save" if has_pickles else count_text,
            do="Unpack it and give the folder: only files in a folder are opened" if has_pickles else "",
        )  # fmt: skip
    return contents.index(stream_reader.size)


def _predict_index(stream_reader: _BufferedReader) -> Index | None:
    """Predict the index of a regular tar from its first two members and a few others; return the index, None if the tar
    is irregular."""
    contents, next_start = Contents(stream_reader.name), 0
    for _ in range(8):
        following_start = _read_next_file(stream_reader, next_start, contents)
        if following_start is None:
            return None
        next_start = following_start
        if len(contents.entries) == 2:
            break
    else:
        return None
    first_entry, second_entry = contents.entries
    entry_distance, prefix_nbytes = (
        second_entry.start - first_entry.start,
        second_entry.data_offset - second_entry.start,
    )
    is_regular = (
        next_start - second_entry.start == entry_distance
        and first_entry.header_number == second_entry.header_number
        and first_entry.data_offset - first_entry.start == prefix_nbytes
    )
    member_count, rest_nbytes = divmod(stream_reader.size - first_entry.start, entry_distance)
    if not is_regular or entry_distance < SMALL_MEMBER_BYTES or rest_nbytes < BLOCK_BYTES or member_count < 2:
        return None
    sampled_positions = sorted(
        {round(i * (member_count - 1) / (SAMPLED_MEMBER_COUNT - 1)) for i in range(SAMPLED_MEMBER_COUNT)} - {0, 1}
    )
    sampled_pieces = stream_reader.read_pieces(
        [
            first_entry.start + member_count * entry_distance,
            *(first_entry.start + position * entry_distance for position in sampled_positions),
        ],
        prefix_nbytes + contents.headers[0].header_nbytes,
    )
    stream_reader.piece_at_offset |= {stream_reader.piece_start: stream_reader.piece}
    stream_reader.piece_at_offset |= {
        first_entry.start + position * entry_distance: piece
        for position, piece in zip(sampled_positions, sampled_pieces[1:], strict=True)
    }
    if sampled_pieces[0].strip(b"\0"):
        return None
    for position, piece in zip(sampled_positions, sampled_pieces[1:], strict=True):
        if not _resembles_first(
            contents,
            stream_reader,
            piece,
            first_entry.start + position * entry_distance,
            prefix_nbytes,
            first_entry.header_number,
        ):
            return None
    sampled_names = dict(zip((0, 1, *sampled_positions), (e.name for e in contents.entries), strict=True))
    predicted_names = predict_file_names(sampled_names, member_count, stream_reader.name)
    if predicted_names is None:
        return None
    entries = tuple(
        Entry(
            name,
            first_entry.start + position * entry_distance,
            first_entry.data_offset + position * entry_distance,
            first_entry.header_number,
            position in sampled_names,
        )
        for position, name in enumerate(predicted_names)
    )
    return Index(
        stream_reader.name, stream_reader.size, "tar", tuple(contents.headers), entries, tuple(contents.others)
    )


def _resembles_first(
    contents: Contents,
    stream_reader: _BufferedReader,
    piece: bytes,
    piece_offset: int,
    tar_header_nbytes: int,
    header_number: int,
) -> bool:
    """Say whether a sampled piece of an archive starts with a member that has the same header as the first member."""
    read_exactly = _reader_of_piece(piece, piece_offset, stream_reader.name)
    try:
        file = header_at(read_exactly, piece_offset, stream_reader.size, stream_reader.name)
        entry = file and contents.add(file, read_exactly)
    except DamagedError:
        return False
    return bool(
        entry
        and entry.data_offset - piece_offset == tar_header_nbytes
        and entry.header_number == header_number
        and len(contents.headers) == 1
    )
