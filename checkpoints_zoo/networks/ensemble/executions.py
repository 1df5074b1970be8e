"""Executions: ways to run stacked members on a batch, one after another or side by side.

Every execution gives the logits of a loop over modules, up to rounding. `Runner` runs the members; EXECUTION_RULES
choose the execution by device and sizes; `Trials` remember which executions are correct for a network.

This is one file, because the runner, the rules and the trials concern the same few executions.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from checkpoints_zoo.errors import SmallerChunk, TooLargeError, UsageError
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import exact_float32, fits_easily, free_bytes, is_out_of_memory, one_thread
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.ensemble.graphs import (
    Forward,
    GraphCache,
    PackedMembers,
    arithmetic_settings,
    pack_members,
)
from checkpoints_zoo.networks.ensemble.program import FoldableNorm, Program, choose_foldable_norms

# The execution "module" runs each member by its module's own code: slower, but bit for bit equal to the module.
EXECUTIONS = ("loop", "grouped", "vmap", "graph", "module")
UNLIMITED = 2**62
# Number of bytes of a member's widest activation beyond which vmap is slower than a loop.
VMAP_BATCH_BYTES = {"cpu": 2**16}
_SMALL_MEMBER_ELEMENTS = 2**18
# A batch is cut into pieces that fit a CPU's cache: bytes of a piece, and smallest number of inputs in a piece.
_PIECE_BYTES, _LEAST_PIECE_INPUTS = 2**21, 16
_MOST_CACHED_TENSORS = 50_000  # Largest number of tensors that are cached between calls.
_TRIAL_INPUT_COUNT = 3
# Forms of grouped convolutions that are timed on a GPU: (channels_last, joined_channels).
GROUPED_FORMS = ((False, 0), (True, 0), (True, 64))
_MOST_SIDE_BY_SIDE_WEIGHTS = 2**30  # Largest number of elements of the tensors of members side by side.
_TIMED_MEMBERS, _TIMED_RUNS = 8, 2  # Least number of members, and number of runs, by which a choice is timed.
clock = time.perf_counter
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}  # Largest allowed difference, as a share of the largest logit; 0.1 for half precision.
# This pattern matches torch's error texts on unequal dtypes.
_DTYPE_MISMATCH = re.compile(r"dtype|scalar type|should be the same")
_REFUSAL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError)
CountAndTensors = tuple[int, list[Tensor | None]]


def check_execution(requested: str | None, device: torch.device, compiled: bool) -> None:
    """Check the name of an execution, and that the device supports it.

    Raises:
        UsageError: the execution is unknown, or the device does not support it.
    """
    if requested is not None and requested not in EXECUTIONS:
        expected = f"{', '.join(EXECUTIONS)} or None"
        raise UsageError("execution of an ensemble", expected=expected, found=repr(requested)[:80])
    if requested == "graph" and device.type != "cuda":
        raise UsageError("execution 'graph'", expected="a CUDA device", found=str(device), do="Take None")
    if compiled and requested in ("vmap", "graph"):
        raise UsageError(
            f"execution {requested!r} with compile=True", expected="'loop', 'grouped' or None", do="Take None"
        )


class Runner:
    """Runs stacked members.

    Args:
        skeleton: the members' module; its own parameters are never used.
        stacked: parameters and buffers, name -> (member, …).
        requested: name of the execution to use; None to choose one by EXECUTION_RULES.
        compiled: whether programs are compiled with torch.compile.
        graphs: CUDA graphs that were captured for members of the same shapes; None for no graphs yet.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        stacked: Mapping[str, Tensor],
        requested: str | None = None,
        compiled: bool = False,
        graphs: GraphCache | None = None,
    ) -> None:
        self.skeleton, self.stacked, self.requested, self.compiled = skeleton, stacked, requested, compiled
        first = next(iter(stacked.values()))
        self.member_count, self.device = len(first), first.device
        self.dtype = modules.input_dtype(stacked)
        superseded_params = modules.superseded_names(skeleton)
        self.names = [n for n in skeleton.state_dict(keep_vars=True) if n in stacked and n not in superseded_params]
        self.unsaved = {
            n: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)
            for n, t in modules.unsaved_tensors(skeleton).items()
        }
        self.weights = sum(t[0].numel() for t in self.tensors.values())
        self.max_at_once = (
            self.member_count
        )  # Largest number of members side by side; it is reduced when memory runs out.
        self.trials = Trials.of_skeleton(skeleton)
        self._cached_tensors: list[Tensor] = []
        self._cached_versions: list[int] = []
        self._cached_groups: dict[tuple[Choice, bool], list[CountAndTensors]] = {}
        self._packed_members: list[PackedMembers] | None = None
        self._folded_norms: dict[tuple[int, int], tuple[FoldableNorm, ...]] = {}
        self._graphs = graphs
        self._compiled: dict[int, Any] = {}

    @property
    def graphs(self) -> GraphCache:
        if self._graphs is None:
            self._graphs = GraphCache()
        return self._graphs

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stacked parameters and buffers of the network's state dict, without superseded parameters: name ->
        (member, …)."""
        return {n: self.stacked[n] for n in self.names}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Run all members on a batch of inputs; return logits (member, batch, …).

        Raises:
            UsageError: the requested execution can't run these members.
            TooLargeError: not even one member at a time fits into memory.
        """
        with one_thread(is_single_threaded(self.device.type, self.weights)):
            while True:
                choice, program = self.choose(inputs)
                try:
                    return self.run(choice, program, inputs)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    if choice.members_at_once == 1:
                        raise too_large_error(self.device, len(inputs)) from error
                self._cached_groups.clear()
                self.max_at_once = halve_members(choice.members_at_once, self.device)

    def run_one_by_one(self, inputs: Tensor) -> Tensor:
        """Run members one after another, so that a value that is not finite reaches no other member; return logits
        (member, batch, …)."""
        with one_thread(is_single_threaded(self.device.type, self.weights)):
            return self.run(Choice("loop"), self.program(inputs), inputs)

    def choose(self, inputs: Tensor) -> tuple[Choice, Program | None]:
        """Choose the execution for the given inputs; return its name, and the network's program if it has a correct
        one."""
        is_token_ids = self.requested is None and not (inputs.is_floating_point() or inputs.is_complex())
        if self.requested == "module" or is_token_ids:
            return Choice("module"), None
        program = self.program(inputs)
        batch_bytes = self.trials.widest_activation_nbytes(self, program, inputs) * len(inputs)
        choice = choose_execution(
            self.device.type, self.weights, min(self.member_count, self.max_at_once), batch_bytes, self.requested
        )
        if program is not None and self.can_time_choices(inputs):
            candidates = candidate_choices(choice, self.member_count, self.weights, batch_bytes)
            fastest = self.trials.fastest_choice(candidates, self, program, inputs)
            return replace(fastest, members_at_once=min(fastest.members_at_once, self.max_at_once)), program
        if choice.execution == "grouped" and program is None:
            if self.requested:
                raise UsageError(
                    "execution 'grouped'",
                    expected="a network all of whose operations are known to treat members apart",
                    found=type(self.skeleton).__name__,
                    do="Take 'vmap', 'loop' or None",
                )
            is_vmap_slow = batch_bytes > VMAP_BATCH_BYTES.get(self.device.type, batch_bytes) or self.compiled
            choice = Choice("loop") if is_vmap_slow else Choice("vmap", choice.members_at_once)
        if choice.execution == "vmap" and not self.trials.is_correct("vmap", self, inputs):
            if self.requested:
                raise UsageError(
                    "execution 'vmap'",
                    expected="a network that torch.func.vmap gives the logits of its own code",
                    found=type(self.skeleton).__name__,
                    do="Take 'loop' or None",
                )
            choice = Choice("loop")
        if choice.execution == "graph":
            if self.requested and self.wants_gradients(inputs):
                raise UsageError(
                    "execution 'graph'",
                    expected="no gradients to be wanted",
                    found="inputs or weights that require them",
                    do="Take None, or call the ensemble under torch.no_grad()",
                )
            if not self.requested and (program is None or self.compiled or self.wants_gradients(inputs)):
                choice = Choice("loop")
        return choice, program

    def can_time_choices(self, inputs: Tensor) -> bool:
        """Say whether the fastest execution is found by timing: on a GPU, unless the caller has requested an execution,
        or has asked cuDNN for the same bits each time."""
        is_free = self.requested is None and not self.compiled and not torch.backends.cudnn.deterministic
        return self.device.type == "cuda" and is_free and not self.wants_gradients(inputs)

    def seconds_per_member(self, choice: Choice, program: Program, inputs: Tensor) -> float:
        """Time a choice on as many members as it runs together; return infinity if memory runs out."""
        member_count = min(self.member_count, max(choice.members_at_once, _TIMED_MEMBERS))
        few = Runner(self.skeleton, {n: t[:member_count] for n, t in self.stacked.items()}, graphs=self.graphs)
        try:
            few.run(choice, program, inputs)
            torch.cuda.synchronize(self.device)
            start = clock()
            for _ in range(_TIMED_RUNS):
                few.run(choice, program, inputs)
            torch.cuda.synchronize(self.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return math.inf
        return (clock() - start) / (_TIMED_RUNS * member_count)

    def program(self, inputs: Tensor) -> Program | None:
        """Return the network's program; None if the network has no program, or if the program's logits differ from the
        module's."""
        program = self.trials.program(self.skeleton, inputs.dim())
        return program if program is not None and self.trials.is_correct("program", self, inputs) else None

    def run(self, choice: Choice, program: Program | None, inputs: Tensor) -> Tensor:
        if choice.execution == "vmap":
            with self.trials.lock:
                return self.run_vmap(inputs, choice.members_at_once)
        if choice.execution == "graph":
            channels_last = prefers_channels_last(self.device.type, len(inputs)) and inputs.dim() == 4
            groups = self.packed_members(program, channels_last)
            return self.graphs.run(self.member_count, groups, lambda m: self._forwards(program, m), inputs)
        if program is None:
            run = self.compile_once(0, self.run_module) if self.compiled else self.run_module
            with self.trials.lock:
                return torch.stack([run(state, inputs) for state in self.member_states()])
        can_overwrite = not self.wants_gradients(inputs) and not self.compiled
        channels_last = inputs.dim() == 4 and (
            choice.channels_last
            or (choice.members_at_once == 1 and prefers_channels_last(self.device.type, len(inputs)))
        )
        if channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        piece_count = (
            1
            if choice.members_at_once > 1
            else count_pieces(
                self.device.type, len(inputs), self.trials.widest_activation_nbytes(self, program, inputs)
            )
        )
        pieces = inputs.tensor_split(piece_count) if piece_count > 1 else (inputs,)
        results = []
        for member_count, prepared_params in self.member_groups(program, choice, channels_last):
            logits = [
                self.run_program(program, prepared_params, piece, member_count, can_overwrite) for piece in pieces
            ]
            results.append(logits[0] if piece_count == 1 else torch.cat(logits, 1))
        return results[0] if len(results) == 1 else torch.cat(results)

    def run_program(
        self,
        program: Program,
        prepared: list[Tensor | None],
        inputs: Tensor,
        member_count: int,
        can_overwrite: bool,
    ) -> Tensor:
        run = self.compile_once(id(program), program.run) if self.compiled else program.run
        logits: Tensor = run(prepared, inputs, member_count, can_overwrite)
        return logits

    def compile_once(self, function_id: int, function: Callable[..., Tensor]) -> Any:
        if function_id not in self._compiled:
            self._compiled[function_id] = _compile_or_warn(function)
        return self._compiled[function_id]

    def member_groups(self, program: Program, choice: Choice, channels_last: bool) -> Iterator[CountAndTensors]:
        """Yield groups of members: the number of members in a group, and their tensors as the program reads them. The
        groups are cached if they need little memory."""
        self._drop_stale_caches()
        can_fold = not any(t.requires_grad for t in self.tensors.values())
        group_size = choice.members_at_once
        if can_fold and (cached_groups := self._cached_groups.get((choice, channels_last))):
            yield from cached_groups
            return
        nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        has_few_tensors = -(-self.member_count // group_size) * len(program.parameters) <= _MOST_CACHED_TENSORS
        can_cache = can_fold and has_few_tensors and fits_easily(nbytes, self.device)
        self._cached_groups.clear()  # The groups of only one choice are cached.
        groups = []
        for start in range(0, self.member_count, group_size):
            tensors_of_group = {n: t[start : start + group_size] for n, t in self.tensors.items()}
            if can_fold:
                group = self._prepare_group(program, tensors_of_group, start, choice, channels_last and can_cache)
            else:
                group = len(next(iter(tensors_of_group.values()))), program.prepare(tensors_of_group)
            groups += [group] * can_cache
            yield group
        if can_cache:
            self._cached_groups[choice, channels_last] = groups

    def packed_members(self, program: Program | None, channels_last: bool) -> Iterable[PackedMembers]:
        """Return all members prepared for CUDA graphs; they are cached if a second copy of them fits into memory."""
        self._drop_stale_caches()
        if self._packed_members is not None and self._packed_members[0].channels_last == channels_last:
            return self._packed_members
        self._packed_members = None
        nbytes = sum(t.numel() * t.element_size() for t in self.tensors.values())
        if fits_easily(nbytes, self.device):
            self._packed_members = list(pack_members(program, self.tensors, 0, channels_last))
            return self._packed_members
        return self._pack_in_parts(program, channels_last, nbytes)

    def _pack_in_parts(self, program: Program | None, channels_last: bool, nbytes: int) -> Iterator[PackedMembers]:
        free_nbytes = free_bytes(self.device) or 0
        members_in_part = max(1, free_nbytes * self.member_count // (8 * max(1, nbytes)))
        for start in range(0, self.member_count, members_in_part):
            part = {n: t[start : start + members_in_part] for n, t in self.tensors.items()}
            yield from pack_members(program, part, start, channels_last)

    def _forwards(self, program: Program | None, members: PackedMembers) -> list[Forward]:
        """Return the functions that run a packed member, the fastest first and the surest last."""
        if program is None:
            return [lambda weights, inputs: self.run_module(dict(zip(self.names, weights, strict=True)), inputs)]
        programs = [program.with_fused_relus(members.folded_norms), program]
        return [each.run_one for each in programs]

    def _drop_stale_caches(self) -> None:
        """Forget what was prepared if the caller has replaced or changed some weights since the last call."""
        tensors = list(self.tensors.values())
        versions = [-1 if t.is_inference() else t._version for t in tensors]
        are_same_tensors = len(tensors) == len(self._cached_tensors) and all(
            a is b for a, b in zip(tensors, self._cached_tensors, strict=True)
        )
        if not are_same_tensors or versions != self._cached_versions:
            self._cached_groups.clear()
            self._folded_norms.clear()
            self._packed_members = None
            self._cached_tensors, self._cached_versions = tensors, versions

    def _prepare_group(
        self, program: Program, stacked: Mapping[str, Tensor], start: int, choice: Choice, channels_last: bool
    ) -> CountAndTensors:
        start_and_size = start, choice.members_at_once
        # The cached tensors must not be inference tensors, since a later call with gradients may use them.
        with torch.inference_mode(False), torch.no_grad():
            if start_and_size not in self._folded_norms:
                # Only the statistics of the group's own members decide which batch norms are folded, so that logits do
                # not depend on other groups.
                self._folded_norms[start_and_size] = choose_foldable_norms(program.norms, stacked)
            return len(next(iter(stacked.values()))), program.prepare(
                stacked, self._folded_norms[start_and_size], channels_last, choice.joined_channels
            )

    def member_states(self) -> Iterator[dict[str, Tensor]]:
        return ({n: t[i] for n, t in self.tensors.items()} for i in range(self.member_count))

    def run_module(self, member_tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        """Run one member by the code of its module; return logits (batch, …)."""
        try:
            logits: object = functional_call(self.skeleton, {**member_tensors, **self.unsaved}, (inputs,))
        except RuntimeError as error:
            if not _DTYPE_MISMATCH.search(str(error)):
                raise
            raise UsageError(
                f"{type(self.skeleton).__name__} in {self.dtype}",
                expected="a network that computes in the dtype of its weights",
                found=str(error).split("\n")[0][:200],
                do="Take out its casts, or use the dtype that it casts to",
            ) from error
        if not isinstance(logits, Tensor):
            logits = getattr(logits, "logits", logits)  # The outputs of transformers hold more than the logits.
        if not isinstance(logits, Tensor) or logits.dim() == 0:
            found = f"a {type(logits).__name__}{f' of {len(logits)}' if isinstance(logits, Sized) else ''}"
            raise UsageError(
                f"output of {type(self.skeleton).__name__}",
                expected="logits, one tensor (batch, class)",
                found="a tensor without axes" if isinstance(logits, Tensor) else found,
                do="Wrap the network in a module that returns the logits alone",
            )
        return logits

    def run_vmap(self, inputs: Tensor, members_at_once: int) -> Tensor:
        logits: Tensor = vmap(lambda state: self.run_module(state, inputs), chunk_size=members_at_once)(self.tensors)
        return logits

    def wants_gradients(self, inputs: Tensor) -> bool:
        """Say whether intermediate results must be kept, because gradients or a torch.func transform need them."""
        if torch._C._functorch.is_functorch_wrapped_tensor(inputs):
            return True
        dual_inputs = torch.autograd.forward_ad.unpack_dual(inputs)  # type: ignore[no-untyped-call]
        if dual_inputs.tangent is not None:
            return True
        return torch.is_grad_enabled() and (
            inputs.requires_grad or any(t.requires_grad for t in self.tensors.values())
        )  # fmt: skip


def _compile_or_warn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function with torch.compile; return the compiled function. If the compiler fails, the returned function
    warns once and calls the original function."""
    compiled_function: Callable[..., Tensor] | None = torch.compile(function)

    def run(*arguments: Any) -> Tensor:
        nonlocal compiled_function
        if compiled_function is None:
            return function(*arguments)
        try:
            return compiled_function(*arguments)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise
            compiled_function = None
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"torch.compile failed, so the ensemble runs without it: {reason}", stacklevel=2)
            return function(*arguments)

    return run


@dataclass(frozen=True)
class ExecutionRule:
    """A rule that names an execution, and the device and sizes for which it is used.

    Args:
        device: type of the device; "" for all other devices.
        execution: name of the execution, one of EXECUTIONS.
        most_weights: largest number of elements of a member's tensors.
        most_batch_nbytes: largest number of bytes of a member's widest activation on the batch.
        most_nbytes_side_by_side: largest number of bytes of the widest activation of all members side by side.
        least_members: smallest number of members; with fewer members, the next rule is tried.
    """

    device: str
    execution: str
    most_weights: int = UNLIMITED
    most_batch_nbytes: int = UNLIMITED
    most_nbytes_side_by_side: int = 2**21
    least_members: int = 1


@dataclass(frozen=True)
class Choice:
    """The chosen execution.

    Args:
        execution: name of the execution, one of EXECUTIONS.
        members_at_once: the number of members side by side.
        channels_last: whether members side by side run in the memory format channels_last.
        joined_channels: number of input channels up to which kernels of neighbouring members are joined; 0 for none.
    """

    execution: str
    members_at_once: int = 1
    channels_last: bool = False
    joined_channels: int = 0


# Rules are tried in this order, and the first rule that fits is used. For a network without a program, vmap replaces
# grouped convolutions.
EXECUTION_RULES = (
    ExecutionRule("cpu", "grouped", most_weights=2**19, most_batch_nbytes=2**18, least_members=8),
    ExecutionRule("cpu", "loop"),
    ExecutionRule("cuda", "grouped", most_weights=2**21, most_batch_nbytes=2**24, most_nbytes_side_by_side=2**27),
    ExecutionRule("cuda", "grouped", most_batch_nbytes=2**20, most_nbytes_side_by_side=2**23),
    ExecutionRule("cuda", "graph"),
    ExecutionRule("", "loop"),
)


def choose_execution(
    device_type: str, weight_count: int, member_count: int, batch_bytes: int, requested: str | None = None
) -> Choice:
    """Choose an execution by EXECUTION_RULES unless an execution is requested; return the execution.

    Args:
        device_type: type of the device.
        weight_count: number of elements of a member's tensors.
        member_count: the number of members.
        batch_bytes: number of bytes of a member's widest activation on the batch.
        requested: name of a requested execution, one of EXECUTIONS; None to apply the rules.

    >>> choose_execution("cpu", 273_258, member_count=64, batch_bytes=65_536)  # ResNet-20, one image
    Choice(execution='grouped', members_at_once=32, channels_last=False, joined_channels=0)
    >>> choose_execution("cpu", 11_220_132, member_count=64, batch_bytes=128 * 262_144)  # ResNet-18, 128 images
    Choice(execution='loop', members_at_once=1, channels_last=False, joined_channels=0)
    """
    rules = [rule for rule in EXECUTION_RULES if rule.device in (device_type, "")]
    rule = next(
        each
        for each in rules
        if weight_count <= each.most_weights
        and batch_bytes <= each.most_batch_nbytes
        and member_count >= each.least_members
    )
    execution = requested or rule.execution
    most_at_once = rule.most_nbytes_side_by_side // max(1, batch_bytes) if execution in ("grouped", "vmap") else 1
    groups = math.ceil(member_count / min(max(1, most_at_once), member_count))
    return Choice(execution, math.ceil(member_count / groups))


def candidate_choices(choice: Choice, member_count: int, weight_count: int, batch_bytes: int) -> list[Choice]:
    """Return the choices among which a GPU's fastest one is found by timing; the arguments are those of
    `choose_execution`, and its choice."""
    candidates = [Choice("graph")]
    side_by_side_nbytes = max(rule.most_nbytes_side_by_side for rule in EXECUTION_RULES if rule.device == "cuda")
    most_members = min(member_count, side_by_side_nbytes // max(1, batch_bytes))
    if choice.execution == "grouped" or weight_count * most_members < _MOST_SIDE_BY_SIDE_WEIGHTS:
        for members_at_once in sorted({most_members, min(most_members, 64), min(most_members, 16)}, reverse=True):
            if members_at_once > 1:
                candidates += [Choice("grouped", members_at_once, *form) for form in GROUPED_FORMS]
    return candidates


def prefers_channels_last(device_type: str, batch_size: int) -> bool:
    """Say whether a single member's convolutions are faster on activations in the memory format channels_last."""
    return device_type == "cuda" or (device_type == "cpu" and batch_size >= 8)


def is_single_threaded(device_type: str, weight_count: int) -> bool:
    """Say whether members are so small that a second thread would only slow them down."""
    return device_type == "cpu" and weight_count < _SMALL_MEMBER_ELEMENTS


def count_pieces(device_type: str, batch_size: int, nbytes_per_input: int) -> int:
    """Return the number of pieces that a batch is cut into, so that a CPU's cache holds a member's activations.

    Args:
        device_type: type of the device.
        batch_size: number of inputs in the batch.
        nbytes_per_input: number of bytes of one input's widest activation.
    """
    inputs_per_piece = max(_LEAST_PIECE_INPUTS, _PIECE_BYTES // max(1, nbytes_per_input))
    return -(-batch_size // inputs_per_piece) if device_type == "cpu" and batch_size >= 2 * inputs_per_piece else 1


class Trials:
    """The programs of a network, and for each execution whether its logits equal those of the module's own code."""

    _trials_of_skeleton: ClassVar[WeakKeyDictionary[nn.Module, Trials]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.programs: dict[int, Program | None] = {}
        self.verdicts: dict[tuple[object, ...], bool] = {}
        self.widths: dict[tuple[int, ...], int] = {}
        self.fastest_choices: dict[tuple[object, ...], Choice] = {}
        # functional_call puts weights into the shared skeleton, so only one thread may call it at a time.
        self.lock = RLock()

    @classmethod
    def of_skeleton(cls, skeleton: nn.Module) -> Trials:
        return cls._trials_of_skeleton.setdefault(skeleton, Trials())

    def program(self, skeleton: nn.Module, rank: int) -> Program | None:
        if rank not in self.programs:
            self.programs[rank] = derive_program(skeleton, rank)
        return self.programs[rank]

    def is_correct(self, execution: str, runner: Runner, inputs: Tensor) -> bool:
        """Say whether an execution gives the same logits as the module, up to rounding; two members are tried, once for
        each kind of inputs.

        Args:
            execution: the way of running members that is tested, "program" or "vmap".
            runner: runner that has the members.
            inputs: a batch of inputs, of which only the shape and dtype matter.
        """
        is_autocast_on = torch.is_autocast_enabled(runner.device.type)
        trial_key = (execution, runner.device.type, inputs.dtype, tuple(inputs.shape[1:]), is_autocast_on)
        if trial_key not in self.verdicts:
            # A network may draw random numbers, but the state of the caller's generator must not change.
            with (
                self.lock,
                torch.no_grad(),
                torch.random.fork_rng([runner.device] if runner.device.type == "cuda" else []),
                exact_float32(),
            ):
                is_equal = self._compare_with_module(execution, runner, inputs)
            if is_equal is None:
                return False
            self.verdicts[trial_key] = is_equal
        return self.verdicts[trial_key]

    def _compare_with_module(self, execution: str, runner: Runner, inputs: Tensor) -> bool | None:
        random_inputs = torch.randn(
            (_TRIAL_INPUT_COUNT, *inputs.shape[1:]), generator=torch.Generator().manual_seed(0), device="cpu"
        )
        random_inputs = random_inputs.to(runner.device, inputs.dtype)
        stacked = {n: t[:2] for n, t in runner.tensors.items()}
        member_count = len(next(iter(stacked.values())))
        try:
            module_logits = [
                runner.run_module({n: t[i] for n, t in stacked.items()}, random_inputs) for i in range(member_count)
            ]
        except IndexError:  # The network uses its inputs as indices into a table.
            random_inputs = inputs[:_TRIAL_INPUT_COUNT]
            module_logits = [
                runner.run_module({n: t[i] for n, t in stacked.items()}, random_inputs) for i in range(member_count)
            ]
        if not all(torch.isfinite(stacked_module_logits).all() for stacked_module_logits in module_logits):
            return None  # The module itself fails, so there are no logits to compare with.
        try:
            if execution == "program":
                program = self.programs[inputs.dim()]
                if program is None:
                    return False
                trial_logits = program.run(
                    program.prepare(stacked, choose_foldable_norms(program.norms, stacked)),
                    random_inputs,
                    member_count,
                    True,
                )
            else:
                trial_logits = torch.func.vmap(lambda s: runner.run_module(s, random_inputs))(stacked)
        except _REFUSAL_ERRORS:
            return False
        stacked_module_logits = torch.stack(module_logits)
        if (trial_logits.shape, trial_logits.dtype) != (stacked_module_logits.shape, stacked_module_logits.dtype):
            return False
        tolerance = _TOLERANCES.get(stacked_module_logits.dtype, 0.1) * stacked_module_logits.abs().max()
        return bool((trial_logits - stacked_module_logits).abs().max() <= tolerance)

    def fastest_choice(self, candidates: Sequence[Choice], runner: Runner, program: Program, inputs: Tensor) -> Choice:
        """Return the choice that takes the least time a member; each is timed once for a number of members, a shape of
        inputs and a way in which torch computes."""
        timing_key = runner.device, runner.member_count, inputs.shape, inputs.dtype, arithmetic_settings()
        if timing_key not in self.fastest_choices:
            seconds = [runner.seconds_per_member(candidate, program, inputs) for candidate in candidates]
            self.fastest_choices[timing_key] = candidates[seconds.index(min(seconds))]
        return self.fastest_choices[timing_key]

    def widest_activation_nbytes(self, runner: Runner, program: Program | None, inputs: Tensor) -> int:
        """Return the number of bytes of a member's widest activation for one input; an estimate if there is no
        program."""
        shape = tuple(inputs.shape[1:])
        if program is None:
            return 8 * inputs[:1].numel() * inputs.element_size()
        if shape not in self.widths:
            element_counts: list[int] = []
            with torch.no_grad():
                prepared_params = program.prepare({n: t[:1] for n, t in runner.tensors.items()})
                program.run(prepared_params, torch.zeros_like(inputs[:1]), 1, False, element_counts)
            self.widths[shape] = max(element_counts)
        return self.widths[shape] * inputs.element_size()


def halve_members(member_count: int, device: torch.device) -> int:
    """Warn that memory is short, and return half the number of members."""
    half_count = max(1, member_count // 2)
    warnings.warn(
        f"not enough memory on {device} for {member_count} members at once: {half_count} at a time from now on",
        SmallerChunk,
        stacklevel=5,
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return half_count


def too_large_error(device: torch.device, batch_size: int) -> TooLargeError:
    return TooLargeError(
        f"one member on {device}",
        expected="memory for its weights and activations",
        found=f"less than a batch of {batch_size} needs",
        do="Give a smaller batch",
    )
