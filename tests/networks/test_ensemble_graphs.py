"""CUDA graphs and the GPU's forms of convolutions, without a GPU: a stand-in records the work and does it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.ensemble import executions, graphs
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.ensemble.executions import GROUPED_FORMS, Choice, Runner
from checkpoints_zoo.networks.ensemble.graphs import pack_members
from checkpoints_zoo.networks.ensemble.program import (
    ConvolutionAndRelu,
    Program,
    choose_foldable_norms,
    join_groups,
)
from checkpoints_zoo.networks.modules import build_architecture


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
    def graph(of: Graph, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        current.append(of)
        yield
        current.pop()

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        yield

    run = Program.run

    def recorded(self: Program, *arguments: Any, **options: Any) -> Tensor:
        result = run(self, *arguments, **options)
        if current:
            current[-1].work = lambda: run(self, *arguments, **options)[0]
            current[-1].logits = result[0]
        return result

    Graph.captured = 0
    monkeypatch.setattr(Program, "run", recorded)
    for name, value in {"CUDAGraph": Graph, "graph": graph, "Stream": Stream, "stream": stream,
                        "current_stream": lambda _: Stream(), "device": lambda _: nullcontext()}.items():  # fmt: skip
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
        assert len(runner.graphs.captured) == graphs._MOST_CACHED_GRAPHS
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


def relu_of_convolution(x: Tensor, kernel: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    return F.relu(F.conv2d(x, kernel, bias, *arguments))


def relu_of_sum(x: Tensor, kernel: Tensor, added: Tensor, alpha: float, bias: Tensor | None, *arguments: Any) -> Tensor:
    return F.relu(F.conv2d(x, kernel, bias, *arguments) + alpha * added)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for cuDNN's kernels of a convolution and a ReLU."""
    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu_of_convolution)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", relu_of_sum)


class PreActivation(nn.Module):
    """Two of four convolutions can be joined: another is read twice, and one stands before what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.first, self.late = (nn.Conv2d(1, 4, 3, padding=1) for _ in range(3))
        self.second, self.end = nn.Conv2d(4, 4, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        early, first = self.early(x), self.first(x)
        y = F.relu(first + self.second(F.relu(first)))
        y = F.relu(early + F.relu(self.late(x) + y))
        return self.end(y.mean((2, 3)))


def build_on_8_pixels(name: str) -> nn.Module:
    if name == "pre-activation":
        return PreActivation().eval()
    arguments = {"channels": 1, "classes": 10}
    return build_architecture(name, **arguments).eval()


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(("name", "fused"), [("resnet18", 17), ("convnet", 2), ("resnet8", 7), ("pre-activation", 2)])
def test_a_convolution_is_joined_with_the_relu_that_alone_reads_it(name: str, fused: int) -> None:
    torch.manual_seed(0)
    module = build_on_8_pixels(name)
    x = torch.randn(2, 1, 8, 8)
    stacked = {n: t[None] for n, t in module.state_dict().items()}
    program = derive_program(module, 4)
    assert program is not None
    norms = choose_foldable_norms(program.norms, stacked)
    joined = program.with_fused_relus(norms)
    assert sum(isinstance(step.compute, ConvolutionAndRelu) for step in joined.steps) == fused
    with torch.no_grad():
        logits = joined.run_one(joined.prepare(stacked, norms), x)
        torch.testing.assert_close(logits, module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 4, 6, 7])
@pytest.mark.parametrize("most_channels", [0, 4, 9, 64])
def test_joined_groups_convolve_alike(groups: int, most_channels: int) -> None:
    torch.manual_seed(0)
    kernel, x = torch.randn(groups * 2, 3, 3, 3, dtype=torch.float64), torch.randn(2, groups * 3, 5, 5).double()
    joined = join_groups(kernel, groups, most_channels)
    assert joined.shape[1] <= max(3, most_channels)
    wanted = F.conv2d(x, kernel, groups=groups)
    torch.testing.assert_close(F.conv2d(x, joined, groups=x.shape[1] // joined.shape[1]), wanted)


@pytest.mark.parametrize("form", GROUPED_FORMS)
@pytest.mark.parametrize("members_at_once", [3, 8])
@pytest.mark.parametrize("name", ["resnet8-digits", "convnet-digits"])
def test_forms_of_grouped_convolutions_equal_a_loop(name: str, members_at_once: int, form: tuple[bool, int]) -> None:
    members = zoo.load(name, n=8)
    x = members.preprocess(zoo.images.load("digits").images[:5])
    runner = Runner(members._skeleton(), members.stack(dtype=torch.float32))
    with torch.no_grad():
        logits = runner.run(Choice("grouped", members_at_once, *form), runner.program(x), x)
        wanted = torch.stack([member.model()(x) for member in members])
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("channels_last", [False, True])
def test_packed_rows_hold_what_the_program_reads(channels_last: bool) -> None:
    """Members whose norms can't be folded lie apart, so that they change nothing for the others."""
    members = zoo.load("resnet8-digits", n=5)
    stacked = members.stack(dtype=torch.float32)
    mean = next(n for n in stacked if n.endswith("running_mean"))
    stacked[mean][2] = 1e6
    program = derive_program(members._skeleton(), 4)
    assert program is not None
    groups = list(pack_members(program, stacked, 10, channels_last))
    assert sorted(i for group in groups for i in group.positions) == [10, 11, 12, 13, 14]
    assert [12] in [group.positions for group in groups]
    for group in groups:
        for row, position in zip(group.rows, group.positions, strict=True):
            one = {n: t[position - 10 : position - 9] for n, t in stacked.items()}
            norms = choose_foldable_norms(program.norms, one)
            assert norms == group.folded_norms
            wanted = program.prepare(one, norms, channels_last)
            found = [None if place is None else place.view(row[None])[0] for place in group.places]
            for t, w in zip(found, wanted, strict=True):
                assert (t is None) == (w is None)
                if t is not None and w is not None:
                    assert torch.equal(t, w)
                    assert t.stride() == w.stride() or t.numel() <= 1 or 1 in t.shape


def test_the_fastest_choice_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("convnet-digits", n=8)
    x = members.preprocess(zoo.images.load("digits").images[:3])
    runner = Runner(members._skeleton(), members.stack(dtype=torch.float32))
    seconds = {Choice("graph"): 8.0, Choice("grouped", 8): 3.0, Choice("grouped", 8, True): 2.0}
    now, runs = [0.0], []

    def run(self: Runner, choice: Choice, program: Program, inputs: Tensor) -> Tensor:
        runs.append(choice)
        if choice.joined_channels:
            raise torch.OutOfMemoryError
        now[0] += seconds[choice]
        return torch.zeros(8, 3, 10)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(Runner, "can_time_choices", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(executions, "clock", lambda: now[0])
    with torch.no_grad():
        assert runner.choose(x)[0] == Choice("grouped", 8, True)
        timed = len(runs)
        assert {choice.execution for choice in runs} == {"graph", "grouped"}
        assert runner.choose(x)[0] == Choice("grouped", 8, True)
        assert len(runs) == timed
        runner.max_at_once = 3
        assert runner.choose(x)[0] == Choice("grouped", 3, True)
