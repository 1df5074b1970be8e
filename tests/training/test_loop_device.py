"""What a step asks of a device, as far as the CPU can tell: nothing that waits for a GPU, tensors laid out alike."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints_zoo.images import Preprocess
from checkpoints_zoo.training import gradients
from checkpoints_zoo.training.gradients import stack_gradient
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, recipe_by_name, resnet8_digits
from checkpoints_zoo.training.seeds import seed_torch
from tests.training.test_loop import part

# They wait until a GPU has computed what they read, or until it has read what the CPU holds.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "equal",
    "lift_fresh",
    "unique",
}
SMALL = dataclasses.replace(resnet8_digits(), name="small", epochs=1, batch_size=8, arguments={"widths": (2, 2, 2)})


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"stack_width": 2, "augmentation": "crop4-flip"},
        {"stack_width": 1, "channels_last": True, "augmentation": "crop4-flip"},
        {"stack_width": 2, "precision": "float16"},
        {"stack_width": 1, "precision": "bfloat16", "label_smoothing": 0.1},
        {"stack_width": 2, "averaging": "ema", "nesterov": True},
    ],
)
def test_no_step_waits_for_the_device(changes: dict[str, Any]) -> None:
    """An epoch of four steps asks no more often than one of two."""
    recipe, asked = dataclasses.replace(SMALL, **changes), []
    for steps in (2, 4):
        members = list(range(recipe.stack_width))
        state = initial_state(recipe, members)
        with Calls() as calls:
            list(train_epochs(recipe, members, state, part(steps * recipe.batch_size)))
        assert calls.counts["convolution_backward"] > steps
        asked.append({name: calls.counts[name] for name in WAITS})
    assert asked[0] == asked[1]


def test_the_count_sees_a_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here what pixels become is brought anew each time, as a call of Preprocess brings its statistics."""
    monkeypatch.setattr(Preprocess, "on", lambda self, device: lambda pixels: torch.tensor(0.0) + pixels)
    recipe, asked = dataclasses.replace(SMALL, stack_width=2), []
    for steps in (2, 4):
        state = initial_state(recipe, [0, 1])
        with Calls() as calls:
            list(train_epochs(recipe, [0, 1], state, part(steps * recipe.batch_size)))
        asked.append(calls.counts["lift_fresh"])
    assert asked[1] - asked[0] == 2


@pytest.mark.parametrize(("name", "width"), [("resnet18-cifar10", 1), ("resnet20-frn-silu-cifar10", 2)])
def test_gradients_are_laid_out_as_their_parameters(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a step of all tensors is a few kernels; with other strides it is some for each."""
    recipe = dataclasses.replace(recipe_by_name(name), stack_width=width, precision="float32")
    state = initial_state(recipe, list(range(width)))
    found, _, _ = stack_gradient(recipe, list(range(width)), torch.device("cpu"))(
        0, state.params, state.buffers, state.scaling, torch.randn(width, 2, 3, 8, 8), torch.zeros(width, 2).long()
    )
    assert {n: g.stride() for n, g in found.items()} == {n: p.stride() for n, p in state.params.items()}
    assert {n: t.stride() for n, t in state.momentum.items()} == {n: p.stride() for n, p in state.params.items()}


def noisy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))


def test_noise_is_that_of_torchs_generator() -> None:
    """As after torch.manual_seed, and the caller's numbers go on as if nothing had been drawn."""
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    following = torch.rand(2)
    torch.manual_seed(1)
    with seed_torch(7, torch.device("cpu")):
        assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(torch.rand(2), following)


def test_one_alone_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: Recipe = dataclasses.replace(
        convnet_digits(), name="small", architecture="noisy", arguments={}, build=noisy, stack_width=1, epochs=1
    )
    states = []
    for _ in range(2):
        state = initial_state(recipe, [3])
        list(train_epochs(recipe, [3], state, part(64)))
        states.append(state.params)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    monkeypatch.setattr(gradients, "seed_torch", lambda seed, device: seed_torch(0, device))
    state = initial_state(recipe, [3])
    list(train_epochs(recipe, [3], state, part(64)))
    assert not torch.equal(state.params["2.weight"], states[0]["2.weight"])
