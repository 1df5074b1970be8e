"""Which rule a function, a method or a layer has.

Functions without a rule can't be derived, unless nothing that goes in moves or scales. Rules of layers go by the full
name of the class; layers without one are traced into, or refused if they are torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from checkpoints_zoo.symmetry.deriving import elementwise, layers, shapes
from checkpoints_zoo.symmetry.deriving.values import Step, Value

Rule = Callable[..., Any]
LayerRule = Callable[..., Any]  # of (step, layer, own, *inputs)
Own = Callable[[str], Value | None]  # the tensor that a layer keeps under a name

# Names that torch, torch.nn.functional and Tensor may all have, with "_" behind them where they work in place.
_NAMES: dict[Rule, str] = {
    elementwise.homogeneous: "relu leaky_relu rrelu abs neg negative positive dropout dropout1d dropout2d dropout3d"
    " alpha_dropout feature_alpha_dropout contiguous clone detach to float double half bfloat16 type type_as cuda cpu"
    " requires_grad_",
    elementwise.pointwise: "silu gelu relu6 hardswish hardsigmoid hardtanh sigmoid tanh elu selu celu softplus mish"
    " logsigmoid softsign tanhshrink hardshrink softshrink exp expm1 log log1p sin cos erf softmax log_softmax softmin",
    elementwise.clamp: "clamp clip clamp_min",
    elementwise.threshold: "threshold",
    elementwise.prelu: "prelu",
    elementwise.add: "add sub subtract",
    elementwise.extreme: "maximum minimum max min",
    elementwise.multiply: "mul multiply",
    elementwise.divide: "div divide true_divide",
    elementwise.raised: "pow",
    elementwise.power_of(2): "square",
    elementwise.power_of(0.5): "sqrt",
    elementwise.power_of(-0.5): "rsqrt",
    elementwise.power_of(-1): "reciprocal",
    elementwise.reduced: "mean sum amax amin",
    elementwise.padded: "pad",
    elementwise.resized: "interpolate upsample",
    partial(elementwise.pooled, 1): "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d",
    partial(elementwise.pooled, 2): "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d",
    partial(elementwise.pooled, 3): "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d",
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
    return layers.batch_norm(step, input, weight, bias, mean, variance, eps)


def _group_norm(
    step: Step, input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    return layers.group_norm(step, input, num_groups, weight, bias)


def _layer_norm(
    step: Step, input: Value, normalized_shape: Any, weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:  # fmt: skip
    return layers.layer_norm(step, input, len(normalized_shape), weight, bias)


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
        operator.add: elementwise.add, operator.iadd: elementwise.add, operator.sub: elementwise.add,
        operator.isub: elementwise.add,
        operator.mul: elementwise.multiply, operator.imul: elementwise.multiply,
        operator.truediv: elementwise.divide, operator.itruediv: elementwise.divide,
        "torchvision.ops.stochastic_depth.stochastic_depth": elementwise.homogeneous,
        operator.neg: elementwise.homogeneous, operator.abs: elementwise.homogeneous, operator.pow: elementwise.raised,
        F.batch_norm: _batch_norm, F.group_norm: _group_norm, F.layer_norm: _layer_norm,
        operator.matmul: layers.matmul, operator.getitem: shapes.indexed,
    }  # fmt: skip
    return found


FUNCTIONS = _functions()
METHODS: dict[str, Rule] = _BY_NAME | {f"{name}_": rule for name, rule in _BY_NAME.items()}
# These give no tensor, or none that is computed with.
SILENT = {
    getattr, "size", "dim", "numel", "ndimension", torch._assert, "is_floating_point", "get_device", "element_size",
}  # fmt: skip
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
ATTRIBUTES: dict[str, Rule] = {
    "T": shapes.transposed,
    "mT": partial(shapes.transposed, dim0=-2, dim1=-1),
    "data": elementwise.homogeneous,
}


def rule_of(layer: nn.Module) -> LayerRule | None:
    """Return the rule of a layer: of its class, or of the class that it has its forward from."""
    kind = type(layer)
    for base in kind.__mro__:
        found = LAYERS.get(full_name(base))
        if found is not None and getattr(kind, "_conv_forward", None) is getattr(base, "_conv_forward", None):
            return found
        if "forward" in base.__dict__:
            return None
    return None


def full_name(kind: type) -> str:
    """Return a class's name with the file it comes from, or as it is known where it is torch's."""
    own = kind.__module__.startswith("torch.nn.modules.")
    return f"nn.{kind.__qualname__}" if own else f"{kind.__module__}.{kind.__qualname__}"


def _needed(step: Step, own: Own, name: str) -> Value:
    value = own(name)
    if value is None:
        step.refuse(f"a {name} that is computed from other tensors")
    return value


def _plain(rule: Callable[..., Any], *options: Any) -> LayerRule:
    """Return the rule of a layer without tensors."""
    return lambda step, layer, own, *x: rule(step, *x, *options)


def _linear(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return layers.linear(step, x, _needed(step, own, "weight"), own("bias"))


def _embedding(step: Step, layer: Any, own: Own, x: Value) -> Value:
    if layer.max_norm is not None:
        step.refuse("rows that are rescaled when they are read")
    return layers.embedding(step, x, _needed(step, own, "weight"))


def _convolution_layer(dimensions: int, rule: Callable[..., Value]) -> LayerRule:
    def of(step: Step, layer: Any, own: Own, x: Value) -> Value:
        return rule(dimensions, step, x, _needed(step, own, "weight"), own("bias"), layer.groups)

    return of


def _batch_norm_layer(step: Step, layer: Any, own: Own, x: Value) -> Value:
    mean, variance = own("running_mean"), own("running_var")
    return _activated(step, layer, layers.batch_norm(step, x, own("weight"), own("bias"), mean, variance, layer.eps))


def _response_norm(step: Step, layer: Any, own: Own, x: Value) -> Value:
    gain, offset = own("weight") or own("gamma"), own("bias") or own("beta")
    return _activated(step, layer, layers.response_norm(step, x, gain, offset, own("tau")))


def _instance_norm(step: Step, layer: Any, own: Own, x: Value) -> Value:
    if layer.track_running_stats:
        return _batch_norm_layer(step, layer, own, x)
    return layers.response_norm(step, x, own("weight"), own("bias"))


def _group_norm_layer(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return _activated(step, layer, layers.group_norm(step, x, layer.num_groups, own("weight"), own("bias")))


def _layer_norm_layer(step: Step, layer: Any, own: Own, x: Value) -> Value:
    count = len(layer.normalized_shape)
    return _activated(step, layer, layers.layer_norm(step, x, count, own("weight"), own("bias")))


def _channel_norm(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return _activated(step, layer, layers.axes_norm(step, x, [1], own("weight"), own("bias")))


def _activated(step: Step, layer: Any, x: Value) -> Value:
    """Apply the dropout and activation that some norms bring along."""
    for inner in (getattr(layer, "drop", None), getattr(layer, "act", None)):
        if inner is not None:
            rule = rule_of(inner)
            if rule is None:
                step.refuse(f"the activation {full_name(type(inner))}")
            x = rule(step, inner, lambda name: None, x)
    return x


def _clamped(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return elementwise.clamp(step, x, layer.min_val, layer.max_val)


def _threshold(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return elementwise.threshold(step, x, layer.threshold, layer.value)


def _prelu(step: Step, layer: Any, own: Own, x: Value) -> Value:
    return elementwise.prelu(step, x, _needed(step, own, "weight"))


def _padding(mode: str) -> LayerRule:
    return lambda step, layer, own, x: elementwise.padded(step, x, layer.padding, mode, getattr(layer, "value", 0))


# The rule of layers whose names end in 1d, 2d and 3d, by what comes before.
_BY_DIMENSION: dict[str, Callable[[int], LayerRule]] = {
    "nn.Conv": lambda d: _convolution_layer(d, layers.convolution),
    "nn.ConvTranspose": lambda d: _convolution_layer(d, layers.transposed_convolution),
    "nn.BatchNorm": lambda d: _batch_norm_layer,
    "nn.InstanceNorm": lambda d: _instance_norm,
    "nn.Dropout": lambda d: _plain(elementwise.homogeneous),
    "nn.ZeroPad": lambda d: _padding("constant"),
    "nn.ConstantPad": lambda d: _padding("constant"),
    "nn.ReflectionPad": lambda d: _padding("reflect"),
    "nn.ReplicationPad": lambda d: _padding("replicate"),
    "nn.CircularPad": lambda d: _padding("circular"),
} | {
    f"nn.{kind}Pool": lambda d: _plain(partial(elementwise.pooled, d))
    for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
}  # fmt: skip
_HOMOGENEOUS = "Identity ReLU LeakyReLU RReLU Dropout AlphaDropout FeatureAlphaDropout"
_POINTWISE = (
    "SiLU GELU ReLU6 Hardswish Hardsigmoid Sigmoid Tanh ELU SELU CELU Softplus Mish LogSigmoid Softsign Tanhshrink"
    " Hardshrink Softshrink Softmax Softmax2d LogSoftmax Softmin"
)
_TIMM = "timm.layers."
LAYERS: dict[str, LayerRule] = {
    **{f"{name}{d}d": make(d) for name, make in _BY_DIMENSION.items() for d in (1, 2, 3)},
    **{f"nn.{name}": _plain(elementwise.homogeneous) for name in _HOMOGENEOUS.split()},
    **{f"nn.{name}": _plain(elementwise.pointwise) for name in _POINTWISE.split()},
    "nn.SyncBatchNorm": _batch_norm_layer,
    "nn.Hardtanh": _clamped,
    "nn.Threshold": _threshold,
    "nn.PReLU": _prelu,
    "nn.Linear": _linear,
    "nn.Embedding": _embedding,
    "nn.GroupNorm": _group_norm_layer,
    "nn.LayerNorm": _layer_norm_layer,
    "nn.RMSNorm": _layer_norm_layer,
    "nn.Flatten": _plain(shapes.reshaped),
    "nn.Unflatten": _plain(shapes.reshaped),
    "nn.Upsample": _plain(elementwise.resized),
    f"{_TIMM}norm_act.BatchNormAct2d": _batch_norm_layer,
    f"{_TIMM}norm_act.FrozenBatchNormAct2d": _batch_norm_layer,
    f"{_TIMM}norm_act.GroupNormAct": _group_norm_layer,
    f"{_TIMM}norm_act.GroupNorm1Act": _group_norm_layer,
    f"{_TIMM}norm_act.LayerNormAct": _layer_norm_layer,
    f"{_TIMM}norm_act.LayerNormAct2d": _channel_norm,
    f"{_TIMM}norm.GroupNorm": _group_norm_layer,
    f"{_TIMM}norm.GroupNorm1": _group_norm_layer,
    f"{_TIMM}norm.LayerNorm": _layer_norm_layer,
    f"{_TIMM}norm.LayerNorm2d": _channel_norm,
    f"{_TIMM}filter_response_norm.FilterResponseNormTlu2d": _response_norm,
    f"{_TIMM}filter_response_norm.FilterResponseNormAct2d": _response_norm,
    "torch_uncertainty.layers.filter_response_norm._FilterResponseNormNd": _response_norm,
    "torchvision.ops.misc.FrozenBatchNorm2d": _batch_norm_layer,
}
