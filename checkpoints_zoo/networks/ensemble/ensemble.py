"""Members as one module, which maps a batch of inputs to logits (member, batch, class).

Members that do not fit into memory are read in chunks (`Stream`); the next chunk is read while the present chunk is
used.

This is one file, because most of it is one class, `Ensemble`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError, SmallerChunk, UsageError
from checkpoints_zoo.formats.printing import html_text
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.networks import device as devices
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import is_out_of_memory
from checkpoints_zoo.networks.ensemble.executions import Runner, check_execution, halve_members
from checkpoints_zoo.networks.ensemble.graphs import GraphCache

StackedTensors = dict[str, Tensor]
ReadMembers = Callable[[range, torch.device, torch.dtype | None], StackedTensors]
T = TypeVar("T")


class Ensemble(nn.Module):
    """Many members as one module in eval mode: one call runs all of them on the same inputs.

    The members are in memory, or are read in chunks at every call (`Ensemble.reading`). A slice gives an ensemble, and
    a position gives one member as a module of its architecture; both share the members' memory.

    Args:
        skeleton: the members' module; its own parameters are never used.
        stacked: parameters and buffers of all members, name -> (member, …). The tensors are not copied, so later
            changes to them have an effect.
        ids: ids of the members, in the order of the stack.
        execution: "loop" runs members one after another, "grouped" side by side with grouped convolutions, "vmap" by
            torch.func.vmap, "graph" as a CUDA graph, "module" by the module's own code; None chooses by device and
            sizes, on a GPU the fastest by timing. Logits of two executions differ by rounding only: in float32 by less
            than 1e-5 of the largest logit, on a GPU where torch allows TF32 in convolutions (its default) by 1e-3.
        compile: whether to compile programs with torch.compile, which takes seconds to minutes at the first call.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=3)
    >>> ensemble = members.ensemble()
    >>> images = zoo.images.load("digits").images[:5]
    >>> ensemble(members.preprocess(images)).shape  # (member, batch, class)
    torch.Size([3, 5, 10])
    >>> ensemble.predict(members.preprocess(images)).shape  # mean probabilities
    torch.Size([5, 10])
    """

    def __init__(
        self,
        skeleton: nn.Module,
        stacked: Mapping[str, Tensor],
        ids: Sequence[int],
        *,
        execution: str | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.training = False
        self.ids = list(ids)
        # The skeleton is stored in a tuple, so that it is no submodule and `.to` does not move it.
        self._skeleton = (skeleton,)
        self._stacked: StackedTensors | None = modules.widen_norms(modules.with_shared_names(skeleton, stacked))
        self._stream: Stream | None = None
        self._dtype, self._device = modules.input_dtype(self._stacked), next(iter(self._stacked.values())).device
        self._options: dict[str, Any] = {"requested": execution, "compiled": bool(compile)}
        self._runner: Runner | None = None
        self._graphs = _graph_cache(self._device)
        check_execution(execution, self._device, bool(compile))

    @classmethod
    def reading(
        cls,
        skeleton: nn.Module,
        read: ReadMembers,
        ids: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        chunk: int | None = None,
        execution: str | None = None,
        compile: bool = False,
    ) -> Ensemble:
        """Make an ensemble whose members are read from files, all at once, or in chunks if they don't fit into memory;
        return the ensemble.

        Args:
            skeleton, ids, execution, compile: the same arguments as in `Ensemble`.
            read: function (positions, device, dtype) -> stacked tensors of the members at consecutive positions.
            device, dtype: device and dtype of the stacked tensors.
            chunk: number of members that are read at a time, again at every call; None reads all members once, or
                warns and reads chunks that fit if memory is too small.
        """
        check_execution(execution, device, bool(compile))
        if chunk is None:
            try:
                return cls(skeleton, read(range(len(ids)), device, dtype), ids, execution=execution, compile=compile)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or len(ids) == 1:
                    raise
            chunk = members_in_chunk(read(range(1), device, dtype), len(ids), device)
            warnings.warn(
                f"not enough memory on {device} for {len(ids)} members: every call reads them, {chunk} at a time",
                SmallerChunk,
                stacklevel=3,
            )
        if type(chunk) is not int or chunk < 1:
            raise UsageError("chunk of an ensemble", expected="a whole number from 1, or None", found=repr(chunk)[:80])
        stream = Stream(read, len(ids), chunk, device, dtype)
        return cls._from_stream(skeleton, stream, ids, execution=execution, compile=compile)

    @classmethod
    def _from_stream(
        cls, skeleton: nn.Module, stream: Stream, ids: Sequence[int], *, execution: str | None, compile: bool
    ) -> Ensemble:
        empty_params = {"": torch.empty(0, 0, dtype=stream.dtype, device=stream.device)}
        ensemble = cls(skeleton, empty_params, ids, execution=execution, compile=compile)
        ensemble._stacked, ensemble._stream = None, stream
        return ensemble

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        kind = type(self._skeleton[0]).__name__
        chunk_text = "" if self._stream is None else f", read {self._stream.chunk} at a time"
        return f"Ensemble({len(self)} × {kind}, {self.dtype}, {self.device}{chunk_text})"

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    @property
    def stacked(self) -> StackedTensors:
        """The members' parameters and buffers, name -> (member, …).

        Raises:
            UsageError: the members are not in memory.
        """
        if self._stacked is None:
            raise UsageError(
                "stacked weights of an ensemble",
                expected="members in memory",
                found=repr(self),
                do="Use .parts(), or members.batches(...)",
            )
        return self._stacked

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that inputs must have; tensors of layers with running statistics may have a wider dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, inputs: Tensor) -> Tensor:
        """Run every member on a batch of inputs; return logits (member, batch, class).

        Args:
            inputs: preprocessed images (batch, channel, height, width), of the ensemble's dtype and on its device; or
                whole numbers, such as token ids (batch, token), which the members' own code gets as they are.

        Raises:
            UsageError: the inputs have another dtype or device, or the requested execution can't run these members.
            DamagedError: a member's logits are not finite though its inputs are.
            TooLargeError: not even one member fits into the memory.
        """
        return torch.cat(list(self._logits(inputs)))

    def predict(self, inputs: Tensor) -> Tensor:
        """Run every member, and return the mean of their class probabilities, (batch, class), in float32 or wider.

        See `forward` for the arguments and errors.
        """
        total: Tensor | None = None
        for logits in self._logits(inputs):
            sum_dtype = torch.promote_types(logits.dtype, torch.float32)
            sum_of_probs = logits.softmax(-1, dtype=sum_dtype).sum(0)
            total = sum_of_probs if total is None else total + sum_of_probs
        if total is None:
            raise UsageError("ensemble", expected="one member or more", found="none")
        return total / len(self)

    def predict_proba(self, inputs: Tensor) -> Tensor:
        """Return the same as `predict`, (batch, class), under the name that scikit-learn's classifiers give it."""
        return self.predict(inputs)

    def flat(self, inputs: Tensor) -> Tensor:
        """Return the logits as one matrix (member·batch, class), first the rows of the first member, as
        torch-uncertainty does."""
        return self(inputs).flatten(0, 1)  # type: ignore[no-any-return]

    def parts(self) -> Iterator[Ensemble]:
        """Yield ensembles of consecutive members in memory, so that many batches can be run after reading the members
        once.

        An ensemble whose members are in memory yields only itself.
        """
        if self._stream is None:
            yield self
        else:
            yield from self._stream.map_chunks(self._subset)

    def _subset(self, positions: range, stacked: StackedTensors) -> Ensemble:
        return self._with_members(stacked, self.ids[positions.start : positions.stop])

    def _with_members(self, stacked: Mapping[str, Tensor], ids: Sequence[int]) -> Ensemble:
        """Return an ensemble of other members of the same network, which runs them in the same way and shares the
        CUDA graphs.

        Args:
            stacked, ids: the same arguments as in `Ensemble`.
        """
        ensemble = Ensemble(self._skeleton[0], stacked, ids, **self._execution_options)
        ensemble._graphs = self._graphs
        return ensemble

    @property
    def _execution_options(self) -> dict[str, Any]:
        return {"execution": self._options["requested"], "compile": self._options["compiled"]}

    def _logits(self, inputs: Tensor) -> Iterator[Tensor]:
        """Run the members; yield logits (member, batch, class) of one chunk of members at a time."""
        is_fitting = inputs.dtype == self.dtype or inputs.dtype in (torch.int64, torch.int32)
        if not is_fitting or inputs.device != self.device:
            raise UsageError(
                "inputs of the ensemble",
                expected=f"{self.dtype} on {self.device}",
                found=f"{inputs.dtype} on {inputs.device}",
                do="Give members.preprocess(images).to(device, dtype)",
            )
        if self._stream is None:
            if self._runner is None:
                self._runner = Runner(self._skeleton[0], self.stacked, **self._options, graphs=self._graphs)
            logits = self._runner(inputs)
            if not torch.isfinite(logits).all() and torch.isfinite(inputs).all():
                self._raise_not_finite(self._runner.run_one_by_one(inputs))
            yield logits
        else:
            yield from self._stream.map_chunks(
                lambda positions, stacked: next(self._subset(positions, stacked)._logits(inputs))
            )

    def _raise_not_finite(self, logits: Tensor) -> NoReturn:
        has_nonfinite = ~torch.isfinite(logits).flatten(1).all(1)
        raise DamagedError(
            f"logits of members {', '.join(str(self.ids[int(i)]) for i in has_nonfinite.nonzero()[:5])}",
            expected="finite numbers",
            found="infinite ones or NaN",
            do="float16 ends at 65,504: compute in float32 or bfloat16"
            if logits.dtype == torch.float16
            else "`zoo-cli verify` says whether their weights are damaged",
        )

    @overload
    def __getitem__(self, position: int) -> nn.Module: ...
    @overload
    def __getitem__(self, position: slice) -> Ensemble: ...

    def __getitem__(self, position: int | slice) -> nn.Module | Ensemble:
        """Select by position: a slice gives an Ensemble, an int one member as a module of its architecture.

        The slice and the single member share the ensemble's memory. Members that are not in memory are read from their
        files.

        Raises:
            MemberNotFound: there is no member at the position.
            SelectionError: the slice contains no members.
        """
        if isinstance(position, slice):
            return self._slice(range(len(self))[position])
        at = whole_number(position)
        if at is None or not -len(self) <= at < len(self):
            raise MemberNotFound(
                f"position {position!r} of an ensemble",
                expected=f"a whole number from 0 to {len(self) - 1}, or a slice",
                found=repr(position)[:80],
            )
        at %= len(self)
        one = self._stream.read_one(at) if self._stream else {n: t[at : at + 1] for n, t in self.stacked.items()}
        return modules.fill_skeleton(self._skeleton[0], {n: t[0] for n, t in one.items()}, self.device)

    def _slice(self, positions: range) -> Ensemble:
        if not positions:
            raise SelectionError("slice of an ensemble", expected="one member or more", found="none")
        ids = [self.ids[i] for i in positions]
        if self._stream is not None:
            return self._from_stream(self._skeleton[0], self._stream.select(positions), ids, **self._execution_options)
        slice_or_positions = (
            slice(positions.start, positions.stop, positions.step) if positions.step > 0 else list(positions)
        )
        return self._with_members({n: t[slice_or_positions] for n, t in self.stacked.items()}, ids)

    def train(self, mode: bool = True) -> Ensemble:
        """Accept only eval mode (`mode=False`); return this ensemble.

        Raises:
            UsageError: `mode` is true.
        """
        if mode:
            raise UsageError(
                "ensemble.train()",
                expected="eval mode: the members are finished, and batch statistics would mix their inputs",
                do="Use members[i].model() to train one of them further",
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ensemble:
        converted_example = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        check_execution(self._options["requested"], converted_example.device, self._options["compiled"])
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._dtype, self._device = converted_example.dtype, converted_example.device
        self._runner, self._graphs = None, _graph_cache(self._device)
        if self._stream is not None:
            self._stream = self._stream.to(converted_example.device, converted_example.dtype)
            return self
        norm_tensors = modules.norm_tensor_names(self.stacked)
        for name, tensor in self.stacked.items():
            converted = fn(tensor)
            # A variance that is finite in float32 can be infinite in float16.
            if name in norm_tensors and converted.is_floating_point():
                converted = tensor.to(converted.device, modules.norm_dtype(converted.dtype))
            self.stacked[name] = converted
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy of this object builds its caches again.
        return self.__dict__ | {"_runner": None, "_graphs": _graph_cache(self._device)}


def _graph_cache(device: torch.device) -> GraphCache | None:
    return GraphCache() if device.type == "cuda" else None


class Stream:
    """Members of an ensemble that are read from files, chunk by chunk, at every use.

    Args:
        read: function (positions, device, dtype) -> stacked tensors of the members at consecutive positions.
        member_count: the number of members.
        chunk: the number of members that are read at a time.
        device, dtype: device and dtype of the stacked tensors.
    """

    def __init__(
        self, read: ReadMembers, member_count: int, chunk: int, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.read, self.count, self.chunk = read, member_count, chunk
        self.device, self.dtype = device, dtype

    def map_chunks(self, function_of_chunk: Callable[[range, StackedTensors], T]) -> Iterator[T]:
        """Read the members chunk by chunk; yield the result of `function_of_chunk` for each chunk.

        If memory runs out, a warning is given and the remaining chunks are half as large.
        """
        first_position, positions = 0, self._chunk_positions(0)
        read_chunk = devices.on_current_stream(self._read_chunk, self.device)
        with ThreadPoolExecutor(1, thread_name_prefix="zoo-read") as reader:
            read_future = reader.submit(read_chunk, positions)
            while positions:
                next_read_future = None
                try:
                    stacked = read_future.result()
                    if next_positions := self._chunk_positions(positions.stop):
                        next_read_future = reader.submit(read_chunk, next_positions)
                    result = function_of_chunk(positions, stacked)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or len(positions) == 1:
                        raise
                else:
                    first_position, positions = positions.stop, next_positions
                    del stacked  # Free the memory of the chunk before the caller uses the results.
                    if next_read_future is not None:
                        read_future = next_read_future
                    yield result
                    continue
                stacked = {}
                if next_read_future is not None:
                    wait([next_read_future])
                self.chunk = halve_members(len(positions), self.device)
                positions = self._chunk_positions(first_position)
                read_future = reader.submit(read_chunk, positions)

    def _chunk_positions(self, first_position: int) -> range:
        return range(first_position, min(first_position + self.chunk, self.count))

    def _read_chunk(self, positions: range) -> StackedTensors:
        return self.read(positions, self.device, self.dtype)

    def read_one(self, position: int) -> StackedTensors:
        """Read one member; return its tensors, name -> (1, …)."""
        return self._read_chunk(range(position, position + 1))

    def select(self, positions: range) -> Stream:
        """Return a stream that reads only the members at the given positions."""

        def read(positions_in_stream: range, device: torch.device, dtype: torch.dtype | None) -> StackedTensors:
            chosen_positions = positions[positions_in_stream.start : positions_in_stream.stop]
            if chosen_positions.step == 1:
                return self.read(chosen_positions, device, dtype)
            single_members = [self.read(range(i, i + 1), device, dtype) for i in chosen_positions]
            return {name: torch.cat([part[name] for part in single_members]) for name in single_members[0]}

        return Stream(read, len(positions), self.chunk, self.device, self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype | None) -> Stream:
        """Return a stream of the same members on another device, in another dtype."""
        return Stream(self.read, self.count, self.chunk, device, dtype)


def members_in_chunk(member_tensors: StackedTensors, member_count: int, device: torch.device) -> int:
    """Return the number of members in a chunk, so that two chunks take half of the free memory.

    Args:
        member_tensors: stacked tensors of one member, from which the number of bytes of a member is computed.
        member_count: the number of all members.
        device: device that the chunks are read onto.
    """
    member_nbytes = sum(t.numel() * t.element_size() for t in member_tensors.values())
    free_nbytes = devices.free_bytes(device)
    return member_count if free_nbytes is None else max(1, min(member_count, free_nbytes // max(1, 4 * member_nbytes)))
