"""Indexing of a tar: the index is predicted from a few headers if they are regular, else every header is read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources.archives.contents import MOST_LEAD, Contents, Entry, Index, names_in_order
from checkpoints_zoo.sources.archives.tar import (
    BLOCK,
    MOST_EXTRA,
    ReadExactly,
    damage_error,
    header_at,
    is_header,
    padded_size,
)

# Function (offset, length) -> bytes, fewer at the end of the file; it is called from several threads.
ReadRange = Callable[[int, int], bytes]

FIRST = 2**16  # Number of bytes of the first read of an archive.
SMALL = 2**18  # If members are smaller than this number of bytes, PIECE bytes are read at a time.
PIECE = 2**20
LEAST = 2**14
SAMPLES = 27
MOST_FILES = 2**20


def index_archive(read: ReadRange, size: int, name: str, threads: int = 8) -> Index:
    """Index an archive by reading few of its bytes; return the index.

    If all sampled headers have one size and their names are in numeric or alphabetic order, the other headers are
    predicted; `is_as_predicted` checks the prediction when a member is read. If the headers are irregular, all of them
    are read.

    Args:
        read: function (offset, length) -> bytes that makes one request; it is called from several threads.
        size: size of the archive, in bytes.
        name: name of the archive, for errors.
        threads: number of parallel reads; 1 reads in this thread.

    Raises:
        DamagedError: the file is neither a tar nor a gzipped file, or the tar is cut short or inconsistent.
    """
    first = read(0, min(size, FIRST))
    if first[:2] == b"\x1f\x8b":
        return Index(name, size, "gzip")
    if not is_header(first[:BLOCK]) and first[:BLOCK] != bytes(BLOCK):
        raise damage_error(name, 0, "a tar, or a gzipped one", guess_kind(first) or f"something else: {first[:16]!r}")
    stream_reader = _BufferedReader(read, size, name, threads, {0: first})
    return _predict_index(stream_reader) or _index_by_walking(
        _BufferedReader(read, size, name, threads, stream_reader.kept, spare_reads=-len(stream_reader.kept))
    )


def walk_archive(read: ReadRange, size: int, name: str, threads: int = 8) -> Index:
    """Read all headers of a tar one after another; return its index.

    There is one read for each file, or at most twice as many reads plus four; if sizes repeat, the next headers are
    read in parallel.

    Args:
        read, size, name, threads: the same arguments as in `index_archive`.

    Raises:
        DamagedError: for the same reasons as in `index_archive`.
    """
    return _index_by_walking(_BufferedReader(read, size, name, threads, {}))


def is_as_predicted(window: bytes, entry: Entry, index: Index) -> bool:
    """Say whether the headers in front of a member's tensors agree with the index.

    Args:
        window: bytes of the archive from `entry.start` to the first tensor, or more.
        entry: the member.
        index: the index of the archive.
    """
    contents = Contents(index.name)
    try:
        read_exactly = _reader_of(window, entry.start, index.name)
        file = header_at(read_exactly, entry.start, index.size, index.name)
        member = file and contents.add(file, read_exactly)
    except DamagedError:
        return False
    head = index.heads[entry.head]
    return bool(member and (member.name, member.data) == (entry.name, entry.data) and contents.heads == [head])


def _reader_of(piece: bytes, start: int, archive: str) -> ReadExactly:
    """Return a read function for an archive of which only one piece is in memory, which starts at an offset."""

    def take(offset: int, length: int) -> bytes:
        raw = piece[offset - start :][:length]
        if len(raw) < length:
            raise damage_error(archive, offset, f"{length:,} bytes", f"{len(raw):,}")
        return raw

    return take


@dataclass
class _BufferedReader:
    """A reader of an archive with a buffer: the bytes at the current file, and pieces that were read ahead.

    Args:
        read, size, name, threads: the same arguments as in `index_archive`.
        kept: offset -> piece of the archive that was read before.
        spare_reads: number of reads ahead that may turn out useless; it limits the reads to two for each file.
    """

    read: ReadRange
    size: int
    name: str
    threads: int
    kept: dict[int, bytes]
    spare_reads: int = 0
    begin: int = 0
    piece: bytes = b""
    wanted: int = FIRST
    most: int = BLOCK  # Largest number of bytes that the headers of one file took so far.
    files: int = 0
    count_ahead: int = 1
    pieces_ahead: dict[int, bytes] = field(default_factory=dict)
    strides: list[int] = field(default_factory=list)

    def goto(self, start: int) -> None:
        """Move the reader to the file at an offset."""
        needed = min(start + self.most, self.size)
        if self.begin <= start and needed <= self.begin + len(self.piece):
            return
        if start not in self.kept and start not in self.pieces_ahead:
            self.count_ahead = 1 if self.pieces_ahead else self.count_ahead
            self._read_on(start)
        piece = self.kept.get(start)
        self.begin, self.piece = start, self.pieces_ahead.pop(start) if piece is None else piece

    def _read_on(self, start: int) -> None:
        """Read a piece at an offset; if sizes repeat, also the pieces of the next files, in parallel."""
        count = 0
        even = len(self.strides) == 2 and self.strides[0] == self.strides[1] > self.wanted
        if even and self.threads > 1:
            count = max(0, min(self.count_ahead, self.spare_reads))
            self.count_ahead = min(2 * self.count_ahead, 32)
        places = [start, *(start + i * self.strides[0] for i in range(1, count + 1))]
        starts = [at for at in places if at < self.size and at not in self.kept]
        self.spare_reads -= len(starts) - 1
        self.pieces_ahead = dict(zip(starts, self.read_all(starts, self.wanted), strict=True))

    def read_all(self, starts: list[int], length: int) -> list[bytes]:
        """Read pieces of the same length at several offsets in parallel; return them."""

        def one(at: int) -> bytes:
            return self._read_exactly(at, min(length, self.size - at))

        if len(starts) == 1 or self.threads == 1:
            return [one(at) for at in starts]
        with ThreadPoolExecutor(min(self.threads, len(starts)), thread_name_prefix="zoo-archive") as pool:
            return list(pool.map(one, starts))

    def _read_exactly(self, offset: int, length: int) -> bytes:
        raw = self.read(offset, length)
        if len(raw) != length:
            raise damage_error(self.name, offset, f"{length:,} bytes", f"{len(raw):,}")
        return raw

    def take(self, offset: int, length: int) -> bytes:
        """Return bytes of the archive at the current file; bytes that are not in the buffer are read."""
        begin, available = offset - self.begin, len(self.piece)
        if offset + length > self.size:
            raise damage_error(
                self.name, offset, f"{length:,} bytes more", f"{max(0, self.size - offset):,}: it is cut"
            )
        if begin + length > available:
            # Records and the header have limited sizes: if few reads are left, one read gets both.
            room = FIRST if self.spare_reads > 0 else MOST_EXTRA + MOST_LEAD
            read_end = min(begin + length + room, self.size - self.begin)
            self.piece += self._read_exactly(self.begin + available, read_end - available)
            self.spare_reads -= 1
        return self.piece[begin : begin + length]

    def passed(self, start: int, end: int, lead_end: int) -> None:
        """After a file, update the distance between files and the number of bytes to read for each."""
        self.files += 1
        self.spare_reads += 1
        self.strides = [*self.strides[-1:], end - start]
        if self.files > MOST_FILES:
            raise damage_error(self.name, start, f"at most {MOST_FILES:,} files", "more")
        self.most = max(self.most, padded_size(lead_end - start))
        small = len(self.strides) == 2 and max(self.strides) < SMALL
        self.wanted = PIECE if small else max(self.most, LEAST)


def _read_next_file(stream_reader: _BufferedReader, start: int, contents: Contents) -> int | None:
    """Read the header of the file at an offset; return the offset of the next file, None at the end mark."""
    if start >= stream_reader.size:
        raise damage_error(stream_reader.name, start, "an end mark of zeros", "the archive's last byte: it is cut")
    stream_reader.goto(start)
    file = header_at(stream_reader.take, start, stream_reader.size, stream_reader.name)
    if file is None:
        return None
    member = contents.add(file, stream_reader.take)
    header_nbytes = contents.heads[member.head].header_nbytes if member else 0
    stream_reader.passed(start, file.end, file.data + header_nbytes)
    return file.end


def _index_by_walking(stream_reader: _BufferedReader) -> Index:
    contents, start = Contents(stream_reader.name), 0
    while (after := _read_next_file(stream_reader, start, contents)) is not None:
        start = after
    if not contents.entries:
        pickles = any(other.name.lower().endswith((".pt", ".pth", ".ckpt")) for other in contents.others)
        count_text = f"none among {len(contents.others)} files"
        raise DamagedError(
            f"archive {stream_reader.name}", expected="safetensors files in the tar", path=stream_reader.name,
            found=f"{count_text}, but files of torch.save" if pickles else count_text,
            do="Unpack it and give the folder: only there are such files opened" if pickles else "",
        )  # fmt: skip
    return contents.index(stream_reader.size)


def _predict_index(stream_reader: _BufferedReader) -> Index | None:
    """Predict the index of a regular tar from its first two members and a few others; return it, None if the tar is
    irregular."""
    contents, after = Contents(stream_reader.name), 0
    for _ in range(8):
        following = _read_next_file(stream_reader, after, contents)
        if following is None:
            return None
        after = following
        if len(contents.entries) == 2:
            break
    else:
        return None
    first, second = contents.entries
    stride, before = second.start - first.start, second.data - second.start
    is_regular = after - second.start == stride and first.head == second.head and first.data - first.start == before
    count, rest = divmod(stream_reader.size - first.start, stride)
    if not is_regular or stride < SMALL or rest < BLOCK or count < 2:
        return None
    places = sorted({round(i * (count - 1) / (SAMPLES - 1)) for i in range(SAMPLES)} - {0, 1})
    pieces = stream_reader.read_all(
        [first.start + count * stride, *(first.start + k * stride for k in places)],
        before + contents.heads[0].header_nbytes,
    )
    stream_reader.kept |= {stream_reader.begin: stream_reader.piece}
    stream_reader.kept |= {first.start + k * stride: piece for k, piece in zip(places, pieces[1:], strict=True)}
    if pieces[0].strip(b"\0"):
        return None
    for k, piece in zip(places, pieces[1:], strict=True):
        if not _resembles_first(contents, stream_reader, piece, first.start + k * stride, before, first.head):
            return None
    sampled = dict(zip((0, 1, *places), (e.name for e in contents.entries), strict=True))
    names = names_in_order(sampled, count, stream_reader.name)
    if names is None:
        return None
    entries = tuple(
        Entry(name, first.start + k * stride, first.data + k * stride, first.head, k in sampled)
        for k, name in enumerate(names)
    )
    return Index(stream_reader.name, stream_reader.size, "tar", tuple(contents.heads), entries, tuple(contents.others))


def _resembles_first(
    contents: Contents, stream_reader: _BufferedReader, piece: bytes, start: int, header_bytes: int, head: int
) -> bool:
    """Say whether a sampled piece is the start of a member with the same header as the first member."""
    read_exactly = _reader_of(piece, start, stream_reader.name)
    try:
        file = header_at(read_exactly, start, stream_reader.size, stream_reader.name)
        entry = file and contents.add(file, read_exactly)
    except DamagedError:
        return False
    return bool(entry and entry.data - start == header_bytes and entry.head == head and len(contents.heads) == 1)
