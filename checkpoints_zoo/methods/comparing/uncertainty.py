"""What draws say as ensembles: accuracy, calibration, out-of-distribution detection, diversity, over runs.

Axes: logits (member, input, class).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation import measuring
from checkpoints_zoo.evaluation.evaluating import evaluate
from checkpoints_zoo.evaluation.metrics import Interval, Plan
from checkpoints_zoo.evaluation.subsets import Population
from checkpoints_zoo.images import Given, ImageData
from checkpoints_zoo.methods.comparing.estimates import Estimate, estimate
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread

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
            labels = measuring.labels_of(self.inside, draws.description)
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
    given = measuring.own(members.description) if data is None else images.of(data)
    inside, _ = measuring.labelled(given, members.description)
    named = OOD.get(inside.name) if ood is None else ood
    if named is None or (isinstance(named, str) and named == NO_OOD):
        return inside, None
    return inside, images.of(named)
