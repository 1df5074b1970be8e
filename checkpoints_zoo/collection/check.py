"""Do two sets of parameters compute the same function? Both are run in float64 on the same inputs, and compared.

>>> import torch
>>> import checkpoints_zoo as zoo
>>> from checkpoints_zoo.symmetry import apply, random_element
>>> members = zoo.load("convnet-digits", n=2)
>>> table, generator = zoo.symmetries("convnet-digits"), torch.Generator().manual_seed(0)
>>> params = members.stack()
>>> moved = apply(table, params, random_element(table, generator, members=2, spread=0))
>>> inputs = members.preprocess(zoo.images.load("digits").images[:8])
>>> bool(check_equivalence(params, moved, members.skeleton(), inputs))
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.running import Running
from checkpoints_zoo.collection.sides import Parameters, Side, side_of
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.device import check_device

__all__ = ["Equivalence", "Parameters", "check_equivalence"]


@dataclass(frozen=True)
class Equivalence:
    """How far two sets of parameters are from computing the same outputs; true if they are within the tolerance.

    Args:
        ids: of the members; numbers from 0 where they have none.
        relative: (member, input), the largest difference of an input's outputs, as a share of the largest output that
            the member has for any input. Several outputs each have their own share, of which the largest counts.
        absolute: (member, input), the largest difference.
        tolerance: of `relative`.
        eps: that the norms were given; None: their own.
        changed: names of the layers whose eps that concerns.
        change: (member, input), `relative` with the norms' own eps; None where that is what was compared.
        narrow: layers that compute in less than float64, whose rounding is in the differences too.
    """

    ids: tuple[int, ...]
    relative: Tensor
    absolute: Tensor
    tolerance: float
    eps: float | None
    changed: tuple[str, ...]
    change: Tensor | None
    narrow: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        """The largest relative difference of all members and inputs."""
        return float(self.relative.max())

    @property
    def worst(self) -> tuple[int, int]:
        """The member's id and the position of the input whose relative difference is the largest."""
        member, position = divmod(int(self.relative.argmax()), self.relative.shape[1])
        return self.ids[member], position

    def __str__(self) -> str:
        members, inputs = self.relative.shape
        verdict = "The same function" if self else "Not the same function"
        lines = [
            f"{verdict} within {self.tolerance:g}: relative difference at most {self.largest:.2g}, "
            f"absolute {float(self.absolute.max()):.2g}",
            f"Compared in float64 for {_counted(members, 'member')} and {_counted(inputs, 'input')}; "
            f"the worst is member {self.worst[0]}, input {self.worst[1]}",
        ]
        if self.change is not None:
            lines.append(
                f"With eps = {self.eps:g} in {_counted(len(self.changed), 'norm')}; with their own, outputs change by "
                f"at most {float(self.change.max()):.2g} of the largest"
            )
        if self.narrow:
            lines.append(
                f"Rounded to less than float64 in {_named(self.narrow)}: differences of about 1e-6 mean little"
            )
        return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _named(layers: tuple[str, ...]) -> str:
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(map(repr, layers[:3])) + more


def check_equivalence(
    a: Parameters,
    b: Parameters,
    module: nn.Module | None,
    inputs: Tensor | tuple[Tensor, ...],
    *,
    tolerance: float = 1e-10,
    eps: float | None = None,
    device: str | torch.device = "cpu",
) -> Equivalence:
    """Run two sets of parameters on the same inputs in float64 and eval mode; return how far their outputs differ.

    A symmetry that is exact leaves differences of rounding, about 1e-15. One that is approximate (a scale before a norm
    without running statistics) is exact where the norms' eps is 0: ask for `eps=0`, and the result also says what it
    changes with their own eps. Nothing that is given is changed: all happens on copies.

    Args:
        a, b: each a state dict, a stacked one (member, *shape), a Member, a Collection, or a module, of which only
            the tensors count; both of one member, or of as many members. Counters may be missing.
        module: that computes the function; None if `a` is a Member, a Collection or a module: then its own.
        inputs: one batch, a tuple if the module takes several; floating ones become float64.
        tolerance: of the differences, relative to the largest output.
        eps: of all norms without running statistics; None for their own.
        device: where to compute.

    Raises:
        LayoutError: tensors that are missing, extra or misshapen, by name; two values for tensors that are tied.
        UsageError: inputs that are not finite, or that the module doesn't take; a module that computes something else
            each time, in a dtype of its own, or with tensors that its state dict doesn't reach; no such eps or device.
        DamagedError: weights or outputs that are not finite.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> swapped = {n: t.flip(1 if n == "2.weight" else 0) for n, t in net.state_dict().items()}
    >>> check_equivalence(net, swapped, None, torch.tensor([[-1.0], [2.0]])).largest < 1e-15
    True
    """
    for thing, value in (("tolerance", tolerance), ("eps", 0.0 if eps is None else eps)):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(thing, expected="a number from 0", found=repr(value))
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    _check_inputs(given)
    one = side_of(a, "a", module)
    other = side_of(b, "b", one.module)
    if one.count != other.count or one.stacked != other.stacked:
        found = " and ".join(_counted(s.count, "member") if s.stacked else "one member alone" for s in (one, other))
        raise UsageError("a and b", expected="one member each, or as many stacked ones", found=found)
    running = Running(one.module, given, check_device(device), None)
    other_eps = None if eps is None else Running(one.module, given, check_device(device), float(eps))
    return _compared(one, other, running, other_eps, tolerance)


def _check_inputs(inputs: tuple[Tensor, ...]) -> None:
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise UsageError("inputs", expected="a tensor, or a tuple of tensors", found=repr(inputs)[:80])
    for x in inputs:
        if not x.numel():
            raise UsageError("inputs", expected="one or more", found=f"none: a tensor of shape {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise UsageError("inputs", expected="finite numbers", found="infinite ones or NaN")


def _compared(one: Side, other: Side, own: Running, changed: Running | None, tolerance: float) -> Equivalence:
    """Run all members of both sides; return the comparison."""
    relative, absolute, change = [], [], []
    for number, (first, second) in enumerate(zip(one.states(), other.states(), strict=True)):
        states = (one.checked(first, number), other.checked(second, number))
        if number == 0:
            own.watch(states[0])
        results = []
        for running in (own, changed) if changed is not None else (own,):
            left, right = (running.outputs(s, x.thing(number)) for s, x in zip(states, (one, other), strict=True))
            results.append(_differences(left, right, own.batch))
        if changed is not None:
            change.append(results[0][0])
        relative.append(results[-1][0])
        absolute.append(results[-1][1])
    return Equivalence(
        ids=one.ids,
        relative=torch.stack(relative),
        absolute=torch.stack(absolute),
        tolerance=tolerance,
        eps=None if changed is None else changed.eps,
        changed=() if changed is None else changed.changed,
        change=torch.stack(change) if change else None,
        narrow=own.narrow,
    )


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    """Return the largest difference of each input's outputs, relative and absolute, (input) each."""
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        raise UsageError("outputs of a and b", expected="the same shapes", found="others: they depend on the values")
    # Outputs that aren't a row an input count as those of one.
    rows = batch if all(t.ndim and len(t) == batch for t in one.values()) else 1
    relative, absolute = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    if not any(bool(t.any()) for t in (*one.values(), *other.values())):
        raise UsageError("inputs", expected="some that tell functions apart", found="ones whose outputs are all 0")
    for name, first in one.items():
        second = other[name]
        if not first.numel():
            continue
        apart = (first - second).abs().reshape(rows, -1).amax(1).cpu()
        scale = float(torch.maximum(first.abs().max(), second.abs().max()))
        absolute = torch.maximum(absolute, apart)
        relative = torch.maximum(relative, apart / scale if scale else apart)
    return relative, absolute
