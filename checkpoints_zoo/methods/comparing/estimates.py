"""Figures with intervals over runs, and the order that they are shown in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.evaluating import evaluate
from checkpoints_zoo.evaluation.figures import FIGURES, Figure
from checkpoints_zoo.evaluation.metrics import Interval, Plan
from checkpoints_zoo.evaluation.subsets import Population
from checkpoints_zoo.images import Given, ImageData
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.populations.discrepancy import apart
from checkpoints_zoo.populations.kernels import Distances, Grid, choices, kernel_matrix, kernels_of, permutation_test

MMD_FIGURES: dict[str, Figure] = {
    "mmd": Figure("", "lower", "MMD² of the weights to the reference's, unbiased, mean over kernels"),
    "ns": Figure("", "lower", "the same after removing symmetries: scale unit-norm, then permute first"),
}
ALL: dict[str, Figure] = {**MMD_FIGURES, **FIGURES}
SHORT = {
    "mmd": "MMD", "ns": "NS", "accuracy": "Acc", "ece": "ECE", "ace": "ACE", "brier": "Brier", "nll": "NLL",
    "aupr": "AUPR", "fpr95": "FPR95", "auroc": "AUROC", "mi_id": "ID MI", "mi_ood": "OOD MI",
}  # fmt: skip
"""The columns of the table, in its order; the other figures are in the frame and in JSON."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval.

    Args:
        value: in the figure's unit; NaN where there is none.
        low, high: of 95 %; None where none can be given.
        p: of the permutation test, for distances; None for others.
        runs: the value of each run, where the figure is their mean.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    runs: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; what is not finite is null."""
        given = {"value": self.value, "low": self.low, "high": self.high}
        found: dict[str, Any] = {n: x if x is not None and math.isfinite(x) else None for n, x in given.items()}
        if self.p is not None:
            found["p"] = self.p
        if self.runs:
            found["runs"] = [x if math.isfinite(x) else None for x in self.runs]
        return found

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave; return it."""
        value = math.nan if given["value"] is None else float(given["value"])
        runs = tuple(math.nan if x is None else float(x) for x in given.get("runs", ()))
        return cls(value, given["low"], given["high"], given.get("p"), runs)


def mean_of(name: str, values: Sequence[float], p: float | None = None) -> Estimate:
    """Average a figure over runs; return it with Student's 95 % interval for the mean, none for one run.

    Args:
        name: of the figure, at whose range the interval is cut.
        values: of each run.
        p: to be kept with it.

    >>> found = mean_of("nll", [0.1, 0.2, 0.3])  # 0.2 ± 4.303 · 0.1 / √3
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
    (0.2, 0.0, 0.448)
    """
    count, mean = len(values), math.fsum(values) / len(values)
    low = high = None
    if count > 1 and math.isfinite(mean):
        from scipy.special import stdtrit

        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (count - 1))
        half = float(stdtrit(count - 1, 0.975)) * spread / math.sqrt(count)
        low, high = mean - half, mean + half
    found = estimate(name, Interval(mean, low, high), p)
    return Estimate(found.value, found.low, found.high, p, tuple(values))


def estimate(name: str, interval: Interval, p: float | None = None) -> Estimate:
    """Return an interval as the estimate of a figure, cut at the figure's range; a distance may be below 0."""
    within = interval if name in MMD_FIGURES else ALL[name].within(interval)
    return Estimate(within.value, within.low, within.high, p)


def joint_p(values: Sequence[float]) -> float:
    """Join p-values of one hypothesis, however they depend on each other; return one.

    Twice their median, or K/k times the k-th smallest of K, k = K/2 rounded up (Rüger 1978, Das maximale
    Signifikanzniveau des Tests "Lehne H0 ab, wenn k unter n gegebenen Tests zur Ablehnung führen").

    >>> joint_p([0.01]), joint_p([0.01, 0.02, 0.03, 0.9])
    (0.01, 0.04)
    """
    k = math.ceil(len(values) / 2)
    return min(1.0, sorted(values)[k - 1] * len(values) / k)


# MMD and NS of draws to a reference population, all methods on one scale.


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


# What draws say as ensembles: accuracy, calibration, out-of-distribution detection, diversity, over runs.


NO_OOD = "none"
# What each data set is told apart from, where nothing is said: the first two as in Laurent et al. 2024, MNIST's as in
# torch-uncertainty, the digits' what comes with the package.
OOD = {
    "cifar10": "svhn", "cifar100": "svhn", "tiny-imagenet": "svhn", "mnist": "fashion-mnist", "fashion-mnist": "mnist",
    "digits": "photos",
}  # fmt: skip


@dataclass(frozen=True)
class Uncertainty:
    """What draws are measured on.

    Args:
        inside: labelled images, in the order of the members' classes.
        outside: images out of distribution; None leaves those figures out.
        subsets: of runs that the jackknife measures.
        seed: of the subsets.
        device: what the draws run on.
    """

    inside: ImageData
    outside: ImageData | None
    subsets: int
    seed: int
    device: str = "cpu"

    def of(self, draws: Collection, plan: Plan | None) -> dict[str, Estimate]:
        """Measure draws as one ensemble; return figure -> estimate.

        Args:
            draws: of a method.
            plan: subsets of them for the jackknife; None for no interval.
        """
        with one_thread(draws.member_nbytes < SMALL_MEMBER):
            labels = arguments.labels_of(self.inside, draws.description)
            outside = None if self.outside is None else self._logits(draws, self.outside)
            population = Population(self._logits(draws, self.inside), labels, outside)
            if plan is None:
                values = population.measure([torch.arange(len(draws))])[0].tolist()
                return {n: estimate(n, Interval(x, None, None)) for n, x in zip(population.names, values, strict=True)}
            found = plan.intervals(population.measure(plan.chosen))
        return {n: estimate(n, x) for n, x in zip(population.names, found, strict=True)}

    def curve(self, members: Collection) -> dict[str, Any]:
        """Measure a population's ensembles of all sizes; return the figures of all members, and how they grow.

        Returned are JSON values: "ensemble" figure -> estimate, "growth" figure -> sizes, distances from the limit, and
        the limit.
        """
        outside = self.outside
        report = evaluate(members, self.inside, outside, subsets=self.subsets, seed=self.seed, device=self.device)
        growth = {
            name: {"sizes": list(x.sizes), "distances": list(x.distances), "limit": x.limit.value,
                   "first": report.member[name].value if name in report.member else x.limit.value + x.distances[0]}
            for name, x in report.growth.items()
        }  # fmt: skip
        figures = {n: estimate(n, x).to_json() for n, x in report.ensemble.items()}
        return {"figures": figures, "growth": growth}

    def _logits(self, members: Collection, data: ImageData) -> Tensor:
        return predictions.logits(members, data, self.device)


def images_of(members: Collection, data: Given | None, ood: Given | None) -> tuple[ImageData, ImageData | None]:
    """Find what draws are measured on; return labelled images, and images out of distribution, None for none.

    Args:
        members: whose classes count.
        data: as in `zoo.evaluate`.
        ood: likewise; None for those that the data set is told apart from (`OOD`), "none" for none.

    Raises:
        UsageError: images without labels of the members' classes.
        SourceNotFound, NetworkError, AccessError, DamagedError: images that can't be had.
    """
    given = arguments.images_of(members.description) if data is None else images.of(data)
    inside, _ = arguments.labelled(given, members.description)
    named = OOD.get(inside.name) if ood is None else ood
    if named is None or (isinstance(named, str) and named == NO_OOD):
        return inside, None
    return inside, images.of(named)


# How many independent members an ensemble is worth: figures placed on the population's curve over ensemble sizes.


# Figures that grow or fall with the size; calibration errors need not.
WORTH_FIGURES = ("accuracy", "nll", "brier", "aurc", "auroc", "aupr", "fpr95", "mi_id", "mi_ood")


@dataclass(frozen=True)
class Curve:
    """A figure of ensembles of independent members, over their sizes.

    Args:
        sizes: rising, from 1 to all members.
        values: mean figure of each size.
        limit: of an infinite ensemble.
    """

    sizes: Sequence[int]
    values: Sequence[float]
    limit: float

    @classmethod
    def from_growth(cls, growth: Mapping[str, Any]) -> Self:
        """Read a figure's growth as `Uncertainty.curve` gives it; return the curve."""
        return cls(growth["sizes"], [growth["limit"] + d for d in growth["distances"]], growth["limit"])

    def monotone(self) -> list[float]:
        """Return the distances from the limit towards the single member's side, falling with the size, none below 0.

        What random subsets leave uneven is levelled by averaging neighbours (isotonic regression); the limit counts as
        a further point that no size passes.
        """
        from scipy.optimize import isotonic_regression

        side = 1.0 if self.values[0] >= self.limit else -1.0
        levelled = isotonic_regression([side * (v - self.limit) for v in self.values], increasing=False)
        return [max(0.0, float(value)) for value in levelled.x]

    def size_of(self, value: float) -> float:
        """Find the size of the ensembles whose mean figure is a value; return it, between sizes straight in 1/k.

        0 for a figure that a single member passes, infinity for one at the limit or beyond it; past all members the
        distance from the limit goes by 1/k.

        >>> curve = Curve((1, 2, 4), (0.9, 0.5, 0.3), 0.1)  # 0.1 + 0.8/k
        >>> curve.size_of(0.5), round(curve.size_of(0.4), 3), round(curve.size_of(0.2), 3), curve.size_of(1.0)
        (2.0, 2.667, 8.0, 0.0)
        """
        distances = self.monotone()
        side = 1.0 if self.values[0] >= self.limit else -1.0
        wanted = side * (value - self.limit)
        if wanted <= 0:
            return math.inf
        if wanted > distances[0]:
            return 0.0
        for at in range(1, len(distances)):
            if wanted > distances[at]:
                share = (distances[at - 1] - wanted) / (distances[at - 1] - distances[at])
                return 1 / ((1 - share) / self.sizes[at - 1] + share / self.sizes[at])
            if wanted == distances[at] and (at + 1 == len(distances) or distances[at + 1] < wanted):
                return float(self.sizes[at])
        return self.sizes[-1] * distances[-1] / wanted


@dataclass(frozen=True)
class Worth:
    """How many independent members have a figure on average.

    Args:
        members: how many; 0 for less than one, infinity where the figure is at the limit or beyond it.
        low, high: of the figure's own 95 % interval; None where it has none. The curve's error is not in them.
        at_hand: members that the curve was measured with; more go by 1/k.
        limit: the figure of an infinite ensemble.
    """

    members: float
    low: float | None
    high: float | None
    at_hand: int
    limit: float

    def __str__(self) -> str:
        if self.members == 0:
            return "less than 1"
        if self.members > self.at_hand:
            return f"more than {self.at_hand:,} (the limit is {self.limit:.4g})"
        return self.short

    @property
    def short(self) -> str:
        """The same for a table: "<1 [<1, 2.2]", ">64 [12, >64]"."""
        bounds = [] if self.low is None or self.high is None else [self.low, self.high]
        interval = f" [{', '.join(map(self._bound, bounds))}]" if bounds else ""
        return self._bound(self.members) + interval

    def _bound(self, size: float) -> str:
        return "<1" if size < 1 else f">{self.at_hand}" if size > self.at_hand else f"{size:.2g}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; infinity is "inf"."""
        found = {"members": self.members, "low": self.low, "high": self.high}
        return {n: "inf" if x == math.inf else x for n, x in found.items()} | {
            "at_hand": self.at_hand, "limit": self.limit,
        }  # fmt: skip

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave; return it."""
        low, high = (None if given[n] is None else float(given[n]) for n in ("low", "high"))
        return cls(float(given["members"]), low, high, given["at_hand"], given["limit"])


def worth(curve: Curve, found: Estimate) -> Worth | None:
    """Place a figure on the population's curve; return how many members it is worth, None where that says nothing.

    Args:
        curve: of the population.
        found: the figure. It says nothing where it isn't finite, or where members added change nothing.
    """
    if not math.isfinite(found.value) or curve.monotone()[0] <= 0 or len(curve.sizes) < 2:
        return None
    low = high = None
    if found.low is not None and found.high is not None:
        low, high = sorted(curve.size_of(x) for x in (found.low, found.high))
    return Worth(curve.size_of(found.value), low, high, curve.sizes[-1], curve.limit)


def all_worth(growth: Mapping[str, Any], figures: Mapping[str, Estimate]) -> dict[str, Worth]:
    """Place all figures that grow with the size; return figure -> how many members it is worth.

    Args:
        growth: figure -> growth, as `Uncertainty.curve` gives it.
        figures: of an ensemble.
    """
    found = {n: worth(Curve.from_growth(growth[n]), figures[n]) for n in WORTH_FIGURES if n in growth and n in figures}
    return {n: x for n, x in found.items() if x is not None}
