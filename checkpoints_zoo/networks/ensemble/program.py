"""A network as a list of steps that run one member or several side by side.

With several, their channels lie next to each other, a member's together: (batch, member·channel, …). Convolutions are
grouped then, and all steps but linear layers are the ones that a member alone takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
