"""Selections of one token move before the steps that compute it: tokens that nobody reads are not computed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from checkpoints_zoo.networks.ensemble.traced import OperandAxes, TracedStep, TracedValue


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
    """Return the operand axes of a step that computes the entries along some axes apart, and leaves the axes in place.

    Args:
        axes: indices of the axes.
        operands: indices of the operands that have the axes.
    """
    return lambda axis: dict.fromkeys(operands, axis) if axis in axes else {}


def move_selections(steps: Sequence[TracedStep], network_output: TracedValue) -> list[TracedStep]:
    """Move each Narrow before the step whose result it reads, as far as possible; return the steps in their new order.

    A Narrow can move if nothing else reads the step's result, and the step computes the entries along the axis apart.

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
