"""CUDA graphs, their logic without a GPU: a stand-in records the work and does it again when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.ensemble import executions
from checkpoints_zoo.networks.ensemble.executions import Runner
from checkpoints_zoo.networks.ensemble.program import Program


class Stream:
    def __init__(self, device: object = None) -> None: ...
    def wait_stream(self, other: object) -> None: ...


class Graph:
    """What a captured graph does: the same work on the same memory."""

    captured = 0

    def __init__(self) -> None:
        Graph.captured += 1
        self.work: Callable[[], Tensor] | None = None
        self.logits: Tensor | None = None

    def replay(self) -> None:
        assert self.work is not None
        assert self.logits is not None
        self.logits.copy_(self.work())


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Graph] = []

    @contextmanager
    def graph(of: Graph) -> Iterator[None]:
        current.append(of)
        yield
        current.pop()

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        yield

    run = Program.run

    def recorded(self: Program, *arguments: Any) -> Tensor:
        result = run(self, *arguments)
        if current:
            current[-1].work = lambda: run(self, *arguments)[0]
            current[-1].logits = result[0]
        return result

    Graph.captured = 0
    monkeypatch.setattr(Program, "run", recorded)
    for name, value in {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "stream": stream,
                        "current_stream": lambda device: Stream()}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(executions, "check_execution", lambda *_: None)


@pytest.mark.usefixtures("capturing")
def test_a_graph_is_captured_once_a_shape_and_replayed_for_each_member() -> None:
    members = zoo.load("resnet8-digits", n=2)
    x = members.preprocess(zoo.images.load("digits").images[:15])
    runner = Runner(members._skeleton(), members.stack(dtype=torch.float32), "graph")
    plain = members.ensemble(execution="loop")
    with torch.no_grad():
        for piece in (x[:6], x[6:12], x[12:], x[:6]):
            wanted = plain(piece)
            assert (runner(piece) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert Graph.captured == 2
        for batch in range(1, 8):  # the last few are kept
            runner(x[:batch])
        assert len(runner.graphs.captured) == executions._MOST_CACHED_GRAPHS
        runner.stacked["fc.bias"].add_(1)  # type: ignore[index]
        assert (runner(x[:6]) - plain(x[:6]) - 1).abs().max() <= 1e-4


@pytest.mark.usefixtures("capturing")
def test_a_graph_gives_no_gradients() -> None:
    members = zoo.load("resnet8-digits", n=2)
    x = members.preprocess(zoo.images.load("digits").images[:3]).requires_grad_()
    runner = Runner(members._skeleton(), members.stack(dtype=torch.float32), "graph")
    with pytest.raises(UsageError) as caught:
        runner(x)
    assert str(caught.value) == (
        "execution 'graph': expected no gradients to be wanted; found inputs or weights that require them. Take None,"
        " or call the ensemble under torch.no_grad()."
    )
