"""A network tried out before it is trained: what would go wrong in its first step goes wrong here, in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.own_code import running
from checkpoints_zoo.training.recipe import Recipe


def check_network(recipe: Recipe) -> None:
    """Check that a recipe's network gives float32 logits for its images, one a class, by two black images.

    torch's generator is left as it is.

    Raises:
        UsageError: it gives something else, or an error.
    """
    split, most = recipe.split("train"), min(2, recipe.batch_size)
    shape = (most, recipe.preprocess.channels, *recipe.preprocess.size)
    what = f"architecture {recipe.architecture!r} of recipe {recipe.name!r}"
    expected = f"float32 logits ({most}, {len(split.classes)}) for images {shape}"
    module = recipe.skeleton()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), running(what, expected):
        logits: Any = module(recipe.preprocess(torch.zeros(shape, dtype=torch.uint8)))
    fits = isinstance(logits, Tensor) and logits.dtype == torch.float32
    if not fits or tuple(logits.shape) != (most, len(split.classes)):
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UsageError(what, expected=expected, found=found)
