"""Averages of a member's weights along its training, and the weights that a member is stored with."""

from __future__ import annotations

import torch

from checkpoints_zoo.images import ImageData
from checkpoints_zoo.populations.statistics import has_statistics, reestimate
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.recipe import Recipe


def average(recipe: Recipe, step: int, each: int, params: Tensors, buffers: Tensors, averages: Tensors) -> None:
    """Bring the averages up to date after a step, in place.

    Sources: "ema", the exponential moving average of all weights and buffers after each step; "swa", the mean of the
    weights after each epoch (Izmailov et al. 2018, algorithm 1). Both as torch.optim.swa_utils.AveragedModel.

    Args:
        recipe: that says which average.
        step: just taken, from 0.
        each: steps an epoch.
        params, buffers: after it, stacked.
        averages: by name, empty before the first.
    """
    epoch, left = divmod(step, each)
    if recipe.averaging == "none" or epoch < recipe.averaging_start:
        return
    if recipe.averaging == "swa":
        if left == each - 1:
            share = 1 / (epoch - recipe.averaging_start + 1)
            _towards(params, share, averages)
    else:
        first = step == recipe.averaging_start * each
        _towards(params | buffers, 1.0 if first else 1 - recipe.averaging_decay, averages)


def _towards(tensors: Tensors, share: float, averages: Tensors) -> None:
    """Move averages a share of the way to tensors; what isn't a fraction, such as a counter, is taken over."""
    moved = [name for name, tensor in tensors.items() if share < 1.0 and tensor.is_floating_point()]
    averages.update({name: tensor.clone() for name, tensor in tensors.items() if name not in moved})
    if moved:
        torch._foreach_lerp_([averages[name] for name in moved], [tensors[name] for name in moved], share)


def stored(recipe: Recipe, params: Tensors, buffers: Tensors, averages: Tensors, data: ImageData) -> Tensors:
    """Return the weights and buffers that members are stored with, stacked: the averages, where there are some.

    Running statistics are nobody's after "swa"; they are estimated anew on the training images, in their order.

    Args:
        recipe: of the members.
        params, buffers, averages: by name, stacked.
        data: the training split.
    """
    tensors = params | buffers | averages
    module = recipe.skeleton().eval()
    if recipe.averaging != "swa" or not averages or not has_statistics(module):
        return tensors
    device = next(iter(params.values())).device
    size = recipe.batch_size
    batches = (data.images[first : first + size] for first in range(0, len(data) // size * size, size))
    return tensors | reestimate(module, tensors, (recipe.preprocess(pixels.to(device)) for pixels in batches))
