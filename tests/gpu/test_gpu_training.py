"""Training on a GPU: a member is a function of its seed, close to the CPU's; steps are captured, and none waits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints_zoo import images
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.training.captured_step import CapturedStep
from checkpoints_zoo.training.loop import StackState, initial_state, train_epochs
from checkpoints_zoo.training.optimizers import optimizer_step, update_averages
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SMALL = dataclasses.replace(
    resnet8_digits(), name="small", arguments={"widths": (4, 4, 4)}, epochs=2, stack_width=3, augmentation="crop4-flip"
)
CONVNET = dataclasses.replace(convnet_digits(), name="small", epochs=2, stack_width=3, snapshots=())
RECIPES = {
    "stack": SMALL,
    "stack-bfloat16": dataclasses.replace(SMALL, precision="bfloat16"),
    "alone": dataclasses.replace(SMALL, stack_width=1, channels_last=True, precision="bfloat16"),
    "float16": dataclasses.replace(SMALL, stack_width=1, precision="float16"),
    "convnet": CONVNET,
    "averaged": dataclasses.replace(SMALL, stack_width=1, averaging="ema", averaging_decay=0.9),
    "adam": dataclasses.replace(CONVNET, optimizer="adam", lr=0.01),
    "adamw-warmup": dataclasses.replace(CONVNET, optimizer="adamw", lr=0.01, stack_width=1, warmup_epochs=1),
    "one-cycle": dataclasses.replace(
        CONVNET, schedule="one-cycle", schedule_unit="step", milestones=(), nesterov=True, stack_width=1
    ),
}
FAILING = {
    "diverging": dataclasses.replace(SMALL, lr=1e30, stack_width=2),
    "float16-stack": dataclasses.replace(CONVNET, precision="float16", stack_width=2),
}


def part() -> ImageData:
    """The first inputs of the training split, three steps of them."""
    data = images.load("digits", "train")
    assert data.labels is not None
    return dataclasses.replace(data, images=data.images[:96], labels=data.labels[:96])


def trained(recipe: Recipe, members: list[int], device: torch.device) -> StackState:
    state = initial_state(recipe, members).to(device)
    assert list(train_epochs(recipe, members, state, part())) == [1, 2]
    return state


@cache
def trained_on_gpu(name: str) -> StackState:
    """The members 5, 6, … of a recipe; several tests look at them."""
    return trained(RECIPES[name], [5, 6, 7][: RECIPES[name].stack_width], GPU)


@pytest.mark.parametrize("name", ["stack", "stack-bfloat16", "convnet", "averaged", "one-cycle"])
def test_a_member_is_a_function_of_its_seed(name: str) -> None:
    recipe = RECIPES[name]
    one, other = trained_on_gpu(name), trained(recipe, [5, 2, 3][: recipe.stack_width], GPU)
    for group in ("params", "momentum", "buffers", "averages"):
        for key, tensor in getattr(one, group).items():
            assert torch.equal(tensor[0], getattr(other, group)[key][0]), f"{group}/{key}"


@pytest.mark.parametrize("name", ["stack", "convnet", "averaged"])
def test_close_to_the_cpus(name: str) -> None:
    """Within 1e-3 of the largest after six steps in float32: other kernels."""
    recipe = RECIPES[name]
    here, there = trained_on_gpu(name), trained(recipe, [5, 6, 7][: recipe.stack_width], torch.device("cpu"))
    for key, tensor in there.params.items():
        bound = 1e-3 * max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(here.params[key].cpu(), tensor, rtol=0.0, atol=bound, msg=key)


def capture_nothing(step: CapturedStep) -> None:
    """Stands for CapturedStep._capture: each operation of each step runs for itself."""


def assert_equal_states(one: StackState, other: StackState) -> None:
    for group in ("params", "momentum", "buffers", "averages", "scaling", "adam"):
        for key, tensor in getattr(one, group).items():
            torch.testing.assert_close(
                tensor, getattr(other, group)[key], rtol=0.0, atol=0.0, equal_nan=True, msg=f"{group}/{key}"
            )
    torch.testing.assert_close(one.loss, other.loss, rtol=0.0, atol=0.0, equal_nan=True)
    assert torch.equal(one.failed_step, other.failed_step)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graph of each captured step, None for steps that could not be captured."""
    found: list[object] = []
    start_epoch = CapturedStep.start_epoch

    def recorded(self: CapturedStep, *inputs: torch.Tensor) -> None:
        start_epoch(self, *inputs)
        found.append(self.graph)

    monkeypatch.setattr(CapturedStep, "start_epoch", recorded)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_gives_the_bits_of_its_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, recipe = trained_on_gpu(name), RECIPES[name]
    monkeypatch.setattr(CapturedStep, "_capture", capture_nothing)
    assert_equal_states(captured, trained(recipe, [5, 6, 7][: recipe.stack_width], GPU))
    assert int(captured.failed_step.max()) == -1


@pytest.mark.parametrize("name", ["diverging", "float16-stack"])
def test_a_captured_step_fails_as_its_operations_do(
    name: str, monkeypatch: pytest.MonkeyPatch, graphs: list[object]
) -> None:
    """Losses that are not finite, and a member that skips steps because its gradients overflow."""
    recipe = FAILING[name]
    states = []
    for is_captured in (True, False):
        if not is_captured:
            monkeypatch.setattr(CapturedStep, "_capture", capture_nothing)
        state = initial_state(recipe, [5, 6]).to(GPU)
        if state.scaling:
            state.scaling["scale"][1] = 2.0**120
        list(train_epochs(recipe, [5, 6], state, part()))
        states.append(state)
    assert_equal_states(*states)
    assert graphs[0] is not None
    if name == "diverging":
        assert states[0].failed_step.tolist() == [1, 1]
    else:
        assert states[0].scaling["scale"].tolist() == [65536.0, 2.0**114]
        assert states[0].scaling["steps"].tolist() == [6, 0]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_are_captured_and_none_waits(name: str, monkeypatch: pytest.MonkeyPatch, graphs: list[object]) -> None:
    """From the end of an epoch's first step to the end of its last."""
    recipe, steps = RECIPES[name], list[int]()

    def watched(recipe: Recipe, step: int, *rest: Any) -> None:
        update_averages(recipe, step, *rest)
        steps.append(step)
        torch.cuda.set_sync_debug_mode("error" if step in (0, 1) else "default")

    monkeypatch.setattr("checkpoints_zoo.training.loop.update_averages", watched)
    state = initial_state(recipe, list(range(recipe.stack_width))).to(GPU)
    try:
        epochs = train_epochs(recipe, list(range(recipe.stack_width)), state, part())
        assert next(epochs) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps == [0, 1, 2]
    assert None not in graphs


class Asking(nn.Module):
    """A network whose step waits for the GPU: a value decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images.flatten(1)
        return self.layer(features if features.sum().item() > 0 else -features)


class Counting(nn.Module):
    """A network that gives other logits in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 10), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(images.flatten(1)) * self.calls


def own_recipe(build: Callable[[], nn.Module]) -> Recipe:
    return dataclasses.replace(
        convnet_digits(), name="own", architecture="own", arguments={}, build=build, stack_width=1, epochs=2
    )


@pytest.mark.parametrize(("network", "reason"), [(Asking, ""), (Counting, "its replay gives other bits")])
def test_a_step_that_can_not_be_captured_runs_as_it_is(
    network: type[nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = own_recipe(network)
    with pytest.warns(UserWarning, match=f"a training step can't be captured as a CUDA graph.*{reason}") as warned:
        captured = trained(recipe, [5], GPU)
    assert len(warned) == 1
    if network is Asking:
        monkeypatch.setattr(CapturedStep, "_capture", capture_nothing)
        assert_equal_states(captured, trained(recipe, [5], GPU))
    assert torch.rand(3, device=GPU).isfinite().all()  # A failed capture leaves the generator as it was.


def test_a_network_that_draws_is_not_captured(graphs: list[object]) -> None:
    """Each step has its own seed, so two runs are equal, and another seed gives other weights."""
    recipe = own_recipe(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)))
    one, other = trained(recipe, [5], GPU), trained(recipe, [5], GPU)
    assert_equal_states(one, other)
    assert not graphs
    assert not torch.equal(one.params["2.weight"], trained(recipe, [6], GPU).params["2.weight"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_fused_step_is_torchs_sgd(nesterov: bool) -> None:
    """Within 1e-6 of torch.optim.SGD on the CPU, after three steps of one member."""
    recipe = dataclasses.replace(SMALL, stack_width=1, nesterov=nesterov, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(1, 40, 3, generator=generator)
    params, momentum = {"w": wanted.to(GPU)}, {"w": torch.zeros(1, 40, 3, device=GPU)}
    weight = nn.Parameter(wanted.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=recipe.momentum, weight_decay=0.01, nesterov=nesterov)
    for _ in range(3):
        weight.grad = torch.randn(1, 40, 3, generator=generator)
        optimizer_step(
            recipe, torch.tensor(0.1, dtype=torch.float64, device=GPU), params, momentum, {}, {"w": weight.grad.to(GPU)}
        )
        optimizer.step()
    torch.testing.assert_close(params["w"].cpu(), weight.detach(), rtol=0.0, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_second_gpu_trains_the_same_members() -> None:
    recipe = dataclasses.replace(SMALL, stack_width=2)
    first, second = (trained(recipe, [5, 6], torch.device("cuda", index)) for index in (0, 1))
    for key, tensor in first.params.items():
        assert torch.equal(tensor.cpu(), second.params[key].cpu()), key


@pytest.mark.skipif("SIM_DEVICES" in os.environ, reason="for simulated cards nothing is compiled")
def test_compiled() -> None:
    recipe = dataclasses.replace(SMALL, stack_width=1, compile=True)
    plain = dataclasses.replace(recipe, compile=False)
    one, other = trained(recipe, [5], GPU), trained(plain, [5], GPU)
    for key, tensor in other.params.items():
        torch.testing.assert_close(one.params[key], tensor, rtol=0.0, atol=1e-2 * max(1.0, float(tensor.abs().max())))
