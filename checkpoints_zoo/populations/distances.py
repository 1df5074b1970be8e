"""Distances between members in weight space, for every group of tensors at once and for all of them.

Axes: stacked tensors name -> (member, …).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError

Stacked = Mapping[str, Tensor]
Blocks = Callable[[int], Iterable[Stacked]]  # members from a position on, some at a time, always in the same order

WHOLE = "all"
COLUMNS = 1 << 14  # weights that are widened to float64 at once
SHORT = 1 << 11  # of a float32 sum of absolute differences
ROUNDED = 64 * 2.2e-16  # of two squared norms: a squared distance below it is rounding, as of equal members


@dataclass(frozen=True)
class Distances:
    """How far apart members are in one group of tensors, (member, member) each, float64.

    Args:
        weights: how many the group has.
        l2: squared Euclidean distances, Σ (a - b)².
        l1: Σ |a - b|.
    """

    weights: int
    l2: Tensor
    l1: Tensor


def distances(
    blocks: Blocks, members: int, groups: Mapping[str, Sequence[str]], device: torch.device
) -> dict[str, Distances]:
    """Measure the distances of all pairs of members; return them by group, and for all groups' tensors as "all".

    Args:
        blocks: gives the members from a position on. Two blocks and what comes next are held at once; with k blocks
            of members the whole is read k / 2 times.
        members: how many there are.
        groups: name -> names of its tensors; a tensor may be in several.
        device: where to compute; it needs float64.

    Raises:
        LayoutError: members whose tensors are not those of the first ones, by name or shape.
    """
    apart = {name: torch.zeros(2, members, members, dtype=torch.float64, device=device) for name in [*groups, WHOLE]}
    every = list(dict.fromkeys(name for names in groups.values() for name in names))
    of_tensor = {name: [g for g, names in groups.items() if name in names] + [WHOLE] for name in every}
    shapes: dict[str, torch.Size] = {}
    row = 0
    for first in blocks(0):
        shapes = shapes or {name: first[name].shape[1:] for name in every if name in first}
        rows, column = slice(row, row + len(first[every[0]])), row
        for second in chain([first], blocks(rows.stop)):
            _check_shapes(second, every, shapes)
            columns = slice(column, column + len(second[every[0]]))
            for name in every:
                a, b = (block[name].to(device).flatten(1) for block in (first, second))
                both = _apart(a, b)
                for group in of_tensor[name]:
                    apart[group][:, rows, columns] += both
            column = columns.stop
        row = rows.stop
    weights = {name: sum(shapes[n].numel() for n in names) for name, names in [*groups.items(), (WHOLE, every)]}
    halves = {name: found.triu(1) for name, found in apart.items()}
    return {name: Distances(weights[name], *(half + half.transpose(1, 2))) for name, half in halves.items()}


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Return squared L2 and L1 distances of rows, (2, member, member), float64."""
    found = torch.zeros(2, len(a), len(b), dtype=torch.float64, device=a.device)
    for at in range(0, a.shape[1], COLUMNS):
        wide_a, wide_b = (t[:, at : at + COLUMNS].double() for t in (a, b))
        # Distances from a member, not from 0: differences of float32 values are exact in float64.
        origin = wide_a[:1].clone()
        wide_a, wide_b = wide_a - origin, wide_b - origin
        norms = wide_a.square().sum(1)[:, None] + wide_b.square().sum(1)
        squared = torch.addmm(norms, wide_a, wide_b.T, alpha=-2)
        found[0] += squared.masked_fill(squared < ROUNDED * norms, 0)
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    for at in range(0, a.shape[1], SHORT):
        short_a, short_b = (t[:, at : at + SHORT].to(kind) for t in (a, b))
        found[1] += torch.cdist(short_a, short_b, p=1)
    return found


def _check_shapes(block: Stacked, names: Sequence[str], shapes: Mapping[str, torch.Size]) -> None:
    """Check that a block's tensors are those of the first one.

    Raises:
        LayoutError: they are not.
    """
    for name in names:
        if name not in shapes or name not in block or block[name].shape[1:] != shapes[name]:
            expected = f"shape {tuple(shapes[name])} for every member" if name in shapes else "it in every member"
            found = f"shape {tuple(block[name].shape[1:])}" if name in block else "no such tensor"
            raise LayoutError(f"tensor {name!r}", expected=expected, found=found, tensor=name)


def layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensors by the module they belong to; return layer -> names of its tensors, in order.

    >>> layers(["conv1.weight", "conv1.bias", "fc.weight"])
    {'conv1': ['conv1.weight', 'conv1.bias'], 'fc': ['fc.weight']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return found


def grouped(groups: str | Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, list[str]]:
    """Check a choice of groups; return them by name.

    Args:
        groups: "layer", "tensor", or name -> names of tensors.
        names: of the tensors that there are.

    Raises:
        UsageError: another word, or a tensor that there is none of.
    """
    if isinstance(groups, str):
        known = {"layer": layers(names), "tensor": {name: [name] for name in names}}
        if groups not in known:
            raise UsageError("groups of tensors", expected="'layer', 'tensor' or a mapping", found=repr(groups)[:80])
        return known[groups]
    chosen = {name: list(tensors) for name, tensors in groups.items()}
    for name, tensors in chosen.items():
        strange = [t for t in tensors if t not in names]
        if name == WHOLE or strange or not tensors:
            found = f"{strange[0]!r}" if strange else f"the name {name!r}" if tensors else "none"
            expected = f"names among {', '.join(names[:12])}, and another name of the group than {WHOLE!r}"
            raise UsageError(f"group {name!r} of tensors", expected=expected, found=found)
    return chosen
