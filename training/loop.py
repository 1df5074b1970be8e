"""Train a stack of members at once: what one member computes is written for one and mapped over the stack.

A member is a function of its seed alone, bit for bit, at one stack width, torch build and CPU: whatever its
position and company, on one thread or two. Sums and products are separate operations on
purpose: where a kernel may fuse them or not, by an element's position, the last bit would depend on it.

Axes: stacked tensors are (member, ...); inputs of a step (member, batch, channel, height, width).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from checkpoints_zoo import architectures
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.symmetry import permute, random_transpositions, symmetries
from training.augment import views
from training.recipes import Recipe, initial_seed
from training.seeds import derive, epoch_choices, epoch_order, generator

Tensors = dict[str, Tensor]


@dataclass
class StackState:
    """All that a stack's further training depends on.

    Args:
        params, momentum, buffers: stacked tensors by name.
        loss: mean training loss of the last epoch, nats, (member,).
        failed_step: first step with a loss that isn't finite, or -1, (member,).
        epoch: epochs done.
    """

    params: Tensors
    momentum: Tensors
    buffers: Tensors
    loss: Tensor
    failed_step: Tensor
    epoch: int = 0


def start(recipe: Recipe, members: Sequence[int]) -> StackState:
    """Give the state of untrained members, each initialised from its seed, and permuted if the recipe says so.

    Raises:
        UsageError, SymmetryError: more transpositions than the architecture's units allow, or one without a table.
    """
    modules = []
    with torch.random.fork_rng(devices=[]):
        for member in members:
            torch.manual_seed(initial_seed(recipe, member))
            modules.append(architectures.build(recipe.architecture, **recipe.arguments))
    params, buffers = stack_module_state(modules)
    params = {name: parameter.detach() for name, parameter in params.items()}
    if recipe.init_permutation:
        size = recipe.preprocess.size
        table = symmetries(modules[0], torch.zeros(2, recipe.preprocess.channels, *size))
        drawn = [
            random_transpositions(table, recipe.init_permutation, generator(derive(member, "permutation")))
            for member in members
        ]
        params = permute(table, params, {name: torch.stack([p[name] for p in drawn]) for name in drawn[0]})
    return StackState(
        params=params,
        momentum={name: torch.zeros_like(parameter) for name, parameter in params.items()},
        buffers=buffers,
        loss=torch.zeros(len(members)),
        failed_step=torch.full((len(members),), -1),
    )


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Give the learning rate of a step in [0, steps).

    Source: cosine annealing without restarts, Loshchilov & Hutter 2017, equation 5.
    """
    if recipe.schedule == "constant":
        return recipe.lr
    return recipe.lr * (1 + math.cos(math.pi * step / steps)) / 2


def sgd_step(recipe: Recipe, lr: float, params: Tensors, momentum: Tensors, gradients: Tensors) -> None:
    """Take one step of SGD in place, as torch.optim.SGD does: coupled decay, momentum, Nesterov."""
    for name, parameter in params.items():
        gradient = gradients[name] + parameter * recipe.weight_decay
        velocity = momentum[name].mul_(recipe.momentum).add_(gradient)
        update = gradient + velocity * recipe.momentum if recipe.nesterov else velocity
        parameter.sub_(update * lr)


def train_epochs(recipe: Recipe, members: Sequence[int], state: StackState, data: ImageData) -> Iterator[int]:
    """Train a stack to the end of its recipe, its state in place, and yield the epochs done after each.

    Args:
        recipe: the recipe.
        members: ids, in the order of the stack.
        state: of `start`, or one that was saved after an epoch.
        data: the training split.

    Raises:
        UsageError: no labels, or fewer inputs than make a batch.
    """
    count, batch = len(data), recipe.batch_size
    targets = data.labels
    if targets is None or count < batch:
        raise UsageError(
            f"data set {data.name!r}",
            expected=f"labels, and at least {batch} inputs",
            found=f"{count} inputs with{'out' if targets is None else ''} labels",
        )
    with torch.device("meta"):  # only its structure is needed
        module = architectures.build(recipe.architecture, **recipe.arguments).train()

    def member_loss(
        params: Tensors, buffers: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}  # batch norm writes into them
        logits = functional_call(module, (params, buffers), (images,))
        loss = F.cross_entropy(logits, labels)
        return loss, (loss, buffers)

    stack_gradient = vmap(grad(member_loss, has_aux=True))

    pixels = views(data.images, recipe.augmentation)
    inputs = torch.stack([recipe.preprocess(view) for view in pixels])
    steps_per_epoch = count // batch
    steps = steps_per_epoch * recipe.epochs

    while state.epoch < recipe.epochs:
        order = torch.stack([epoch_order(member, state.epoch, count) for member in members])
        view = torch.stack([epoch_choices(member, state.epoch, count, len(inputs)) for member in members])
        state.loss = torch.zeros_like(state.loss)

        for epoch_step in range(steps_per_epoch):
            step = state.epoch * steps_per_epoch + epoch_step
            chosen = slice(epoch_step * batch, (epoch_step + 1) * batch)
            seen = order[:, chosen]
            gradients, (loss, buffers) = stack_gradient(
                state.params, state.buffers, inputs[view[:, chosen], seen], targets[seen]
            )
            sgd_step(recipe, learning_rate(recipe, step, steps), state.params, state.momentum, gradients)
            state.buffers = {name: buffer.contiguous() for name, buffer in buffers.items()}
            state.loss += loss / steps_per_epoch
            state.failed_step[(state.failed_step < 0) & ~loss.isfinite()] = step

        state.epoch += 1
        yield state.epoch
