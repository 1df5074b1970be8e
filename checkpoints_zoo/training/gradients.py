"""Gradients of a stack of members: the loss is written for one member and mapped over the stack by torch.vmap.

A stack of one member runs like a plain module, without a member axis.

Axes: stacked tensors are (member, ...); a step's images are (member, batch, channel, height, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.populations.statistics import has_statistics
from checkpoints_zoo.training.recipe import Recipe, error_line
from checkpoints_zoo.training.seeds import derive_seed, seed_torch

Tensors = dict[str, Tensor]
Gradient = Callable[[int, Tensors, Tensors, Tensors, Tensor, Tensor], tuple[Tensors, Tensor, Tensors]]


def stack_gradient(recipe: Recipe, members: Sequence[int], device: torch.device, seeds_steps: bool = True) -> Gradient:
    """Return the function that computes the gradients of a step.

    The function takes the step's number; parameters, buffers and loss scaling by name; images and labels. The function
    returns gradients by name, losses in nats (member,), and the new buffers by name.

    Args:
        recipe: the recipe of the members.
        members: the members' ids, in the order of the stack.
        device: the device of the stacked members.
        seeds_steps: whether torch's generators are seeded for each step of a single member. A step that is captured as
            a CUDA graph can't seed them, so the network must draw no random numbers.
    """
    module = recipe.skeleton()

    def member_loss(
        params: Tensors, buffers: Tensors, loss_scaling: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        with _autocast_context(recipe, device):
            logits = functional_call(module, (params, buffers), (images,))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)
        return loss * loss_scaling["scale"] if loss_scaling else loss, (loss, buffers)

    def compile_if_requested(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function) if recipe.compile else function

    if recipe.stack_width == 1:
        return _single_gradient(compile_if_requested(member_loss), recipe, members[0], device, seeds_steps)
    if recipe.precision != "float32":
        for norm in (layer for layer in module.modules() if isinstance(layer, _BatchNorm)):
            norm.register_forward_pre_hook(_convert_to_float32)  # Under vmap the inputs need the weights' dtype.

    def pure_loss(
        params: Tensors, buffers: Tensors, loss_scaling: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        # Batch norm writes into the buffers; a function under vmap must not change its arguments.
        buffer_copies = {name: buffer.clone() for name, buffer in buffers.items()}
        return member_loss(params, buffer_copies, loss_scaling, images, labels)

    mapped_gradient = compile_if_requested(vmap(grad(pure_loss, has_aux=True)))
    # A backward pass of the summed losses is faster than a mapped backward pass, and bit-equal for nets without batch
    # norm.
    if not recipe.compile and not has_statistics(module):
        mapped_gradient = _gradient_by_summed_backward(vmap(pure_loss))

    def stacked_gradient(
        step: int, params: Tensors, buffers: Tensors, loss_scaling: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensors, Tensor, Tensors]:
        with explain_vmap_errors(
            recipe.architecture, "a stack", "Set stack_width=1, and members are trained one after another"
        ):
            gradients, (loss, new_buffers) = mapped_gradient(params, buffers, loss_scaling, images, labels)
        gradients = {name: _with_strides_of(params[name], gradient) for name, gradient in gradients.items()}
        return gradients, loss, {name: buffer.contiguous() for name, buffer in new_buffers.items()}

    return stacked_gradient


@contextmanager
def explain_vmap_errors(architecture: str, axis_name: str, advice: str) -> Iterator[None]:
    """Turn an error of torch.vmap in the block into a UsageError that names the architecture.

    Args:
        architecture: name of the network.
        axis_name: name of the axis that the network is mapped over, such as "a stack", for the error.
        advice: advice in the error.

    Raises:
        UsageError: torch.vmap can't map the network.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in ("vmap", "Batching rule")):
            raise
        raise UsageError(
            f"architecture {architecture!r}",
            expected=f"a module that torch.vmap maps over {axis_name}: no random numbers, no branches on values",
            found=error_line(error),
            do=advice,
        ) from error


def _gradient_by_summed_backward(mapped_loss: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensors, Any]]:
    """Return the function `vmap(grad(…, has_aux=True))`, computed by one backward pass of the summed losses."""

    def gradients_of(params: Tensors, *other_arguments: Any) -> tuple[Tensors, Any]:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in params.items()}
        losses, (loss, buffers) = mapped_loss(leaves, *other_arguments)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True)), (loss.detach(), buffers)

    return gradients_of


def _single_gradient(
    member_loss: Callable[..., tuple[Tensor, tuple[Tensor, Tensors]]],
    recipe: Recipe,
    member: int,
    device: torch.device,
    seeds_steps: bool,
) -> Gradient:
    """Return the gradient function of a stack of one member; the function updates the buffers in place and returns
    them."""
    weight_views, buffer_views = _SingleMemberViews(requires_grad=True), _SingleMemberViews(requires_grad=False)
    channels_last = uses_channels_last(recipe, device)

    def single_gradient(
        step: int, params: Tensors, buffers: Tensors, loss_scaling: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensors, Tensor, Tensors]:
        weights, scale = weight_views.views_of(params), {name: tensor[0] for name, tensor in loss_scaling.items()}
        pixels = images[0].contiguous(memory_format=torch.channels_last) if channels_last else images[0]
        # Dropout draws from torch's own generator.
        with seed_torch(derive_seed(member, f"noise {step}"), device) if seeds_steps else nullcontext():
            scaled_loss, (loss, _) = member_loss(weights, buffer_views.views_of(buffers), scale, pixels, labels[0])
            gradient_list = torch.autograd.grad(
                scaled_loss, list(weights.values()), allow_unused=True, materialize_grads=True
            )
        gradients = {
            n: _with_strides_of(params[n], gradient[None]) for n, gradient in zip(weights, gradient_list, strict=True)
        }
        return gradients, loss.detach()[None], buffers

    return single_gradient


class _SingleMemberViews:
    """Views of the tensors of a stack's only member, cached while the stack holds the same tensors.

    Making the views in each step would take as long as a GPU needs for the step of a small network.

    Args:
        requires_grad: whether gradients with respect to the tensors are computed.
    """

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad
        self.stacked: Tensors = {}
        self.views: Tensors = {}

    def views_of(self, stacked_tensors: Tensors) -> Tensors:
        """Return the views by name."""
        if len(stacked_tensors) != len(self.stacked) or any(
            self.stacked.get(n) is not t for n, t in stacked_tensors.items()
        ):
            self.stacked = dict(stacked_tensors)
            self.views = {n: t.detach()[0].requires_grad_(self.requires_grad) for n, t in stacked_tensors.items()}
        return self.views


def draws_random_numbers(recipe: Recipe) -> bool:
    """Return whether a recipe's network draws from torch's random generator in a training step, as dropout does.

    A stack of several members draws none, because torch.vmap refuses networks that do.
    """
    if recipe.stack_width > 1:
        return False
    shape = (min(2, recipe.batch_size), recipe.preprocess.channels, *recipe.preprocess.size)
    module = recipe.skeleton()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        first_state = torch.default_generator.get_state()
        module(recipe.preprocess(torch.zeros(shape, dtype=torch.uint8)))
        return not torch.equal(torch.default_generator.get_state(), first_state)


def uses_channels_last(recipe: Recipe, device: torch.device) -> bool:
    """Return whether a recipe's images and kernels have the memory format channels_last on a device.

    A CPU never gets this format: there the backward pass of a 1×1 convolution with a stride and fewer than 8 channels
    writes beyond its memory in this format (torch 2.15 with oneDNN).
    """
    return recipe.channels_last and device.type != "cpu"


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with its parameter's strides: with other strides torch's foreach step would loop over the
    tensors."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _convert_to_float32(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.float() for tensor in inputs)


def _autocast_context(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    if recipe.precision == "float32":
        return nullcontext()
    # With torch.autocast's cache the next step would use this step's cast weights.
    return torch.autocast(device.type, dtype=getattr(torch, recipe.precision), cache_enabled=False)
