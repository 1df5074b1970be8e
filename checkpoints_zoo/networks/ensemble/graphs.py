"""CUDA graphs: run members one after another by replaying one captured forward pass.

The members are prepared all at once (batch norms folded, kernels in the GPU's memory format) and lie in one buffer, a
row a member. The graph reads one row, so that a member costs a copy of its row and a replay.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.networks.ensemble.program import FoldableNorm, Program, foldable_by_member

_MOST_CACHED_GRAPHS = 4  # Largest number of cached graphs; each holds memory for a member's activations.
_WARM_UP_RUNS = 3  # Number of runs before a CUDA graph is captured; libraries choose their kernels in them.
_ALIGNMENT = 256  # Every tensor in a row begins at a multiple of so many bytes, as in memory that torch allocates.
_PACK_NBYTES = 2**30  # Number of bytes of weights that are prepared together.
# Largest difference between logits of fused and of single kernels, as a share of the largest logit; 0.1 for half
# precision. TF32 rounds operands to 10 bits; a wrong kernel differs by more.
_FUSED_TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-9}
Weights = list[Tensor | None]
Forward = Callable[[Weights, Tensor], Tensor]  # (a member's prepared tensors, inputs) -> logits (batch, …).


@dataclass(frozen=True)
class TensorPlace:
    """Where a row of bytes holds one tensor of a member.

    Args:
        offset: the tensor's first byte.
        dtype, shape, strides: of the tensor, as the kernels read it.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, rows: Tensor) -> Tensor:
        """Return the tensor of all rows, (row, …), for rows (row, byte)."""
        typed_rows = rows.view(self.dtype)
        start = typed_rows.storage_offset() + self.offset // self.dtype.itemsize
        return typed_rows.as_strided((len(rows), *self.shape), (typed_rows.stride(0), *self.strides), start)


@dataclass(frozen=True)
class PackedMembers:
    """Prepared members, a row a member.

    Args:
        positions: positions of the members in the ensemble.
        rows: (member, byte).
        places: for each parameter of the program, where a row holds it; None for a parameter that is folded away.
        folded_norms: the batch norms that are folded into the convolutions of these members.
        channels_last: whether kernels have the memory format channels_last.
    """

    positions: list[int]
    rows: Tensor
    places: tuple[TensorPlace | None, ...]
    folded_norms: tuple[FoldableNorm, ...]
    channels_last: bool


def pack_members(
    program: Program | None, stacked: Mapping[str, Tensor], first_position: int, channels_last: bool
) -> Iterator[PackedMembers]:
    """Prepare members for a program; yield them packed, members with the same folded norms together.

    Which norms are folded depends on a member's own statistics only, so a member's logits depend on no other member.

    Args:
        program: program that runs the members; None to pack the tensors as they are.
        stacked: the members' tensors, name -> (member, …).
        first_position: position of the first member in the ensemble.
        channels_last: whether kernels get the memory format channels_last.
    """
    norms = () if program is None else program.norms
    member_count = len(next(iter(stacked.values())))
    flags_by_member = list(zip(*foldable_by_member(norms, stacked), strict=True)) or [()] * member_count
    for flags in dict.fromkeys(flags_by_member):
        folded_norms = tuple(norm for norm, is_foldable in zip(norms, flags, strict=True) if is_foldable)
        positions = [i for i, flags_of_member in enumerate(flags_by_member) if flags_of_member == flags]
        selected = stacked if len(positions) == member_count else {n: t[positions] for n, t in stacked.items()}
        places, rows = _fill_rows(program, selected, folded_norms, channels_last)
        yield PackedMembers([first_position + i for i in positions], rows, places, folded_norms, channels_last)


def _fill_rows(
    program: Program | None,
    stacked: Mapping[str, Tensor],
    folded_norms: Sequence[FoldableNorm],
    channels_last: bool,
) -> tuple[tuple[TensorPlace | None, ...], Tensor]:
    """Prepare members whose norms are folded alike; return the places of a row's tensors, and the rows."""

    def prepare(members: slice, channels_last: bool) -> Weights:
        tensors = {n: t[members] for n, t in stacked.items()}
        return list(tensors.values()) if program is None else program.prepare(tensors, folded_norms, channels_last)

    first_member = prepare(slice(1), channels_last)
    if program is None:  # A module reads its tensors without an axis of members.
        first_member = [None if t is None else t[0] for t in first_member]
    places, row_nbytes = _lay_out(first_member)
    first_tensor = next(iter(stacked.values()))
    rows = torch.empty(len(first_tensor), row_nbytes, dtype=torch.uint8, device=first_tensor.device)
    members_at_once = max(1, _PACK_NBYTES // row_nbytes)
    for start in range(0, len(rows), members_at_once):
        members = slice(start, min(start + members_at_once, len(rows)))
        for place, tensor in zip(places, prepare(members, channels_last=False), strict=True):
            if place is not None and tensor is not None:
                target = place.view(rows[members])
                target.copy_(tensor.reshape(target.shape))  # The member's axis comes first in memory.
    return places, rows


def _lay_out(tensors: Sequence[Tensor | None]) -> tuple[tuple[TensorPlace | None, ...], int]:
    """Place tensors one after another; return their places and the number of bytes of a row."""
    places, offset = list[TensorPlace | None](), 0
    for tensor in tensors:
        if tensor is None:
            places.append(None)
            continue
        strides = torch.empty_like(tensor, device="meta").stride()
        places.append(TensorPlace(offset, tensor.dtype, tuple(tensor.shape), strides))
        offset += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
    return tuple(places), max(offset, _ALIGNMENT)


class GraphCache:
    """A cache of CUDA graphs, one for each shape of inputs and each way in which torch computes; only the last few
    graphs are kept. Graphs do not depend on the weights, so ensembles of the same network share a cache."""

    def __init__(self) -> None:
        self.captured: OrderedDict[tuple[Any, ...], _CapturedGraph] = OrderedDict()

    def run(
        self,
        member_count: int,
        groups: Iterable[PackedMembers],
        forwards_of: Callable[[PackedMembers], Sequence[Forward]],
        inputs: Tensor,
    ) -> Tensor:
        """Run packed members on a batch of inputs, without gradients; return logits (member, batch, …).

        Args:
            member_count: the number of all members.
            groups: the members.
            forwards_of: function that returns the functions that run one of the given members, the fastest first and
                the surest last.
            inputs: (batch, …).
        """
        logits: Tensor | None = None
        # A capture belongs to the current device. What a graph reads is written again in later calls, in any mode.
        with torch.cuda.device(inputs.device), torch.inference_mode(False), torch.no_grad():
            for members in groups:
                graph = self._find_or_capture(members, forwards_of, inputs)
                graph.inputs.copy_(inputs)
                for position, row in zip(members.positions, members.rows, strict=True):
                    graph.row.copy_(row)
                    graph.graph.replay()
                    if logits is None:
                        logits = graph.logits.new_empty((member_count, *graph.logits.shape))
                    logits[position].copy_(graph.logits)
        if logits is None:
            raise ValueError("no members")
        return logits

    def _find_or_capture(
        self, members: PackedMembers, forwards_of: Callable[[PackedMembers], Sequence[Forward]], inputs: Tensor
    ) -> _CapturedGraph:
        key = (
            inputs.device,
            tuple(inputs.shape),
            inputs.dtype,
            members.places,
            members.channels_last,
            arithmetic_settings(),
        )
        if key not in self.captured:
            while len(self.captured) >= _MOST_CACHED_GRAPHS:
                self.captured.popitem(last=False)
            self.captured[key] = _capture_graph(members, forwards_of(members), inputs)
        self.captured.move_to_end(key)
        return self.captured[key]


@dataclass(frozen=True)
class _CapturedGraph:
    """A captured CUDA graph that runs one member.

    Args:
        graph: the CUDA graph, which replays the kernels.
        inputs, row: what the graph reads, the inputs and a member's row of bytes.
        logits: what the graph writes, (batch, …).
        forward: the function that was captured; it holds whatever else the graph reads.
    """

    graph: Any
    inputs: Tensor
    row: Tensor
    logits: Tensor
    forward: Forward


def arithmetic_settings() -> tuple[object, ...]:
    """Return the settings of torch that decide how it computes on a GPU; a graph is captured with them."""
    cudnn, is_autocast_on = torch.backends.cudnn, torch.is_autocast_enabled("cuda")
    autocast_dtype = torch.get_autocast_dtype("cuda") if is_autocast_on else None
    return autocast_dtype, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark, torch.get_float32_matmul_precision()


def _capture_graph(members: PackedMembers, forwards: Sequence[Forward], inputs: Tensor) -> _CapturedGraph:
    memory_format = torch.channels_last if members.channels_last and inputs.dim() == 4 else torch.contiguous_format
    graph_inputs = torch.empty_like(inputs, memory_format=memory_format)
    graph_inputs.copy_(inputs)
    row = members.rows[0].clone()
    weights = [None if place is None else place.view(row[None])[0] for place in members.places]
    # torch's own stream for captures belongs to the device of the first capture, so each capture gets another.
    side_stream = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream(inputs.device))
    with torch.cuda.stream(side_stream):
        forward = _fastest_correct(forwards, weights, graph_inputs)
        for _ in range(_WARM_UP_RUNS):
            forward(weights, graph_inputs)
    torch.cuda.current_stream(inputs.device).wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # Meanwhile other threads bring weights to the device, which the mode "global" would forbid.
    with torch.cuda.graph(graph, stream=side_stream, capture_error_mode="thread_local"):
        logits = forward(weights, graph_inputs)
    return _CapturedGraph(graph, graph_inputs, row, logits, forward)


def _fastest_correct(forwards: Sequence[Forward], weights: Weights, inputs: Tensor) -> Forward:
    """Return the first function that runs and gives the last one's logits, up to rounding."""
    *faster_forwards, surest_forward = forwards
    for forward in faster_forwards:
        try:
            logits = forward(weights, inputs)
        except RuntimeError as error:  # cuDNN has no such kernel for these sizes.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            continue
        expected_logits = surest_forward(weights, inputs)
        tolerance = _FUSED_TOLERANCES.get(logits.dtype, 0.1) * expected_logits.abs().max()
        if bool((logits - expected_logits).abs().max() <= tolerance):
            return forward
    return surest_forward
