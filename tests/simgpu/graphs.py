"""CUDA graphs of the simulated cards: the operations that a capture holds, and their replay on the same memory.

torch's own CUDAGraph does the rest: its private pool of memory, its generators, its checks. A graph does not keep what
it reads: tensors from before the capture are known by their address alone, and a replay that meets a freed one fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tests.simgpu import counts
from tests.simgpu.calls import map_tensors, tensors_in
from tests.simgpu.kernels import Precision
from tests.simgpu.memory import host_view
from tests.simgpu.rules import place_in_code

# (operation, arguments on the host, the same by name, index of the card, flags of TF32) -> result
Compute = Callable[[OpOverload[..., Any], Any, Any, int, Precision], Any]


WEAK_REFERENCE: Any = StorageWeakRef  # of memory: it says whether the memory has been freed


@dataclass
class CapturedCall:
    """One captured operation.

    Args:
        func, args, kwargs: the call, its tensors as views of the host.
        results: views of the results' memory, in the order of the call's results; None for those that are operands.
        reads: what the call reads or writes that is older than the capture.
        launches, read, written: the operation's counts.
        place: the line of code that made the call.
        precision: the flags of TF32.
    """

    func: OpOverload[..., Any]
    args: Any
    kwargs: Any
    results: list[Tensor | None]
    reads: list[Any]
    launches: int
    read: int
    written: int
    place: str
    precision: Precision


@dataclass
class Capture:
    """A capture that is under way, or a finished one, which can be replayed.

    Args:
        device: index of the card.
        stream: address of the stream that is captured.
    """

    device: int
    stream: int
    calls: list[CapturedCall] = field(default_factory=list)
    allocated: set[int] = field(default_factory=set)  # Addresses of memory that the capture itself allocated.
    outside: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # address -> (bytes, bytes before it)

    def is_current(self) -> bool:
        """Say whether the calling thread's current stream is the captured one."""
        return torch.cuda.current_stream(self.device).cuda_stream == self.stream

    def note_memory(self, result: Any) -> None:
        """Note the memory that the capture allocated for a result."""
        self.allocated.update(t.untyped_storage().data_ptr() for t in tensors_in([result]) if t.is_cuda)

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Save the bytes of older tensors that the capture is about to write: a capture writes nothing."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes() and address not in self.allocated and address not in self.outside:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                view = host_view(whole)
                self.outside[address] = view, view.clone()

    def record(
        self,
        func: OpOverload[..., Any],
        args: Any,
        kwargs: Any,
        results: list[Tensor | None],
        numbers: tuple[int, int, int],
    ) -> None:
        """Add an operation: its arguments, the results that it made, and its launches, bytes read and written."""
        tensors = tensors_in((*args, *kwargs.values()))
        reads = [
            WEAK_REFERENCE(t.untyped_storage())
            for t in tensors
            if t.untyped_storage().nbytes()
            and (t.is_cuda or t.is_pinned())
            and t.untyped_storage().data_ptr() not in self.allocated
        ]
        held_args, held_kwargs = map_tensors(_held, args), map_tensors(_held, kwargs)
        self.note_memory([t for t in results if t is not None])
        views = [None if t is None else host_view(t) for t in results]
        self.calls.append(
            CapturedCall(func, held_args, held_kwargs, views, reads, *numbers, place_in_code(), Precision.now())
        )

    def finish(self) -> None:
        """Undo what the capture computed: results are NaN until the first replay, older tensors are as before."""
        for call in self.calls:
            for view in call.results:
                if view is not None and view.is_floating_point():
                    view.fill_(float("nan"))
        for view, before in self.outside.values():
            view.copy_(before)
        self.outside.clear()
        names: Counter[str] = Counter()
        for call in self.calls:
            names[call.func.overloadpacket.__name__] += call.launches
        for active in counts.ACTIVE:
            active.captures.append(names)

    def replay(self, compute: Compute) -> None:
        """Run the captured operations again, on the memory that they had.

        Raises:
            FreedMemory: some of it has been freed.
        """
        for active in counts.ACTIVE:
            active.replays += 1
        for call in self.calls:
            if any(read.expired() for read in call.reads):
                raise FreedMemory(f"{call.place}: {call.func}: a graph reads memory that was freed")
            found = compute(call.func, call.args, call.kwargs, self.device, call.precision)
            results = found if isinstance(found, (tuple, list)) else (found,)
            if call.results:
                for view, result in zip(call.results, results, strict=True):
                    if view is not None and view.numel():
                        view.copy_(result)
            for active in counts.ACTIVE:
                active.replayed_launches += call.launches
                active.read += call.read
                active.written += call.written


class FreedMemory(RuntimeError):
    """A graph reads memory that was freed since its capture."""


class Graphs:
    """All captured graphs of the process; `on_event` is what the runtime calls.

    Args:
        compute: runs an operation on views of the host.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.capture: Capture | None = None  # the one that is under way
        self.finished: dict[int, Capture] = {}
        self.failures: list[str] = []  # why replays failed

    def current_capture(self) -> Capture | None:
        """Return the capture of the calling thread's current stream."""
        capture = self.capture
        return capture if capture is not None and capture.is_current() else None

    def on_event(self, event: int, graph: int) -> int:
        """Begin (0) or end (1) a capture, replay (2) or destroy (3) a graph, as cudart.c says."""
        try:
            with _disable_current_modes(), torch.inference_mode():
                if event == 0:
                    device = torch.cuda.current_device()
                    self.capture = Capture(device, torch.cuda.current_stream(device).cuda_stream)
                elif event == 1 and self.capture is not None:
                    capture, self.capture = self.capture, None
                    capture.finish()
                    self.finished[graph] = capture
                    return len(capture.calls)
                elif event == 2:
                    self.finished[graph].replay(self.compute)
                elif event == 3:
                    self.finished.pop(graph, None)
        except Exception as error:  # noqa: BLE001 (C calls this: the runtime answers with an error of its own)
            self.failures.append(str(error))
            print(f"simulated card: {error}", file=sys.stderr)
            return 1
        return 0


def _held(tensor: Tensor) -> Tensor:
    """Return what a graph keeps of an argument: the address of a card's or a pinned tensor, the value of another."""
    return host_view(tensor) if tensor.is_cuda or tensor.is_pinned() else tensor.clone()
