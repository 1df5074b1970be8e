"""Steps of optimizers: the rate in a tensor."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from checkpoints_zoo.training.optimizers import first_adam_state, optimizer_step
from checkpoints_zoo.training.recipes import convnet_digits


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_rate_in_a_tensor_gives_the_bits_of_a_number(optimizer: str) -> None:
    """A captured step reads its rate from a float64 tensor; the rates here are no float32 numbers."""
    recipe = dataclasses.replace(convnet_digits(), optimizer=optimizer, nesterov=optimizer == "sgd", weight_decay=0.013)
    states = []
    for as_rate in (float, lambda rate: torch.tensor(rate, dtype=torch.float64)):
        generator = torch.Generator().manual_seed(0)
        params = {"w": torch.randn(3, 500, generator=generator), "b": torch.randn(3, 1, generator=generator)}
        momentum = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        adam = first_adam_state(recipe, params)
        for step in range(5):
            gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in params.items()}
            optimizer_step(recipe, as_rate(0.1 / (3 + step)), params, momentum, adam, gradients)
        states.append({**params, **{f"momentum/{name}": tensor for name, tensor in momentum.items()}, **adam})
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
