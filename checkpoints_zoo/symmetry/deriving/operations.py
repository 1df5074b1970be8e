"""Tables that give the rule of each function, method and layer.

A function without a rule is refused, unless no permutation or scale acts on its arguments. The rule of a layer is found
by the full name of its class. A layer without a rule is traced operation by operation; a layer of torch without a rule
is refused.

This is one file, because the tables and the rules of modules say together which operations are known.
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
from checkpoints_zoo.symmetry.deriving.values import Labelled, Step

Rule = Callable[..., Any]
LayerRule = Callable[..., Any]  # A rule of a layer is a function of (step, layer, tensor_of, *inputs).
# Function that returns the tensor of a layer, given the tensor's name in the layer.
TensorOf = Callable[[str], Labelled | None]

# Rules of functions and methods by their names in torch, torch.nn.functional and Tensor. The functions named with a
# final "_" work in place and have the same rules.
_NAMES_BY_RULE: dict[Rule, str] = {
    elementwise.homogeneous: "relu leaky_relu rrelu abs",
    elementwise.odd: "tanh sin erf softsign tanhshrink hardshrink softshrink",
    elementwise.hardtanh: "hardtanh",
    elementwise.linear: "neg negative positive dropout dropout1d dropout2d dropout3d contiguous"
    " clone detach to float double half bfloat16 type type_as cuda cpu"
    " requires_grad_",
    elementwise.alpha_dropout: "alpha_dropout feature_alpha_dropout",
    elementwise.pointwise: "silu gelu relu6 hardswish hardsigmoid sigmoid elu selu celu softplus mish"
    " logsigmoid exp expm1 log log1p cos softmax log_softmax softmin",
    elementwise.clamp: "clamp clip clamp_min",
    elementwise.threshold: "threshold",
    elementwise.prelu: "prelu",
    elementwise.add: "add sub subtract",
    elementwise.maximum: "maximum minimum max min",
    elementwise.multiply: "mul multiply",
    elementwise.divide: "div divide true_divide",
    elementwise.raise_to: "pow",
    elementwise.power_rule(2): "square",
    elementwise.power_rule(0.5): "sqrt",
    elementwise.power_rule(-0.5): "rsqrt",
    elementwise.power_rule(-1): "reciprocal",
    elementwise.reduce_axes: "mean sum",
    elementwise.reduce_to_extreme: "amax amin",
    elementwise.pad: "pad",
    elementwise.resize: "interpolate upsample",
    partial(elementwise.pool, 1): "avg_pool1d adaptive_avg_pool1d",
    partial(elementwise.max_pool, 1): "max_pool1d adaptive_max_pool1d",
    partial(elementwise.pool, 2): "avg_pool2d adaptive_avg_pool2d",
    partial(elementwise.max_pool, 2): "max_pool2d adaptive_max_pool2d",
    partial(elementwise.pool, 3): "avg_pool3d adaptive_avg_pool3d",
    partial(elementwise.max_pool, 3): "max_pool3d adaptive_max_pool3d",
    shapes.reshape: "reshape view flatten unflatten squeeze unsqueeze view_as reshape_as",
    shapes.permute_axes: "permute",
    shapes.transpose: "transpose swapaxes swapdims t",
    shapes.expand: "expand expand_as broadcast_to",
    shapes.concatenate: "cat concat concatenate",
    shapes.stack: "stack",
    shapes.split_into_parts: "chunk split tensor_split",
    shapes.narrow: "narrow",
    layers.linear: "linear",
    layers.matmul: "matmul mm bmm",
    layers.embedding: "embedding",
}
_RULES_BY_NAME: dict[str, Rule] = {name: rule for rule, names in _NAMES_BY_RULE.items() for name in names.split()}


def _convolution(dimensions: int) -> Rule:
    def rule(
        step: Step, input: Labelled, weight: Labelled, bias: Labelled | None = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Labelled:  # fmt: skip
        return layers.convolution(dimensions, step, input, weight, bias, groups)

    return rule


def _batch_norm(
    step: Step, input: Labelled, running_mean: Labelled | None, running_var: Labelled | None,
    weight: Labelled | None = None, bias: Labelled | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Labelled:  # fmt: skip
    mean, variance = (None, None) if training else (running_mean, running_var)
    return layers.batch_norm(step, input, weight, bias, mean, variance, eps)


def _group_norm(
    step: Step,
    input: Labelled,
    num_groups: int,
    weight: Labelled | None = None,
    bias: Labelled | None = None,
    eps: float = 1e-5,
) -> Labelled:
    return layers.group_norm(step, input, num_groups, weight, bias)


def _layer_norm(
    step: Step, input: Labelled, normalized_shape: Any, weight: Labelled | None = None, bias: Labelled | None = None,
    eps: float = 1e-5,
) -> Labelled:  # fmt: skip
    return layers.layer_norm(step, input, len(normalized_shape), weight, bias)


def _function_rules() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for name, rule in _RULES_BY_NAME.items():
        for module in (torch, F):
            for spelling in (name, f"{name}_"):
                if hasattr(module, spelling):
                    rules[getattr(module, spelling)] = rule
    for d in (1, 2, 3):
        for module in (torch, F):
            rules[getattr(module, f"conv{d}d")] = _convolution(d)
    rules |= {
        operator.add: elementwise.add, operator.iadd: elementwise.add, operator.sub: elementwise.add,
        operator.isub: elementwise.add,
        operator.mul: elementwise.multiply, operator.imul: elementwise.multiply,
        operator.truediv: elementwise.divide, operator.itruediv: elementwise.divide,
        "torchvision.ops.stochastic_depth.stochastic_depth": elementwise.linear,
        operator.neg: elementwise.linear, operator.abs: elementwise.homogeneous,
        operator.pow: elementwise.raise_to,
        torch.embedding: lambda step, weight, indices, *options: layers.embedding(step, indices, weight),
        F.batch_norm: _batch_norm, F.group_norm: _group_norm, F.layer_norm: _layer_norm,
        operator.matmul: layers.matmul, operator.getitem: shapes.take_index,
    }  # fmt: skip
    return rules


FUNCTION_RULES = _function_rules()
METHOD_RULES: dict[str, Rule] = _RULES_BY_NAME | {f"{name}_": rule for name, rule in _RULES_BY_NAME.items()}
# Functions and methods whose results are no tensors.
WITHOUT_TENSOR_RESULT = {
    getattr, "size", "dim", "numel", "ndimension", torch._assert, "is_floating_point", "get_device", "element_size",
}  # fmt: skip
IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow}
ATTRIBUTE_RULES: dict[str, Rule] = {
    "T": shapes.transpose,
    "mT": partial(shapes.transpose, dim0=-2, dim1=-1),
    "data": elementwise.linear,
}


def layer_rule(layer: nn.Module) -> LayerRule | None:
    """Return the rule of a layer, which is the rule of the class that defines the layer's `forward`; None if the class
    has no rule."""
    layer_class = type(layer)
    for base in layer_class.__mro__:
        rule = LAYER_RULES.get(full_name(base))
        if rule is not None and getattr(layer_class, "_conv_forward", None) is getattr(base, "_conv_forward", None):
            return rule
        if "forward" in base.__dict__:
            return None
    return None


def full_name(layer_class: type) -> str:
    """Return the full name of a class; classes of torch are named as in torch.nn."""
    is_in_torch = layer_class.__module__.startswith("torch.nn.modules.")
    return f"nn.{layer_class.__qualname__}" if is_in_torch else f"{layer_class.__module__}.{layer_class.__qualname__}"


def _required_tensor(step: Step, tensor_of: TensorOf, tensor_name: str) -> Labelled:
    value = tensor_of(tensor_name)
    if value is None:
        step.refuse(f"a {tensor_name} that is computed from other tensors")
    return value


def _rule_without_tensors(rule: Callable[..., Any], *options: Any) -> LayerRule:
    """Turn the rule of a function into the rule of a layer without tensors that calls the function; return the layer's
    rule."""
    return lambda step, layer, tensor_of, *x: rule(step, *x, *options)


def _linear(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return layers.linear(step, x, _required_tensor(step, tensor_of, "weight"), tensor_of("bias"))


def _embedding(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return layers.embedding(step, x, _required_tensor(step, tensor_of, "weight"), max_norm=layer.max_norm)


def _convolution_layer(dimensions: int, rule: Callable[..., Labelled]) -> LayerRule:
    def layer_rule(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
        return rule(dimensions, step, x, _required_tensor(step, tensor_of, "weight"), tensor_of("bias"), layer.groups)

    return layer_rule


def _batch_norm_layer(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    mean, variance = tensor_of("running_mean"), tensor_of("running_var")
    return _apply_activation(
        step, layer, layers.batch_norm(step, x, tensor_of("weight"), tensor_of("bias"), mean, variance, layer.eps)
    )


def _response_norm(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    gain, offset = tensor_of("weight") or tensor_of("gamma"), tensor_of("bias") or tensor_of("beta")
    threshold = tensor_of("tau")
    result = layers.response_norm(step, x, gain, offset, threshold)
    if threshold is not None:
        result = elementwise.homogeneous(step, result)
    return _apply_activation(step, layer, result)


def _instance_norm(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    if layer.track_running_stats:
        return _batch_norm_layer(step, layer, tensor_of, x)
    return layers.response_norm(step, x, tensor_of("weight"), tensor_of("bias"))


def _group_norm_layer(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return _apply_activation(
        step, layer, layers.group_norm(step, x, layer.num_groups, tensor_of("weight"), tensor_of("bias"))
    )


def _layer_norm_layer(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    count = len(layer.normalized_shape)
    return _apply_activation(step, layer, layers.layer_norm(step, x, count, tensor_of("weight"), tensor_of("bias")))


def _channel_norm(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return _apply_activation(step, layer, layers.axes_norm(step, x, [1], tensor_of("weight"), tensor_of("bias")))


def _apply_activation(step: Step, norm: Any, x: Labelled) -> Labelled:
    """Apply the dropout and the activation that are part of some norms."""
    for inner in (getattr(norm, "drop", None), getattr(norm, "act", None)):
        if inner is not None:
            rule = layer_rule(inner)
            if rule is None:
                step.refuse(f"the activation {full_name(type(inner))}")
            x = rule(step, inner, lambda name: None, x)
    return x


def _clamp_layer(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return elementwise.clamp(step, x, layer.min_val, layer.max_val)


def _threshold(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return elementwise.threshold(step, x, layer.threshold, layer.value)


def _prelu(step: Step, layer: Any, tensor_of: TensorOf, x: Labelled) -> Labelled:
    return elementwise.prelu(step, x, _required_tensor(step, tensor_of, "weight"))


def _padding(mode: str) -> LayerRule:
    return lambda step, layer, tensor_of, x: elementwise.pad(step, x, layer.padding, mode, getattr(layer, "value", 0))


# Rules of layers whose names end in 1d, 2d and 3d, by the name without this ending (the argument is the number of
# dimensions).
_RULES_BY_DIMENSION: dict[str, Callable[[int], LayerRule]] = {
    "nn.Conv": lambda d: _convolution_layer(d, layers.convolution),
    "nn.ConvTranspose": lambda d: _convolution_layer(d, layers.transposed_convolution),
    "nn.BatchNorm": lambda d: _batch_norm_layer,
    "nn.InstanceNorm": lambda d: _instance_norm,
    "nn.Dropout": lambda d: _rule_without_tensors(elementwise.linear),
    "nn.ZeroPad": lambda d: _padding("constant"),
    "nn.ConstantPad": lambda d: _padding("constant"),
    "nn.ReflectionPad": lambda d: _padding("reflect"),
    "nn.ReplicationPad": lambda d: _padding("replicate"),
    "nn.CircularPad": lambda d: _padding("circular"),
    "nn.MaxPool": lambda d: _rule_without_tensors(partial(elementwise.max_pool, d)),
    "nn.AdaptiveMaxPool": lambda d: _rule_without_tensors(partial(elementwise.max_pool, d)),
    "nn.AvgPool": lambda d: _rule_without_tensors(partial(elementwise.pool, d)),
    "nn.AdaptiveAvgPool": lambda d: _rule_without_tensors(partial(elementwise.pool, d)),
}  # fmt: skip
_LINEAR_LAYERS = "Identity Dropout AlphaDropout FeatureAlphaDropout"
_HOMOGENEOUS_LAYERS = "ReLU LeakyReLU RReLU"
_ODD_LAYERS = "Tanh Softsign Tanhshrink Hardshrink Softshrink"
_POINTWISE_LAYERS = (
    "SiLU GELU ReLU6 Hardswish Hardsigmoid Sigmoid ELU SELU CELU Softplus Mish LogSigmoid"
    " Softmax Softmax2d LogSoftmax Softmin"
)
_TIMM_LAYERS = "timm.layers."
LAYER_RULES: dict[str, LayerRule] = {
    **{f"{name}{d}d": make(d) for name, make in _RULES_BY_DIMENSION.items() for d in (1, 2, 3)},
    **{f"nn.{name}": _rule_without_tensors(elementwise.linear) for name in _LINEAR_LAYERS.split()},
    **{f"nn.{name}": _rule_without_tensors(elementwise.homogeneous) for name in _HOMOGENEOUS_LAYERS.split()},
    **{f"nn.{name}": _rule_without_tensors(elementwise.odd) for name in _ODD_LAYERS.split()},
    **{f"nn.{name}": _rule_without_tensors(elementwise.pointwise) for name in _POINTWISE_LAYERS.split()},
    "nn.SyncBatchNorm": _batch_norm_layer,
    "nn.Hardtanh": _clamp_layer,
    "nn.Threshold": _threshold,
    "nn.PReLU": _prelu,
    "nn.Linear": _linear,
    "nn.Embedding": _embedding,
    "nn.GroupNorm": _group_norm_layer,
    "nn.LayerNorm": _layer_norm_layer,
    "nn.RMSNorm": _layer_norm_layer,
    "nn.Flatten": _rule_without_tensors(shapes.reshape),
    "nn.Unflatten": _rule_without_tensors(shapes.reshape),
    "nn.Upsample": _rule_without_tensors(elementwise.resize),
    f"{_TIMM_LAYERS}norm_act.BatchNormAct2d": _batch_norm_layer,
    f"{_TIMM_LAYERS}norm_act.FrozenBatchNormAct2d": _batch_norm_layer,
    f"{_TIMM_LAYERS}norm_act.GroupNormAct": _group_norm_layer,
    f"{_TIMM_LAYERS}norm_act.GroupNorm1Act": _group_norm_layer,
    f"{_TIMM_LAYERS}norm_act.LayerNormAct": _layer_norm_layer,
    f"{_TIMM_LAYERS}norm_act.LayerNormAct2d": _channel_norm,
    f"{_TIMM_LAYERS}norm.GroupNorm": _group_norm_layer,
    f"{_TIMM_LAYERS}norm.GroupNorm1": _group_norm_layer,
    f"{_TIMM_LAYERS}norm.LayerNorm": _layer_norm_layer,
    f"{_TIMM_LAYERS}norm.LayerNorm2d": _channel_norm,
    f"{_TIMM_LAYERS}filter_response_norm.FilterResponseNormTlu2d": _response_norm,
    f"{_TIMM_LAYERS}filter_response_norm.FilterResponseNormAct2d": _response_norm,
    "torch_uncertainty.layers.filter_response_norm._FilterResponseNormNd": _response_norm,
    "torchvision.ops.misc.FrozenBatchNorm2d": _batch_norm_layer,
}
