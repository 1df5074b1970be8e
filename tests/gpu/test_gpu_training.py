"""Training on a GPU: a member is a function of its seed there too, close to the CPU's, and no step waits for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpoints_zoo import images
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.training.gradients import stack_gradient
from checkpoints_zoo.training.loop import StackState, initial_state, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
SMALL = dataclasses.replace(resnet8_digits(), name="small", epochs=2, stack_width=3, augmentation="crop4-flip")
RECIPES = {
    "stack": SMALL,
    "stack-bfloat16": dataclasses.replace(SMALL, precision="bfloat16"),
    "alone": dataclasses.replace(SMALL, stack_width=1, channels_last=True, precision="bfloat16"),
    "float16": dataclasses.replace(SMALL, stack_width=1, precision="float16"),
    "convnet": dataclasses.replace(convnet_digits(), name="small", epochs=2, stack_width=3),
    "averaged": dataclasses.replace(SMALL, averaging="ema", averaging_decay=0.9),
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_member_is_a_function_of_its_seed(name: str) -> None:
    recipe = RECIPES[name]
    width = recipe.stack_width
    one, other = trained(recipe, [5, 6, 7][:width], GPU), trained(recipe, [5, 2, 3][:width], GPU)
    for group in ("params", "momentum", "buffers", "averages"):
        for key, tensor in getattr(one, group).items():
            assert torch.equal(tensor[0], getattr(other, group)[key][0]), f"{group}/{key}"


@pytest.mark.parametrize("name", ["stack", "convnet", "averaged"])
def test_close_to_the_cpus(name: str) -> None:
    """Within 1e-3 of the largest after six steps in float32: other kernels."""
    recipe = RECIPES[name]
    here, there = trained(recipe, [5, 6, 7], GPU), trained(recipe, [5, 6, 7], torch.device("cpu"))
    for key, tensor in there.params.items():
        bound = 1e-3 * max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(here.params[key].cpu(), tensor, rtol=0.0, atol=bound, msg=key)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_no_step_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, steps = RECIPES[name], list[int]()

    def watched(*arguments: Any) -> Callable[..., Any]:
        gradient = stack_gradient(*arguments)

        def called(step: int, *rest: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error" if step in (1, 2) else "default")  # until the next step of an epoch
            steps.append(step)
            return gradient(step, *rest)

        return called

    monkeypatch.setattr("checkpoints_zoo.training.loop.stack_gradient", watched)
    state = initial_state(recipe, list(range(recipe.stack_width))).to(GPU)
    try:
        epochs = train_epochs(recipe, list(range(recipe.stack_width)), state, part())
        assert next(epochs) == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch 2.11's own
def test_compiled() -> None:
    recipe = dataclasses.replace(SMALL, stack_width=1, compile=True)
    plain = dataclasses.replace(recipe, compile=False)
    one, other = trained(recipe, [5], GPU), trained(plain, [5], GPU)
    for key, tensor in other.params.items():
        torch.testing.assert_close(one.params[key], tensor, rtol=0.0, atol=1e-2 * max(1.0, float(tensor.abs().max())))
