"""On a GPU: every execution against a loop over modules, weights from shards against the CPU's, memory too short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.collection import transfer
from checkpoints_zoo.errors import DamagedError, SmallerChunk
from checkpoints_zoo.networks.ensemble import EXECUTIONS
from checkpoints_zoo.networks.ensemble.executions import GROUPED_FORMS, Runner, candidate_choices
from tests.support.scenarios import State, build, load, raw

pytestmark = pytest.mark.gpu
GPU = "cuda"
seconds_per_member = Runner.seconds_per_member  # Tests on simulated cards replace it.


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 convolutions from TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_executions_equal_a_loop_over_modules(name: str) -> None:
    members = zoo.load(name, n=3)
    batches = [members.preprocess(zoo.images.load("digits").images[:batch]) for batch in (1, 9)]
    with torch.inference_mode():
        models, on_cpu = [m.model(GPU) for m in members], members.ensemble()
        wanted = [torch.stack([model(x.to(GPU)) for model in models]) for x in batches]
        # Chunks are cut alike for all; a graph is captured for the last, smaller one too.
        for execution, chunk in (*((execution, None) for execution in (*EXECUTIONS, None)), ("loop", 2), ("graph", 2)):
            ens = members.ensemble(GPU, execution=execution, chunk=chunk)
            for x, right in [*zip(batches, wanted, strict=True)] * 2:
                logits = ens(x.to(GPU))
                assert logits.device.type == GPU
                assert (logits - right).abs().max() <= 1e-5 * right.abs().max(), (execution, chunk, len(x))
        for x, right in zip(batches, wanted, strict=True):
            assert (on_cpu(x) - right.cpu()).abs().max() <= 1e-5 * right.abs().max()


def test_each_choice_that_is_timed_gives_the_logits() -> None:
    members = zoo.load("resnet8-digits", n=4)
    x = members.preprocess(zoo.images.load("digits").images[:9]).to(GPU)
    runner = Runner(members._skeleton(), members.stack(GPU, torch.float32))
    with torch.inference_mode():
        wanted, program = members.ensemble(GPU, execution="module")(x), runner.program(x)
        assert program is not None
        choices = candidate_choices(runner.choose(x)[0], len(members), runner.weights, 1)
        assert len(choices) == 1 + len(GROUPED_FORMS)
        for choice in choices:
            assert (runner.run(choice, program, x) - wanted).abs().max() <= 1e-5 * wanted.abs().max(), choice
            assert 0 < seconds_per_member(runner, choice, program, x) < math.inf


def test_a_graph_serves_other_inputs_members_and_weights() -> None:
    members = zoo.load("resnet8-digits", n=5)
    x = members.preprocess(zoo.images.load("digits").images).to(GPU)
    ens = members.ensemble(GPU, execution="graph")
    plain = members.ensemble(GPU, execution="loop")
    with torch.no_grad():
        for piece in (x[:20], x[20:40], x[:7], x[40:60]):
            wanted = plain(piece)
            assert (ens(piece) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        ens.stacked["fc.bias"].add_(1)
        assert (ens(x[:20]) - plain(x[:20]) - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    members = zoo.load("resnet8-digits", n=3)
    x = members.preprocess(zoo.images.load("digits").images[:20])
    wanted = members.ensemble()(x)
    for execution in ("loop", "grouped", "graph"):
        with torch.no_grad():
            logits = members.ensemble(GPU, dtype, execution=execution)(x.to(GPU, dtype))
        assert (logits.float().cpu() - wanted).abs().max() <= 0.1 * wanted.abs().max()


@pytest.mark.parametrize(
    ("net", "small", "weights"),
    [
        ("convnet", True, torch.float16),
        ("convnet", True, torch.float32),
        ("convnet", True, torch.bfloat16),
        ("convnet", False, torch.float32),
        ("resnet8", False, torch.float16),
        ("mlp", True, torch.float32),
        ("mlp", False, torch.bfloat16),
    ],
)
def test_weights_on_the_device_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: str, small: bool, weights: torch.dtype
) -> None:
    if small:
        monkeypatch.setattr(transfer, "GROUP_BYTES", 40_000)
        monkeypatch.setattr(transfer, "PIECE_BYTES", 1_000)
    members = load(build(tmp_path, net, range(5), weights=weights, per_shard=3))
    for dtype in (None, torch.float32, torch.float16, torch.bfloat16):
        for chosen in (members, members[::-1], members[2:3]):
            on_cpu, found = chosen.stack("cpu", dtype), chosen.stack(GPU, dtype)
            assert {n: raw(t.cpu()) for n, t in found.items()} == {n: raw(t) for n, t in on_cpu.items()}, dtype
            assert all(t.device.type == GPU for t in found.values())


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    def spoil(member: int, state: State) -> None:
        if member == 3:
            state["fc1.bias"][2] = float("nan")

    members = load(build(tmp_path, members=range(5), change=spoil))
    with pytest.raises(DamagedError, match=r"^tensor 'fc1.bias' of member 3: expected finite weights; found 1 that"):
        members.stack(GPU, torch.float32)


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A true out-of-memory error halves the members side by side."""
    members = zoo.load("resnet8-digits", n=8)
    x = members.preprocess(zoo.images.load("digits").images[:9]).to(GPU)
    run = Runner.run

    def greedy(self: Runner, choice: object, *arguments: object) -> torch.Tensor:
        if choice.members_at_once > 2:  # type: ignore[attr-defined]
            torch.empty(2**50, device=GPU)
        return run(self, choice, *arguments)  # type: ignore[arg-type]

    wanted = members.ensemble(GPU)(x)
    monkeypatch.setattr(Runner, "run", greedy)
    with pytest.warns(SmallerChunk):
        found = members.ensemble(GPU, execution="grouped")(x)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
