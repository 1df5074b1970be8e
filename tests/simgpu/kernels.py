"""The arithmetic of the simulated cards: a CPU's kernels, where a card's own operation differs in name or in rounding.

Where the flags allow TF32, operands of convolutions and products in float32 are rounded to TF32's 10 bits first. Those
in half precision are summed in float32, as tensor cores do; a CPU's own kernels take many times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.simgpu.calls import map_tensors

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# The positions of the operands that tensor cores round.
CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    "convolution": (0, 1), "_convolution": (0, 1), "cudnn_convolution": (0, 1), "cudnn_convolution_relu": (0, 1),
    "cudnn_convolution_add_relu": (0, 1), "convolution_backward": (0, 1, 2),
}  # fmt: skip
PRODUCTS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmm_": (1, 2),
}  # fmt: skip


def round_to_tf32(tensor: Tensor) -> Tensor:
    """Round float32 values to TF32's 10 bits of mantissa, halves away from zero; return a copy."""
    bits = tensor.clone().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor)


@dataclass(frozen=True)
class Precision:
    """Whether TF32 is allowed in convolutions and in products; a graph keeps the flags of its capture."""

    convolutions: bool
    products: bool

    @classmethod
    def now(cls) -> Precision:
        return cls(torch._C._get_cudnn_allow_tf32(), torch._C._get_cublas_allow_tf32())


def compute(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], precision: Precision | None = None
) -> Any:
    """Run an operation on tensors of the CPU as a card would; return its result.

    Args:
        func, args, kwargs: the call.
        precision: the flags of TF32; None for the present ones.
    """
    name = func.overloadpacket.__name__
    rounded: tuple[int, ...] = CONVOLUTIONS.get(name, ()) or PRODUCTS.get(name, ())
    if rounded and (dtype := args[1].dtype) in HALF and not (name.endswith("_") or kwargs):
        sums = compute(func, map_tensors(Tensor.float, args), kwargs, precision)
        return map_tensors(lambda t: t.to(dtype), sums)
    if rounded:
        flags = Precision.now() if precision is None else precision
        if not (flags.convolutions if name in CONVOLUTIONS else flags.products):
            rounded = ()
    arguments = list(args)
    for i in rounded:
        if arguments[i].dtype == torch.float32:
            arguments[i] = round_to_tf32(arguments[i])
    special = SPECIAL.get(name)
    result = func(*arguments, **kwargs) if special is None else special(func, *arguments, **kwargs)
    if name in CONVOLUTIONS and any(map(_is_channels_last, args[:3])):
        return map_tensors(_to_channels_last, result)
    return result


def _is_channels_last(operand: Any) -> bool:
    is_image = isinstance(operand, Tensor) and operand.dim() == 4 and not operand.is_contiguous()
    return is_image and operand.is_contiguous(memory_format=torch.channels_last)


def _to_channels_last(result: Tensor) -> Tensor:
    return result.contiguous(memory_format=torch.channels_last) if result.dim() == 4 else result


def _convolution_relu(func: Any, x: Any, weight: Any, bias: Any, *geometry: Any) -> Any:
    return _convolve(x, weight, bias, *geometry).relu_()


def _convolution_add_relu(func: Any, x: Any, weight: Any, z: Any, alpha: Any, bias: Any, *geometry: Any) -> Any:
    return _convolve(x, weight, bias, *geometry).add_(z, alpha=1 if alpha is None else alpha).relu_()


def _cudnn_convolution(
    func: Any, x: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: Any, *flags: Any
) -> Any:
    return _convolve(x, weight, None, stride, padding, dilation, groups)


def _convolve(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    outside = [0] * len(padding)
    return aten.convolution.default(x, weight, bias, stride, padding, dilation, False, outside, groups)


def _batch_norm(func: Any, x: Any, weight: Any, bias: Any, mean: Any, var: Any, train: Any, rate: Any, eps: Any) -> Any:
    y, *saved = aten.native_batch_norm.default(x, weight, bias, mean, var, train, rate, eps)
    return (y, *saved, torch.empty(0, dtype=torch.uint8))


def _batch_norm_backward(
    func: Any,
    x: Any,
    gradient: Any,
    weight: Any,
    mean: Any,
    var: Any,
    saved_mean: Any,
    saved_var: Any,
    eps: Any,
    _: Any,
) -> Any:
    wanted = [True, True, True]
    return aten.native_batch_norm_backward.default(
        gradient.contiguous(), x, weight, mean, var, saved_mean, saved_var, True, eps, wanted
    )


def _softmax(func: Any, x: Any, axis: Any, to_float: Any) -> Any:
    return func(x.float() if to_float else x, axis, False)


def _softmax_backward(func: Any, gradient: Any, output: Any, axis: Any, dtype: Any) -> Any:
    return func(gradient, output, axis, gradient.dtype).to(dtype)


SPECIAL: dict[str, Callable[..., Any]] = {
    "cudnn_convolution": _cudnn_convolution,
    "cudnn_convolution_relu": _convolution_relu,
    "cudnn_convolution_add_relu": _convolution_add_relu,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}
