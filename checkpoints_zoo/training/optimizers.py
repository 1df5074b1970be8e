"""Optimizer steps on a stack, averages of weights, and the weights that are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.images import ImageData
from checkpoints_zoo.populations.statistics import has_statistics, reestimate_statistics
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import deterministic

# Loss scaling as in torch.amp.GradScaler's defaults.
FIRST_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_STEPS = 65536.0, 2.0, 0.5, 2000
Rate = float | Tensor  # Learning rate: a number, or a float64 tensor without axes on a GPU.


def sgd_step(recipe: Recipe, lr: Rate, params: Tensors, momentum: Tensors, gradients: Tensors) -> None:
    """Take one step of SGD in place, like torch.optim.SGD: coupled decay, momentum, Nesterov.

    Sums and products are separate operations. A GPU kernel that fuses a sum and a product only at some positions would
    make a member's last bits depend on the member's position in the stack. A single member on a GPU has no other
    position, so its step is one fused kernel, which reads and writes the weights 5 times instead of 15 times.
    """
    weights, velocities = list(params.values()), [momentum[name] for name in params]
    gradient_list = [gradients[name] for name in params]
    if weights[0].is_cuda and len(weights[0]) == 1 and all(tensor.dtype == torch.float32 for tensor in weights):
        torch._fused_sgd_(
            weights, gradient_list, velocities, lr=_in_dtype_of(weights, lr), momentum=recipe.momentum,
            weight_decay=recipe.weight_decay, dampening=0.0, nesterov=recipe.nesterov, maximize=False,
            is_first_step=False,
        )  # fmt: skip
        return
    decayed_gradients = torch._foreach_add(gradient_list, torch._foreach_mul(weights, recipe.weight_decay))
    torch._foreach_mul_(velocities, recipe.momentum)
    torch._foreach_add_(velocities, decayed_gradients)
    updates: list[Tensor] = velocities
    if recipe.nesterov:
        updates = list(torch._foreach_add(decayed_gradients, torch._foreach_mul(velocities, recipe.momentum)))
    torch._foreach_sub_(weights, torch._foreach_mul(updates, _in_dtype_of(weights, lr)))


def first_adam_state(recipe: Recipe, params: Tensors) -> Tensors:
    """Return the initial state of Adam beside the momentum, {} for other optimizers.

    The means of squared gradients are under "square/NAME"; "beta1" and "beta2" hold the product of each beta over the
    member's steps so far, (member,). Running products round alike at all positions of a stack; powers may not.
    """
    if recipe.optimizer == "sgd":
        return {}
    first = next(iter(params.values()))
    products = {name: torch.ones(len(first), dtype=torch.float64, device=first.device) for name in ("beta1", "beta2")}
    return products | {f"square/{name}": torch.zeros_like(tensor) for name, tensor in params.items()}


def optimizer_step(
    recipe: Recipe, lr: Rate, params: Tensors, momentum: Tensors, adam: Tensors, gradients: Tensors
) -> None:
    """Take one step of the recipe's optimizer in place.

    Args:
        recipe: recipe of the members.
        lr: learning rate of the step: a number, or a float64 tensor without axes on the GPU of the members. Both give
            the same bits, but for the fused step of `sgd_step`.
        params, momentum, gradients: stacked tensors by name.
        adam: state of Adam, from `first_adam_state`.
    """
    if recipe.optimizer == "sgd":
        sgd_step(recipe, lr, params, momentum, gradients)
    else:
        adam_step(recipe, lr, params, momentum, adam, gradients)


def adam_step(recipe: Recipe, lr: Rate, params: Tensors, momentum: Tensors, adam: Tensors, gradients: Tensors) -> None:
    """Take one step of Adam or AdamW in place, like torch.optim.Adam and AdamW.

    Sources: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2. As in `sgd_step`, no operation
    fuses a product and a sum.
    """
    weights, means = list(params.values()), [momentum[name] for name in params]
    squared_means, used_gradients = [adam[f"square/{name}"] for name in params], [gradients[name] for name in params]
    if recipe.optimizer == "adamw":
        torch._foreach_mul_(weights, _in_dtype_of(weights, 1 - lr * recipe.weight_decay))
    else:
        used_gradients = list(torch._foreach_add(used_gradients, torch._foreach_mul(weights, recipe.weight_decay)))
    torch._foreach_mul_(means, recipe.momentum)
    torch._foreach_add_(means, torch._foreach_mul(used_gradients, 1 - recipe.momentum))
    torch._foreach_mul_(squared_means, recipe.beta2)
    torch._foreach_add_(
        squared_means, torch._foreach_mul(torch._foreach_mul(used_gradients, used_gradients), 1 - recipe.beta2)
    )
    adam["beta1"].mul_(recipe.momentum)
    adam["beta2"].mul_(recipe.beta2)
    # Bias corrections, (member,). `lr / (1 - beta1)` would round in one way for a number, in another for a tensor.
    rate, root = ((1 - adam["beta1"]).reciprocal() * lr).float(), (1 - adam["beta2"]).sqrt().float()
    divisors = list(
        torch._foreach_div(torch._foreach_sqrt(squared_means), [_broadcast_to_stack(root, t) for t in squared_means])
    )
    torch._foreach_add_(divisors, recipe.epsilon)
    updates = torch._foreach_mul(means, [_broadcast_to_stack(rate, t) for t in means])
    torch._foreach_sub_(weights, torch._foreach_div(updates, divisors))


def first_scaling(recipe: Recipe, member_count: int) -> Tensors:
    """Return the initial loss scaling: with float16, each member's factor and the steps since it changed."""
    if recipe.precision != "float16":
        return {}
    return {"scale": torch.full((member_count,), FIRST_SCALE), "steps": torch.zeros(member_count, dtype=torch.int64)}


def scaled_step(
    recipe: Recipe,
    lr: Rate,
    params: Tensors,
    momentum: Tensors,
    adam: Tensors,
    gradients: Tensors,
    loss_scaling: Tensors,
) -> None:
    """Take one step in place with gradients of a scaled loss; members whose gradients overflow skip the step.

    An overflow halves the member's factor; 2,000 steps without overflow double it. torch.amp.GradScaler has the same
    rule; here each member has its own factor.
    """
    factor = loss_scaling["scale"].double().reciprocal().float()
    gradients = {name: gradient * _broadcast_to_stack(factor, gradient) for name, gradient in gradients.items()}
    is_finite = torch.stack([g.isfinite().flatten(1).all(1) for g in gradients.values()]).all(0)
    changed_tensors = [tensor for tensors in (params, momentum, adam) for tensor in tensors.values()]
    old_tensors = [tensor.clone() for tensor in changed_tensors]
    optimizer_step(recipe, lr, params, momentum, adam, gradients)
    for tensor, old_tensor in zip(changed_tensors, old_tensors, strict=True):
        tensor.copy_(torch.where(_broadcast_to_stack(is_finite, tensor), tensor, old_tensor))
    steps = (loss_scaling["steps"] + 1) * is_finite
    grows_now = steps == GROWTH_STEPS
    loss_scaling["scale"].mul_(torch.where(is_finite, torch.where(grows_now, GROWTH_FACTOR, 1.0), BACKOFF_FACTOR))
    loss_scaling["steps"].copy_(steps * ~grows_now)


def _in_dtype_of(weights: list[Tensor], factor: Rate) -> Rate:
    """Return a factor of weights: a tensor in their dtype, as one kernel for all weights needs; a number as it is."""
    return factor.to(weights[0].dtype) if isinstance(factor, Tensor) else factor


def _broadcast_to_stack(member_values: Tensor, stacked_tensor: Tensor) -> Tensor:
    """Reshape values (member,) to broadcast against a stacked tensor."""
    return member_values.view(-1, *[1] * (stacked_tensor.ndim - 1))


def update_averages(
    recipe: Recipe, step: int, steps_per_epoch: int, params: Tensors, buffers: Tensors, averages: Tensors
) -> None:
    """Update the averages of the weights in place, after a step.

    Sources: "ema", the exponential moving average of all weights and buffers after each step; "swa", the mean of the
    weights after each epoch (Izmailov et al. 2018, algorithm 1). Averages of both kinds, "ema" and "swa", equal the
    averages of torch.optim.swa_utils.AveragedModel.

    Args:
        recipe: recipe of the members; its `averaging` names the kind of average.
        step: number of the step just taken, from 0.
        steps_per_epoch: number of steps per epoch.
        params, buffers: stacked tensors by name, after the step.
        averages: averages by name; empty before the first update.
    """
    epoch, epoch_step = divmod(step, steps_per_epoch)
    if recipe.averaging == "none" or epoch < recipe.averaging_start:
        return
    if recipe.averaging == "swa":
        if epoch_step == steps_per_epoch - 1:
            share = 1 / (epoch - recipe.averaging_start + 1)
            _move_averages(params, share, averages)
    else:
        first = step == recipe.averaging_start * steps_per_epoch
        _move_averages(params | buffers, 1.0 if first else 1 - recipe.averaging_decay, averages)


def _move_averages(tensors: Tensors, share: float, averages: Tensors) -> None:
    """Move averages a share of the way to tensors; copy integer tensors, such as counters."""
    averaged_names = [name for name, tensor in tensors.items() if share < 1.0 and tensor.is_floating_point()]
    averages.update({name: tensor.clone() for name, tensor in tensors.items() if name not in averaged_names})
    if averaged_names:
        torch._foreach_lerp_(
            [averages[name] for name in averaged_names], [tensors[name] for name in averaged_names], share
        )


def stored_tensors(
    recipe: Recipe, params: Tensors, buffers: Tensors, averages: Tensors, training_images: ImageData
) -> Tensors:
    """Return the stacked weights and buffers to be stored: the averages, if the recipe has any.

    After "swa" no member's running statistics fit the averaged weights, so running statistics are estimated again on
    the training images.

    Args:
        recipe: recipe of the members.
        params, buffers, averages: stacked tensors by name.
        training_images: images of the training split.
    """
    tensors = params | buffers | averages
    module = recipe.skeleton().eval()
    if recipe.averaging != "swa" or not averages or not has_statistics(module):
        return tensors
    device = next(iter(params.values())).device
    size = recipe.batch_size
    normalise = recipe.preprocess.on(device)
    batches = (
        training_images.images[first : first + size] for first in range(0, len(training_images) // size * size, size)
    )
    with deterministic(device):
        return tensors | reestimate_statistics(module, tensors, (normalise(pixels.to(device)) for pixels in batches))
