"""Simulated CUDA cards: torch's own code for CUDA over host memory, each operation computed by a CPU's kernels.

`install()` comes before everything else in a process that build.py's environment started. Then tensors of "cuda" are
real: torch's allocator, autograd, vmap, autocast, streams and graphs treat them as on a card, and cudart.c stands where
the runtime of CUDA would.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simgpu import counts, faults, rules
from tests.simgpu.calls import Operation, map_tensors, operation_of, tensors_in
from tests.simgpu.graphs import Graphs
from tests.simgpu.kernels import Precision, compute
from tests.simgpu.memory import CPU, copy_onto, distinct_nbytes, host_view

READ_BY_INDEX = {
    "index",
    "gather",
    "index_select",
    "embedding",
}  # They read as much of the first operand as they write.
ONLY_WRITTEN = {
    "copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_", "bernoulli_",
}  # fmt: skip
HOST_RESULTS = {"_local_scalar_dense", "equal", "is_nonzero"}


GRAPHS = Graphs(lambda *call: compute_on_card(*call))


class SimulatedCards(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operations whose tensors, or whose result, lie on a simulated card."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would guard each operation from its compiler, which is off (build.py).

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        if target is not None:
            target = torch.device(target)
        tensors = tensors_in((*args, *kwargs.values()))
        on_card = next((t for t in tensors if t.is_cuda), None)
        if on_card is None and (target is None or target.type != "cuda"):
            rules.check_generator(func, kwargs.get("generator"), "cpu")
            return func(*args, **kwargs)
        operation = operation_of(func)
        if operation.is_composite:  # In inference mode composite operations arrive whole.
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if operation.is_view:
            return func(*args, **kwargs)
        if operation.is_native:
            result = func(*args, **kwargs)
            if "empty" in operation.name:
                _poison(result)
            if (capture := GRAPHS.current_capture()) is not None:
                _note_allocation(capture, tensors, result)
            return result
        rules.check_devices(func, args, tensors)
        _check_waits(func, args, kwargs)
        faults.raise_injected(operation.name, args)
        place = target if target is not None else on_card.device if on_card is not None else CPU
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        return _execute(func, operation, args, kwargs, place, tensors)


def _note_allocation(capture: Any, tensors: Sequence[Tensor], result: Any) -> None:
    known = {t.untyped_storage().data_ptr() for t in tensors}
    if isinstance(result, Tensor) and result.is_cuda and result.untyped_storage().data_ptr() not in known:
        capture.note_memory(result)


def _poison(tensor: Tensor) -> None:
    """Fill new memory with bytes that are NaN, or -1: values that were never written, or of a freed tensor, show."""
    if tensor.is_cuda and (nbytes := tensor.untyped_storage().nbytes()):
        ctypes.memset(tensor.untyped_storage().data_ptr(), 0xFF, nbytes)


def _check_waits(func: OpOverload[..., Any], args: Any, kwargs: Any) -> None:
    """Count an operation that waits, or refuse it.

    Raises:
        NotCapturable, Waited: the host may not wait now.
    """
    if not rules.waits(func, args, kwargs):
        return
    place = rules.place_in_code()
    if runtime().sim_forbidden() or GRAPHS.current_capture() is not None:
        raise rules.NotCapturable(f"{place}: {func} waits for the card while a graph is captured")
    for active in counts.ACTIVE:
        active.waits[func.overloadpacket.__name__, place] += 1
    if torch.cuda.get_sync_debug_mode() == 2:
        raise rules.Waited(f"{place}: {func}: called a synchronizing CUDA operation")


def _execute(
    func: OpOverload[..., Any],
    operation: Operation,
    args: Any,
    kwargs: Any,
    place: torch.device,
    tensors: list[Tensor],
) -> Any:
    """Compute an operation on the host's views of its operands; return its results, on the card or on the host."""
    changed = operation.changed(args, kwargs) if operation.changes else []
    written = [t for t in tensors_in(changed) if t.is_cuda]
    capture = GRAPHS.current_capture()
    if capture is not None and place.type == "cuda" and place.index != capture.device:
        capture = None  # The other card's stream is not captured.
    if capture is not None:
        capture.save(written)
    if operation.draws:
        rules.check_generator(func, kwargs.get("generator"), "cuda")
    host_call = map_tensors(_on_host, args), map_tensors(_on_host, _without_device(kwargs)) if kwargs else kwargs
    if capture is not None and operation.draws:
        result = _draw(func, *host_call, seed=0)  # Torch refuses to look at a generator's state in a capture.
    else:
        result = compute_on_card(func, *host_call, place.index or 0)
    found = list(result) if isinstance(result, (tuple, list)) else [result]
    to_card = place.type == "cuda" and operation.name not in HOST_RESULTS
    made = _results(operation, changed, found, place if to_card else None)
    if capture is not None or counts.ACTIVE:
        fresh = [None if is_changed else t for t, is_changed in made]
        new = [t for t in fresh if isinstance(t, Tensor)]
        numbers = _count(operation.name, args, kwargs, tensors, written, new)
        if capture is None:
            _add_launch(operation.name, numbers, tensors, new, place)
        else:
            on_card = [t if isinstance(t, Tensor) and t.is_cuda else None for t in fresh]
            capture.record(func, args, _without_device(kwargs), on_card, numbers)
    if not operation.returns_changed:
        return None
    values = [t for t, _ in made]
    return type(result)(values) if isinstance(result, (tuple, list)) else values[0]


def _results(
    operation: Operation, changed: list[Any], found: list[Any], place: torch.device | None
) -> list[tuple[Any, bool]]:
    """Return an operation's results, each with whether it is an argument that was written; new ones go to the place."""
    if not operation.returns_changed:
        return []
    if operation.returns_changed == (True,):
        return [(t, True) for t in (changed[0] if isinstance(changed[0], (list, tuple)) else changed)]
    is_one_each = len(operation.returns_changed) == len(found)  # otherwise the only result is a list of new tensors
    flags = operation.returns_changed if is_one_each else (False,) * len(found)
    left, results = iter(changed), list[tuple[Any, bool]]()
    for value, is_changed in zip(found, flags, strict=True):
        if is_changed:
            results.append((next(left), True))
        else:
            new = copy_onto(value, place) if place is not None and isinstance(value, Tensor) else value
            results.append((new, False))
    return results


def _on_host(tensor: Tensor) -> Tensor:
    return host_view(tensor) if tensor.is_cuda else tensor


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call on the host: what says "cuda" says "cpu"."""
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = CPU
    return kwargs


def compute_on_card(
    func: OpOverload[..., Any], args: Any, kwargs: Any, device: int, precision: Precision | None = None
) -> Any:
    """Compute an operation on the host's views, drawing numbers from the generator of a card; return its result."""
    if not operation_of(func).draws:
        return compute(func, args, kwargs, precision)
    generator = kwargs.get("generator") or torch.cuda.default_generators[device]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return _draw(func, args, kwargs, (generator.initial_seed() * 1_000_003 + offset) % 2**63)


def _draw(func: OpOverload[..., Any], args: Any, kwargs: Any, seed: int) -> Any:
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        return compute(func, args, {**kwargs, "generator": None} if "generator" in kwargs else kwargs)
    finally:
        torch.default_generator.set_state(state)


def _count(
    name: str,
    args: Any,
    kwargs: Any,
    tensors: Sequence[Tensor],
    written: Sequence[Tensor],
    made: Sequence[Tensor],
) -> tuple[int, int, int]:
    """Return the launches of an operation, and the bytes that it reads and writes on a card."""
    made_bytes = sum(distinct_nbytes(t) for t in made if t.is_cuda)
    write = made_bytes + sum(distinct_nbytes(t) for t in written)
    results = [*written, *made]
    if results and not any(t.numel() for t in results):
        return 0, 0, 0
    only_written = {id(t) for t in written} if name in ONLY_WRITTEN or "out" in kwargs else set()
    operands = [t for t in tensors if t.is_cuda and id(t) not in only_written]
    read = sum(distinct_nbytes(t) for t in operands)
    if name in READ_BY_INDEX:
        read += min(0, made_bytes - distinct_nbytes(args[0]))
    if name == "convolution" and args[2] is not None:
        return 2, read + made_bytes, write + made_bytes
    return 1, read, write


def _add_launch(
    name: str, numbers: tuple[int, int, int], tensors: Sequence[Tensor], made: Sequence[Any], place: torch.device
) -> None:
    launches, read, written = numbers
    on_host = [t for t in [*tensors, *made] if isinstance(t, Tensor) and t.device.type == "cpu" and t.dim()]
    crossing = distinct_nbytes(on_host[0]) if name in ("copy_", "_to_copy") and on_host else 0
    to_card = bool(crossing) and place.type == "cuda" and any(on_host[0] is t for t in tensors[-1:])
    for active in counts.ACTIVE:
        if launches:
            active.launches += launches
            active.operations[name] += launches
        active.read += read
        active.written += written
        if to_card:
            active.to_card += crossing
        else:
            active.from_card += crossing


@cache
def runtime() -> ctypes.CDLL:
    """Load the simulated runtime, which the process was started with."""
    return ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])


def kernel_count() -> int:
    """Return how many kernels torch has launched itself: it must be none."""
    return ctypes.c_ulonglong.in_dll(runtime(), "sim_kernels").value


def synchronisation_count() -> int:
    """Return how often a call has waited for a stream, an event or a card."""
    return ctypes.c_ulonglong.in_dll(runtime(), "sim_synchronisations").value


def install() -> None:
    """Run all operations on cards by the simulation from now on, in all threads of the process."""
    any_torch: Any = torch
    any_torch.cuda.init()
    # oneDNN's backward convolutions of few channels in channels_last corrupt the heap here; torch's own are as fast.
    any_torch.backends.mkldnn.enabled = False
    hook_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_ulonglong)
    hooks = [hook_type(GRAPHS.on_event)]  # They live until the end: C holds their address.
    runtime().sim_set_hook(hooks[0])

    def forget_hook() -> None:
        runtime().sim_set_hook(hook_type())
        hooks.clear()

    atexit.register(forget_hook)
    mode: Any = SimulatedCards
    thread_type: Any = threading.Thread
    run_thread = thread_type.run

    def run_simulated(thread: threading.Thread) -> None:
        with mode():
            run_thread(thread)

    text_of = any_torch._tensor_str._str

    def text_of_copy(tensor: Tensor, **options: Any) -> Any:  # torch prints without any dispatch mode
        if not tensor.is_cuda:
            return text_of(tensor, **options)
        return f"{text_of(tensor.cpu(), **options)[:-1]}, device='{tensor.device}')"

    thread_type.run = run_simulated
    any_torch._tensor_str._str = text_of_copy
    mode().__enter__()
