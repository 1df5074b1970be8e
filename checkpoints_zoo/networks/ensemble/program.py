"""A network as a list of steps that run one member, or several members side by side.

Side by side, activations have shape (batch, member·channel, …): the channels of one member, then those of the next.
Convolutions become grouped convolutions and linear layers become batched matrix products; all other steps are the same
as for one member. Tokens have shape (member·batch, …) instead: `batch_layout` has their steps.

This is one file, because programs join and fold the steps that the file defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Function of a step: (number of members side by side, index of the operand to overwrite or -1, *operands) -> result.
Compute = Callable[..., Any]


@dataclass(frozen=True)
class StepParameter:
    """A tensor of the state dict that a step reads.

    Args:
        name: name of the tensor in the state dict.
        arrange: function that brings the stacked tensor (member, …) into the shape that the step reads.
        kernel_groups: number of groups of a member's convolution if the tensor is its kernel; 0 if all members
            share the convolution's inputs, None for other tensors.
    """

    name: str
    arrange: Callable[[Tensor], Tensor]
    kernel_groups: int | None = None


@dataclass(frozen=True)
class FoldableNorm:
    """A batch norm whose only input is the output of one convolution.

    Args:
        kernel, bias: positions of the convolution's kernel and bias in the program's list of values.
        names: names of the convolution's kernel and bias in the state dict; "" if there is no bias.
        places: positions of the norm's mean, variance, weight and bias in the program's list of values.
        norm: names of the norm's mean, variance, weight and bias in the state dict; "" for a missing tensor.
        eps: eps of the norm.
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
        compute: function that the step calls.
        reads: positions of the step's operands in the program's list of values.
        place: position in the program's list of values to which the step writes its result.
        overwrite_index: index of an operand that the result may overwrite, because no later step reads that operand; -1
            for none.
        freed_places: positions of values that no later step reads, so that their memory can be freed.
    """

    compute: Compute
    reads: tuple[int, ...]
    place: int
    overwrite_index: int
    freed_places: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """The steps that compute a network's logits, in order. A place is an index into the list of values that steps read
    and write.

    Args:
        parameters: the parameters, which are the first values in the list; None stands for the bias of a folded norm.
        steps: the steps in order; the network's inputs follow the parameters in the list of values.
        places: length of the list of values.
        result: position of the logits in the list of values.
        norms: the batch norms that can be folded into convolutions.
    """

    parameters: tuple[StepParameter | None, ...]
    steps: tuple[Step, ...]
    places: int
    result: int
    norms: tuple[FoldableNorm, ...]

    def prepare(
        self,
        stacked: Mapping[str, Tensor],
        folded_norms: Sequence[FoldableNorm] = (),
        channels_last: bool = False,
        joined_channels: int = 0,
    ) -> list[Tensor | None]:
        """Arrange the tensors of members for the steps; return the first part of the list of values.

        Args:
            stacked: tensors of the members that run side by side, name -> (member, …).
            folded_norms: batch norms to fold into the convolutions before them.
            channels_last: whether kernels get the memory format channels_last.
            joined_channels: number of input channels up to which kernels of neighbouring members are joined into one
                block-diagonal kernel; 0 for no joining. GPUs are slow at groups of few channels.
        """
        folded_tensor_at: dict[int, tuple[str, Tensor]] = {}
        folded_places: set[int] = set()
        for norm in folded_norms:
            weight, bias = fold_norm(norm, stacked)
            folded_tensor_at |= {norm.kernel: ("", weight), norm.bias: ("", bias)}
            folded_places.update(norm.places)
        prepared_params: list[Tensor | None] = []
        for i, parameter in enumerate(self.parameters):
            if i in folded_places or (parameter is None and i not in folded_tensor_at):
                prepared_params.append(None)
            elif parameter is None:
                prepared_params.append(folded_tensor_at[i][1].flatten(0, 1))
            else:
                tensor = parameter.arrange(folded_tensor_at[i][1] if i in folded_tensor_at else stacked[parameter.name])
                if parameter.kernel_groups and joined_channels:
                    member_count = len(stacked[parameter.name])
                    tensor = join_groups(tensor, parameter.kernel_groups * member_count, joined_channels)
                if parameter.kernel_groups is not None and channels_last and tensor.dim() == 4:
                    tensor = tensor.contiguous(memory_format=torch.channels_last)
                prepared_params.append(tensor)
        return prepared_params

    def with_fused_relus(self, folded_norms: Sequence[FoldableNorm]) -> Program:
        """Return the program with ReLUs, and the additions before them, joined to convolutions, for members that run
        one at a time on a GPU.

        A convolution is joined with the ReLU that alone reads its result, through a folded norm and an addition of an
        activation that exists before the convolution. The steps that are joined to it return their input.
        """
        steps = list(self.steps)
        for index, step in enumerate(self.steps):
            if isinstance(step.compute, Convolution) and step.compute.is_fusible:
                joined, added = self._steps_up_to_relu(step, {norm.places[0] for norm in folded_norms})
                if joined:
                    steps[index] = replace(step, compute=ConvolutionAndRelu(step.compute), reads=(*step.reads, *added))
                for i in joined:
                    value = next(place for place in steps[i].reads if place not in added)
                    steps[i] = replace(steps[i], compute=return_input, reads=(value,))
        return replace(self, steps=tuple(steps))

    def _steps_up_to_relu(self, convolution: Step, folded_places: set[int]) -> tuple[list[int], list[int]]:
        """Find the steps that can be joined to a convolution; return their indices, the ReLU's last, and the place of
        the activation that is added, if there is one. Return empty lists if there is no such ReLU."""
        joined, added, place = list[int](), list[int](), convolution.place
        while place != self.result:
            readers = [i for i, step in enumerate(self.steps) for read in step.reads if read == place]
            if len(readers) != 1:
                break
            reader = self.steps[readers[0]]
            joined += readers
            if is_relu(reader.compute):
                return joined, added
            if reader.compute == Binary("add", None) and not added:
                added = [read for read in reader.reads if read != place]
                if not len(self.parameters) <= added[0] < convolution.place:
                    break
            elif reader.compute is not return_input and not (
                isinstance(reader.compute, BatchNorm) and reader.reads[1] in folded_places and not added
            ):
                break
            place = reader.place
        return [], []

    def run(
        self,
        prepared: Sequence[Tensor | None],
        inputs: Tensor,
        member_count: int,
        can_overwrite: bool,
        element_counts: list[int] | None = None,
    ) -> Tensor:
        """Run members side by side on a batch of inputs; return logits (member, batch, …).

        Args:
            prepared: the result of `prepare` for these members.
            inputs: (batch, …).
            member_count: the number of members.
            can_overwrite: whether intermediate results may be overwritten; gradients forbid it.
            element_counts: list to which the number of elements of each step's result is appended.
        """
        values: list[Any] = [*prepared, inputs, *[None] * (self.places - len(prepared) - 1)]
        for step in self.steps:
            operands = [values[i] for i in step.reads]
            values[step.place] = step.compute(member_count, step.overwrite_index if can_overwrite else -1, *operands)
            if element_counts is not None:
                element_counts.append(values[step.place].numel())
            for i in step.freed_places:
                values[i] = None
        logits: Tensor = values[self.result]
        return (
            logits[None]
            if member_count == 1
            else logits.reshape(len(logits), member_count, -1, *logits.shape[2:]).transpose(0, 1)
        )

    def run_one(self, prepared: Sequence[Tensor | None], inputs: Tensor) -> Tensor:
        """Run one member without gradients; return logits (batch, …)."""
        return self.run(prepared, inputs, 1, can_overwrite=True)[0]


def join_groups(kernel: Tensor, groups: int, most_channels: int) -> Tensor:
    """Join neighbouring groups of a grouped convolution's kernel into block-diagonal kernels; return the joined kernel,
    (out, in·q, …) for q joined groups.

    Args:
        kernel: (out, in, …), where `in` is the number of input channels of a group.
        groups: number of groups.
        most_channels: largest number of input channels of a joined group.
    """
    out_channels, in_channels, *size = kernel.shape
    joined_count = 1
    while groups % (2 * joined_count) == 0 and 2 * joined_count * in_channels <= most_channels:
        joined_count *= 2
    if joined_count == 1:
        return kernel
    blocks = kernel.reshape(groups // joined_count, joined_count, out_channels // groups, in_channels, *size)
    joined = kernel.new_zeros(*blocks.shape[:3], joined_count, in_channels, *size)
    joined.diagonal(dim1=1, dim2=3).copy_(blocks.movedim(1, -1))
    return joined.reshape(out_channels, joined_count * in_channels, *size)


def fold_norm(norm: FoldableNorm, stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into its convolution; return kernel (member, …) and bias (member, channel).

    gamma · (w∗x + b − mean) / sqrt(var + eps) + beta is a convolution with w · gamma / sqrt(var + eps).
    """
    weight = stacked[norm.names[0]]
    mean, factor, beta = _norm_coefficients(norm, stacked)
    bias = stacked[norm.names[1]].double() if norm.names[1] else torch.zeros_like(mean)
    float_weight = weight if weight.dtype == torch.float64 else weight.float()
    kernel = float_weight * factor.to(float_weight.dtype).reshape(*factor.shape, *[1] * (weight.dim() - 2))
    return kernel.to(weight.dtype), (beta + (bias - mean) * factor).to(weight.dtype)


# Largest |mean| / sqrt(var + eps) for which a norm is folded. Folding multiplies the convolution's rounding error
# (6e-8 of its output) by this ratio; up to 64, float32 results change by less than 1e-5 of their size.
MAX_MEAN_RATIO = 64.0


def choose_foldable_norms(norms: Sequence[FoldableNorm], stacked: Mapping[str, Tensor]) -> tuple[FoldableNorm, ...]:
    """Return the norms that can be folded without changes larger than rounding, judged by the statistics of all
    members."""
    return tuple(norm for norm, flags in zip(norms, foldable_by_member(norms, stacked), strict=True) if all(flags))


def foldable_by_member(norms: Sequence[FoldableNorm], stacked: Mapping[str, Tensor]) -> list[list[bool]]:
    """Say for each norm and member whether folding changes nothing but rounding, [norm][member].

    A device is waited for once, however many norms and members there are.
    """
    is_foldable = []
    for norm in norms:
        mean, factor, beta = _norm_coefficients(norm, stacked)
        weight = stacked[norm.names[0]]
        largest_allowed = torch.finfo(weight.dtype).max / 4
        largest_weight = torch.stack(torch.aminmax(weight.flatten(1), dim=1)).abs().amax(0).double()[:, None]
        mean_ratio = mean.abs() / (stacked[norm.norm[1]].double() + norm.eps).sqrt()
        is_in_range = (largest_weight * factor.abs() < largest_allowed) & (
            (mean * factor).abs() + beta.abs() < largest_allowed
        )
        is_foldable.append((is_in_range & (mean_ratio <= MAX_MEAN_RATIO)).all(1))
    return torch.stack(is_foldable).tolist() if is_foldable else []


def _norm_coefficients(norm: FoldableNorm, stacked: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
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
IDENTITY_LAYERS = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

# Layer without parameters that treats all channels alike -> number of axes of its input; None for any number.
STATELESS_LAYERS: dict[type[nn.Module], int | None] = {
    **dict.fromkeys((nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), 3),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d), 4),
    **dict.fromkeys((nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), 5),
    **dict.fromkeys((nn.ReflectionPad2d, nn.ReplicationPad2d, nn.UpsamplingNearest2d), 4),
    **dict.fromkeys((nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink), None),
}  # fmt: skip
# Layers without parameters that can overwrite their input.
IN_PLACE_LAYERS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.SiLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
    nn.Mish, nn.Threshold,
)  # fmt: skip

# Names under which torch.fx records elementwise functions of a tensor and constants.
POINTWISE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu, "silu": F.silu, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "elu": F.elu, "selu": F.selu,
    "celu": F.celu, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh, "mish": F.mish,
    "gelu": F.gelu, "softplus": F.softplus, "logsigmoid": F.logsigmoid, "softsign": F.softsign,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "square": torch.square, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "exp": torch.exp, "log": torch.log, "abs": torch.abs, "neg": torch.neg, "reciprocal": torch.reciprocal,
    "clamp": torch.clamp, "float": Tensor.float, "half": Tensor.half, "double": Tensor.double,
    "contiguous": Tensor.contiguous,
}  # fmt: skip
IN_PLACE_FUNCTIONS = (
    "relu", "silu", "relu6", "leaky_relu", "elu", "selu", "celu", "hardswish", "hardsigmoid", "hardtanh", "mish",
)  # fmt: skip
MAY_RETURN_INPUT = ("float", "half", "double", "contiguous")  # Methods that may return their input instead of a copy.

BINARY_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "truediv": torch.div, "pow": torch.pow,
    "maximum": torch.maximum, "minimum": torch.minimum, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
REDUCTION_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin,
}  # fmt: skip
POOL_RANKS: dict[Callable[..., Any], int] = {
    F.adaptive_avg_pool2d: 4, F.avg_pool2d: 4, F.max_pool2d: 4, F.adaptive_max_pool2d: 4, torch.max_pool2d: 4,
    F.avg_pool1d: 3, F.max_pool1d: 3, F.adaptive_avg_pool1d: 3,
}  # fmt: skip


@dataclass(frozen=True)
class Convolution:
    """Step function that convolves; its operands are x, kernels and biases.

    Args:
        function: torch's convolution.
        stride, padding, dilation: arguments of the layer. The number of groups follows from the channels of x and of
            the kernels: if all members share x, their kernels are one large kernel.
    """

    function: Callable[..., Tensor]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def is_fusible(self) -> bool:
        """Whether cuDNN has a kernel of the convolution and a ReLU."""
        return self.function is F.conv2d and not isinstance(self.padding, str)

    def __call__(
        self, member_count: int, overwrite_index: int, x: Tensor, kernel: Tensor, bias: Tensor | None
    ) -> Tensor:
        groups = x.shape[1] // kernel.shape[1]
        return self.function(x, kernel, bias, self.stride, self.padding, self.dilation, groups)


def convolution(layer: Any) -> Convolution:
    return Convolution(CONVOLUTIONS[type(layer)], layer.stride, layer.padding, layer.dilation)


@dataclass(frozen=True)
class ConvolutionAndRelu:
    """Step function that convolves one member, adds another activation, and applies a ReLU, in one kernel of cuDNN; its
    operands are x, kernel, bias and the added activation, if there is one."""

    convolution: Convolution

    def __call__(
        self, member_count: int, overwrite_index: int, x: Tensor, kernel: Tensor, bias: Tensor | None, *added: Tensor
    ) -> Tensor:
        c = self.convolution
        arguments: Any = c.stride, c.padding, c.dilation, x.shape[1] // kernel.shape[1]
        if added:
            return torch.cudnn_convolution_add_relu(x, kernel, added[0], 1.0, bias, *arguments)
        return torch.cudnn_convolution_relu(x, kernel, bias, *arguments)


@dataclass(frozen=True)
class BatchNorm:
    """Step function that normalises by running statistics; its operands are x, mean, variance, weight and bias. The
    operands of a folded norm are None."""

    eps: float

    def __call__(
        self,
        member_count: int,
        overwrite_index: int,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        return x if mean is None else F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)


def group_norm(group_count: int, eps: float) -> Compute:
    def compute(
        member_count: int, overwrite_index: int, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return F.group_norm(x, group_count * member_count, weight, bias, eps)

    return compute


def split_members(x: Tensor, member_count: int) -> Tensor:
    """Split the joint axis of members and channels; return (batch, member, channel, …)."""
    return x.reshape(len(x), member_count, -1, *x.shape[2:])


def linear(are_inputs_shared: bool) -> Compute:
    """Return a step function for linear layers; its operands are x (batch, member·feature), weights (member, out, in)
    and biases (member, out) or None."""

    def compute(member_count: int, overwrite_index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if member_count == 1:
            return F.linear(x, weight[0], None if bias is None else bias[0])
        inputs = (
            x.expand(member_count, *x.shape) if are_inputs_shared else split_members(x, member_count).transpose(0, 1)
        )
        out = inputs @ weight.mT if bias is None else torch.baddbmm(bias[:, None], inputs, weight.mT)
        return out.transpose(0, 1).flatten(1, 2)

    return compute


def return_input(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
    return x


def repeat_for_members(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
    """Repeat inputs that all members share, once for each member."""
    return x if member_count == 1 else x.repeat(1, member_count, *[1] * (x.dim() - 2))


def flatten(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
    return x.flatten(1)


def flatten_to(width: int) -> Compute:
    def compute(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        if flat.shape[1] != member_count * width:
            raise RuntimeError(f"{width} features a row expected, {flat.shape[1] // member_count} found")
        return flat

    return compute


def call_layer(module: nn.Module) -> Compute:
    """Return a step function that calls a layer without parameters."""

    def compute(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        result: Tensor = module.forward(x)
        return result

    return compute


@dataclass(frozen=True)
class TwinLayers:
    """Step function that calls a layer, or a copy of the layer that overwrites its input."""

    keeping_layer: nn.Module
    overwriting_layer: nn.Module

    def __call__(self, member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        result: Tensor = (self.keeping_layer if overwrite_index < 0 else self.overwriting_layer).forward(x)
        return result


class Pointwise:
    """Step function that applies a function of POINTWISE_FUNCTIONS to every element."""

    def __init__(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self.name, self.function, self.arguments = name, POINTWISE_FUNCTIONS[name], arguments
        self.options = [options, {**options, "inplace": True} if name in IN_PLACE_FUNCTIONS else options]

    def __call__(self, member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **self.options[overwrite_index >= 0])


def is_relu(compute: Compute) -> bool:
    if isinstance(compute, TwinLayers):
        return type(compute.keeping_layer) is nn.ReLU
    return isinstance(compute, Pointwise) and compute.name == "relu"


def call_function(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Compute:
    """Return a step function that calls a function of one activation and constants."""

    def compute(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        result: Tensor = function(x, *arguments, **options)
        return result

    return compute


@dataclass(frozen=True)
class Binary:
    """Step function that combines two tensors, or a tensor and a number, by a function of BINARY_FUNCTIONS."""

    name: str
    number: float | None

    def __call__(self, member_count: int, overwrite_index: int, *tensors: Tensor) -> Tensor:
        function = BINARY_FUNCTIONS[self.name]
        if self.number is not None:
            a = tensors[0]
            can_overwrite = overwrite_index == 0 and a.is_floating_point()
            return function(a, self.number, out=a) if can_overwrite else function(a, self.number)
        a, b = tensors if member_count == 1 else _match_channels(*tensors)
        if overwrite_index >= 0 and _can_hold_result((a, b)[overwrite_index], (a, b)[1 - overwrite_index]):
            return function(a, b, out=(a, b)[overwrite_index])
        return function(a, b)


def _match_channels(tensor: Tensor, other_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the tensor with fewer channels, so that both tensors have equally many; return both."""
    channels, other_channels = tensor.shape[1], other_tensor.shape[1]
    if channels < other_channels:
        return tensor.repeat_interleave(other_channels // channels, 1), other_tensor
    if channels > other_channels:
        other_tensor = other_tensor.repeat_interleave(channels // other_channels, 1)
    return tensor, other_tensor


def _can_hold_result(target: Tensor, other_operand: Tensor) -> bool:
    """Say whether `target` has the shape and dtype of the result of an operation with `other_operand`."""
    if target.shape != other_operand.shape and any(
        n not in (1, m) for n, m in zip(other_operand.shape, target.shape, strict=True)
    ):
        return False
    return target.dtype == other_operand.dtype and target.is_floating_point()


def reduce_axes(function_name: str, axes: tuple[int, ...], keep_dims: bool) -> Compute:
    """Return a step function that reduces over axes along which no members lie."""
    function = REDUCTION_FUNCTIONS[function_name]

    def compute(member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        return function(x, dim=axes, keepdim=keep_dims)

    return compute


def expand_like(member_count: int, overwrite_index: int, x: Tensor, target: Tensor) -> Tensor:
    return x.expand(target.shape)


def cast_like(member_count: int, overwrite_index: int, x: Tensor, target: Tensor) -> Tensor:
    return x.to(target.dtype)


def concatenate(member_count: int, overwrite_index: int, *parts: Tensor) -> Tensor:
    """Concatenate channels member by member."""
    if member_count == 1:
        return torch.cat(parts, 1)
    return torch.cat([split_members(part, member_count) for part in parts], 2).flatten(1, 2)
