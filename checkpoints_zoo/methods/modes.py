"""Train the members from which methods start, and find tied parameters and random buffers of their network.

Axes: stacked tensors are (run, *shape).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.formats.layout import is_counter, is_statistic
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.modules import first_names
from checkpoints_zoo.training.gradients import Gradient
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.optimizers import stored_tensors
from checkpoints_zoo.training.packing import device_name
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import seed_torch

Tensors = dict[str, Tensor]
FIRST_SEED = 1_000_000  # Seed of the first mode: no published member has this seed or a larger one.


def read_modes(path: Path) -> Tensors:
    """Read stored modes; return their states.

    Raises:
        DamagedError: the file is cut, or was not written by this package.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        advice = "Delete it: the modes are then trained again"
        raise DamagedError(f"modes {path}", expected="a safetensors file", found=str(error), do=advice) from error


def train_modes(
    recipe: Recipe,
    images: ImageData,
    runs: int,
    device: torch.device,
    description: str,
    make_gradient: Callable[[Recipe, Sequence[int]], Gradient] | None = None,
) -> Tensors:
    """Train members with seeds from 1,000,000 on, side by side where the recipe allows; return their states on the CPU.

    Args:
        recipe: recipe of the members.
        images: training images.
        runs: number of members.
        device: device to train on.
        description: description of the members, for error texts.
        make_gradient: function of a recipe and seeds, which returns the function that computes a step's gradients;
            None for the recipe's function.

    Raises:
        UsageError: a training loss was not finite.
    """
    width = 1 if recipe.stack_width == 1 else runs
    recipe = replace(recipe, stack_width=width, snapshots=(), eval_every=0)
    stacks: list[Tensors] = []
    for first_run in range(0, runs, width):
        member_ids = range(FIRST_SEED + first_run, FIRST_SEED + first_run + width)
        state = initial_state(recipe, member_ids).to(device)
        for _ in train_epochs(
            recipe, member_ids, state, images, None if make_gradient is None else make_gradient(recipe, member_ids)
        ):
            pass
        if bool((state.failed_step >= 0).any()):
            raise UsageError(description, expected="finite losses", found="others", do="Lower lr of the recipe")
        final_tensors = stored_tensors(recipe, state.params, state.buffers, state.averages, images)
        stacks.append({name: final_tensors[name].detach().cpu() for name in (*state.params, *state.buffers)})
    return {name: torch.cat([stack[name] for stack in stacks]).contiguous() for name in stacks[0]}


def gpu_name(device: torch.device | str) -> str:
    """Return the name of a GPU, which is a part of keys because bits depend on it; "" for a processor.

    The name of a processor is no part of keys, so that a folder may be moved to another machine.
    """
    device = torch.device(device)
    return "" if device.type == "cpu" else device_name(device)


def tied_names(network: nn.Module) -> dict[str, str]:
    """Find tied parameters; return further name in the state dict -> first name, under which the parameter is trained.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> net[1].weight = net[0].weight
    >>> tied_names(net)
    {'1.weight': '0.weight'}
    """
    parameters = dict(network.named_parameters())
    return {
        name: first_name
        for name, first_name in first_names(network).items()
        if name != first_name and first_name in parameters
    }


def find_random_buffer(build: Callable[[], nn.Module], device: torch.device) -> str:
    """Find a buffer whose values differ each time the network is built; return its name, or "" if there is none.

    Running statistics do not count.

    Args:
        build: function that builds the network from torch's generator; the generator's state is restored.
        device: device that the network is built on.
    """
    buffers_of_builds: list[Tensors] = []
    for seed in (0, 1):
        with seed_torch(seed, device):
            buffers_of_builds.append(dict(build().named_buffers()))
    buffer_names = [name for name in buffers_of_builds[0] if not is_counter(name) and not is_statistic(name)]
    return next(
        (name for name in buffer_names if not torch.equal(buffers_of_builds[0][name], buffers_of_builds[1][name])), ""
    )
