"""CUDA graphs where it is hard: beside a thread that reads members, in other modes, on another card, in other bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.collection import transfer
from checkpoints_zoo.networks.ensemble.executions import Trials
from checkpoints_zoo.predictions import running
from tests.support.few_digits import some

pytestmark = pytest.mark.gpu
GPU = "cuda"


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 convolutions from TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def resnets(n: int = 3) -> tuple[zoo.Collection, Tensor, Tensor]:
    """Return members, images for them on the first card, and the logits by the modules' own code."""
    members = zoo.load("resnet8-digits", n=n)
    x = members.preprocess(zoo.images.load("digits").images[:9])
    with torch.no_grad():
        return members, x.to(GPU), members.ensemble(GPU, execution="module")(x.to(GPU))


def assert_close(found: Tensor, wanted: Tensor, share: float = 1e-5) -> None:
    """Assert that logits differ by no more than a share of the largest; NaN differs."""
    assert (found.to(wanted.device) - wanted).abs().max() <= share * wanted.abs().max()


def test_members_are_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may allocate, send and wait meanwhile, as it does when an ensemble reads its next chunk."""
    members, x, wanted = resnets()
    end, errors = torch.cuda.CUDAGraph.capture_end, list[BaseException]()

    def read() -> None:
        try:
            members.stack(GPU, torch.float32)
        except RuntimeError as error:
            errors.append(error)

    def read_then_end(graph: Any) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        end(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", read_then_end)
    with torch.no_grad():
        found = members.ensemble(GPU, execution="graph")(x)
    assert errors == []
    assert_close(found, wanted)


def test_no_capture_is_on_a_stream_that_members_are_read_on() -> None:
    """torch has few streams, and hands each out again."""
    zoo.load("convnet-digits", n=1).stack(GPU)
    reading = {stream.stream.cuda_stream for stream in transfer._streams_of_device[torch.device(GPU, 0)]}
    assert len(reading) == 2
    assert not reading & {torch.cuda.Stream(GPU).cuda_stream for _ in range(64)}


def test_a_graph_captured_in_inference_mode_serves_outside_it() -> None:
    members, x, wanted = resnets()
    ensemble = members.ensemble(GPU, execution="graph")
    with torch.inference_mode():
        assert_close(ensemble(x), wanted)
    with torch.no_grad():
        assert_close(ensemble(x), wanted)
        ensemble.stacked["fc.bias"].add_(1)
        assert_close(ensemble(x) - 1, wanted, 1e-4)
    with torch.inference_mode():
        assert_close(ensemble(x) - 1, wanted, 1e-4)


@pytest.mark.parametrize("execution", ["module", "loop", "grouped", "vmap", "graph", None])
def test_a_card_that_is_not_the_current_one(execution: str | None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    members, x, wanted = resnets()
    with torch.no_grad():
        on_first = members.ensemble(GPU, execution=execution)  # its graphs are captured first
        assert_close(on_first(x), wanted)
        ensemble = members.ensemble("cuda:1", execution=execution)
        for inputs in (x, 2 * x, x):
            found = ensemble(inputs.to("cuda:1"))
            assert found.device == torch.device("cuda:1")
            assert_close(found, on_first(inputs))
    assert torch.cuda.current_device() == 0


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast(GPU, torch.bfloat16)


def tf32() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=True)


@pytest.mark.parametrize("way", [autocast, tf32])
def test_a_graph_is_replayed_only_as_it_was_captured(way: Callable[[], AbstractContextManager[Any]]) -> None:
    """Another precision is another graph, whichever comes first."""
    members, x, _ = resnets()
    for order in ((nullcontext, way), (way, nullcontext)):
        graph, loop = (members.ensemble(GPU, execution=execution) for execution in ("graph", "loop"))
        found = []
        with torch.no_grad():
            for context in (*order, *order):
                with context():
                    found.append((graph(x), loop(x)))
        for by_graph, by_loop in found:
            assert by_graph.dtype == by_loop.dtype
            assert_close(by_graph, by_loop, 1e-2 if by_loop.dtype == torch.bfloat16 else 1e-5)
        assert not torch.equal(found[0][0], found[1][0])


class Scaled(nn.Module):
    """A network without a program, which reads a buffer that no state dict holds."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = zoo.load("convnet-digits", n=1)._skeleton()
        self.register_buffer("scale", torch.full((64,), 2.0), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body((images.flatten(1) * self.scale).cumsum(1).view_as(images))
        return logits


def test_a_graph_keeps_what_it_reads() -> None:
    """Parts of an ensemble share graphs, though each part has buffers of its own."""
    members = zoo.load("convnet-digits", n=4)
    stacked = {f"body.{name}": tensor for name, tensor in members.stack(GPU, torch.float32).items()}
    x = members.preprocess(zoo.images.load("digits").images[:5]).to(GPU)
    skeleton = Scaled().eval().requires_grad_(False)

    def read(positions: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
        return {name: tensor[positions.start : positions.stop] for name, tensor in stacked.items()}

    with torch.no_grad():
        options: dict[str, Any] = {"device": torch.device(GPU, 0), "dtype": torch.float32}
        ensembles = [
            zoo.Ensemble.reading(skeleton, read, members.ids, chunk=1, execution=execution, **options)
            for execution in ("graph", "module")
        ]
        assert_close(ensembles[0](x), ensembles[1](x))


def test_the_fast_way_is_taken_with_tf32() -> None:
    """torch allows TF32 by default; a network's program is not found wrong for it."""
    members, x, wanted = resnets()
    Trials.of_skeleton(members._skeleton()).verdicts.clear()
    with tf32(), torch.no_grad():
        found = members.ensemble(GPU, execution="grouped")(x)  # refused where there is no program
    assert_close(found, wanted, 1e-2)


def test_groups_of_members_share_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes of inputs are two graphs, however many groups of members there are."""
    members = zoo.load("resnet8-digits", n=6)
    data = some("test", 50)
    wanted = predictions.logits(members, data, "cpu", batch=30)
    begin, begun = torch.cuda.CUDAGraph.capture_begin, list[object]()
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda self, *args, **options: begun.append(begin(self, *args, **options)),
    )
    monkeypatch.setattr(running, "GROUP_BYTES", 2 * 2 * members.nbytes // 6)
    assert running.group_size(members) == 2
    assert_close(predictions.logits(members, data, GPU, batch=30, execution="graph"), wanted)
    assert len(begun) == 2
