"""The input of rules: tensors with labelled axes, and the present step of the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.deriving.labels import (
    Axis,
    IncompatibleAxes,
    Segment,
    Space,
    axis_length,
    is_fixed,
    join_axes,
    resolve_axis,
)
from checkpoints_zoo.symmetry.deriving.scales import (
    ONE,
    Factor,
    Product,
    equate_products,
    magnitudes_of,
    multiply_products,
    signs_of,
)


@dataclass(eq=False)
class Labelled:
    """A tensor of the trace, with a label for each axis.

    Args:
        axes: the labels.
        state_name: name of the parameter or buffer in the state dict; "" for other tensors.
        role: role of the tensor in its layer: "weight", "bias", "gain", "offset", "mean", "variance"; "" before the
            first use.
        shift: number added to the values before a scale multiplies them (the eps of a running variance), 0 for others.
        within: (number of blocks, axis of all inputs) for a grouped kernel, where each block of rows reads one block of
            inputs; None for other tensors.
    """

    axes: tuple[Axis, ...]
    state_name: str = ""
    role: str = ""
    shift: float = 0.0
    within: tuple[int, Axis] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis_length(axis) for axis in self.axes)

    @property
    def layer(self) -> str:
        """The name of the layer that has the tensor; the name of the tensor if the module has it directly."""
        return self.state_name.rpartition(".")[0] or self.state_name

    @property
    def is_fixed(self) -> bool:
        return all(is_fixed(axis) for axis in self.axes)


@dataclass
class Step:
    """One operation of the trace.

    Args:
        operation: name of the operation, for error texts.
        layer: path of the layer that runs the operation.
        shape: shape of the result, or a tuple of shapes for several results.
        serials: serial numbers for all spaces and factors of the trace.
    """

    operation: str
    layer: str = ""
    shape: Any = ()
    serials: Iterator[int] = field(default_factory=count)

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error that names the operation.

        Args:
            reason: the reason, as the error text names it after "found".
        """
        where = f" in layer {self.layer!r}" if self.layer else ""
        raise SymmetryError(
            f"operation {self.operation}{where}",
            expected="one whose effect on permutations and scales is known",
            found=reason,
            do="Give a network without it; its symmetries can't be derived",
        )

    @contextmanager
    def naming_operation(self) -> Iterator[None]:
        """Turn an `IncompatibleAxes` error in the `with` block into an error that names the operation."""
        try:
            yield
        except IncompatibleAxes as problem:
            self.refuse(str(problem))

    def fixed_axis(self, entry_count: int) -> Axis:
        """Return an axis whose entries neither move nor scale."""
        return (Segment(Space(entry_count, next(self.serials), "", pinned=True), 1, {}),)

    def label_state(self, shape: tuple[int, ...], state_name: str = "") -> Labelled:
        """Label a parameter or buffer before its first use: each axis has a new space, a new factor and a new sign."""
        value = Labelled((), state_name)
        axes = []
        for i, size in enumerate(shape):
            space = Space(size, next(self.serials), value.layer, pinned=size <= 1)
            scale = Factor(size, next(self.serials), value.layer, origin=(state_name, i))
            sign = Factor(size, next(self.serials), value.layer, sign=True)
            axes.append((Segment(space, 1, {scale: ONE, sign: ONE}),))
        value.axes = tuple(axes)
        return value


def equate_axes(first_axis: Axis, second_axis: Axis) -> Axis:
    """Give two axes the same permutation and the same scale; return the joined axis."""
    for a, b in join_axes(first_axis, second_axis):
        equate_products(a.scale, b.scale)
    return resolve_axis(first_axis)


def contract_axes(first_axis: Axis, second_axis: Axis) -> None:
    """Sum the products of two axes: they have one permutation, and their scales cancel."""
    for a, b in join_axes(first_axis, second_axis):
        equate_products(multiply_products(a.scale, b.scale), {})


def open_output(step: Step, axis: Axis) -> Axis:
    """Record that an axis of a kernel writes the units and the scale of a layer's output; return the axis."""
    segments = resolve_axis(axis)
    for segment in segments:
        segment.space.writers += _promote_factor(step, segment.scale)
    return segments


def multiply_axes(step: Step, axis: Axis, gain: Axis, is_kernel: bool = False) -> Axis:
    """Multiply an axis by a gain, entry by entry; return the product. A gain that is used for the first time opens a
    new factor.

    Args:
        is_kernel: whether the gain is a kernel, which writes the units of the axis.
    """
    result = []
    for a, b in join_axes(axis, gain):
        product = multiply_products(a.scale, b.scale)
        scale, signs = magnitudes_of(product), signs_of(product)
        new_factors = [factor for factor in scale if factor.weak and factor.origin]
        if new_factors and len(scale) > 1:
            # The product gets a new factor, because all later operations depend on the product alone.
            output_factor = Factor(b.length, next(step.serials), new_factors[0].name, weak=False)
            output_factor.writers = writers = _promote_factor(step, {new_factors[0]: ONE})
            new_factors[0].weak = True
            equate_products({output_factor: ONE}, scale)
            scale = {output_factor: ONE}
        else:
            writers = _promote_factor(step, scale)
        if is_kernel:
            a.space.writers += writers
        result.append(Segment(a.space, a.span, multiply_products(scale, signs)))
    return tuple(result)


def _promote_factor(step: Step, scale: Product) -> list[tuple[int, str, int]]:
    """Let the factor of a tensor scale the output of a layer; return its new writers, [] if it scales the output
    already."""
    scale = magnitudes_of(scale)
    candidates = [factor for factor in scale if factor.weak and factor.origin]
    if len(scale) != 1 or not candidates:
        return []
    (factor,), serial = candidates, next(step.serials)
    factor.weak, factor.serial = False, serial
    factor.writers = [(serial, *(factor.origin or ("", 0)))]
    return list(factor.writers)
