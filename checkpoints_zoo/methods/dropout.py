"""Networks trained with dropout; each draw is a mask of units that is multiplied into the weights.

Axes: masks are (draw, unit), or (batch, unit) while a network is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.methods.method import Run, check_settings
from checkpoints_zoo.methods.modes import Tensors, train_modes
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.networks.modules import shared_names
from checkpoints_zoo.training.gradients import Gradient, stack_gradient
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import derive_seed, seeded_generator

_MASK_BUFFER = "dropout_mask"
# Largest allowed difference of logits, as a share of the largest logit: rounding is smaller, the error of a layer with
# another formula is larger.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Dropout:
    """Train networks with dropout, and draw networks by dropout (Gal & Ghahramani 2016).

    Dropout acts on the input of every linear and convolutional layer but the first: on units before a linear layer, on
    whole channels before a convolution. In training each image has its own masks in each step. A draw is one mask for
    all inputs; draws keep the running statistics of the training. Each run of dropout training starts from the initial
    weights of the run's mode.

    Args:
        rate: share of units that are set to 0.
    """

    rate: float = 0.05

    name: ClassVar[str] = "dropout"
    title: ClassVar[str] = "MC dropout"
    source: ClassVar[str] = "Gal & Ghahramani 2016, Dropout as a Bayesian approximation (arXiv 1506.02142)"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Train networks with dropout, and draw masks; return the runs.

        Args:
            problem: the network and its training images.
            runs: number of networks.
            draws: number of masks of each network.
            seed: seed of the draws' masks. The seed of a network is 1,000,000 plus its number, like the seed of its
                mode.

        Raises:
            UsageError: the rate is outside (0, 1), a loss was not finite, the network lacks two linear or convolutional
                layers, or a layer is not called exactly once, shares its weights, or computes with weights that are not
                in its state.
        """
        check_settings(self, runs, draws)
        layers = find_layers_to_drop_before(problem.network(), problem.inputs[:2])
        modes, fitted_runs = self._train_modes(problem, layers, runs), []
        for run in range(runs):
            mode = {name: tensor[run] for name, tensor in modes.items()}
            masks = draw_masks(layers, self.rate, draws, derive_seed(seed, f"dropout {run}"))
            folded_state = fold_masks(mode, layers, masks)
            _check_folding(problem, layers, mode, masks, folded_state)
            fitted_runs.append(Run(problem.add_tied_names(folded_state)))
        return fitted_runs

    def _train_modes(self, problem: Problem, layers: Sequence[MaskedLayer], runs: int) -> Tensors:
        def make_gradient(recipe: Recipe, member_ids: Sequence[int]) -> Gradient:
            return _make_gradient(recipe, member_ids, layers, self.rate, problem.device)

        description = f"dropout at rate {self.rate:g}"
        modes = train_modes(problem.recipe, problem.images, runs, problem.device, description, make_gradient)
        return {name: tensor for name, tensor in modes.items() if not is_counter(name)}

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: rates from 1/200 to 1/5."""
        return [cls(rate) for rate in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)]


@dataclass(frozen=True)
class MaskedLayer:
    """A layer whose input is multiplied by dropout masks.

    Args:
        name: name of the module.
        units: number of features or channels of the layer's input.
        groups: number of groups of a convolution; 1 for a transposed convolution, whose weights have one axis for all
            channels.
        input_axis_first: whether the first axis of the layer's weight counts the layer's input units; False means the
            second axis.
    """

    name: str
    units: int
    groups: int
    input_axis_first: bool


def find_layers_to_drop_before(network: nn.Module, inputs: Tensor) -> list[MaskedLayer]:
    """Find the linear and convolutional layers of a network, in the order of their calls; return all but the first.

    Args:
        network: module to be searched; the module runs once, and is in eval mode afterwards.
        inputs: two or more inputs, (batch, channel, height, width).

    Raises:
        UsageError: there are fewer than two layers, a layer is not called once with all inputs, or has no weights of
            its own.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    >>> find_layers_to_drop_before(net, torch.zeros(2, 1, 4, 4))
    [MaskedLayer(name='2', units=16, groups=1, input_axis_first=False)]
    """
    name_of_layer: dict[nn.Module, str] = {
        m: name for name, m in network.named_modules() if isinstance(m, nn.Linear | _ConvNd)
    }
    batch_sizes_of_calls: dict[str, list[int]] = {}

    def record_call(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        batch_sizes_of_calls.setdefault(name_of_layer[layer], []).append(len(inputs[0]))

    hooks = [layer.register_forward_pre_hook(record_call) for layer in name_of_layer]
    try:
        with torch.no_grad():
            network.to(inputs.device).eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for name in name_of_layer.values():
        if batch_sizes_of_calls.get(name) != [len(inputs)]:
            raise UsageError(
                f"dropout before layer {name!r}",
                expected="a layer that is called once, with all inputs",
                found=f"{len(batch_sizes_of_calls.get(name, []))} calls"
                if len(batch_sizes_of_calls.get(name, [])) != 1
                else "another batch",
            )
    if len(name_of_layer) < 2:
        raise UsageError(
            "dropout", expected="two linear or convolutional layers or more", found=str(len(name_of_layer))
        )
    layer_by_name = {name: layer for layer, name in name_of_layer.items()}
    masked_names = list(batch_sizes_of_calls)[1:]
    shared = shared_names(network)
    for name in masked_names:
        weight = dict(layer_by_name[name].named_parameters(recurse=False)).get("weight")
        if weight is None or f"{name}.weight" in shared:
            raise UsageError(
                f"dropout before layer {name!r}",
                expected="a layer with weights of its own, which masks can be folded into",
                found="weights that are computed" if weight is None else "weights that another layer has too",
            )
    return [_describe_layer(name, layer_by_name[name]) for name in masked_names]


def _describe_layer(layer_name: str, layer: nn.Module) -> MaskedLayer:
    if isinstance(layer, _ConvNd):
        is_transposed = isinstance(layer, _ConvTransposeNd)
        return MaskedLayer(layer_name, layer.in_channels, 1 if is_transposed else layer.groups, is_transposed)
    return MaskedLayer(layer_name, int(layer.in_features), 1, False)  # type: ignore[arg-type]


def fold_masks(state: Mapping[str, Tensor], layers: Sequence[MaskedLayer], masks: Mapping[str, Tensor]) -> Tensors:
    """Multiply layers' weights by the masks of their inputs; return stacked states, name -> (draw, *shape).

    Args:
        state: tensors of one network by name.
        layers: layers whose inputs are masked.
        masks: masks of the layers' inputs, layer's name -> (draw, unit); values are 0 and 1/(1 - rate).

    >>> layer = MaskedLayer("fc", units=2, groups=1, input_axis_first=False)
    >>> fold_masks({"fc.weight": torch.ones(1, 2)}, [layer], {"fc": torch.tensor([[0.0, 2.0]])})["fc.weight"]
    tensor([[[0., 2.]]])
    """
    draw_count = len(next(iter(masks.values())))
    folded_state = {name: tensor.expand(draw_count, *tensor.shape) for name, tensor in state.items()}
    for layer in layers:
        weight_name = f"{layer.name}.weight"
        weight, mask = folded_state[weight_name], masks[layer.name]
        if layer.input_axis_first:
            mask = mask[:, :, None]
        else:  # Each row of the layer's weight reads one group of the input's channels.
            mask = mask.view(draw_count, layer.groups, -1).repeat_interleave(weight.shape[1] // layer.groups, 1)
        folded_state[weight_name] = weight * mask.view(*mask.shape, *[1] * (weight.ndim - 3))
    return {name: tensor.contiguous() for name, tensor in folded_state.items()}


def draw_masks(layers: Sequence[MaskedLayer], rate: float, mask_count: int, seed: int) -> Tensors:
    """Draw masks on the CPU; return layer's name -> mask (draw, unit) with the values 0 and 1/(1 - rate)."""
    return _split_by_layer(_draw_joint_masks(layers, rate, mask_count, seed), layers)


def _draw_joint_masks(layers: Sequence[MaskedLayer], rate: float, mask_count: int, seed: int) -> Tensor:
    """Draw the masks of all layers on the CPU; return them as one tensor, (draw, unit of any layer)."""
    unit_count = sum(layer.units for layer in layers)
    return (torch.rand(mask_count, unit_count, generator=seeded_generator(seed)) >= rate) / (1 - rate)


def _split_by_layer(joint_masks: Tensor, layers: Sequence[MaskedLayer]) -> Tensors:
    """Split joint masks (…, unit of any layer); return layer's name -> masks (…, unit)."""
    masks = torch.split(joint_masks, [layer.units for layer in layers], dim=-1)
    return {layer.name: mask for layer, mask in zip(layers, masks, strict=True)}


def _add_masks(network: nn.Module, layers: Sequence[MaskedLayer]) -> nn.Module:
    """Make layers multiply their input by a buffer, which holds masks (batch, unit) or 1; return the network."""

    def multiply_input(layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs, mask = arguments[0], layer.get_buffer(_MASK_BUFFER)
        if mask.ndim:
            middle_ones = [1] * (inputs.ndim - 2)
            batch, units = mask.shape
            mask = (
                mask.view(batch, *middle_ones, units)
                if isinstance(layer, nn.Linear)
                else mask.view(batch, units, *middle_ones)
            )
        return (inputs * mask, *arguments[1:])

    for layer in layers:
        module = network.get_submodule(layer.name)
        module.register_buffer(_MASK_BUFFER, torch.ones(()), persistent=False)
        module.register_forward_pre_hook(multiply_input)
    return network


def _make_gradient(
    recipe: Recipe, member_ids: Sequence[int], layers: Sequence[MaskedLayer], rate: float, device: torch.device
) -> Gradient:
    """Make the function that computes a step's gradients with dropout; return the function.

    Masks depend on the member's id and on the step. They are drawn on the CPU, whose generator is the same everywhere.
    """

    def build(**arguments: Any) -> nn.Module:
        return _add_masks(recipe.module(), layers)

    base_gradient = stack_gradient(replace(recipe, build=build), member_ids, device)

    def gradient(
        step: int, params: Tensors, buffers: Tensors, scaling: Tensors, images: Tensor, labels: Tensor
    ) -> tuple[Tensors, Tensor, Tensors]:
        joint_masks = torch.stack(
            [
                _draw_joint_masks(layers, rate, images.shape[1], derive_seed(member, f"dropout {step}"))
                for member in member_ids
            ]
        )
        if device.type == "cuda":  # A copy from pinned memory does not wait for the GPU.
            joint_masks = joint_masks.pin_memory().to(device, non_blocking=True)
        mask_buffers = {
            f"{name}.{_MASK_BUFFER}": masks.contiguous() for name, masks in _split_by_layer(joint_masks, layers).items()
        }
        gradients, loss, new_buffers = base_gradient(step, params, {**buffers, **mask_buffers}, scaling, images, labels)
        return gradients, loss, {name: new_buffers[name] for name in buffers}

    return gradient


def _check_folding(
    problem: Problem, layers: Sequence[MaskedLayer], state: Tensors, masks: Tensors, folded_state: Tensors
) -> None:
    """Check on some images that masks in the weights give the same logits as masks on the layers' inputs.

    Raises:
        UsageError: the logits differ.
    """
    inputs = problem.inputs[:8].cpu()
    mask_buffers = {f"{name}.{_MASK_BUFFER}": mask[:1].expand(len(inputs), -1) for name, mask in masks.items()}
    with torch.no_grad():
        masked_logits = functional_call(
            _add_masks(problem.network(), layers).eval(), {**state, **mask_buffers}, (inputs,)
        )
        folded_logits = functional_call(problem.network().eval(), {n: t[0] for n, t in folded_state.items()}, (inputs,))
    largest_difference = (folded_logits - masked_logits).abs().max()
    if not bool(largest_difference <= TOLERANCE * masked_logits.abs().max()):
        raise UsageError(
            f"dropout in architecture {problem.recipe.architecture!r}",
            expected="linear and convolutional layers that multiply their input by their own weights alone",
            found=f"logits that differ by {largest_difference:.2g} once the mask is in the weights",
        )
