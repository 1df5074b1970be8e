"""MMD and NS of draws to a reference population, all methods on one scale.

The kernels are those of `posterior.kernels`; their bandwidths come from the pairs of the reference's own members, so
that values of several methods can be compared. p-values take the bandwidths from all pairs, as `zoo.mmd` does: so the
test's level is exact where draws are independent of each other, and members of the population.

Axes: kernel matrices (member, member), the draws first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.evaluation.metrics import Plan
from checkpoints_zoo.methods.comparing.estimates import Estimate, estimate
from checkpoints_zoo.populations.discrepancy import apart
from checkpoints_zoo.populations.kernels import Distances, Grid, choices, kernel_matrix, kernels_of, permutation_test

SCALE, PERMUTE = "unit-norm", "first"  # of the canonical form behind NS
Found = dict[str, dict[str, Estimate]]  # "mmd" and "ns" -> group of tensors -> estimate


@dataclass(frozen=True)
class Closeness:
    """How distances to a reference are measured.

    Args:
        reference: the population.
        permutations: of the test.
        subsets: of runs that the jackknife measures.
        seed: of permutations and subsets.
        device: where to compute.
    """

    reference: Collection
    permutations: int
    subsets: int
    seed: int
    device: str = "cpu"

    def of(self, draws: Collection, plan: Plan | None) -> Found:
        """Measure MMD² and NS of draws, by layer and whole; return them.

        Args:
            draws: two or more.
            plan: subsets of them for the jackknife; None for no interval.
        """
        return self._views(draws, self.reference, "second", plan)

    def halves(self) -> Found:
        """Measure the reference's members at even positions against those at odd ones, on the same scale; return it."""
        return self._views(self.reference[::2], self.reference[1::2], "pooled", None)

    def _views(self, draws: Collection, reference: Collection, grid: Grid, plan: Plan | None) -> Found:
        found = {"mmd": self._measured(apart(draws, reference, device=self.device), len(draws), grid, plan)}
        try:
            views = [c.canonicalize(scale=SCALE, permute=PERMUTE) for c in (draws, reference)]
        except SymmetryError:
            return found  # no table of symmetries: no NS
        return {**found, "ns": self._measured(apart(*views, device=self.device), len(draws), grid, plan)}

    def _measured(
        self, distances: dict[str, Distances], first: int, grid: Grid, plan: Plan | None
    ) -> dict[str, Estimate]:
        """Return MMD² by group; with a plan, around all draws those of the subsets."""
        found = {}
        for group, some in distances.items():
            chosen = choices(first, len(some.l2) - first, self.permutations, self.seed).to(some.l2.device)
            p = permutation_test(some, kernels_of(some, first, "pooled", None), chosen)[1]
            kernel = mean_kernel(some, kernels_of(some, first, grid, None))
            if plan is None or not plan.widen:
                found[group] = Estimate(float(mmd2(kernel, first, [torch.arange(first)])), p=p)
            else:
                found[group] = estimate("mmd", plan.intervals(mmd2(kernel, first, plan.chosen)[:, None])[0], p)
        return found


def mean_kernel(some: Distances, kernels: Sequence[tuple[str, float]]) -> Tensor:
    """Return the mean of the kernels of all pairs, (member, member) float64: its MMD² is the mean of theirs.

    Args:
        some: distances of all members.
        kernels: (name, bandwidth) of each.
    """
    total = torch.zeros_like(some.l2)
    for kernel, width in kernels:
        total += kernel_matrix(some, kernel, width)
    return total / len(kernels)


def mmd2(kernel: Tensor, first: int, subsets: Sequence[Tensor]) -> Tensor:
    """Estimate MMD² between subsets of the first set and all of the second, without bias; return (subset,) on the CPU.

    Args:
        kernel: (member, member), symmetric.
        first: members of the first set.
        subsets: positions in the first set, two or more each.

    >>> kernel = torch.tensor([[1.0, 0.9, 0.1, 0.2], [0.9, 1, 0.1, 0.2], [0.1, 0.1, 1, 0.8], [0.2, 0.2, 0.8, 1]])
    >>> f"{mmd2(kernel, 2, [torch.arange(2)]).item():.4f}"  # 0.9 + 0.8 - 2 * 0.15
    '1.4000'
    """
    pairs = kernel.double().clone().fill_diagonal_(0)
    chosen = torch.zeros(first, len(subsets), dtype=torch.float64)
    for column, some in enumerate(subsets):
        chosen[some, column] = 1
    chosen = chosen.to(kernel.device)
    own, other = chosen.sum(0), len(kernel) - first
    within = (chosen * (pairs[:first, :first] @ chosen)).sum(0) / (own * (own - 1))
    across = (pairs[:first, first:].sum(1) @ chosen) / (own * other)
    return (within + pairs[first:, first:].sum() / (other * (other - 1)) - 2 * across).cpu()
