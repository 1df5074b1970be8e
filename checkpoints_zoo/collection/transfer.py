"""Copy members' bytes to a device: reading, sending and converting overlap.

Threads read pieces of the files into pinned memory. One stream sends the stored bytes (float16 crosses the bus at half
of float32's cost), another stream casts them into the stacked tensors. On the CPU the same steps run one by one.

Axes of stacked tensors are (member, …), where … stands for the axes of one member's tensor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.formats.layout import TensorSpec
from checkpoints_zoo.formats.shard_files import Location, group_adjacent, read_into
from checkpoints_zoo.networks.modules import TORCH_DTYPES

GROUP_BYTES = 2**26  # Number of bytes of neighbouring members that are converted together.
PIECE_BYTES = 2**23  # Number of bytes of one read.
# Number of reading threads; one thread copies from the page cache at a fifth of the speed of a fast bus.
READER_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Piece:
    """A piece of the bytes of a group of neighbouring members.

    Args:
        group: the members.
        first: position of the group's first member among all members.
        start, stop: range of the piece's bytes within the group.
        size: number of bytes of the whole group.
    """

    group: Sequence[Location]
    first: int
    start: int
    stop: int
    size: int


class _Stream:
    """A CUDA stream, or a stand-in for devices without streams, where every call is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def as_current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record_event(self) -> Any:
        """Return an event that occurs when all work queued so far is done."""
        return None if self.stream is None else self.stream.record_event()

    def wait_for(self, event: Any) -> None:
        if event is not None:
            self.stream.wait_event(event)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()


# Each device keeps one pair of streams, because memory that was freed on a stream is reused only on this stream.
_streams: dict[torch.device, tuple[_Stream, _Stream]] = {}


def _device_streams(device: torch.device) -> tuple[_Stream, _Stream]:
    if device not in _streams:
        _streams[device] = _Stream(device), _Stream(device)
    return _streams[device]


def allocation_stream(device: torch.device) -> AbstractContextManager[Any]:
    """While the `with` block runs, allocate tensors on the stream that `copy_to_device` writes on, so that it need not
    wait for other streams."""
    return _device_streams(device)[1].as_current()


def copy_to_device(locations: Sequence[Location], specs: Sequence[TensorSpec], stacked: Mapping[str, Tensor]) -> bool:
    """Read members and convert them into stacked tensors on a device; return whether all values are finite.

    Args:
        locations: locations of the members' bytes.
        specs: descriptions of the tensors to copy; their offsets are taken from each member's own layout.
        stacked: tensors to copy into, name -> (member, …), allocated inside `allocation_stream`.

    Raises:
        DamagedError: a file is shorter than the locations need.
    """
    device = next(iter(stacked.values())).device
    send_stream, convert_stream = _device_streams(device)
    pieces = list(_split_into_pieces(locations))
    if not pieces:
        return True
    size = max(p.stop - p.start for p in pieces)
    pinned_buffers = [
        torch.empty(size, dtype=torch.uint8, pin_memory=send_stream.stream is not None)
        for _ in pieces[: 2 * READER_THREADS]
    ]
    free_buffers: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in pinned_buffers)
    pending_reads: deque[tuple[_Piece, Tensor, Future[Any]]] = deque()
    waiting_pieces, finite_flags = deque(pieces), []
    # Bytes of the last groups on the device, each with the event of its conversion.
    staged_groups: deque[tuple[Tensor, Any]] = deque()
    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zoo-send") as readers:
        try:
            while waiting_pieces or pending_reads:
                while waiting_pieces and free_buffers:
                    piece, (buffer, sent_event) = waiting_pieces.popleft(), free_buffers.popleft()
                    pending_reads.append((piece, buffer, readers.submit(_read_piece, piece, buffer, sent_event)))
                piece, buffer, done = pending_reads.popleft()
                done.result()
                if piece.start == 0:
                    raw = _staging_memory(staged_groups, piece.size, device, send_stream)
                with send_stream.as_current():
                    raw[piece.start : piece.stop].copy_(buffer[: piece.stop - piece.start], non_blocking=True)
                    sent_event = send_stream.record_event()
                free_buffers.append((buffer, sent_event))
                if piece.stop == piece.size:
                    convert_stream.wait_for(sent_event)
                    with convert_stream.as_current():
                        finite_flags += _convert_group(piece, raw, specs, stacked)
                        staged_groups.append((raw, convert_stream.record_event()))
            with convert_stream.as_current():
                return bool(torch.stack(finite_flags).all()) if finite_flags else True
        finally:
            for _, _, future in pending_reads:
                future.cancel()
            send_stream.synchronize()
            convert_stream.synchronize()
            if convert_stream.stream is not None:
                for tensor in stacked.values():
                    tensor.record_stream(torch.cuda.current_stream(device))


def _split_into_pieces(locations: Sequence[Location]) -> Iterator[_Piece]:
    first = 0
    for group in group_adjacent(locations, GROUP_BYTES):
        size = group[0].layout.nbytes * len(group)
        for start in range(0, size, PIECE_BYTES):
            yield _Piece(group, first, start, min(start + PIECE_BYTES, size), size)
        first += len(group)


def _read_piece(piece: _Piece, buffer: Tensor, sent_event: Any) -> None:
    """Read a piece into a buffer, after the buffer's previous piece has been sent."""
    if sent_event is not None:
        sent_event.synchronize()
    view: Any = buffer[: piece.stop - piece.start].numpy()
    read_into(piece.group[0], piece.group[0].offset + piece.start, memoryview(view))


def _staging_memory(
    staged_groups: deque[tuple[Tensor, Any]], nbytes: int, device: torch.device, send_stream: _Stream
) -> Tensor:
    """Return memory for a group's bytes: reuse the memory of the group before the last one if it is large enough."""
    while len(staged_groups) >= 2:
        raw, converted_event = staged_groups.popleft()
        if raw.numel() >= nbytes:
            send_stream.wait_for(converted_event)
            return raw
        if converted_event is not None:
            converted_event.synchronize()
    with send_stream.as_current():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _convert_group(piece: _Piece, raw: Tensor, specs: Sequence[TensorSpec], out: Mapping[str, Tensor]) -> list[Tensor]:
    """Convert a group's bytes into its rows of the stacked tensors; return for each tensor whether its values are
    finite."""
    layout, count, finite_flags = piece.group[0].layout, len(piece.group), []
    stored = {source.name: source for source in layout.tensors}
    for spec in specs:
        source = stored[spec.name]
        if not source.nbytes:
            continue
        rows = out[source.name][piece.first : piece.first + count]
        rows.copy_(strided_view(raw, source, count, layout.nbytes))
        if rows.is_floating_point():
            # If a value is NaN, so are the minimum and the maximum.
            finite_flags.append(torch.isfinite(torch.stack(torch.aminmax(rows))).all())
    return finite_flags


def strided_view(raw: Tensor, spec: TensorSpec, member_count: int, distance: int) -> Tensor:
    """Return a view of one tensor of members that are evenly spaced in memory, (member, …).

    Args:
        raw: bytes of the members, from the first byte of the first member on.
        spec: the tensor.
        member_count: number of members.
        distance: number of bytes from one member to the next.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    size = dtype.itemsize
    if spec.offset % size or distance % size:  # In archives, tensors may begin at any byte.
        rows = [raw[spec.offset + i * distance :][: spec.nbytes].clone().view(dtype) for i in range(member_count)]
        return torch.stack(rows).view(member_count, *spec.shape)
    strides = (distance // size, *torch.empty(spec.shape, device="meta").stride())
    storage: Any = raw.untyped_storage()
    return torch.empty(0, dtype=dtype, device=raw.device).set_(
        storage, spec.offset // size, (member_count, *spec.shape), strides
    )
