"""Copy members' bytes to a device: reading, sending and converting overlap.

Threads read pieces of the files into pinned memory. One stream sends the stored bytes (float16 crosses the bus at half
of float32's cost), another stream casts them into the stacked tensors. On the CPU the same steps run one by one.

Axes of stacked tensors are (member, …), where … stands for the axes of one member's tensor.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.formats.layout import TensorSpec
from checkpoints_zoo.formats.shard_files import Location, group_adjacent, read_into
from checkpoints_zoo.networks.modules import TORCH_DTYPES

GROUP_BYTES = 2**28  # Number of bytes of neighbouring members that are converted together.
PIECE_BYTES = 2**23  # Number of bytes of one read.
# Number of reading threads; one thread copies from the page cache at a fifth of the speed of a fast bus.
READER_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class _Piece:
    """A piece of the bytes of a group of neighbouring members.

    Args:
        group: the members.
        first_position: position of the group's first member among all members.
        start, stop: range of the piece's bytes within the group.
        group_nbytes: number of bytes of the whole group.
    """

    group: Sequence[Location]
    first_position: int
    start: int
    stop: int
    group_nbytes: int


class _Stream:
    """A CUDA stream, or a stand-in for devices without streams, where every call is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        # torch hands out 32 streams a priority, again and again. Those of the usual priority serve to capture graphs,
        # and a copy on a stream that is captured would fail.
        has_streams = device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(device, priority=-1) if has_streams else None  # type: ignore[no-untyped-call]

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
_streams_of_device: dict[torch.device, tuple[_Stream, _Stream]] = {}


def _send_and_convert_streams(device: torch.device) -> tuple[_Stream, _Stream]:
    if device not in _streams_of_device:
        _streams_of_device[device] = _Stream(device), _Stream(device)
    return _streams_of_device[device]


def allocation_stream(device: torch.device) -> AbstractContextManager[Any]:
    """While the `with` block runs, allocate tensors on the stream that `copy_to_device` writes on, so that it need not
    wait for other streams."""
    return _send_and_convert_streams(device)[1].as_current()


def copy_to_device(locations: Sequence[Location], specs: Sequence[TensorSpec], stacked: Mapping[str, Tensor]) -> bool:
    """Read members and convert them into stacked tensors on a device; return whether all values are known to be finite.

    Args:
        locations: locations of the members' bytes.
        specs: descriptions of the tensors to copy; their offsets are taken from each member's own layout.
        stacked: tensors to copy into, name -> (member, …), allocated inside `allocation_stream`.

    Raises:
        DamagedError: a file is shorter than the locations need.
    """
    device = next(iter(stacked.values())).device
    send_stream, convert_stream = _send_and_convert_streams(device)
    pieces = list(_split_into_pieces(locations))
    if not pieces:
        return True
    largest_piece_nbytes = max(p.stop - p.start for p in pieces)
    pinned_buffers = [
        torch.empty(largest_piece_nbytes, dtype=torch.uint8, pin_memory=send_stream.stream is not None)
        for _ in pieces[: 2 * READER_THREADS]
    ]
    free_buffers: deque[tuple[Tensor, Any]] = deque((buffer, None) for buffer in pinned_buffers)
    pending_reads: deque[tuple[_Piece, Tensor, Future[Any]]] = deque()
    waiting_pieces, are_finite = deque(pieces), []
    # Bytes of the last groups on the device, each with the event of its conversion.
    staged_groups: deque[tuple[Tensor, Any]] = deque()
    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zoo-send") as read_executor:
        try:
            while waiting_pieces or pending_reads:
                while waiting_pieces and free_buffers:
                    piece, (buffer, sent_event) = waiting_pieces.popleft(), free_buffers.popleft()
                    pending_reads.append((piece, buffer, read_executor.submit(_read_piece, piece, buffer, sent_event)))
                piece, buffer, read_future = pending_reads.popleft()
                read_future.result()
                if piece.start == 0:
                    staged_bytes = _staging_memory(staged_groups, piece.group_nbytes, device, send_stream)
                with send_stream.as_current():
                    staged_bytes[piece.start : piece.stop].copy_(buffer[: piece.stop - piece.start], non_blocking=True)
                    sent_event = send_stream.record_event()
                free_buffers.append((buffer, sent_event))
                if piece.stop == piece.group_nbytes:
                    convert_stream.wait_for(sent_event)
                    with convert_stream.as_current():
                        are_finite += _convert_group(piece, staged_bytes, specs, stacked)
                        staged_groups.append((staged_bytes, convert_stream.record_event()))
            with convert_stream.as_current():
                return bool(torch.stack(are_finite).all()) if are_finite else True
        finally:
            for _, _, future in pending_reads:
                future.cancel()
            send_stream.synchronize()
            convert_stream.synchronize()
            if convert_stream.stream is not None:
                for tensor in stacked.values():
                    tensor.record_stream(torch.cuda.current_stream(device))


def _split_into_pieces(locations: Sequence[Location]) -> Iterator[_Piece]:
    first_position = 0
    for group in group_adjacent(locations, GROUP_BYTES):
        group_nbytes = group[0].layout.nbytes * len(group)
        for piece_start in range(0, group_nbytes, PIECE_BYTES):
            yield _Piece(group, first_position, piece_start, min(piece_start + PIECE_BYTES, group_nbytes), group_nbytes)
        first_position += len(group)


def _read_piece(piece: _Piece, buffer: Tensor, sent_event: Any) -> None:
    """Read a piece into a buffer, after the buffer's previous piece has been sent."""
    if sent_event is not None:
        sent_event.synchronize()
    buffer_view: Any = buffer[: piece.stop - piece.start].numpy()
    read_into(piece.group[0], piece.group[0].offset + piece.start, memoryview(buffer_view))


def _staging_memory(
    staged_groups: deque[tuple[Tensor, Any]], nbytes: int, device: torch.device, send_stream: _Stream
) -> Tensor:
    """Return memory for a group's bytes: reuse the memory of the group before the last one if it is large enough."""
    while len(staged_groups) >= 2:
        staged_bytes, converted_event = staged_groups.popleft()
        if staged_bytes.numel() >= nbytes:
            send_stream.wait_for(converted_event)
            return staged_bytes
        if converted_event is not None:
            converted_event.synchronize()
    with send_stream.as_current():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _convert_group(
    piece: _Piece, staged_bytes: Tensor, specs: Sequence[TensorSpec], stacked: Mapping[str, Tensor]
) -> list[Tensor]:
    """Convert a group's bytes into its rows of the stacked tensors; return for each run of values whether they are
    finite and no larger than the stacked dtypes hold."""
    layout, member_count = piece.group[0].layout, len(piece.group)
    stored_specs = [s for s in layout.tensors if s.nbytes and s.name in stacked]
    rows = slice(piece.first_position, piece.first_position + member_count)
    for spec in stored_specs:
        stacked[spec.name][rows].copy_(strided_view(staged_bytes, spec, member_count, layout.nbytes))
    # A value that the narrowest of the stacked dtypes can't hold may have become infinite.
    largest = min((torch.finfo(t.dtype).max for t in stacked.values() if t.is_floating_point()), default=0.0)
    are_finite = []
    for run in join_adjacent(sorted(stored_specs, key=lambda spec: spec.offset)):
        if TORCH_DTYPES[run.dtype].is_floating_point:
            # If a value is NaN, so are the minimum and the maximum.
            extremes = torch.stack(torch.aminmax(strided_view(staged_bytes, run, member_count, layout.nbytes)))
            are_finite.append((extremes.double().abs() <= largest).all())
    return are_finite


def join_adjacent(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Join tensors of one dtype that follow each other, in the list and in the member's bytes; return the specs of the
    joined tensors, which have one axis. Tensors without elements are left out."""
    joined_specs: list[TensorSpec] = []
    for spec in specs:
        if spec.nbytes:
            start, length = spec.offset, math.prod(spec.shape)
            last = joined_specs[-1] if joined_specs else None
            if last is not None and last.dtype == spec.dtype and last.offset + last.nbytes == spec.offset:
                start, length = last.offset, last.shape[0] + length
                joined_specs.pop()
            joined_specs.append(TensorSpec("", spec.dtype, (length,), start))
    return joined_specs


def strided_view(raw_bytes: Tensor, spec: TensorSpec, member_count: int, distance: int) -> Tensor:
    """Return a view of one tensor of members that are evenly spaced in memory, (member, …).

    Args:
        raw_bytes: bytes of the members, from the first byte of the first member on.
        spec: the tensor.
        member_count: number of members.
        distance: number of bytes from one member to the next.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    element_nbytes = dtype.itemsize
    if spec.offset % element_nbytes or distance % element_nbytes:  # In archives, tensors may begin at any byte.
        member_tensors = [
            raw_bytes[spec.offset + i * distance :][: spec.nbytes].clone().view(dtype) for i in range(member_count)
        ]
        return torch.stack(member_tensors).view(member_count, *spec.shape)
    strides = (distance // element_nbytes, *torch.empty(spec.shape, device="meta").stride())
    storage: Any = raw_bytes.untyped_storage()
    return torch.empty(0, dtype=dtype, device=raw_bytes.device).set_(
        storage, spec.offset // element_nbytes, (member_count, *spec.shape), strides
    )
