"""Memory that runs out, under every name that CUDA's libraries give it: the ensemble takes fewer members at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SmallerChunk, TooLargeError
from checkpoints_zoo.networks.ensemble import executions
from tests.simgpu.faults import OUT_OF_MEMORY, failing

pytestmark = pytest.mark.simgpu
NAMES = ("allocator", "cudnn")  # test_is_out_of_memory knows them all


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 convolutions from TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", NAMES)
def test_members_side_by_side_are_halved(name: str) -> None:
    members = zoo.load("resnet8-digits", n=8)
    x = members.preprocess(zoo.images.load("digits").images[:3]).to("cuda")

    def is_wide(inputs: Tensor, kernel: Tensor, *rest: object) -> bool:
        return len(kernel) > 64  # more than two members of the first stage

    with torch.no_grad():
        wanted = members.ensemble("cuda", execution="loop")(x)
        ensemble = members.ensemble("cuda", execution="grouped")
        with failing("convolution", OUT_OF_MEMORY[name], is_wide), pytest.warns(SmallerChunk):
            found = ensemble(x)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(("name", "execution"), [("allocator", "loop"), ("cudnn", "loop"), ("cublas", "graph")])
def test_not_even_one_member_fits(name: str, execution: str) -> None:
    members = zoo.load("resnet8-digits", n=2)
    x = members.preprocess(zoo.images.load("digits").images[:9]).to("cuda")
    ensemble = members.ensemble("cuda", execution=execution)
    with torch.no_grad():
        ensemble(x[:3])  # the trial has passed
        with (
            failing("convolution", OUT_OF_MEMORY[name], lambda inputs, *rest: len(inputs) == 9),
            pytest.raises(TooLargeError),
        ):
            ensemble(x)
        assert torch.isfinite(ensemble(x)).all()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_memory_that_ends_during_a_capture(name: str) -> None:
    """torch raises another error where the capture ends; the one of memory is what the caller sees."""
    members = zoo.load("resnet8-digits", n=2)
    x = members.preprocess(zoo.images.load("digits").images[:9]).to("cuda")
    ensemble = members.ensemble("cuda", execution="graph")

    def in_capture(*arguments: object) -> bool:
        return torch.cuda.is_current_stream_capturing()

    with torch.no_grad(), failing("convolution", OUT_OF_MEMORY[name], in_capture), pytest.raises(TooLargeError):
        ensemble(x)


def test_is_out_of_memory() -> None:
    assert all(executions.is_out_of_memory(make()) for make in OUT_OF_MEMORY.values())
    for text in ("cuDNN error: CUDNN_STATUS_BAD_PARAM", "CUDA error: an illegal memory access was encountered"):
        assert not executions.is_out_of_memory(RuntimeError(text))
