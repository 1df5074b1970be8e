"""Kernels of distances, the unbiased MMD² of two sets, and its permutation test.

Axes: kernel and distance matrices (member, member), of both sets, the first set first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.populations.distances import Distances

Grid = Literal["pooled", "cross", "second"]

KERNELS = ("gaussian", "laplace")
COUNT = 10
FEW = 500  # members of each set that the paper's code takes bandwidths from
TIE = 1e-9  # standardised statistics that are as near as this are equal up to rounding
FLAT = 1e-12  # of the largest value of a kernel: what MMD² varies by is rounding


def bandwidths(distances: Tensor, count: int = COUNT) -> Tensor:
    """Choose bandwidths as MMDAgg does; return a geometric grid (bandwidth), float64.

    From half the smallest distance to twice the largest. A smallest one below 0.1 is replaced by the 5 % quantile, no
    less than 0.1; a largest one below 0.3 by 0.3.

    Args:
        distances: (pair) between members.
        count: of bandwidths.

    >>> bandwidths(torch.tensor([1.0, 2.0, 4.0]), count=3).tolist()
    [0.5, 2.0, 8.0]
    """
    ordered = distances.flatten().double().sort().values
    least = float(ordered[0])
    if least < 0.1:
        least = max(float(ordered[int(0.05 * len(ordered))]), 0.1)
    low, high = least / 2, 2 * max(float(ordered[-1]), 0.3)
    return torch.tensor([low * (high / low) ** (i / max(1, count - 1)) for i in range(count)], dtype=torch.float64)


def unbiased(kernel: Tensor, chosen: Tensor) -> Tensor:
    """Estimate MMD² between the chosen members and the others, without bias; return it (choice), float64.

    Mean of k over pairs within each set (a member is no pair with itself), less twice the mean over pairs across.

    Args:
        kernel: (member, member), symmetric.
        chosen: (member, choice) of 0 and 1; each choice has as many.

    >>> kernel = torch.tensor([[1.0, 0.9, 0.1, 0.2], [0.9, 1, 0.1, 0.2], [0.1, 0.1, 1, 0.8], [0.2, 0.2, 0.8, 1]])
    >>> f"{unbiased(kernel, torch.tensor([[1], [1], [0], [0]])).item():.4f}"  # 0.9 + 0.8 - 2 * 0.15
    '1.4000'
    """
    pairs = kernel.double().clone().fill_diagonal_(0)
    chosen = chosen.double()
    first = int(chosen[:, 0].sum())
    second = len(chosen) - first
    row = pairs.sum(1)
    within = (chosen * (pairs @ chosen)).sum(0)
    across = row @ chosen - within
    others = row.sum() - within - 2 * across
    return within / (first * (first - 1)) + others / (second * (second - 1)) - 2 * across / (first * second)


def choices(first: int, second: int, permutations: int, seed: int) -> Tensor:
    """Draw which members are the first set: (member, 1 + permutation), float64, the sets as they are first."""
    members = first + second
    keys = torch.rand(permutations, members, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    drawn = torch.zeros(permutations + 1, members, dtype=torch.float64)
    drawn[0, :first] = 1
    drawn[1:].scatter_(1, keys.argsort(1)[:, :first], 1.0)
    return drawn.T.contiguous()


def kernels_of(
    apart: Distances, first: int, grid: Grid, widths: Mapping[str, Sequence[float]] | None
) -> tuple[tuple[str, float], ...]:
    """Return (kernel, bandwidth) of all kernels.

    Raises:
        UsageError: a grid, a kernel or a bandwidth that is none.
    """
    if widths is not None:
        chosen = [(kernel, float(width)) for kernel, some in widths.items() for width in some]
        if not chosen or any(k not in KERNELS or not 0 < w < math.inf for k, w in chosen):
            expected = "positive bandwidths of 'gaussian' or 'laplace'"
            raise UsageError("widths of kernels", expected=expected, found=repr(dict(widths))[:80])
        return tuple(chosen)
    if grid not in ("pooled", "cross", "second"):
        raise UsageError("grid of bandwidths", expected="'pooled', 'cross' or 'second'", found=repr(grid)[:80])
    members = len(apart.l2)
    upper = torch.triu_indices(members, members, 1, device=apart.l2.device)
    found = []
    for kernel, matrix in zip(KERNELS, (apart.l2.sqrt(), apart.l1), strict=True):
        across = matrix[: min(first, FEW), first : first + FEW]
        own = upper if grid != "second" else upper[:, upper[0] >= first]
        pairs = across if grid == "cross" else matrix[own[0], own[1]]
        found += [(kernel, width) for width in bandwidths(pairs).tolist()]
    return tuple(found)


def kernel_matrix(apart: Distances, kernel: str, width: float) -> Tensor:
    """Return a kernel of all pairs, (member, member): exp(−(L2 / width)²) of "gaussian", exp(−L1 / width) of "laplace".

    Args:
        apart: of all members.
        kernel, width: its name and its bandwidth.
    """
    return torch.exp(-(apart.l2 / width**2 if kernel == "gaussian" else apart.l1 / width))


def permutation_test(
    apart: Distances, kernels: Sequence[tuple[str, float]], chosen: Tensor
) -> tuple[tuple[float, ...], float]:
    """Return MMD² with each kernel, and the p-value of the largest of them, standardised over permutations.

    The sets as they are count among the permutations for the means and deviations, so that under the null all of them
    are alike and the p-value is exact (Hemerik & Goeman, Exact testing with random permutations, 2018). A maximum of
    standardised kernels in place of MMDAgg's search for levels.

    Args:
        apart: of all members.
        kernels: (name, bandwidth) of each.
        chosen: (member, 1 + permutation), from `choices`.
    """
    values, largest = [], torch.full_like(chosen[0], -math.inf)
    for kernel, width in kernels:
        pairs = kernel_matrix(apart, kernel, width)
        found = unbiased(pairs, chosen)
        values.append(float(found[0]))
        spread = float(found.std(correction=0))
        # A kernel that is the same for all pairs, up to rounding, says nothing.
        differ = spread > FLAT * float(pairs.fill_diagonal_(0).max())
        standard = (found - found.mean()) / spread if differ else torch.zeros_like(found)
        largest = torch.maximum(largest, standard)
    reached = int((largest[1:] >= largest[0] - TIE).sum())
    return tuple(values), (1 + reached) / len(largest)
