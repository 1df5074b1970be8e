"""Values and steps of a network while its program is derived.

Selections of one token move before the steps that compute it: tokens that nobody reads are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from checkpoints_zoo.networks.ensemble.program import Compute

# Function from an axis of a step's result to axes of its operands, operand's index -> axis; empty if there are none.
# Each entry of the result along the axis is computed from the same entry of these operands alone.
OperandAxes = Callable[[int], dict[int, int]]


class UnknownOperation(Exception):
    """Raised for an operation of a network that can't be turned into a step of a program."""


def require(condition: object) -> None:
    """Raise UnknownOperation unless a condition holds."""
    if not condition:
        raise UnknownOperation


@dataclass(eq=False)
class TracedValue:
    """A value of the traced graph, with its known properties.

    Args:
        kind: "member" for values that differ between members, "shared" for the inputs and values computed from the
            inputs alone, "parameter"; "shape", "extent", "dtype" or "parts" of another value; "condition" on an extent.
        rank: number of axes of the value; the member axis of a parameter does not count.
        place: position of the value in the program's list of values.
        shares: the value with which this value may share memory.
        owns_memory: whether the program itself allocated the value's memory.
        shares_addresses: whether several elements may share one memory address, as after `expand`.
        source_value: the value that has this shape, extent, dtype or parts (for these kinds).
        dim: index of the axis whose length this value is (for the kind "extent").
        batch_axis: index of the axis (member·batch) along which members lie side by side; None if they lie along the
            channels, (batch, member·channel, …).
        name: name of the tensor in the state dict (for the kind "parameter").
        arrange: function that brings the stacked parameter into the shape that steps read, or that splits an activation
            (for the kind "parts").
        cast: the activation to whose dtype the parameter is converted; None for no conversion.
    """

    kind: str
    rank: int = 0
    place: int = -1
    shares: TracedValue | None = None
    owns_memory: bool = False
    shares_addresses: bool = False
    source_value: TracedValue | None = None
    dim: int = 0
    batch_axis: int | None = None
    name: str = ""
    arrange: Callable[[Tensor], Any] = lambda stack: stack
    cast: TracedValue | None = None

    @property
    def memory_owner(self) -> TracedValue:
        """The value that owns the memory of this value."""
        return self if self.shares is None else self.shares.memory_owner

    @property
    def is_activation(self) -> bool:
        return self.kind in ("member", "shared")


@dataclass(eq=False)
class TracedStep:
    """A step of the program.

    Args:
        compute: function that the step calls.
        operands: activations and parameters that the step reads.
        value: the result.
        can_overwrite: whether the function can write its result into an operand's memory.
        overwritten_value: the operand that the network's own code overwrites in this operation.
        operand_axes: axes of operands by an axis of the result.
    """

    compute: Compute
    operands: tuple[TracedValue, ...]
    value: TracedValue
    can_overwrite: bool = False
    overwritten_value: TracedValue | None = None
    operand_axes: OperandAxes = lambda axis: {}


@dataclass(frozen=True)
class Narrow:
    """Step function that takes one entry along an axis, and keeps the axis; an axis of length 1 stands for any length.

    Args:
        axis: index of the axis.
        index: position of the entry.
    """

    axis: int
    index: int

    def __call__(self, member_count: int, overwrite_index: int, x: Tensor) -> Tensor:
        length = x.shape[self.axis]
        return x if length == 1 else x.narrow(self.axis, self.index % length if self.index < 0 else self.index, 1)


def keep_axes(axes: Container[int], operands: Iterable[int] = (0,)) -> OperandAxes:
    """Return the operand axes of a step that computes each entry along some axes on its own, and leaves the axes in
    place.

    Args:
        axes: indices of the axes.
        operands: indices of the operands that have the axes.
    """
    return lambda axis: dict.fromkeys(operands, axis) if axis in axes else {}


def move_selections(steps: Sequence[TracedStep], network_output: TracedValue) -> list[TracedStep]:
    """Move each Narrow before the step whose result it reads, as far as possible; return the steps in their new order.

    A Narrow can move if nothing else reads the step's result, and the step computes each entry along the axis on its
    own.

    Args:
        steps: steps of a program, in order; they are changed.
        network_output: the value that the network returns.
    """
    moved = list(steps)
    for step in reversed(steps):
        readers = [other for other in moved if step.value in other.operands]
        computes = [reader.compute for reader in readers]
        if not computes or not isinstance(computes[0], Narrow) or any(c != computes[0] for c in computes):
            continue
        axes = step.operand_axes(computes[0].axis)
        if not axes or step.overwritten_value is not None or step.value is network_output:
            continue
        operands, narrowing = list(step.operands), list[TracedStep]()
        for i, axis in axes.items():
            x = operands[i]
            operands[i] = TracedValue(
                x.kind, x.rank, shares=x, shares_addresses=x.shares_addresses, batch_axis=x.batch_axis
            )
            narrowing.append(TracedStep(Narrow(axis, computes[0].index), (x,), operands[i]))
        step.operands = tuple(operands)
        replaced = {reader.value for reader in readers}
        moved = [other for other in moved if other not in readers]
        for other in moved:
            other.operands = tuple(step.value if v in replaced else v for v in other.operands)
            other.overwritten_value = step.value if other.overwritten_value in replaced else other.overwritten_value
        position = moved.index(step)
        moved[position:position] = narrowing
    return moved
