"""A step of SGD on a stack, with gradient scaling for float16."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.recipe import Recipe

# As torch.amp.GradScaler's.
FIRST_SCALE, GROWTH, BACKOFF, GROWTH_STEPS = 65536.0, 2.0, 0.5, 2000


def sgd_step(recipe: Recipe, lr: float, params: Tensors, momentum: Tensors, gradients: Tensors) -> None:
    """Take one step of SGD in place, as torch.optim.SGD does: coupled decay, momentum, Nesterov.

    Sums and products are separate operations on purpose: where a kernel may fuse them or not, by an element's
    position, a member's last bits would depend on it.
    """
    weights, velocity = list(params.values()), [momentum[name] for name in params]
    decayed = torch._foreach_add([gradients[name] for name in params], torch._foreach_mul(weights, recipe.weight_decay))
    torch._foreach_mul_(velocity, recipe.momentum)
    torch._foreach_add_(velocity, decayed)
    update: list[Tensor] = velocity
    if recipe.nesterov:
        update = list(torch._foreach_add(decayed, torch._foreach_mul(velocity, recipe.momentum)))
    torch._foreach_sub_(weights, torch._foreach_mul(update, lr))


def first_scaling(recipe: Recipe, members: int) -> Tensors:
    """Return the scaling of untrained members: for float16 each one's factor and steps since it last changed."""
    if recipe.precision != "float16":
        return {}
    return {"scale": torch.full((members,), FIRST_SCALE), "steps": torch.zeros(members, dtype=torch.int64)}


def scaled_step(
    recipe: Recipe, lr: float, params: Tensors, momentum: Tensors, gradients: Tensors, scaling: Tensors
) -> None:
    """Take one step in place with gradients of a scaled loss; a member whose gradients overflow skips it.

    Its factor is halved, and doubled after 2,000 steps without: torch.amp.GradScaler, for each member on its own.
    """
    factor = scaling["scale"].double().reciprocal().float()
    gradients = {name: gradient * _along(factor, gradient) for name, gradient in gradients.items()}
    finite = torch.stack([g.isfinite().flatten(1).all(1) for g in gradients.values()]).all(0)
    before = [tensor.clone() for tensors in (params, momentum) for tensor in tensors.values()]
    sgd_step(recipe, lr, params, momentum, gradients)
    for tensor, old in zip([*params.values(), *momentum.values()], before, strict=True):
        tensor.copy_(torch.where(_along(finite, tensor), tensor, old))
    steps = (scaling["steps"] + 1) * finite
    grown = steps == GROWTH_STEPS
    scaling["scale"] = scaling["scale"] * torch.where(finite, torch.where(grown, GROWTH, 1.0), BACKOFF)
    scaling["steps"] = steps * ~grown


def _along(values: Tensor, tensor: Tensor) -> Tensor:
    """Give a value a member, (member,), the axes of a stacked tensor."""
    return values.view(-1, *[1] * (tensor.ndim - 1))
