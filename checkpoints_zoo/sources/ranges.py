"""Files on a network whose byte ranges are read: where a connection breaks, the reading continues."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints_zoo.errors import NetworkError
from checkpoints_zoo.sources import hub_errors

LARGEST_TRY_COUNT = 5  # Largest number of tries in a row that bring no byte.

Sink = Callable[[int, bytes], object]


@dataclass
class Cursor:
    """What is left to read of a range.

    Args:
        position, end: offsets of the next byte and of the byte after the last one.
        sink: function that is called with (offset in the file, bytes), in order and once for every byte.
    """

    position: int
    end: int
    sink: Sink

    def pass_on(self, piece: bytes) -> None:
        """Give the sink the next bytes."""
        self.sink(self.position, piece)
        self.position += len(piece)


class RangedFile(ABC):
    """A file on a network whose byte ranges can be read.

    Attributes:
        size: size in bytes.
        error_subject: noun for the file in errors.
    """

    size: int
    error_subject: str

    @property
    @abstractmethod
    def error_path(self) -> str:
        """The path or address of the file, which errors have as an attribute."""

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Read a range of the file into memory; return its bytes, fewer at the end of the file.

        Raises:
            ZooError: for the same reasons as in `read`.
        """
        received_bytes = bytearray()
        self.read(offset, min(offset + length, self.size), lambda _, piece: received_bytes.extend(piece))
        return bytes(received_bytes)

    def read(self, start: int, end: int, sink: Sink) -> None:
        """Read a range of the file and pass the bytes on as they arrive; if the connection breaks, the reading
        continues where it stopped.

        Args:
            start, end: offsets of the first byte of the range and of the byte after the last one.
            sink: function that is called with (offset in the file, bytes), in order and once for every byte.

        Raises:
            NetworkError: the connection broke too often, or the server does not support ranges.
            SourceNotFound, AccessError: the file is gone, or may not be read.
            DamagedError: the file has changed, or the answer is not the requested range.
        """
        cursor, failure_count = Cursor(start, end, sink), 0
        while cursor.position < end:
            start_position = cursor.position
            reason = self._read_on(cursor)
            if cursor.position >= end:
                return
            failure_count = 1 if cursor.position > start_position else failure_count + 1
            if failure_count > LARGEST_TRY_COUNT:
                raise NetworkError(
                    f"bytes {cursor.position:,} to {end:,} of {self.error_subject}", expected="all of them",
                    found=f"{reason}, {failure_count} times", do=hub_errors.TRY_AGAIN_ADVICE, path=self.error_path,
                )  # fmt: skip
            time.sleep(min(2 ** (failure_count - 1), 8))

    @abstractmethod
    def _read_on(self, cursor: Cursor) -> str:
        """Make one request for the bytes that are left, and pass on the bytes that arrive; return why bytes are
        missing, if they are."""
