"""Measure draws: MMD and NS to a reference population on one scale, and the figures of the draws as an ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.evaluating import evaluate
from checkpoints_zoo.evaluation.figures import SENSITIVE_FIGURES
from checkpoints_zoo.evaluation.metrics import Interval, Plan
from checkpoints_zoo.evaluation.subsets import InMemory, Population
from checkpoints_zoo.images import ImageData, ImageInput, in_order
from checkpoints_zoo.methods.comparing.estimates import PREDICTIVE_FIGURES, Estimate, estimate_from_interval
from checkpoints_zoo.methods.comparing.stored_logits import NOT_STORED, StoredLogits
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations import discrepancy
from checkpoints_zoo.populations.independent_units import Exchange, split_by_unit, unit_numbers
from checkpoints_zoo.populations.kernels import (
    BandwidthGrid,
    Distances,
    choose_kernels,
    kernel_matrix,
)
from checkpoints_zoo.populations.predictives import compare_logits, figures_of_subsets, mean_probabilities

NS_SCALE, NS_PERMUTE = "unit-norm", "first"  # Settings of the canonical form from which NS is computed.
NO_OOD = "none"
# Data set -> default images out of distribution. The choices for CIFAR are from Laurent et al. 2024, the choices for
# MNIST from torch-uncertainty; the photos for digits are in the package.
DEFAULT_OOD = {
    "cifar10": "svhn", "cifar100": "svhn", "tiny-imagenet": "svhn", "mnist": "fashion-mnist", "fashion-mnist": "mnist",
    "digits": "photos",
}  # fmt: skip

EstimatesByGroup = dict[str, dict[str, Estimate]]  # "mmd" or "ns" -> group of tensors -> estimate.


@dataclass(frozen=True)
class Closeness:
    """Measures the distances of draws to a reference.

    Args:
        reference: the population.
        permutations: number of permutations of the test.
        subsets: number of subsets of runs that the jackknife measures.
        seed: seed of permutations and subsets.
        device: device to compute on.
    """

    reference: Collection
    permutations: int
    subsets: int
    seed: int
    device: str = "cpu"

    def measure(self, draws: Collection, plan: Plan | None) -> EstimatesByGroup:
        """Measure MMD² and NS of draws, for each layer and for all weights; return both.

        Args:
            draws: two or more draws of a method.
            plan: subsets of the draws for the jackknife; None for no interval.
        """
        return self._measure_views(draws, self.reference, "second", plan)

    def compare_halves(self) -> EstimatesByGroup:
        """Compare the reference's units at even and at odd positions, on the same scale; return the distances."""
        return self._measure_views(*split_by_unit(self.reference), "pooled", None)

    def _measure_views(
        self, draws: Collection, reference: Collection, grid: BandwidthGrid, plan: Plan | None
    ) -> EstimatesByGroup:
        estimates_by_measure = {"mmd": self._measure_mmd(draws, reference, grid, plan)}
        try:
            views = [c.canonicalize(scale=NS_SCALE, permute=NS_PERMUTE) for c in (draws, reference)]
        except SymmetryError:
            return estimates_by_measure  # Without a table of symmetries there is no NS.
        return {**estimates_by_measure, "ns": self._measure_mmd(views[0], views[1], grid, plan)}

    def _measure_mmd(
        self, draws: Collection, reference: Collection, grid: BandwidthGrid, plan: Plan | None
    ) -> dict[str, Estimate]:
        """Return MMD² for each group of tensors; a plan of subsets adds intervals."""
        unit_of_members = unit_numbers(draws, reference)
        exchange_test = Exchange.of_units(unit_of_members[0], unit_of_members[1], self.seed)
        estimate_by_group, draw_count = {}, len(draws)
        for group, distances in discrepancy.distances_between_sets(draws, reference, device=self.device).items():
            p = (
                None
                if exchange_test is None
                else exchange_test.test(distances, "pooled", None, self.permutations, self.seed)
            )
            kernel_values = average_kernel(distances, choose_kernels(distances, draw_count, grid, None))
            if plan is None or not plan.widening:
                estimate_by_group[group] = Estimate(
                    float(mmd2(kernel_values, draw_count, [torch.arange(draw_count)])), p=p
                )
            else:
                estimate_by_group[group] = estimate_from_interval(
                    "mmd", plan.intervals(mmd2(kernel_values, draw_count, plan.chosen)[:, None])[0], p
                )
        return estimate_by_group


def average_kernel(distances: Distances, kernels_and_bandwidths: Sequence[tuple[str, float]]) -> Tensor:
    """Return the mean of several kernels, (member, member) float64; its MMD² is the mean of the kernels' MMD².

    Args:
        distances: distances of all members.
        kernels_and_bandwidths: (name, bandwidth) of each kernel.
    """
    kernel_sum = torch.zeros_like(distances.l2)
    for kernel_name, bandwidth in kernels_and_bandwidths:
        kernel_sum += kernel_matrix(distances, kernel_name, bandwidth)
    return kernel_sum / len(kernels_and_bandwidths)


def mmd2(kernel_values: Tensor, first_count: int, subsets: Sequence[Tensor]) -> Tensor:
    """Estimate MMD² between subsets of the first set and all of the second, without bias; return (subset,) on the CPU.

    Args:
        kernel_values: values of the kernel for all pairs, (member, member), symmetric.
        first_count: number of members of the first set.
        subsets: positions in the first set; each subset has two or more.

    >>> kernel = torch.tensor([[1.0, 0.9, 0.1, 0.2], [0.9, 1, 0.1, 0.2], [0.1, 0.1, 1, 0.8], [0.2, 0.2, 0.8, 1]])
    >>> f"{mmd2(kernel, 2, [torch.arange(2)]).item():.4f}"  # 0.9 + 0.8 - 2 * 0.15
    '1.4000'
    """
    values_of_pairs = kernel_values.double().clone().fill_diagonal_(0)
    is_in_subset = torch.zeros(first_count, len(subsets), dtype=torch.float64)
    for column, subset in enumerate(subsets):
        is_in_subset[subset, column] = 1
    is_in_subset = is_in_subset.to(kernel_values.device)
    subset_sizes, second_count = is_in_subset.sum(0), len(kernel_values) - first_count
    mean_within_subsets = (is_in_subset * (values_of_pairs[:first_count, :first_count] @ is_in_subset)).sum(0) / (
        subset_sizes * (subset_sizes - 1)
    )
    mean_across_sets = (values_of_pairs[:first_count, first_count:].sum(1) @ is_in_subset) / (
        subset_sizes * second_count
    )
    return (
        mean_within_subsets
        + values_of_pairs[first_count:, first_count:].sum() / (second_count * (second_count - 1))
        - 2 * mean_across_sets
    ).cpu()


@dataclass(frozen=True)
class Predictive:
    """Measures the agreement and total variation of draws' mean predictions with the reference's.

    Args:
        reference: the population.
        test_images: the images.
        subsets: number of subsets of runs that the jackknife measures.
        seed: seed of the subsets.
        device: torch device on which networks run.
        stored_logits: folder of logits.
    """

    reference: Collection
    test_images: ImageData
    subsets: int
    seed: int
    device: str = "cpu"
    stored_logits: StoredLogits = NOT_STORED

    @cached_property
    def reference_probabilities(self) -> Tensor:
        """Mean probabilities of the reference, (input, class), float64."""
        return mean_probabilities(self._logits(self.reference))

    def measure(self, draws: Collection, plan: Plan | None) -> dict[str, Estimate]:
        """Compare draws with the reference; return figure -> estimate.

        Args:
            draws: draws of a method.
            plan: subsets of the draws for the jackknife, whose intervals hold for this reference; None for no interval.
        """
        chosen = [torch.arange(len(draws))] if plan is None else plan.chosen
        values = figures_of_subsets(self._logits(draws), chosen, self.reference_probabilities)
        intervals = [Interval(x, None, None) for x in values[0].tolist()] if plan is None else plan.intervals(values)
        return {n: estimate_from_interval(n, x) for n, x in zip(PREDICTIVE_FIGURES, intervals, strict=True)}

    def compare_halves(self) -> dict[str, Estimate]:
        """Compare the reference's units at even and at odd positions with each other; return figure -> estimate."""
        first, second = (self._logits(half) for half in split_by_unit(self.reference))
        figures = compare_logits(first, second, subsets=self.subsets, seed=self.seed)
        return {n: estimate_from_interval(n, figures[n]) for n in PREDICTIVE_FIGURES}

    def _logits(self, members: Collection) -> InMemory:
        with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
            return InMemory(self.stored_logits.read(members, self.test_images, self.device))


@dataclass(frozen=True)
class Uncertainty:
    """Measures draws as ensembles on images.

    Args:
        test_images: labelled images, in the order of the members' classes.
        ood_images: images out of distribution; None leaves the figures on such images out.
        subsets: number of subsets of runs that the jackknife measures.
        seed: seed of the subsets.
        device: torch device on which the draws' networks run.
        stored_logits: folder of logits.
    """

    test_images: ImageData
    ood_images: ImageData | None
    subsets: int
    seed: int
    device: str = "cpu"
    stored_logits: StoredLogits = NOT_STORED

    def measure(self, draws: Collection, plan: Plan | None) -> dict[str, Estimate]:
        """Measure draws as one ensemble; return figure -> estimate.

        Args:
            draws: draws of a method.
            plan: subsets of the draws for the jackknife; None for no interval.
        """
        with one_thread(draws._member_nbytes < SMALL_MEMBER_BYTES):
            labels = arguments.labels_of(self.test_images, draws.description)
            ood_logits = None if self.ood_images is None else self._logits(draws, self.ood_images)
            population = Population(self._logits(draws, self.test_images), labels, ood_logits)
            if plan is None:
                values = population.measure([torch.arange(len(draws))])[0].tolist()
                return {
                    n: estimate_from_interval(n, Interval(x, None, None))
                    for n, x in zip(population.names, values, strict=True)
                }
            intervals = plan.intervals(population.measure(plan.chosen))
        return {
            n: estimate_from_interval(n, x.if_enough(len(draws)) if n in SENSITIVE_FIGURES else x)
            for n, x in zip(population.names, intervals, strict=True)
        }

    def measure_curve(self, members: Collection) -> dict[str, Any]:
        """Measure a population's ensembles of all sizes; return the figures of all members, and their growth.

        The result has JSON values: "figures" is figure -> estimate; "growth" is figure -> {"sizes",
        "distances" from the limit, "limit", "first": the figure of single members}.
        """
        test, ood = (
            None if data is None else self.stored_logits.as_predictions(members, data, self.device)
            for data in (in_order(self.test_images, members.classes), self.ood_images)
        )
        assert test is not None
        report = evaluate(test, None, ood, subsets=self.subsets, seed=self.seed)
        growth = {
            name: {"sizes": list(x.sizes), "distances": list(x.distances), "limit": x.limit.value,
                   "first": report.member[name].value if name in report.member else x.limit.value + x.distances[0]}
            for name, x in report.growth.items()
        }  # fmt: skip
        figures = {n: estimate_from_interval(n, x).to_json() for n, x in report.ensemble.items()}
        return {"figures": figures, "growth": growth}

    def _logits(self, members: Collection, data: ImageData) -> Tensor:
        return self.stored_logits.read(members, data, self.device)


def choose_images(
    members: Collection, data: ImageInput | None, ood: ImageInput | None
) -> tuple[ImageData, ImageData | None]:
    """Choose the images to measure draws on; return labelled images, and images out of distribution or None.

    Args:
        members: members whose classes the labels must have.
        data: labelled images: anything that `zoo.evaluate` takes as `data`.
        ood: images out of distribution: anything that `zoo.evaluate` takes as `ood`; None for the data set's default
            (`DEFAULT_OOD`), "none" for no images out of distribution.

    Raises:
        UsageError: the images lack labels of the members' classes.
        SourceNotFound, NetworkError, AccessError, DamagedError: the images can't be read.
    """
    labelled_images = arguments.images_of(members.description) if data is None else images.of(data)
    test_images, _ = arguments.require_labels(labelled_images, members.description)
    ood_source = DEFAULT_OOD.get(test_images.name) if ood is None else ood
    if ood_source is None or (isinstance(ood_source, str) and ood_source == NO_OOD):
        return test_images, None
    return test_images, images.of(ood_source)
