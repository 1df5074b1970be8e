"""Labels of the values of a trace: which coordinate each entry of an activation is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.attention.frames import FIXED
from checkpoints_zoo.symmetry.table import StridedView


@dataclass(eq=False)
class Record:
    """One axis of a part of a parameter, whose entries are coordinates.

    Args:
        part: the part of the parameter.
        axis: the axis of the part.
        coordinates: the coordinate of each entry of the axis, (entry).
        gain: a vector that stands between the axis and its frame, or None: the matrix of the frame acts on the product
            of the axis and the gain, or on the axis divided by the gain.
        is_divided: whether the matrix acts on the axis divided by the gain, as on the offset of a norm.
        shift: a number that the network adds to the parameter before any use.
    """

    part: StridedView
    axis: int
    coordinates: Tensor
    gain: Record | None = None
    is_divided: bool = False
    shift: float = 0.0

    @property
    def tensor(self) -> str:
        """Name of the parameter."""
        return self.part.tensor


@dataclass(frozen=True, eq=False)
class Parameter:
    """A part of a parameter that no operation has used yet.

    Args:
        tensor: name of the parameter.
        view: the part, on the device "meta": its sizes, strides and offset.
    """

    tensor: str
    view: Tensor

    @property
    def part(self) -> StridedView:
        return StridedView.from_view(self.tensor, self.view)


@dataclass(frozen=True, eq=False)
class Gain:
    """A vector that multiplies an activation: its record, and the coordinate of each entry of the activation."""

    record: Record
    coordinates: Tensor


@dataclass(eq=False)
class Core:
    """The heads of one attention: each row is one head.

    Args:
        name: path of the layer.
        queries, keys: coordinates, (head, unit).
        values: coordinates, (head, unit); None before the product with the values.
        outputs: coordinates of the results, (head, unit); heads that share values have results of their own.
        biases: coordinates of learned numbers that are added to the scores, (head), one tensor a bias.
        slopes: fixed numbers that are added to the scores, (head, entry), one tensor a bias.
        scales: coordinates of parameters that multiply the products of queries and keys, (head), one tensor a scale.
        pinned: whether an operation tells the heads apart.
    """

    name: str
    queries: Tensor
    keys: Tensor
    values: Tensor | None = None
    outputs: Tensor | None = None
    biases: list[Tensor] = field(default_factory=list)
    slopes: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    pinned: bool = False


@dataclass(frozen=True, eq=False)
class Label:
    """Which coordinates an activation has, and what was done to them.

    Args:
        coordinates: the coordinate of each entry, in the shape of the activation; FIXED or ZERO for others.
        factor: numbers that multiply the entries, of a shape that broadcasts; None: all are 1.
        more: further terms (coordinates, factors) of a sum that mixes coordinates, as rotary positions do.
        gain: a vector that multiplies the entries.
        squares: whether the entries are squares of the coordinates.
        core: the attention whose scores or weights these are.
    """

    coordinates: Tensor
    factor: Tensor | None = None
    more: tuple[tuple[Tensor, Tensor], ...] = ()
    gain: Gain | None = None
    squares: bool = False
    core: Core | None = None

    @property
    def is_fixed(self) -> bool:
        return self.core is None and not bool((self.coordinates >= 0).any())

    @property
    def is_mixed(self) -> bool:
        """Whether numbers multiply the coordinates, or sums mix them."""
        return self.factor is not None or bool(self.more)

    @property
    def factors(self) -> Tensor:
        """The numbers that multiply the entries, in the shape of the activation."""
        factor = torch.ones((), dtype=torch.float64) if self.factor is None else self.factor
        return factor.expand(self.coordinates.shape)

    def with_coordinates(self, coordinates: Tensor) -> Label:
        """Return a label with other coordinates, without factors and gain."""
        return replace(self, coordinates=coordinates, factor=None, more=(), gain=None, squares=False)


def fixed(shape: tuple[int, ...]) -> Label:
    """Return the label of an activation of which no symmetry moves an entry."""
    return Label(torch.full((), FIXED).expand(shape))


def padded(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return a shape with axes of one entry before it, as broadcasting adds them."""
    return (*[1] * (rank - len(shape)), *shape)


def varies(coordinates: Tensor, axis: int) -> bool:
    """Return whether coordinates differ along an axis."""
    return coordinates.shape[axis] > 1 and bool((coordinates != coordinates.narrow(axis, 0, 1)).any())
