"""The symmetry table: which axes of parameters and buffers are permuted together, and which scale together.

A table holds only names, numbers and tuples. Laurent et al. 2024 (arXiv 2310.08287) define the symmetries of networks;
Ainsworth et al. 2023 (arXiv 2209.04836) use a table of axes and permutations.

This is one file, because each record is a field of another one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from checkpoints_zoo.formats.text import align_columns

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Table:
    """The symmetries of a network: permutations, scales, signs, and for networks with attention matrices and shifts.

    Args:
        network: name of the module's class, or of the collection.
        tensors: name of each tensor of the state dict -> its shape and symmetries.
        groups: name -> permutation group, in topological order of the groups' first writers.
        scales: name -> scale, in topological order.
        signs: name -> sign, in topological order.
        matrices: name -> group of matrices, in topological order; networks with attention have them.
        shifts: name -> shift; networks with attention have them.
        unconfirmed: why the table of a network with attention was not confirmed by running the network; "" if it was,
            and for other networks.
    """

    network: str
    tensors: Mapping[str, Axes]
    groups: Mapping[str, Group]
    scales: Mapping[str, Scale]
    signs: Mapping[str, Sign] = field(default_factory=dict)
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
    shifts: Mapping[str, Shift] = field(default_factory=dict)
    unconfirmed: str = ""

    def log10_permutations(self, streams: bool = True) -> float:
        """Return log10 of the number of permutations.

        Args:
            streams: whether permutations of residual streams count, or only permutations of inner channels.
        """
        return sum(group.log10_order for group in self.groups.values() if streams or not group.stream)

    @property
    def scaling_freedom(self) -> int:
        """The number of positive factors that can be chosen freely without a change of the network's function."""
        return sum(scale.size for scale in self.scales.values() if scale.exact)

    @property
    def approximate_scaling_freedom(self) -> int:
        """The number of further factors that would be free if the norms without running statistics had eps = 0."""
        return sum(scale.size for scale in self.scales.values() if not scale.exact)

    @property
    def log10_signs(self) -> float:
        """log10 of the number of sign changes that keep the network's function."""
        return sum(sign.size for sign in self.signs.values()) * math.log10(2)

    @property
    def is_continuous(self) -> bool:
        """Whether the group has matrices or shifts, as networks with attention have."""
        return bool(self.matrices or self.shifts)

    @property
    def dimension(self) -> int:
        """The number of continuous parameters of the group: scales, matrices and shifts."""
        of_matrices = sum(matrix.dimension for matrix in self.matrices.values())
        return self.scaling_freedom + of_matrices + sum(shift.dimension for shift in self.shifts.values())

    def __str__(self) -> str:
        return format_table(self)


@dataclass(frozen=True)
class Group:
    """Units that one permutation moves in every tensor that has them.

    Args:
        name: name of the first layer that writes the units.
        size: number of units in the group.
        blocks: number of blocks of consecutive units that stay together; 1 if the units move freely.
        mover: the group whose permutation moves the blocks; None: the blocks stay in place.
        stream: whether an addition joins the outputs of several layers (the stream of a residual network).
        writers: (tensor, axis) of the kernels that write the units, in topological order.
    """

    name: str
    size: int
    blocks: int
    mover: str | None
    stream: bool
    writers: tuple[tuple[str, int], ...]

    @property
    def log10_order(self) -> float:
        """log10 of the number of permutations of the group.

        A group of n units in b blocks has ((n / b)!)^b permutations inside the blocks (a wreath product). The
        permutations of the blocks themselves are counted by another group, the mover.
        """
        return self.blocks * math.lgamma(self.size // self.blocks + 1) / math.log(10)


@dataclass(frozen=True)
class Scale:
    """A vector of positive factors that can be chosen freely.

    Args:
        name: name of the layer whose output the factors scale.
        size: number of factors in the vector.
        group: the group whose permutation also moves the factors, size / (units of the group) factors a unit; None: the
            factors stay in place.
        exact: whether the network's function stays exactly the same. If false, the function would stay the same only if
            the norms had eps = 0; `approximate_changes` measures the change.
        norms: names of the layers that undo the scale, so that the layers after them do not depend on the scale.
        writers: (tensor, axis) of the kernels or gains that scale the output, in topological order.
    """

    name: str
    size: int
    group: str | None
    exact: bool
    norms: tuple[str, ...]
    writers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Sign:
    """A vector of signs, 1 or -1, that can be chosen freely: the function stays the same.

    A batch norm undoes the sign of a channel if its row, its running mean and its gain change sign. If the next
    activation is odd, or missing, the signs also multiply the weights after it.

    Args:
        name: name of the layer whose output has the signs.
        size: number of signs in the vector.
        group: the group whose permutation also moves the signs; None: the signs stay in place.
    """

    name: str
    size: int
    group: str | None


@dataclass(frozen=True)
class Matrix:
    """Matrices that can be chosen freely: the function stays the same.

    Args:
        name: name of the first layer whose output the matrices map.
        kind: "invertible": any invertible matrix; "orthogonal"; "centred orthogonal": an orthogonal matrix that keeps
            the vector of ones; "complex": [[a, b], [-b, a]] on a pair of units that rotary positions turn; "turn": the
            same with a² + b² = 1.
        size: rows of a matrix.
        count: number of matrices, one a head; 1 for a whole layer.
        group: the group whose permutation also moves the matrices; None: they stay in place.
        writers: (tensor, axis) of the kernels that write the units, in topological order.
    """

    name: str
    kind: str
    size: int
    count: int
    group: str | None
    writers: tuple[tuple[str, int], ...]

    @property
    def dimension(self) -> int:
        """The number of continuous parameters of all matrices."""
        n = self.size
        of_kind = {
            "invertible": n * n, "orthogonal": n * (n - 1) // 2, "centred orthogonal": (n - 1) * (n - 2) // 2,
            "complex": 2, "turn": 1,
        }  # fmt: skip
        return self.count * of_kind[self.kind]


@dataclass(frozen=True)
class StridedView:
    """A part of a parameter: its name, and the size, stride and offset of `torch.as_strided`."""

    tensor: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_view(cls, tensor: str, view: Tensor) -> StridedView:
        """Describe a view of a contiguous parameter; return the description."""
        return cls(tensor, tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def of(self, stacked: Tensor) -> Tensor:
        """Return the part of a stacked parameter (member, *shape) as a view (member, *size) of it.

        Args:
            stacked: the parameter; each member is contiguous.
        """
        return stacked.as_strided((len(stacked), *self.size), (stacked.stride(0), *self.stride), self.offset)


@dataclass(frozen=True)
class Turn:
    """How matrices map the entries of one axis of a part of a parameter.

    Args:
        matrix: name of the matrices.
        part: the part of the parameter.
        axis: the axis of the part.
        entries: positions on the axis, block by block: each block is mapped by one matrix.
        copies: the number of the matrix of each block.
        dual: whether the inverse of the matrix maps the axis, and not its transpose: the axis reads the units.
        gain: name of a vector that stands between the axis and the units, such as the gain of the norm before: the
            matrix maps the product of the axis and the gain.
        gain_shift: a number that the network adds to that vector.
        is_divided: whether the matrix maps the axis divided by the gain, as for the offset of a norm.
    """

    matrix: str
    part: StridedView
    axis: int
    entries: tuple[tuple[int, ...], ...]
    copies: tuple[int, ...]
    dual: bool
    gain: str | None = None
    gain_shift: float = 0.0
    is_divided: bool = False


@dataclass(frozen=True)
class Product:
    """A kernel (out, in) that a vector passes.

    Args:
        kernel: the kernel.
        entries: input i is entry entries[i] of the vector, or 0 if that is -1.
        is_centred: whether only norms read the result, which subtract its mean: the vector goes on without it.
        gain: name of a vector that multiplies the result before its mean is subtracted; None: no gain.
    """

    kernel: StridedView
    entries: tuple[int, ...]
    is_centred: bool = False
    gain: str | None = None


@dataclass(frozen=True)
class Sum:
    """A vector that is added to a part of a parameter, along one axis: position i gets factor * vector[entries[i]].

    Args:
        part: the part of the parameter.
        axis: the axis of the part; all positions of the other axes get the same.
        entries: the entry of the vector for each position; -1: nothing is added.
        factor: the number that multiplies the vector.
        products: kernels that the shift passes, in order, before it becomes the vector.
        ratio: names of an offset and a gain, whose quotient's sum multiplies the vector; the gain may be None.
    """

    part: StridedView
    axis: int
    entries: tuple[int, ...]
    factor: float = 1.0
    products: tuple[Product, ...] = ()
    ratio: tuple[str, str | None] | None = None


@dataclass(frozen=True)
class Outer:
    """An outer product that is added to a part of a parameter: a vector along all other axes, and ones along one axis,
    divided by a gain if there is one.

    Args:
        part: the part of the parameter.
        axis: the axis of the ones.
        gain: name of the gain; None: no gain.
        products: kernels that the shift passes before it becomes the vector; none: the shift is the vector.
        offset: name of the offset of a norm, if the vector takes up a shift of it: the vector is divided by minus the
            sum of the shifted offset over the gain.
    """

    part: StridedView
    axis: int
    gain: str | None
    products: tuple[Product, ...] = ()
    offset: str | None = None


@dataclass(frozen=True)
class Shift:
    """A vector that can be added to parameters: the function stays the same.

    Args:
        name: what is shifted.
        kind: "constant": a constant of an activation, which something behind takes up; "mean": the same, with equal
            entries; "reader": rows of a kernel that reads a centred activation; "writer": the mean of an activation
            that only layer norms read.
        size: number of entries of the vector.
        dimension: number of continuous parameters that no other shift has.
        terms: what is added to which parameter.
        part: the part of a parameter along whose axis the vector lies; matrices and permutations map both alike.
        axis: that axis; -1 - axis: the vector lies along all axes but this one.
        gain: name of a gain that multiplies the vector before it is added, as of an offset of the same norm; None: no
            gain. Shifts with a gain do not depend on the scale of the norm, nor on what mixes its units.
    """

    name: str
    kind: str
    size: int
    dimension: int
    terms: tuple[Sum | Outer, ...]
    part: StridedView
    axis: int
    gain: str | None = None


@dataclass(frozen=True)
class Axes:
    """The symmetries of one parameter or buffer.

    Args:
        shape: shape of the tensor without the member axis.
        role: role of the tensor in its layer: "weight", "bias", "gain", "offset", "mean", "variance", "slope" or
            "other".
        shift: eps of a running variance, which a scale multiplies as value + shift; 0 for all other tensors.
        moves: the permutations that move the axes; an axis without a move is pinned.
        powers: the scales that multiply the axes.
        signs: the signs that multiply the axes; `Power.scale` is then the name of a sign.
        turns: the matrices that map the axes.
    """

    shape: tuple[int, ...]
    role: str
    shift: float
    moves: tuple[Move, ...]
    powers: tuple[Power, ...]
    signs: tuple[Power, ...] = ()
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class Move:
    """How the permutation of a group moves the entries of one axis.

    Args:
        axis: index of the axis in the tensor of one member.
        group: name of the group.
        offset: position on the axis of the first entry of the first unit.
        span: number of consecutive entries that belong to each unit.
        within: number of blocks of rows for the input axis of a grouped kernel: the rows (axis 0) of block b read the
            units of block b of the group, and the axis has only these units. 0 for all other axes.
    """

    axis: int
    group: str
    offset: int
    span: int
    within: int = 0


@dataclass(frozen=True)
class Power:
    """How a scale multiplies the entries of one axis.

    Entry offset + e is multiplied by values[e * size // length] ** power, for e < length.

    Args:
        axis: index of the axis in the tensor of one member.
        scale: name of the scale or sign.
        power: exponent of the factors; 1, -1 or 2 in usual networks.
        offset: position on the axis of the first scaled entry.
        length: number of scaled entries.
        within: number of blocks of rows for the input axis of a grouped kernel: `length` counts the inputs of all
            blocks, and column c of a row of block b is input b * columns + c. 0 for all other axes.
    """

    axis: int
    scale: str
    power: float
    offset: int
    length: int
    within: int = 0


_Part = TypeVar("_Part", Scale, Sign, Matrix)


def keep_parts(
    table: Table,
    *,
    groups: Container[str],
    scales: Container[str],
    signs: Container[str],
    matrices: Container[str],
    shifts: Container[str],
) -> Table:
    """Return a table with some parts of the group, by name. A group whose mover is left out is left out too."""
    kept_groups: dict[str, Group] = {}
    for name, group in table.groups.items():
        mover = group.mover
        while mover is not None and mover in groups:
            mover = table.groups[mover].mover
        if name in groups and mover is None:
            kept_groups[name] = group

    def kept(parts: Mapping[str, _Part], names: Container[str]) -> dict[str, _Part]:
        return {
            name: part if part.group in kept_groups else replace(part, group=None)
            for name, part in parts.items()
            if name in names
        }

    tensors = {
        name: replace(
            axes,
            moves=tuple(move for move in axes.moves if move.group in kept_groups),
            powers=tuple(power for power in axes.powers if power.scale in scales),
            signs=tuple(power for power in axes.signs if power.scale in signs),
            turns=tuple(turn for turn in axes.turns if turn.matrix in matrices),
        )
        for name, axes in table.tensors.items()
    }
    return replace(
        table, tensors=tensors, groups=kept_groups, scales=kept(table.scales, scales), signs=kept(table.signs, signs),
        matrices=kept(table.matrices, matrices), shifts={n: s for n, s in table.shifts.items() if n in shifts},
    )  # fmt: skip


def format_table(table: Table, tensors: bool = True) -> str:
    """Format a symmetry table in columns; return the text.

    The line of a tensor lists the group of each of its axes, then its scales. A dot means that the axis is pinned, and
    *4 that each unit spans four entries.

    Args:
        table: the table.
        tensors: whether to list the tensors of the network.
    """
    lines = [f"Symmetries of {table.network}", "", *_summary(table), ""]
    lines.append(align_columns([("group", "units", "kind", "written by"), *map(_group_row, table.groups.values())]))
    lines += ["", align_columns([("scale", "values", "kind", "opened by"), *map(_scale_row, table.scales.values())])]
    if table.signs:
        signs = [(sign.name, str(sign.size)) for sign in table.signs.values()]
        lines += ["", align_columns([("sign", "values"), *signs])]
    if table.matrices:
        lines += [
            "",
            align_columns([("matrices", "kind", "heads", "units"), *map(_matrix_row, table.matrices.values())]),
        ]
    if table.shifts:
        shifts = [(shift.name, shift.kind, str(shift.dimension)) for shift in table.shifts.values()]
        lines += ["", align_columns([("shift", "kind", "dimension"), *shifts])]
    if tensors:
        header = ("tensor", "shape", "moved by", "scaled by", *(("signs",) if table.signs else ()))
        lines += ["", align_columns([header, *_tensor_rows(table)])]
    return "\n".join(lines)


def _summary(table: Table) -> list[str]:
    total, inner = (table.log10_permutations(streams=streams) for streams in (True, False))
    groups = f"{len(table.groups)} group{'' if len(table.groups) == 1 else 's'}"
    lines = [
        f"10^{total:.1f} permutations in {groups}; 10^{inner:.1f} without those of streams",
        f"{table.scaling_freedom} exact scale factors, {table.approximate_scaling_freedom} approximate ones",
    ]
    if table.signs:
        lines.append(f"10^{table.log10_signs:.1f} choices of {sum(sign.size for sign in table.signs.values())} signs")
    if table.matrices or table.shifts:
        matrices = sum(matrix.dimension for matrix in table.matrices.values())
        shifts = sum(shift.dimension for shift in table.shifts.values())
        lines.append(f"{table.dimension} continuous dimensions: {matrices} of matrices, {shifts} of shifts, and scales")
    if table.unconfirmed:
        lines.append(f"not confirmed by running the network: {table.unconfirmed}")
    return lines


def _matrix_row(matrix: Matrix) -> tuple[str, ...]:
    return matrix.name, matrix.kind, str(matrix.count), str(matrix.size)


def _group_row(group: Group) -> tuple[str, ...]:
    kind = "stream" if group.stream else "free"
    if group.blocks > 1:
        mover = f"moved by {group.mover}" if group.mover else "in place"
        kind = f"{group.blocks} blocks {mover}"
    return group.name, str(group.size), kind, ", ".join(name for name, _ in group.writers)


def _scale_row(scale: Scale) -> tuple[str, ...]:
    kind = "exact" if scale.exact else "approximate"
    description = f"{kind}, undone by {', '.join(scale.norms)}" if scale.norms else kind
    return scale.name, str(scale.size), description, ", ".join(name for name, _ in scale.writers)


def _tensor_rows(table: Table) -> list[tuple[str, ...]]:
    rows = []
    for name, axes in table.tensors.items():
        signs = (", ".join(power.scale for power in axes.signs),) if table.signs else ()
        rows.append((name, _format_shape(axes), _format_moves(axes), _format_powers(axes), *signs))
    return rows


def _format_shape(axes: Axes) -> str:
    return " × ".join(map(str, axes.shape)) or "1"


def _format_moves(axes: Axes) -> str:
    last = max((move.axis for move in axes.moves), default=-1)
    return ", ".join(" | ".join(_groups_on_axis(axes, i)) or "·" for i in range(last + 1))


def _groups_on_axis(axes: Axes, axis: int) -> list[str]:
    moves = [move for move in axes.moves if move.axis == axis]
    return [f"{m.group}{f' *{m.span}' if m.span > 1 else ''}{' (a block a row)' if m.within else ''}" for m in moves]


def _format_powers(axes: Axes) -> str:
    powers = [f"{p.scale}^{p.power:g}" if p.power != 1 else p.scale for p in axes.powers]
    return ", ".join(powers) + (" (with eps)" if axes.shift and powers else "")
