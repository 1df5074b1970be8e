"""The table of a report's figures: how each is computed, its title, unit, direction, meaning and definition.

A figure whose field `input_kind` is probabilities or scores is computed by the function of the same name in
`evaluation.metrics`; a new metric needs such a function and a row in this table. This file does not import torch, so
that the command line starts quickly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError

if TYPE_CHECKING:
    from checkpoints_zoo.evaluation.metrics import Interval

# Metrics that take probabilities are called as metric(probabilities (input, class), labels (input,)).
PROBABILITIES = "probabilities"
# Metrics that take log probabilities are called as metric(log probabilities (input, class), labels (input,)).
LOG_PROBABILITIES = "log probabilities"
# Metrics that take an uncertainty are called as metric(probabilities (input, class), labels (input,),
# uncertainty=(input,)).
UNCERTAINTY = "uncertainty"
SCORES = "scores"  # Metrics that take scores are called as metric(scores (input,), is_ood (input,)).
# Figures on differences between members: a single member has no such figure, and temperature scaling does not change
# such figures.
MEMBER_DIFFERENCES = "members"


@dataclass(frozen=True)
class Figure:
    """The description of one figure of a report.

    Args:
        unit: unit of the figure ("nats"), or its range ("0..1").
        better: which direction is better, "higher" or "lower"; "" for neither.
        meaning: meaning of the figure in one line.
        input_kind: kind of input from which the figure is computed: `PROBABILITIES` or another constant of this file;
            "" if no metric computes the figure.
        title: name of the figure in pictures and pages.
        definition: full definition of the figure, for pages.
        short_title: short title of the figure for axes and tables; "" to use the title.
        scale: factor by which values are multiplied in pictures and tables: 100 for percent.
    """

    unit: str
    better: str
    meaning: str
    input_kind: str = ""
    title: str = ""
    definition: str = ""
    short_title: str = ""
    scale: int = 1

    @property
    def label(self) -> str:
        """The figure's title and unit, as the label of an axis or a row."""
        return f"{self.short_title or self.title} ({'%' if self.scale == 100 else self.unit})"

    @property
    def lowest_value(self) -> float:
        return float(self.unit.partition("..")[0]) if ".." in self.unit else 0.0

    @property
    def highest_value(self) -> float:
        return float(self.unit.partition("..")[2]) if ".." in self.unit else math.inf

    def limit_to_range(self, interval: Interval) -> Interval:
        """Limit the value and the bounds of an interval to the figure's range; return the interval."""

        def cut_to_range(x: float) -> float:
            return min(max(x, self.lowest_value), self.highest_value)  # In this order of min and max, NaN stays NaN.

        low, high = (None if bound is None else cut_to_range(bound) for bound in (interval.low, interval.high))
        return replace(interval, value=cut_to_range(interval.value), low=low, high=high)


def find_figure(figures: Mapping[str, Interval], name: str) -> Interval:
    """Return a figure by its name.

    Raises:
        UsageError: there is no figure of this name.
    """
    if name not in figures:
        raise UsageError(f"figure {name!r}", expected=f"one of {', '.join(figures)}", found="none such")
    return figures[name]


FIGURES: dict[str, Figure] = {
    "accuracy": Figure(
        "0..1",
        "higher",
        "share of inputs classified correctly",
        input_kind=PROBABILITIES,
        title="accuracy",
        definition="Share of inputs whose most probable class is the label; in percent here. The probabilities of an "
        "ensemble are the mean of its members'.",
        scale=100,
    ),
    "nll": Figure(
        "nats",
        "lower",
        "mean negative log-likelihood of the label",
        input_kind=LOG_PROBABILITIES,
        title="NLL",
        definition="Negative log-likelihood of the label under the mean probabilities, nats, mean over inputs.",
    ),
    "brier": Figure(
        "0..2",
        "lower",
        "mean squared error of the probabilities, summed over classes",
        input_kind=PROBABILITIES,
        title="Brier score",
        definition="Squared error of the probabilities, summed over classes, mean over inputs, 0 to 2.",
        short_title="Brier",
    ),
    "ece": Figure(
        "0..1",
        "lower",
        "calibration error of the top label, 15 equal-width bins",
        input_kind=PROBABILITIES,
        title="ECE",
        definition="Expected calibration error of the top label: 15 bins of equal width over the largest probability; "
        "the mean of |accuracy − mean confidence| over bins, each weighed by its inputs (L1).",
    ),
    "adaptive_ece": Figure(
        "0..1",
        "lower",
        "calibration error of the top label, 15 equal-mass bins",
        input_kind=PROBABILITIES,
        title="adaptive ECE",
        definition="As ECE, with 15 bins of equal mass, so that each holds as many inputs.",
    ),
    "ace": Figure(
        "0..1",
        "lower",
        "calibration error of each class, 15 equal-mass bins, mean over classes",
        input_kind=PROBABILITIES,
        title="ACE",
        definition="Adaptive calibration error of each class: for each class 15 bins of equal mass over its "
        "probability; mean over classes.",
    ),
    "aurc": Figure(
        "0..1",
        "lower",
        "area under the risk-coverage curve",
        input_kind=UNCERTAINTY,
        title="AURC",
        definition="Area under the risk-coverage curve: the error rate of the inputs that are kept, mean over all "
        "coverages, the most confident first.",
    ),
    "mi_id": Figure(
        "nats",
        "",
        "mutual information of label and member, mean over the test inputs",
        input_kind=MEMBER_DIFFERENCES,
        title="mutual information, ID",
        definition="Mutual information of label and member, H(mean p) − mean H(p), nats, mean over the test inputs. 0 "
        "where all members say the same.",
    ),
    "disagreement": Figure(
        "0..1",
        "",
        "share of inputs on which two members' classes differ, mean over pairs",
        input_kind=MEMBER_DIFFERENCES,
        title="disagreement",
        definition="Share of inputs on which two members' classes differ, mean over pairs of members.",
    ),
    "mi_ood": Figure(
        "nats",
        "higher",
        "mutual information, mean over the out-of-distribution inputs",
        input_kind=MEMBER_DIFFERENCES,
        title="mutual information, OOD",
        definition="The same on the inputs out of distribution (OOD).",
    ),
    "auroc": Figure(
        "0..1",
        "higher",
        "area under the ROC curve, out-of-distribution inputs positive",
        input_kind=SCORES,
        title="AUROC",
        definition="Area under the ROC curve, out-of-distribution inputs positive, by the score 1 − (largest mean "
        "probability). 1/2 is chance.",
    ),
    "aupr": Figure(
        "0..1",
        "higher",
        "area under the precision-recall curve, the same",
        input_kind=SCORES,
        title="AUPR",
        definition="Area under the precision-recall curve (average precision) of the same. Chance is the share of "
        "out-of-distribution inputs.",
    ),
    "fpr95": Figure(
        "0..1",
        "lower",
        "false positives where 95 % of the out-of-distribution inputs are found",
        input_kind=SCORES,
        title="FPR95",
        definition="False positive rate: share of test inputs that are flagged at the highest threshold that finds "
        "95 % of the out-of-distribution inputs.",
    ),
}
OOD_FIGURES = (*(name for name, figure in FIGURES.items() if figure.input_kind == SCORES), "mi_ood")
TEMPERATURE = "temperature"
SCALED_FIGURES: dict[str, Figure] = {
    TEMPERATURE: Figure(
        "0.05..20",  # The bounds of `metrics.temperature`.
        "",
        "of the least NLL on the inputs held out; above 1 the ensemble was too confident",
        title="temperature",
        definition="Mean probabilities p become softmax(log p / T), with the T of the least NLL on inputs that are in "
        "no figure; each random ensemble has its own. Above 1 the ensemble was too confident.",
    ),
    **{
        name: figure
        for name, figure in FIGURES.items()
        if figure.input_kind != MEMBER_DIFFERENCES and name != "accuracy"
    },
}
"""The figures after temperature scaling, which changes neither accuracy nor the differences between members."""
KNOWN_FIGURES: dict[str, Figure] = {**FIGURES, **SCALED_FIGURES}
MEANS_OVER_MEMBERS = tuple(name for name, figure in KNOWN_FIGURES.items() if figure.input_kind != MEMBER_DIFFERENCES)
