"""CUDA graphs: a member's kernels launched at once, for one member after another.

A graph is captured with one set of weights and inputs; each member's weights are copied there before it is replayed.
Copying ResNet-18's takes a tenth of what launching its kernels one by one does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo.networks.ensemble.choosing import memory_format
from checkpoints_zoo.networks.ensemble.program import Program

if TYPE_CHECKING:
    from checkpoints_zoo.networks.ensemble.executions import Runner

_MOST = 4  # shapes of inputs; each graph holds the memory of a member's activations
_WARM = 3  # runs before the capture: libraries choose their kernels then
Weights = list[Tensor | None]


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
        while len(self.kept) > _MOST:
            self.kept.popitem(last=False)
        return self.kept[key]


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
        for _ in range(_WARM):
            member()
    torch.cuda.current_stream(inputs.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = member()
    return _Graph(graph, held, weights, logits)
