"""What a rule works on: tensors as labels of their axes, and the step of the trace it is asked about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.deriving.labels import Axis, Segment, Space, Unjoinable, fixed, joined, length, resolved
from checkpoints_zoo.symmetry.deriving.scales import ONE, Factor, Product, equate, times


@dataclass(eq=False)
class Value:
    """A tensor of the trace.

    Args:
        axes: their labels.
        state: its name, if it is a parameter or buffer as the module keeps it.
        role: what it is to its layer: "weight", "bias", "gain", "offset", "mean", "variance"; "" before it is used.
        shift: what is added before it is scaled, and taken off after (a variance's eps).
        within: (blocks, axis): of a grouped kernel, the inputs' axis, of which each block of rows sees its own block.
    """

    axes: tuple[Axis, ...]
    state: str = ""
    role: str = ""
    shift: float = 0.0
    within: tuple[int, Axis] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(axis) for axis in self.axes)

    @property
    def layer(self) -> str:
        """The name of the layer that keeps it; the tensor's own at the top of the module."""
        return self.state.rpartition(".")[0] or self.state

    @property
    def fixed(self) -> bool:
        return all(fixed(axis) for axis in self.axes)


@dataclass
class Step:
    """One operation of the trace, and what its rule needs.

    Args:
        operation: its name, for errors.
        layer: the path of the module that it runs in.
        shape: of its result; of several results, a tuple of shapes.
        births: the order of all spaces and factors of the trace.
    """

    operation: str
    layer: str = ""
    shape: Any = ()
    births: Iterator[int] = field(default_factory=count)

    def refuse(self, found: str) -> NoReturn:
        """Raise the error that names the operation."""
        where = f" in layer {self.layer!r}" if self.layer else ""
        raise SymmetryError(
            f"operation {self.operation}{where}",
            expected="one whose effect on permutations and scales is known",
            found=found,
            do="Give a network without it; its symmetries can't be derived",
        )

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Turn what labels refuse into the error that names the operation."""
        try:
            yield
        except Unjoinable as problem:
            self.refuse(str(problem))

    def still(self, size: int) -> Axis:
        """Return an axis whose entries keep their places and scale."""
        return (Segment(Space(size, next(self.births), "", pinned=True), 1, {}),)

    def fresh(self, shape: tuple[int, ...], state: str = "") -> Value:
        """Return a value of which nothing is known yet: a permutation and a factor of its own for each axis."""
        value = Value((), state)
        axes = []
        for i, size in enumerate(shape):
            space = Space(size, next(self.births), value.layer, pinned=size <= 1)
            axes.append((Segment(space, 1, {Factor(size, next(self.births), value.layer, origin=(state, i)): ONE}),))
        value.axes = tuple(axes)
        return value


def same(one: Axis, other: Axis) -> Axis:
    """Make two axes move and scale as one; return it."""
    for a, b in joined(one, other):
        equate(a.scale, b.scale)
    return resolved(one)


def contract(one: Axis, other: Axis) -> None:
    """Sum products over two axes: they move as one, and their scales undo each other."""
    for a, b in joined(one, other):
        equate(times(a.scale, b.scale), {})


def opened(step: Step, axis: Axis) -> Axis:
    """Note that a layer's output takes its units and its scale from a kernel's axis; return that axis."""
    segments = resolved(axis)
    for segment in segments:
        segment.space.writers += _promoted(step, segment.scale)
    return segments


def scaled_by(step: Step, axis: Axis, gain: Axis, writes: bool = False) -> Axis:
    """Multiply two axes entry by entry; return the product, with a factor of its own where the gain's is new.

    Args:
        writes: whether the gain is a kernel, which writes the axis's units.
    """
    result = []
    for a, b in joined(axis, gain):
        scale = times(a.scale, b.scale)
        new = [factor for factor in scale if factor.weak and factor.origin]
        if new and len(scale) > 1:
            # The product's own factor is the one to keep: what comes after depends on it alone.
            output = Factor(b.length, next(step.births), new[0].name, weak=False)
            output.writers = written = _promoted(step, {new[0]: ONE})
            new[0].weak = True
            equate({output: ONE}, scale)
            scale = {output: ONE}
        else:
            written = _promoted(step, scale)
        if writes:
            a.space.writers += written
        result.append(Segment(a.space, a.span, times(scale)))
    return tuple(result)


def _promoted(step: Step, scale: Product) -> list[tuple[int, str, int]]:
    """Let a tensor's own factor scale a layer's output; return what to note of the tensor, nothing if done before."""
    own = [factor for factor in scale if factor.weak and factor.origin]
    if len(scale) != 1 or not own:
        return []
    (factor,), order = own, next(step.births)
    factor.weak, factor.born = False, order
    factor.writers = [(order, *(factor.origin or ("", 0)))]
    return list(factor.writers)
