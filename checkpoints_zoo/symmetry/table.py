"""The symmetry table: which axes of parameters and buffers are permuted together, and which scale together.

It is plain: names, numbers and tuples. What the symmetries of networks are: Laurent et al. 2024 (arXiv 2310.08287);
a table of axes and permutations: Ainsworth et al. 2023 (arXiv 2209.04836).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoints_zoo.formats.text import aligned


@dataclass(frozen=True)
class Table:
    """The permutation and scaling symmetries of a network.

    Args:
        network: the name of its class, or of the collection.
        tensors: all names of its state dict.
        groups: by name, in topological order of their first writers.
        scales: likewise.
    """

    network: str
    tensors: Mapping[str, Axes]
    groups: Mapping[str, Group]
    scales: Mapping[str, Scale]

    def log10_permutations(self, streams: bool = True) -> float:
        """Return log10 of the number of permutations.

        Args:
            streams: whether those of residual streams count, or of inner channels alone.
        """
        return sum(group.log10_order for group in self.groups.values() if streams or not group.stream)

    @property
    def scaling_freedom(self) -> int:
        """How many positive numbers can be chosen freely without any change of the function."""
        return sum(scale.size for scale in self.scales.values() if scale.exact)

    @property
    def approximate_scaling_freedom(self) -> int:
        """How many more there are if norms without running statistics had eps = 0."""
        return sum(scale.size for scale in self.scales.values() if not scale.exact)

    def __str__(self) -> str:
        return text(self)


@dataclass(frozen=True)
class Group:
    """Units that one permutation moves, wherever they appear.

    Args:
        name: of the layer that writes them first.
        size: how many units.
        blocks: into how many blocks of consecutive units they are kept together; 1 where they move freely.
        mover: the group whose permutation moves the blocks; None: blocks stay in place.
        stream: whether an addition joins what several layers write (the stream of a residual network).
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
        """log10 of how many permutations the group has.

        A group of n units in b blocks has ((n / b)!)^b permutations inside the blocks; those of the blocks are another
        group's. (A wreath product.)
        """
        return self.blocks * math.lgamma(self.size // self.blocks + 1) / math.log(10)


@dataclass(frozen=True)
class Scale:
    """A vector of positive factors that can be chosen freely.

    Args:
        name: of the layer whose output they scale.
        size: how many.
        group: whose permutation moves them along, size / units of the group for each unit; None: they stay.
        exact: whether the function stays the same; if not, it does so only where the norms' eps is 0.
        norms: layers that undo the scale, so that nothing after them depends on it.
        writers: (tensor, axis) of what is multiplied to scale the output, in topological order: kernels or gains.
    """

    name: str
    size: int
    group: str | None
    exact: bool
    norms: tuple[str, ...]
    writers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Axes:
    """A parameter's or buffer's symmetries.

    Args:
        shape: without a leading member axis.
        role: "weight", "bias", "gain", "offset", "mean", "variance", "slope" or "other".
        shift: a scale multiplies value + shift (a running variance's eps), not the value; else 0.
        moves: of its axes; an axis that none names is pinned.
        powers: of its axes.
    """

    shape: tuple[int, ...]
    role: str
    shift: float
    moves: tuple[Move, ...]
    powers: tuple[Power, ...]


@dataclass(frozen=True)
class Move:
    """How a group's permutation moves entries of one axis.

    Args:
        axis: of the tensor, without a leading member axis.
        group: its units span `span` consecutive entries each, from entry `offset` on.
        within: 0; of a grouped kernel's input axis, the number of blocks of rows (axis 0): the rows of block b see
            the units of block b of the group, and the axis has only these.
    """

    axis: int
    group: str
    offset: int
    span: int
    within: int = 0


@dataclass(frozen=True)
class Power:
    """How a scale multiplies entries of one axis: entry offset + e by value[e * size // length] ** power, e < length.

    Args:
        axis: of the tensor, without a leading member axis.
        scale: its name.
        power: of the values; 1, -1 and 2 in all but strange networks.
        offset, length: the entries.
        within: 0; of a grouped kernel's input axis, the number of blocks of rows: `length` counts the inputs of all
            blocks, and column c of a row of block b is entry b * columns + c of them.
    """

    axis: int
    scale: str
    power: float
    offset: int
    length: int
    within: int = 0


def text(table: Table, tensors: bool = True) -> str:
    """Lay a table out in columns; return the text.

    Of a tensor, each axis says its group (a dot: pinned; *4: each unit spans four entries), then its scales.

    Args:
        tensors: whether tensors have their lines.
    """
    lines = [f"Symmetries of {table.network}", "", *_summary(table), ""]
    lines.append(aligned([("group", "units", "kind", "written by"), *map(_group, table.groups.values())]))
    lines += ["", aligned([("scale", "values", "kind", "opened by"), *map(_scale, table.scales.values())])]
    if tensors:
        lines += ["", aligned([("tensor", "shape", "moved by", "scaled by"), *_tensors(table)])]
    return "\n".join(lines)


def _summary(table: Table) -> list[str]:
    every, inner = (table.log10_permutations(streams=streams) for streams in (True, False))
    groups = f"{len(table.groups)} group{'' if len(table.groups) == 1 else 's'}"
    return [
        f"10^{every:.1f} permutations in {groups}; 10^{inner:.1f} without those of streams",
        f"{table.scaling_freedom} exact scale factors, {table.approximate_scaling_freedom} approximate ones",
    ]


def _group(group: Group) -> tuple[str, ...]:
    kind = "stream" if group.stream else "free"
    if group.blocks > 1:
        mover = f"moved by {group.mover}" if group.mover else "in place"
        kind = f"{group.blocks} blocks {mover}"
    return group.name, str(group.size), kind, ", ".join(name for name, _ in group.writers)


def _scale(scale: Scale) -> tuple[str, ...]:
    kind = "exact" if scale.exact else "approximate"
    undone = f"{kind}, undone by {', '.join(scale.norms)}" if scale.norms else kind
    return scale.name, str(scale.size), undone, ", ".join(name for name, _ in scale.writers)


def _tensors(table: Table) -> list[tuple[str, ...]]:
    return [(name, _shape(axes), _moves(axes), _powers(axes)) for name, axes in table.tensors.items()]


def _shape(axes: Axes) -> str:
    return " × ".join(map(str, axes.shape)) or "1"


def _moves(axes: Axes) -> str:
    last = max((move.axis for move in axes.moves), default=-1)
    return ", ".join(" | ".join(_on_axis(axes, i)) or "·" for i in range(last + 1))


def _on_axis(axes: Axes, axis: int) -> list[str]:
    found = [move for move in axes.moves if move.axis == axis]
    return [f"{m.group}{f' *{m.span}' if m.span > 1 else ''}{' (a block a row)' if m.within else ''}" for m in found]


def _powers(axes: Axes) -> str:
    powers = [f"{p.scale}^{p.power:g}" if p.power != 1 else p.scale for p in axes.powers]
    return ", ".join(powers) + (" (with eps)" if axes.shift and powers else "")
