"""The symmetry table: which axes of parameters and buffers are permuted together, and which scale together.

A table holds only names, numbers and tuples. Laurent et al. 2024 (arXiv 2310.08287) define the symmetries of networks;
Ainsworth et al. 2023 (arXiv 2209.04836) use a table of axes and permutations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoints_zoo.formats.text import align_columns


@dataclass(frozen=True)
class Table:
    """The permutation and scaling symmetries of a network.

    Args:
        network: name of the module's class, or of the collection.
        tensors: name of each tensor of the state dict -> its shape and symmetries.
        groups: name -> permutation group, in topological order of the groups' first writers.
        scales: name -> scale, in topological order.
        signs: name -> sign, in topological order.
    """

    network: str
    tensors: Mapping[str, Axes]
    groups: Mapping[str, Group]
    scales: Mapping[str, Scale]
    signs: Mapping[str, Sign] = field(default_factory=dict)

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
    """

    shape: tuple[int, ...]
    role: str
    shift: float
    moves: tuple[Move, ...]
    powers: tuple[Power, ...]
    signs: tuple[Power, ...] = ()


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
    return lines


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
