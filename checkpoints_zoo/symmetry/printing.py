"""A table as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpoints_zoo.formats.text import aligned

if TYPE_CHECKING:
    from checkpoints_zoo.symmetry.table import Axes, Group, Scale, Table


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
