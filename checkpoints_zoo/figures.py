"""The figures of a report, and how they are measured on any subset of a population.

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import metrics
from checkpoints_zoo.metrics import Interval


@dataclass(frozen=True)
class Figure:
    """What a figure of a report is: its unit, which way is better, what it means, and its largest value."""

    unit: str
    better: str
    meaning: str

    @property
    def largest(self) -> float:
        return float(self.unit[3:]) if self.unit.startswith("0..") else math.inf

    def within(self, interval: Interval) -> Interval:
        """Cut an interval at the figure's range, 0 to its largest value; return it."""
        if interval.low is None or interval.high is None:
            return interval
        return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, self.largest))


FIGURES: dict[str, Figure] = {
    "accuracy": Figure("0..1", "higher", "share of inputs classified correctly"),
    "nll": Figure("nats", "lower", "mean negative log-likelihood of the label"),
    "brier": Figure("0..2", "lower", "mean squared error of the probabilities, summed over classes"),
    "ece": Figure("0..1", "lower", "calibration error of the top label, 15 equal-width bins"),
    "adaptive_ece": Figure("0..1", "lower", "calibration error of the top label, 15 equal-mass bins"),
    "ace": Figure("0..1", "lower", "calibration error of each class, 15 equal-mass bins, mean over classes"),
    "aurc": Figure("0..1", "lower", "area under the risk-coverage curve"),
    "mi_id": Figure("nats", "", "mutual information of label and member, mean over the test inputs"),
    "disagreement": Figure("0..1", "", "share of inputs on which two members' classes differ, mean over pairs"),
    "mi_ood": Figure("nats", "higher", "mutual information, mean over the out-of-distribution inputs"),
    "auroc": Figure("0..1", "higher", "area under the ROC curve, out-of-distribution inputs positive"),
    "aupr": Figure("0..1", "higher", "area under the precision-recall curve, the same"),
    "fpr95": Figure("0..1", "lower", "false positives where 95 % of the out-of-distribution inputs are found"),
}
OOD_FIGURES = ("mi_ood", "auroc", "aupr", "fpr95")
MEANS_OVER_MEMBERS = tuple(n for n in FIGURES if n not in ("mi_id", "disagreement", "mi_ood"))


class Population:
    """Predictions of all members, and the figures of any subset of them."""

    def __init__(self, logits: Tensor, labels: Tensor, ood_logits: Tensor | None) -> None:
        self.log_probs = logits.log_softmax(-1)
        self.probs = self.log_probs.exp()
        self.labels = labels
        self.ood_probs = None if ood_logits is None else ood_logits.softmax(-1)
        self.is_ood = torch.arange(len(labels) + (0 if ood_logits is None else ood_logits.shape[1])) >= len(labels)
        self.names = [n for n in FIGURES if ood_logits is not None or n not in OOD_FIGURES]
        # Entropies of single members are the same in every subset.
        self.entropy = metrics.entropy(self.probs).mean(-1)
        self.ood_entropy = None if self.ood_probs is None else metrics.entropy(self.ood_probs).mean(-1)

    def figures(self, subset: Iterable[int] | Tensor) -> Tensor:
        """Return the figures of the ensemble of these members, (figure,) float64, in the order of `names`."""
        at = torch.as_tensor(list(subset) if not isinstance(subset, Tensor) else subset)
        chosen, labels, k = self.probs.index_select(0, at), self.labels, len(at)
        probs = chosen.mean(0)
        log_probs = torch.logsumexp(self.log_probs.index_select(0, at), 0) - math.log(k)
        found = [
            metrics.accuracy(probs, labels, check=False),
            metrics.nll(log_probs, labels, check=False),
            metrics.brier(probs, labels, check=False),
            metrics.ece(probs, labels, check=False),
            metrics.adaptive_ece(probs, labels, check=False),
            metrics.ace(probs, labels, check=False),
            metrics.aurc(probs, labels, check=False),
            (metrics.entropy(probs, check=False).mean() - self.entropy[at].mean()).clamp(min=0),
            metrics.disagreement(chosen, check=False) if k > 1 else torch.tensor(math.nan),
        ]
        if self.ood_probs is not None and self.ood_entropy is not None:
            ood_probs = self.ood_probs.index_select(0, at).mean(0)
            scores = torch.cat([metrics.ood_score(probs, check=False), metrics.ood_score(ood_probs, check=False)])
            found += [
                (metrics.entropy(ood_probs, check=False).mean() - self.ood_entropy[at].mean()).clamp(min=0),
                metrics.auroc(scores, self.is_ood, check=False),
                metrics.aupr(scores, self.is_ood, check=False),
                metrics.fpr95(scores, self.is_ood, check=False),
            ]
        return torch.stack([x.double() for x in found])

    def named(self, intervals: Iterable[Interval]) -> dict[str, Interval]:
        return {n: FIGURES[n].within(x) for n, x in zip(self.names, intervals, strict=True)}

    def drawing(self) -> dict[str, Any]:
        bins = metrics.reliability(self.probs.mean(0), self.labels)
        drawn = {f"reliability_{n}": getattr(bins, n).tolist() for n in ("confidence", "accuracy", "inputs")}
        drawn["mi_id"] = metrics.mutual_information(self.probs).tolist()
        if self.ood_probs is not None:
            drawn["mi_ood"] = metrics.mutual_information(self.ood_probs).tolist()
        return drawn
