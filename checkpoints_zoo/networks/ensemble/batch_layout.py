"""Steps in the batch layout, where members lie along the batch axis, (member·batch, …), as tokens of transformers do.

An operation that computes each input of a batch on its own also computes each member on its own, so it is the network's
operation. Only operations with parameters split the axis: (member, batch, …).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble.program import BINARY_FUNCTIONS, Compute, split_members
from checkpoints_zoo.networks.ensemble.traced import OperandAxes

# Functions of one activation that move or normalise values -> names of their arguments after the activation.
MOVES: dict[str, tuple[str, ...]] = {
    "transpose": ("dim0", "dim1"), "permute": ("dims",), "flatten": ("start_dim", "end_dim"),
    "unflatten": ("dim", "sizes"), "select": ("dim", "index"), "unbind": ("dim",), "chunk": ("chunks", "dim"),
    "split": ("split_size", "dim"), "softmax": ("dim",),
}  # fmt: skip
SPLITS = ("unbind", "chunk", "split")  # The moves that return several activations.
_NARROW = 64  # Number of columns below which a CPU takes a softmax of rows faster from transposed memory.


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices; the memory of narrow products on a CPU is in transposed order."""
    return (b.mT @ a.mT).mT if a.is_cpu and b.shape[-1] < _NARROW else a @ b


def softmax(x: Tensor, dim: int) -> Tensor:
    """Take a softmax; if the memory is in transposed order, a softmax of rows is vectorised over columns."""
    is_of_rows = dim % x.dim() == x.dim() - 1
    return x.mT.softmax(-2).mT if is_of_rows and x.mT.is_contiguous() else x.softmax(dim)


FUNCTIONS_OF_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "matmul": torch.matmul, "scaled_dot_product_attention": F.scaled_dot_product_attention,
}  # fmt: skip


def rank_and_batch_axis(function_name: str, arguments: dict[str, Any], rank: int, batch_axis: int) -> tuple[int, int]:
    """Return the number of axes of the result of a function in MOVES, and the index of its batch axis.

    Args:
        function_name: name of the function.
        arguments: arguments of the call by name.
        rank, batch_axis: number of axes of the activation, and index of its batch axis.

    Raises:
        ValueError: the function does not compute each input of a batch on its own.
    """
    if function_name == "permute":
        return rank, [dim % rank for dim in arguments["dims"]].index(batch_axis)
    if function_name == "transpose":
        pair = arguments["dim0"] % rank, arguments["dim1"] % rank
        return rank, pair[1 - pair.index(batch_axis)] if batch_axis in pair else batch_axis
    first = arguments.get("start_dim", arguments.get("dim", 0)) % rank
    last = arguments.get("end_dim", -1) % rank if function_name == "flatten" else first
    if first <= batch_axis <= last:
        raise ValueError(f"{function_name} along the batch axis")
    added = {"select": -1, "unbind": -1, "flatten": first - last}.get(function_name, 0)
    if function_name == "unflatten":
        added = len(arguments["sizes"]) - 1
    return rank + added, batch_axis + added * (first < batch_axis)


def axes_before(function_name: str, arguments: dict[str, Any], rank: int) -> OperandAxes:
    """Return the operand axes of a function in MOVES."""

    def operand_axes(axis: int) -> dict[int, int]:
        for before in range(rank):
            with suppress(ValueError):
                if rank_and_batch_axis(function_name, arguments, rank, before)[1] == axis:
                    return {0: before}
        return {}

    return operand_axes


def channels_to_batch(is_shared: bool) -> Compute:
    """Return a step function from the channel layout, (batch, member·channel, …), or from (batch, …) that all
    members share."""

    def compute(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        if member_count == 1:
            return x
        members = x.expand(member_count, *x.shape) if is_shared else split_members(x, member_count).transpose(0, 1)
        return members.flatten(0, 1)

    return compute


def batch_to_channels(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
    """Return the channel layout, (batch, member·channel, …)."""
    return x if member_count == 1 else split_batch(x, member_count).transpose(0, 1).flatten(1, 2)


def split_batch(x: Tensor, member_count: int) -> Tensor:
    """Return (member, batch, …)."""
    return x.reshape(member_count, -1, *x.shape[1:])


def linear(member_count: int, overwrite_index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply linear layers with weights (member, out, in) and biases (member, out) to the last axis."""
    if member_count == 1:
        return F.linear(x, weight[0], None if bias is None else bias[0])
    inputs = x.reshape(member_count, -1, x.shape[-1])
    out = inputs @ weight.mT if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)
    return out.view(*x.shape[:-1], -1)


def layer_norm(shape: tuple[int, ...], eps: float) -> Compute:
    """Return a step function that normalises the last axes; its operands are x, and weights and biases (member, …)."""

    def compute(
        member_count: int, overwrite_index: int, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if member_count == 1:
            weight, bias = (None if t is None else t[0] for t in (weight, bias))
            return F.layer_norm(x, shape, weight, bias, eps)
        normalised = _normalise(x, shape, eps)
        if weight is None:
            return normalised
        rows = normalised.reshape(member_count, -1, *shape)
        affine = rows * weight[:, None] if bias is None else torch.addcmul(bias[:, None], rows, weight[:, None])
        return affine.view(x.shape)

    return compute


def _normalise(x: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    """Normalise the last axes; on a CPU by single operations, which take half the time of torch's layer norm."""
    if not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return F.layer_norm(x, shape, eps=eps)
    axes = tuple(range(-len(shape), 0))
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


@dataclass(frozen=True)
class BinaryWithParameter:
    """Step function that combines an activation and a parameter (member, 1, …) by a function of BINARY_FUNCTIONS.

    Args:
        name: name of the function.
        parameter_index: index of the operand that is the parameter.
    """

    name: str
    parameter_index: int

    def __call__(self, member_count: int, overwrite_index: int, *operands: Tensor) -> Tensor:
        split = [t if i == self.parameter_index else split_batch(t, member_count) for i, t in enumerate(operands)]
        return BINARY_FUNCTIONS[self.name](*split).flatten(0, 1)


def expand_parameter(sizes: Sequence[int], target_in_batch_layout: bool) -> Compute:
    """Return a step function that repeats a parameter (member, 1, …) for each input of an activation.

    Args:
        sizes: sizes of the axes after the batch axis; -1 for an unchanged size.
        target_in_batch_layout: whether the activation has the members along its batch axis.
    """

    def compute(member_count: int, overwrite_index: int, parameter: Tensor, target: Tensor) -> Tensor:
        batch = len(target) // member_count if target_in_batch_layout else len(target)
        return parameter.expand(-1, batch, *sizes).flatten(0, 1)

    return compute


def call_on_activations(function_name: str, options: dict[str, Any]) -> Compute:
    """Return a step function that calls a function of FUNCTIONS_OF_ACTIVATIONS."""
    function = FUNCTIONS_OF_ACTIVATIONS[function_name]

    def compute(member_count: int, overwrite_index: int, *activations: Tensor) -> Tensor:
        if function is torch.matmul and member_count > 1:
            return matmul(*activations)
        return function(*activations, **options)

    return compute


def concatenate(dim: int) -> Compute:
    def compute(member_count: int, overwrite_index: int, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim)

    return compute


@dataclass(frozen=True)
class Length:
    """Length of an axis of an operand, for a new shape.

    Args:
        operand: index of the operand.
        axis: index of the axis.
        times_members: whether the length is multiplied by the number of members.
    """

    operand: int
    axis: int
    times_members: bool


def reshape(sizes: Sequence[int | Length]) -> Compute:
    """Return a step function that reshapes its first operand."""

    def compute(member_count: int, overwrite_index: int, *operands: Tensor) -> Tensor:
        shape = [
            size
            if isinstance(size, int)
            else operands[size.operand].shape[size.axis] * (member_count if size.times_members else 1)
            for size in sizes
        ]
        return operands[0].reshape(shape)

    return compute
