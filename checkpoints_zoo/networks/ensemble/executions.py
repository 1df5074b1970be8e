"""Members of one stack run on a batch: one after another or side by side, by a program or through their own code.

All give the logits of a loop over modules up to rounding. `Runner` runs them; a table chooses the execution by device
and sizes; `Trials` remembers what a network can do; `Graphs` replays one member's kernels as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from checkpoints_zoo.errors import SmallerChunk, TooLargeError, UsageError
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import fits_easily, one_thread
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.ensemble.program import Norm, Program, safe_norms

# "module" is a loop through the module's own code: slower, and bit for bit what a member's module gives.
EXECUTIONS = ("loop", "grouped", "vmap", "graph", "module")
ANY = 2**62
VMAP_BATCH = {"cpu": 2**16}  # bytes, as `batch` above: beyond them it is slower than a loop
_SMALL_MEMBER = 2**18  # elements
_PIECE, _LEAST_PIECE = 2**21, 16  # bytes of a piece's widest activation, inputs of a piece
_TENSORS_KEPT = 50_000  # tensors of one member each that are kept from call to call
_GRAPHS_KEPT = 4  # shapes of inputs; each graph holds the memory of a member's activations
_WARM_RUNS = 3  # runs before the capture: libraries choose their kernels then
_TRIED = 3  # inputs of a trial
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest logit; half precision 0.1: it rounds elsewhere
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError)
Weights = list[Tensor | None]
Ready = tuple[int, list[Tensor | None]]


def check_execution(asked: str | None, device: torch.device, compiled: bool) -> None:
    """Check that an execution is one, and can be had on a device.

    Raises:
        UsageError: it is not.
    """
    if asked is not None and asked not in EXECUTIONS:
        expected = f"{', '.join(EXECUTIONS)} or None"
        raise UsageError("execution of an ensemble", expected=expected, found=repr(asked)[:80])
    if asked == "graph" and device.type != "cuda":
        raise UsageError("execution 'graph'", expected="a CUDA device", found=str(device), do="Take None")
    if compiled and asked in ("vmap", "graph"):
        raise UsageError(f"execution {asked!r} with compile=True", expected="'loop', 'grouped' or None", do="Take None")


class Runner:
    """Members of one stack, ready to run.

    Args:
        skeleton: their module; its own parameters are never used.
        stacked: parameters and buffers, name -> (member, …).
        asked: the execution that is to run; None for the table's choice.
        compiled: whether programs go through torch.compile.
        graphs: CUDA graphs captured before, of members of the same shapes.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        stacked: Mapping[str, Tensor],
        asked: str | None = None,
        compiled: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        self.skeleton, self.stacked, self.asked, self.compiled = skeleton, stacked, asked, compiled
        first = next(iter(stacked.values()))
        self.members, self.device = len(first), first.device
        self.dtype = modules.input_dtype(stacked)
        others = modules.superseded_names(skeleton)
        self.names = [n for n in skeleton.state_dict(keep_vars=True) if n in stacked and n not in others]
        self.loose = {
            n: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)
            for n, t in modules.unsaved_tensors(skeleton).items()
        }
        self.weights = sum(t[0].numel() for t in self.last.values())
        self.most = self.members  # side by side; less once memory was short
        self.trials = Trials.of(skeleton)
        self._seen: list[Tensor] = []
        self._versions: list[int] = []
        self._kept: dict[tuple[int, bool], list[Ready]] = {}
        self._folded: dict[tuple[int, int], tuple[Norm, ...]] = {}
        self.graphs = Graphs() if graphs is None else graphs
        self._compiled: dict[int, Any] = {}

    @property
    def last(self) -> dict[str, Tensor]:
        """What the members take, name -> (member, …)."""
        return {n: self.stacked[n] for n in self.names}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run all members on a batch of inputs; return logits (member, batch, …).

        Raises:
            UsageError: the execution that was asked for can't run these members.
            TooLargeError: not even one member at a time fits into the memory.
        """
        with one_thread(single_thread(self.device.type, self.weights)):
            while True:
                choice, program = self.chosen(inputs)
                try:
                    return self.run(choice, program, inputs)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    if choice.members == 1:
                        raise too_large(self.device, len(inputs)) from error
                self._kept.clear()
                self.most = halve_members(choice.members, self.device)

    def chosen(self, inputs: Tensor) -> tuple[Choice, Program | None]:
        """Return what runs for such inputs: the execution, and the program if there is one and it is right."""
        if self.asked == "module":
            return Choice("module"), None
        program = self.program(inputs)
        batch = self.trials.widest(self, program, inputs) * len(inputs)
        choice = choose_execution(self.device.type, self.weights, min(self.members, self.most), batch, self.asked)
        if choice.execution == "grouped" and program is None:
            if self.asked:
                raise UsageError(
                    "execution 'grouped'",
                    expected="a network all of whose operations are known to treat members apart",
                    found=type(self.skeleton).__name__,
                    do="Take 'vmap', 'loop' or None",
                )
            slow = batch > VMAP_BATCH.get(self.device.type, batch) or self.compiled
            choice = Choice("loop") if slow else Choice("vmap", choice.members)
        if choice.execution == "vmap" and not self.trials.passed("vmap", self, inputs):
            if self.asked:
                raise UsageError(
                    "execution 'vmap'",
                    expected="a network that torch.func.vmap gives the logits of its own code",
                    found=type(self.skeleton).__name__,
                    do="Take 'loop' or None",
                )
            choice = Choice("loop")
        if choice.execution == "graph":
            if self.asked and self.wants_gradients(inputs):
                raise UsageError(
                    "execution 'graph'",
                    expected="no gradients to be wanted",
                    found="inputs or weights that require them",
                    do="Take None, or call the ensemble under torch.no_grad()",
                )
            if not self.asked and (program is None or self.compiled or self.wants_gradients(inputs)):
                choice = Choice("loop")
        return choice, program

    def program(self, inputs: Tensor) -> Program | None:
        """Return the network's program, None without one that gives the logits of the module's own code."""
        program = self.trials.program(self.skeleton, inputs.dim())
        return program if program is not None and self.trials.passed("program", self, inputs) else None

    def run(self, choice: Choice, program: Program | None, inputs: Tensor) -> Tensor:
        if choice.execution == "vmap":
            with self.trials.lock:
                return self.by_vmap(inputs, choice.members)
        if choice.execution == "graph":
            return self.graphs.run(self, program, inputs)
        if program is None:
            run = self.compiled_of(0, self.through_module) if self.compiled else self.through_module
            with self.trials.lock:
                return torch.stack([run(state, inputs) for state in self.states()])
        over = not self.wants_gradients(inputs) and not self.compiled
        last = memory_format(self.device.type, len(inputs)) and choice.members == 1 and inputs.dim() == 4
        if last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        count = (
            1
            if choice.members > 1
            else pieces(self.device.type, len(inputs), self.trials.widest(self, program, inputs))
        )
        parts = inputs.tensor_split(count) if count > 1 else (inputs,)
        rows = []
        for members, ready in self.ready(program, choice.members, last):
            logits = [self.program_run(program, ready, part, members, over) for part in parts]
            rows.append(logits[0] if count == 1 else torch.cat(logits, 1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def program_run(
        self, program: Program, ready: list[Tensor | None], inputs: Tensor, members: int, over: bool
    ) -> Tensor:
        run = self.compiled_of(id(program), program.run) if self.compiled else program.run
        logits: Tensor = run(ready, inputs, members, over)
        return logits

    def compiled_of(self, key: int, function: Callable[..., Tensor]) -> Any:
        if key not in self._compiled:
            self._compiled[key] = torch.compile(function)
        return self._compiled[key]

    def ready(self, program: Program, size: int, channels_last: bool) -> Iterator[Ready]:
        """Yield members side by side: how many, and their tensors as the program takes them; kept where they fit."""
        tensors = list(self.last.values())
        versions = [-1 if t.is_inference() else t._version for t in tensors]
        same = len(tensors) == len(self._seen) and all(a is b for a, b in zip(tensors, self._seen, strict=True))
        if not same or versions != self._versions:  # somebody wrote to them
            self._kept.clear()
            self._folded.clear()
            self._seen, self._versions = tensors, versions
        fold = not any(t.requires_grad for t in tensors)
        if fold and (kept := self._kept.get((size, channels_last))):
            yield from kept
            return
        nbytes = sum(t.numel() * t.element_size() for t in self.last.values())
        few = -(-self.members // size) * len(program.parameters) <= _TENSORS_KEPT
        keep = fold and few and fits_easily(nbytes, self.device)
        self._kept.clear()  # one form at a time
        rows = []
        for at in range(0, self.members, size):
            part = {n: t[at : at + size] for n, t in self.last.items()}
            if fold:
                row = self._row(program, part, (at, size), channels_last and keep)
            else:
                row = len(next(iter(part.values()))), program.ready(part)
            rows += [row] * keep
            yield row
        if keep:
            self._kept[size, channels_last] = rows

    def _row(self, program: Program, part: Mapping[str, Tensor], where: tuple[int, int], channels_last: bool) -> Ready:
        # What is kept may be needed for gradients later, whatever mode this call runs in.
        with torch.inference_mode(False), torch.no_grad():
            if where not in self._folded:
                # Each member's own statistics decide, so that its logits depend on no other member.
                self._folded[where] = safe_norms(program.norms, part)
            return len(next(iter(part.values()))), program.ready(part, self._folded[where], channels_last)

    def states(self) -> Iterator[dict[str, Tensor]]:
        return ({n: t[i] for n, t in self.last.items()} for i in range(self.members))

    def through_module(self, state: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Run a member through its module's own code; return logits (batch, …)."""
        logits: Tensor = functional_call(self.skeleton, {**state, **self.loose}, (inputs,))
        return logits

    def by_vmap(self, inputs: Tensor, members: int) -> Tensor:
        logits: Tensor = vmap(lambda state: self.through_module(state, inputs), chunk_size=members)(self.last)
        return logits

    def wants_gradients(self, inputs: Tensor) -> bool:
        """Say whether intermediate results may be needed again: for gradients, or by a transform around this call."""
        if torch._C._functorch.is_functorch_wrapped_tensor(inputs):
            return True
        dual = torch.autograd.forward_ad.unpack_dual(inputs)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            return True
        return torch.is_grad_enabled() and (
            inputs.requires_grad or any(t.requires_grad for t in self.last.values())
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What runs on a device, up to a size.

    Args:
        device: its type; "" for all others.
        execution: one of EXECUTIONS.
        weights: elements of a member, at most.
        batch: bytes that the widest activation of a member has on the batch, at most.
        at_once: bytes that it may have of all members that are side by side.
        least: members; fewer take the next row.
    """

    device: str
    execution: str
    weights: int = ANY
    batch: int = ANY
    at_once: int = 2**22
    least: int = 1


@dataclass(frozen=True)
class Choice:
    """What runs.

    Args:
        execution: one of EXECUTIONS.
        members: how many side by side.
    """

    execution: str
    members: int = 1


# The first that fits counts. Where a network has no program, vmap takes the place of grouped convolutions.
TABLE = (
    Row("cpu", "grouped", weights=2**19, batch=2**18, least=8),
    Row("cpu", "loop"),
    Row("cuda", "grouped", weights=2**21, batch=2**24, at_once=2**27),
    Row("cuda", "grouped", batch=2**20, at_once=2**23),
    Row("cuda", "graph"),
    Row("", "loop"),
)


def choose_execution(device: str, weights: int, members: int, batch: int, asked: str | None = None) -> Choice:
    """Choose an execution from the table, or take the one that is asked for; return it.

    Args:
        device: type of the device.
        weights: elements of a member.
        members: how many there are.
        batch: bytes that the widest activation of a member has on the batch.
        asked: one of EXECUTIONS, or None.

    >>> choose_execution("cpu", 273_258, members=64, batch=65_536)  # ResNet-20, one image
    Choice(execution='grouped', members=64)
    >>> choose_execution("cpu", 11_220_132, members=64, batch=128 * 262_144)  # ResNet-18, 128 images
    Choice(execution='loop', members=1)
    """
    rows = [row for row in TABLE if row.device in (device, "")]
    row = next(r for r in rows if weights <= r.weights and batch <= r.batch and members >= r.least)
    execution = asked or row.execution
    side_by_side = execution in ("grouped", "vmap")
    return Choice(execution, max(1, min(members, row.at_once // max(1, batch))) if side_by_side else 1)


def memory_format(device: str, batch: int) -> bool:
    """Say whether convolutions of one member at a time are quicker on channels_last activations."""
    return device == "cuda" or (device == "cpu" and batch >= 8)


def single_thread(device: str, weights: int) -> bool:
    """Say whether members are so small that waking a second thread costs more than it gives."""
    return device == "cpu" and weights < _SMALL_MEMBER


def pieces(device: str, batch: int, widest: int) -> int:
    """Return into how many pieces a batch is cut for one member: a CPU's cache holds what a layer gives the next.

    Args:
        device: its type.
        batch: inputs of the batch.
        widest: bytes of the widest activation, an input.
    """
    most = max(_LEAST_PIECE, _PIECE // max(1, widest))
    return -(-batch // most) if device == "cpu" and batch >= 2 * most else 1


class Trials:
    """Programs of a network, and which of its executions give the logits of its own code."""

    _known: ClassVar[WeakKeyDictionary[nn.Module, Trials]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.programs: dict[int, Program | None] = {}
        self.verdicts: dict[tuple[object, ...], bool] = {}
        self.widths: dict[tuple[int, ...], int] = {}
        self.lock = RLock()  # the module's own code runs in one thread at a time: it holds the weights meanwhile

    @classmethod
    def of(cls, skeleton: nn.Module) -> Trials:
        return cls._known.setdefault(skeleton, Trials())

    def program(self, skeleton: nn.Module, rank: int) -> Program | None:
        if rank not in self.programs:
            self.programs[rank] = derive_program(skeleton, rank)
        return self.programs[rank]

    def passed(self, what: str, runner: Runner, inputs: Tensor) -> bool:
        """Say whether two members give what their module's own code gives, up to rounding.

        Args:
            what: "program" or "vmap".
            runner: of the members.
            inputs: of the shape and dtype that count; their values don't.
        """
        autocast = torch.is_autocast_enabled(runner.device.type)
        key = (what, runner.device.type, inputs.dtype, tuple(inputs.shape[1:]), autocast)
        if key not in self.verdicts:
            # A network may draw random numbers; the caller's are not touched.
            with (
                self.lock,
                torch.no_grad(),
                torch.random.fork_rng([runner.device] if runner.device.type == "cuda" else []),
            ):
                verdict = self._try(what, runner, inputs)
            if verdict is None:
                return False
            self.verdicts[key] = verdict
        return self.verdicts[key]

    def _try(self, what: str, runner: Runner, inputs: Tensor) -> bool | None:
        random = torch.randn((_TRIED, *inputs.shape[1:]), generator=torch.Generator().manual_seed(0), device="cpu")
        random = random.to(runner.device, inputs.dtype)
        state = {n: t[:2] for n, t in runner.last.items()}
        members = len(next(iter(state.values())))
        wanted: list[object] = [
            runner.through_module({n: t[i] for n, t in state.items()}, random) for i in range(members)
        ]
        if not all(isinstance(w, Tensor) and torch.isfinite(w).all() for w in wanted):
            return None  # these two members tell nothing
        try:
            if what == "program":
                program = self.programs[inputs.dim()]
                if program is None:
                    return False
                found = program.run(program.ready(state, safe_norms(program.norms, state)), random, members, True)
            else:
                found = torch.func.vmap(lambda s: runner.through_module(s, random))(state)
        except _REFUSALS:
            return False
        logits = torch.stack([w for w in wanted if isinstance(w, Tensor)])
        if (found.shape, found.dtype) != (logits.shape, logits.dtype):
            return False
        close = _CLOSE.get(logits.dtype, 0.1) * logits.abs().max()
        return bool((found - logits).abs().max() <= close)

    def widest(self, runner: Runner, program: Program | None, inputs: Tensor) -> int:
        """Return the bytes of a member's widest activation, an input; without a program it is guessed."""
        shape = tuple(inputs.shape[1:])
        if program is None:
            return 8 * inputs[:1].numel() * inputs.element_size()
        if shape not in self.widths:
            sizes: list[int] = []
            with torch.no_grad():
                ready = program.ready({n: t[:1] for n, t in runner.last.items()})
                program.run(ready, torch.zeros_like(inputs[:1]), 1, False, sizes)
            self.widths[shape] = max(sizes)
        return self.widths[shape] * inputs.element_size()


class Graphs:
    """The graphs of one ensemble, one a shape of inputs; the last few are kept."""

    def __init__(self) -> None:
        self.kept: OrderedDict[tuple[Any, ...], _Graph] = OrderedDict()

    def run(self, runner: Runner, program: Program | None, inputs: Tensor) -> Tensor:
        """Run all members of a runner, without gradients; return logits (member, batch, …)."""
        last = memory_format("cuda", len(inputs)) and inputs.dim() == 4
        with torch.no_grad():
            graph, rows = None, []
            for weights in _members(runner, program, last):
                if graph is None:
                    graph = self._graph(runner, program, inputs, weights, last)
                    graph.inputs.copy_(inputs)
                rows.append(graph.logits_of(weights).clone())
            return torch.stack(rows)

    def _graph(self, runner: Runner, program: Program | None, inputs: Tensor, weights: Weights, last: bool) -> _Graph:
        shapes = tuple(None if t is None else (t.shape, t.stride()) for t in weights)
        key = (tuple(inputs.shape), inputs.dtype, shapes)
        if key not in self.kept:
            self.kept[key] = _captured(runner, program, inputs, weights, last)
        self.kept.move_to_end(key)
        while len(self.kept) > _GRAPHS_KEPT:
            self.kept.popitem(last=False)
        return self.kept[key]


@dataclass(frozen=True)
class _Graph:
    """A captured graph.

    Args:
        graph: launches it.
        inputs, weights: what it reads.
        logits: what it writes, (batch, …).
    """

    graph: Any
    inputs: Tensor
    weights: Weights
    logits: Tensor

    def logits_of(self, weights: Weights) -> Tensor:
        """Run a member; return its logits, good until the next one runs."""
        pairs = [(to, t) for to, t in zip(self.weights, weights, strict=True) if to is not None and t is not None]
        torch._foreach_copy_([to for to, _ in pairs], [t for _, t in pairs])
        self.graph.replay()
        return self.logits


def _members(runner: Runner, program: Program | None, last: bool) -> Iterator[Weights]:
    if program is None:
        return (list(state.values()) for state in runner.states())
    return (ready for _, ready in runner.ready(program, 1, last))


def _captured(runner: Runner, program: Program | None, inputs: Tensor, first: Weights, last: bool) -> _Graph:
    held = torch.empty_like(inputs, memory_format=torch.channels_last if last else torch.contiguous_format)
    held.copy_(inputs)
    weights = [None if t is None else t.clone() for t in first]

    def member() -> Tensor:
        if program is not None:
            return program.run(weights, held, 1, True)[0]
        state = {n: t for n, t in zip(runner.last, weights, strict=True) if t is not None}
        return runner.through_module(state, held)

    side = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(inputs.device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_RUNS):
            member()
    torch.cuda.current_stream(inputs.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = member()
    return _Graph(graph, held, weights, logits)


def out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory was asked for which isn't there."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and ("not enough memory" in words or "can't allocate memory" in words)


def halve_members(members: int, device: torch.device) -> int:
    """Warn that only half as many members fit; return how many."""
    half = max(1, members // 2)
    warnings.warn(
        f"not enough memory on {device} for {members} members at once: {half} at a time from now on",
        SmallerChunk,
        stacklevel=5,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return half


def too_large(device: torch.device, batch: int) -> TooLargeError:
    return TooLargeError(
        f"one member on {device}",
        expected="memory for its weights and activations",
        found=f"less than a batch of {batch} needs",
        do="Give a smaller batch",
    )
