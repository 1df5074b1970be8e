"""The training loop: a stack of members is trained at once; with a stack width of 1, one member after another.

A member's bits depend on its seed, the stack width, the build of torch, the kind of processor or GPU and, for large
networks on a processor, the number of threads. A member's bits do not depend on the other members of the stack or on
the position in the stack. cuDNN is set to deterministic algorithms; all other operations are deterministic.

On a GPU a whole step is one CUDA graph, which gives the same bits as its operations one by one. Networks that draw
random numbers, and steps with gradients of a method's own, run without a graph.

Axes: stacked tensors are (member, ...); images of a step (member, batch, channel, height, width).

This is one file, because it is one loop: the state of a stack, the orders of images, the steps, and the accuracies
after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import stack_module_state

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.device import SMALL_LAYER_FLOPS, flops_per_layer
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.symmetry import permute, random_transpositions, symmetries
from checkpoints_zoo.training.augment import AUGMENTATIONS
from checkpoints_zoo.training.captured_step import CapturedStep
from checkpoints_zoo.training.gradients import (
    Gradient,
    Tensors,
    draws_random_numbers,
    stack_gradient,
    uses_channels_last,
)
from checkpoints_zoo.training.learning_rates import learning_rate
from checkpoints_zoo.training.optimizers import (
    Rate,
    first_adam_state,
    first_scaling,
    optimizer_step,
    scaled_step,
    stored_tensors,
    update_averages,
)
from checkpoints_zoo.training.recipe import Recipe, initial_seed, user_code_errors
from checkpoints_zoo.training.seeds import derive_seed, deterministic, epoch_order, epoch_views, seeded_generator


@dataclass
class StackState:
    """The state of a stack in training: weights, optimizer, losses and stored snapshots.

    Args:
        params, momentum, buffers: stacked tensors by name.
        loss: mean training loss of the last epoch in nats, (member,).
        failed_step: first step whose loss was not finite, or -1, (member,).
        epoch: number of finished epochs.
        averages: averages of the weights so far, by name; empty if the recipe has no averaging.
        scaling: factors of the loss, by name; empty if the precision is not float16.
        adam: state of Adam, from `first_adam_state`; empty if the optimizer is not Adam.
        snapshots: epoch -> stored weights and buffers by name, on the CPU.
    """

    params: Tensors
    momentum: Tensors
    buffers: Tensors
    loss: Tensor
    failed_step: Tensor
    epoch: int = 0
    averages: Tensors = field(default_factory=dict)
    scaling: Tensors = field(default_factory=dict)
    adam: Tensors = field(default_factory=dict)
    snapshots: dict[int, Tensors] = field(default_factory=dict)

    def to(self, device: torch.device) -> StackState:
        """Move the state to a device, except the snapshots; return it."""
        for tensors in (self.params, self.momentum, self.buffers, self.averages, self.scaling, self.adam):
            tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
        self.loss, self.failed_step = self.loss.to(device), self.failed_step.to(device)
        return self

    def changed_tensors(self) -> list[Tensor]:
        """Return the tensors that a step changes in place."""
        tensors_by_name = (self.params, self.momentum, self.buffers, self.scaling, self.adam)
        return [*(tensor for tensors in tensors_by_name for tensor in tensors.values()), self.loss, self.failed_step]


def initial_state(recipe: Recipe, members: Sequence[int]) -> StackState:
    """Return the state of untrained members: each is initialised from its seed, and permuted if the recipe says so.

    Raises:
        UsageError, SymmetryError: the architecture's units do not allow so many transpositions, or the architecture has
            no symmetry table.
    """
    modules = []
    with torch.random.fork_rng(devices=[]):
        for member in members:
            torch.default_generator.manual_seed(initial_seed(recipe, member))
            modules.append(recipe.module())
    params, buffers = stack_module_state(modules)
    params = {name: parameter.detach() for name, parameter in params.items()}
    if recipe.init_permutation:
        size = recipe.preprocess.size
        table = symmetries(modules[0], torch.zeros(2, recipe.preprocess.channels, *size))
        permutations = [
            random_transpositions(table, recipe.init_permutation, seeded_generator(derive_seed(member, "permutation")))
            for member in members
        ]
        params = permute(
            table, params, {name: torch.stack([p[name] for p in permutations]) for name in permutations[0]}
        )
    return StackState(
        params=params,
        momentum={name: torch.zeros_like(parameter) for name, parameter in params.items()},
        buffers=buffers,
        loss=torch.zeros(len(members)),
        failed_step=torch.full((len(members),), -1),
        scaling=first_scaling(recipe, len(members)),
        adam=first_adam_state(recipe, params),
    )


def train_epochs(
    recipe: Recipe,
    members: Sequence[int],
    state: StackState,
    data: ImageData,
    gradient: Gradient | None = None,
) -> Iterator[int]:
    """Train a stack to the end of its recipe, changing its state in place; yield the number of epochs done after each.

    Training ends early if every member has had a loss that is not finite.

    Args:
        recipe: recipe of the members.
        members: ids of the members, in the order of the stack.
        state: state of the stack, from `initial_state` or saved after an epoch; the state stays on its device.
        data: images of the training split.
        gradient: function that computes a step's gradients; None for `stack_gradient`.

    Raises:
        UsageError: the images have no labels, or are fewer than one batch.
    """
    image_count, batch, device = len(data), recipe.batch_size, state.loss.device
    if data.labels is None or image_count < batch:
        raise UsageError(
            f"data set {data.name!r}",
            expected=f"labels, and at least {batch} inputs",
            found=f"{image_count} inputs with{'out' if data.labels is None else ''} labels",
        )
    pixels, labels = data.images.to(device), data.labels.to(device)
    augmentation, normalise = AUGMENTATIONS[recipe.augmentation], recipe.preprocess.on(device)
    # A captured step does not run its Python code again, which would have to seed each step's random numbers.
    can_capture = device.type == "cuda" and gradient is None and not draws_random_numbers(recipe)
    step_gradient = stack_gradient(recipe, members, device, not can_capture) if gradient is None else gradient
    if uses_channels_last(recipe, device):
        for tensors in (state.params, state.momentum, state.adam):
            tensors.update({n: _to_channels_last(tensor) for n, tensor in tensors.items()})
    steps_per_epoch = image_count // batch
    steps = steps_per_epoch * recipe.epochs

    def take_step(step: int, indices: Tensor, view_numbers: Tensor, rate: Rate, step_number: int | Tensor) -> None:
        images = augmentation(pixels[indices].flatten(0, 1), view_numbers.flatten())
        inputs = normalise(images).view(*indices.shape, *images.shape[1:])
        gradients, loss, new_buffers = step_gradient(
            step, state.params, state.buffers, state.scaling, inputs, labels[indices]
        )
        for name, buffer in new_buffers.items():
            if buffer is not state.buffers[name]:
                state.buffers[name].copy_(buffer)
        if state.scaling:
            scaled_step(recipe, rate, state.params, state.momentum, state.adam, gradients, state.scaling)
        else:
            optimizer_step(recipe, rate, state.params, state.momentum, state.adam, gradients)
        state.loss += loss / steps_per_epoch
        fails_now = (state.failed_step < 0) & ~loss.isfinite()
        state.failed_step.copy_(torch.where(fails_now, step_number, state.failed_step))

    captured_step = CapturedStep(partial(take_step, 0), state.changed_tensors()) if can_capture else None
    if state.epoch == 0 and 0 in recipe.snapshots:
        state.snapshots[0] = _copy_stored_tensors(recipe, state, data)

    with ThreadPoolExecutor(1) as executor:
        draws_future = executor.submit(
            _draw_orders_and_views, members, state.epoch, image_count, augmentation.view_count, batch
        )
        while state.epoch < recipe.epochs and bool((state.failed_step < 0).any()):
            step_numbers = range(state.epoch * steps_per_epoch, (state.epoch + 1) * steps_per_epoch)
            rates = [learning_rate(recipe, step, steps) for step in step_numbers]
            inputs_of_steps = _send_step_inputs(*draws_future.result(), rates, step_numbers, device)
            if state.epoch + 1 < recipe.epochs:
                draws_future = executor.submit(
                    _draw_orders_and_views, members, state.epoch + 1, image_count, augmentation.view_count, batch
                )
            state.loss.zero_()

            # No operation in a step waits for the GPU: steps are queued while it computes.
            with deterministic(device):
                if captured_step is not None:
                    captured_step.start_epoch(*inputs_of_steps)
                for epoch_step, step in enumerate(step_numbers):
                    if captured_step is not None:
                        captured_step()
                    else:
                        take_step(step, *(inputs[epoch_step] for inputs in inputs_of_steps))
                    update_averages(recipe, step, steps_per_epoch, state.params, state.buffers, state.averages)

            state.epoch += 1
            if state.epoch in recipe.snapshots:
                state.snapshots[state.epoch] = _copy_stored_tensors(recipe, state, data)
            yield state.epoch


def _draw_orders_and_views(
    members: Sequence[int], epoch: int, image_count: int, view_count: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Draw the order of the images and their views for an epoch, on the CPU, whose generator is the same everywhere.

    Returns:
        Order and views of the images in each step of an epoch, both (step, member, batch). If many members are trained
        on a GPU, drawing orders and views takes as long as training an epoch, so a second thread draws both.
    """
    order = torch.stack([epoch_order(member, epoch, image_count) for member in members])
    view_numbers = torch.stack([epoch_views(member, epoch, image_count, view_count) for member in members])
    steps = image_count // batch_size
    order, view_numbers = (
        draws[:, : steps * batch_size].view(len(members), steps, batch_size).transpose(0, 1)
        for draws in (order, view_numbers)
    )
    return order, view_numbers


def _send_step_inputs(
    order: Tensor, view_numbers: Tensor, rates: Sequence[float], step_numbers: range, device: torch.device
) -> tuple[Any, ...]:
    """Send the inputs of the steps of an epoch to a device; return them, each of which has one value a step.

    Learning rates and step numbers become tensors on a GPU, where a captured step reads them.
    """
    sent_draws = order.to(device), view_numbers.to(device)
    if device.type != "cuda":
        return *sent_draws, rates, step_numbers
    return (
        *sent_draws,
        torch.tensor(rates, dtype=torch.float64, device=device),
        torch.arange(step_numbers.start, step_numbers.stop, device=device),
    )


def _to_channels_last(tensor: Tensor) -> Tensor:
    """Return the stacked tensor of a single member; in the memory format channels_last if the tensor is a kernel."""
    return tensor[0].contiguous(memory_format=torch.channels_last)[None] if tensor.ndim == 5 else tensor


def _copy_stored_tensors(recipe: Recipe, state: StackState, data: ImageData) -> Tensors:
    """Return a copy on the CPU of the weights that would be stored if training ended now."""
    tensors = stored_tensors(recipe, state.params, state.buffers, state.averages, data)
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def measure_accuracies(recipe: Recipe, state: StackState, training_images: ImageData, test_images: ImageData) -> Tensor:
    """Measure the weights that would be stored if training ended now, in float32; return accuracies (member,) in 0..1.

    Args:
        recipe: recipe by which the members are trained.
        state: training state of the stacked members.
        training_images: images of the training split.
        test_images: labelled images of the test split.

    Raises:
        UsageError: the images have no labels.
    """
    if test_images.labels is None:
        raise UsageError(f"data set {test_images.name!r}", expected="labels", found="none")
    tensors = stored_tensors(recipe, state.params, state.buffers, state.averages, training_images)
    members, device = len(state.loss), state.loss.device
    ensemble = Ensemble(recipe.skeleton().eval(), tensors, range(members))
    normalise = recipe.preprocess.on(device)
    correct = torch.zeros(members, device=device)
    with deterministic(device), torch.inference_mode():
        for start in range(0, len(test_images), 500):
            logits = ensemble(normalise(test_images.images[start : start + 500].to(device)))
            correct += (logits.argmax(-1) == test_images.labels[start : start + 500].to(device)).sum(1)
    return correct / len(test_images)


def trains_on_one_thread(recipe: Recipe, device: torch.device) -> bool:
    """Say whether a processor trains a recipe's stacks on one thread, because the layers are so small that a second
    thread would wait more than it computes.

    The answer depends on the recipe alone, so a small member's bits do not depend on the number of cores.
    """
    if device.type != "cpu":
        return False
    inputs = min(2, recipe.batch_size)
    images = torch.zeros(inputs, recipe.preprocess.channels, *recipe.preprocess.size, dtype=torch.uint8)
    with torch.random.fork_rng(devices=[]):
        flops = flops_per_layer(recipe.skeleton(), recipe.preprocess(images))
    return flops / inputs * recipe.batch_size * recipe.stack_width < SMALL_LAYER_FLOPS


def check_network(recipe: Recipe) -> None:
    """Check on two black images that a recipe's network returns float32 logits, one a class.

    The state of torch's generator does not change.

    Raises:
        UsageError: the network returns something else, or raises an error.
    """
    split, batch = recipe.split("train"), min(2, recipe.batch_size)
    shape = (batch, recipe.preprocess.channels, *recipe.preprocess.size)
    network_label = f"architecture {recipe.architecture!r} of recipe {recipe.name!r}"
    expected = f"float32 logits ({batch}, {len(split.classes)}) for images {shape}"
    module = recipe.skeleton()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), user_code_errors(network_label, expected):
        logits: Any = module(recipe.preprocess(torch.zeros(shape, dtype=torch.uint8)))
    is_float32 = isinstance(logits, Tensor) and logits.dtype == torch.float32
    if not is_float32 or tuple(logits.shape) != (batch, len(split.classes)):
        found = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UsageError(network_label, expected=expected, found=found)
