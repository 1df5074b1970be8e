"""Which rule a function or method has; others can't be derived, unless nothing that goes in moves or scales."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from checkpoints_zoo.symmetry.deriving import elementwise as e
from checkpoints_zoo.symmetry.deriving import layers, norms, shapes
from checkpoints_zoo.symmetry.deriving.values import Step, Value

Rule = Callable[..., Any]

# Names that torch, torch.nn.functional and Tensor may all have, with "_" behind them where they work in place.
_NAMES: dict[Rule, str] = {
    e.homogeneous: "relu leaky_relu rrelu abs neg negative positive dropout dropout1d dropout2d dropout3d alpha_dropout"
    " feature_alpha_dropout contiguous clone detach to float double half bfloat16 type type_as cuda cpu requires_grad_",
    e.pointwise: "silu gelu relu6 hardswish hardsigmoid hardtanh sigmoid tanh elu selu celu softplus mish logsigmoid"
    " softsign tanhshrink hardshrink softshrink exp expm1 log log1p sin cos erf softmax log_softmax softmin",
    e.clamp: "clamp clip clamp_min",
    e.threshold: "threshold",
    e.prelu: "prelu",
    e.add: "add sub subtract",
    e.extreme: "maximum minimum max min",
    e.multiply: "mul multiply",
    e.divide: "div divide true_divide",
    e.raised: "pow",
    e.power_of(2): "square",
    e.power_of(0.5): "sqrt",
    e.power_of(-0.5): "rsqrt",
    e.power_of(-1): "reciprocal",
    e.reduced: "mean sum amax amin",
    e.padded: "pad",
    e.resized: "interpolate upsample",
    partial(e.pooled, 1): "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d",
    partial(e.pooled, 2): "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d",
    partial(e.pooled, 3): "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d",
    shapes.reshaped: "reshape view flatten unflatten squeeze unsqueeze view_as reshape_as",
    shapes.permuted: "permute",
    shapes.transposed: "transpose swapaxes swapdims t",
    shapes.expanded: "expand expand_as broadcast_to",
    shapes.concatenated: "cat concat concatenate",
    shapes.stacked: "stack",
    shapes.parts: "chunk split tensor_split",
    shapes.narrowed: "narrow",
    layers.linear: "linear",
    layers.matmul: "matmul mm bmm",
    layers.embedding: "embedding",
}
_BY_NAME: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}


def _convolution(dimensions: int) -> Rule:
    def rule(
        step: Step, input: Value, weight: Value, bias: Value | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Value:  # fmt: skip
        return layers.convolution(dimensions, step, input, weight, bias, groups)

    return rule


def _batch_norm(
    step: Step, input: Value, running_mean: Value | None, running_var: Value | None, weight: Value | None = None,
    bias: Value | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Value:  # fmt: skip
    mean, variance = (None, None) if training else (running_mean, running_var)
    return norms.batch_norm(step, input, weight, bias, mean, variance, eps)


def _group_norm(
    step: Step, input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    return norms.group_norm(step, input, num_groups, weight, bias)


def _layer_norm(
    step: Step, input: Value, normalized_shape: Any, weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:  # fmt: skip
    return norms.layer_norm(step, input, len(normalized_shape), weight, bias)


def _functions() -> dict[Any, Rule]:
    found: dict[Any, Rule] = {}
    for name, rule in _BY_NAME.items():
        for place in (torch, F):
            for spelling in (name, f"{name}_"):
                if hasattr(place, spelling):
                    found[getattr(place, spelling)] = rule
    for d in (1, 2, 3):
        for place in (torch, F):
            found[getattr(place, f"conv{d}d")] = _convolution(d)
    found |= {
        operator.add: e.add, operator.iadd: e.add, operator.sub: e.add, operator.isub: e.add,
        operator.mul: e.multiply, operator.imul: e.multiply, operator.truediv: e.divide, operator.itruediv: e.divide,
        "torchvision.ops.stochastic_depth.stochastic_depth": e.homogeneous,
        operator.neg: e.homogeneous, operator.abs: e.homogeneous, operator.pow: e.raised,
        F.batch_norm: _batch_norm, F.group_norm: _group_norm, F.layer_norm: _layer_norm,
        operator.matmul: layers.matmul, operator.getitem: shapes.indexed,
    }  # fmt: skip
    return found


FUNCTIONS = _functions()
METHODS: dict[str, Rule] = _BY_NAME | {f"{name}_": rule for name, rule in _BY_NAME.items()}
# These give no tensor, or none that is computed with.
SILENT = {
    getattr,
    "size",
    "dim",
    "numel",
    "ndimension",
    torch._assert,
    "is_floating_point",
    "get_device",
    "element_size",
}
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
ATTRIBUTES: dict[str, Rule] = {
    "T": shapes.transposed,
    "mT": partial(shapes.transposed, dim0=-2, dim1=-1),
    "data": e.homogeneous,
}
