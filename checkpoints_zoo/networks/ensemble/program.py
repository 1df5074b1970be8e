"""A network as a list of steps that run one member or several side by side.

With several, their channels lie next to each other, a member's together: (batch, member·channel, …). Convolutions are
grouped then, and all steps but linear layers are the ones that a member alone takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# What a step computes: (members side by side, the operand that may be overwritten or -1, operands) -> result.
Compute = Callable[..., Any]


@dataclass(frozen=True)
class Parameter:
    """What a step needs of a tensor of the state dict.

    Args:
        name: in the state dict.
        bring: a stack of it, (member, …), into the step's form.
        kernel: whether it is a convolution's kernel.
    """

    name: str
    bring: Callable[[Tensor], Tensor]
    kernel: bool = False


@dataclass(frozen=True)
class Norm:
    """A batch norm that only reads what one convolution writes.

    Args:
        kernel, bias: places of the convolution's parameters.
        names: of its weight and bias in the state dict, the bias "" where it has none.
        places: of the norm's own mean, variance, weight and bias.
        norm: names of these in the state dict, "" where it has none.
        eps: of the norm.
    """

    kernel: int
    bias: int
    names: tuple[str, str]
    places: tuple[int, int, int, int]
    norm: tuple[str, str, str, str]
    eps: float


@dataclass(frozen=True)
class Step:
    """One operation.

    Args:
        compute: what it does.
        reads: places of its operands.
        place: of its result.
        over: which operand it may write its result over, -1 for none: nothing reads that one later.
        frees: places that nothing reads later.
    """

    compute: Compute
    reads: tuple[int, ...]
    place: int
    over: int
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A network's steps.

    Args:
        parameters: what the steps need, in the first places; None where a folded norm may put a bias.
        steps: in order; the input's place is the one after the parameters'.
        places: how many there are.
        result: place of the logits.
        norms: that can be folded into convolutions.
    """

    parameters: tuple[Parameter | None, ...]
    steps: tuple[Step, ...]
    places: int
    result: int
    norms: tuple[Norm, ...]

    def ready(
        self, stacked: Mapping[str, Tensor], folded: Sequence[Norm] = (), channels_last: bool = False
    ) -> list[Tensor | None]:
        """Bring members' tensors into the form that the steps take; return them by place.

        Args:
            stacked: of the members that run side by side, name -> (member, …).
            folded: norms to fold into the convolutions before them.
            channels_last: whether kernels are to have that memory format.
        """
        changed: dict[int, tuple[str, Tensor]] = {}
        away: set[int] = set()
        for norm in folded:
            weight, bias = fold(norm, stacked)
            changed |= {norm.kernel: ("", weight), norm.bias: ("", bias)}
            away.update(norm.places)
        places: list[Tensor | None] = []
        for i, parameter in enumerate(self.parameters):
            if i in away or (parameter is None and i not in changed):
                places.append(None)
            elif parameter is None:
                places.append(changed[i][1].flatten(0, 1))
            else:
                tensor = parameter.bring(changed[i][1] if i in changed else stacked[parameter.name])
                if parameter.kernel and channels_last and tensor.dim() == 4:
                    tensor = tensor.contiguous(memory_format=torch.channels_last)
                places.append(tensor)
        return places

    def run(
        self,
        ready: Sequence[Tensor | None],
        inputs: Tensor,
        members: int,
        overwrite: bool,
        sizes: list[int] | None = None,
    ) -> Tensor:
        """Run members side by side on a batch of inputs; return logits (member, batch, …).

        Args:
            ready: from `ready`, of these members.
            inputs: (batch, …).
            members: how many.
            overwrite: whether intermediate results may be overwritten; not where gradients are wanted.
            sizes: takes the elements of each step's result.
        """
        values: list[Any] = [*ready, inputs, *[None] * (self.places - len(ready) - 1)]
        for step in self.steps:
            operands = [values[i] for i in step.reads]
            values[step.place] = step.compute(members, step.over if overwrite else -1, *operands)
            if sizes is not None:
                sizes.append(values[step.place].numel())
            for i in step.frees:
                values[i] = None
        logits: Tensor = values[self.result]
        return (
            logits[None]
            if members == 1
            else logits.reshape(len(logits), members, -1, *logits.shape[2:]).transpose(0, 1)
        )


def fold(norm: Norm, stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into its convolution; return kernel (member, …) and bias (member, channel).

    gamma · (w∗x + b − mean) / sqrt(var + eps) + beta is a convolution with w · gamma / sqrt(var + eps).
    """
    weight = stacked[norm.names[0]]
    mean, factor, beta = _norm(norm, stacked)
    bias = stacked[norm.names[1]].double() if norm.names[1] else torch.zeros_like(mean)
    wide = weight if weight.dtype == torch.float64 else weight.float()
    kernel = wide * factor.to(wide.dtype).reshape(*factor.shape, *[1] * (weight.dim() - 2))
    return kernel.to(weight.dtype), (beta + (bias - mean) * factor).to(weight.dtype)


# |mean| / sqrt(var + eps) up to which folding changes float32 results by less than 1e-5 of their size: a rounding
# error of 6e-8 of the convolution's output is that much larger after it. The norm itself would magnify it as well.
MOST = 64.0


def safe_norms(norms: Sequence[Norm], stacked: Mapping[str, Tensor]) -> tuple[Norm, ...]:
    """Choose the norms whose statistics, of all members, are such that folding them changes nothing but rounding."""
    kept = []
    for norm in norms:
        mean, factor, beta = _norm(norm, stacked)
        weight = stacked[norm.names[0]]
        limit = torch.finfo(weight.dtype).max / 4
        largest = torch.stack(torch.aminmax(weight)).abs().max().double()
        variance = stacked[norm.norm[1]].double()
        ratio = mean.abs() / (variance + norm.eps).sqrt()
        fits = (largest * factor.abs() < limit).all() and ((mean * factor).abs() + beta.abs() < limit).all()
        if bool(fits) and bool((ratio <= MOST).all()):
            kept.append(norm)
    return tuple(kept)


def _norm(norm: Norm, stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a norm's mean, factor and offset (member, channel) in float64."""
    mean, variance = (stacked[name].double() for name in norm.norm[:2])
    factor = (variance + norm.eps).rsqrt()
    if norm.norm[2]:
        factor = factor * stacked[norm.norm[2]].double()
    beta = stacked[norm.norm[3]].double() if norm.norm[3] else torch.zeros_like(mean)
    return mean, factor, beta


CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d,
}  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

# Layers without parameters that treat each channel alike, and the rank of what they take; any rank is None.
LAYERS: dict[type[nn.Module], int | None] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), 3),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d), 4),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), 5),
    **dict.fromkeys((nn.ReflectionPad2d, nn.ReplicationPad2d, nn.UpsamplingNearest2d), 4),
    **dict.fromkeys((nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink), None),
}  # fmt: skip
# The same, and these can overwrite what they take.
IN_PLACE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.SiLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
    nn.Mish, nn.Threshold,
)  # fmt: skip

# Functions of a tensor and plain arguments that act on each value alone, by the names that they are called by.
POINTWISE: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "silu": F.silu, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "elu": F.elu, "selu": F.selu,
    "celu": F.celu, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh, "mish": F.mish,
    "gelu": F.gelu, "softplus": F.softplus, "logsigmoid": F.logsigmoid, "softsign": F.softsign,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "square": torch.square, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "exp": torch.exp, "log": torch.log, "abs": torch.abs, "neg": torch.neg, "reciprocal": torch.reciprocal,
    "clamp": torch.clamp, "float": Tensor.float, "half": Tensor.half, "double": Tensor.double,
    "contiguous": Tensor.contiguous,
}  # fmt: skip
OVERWRITING = ("relu", "silu", "relu6", "leaky_relu", "elu", "selu", "celu", "hardswish", "hardsigmoid", "hardtanh",
               "mish")  # fmt: skip
SHARING = ("float", "half", "double", "contiguous")  # may return what they are given

BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "truediv": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin,
}  # fmt: skip
POOLS: dict[Callable[..., Any], int] = {
    F.adaptive_avg_pool2d: 4, F.avg_pool2d: 4, F.max_pool2d: 4, F.adaptive_max_pool2d: 4, torch.max_pool2d: 4,
    F.avg_pool1d: 3, F.max_pool1d: 3, F.adaptive_avg_pool1d: 3,
}  # fmt: skip


def convolution(layer: Any, shared: bool) -> Compute:
    """Convolve: operands x, kernels, biases; of shared inputs all members' kernels are one large kernel."""
    function, stride, padding = CONVOLUTIONS[type(layer)], layer.stride, layer.padding
    dilation, groups = layer.dilation, layer.groups

    def compute(members: int, over: int, x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
        return function(x, kernel, bias, stride, padding, dilation, groups if shared else groups * members)

    return compute


def batch_norm(eps: float) -> Compute:
    """Normalise with running statistics: operands x, mean, variance, weight, bias; without a mean it was folded."""

    def compute(
        members: int,
        over: int,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return x if mean is None else F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    return compute


def group_norm(groups: int, eps: float) -> Compute:
    def compute(members: int, over: int, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, groups * members, weight, bias, eps)

    return compute


def apart(x: Tensor, members: int) -> Tensor:
    """Give members an axis of their own; return (batch, member, channel, …)."""
    return x.reshape(len(x), members, -1, *x.shape[2:])


def linear(shared: bool) -> Compute:
    """Multiply: operands x (batch, member·feature), weights (member, out, in), biases (member, out) or None."""

    def compute(members: int, over: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if members == 1:
            return F.linear(x, weight[0], None if bias is None else bias[0])
        own = x.expand(members, *x.shape) if shared else apart(x, members).transpose(0, 1)
        out = own @ weight.mT if bias is None else torch.baddbmm(bias[:, None], own, weight.mT)
        return out.transpose(0, 1).flatten(1, 2)

    return compute


def same(members: int, over: int, x: Tensor) -> Tensor:
    return x


def repeat(members: int, over: int, x: Tensor) -> Tensor:
    """Give each member the inputs that all share."""
    return x if members == 1 else x.repeat(1, members, *[1] * (x.dim() - 2))


def flatten(members: int, over: int, x: Tensor) -> Tensor:
    return x.flatten(1)


def flatten_to(width: int) -> Compute:
    def compute(members: int, over: int, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        if flat.shape[1] != members * width:
            raise RuntimeError(f"{width} features a row expected, {flat.shape[1] // members} found")
        return flat

    return compute


def layer(module: nn.Module) -> Compute:
    """Call a layer without parameters."""

    def compute(members: int, over: int, x: Tensor) -> Tensor:
        result: Tensor = module.forward(x)
        return result

    return compute


def switched(modules: tuple[nn.Module, nn.Module]) -> Compute:
    """Call the first of two twins, or the second, which overwrites what it takes."""
    plain, overwriting = modules

    def compute(members: int, over: int, x: Tensor) -> Tensor:
        result: Tensor = (plain if over < 0 else overwriting).forward(x)
        return result

    return compute


def pointwise(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Compute:
    function = POINTWISE[name]
    more = [options, {**options, "inplace": True} if name in OVERWRITING else options]

    def compute(members: int, over: int, x: Tensor) -> Tensor:
        return function(x, *arguments, **more[over >= 0])

    return compute


def called(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Compute:
    """Call a function of one activation and plain arguments."""

    def compute(members: int, over: int, x: Tensor) -> Tensor:
        result: Tensor = function(x, *arguments, **options)
        return result

    return compute


def binary(name: str, number: float | None) -> Compute:
    """Combine two tensors, or a tensor and a number."""
    function = BINARY[name]

    def compute(members: int, over: int, *tensors: Tensor) -> Tensor:
        if number is not None:
            a = tensors[0]
            return function(a, number, out=a) if over == 0 and a.is_floating_point() else function(a, number)
        a, b = tensors if members == 1 else _alike(*tensors)
        if over >= 0 and _holds((a, b)[over], (a, b)[1 - over]):
            return function(a, b, out=(a, b)[over])
        return function(a, b)

    return compute


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat what has one value a member for each of its channels."""
    small, large = a.shape[1], b.shape[1]
    if small < large:
        return a.repeat_interleave(large // small, 1), b
    return a, b if small == large else b.repeat_interleave(small // large, 1)


def _holds(target: Tensor, other: Tensor) -> bool:
    """Say whether the result of two tensors has the shape and dtype of the first."""
    if target.shape != other.shape and any(n not in (1, m) for n, m in zip(other.shape, target.shape, strict=True)):
        return False
    return target.dtype == other.dtype and target.is_floating_point()


def spatial(name: str, axes: tuple[int, ...], keep: bool) -> Compute:
    """Reduce over axes behind the channels."""
    function = REDUCTIONS[name]

    def compute(members: int, over: int, x: Tensor) -> Tensor:
        return function(x, dim=axes, keepdim=keep)

    return compute


def expanded(members: int, over: int, x: Tensor, like: Tensor) -> Tensor:
    return x.expand(like.shape)


def cast(members: int, over: int, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


def joined(members: int, over: int, *parts: Tensor) -> Tensor:
    """Concatenate channels, each member's to its own."""
    if members == 1:
        return torch.cat(parts, 1)
    return torch.cat([apart(part, members) for part in parts], 2).flatten(1, 2)
