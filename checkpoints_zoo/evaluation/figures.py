"""The figures of a report: units, meanings, ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.metrics.scaling import HIGHEST, LOWEST


@dataclass(frozen=True)
class Figure:
    """What a figure of a report is: its unit, which way is better, what it means, and its largest value."""

    unit: str
    better: str
    meaning: str

    @property
    def least(self) -> float:
        return float(self.unit.partition("..")[0]) if ".." in self.unit else 0.0

    @property
    def largest(self) -> float:
        return float(self.unit.partition("..")[2]) if ".." in self.unit else math.inf

    def within(self, interval: Interval) -> Interval:
        """Cut an interval and its value at the figure's range; return it."""

        def cut(x: float) -> float:
            return min(max(x, self.least), self.largest)  # in this order NaN stays NaN

        low, high = (None if bound is None else cut(bound) for bound in (interval.low, interval.high))
        return replace(interval, value=cut(interval.value), low=low, high=high)


def figure_of(figures: Mapping[str, Interval], name: str) -> Interval:
    """Return a figure by its name.

    Raises:
        UsageError: no such figure.
    """
    if name not in figures:
        raise UsageError(f"figure {name!r}", expected=f"one of {', '.join(figures)}", found="none such")
    return figures[name]


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
OOD_FIGURES = ("auroc", "aupr", "fpr95", "mi_ood")
TEMPERATURE = "temperature"
SCALED: dict[str, Figure] = {
    TEMPERATURE: Figure(
        f"{LOWEST:g}..{HIGHEST:g}",
        "",
        "of the least NLL on the inputs held out; above 1 the ensemble was too confident",
    ),
    **{n: FIGURES[n] for n in ("nll", "brier", "ece", "adaptive_ece", "ace", "aurc", "auroc", "aupr", "fpr95")},
}
"""The figures after temperature scaling. Accuracy stays as it is, and so do those of the members' differences."""
KNOWN: dict[str, Figure] = {**FIGURES, **SCALED}
MEANS_OVER_MEMBERS = tuple(n for n in KNOWN if n not in ("mi_id", "disagreement", "mi_ood"))
