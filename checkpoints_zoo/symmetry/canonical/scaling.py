"""Unit-norm scaling: each unit's row of weights gets norm 1, each norm's gain becomes 1 or -1.

Laurent et al. 2024 (arXiv 2310.08287), and their code: a row is measured once its columns are divided by the scales
of what it reads; a bias is multiplied along, but is not part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.symmetry.applying import rescaled, stacked_in
from checkpoints_zoo.symmetry.table import Axes, Power, Scale, Table

_CHUNK = 1 << 21  # entries squared at once: 16 MB


class UnitNorm(NamedTuple):
    """Scaled members.

    Args:
        tensors: name -> (member, *shape).
        scales: scale -> float64 (member, value), what was multiplied.
        left: scale -> (member, value), rows that are 0, or too small for a norm of 1 in the tensors' dtype. Their scale
            is 1: members that differ by the scales of these alone stay different.
    """

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]
    left: dict[str, Tensor]


def unit_norm(table: Table, params: Mapping[str, Tensor], *, approximate: bool = False) -> UnitNorm:
    """Scale each unit so that the row of its first writer has L2 norm 1; return the tensors and the scales.

    The first writer of a scale is a kernel, or a norm's gain, which becomes 1 or -1. All values that share a scale
    count as one row. The function stays as it is: a running variance v becomes (v + eps) λ² - eps.

    Args:
        table: of the network.
        params: name -> (member, *shape), all tensors that scale. Floating ones narrower than float32 are returned
            in float32: rounding the scaled weights to float16 would change the function.
        approximate: whether scales before norms without running statistics change as well: the function then stays
            the same only where these norms' eps is 0.

    Raises:
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.
        UsageError: tensors without a member axis.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[3.0, 4.0]]]), "2.weight": torch.tensor([[[2.0]]])}
    >>> tensors, scales, left = unit_norm(symmetries(net, torch.zeros(1, 2)), weights)
    >>> [round(float(t), 6) for t in (*tensors["0.weight"].flatten(), tensors["2.weight"], scales["0"])]
    [0.6, 0.8, 10.0, 0.2]
    """
    chosen = {name: scale for name, scale in table.scales.items() if scale.exact or approximate}
    if params:
        stacked_in(table, params)
    for name, axes in table.tensors.items():
        if name not in params and any(power.scale in chosen for power in axes.powers):
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    scales: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    for name, scale in _ordered(table, chosen):
        norms, power, smallest = _norms(table, params, scale, scales)
        left[name] = ~(norms > smallest)
        scales[name] = torch.where(left[name], 1.0, norms.pow(-1 / power))
    tensors = {name: rescaled(table.tensors[name], _wide(tensor), scales) for name, tensor in params.items()}
    for name, scale in chosen.items():
        _make_exact(table, tensors, scale, left[name])
    return UnitNorm(tensors, scales, left)


def _ordered(table: Table, chosen: Mapping[str, Scale]) -> Iterator[tuple[str, Scale]]:
    """Yield scales in topological order, each after those that its first writer's rows depend on."""
    waiting = dict(chosen)
    while waiting:
        ready = (name for name, scale in waiting.items() if not _needed(table, scale) & waiting.keys())
        name = next(ready, next(iter(waiting)))
        yield name, waiting.pop(name)


def _needed(table: Table, scale: Scale) -> set[str]:
    """Return the other scales that rows of a scale's first writer depend on."""
    (name, axis), *_ = scale.writers
    axes = table.tensors[name]
    own = {entry for p in _own(axes, scale, axis) for entry in range(p.offset, p.offset + p.length)}
    return {
        p.scale
        for p in axes.powers
        if p.scale != scale.name and (p.axis != axis or not own.isdisjoint(range(p.offset, p.offset + p.length)))
    }


def _make_exact(table: Table, tensors: Mapping[str, Tensor], scale: Scale, left: Tensor) -> None:
    """Make rows of one entry 1 or -1, where rounding left them beside it."""
    (name, axis), *_ = scale.writers
    (power, *more), tensor = _own(table.tensors[name], scale, axis), tensors[name]
    if not more and prod(tensor.shape[1:]) == power.length == scale.size:
        tensor.copy_(tensor.where(left.reshape(tensor.shape), tensor.sign()))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _norms(
    table: Table, params: Mapping[str, Tensor], scale: Scale, scales: Mapping[str, Tensor]
) -> tuple[Tensor, float, float]:
    """Return the norms of a scale's rows, (member, value), the scale's power in them, and the smallest that counts."""
    (name, axis), *_ = scale.writers
    axes, tensor = table.tensors[name], params[name]
    own = _own(axes, scale, axis)
    squares = _squares(axes, tensor)
    lead = squares.shape[1:]
    doubled = tuple(Power(p.axis, p.scale, 2 * p.power, p.offset, p.length, p.within) for p in axes.powers)
    squares = rescaled(Axes(tuple(lead), axes.role, 0.0, (), doubled), squares, scales)
    sums = torch.zeros(len(tensor), scale.size, dtype=torch.float64, device=tensor.device)
    for power in own:
        part = squares.narrow(axis + 1, power.offset, power.length).movedim(axis + 1, 1)
        sums += part.reshape(len(tensor), scale.size, prod(part.shape[1:]) // scale.size).sum(-1)
    # The square of a scale has to stay in the range of the dtype: running variances are multiplied by it.
    smallest = torch.finfo(_wide(tensor).dtype).tiny ** 0.5
    return sums.sqrt(), own[0].power, smallest


def _own(axes: Axes, scale: Scale, axis: int) -> list[Power]:
    """Return where a writer's rows lie."""
    found = [p for p in axes.powers if p.scale == scale.name and p.axis == axis]
    return [p for p in found if p.power == max(p.power for p in found)]


def _squares(axes: Axes, tensor: Tensor) -> Tensor:
    """Return the squares of all entries, summed over the axes behind the last one that scales."""
    last = max(power.axis for power in axes.powers)
    lead = axes.shape[: last + 1]
    result = torch.empty(len(tensor), *lead, dtype=torch.float64, device=tensor.device)
    for members in _chunks(len(tensor), prod(axes.shape)):
        wide = tensor[members].to(torch.float64, copy=True).square_()
        result[members] = wide.reshape(-1, *lead, prod(axes.shape[last + 1 :])).sum(-1)
    return result


def _chunks(members: int, each: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, each))
    return (slice(start, start + step) for start in range(0, members, step))
