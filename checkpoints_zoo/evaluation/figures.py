"""The table of a report's figures: how each is computed, its title, unit, direction and definition.

A new metric needs a function in `evaluation.metrics`, and a row of the same name in this table (but for figures on
members' differences, which `subsets.Population` computes). This file does not import torch, so that the command line
starts quickly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError

if TYPE_CHECKING:
    from checkpoints_zoo.evaluation.metrics import Interval

# Kinds of input of a figure. For the first three kinds, the metric of the figure's name is called:
PROBABILITIES = "probabilities"  # metric(probabilities (input, class), labels (input,), check=False)
UNCERTAINTY = "uncertainty"  # metric(probabilities (input, class), labels (input,), uncertainty=(input,), check=False)
SCORES = "scores"  # metric(uncertainties (input,), is_ood (input,), check=False)
# Figures of the other kinds have code of their own in `subsets.Population`.
LOG_PROBABILITIES = "log probabilities"
# Figures on differences between members: a single member has no such figure, and temperature scaling does not change
# such figures.
MEMBER_DIFFERENCES = "members"

# Groups of figures, as pages list them.
LIKELIHOOD = "Accuracy and likelihood"
CALIBRATION = "Calibration"
DIVERSITY = "Diversity"
OOD_DETECTION = "Out-of-distribution detection"

# How the mean figure of ensembles of k members depends on k.
EXACT = "a + b/k"
SMOOTH = "a + b/k + c/k² + …"  # Figures that are smooth functions of the mean probabilities.
CONSTANT = "a"  # Figures that are means over pairs of members.
ROUGH = ""  # Figures that sort or count: a smooth curve only for many inputs.


@dataclass(frozen=True)
class Figure:
    """The description of one figure of a report.

    Args:
        unit: unit of the figure ("nats"), or its range ("0..1").
        better: which direction is better, "higher" or "lower"; "" for neither.
        input_kind: kind of input from which the figure is computed: `PROBABILITIES` or another kind of this file; "" if
            no metric computes the figure.
        group: group of figures that it belongs to: `CALIBRATION` or another group of this file.
        growth: how the mean figure of ensembles depends on their size: `EXACT`, `SMOOTH`, `CONSTANT` or `ROUGH`.
        title: name of the figure in pictures and pages.
        definition: full definition of the figure, for pages.
        short_title: short title of the figure for axes and tables; "" to use the title.
        scale: factor by which values are multiplied in pictures and tables: 100 for percent.
    """

    unit: str
    better: str
    input_kind: str = ""
    group: str = ""
    growth: str = ROUGH
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
        input_kind=PROBABILITIES,
        group=LIKELIHOOD,
        title="accuracy",
        definition="Share of inputs whose most probable class is the label; in percent here. The probabilities of an "
        "ensemble are the mean of its members'.",
        scale=100,
    ),
    "nll": Figure(
        "nats",
        "lower",
        input_kind=LOG_PROBABILITIES,
        group=LIKELIHOOD,
        growth=SMOOTH,
        title="NLL",
        definition="Negative log-likelihood of the label under the mean probabilities, nats, mean over inputs.",
    ),
    "brier": Figure(
        "0..2",
        "lower",
        input_kind=PROBABILITIES,
        group=LIKELIHOOD,
        growth=EXACT,
        title="Brier score",
        definition="Squared error of the probabilities, summed over classes, mean over inputs, 0 to 2.",
        short_title="Brier",
    ),
    "ece": Figure(
        "0..1",
        "lower",
        input_kind=PROBABILITIES,
        group=CALIBRATION,
        title="ECE",
        definition="Expected calibration error of the top label: 15 bins of equal width over the largest probability; "
        "the mean of |accuracy − mean confidence| over bins, each weighed by its inputs (L1).",
    ),
    "adaptive_ece": Figure(
        "0..1",
        "lower",
        input_kind=PROBABILITIES,
        group=CALIBRATION,
        title="adaptive ECE",
        definition="As ECE, with 15 bins of equal mass, so that each holds as many inputs.",
    ),
    "ace": Figure(
        "0..1",
        "lower",
        input_kind=PROBABILITIES,
        group=CALIBRATION,
        title="ACE",
        definition="Adaptive calibration error of each class: for each class 15 bins of equal mass over its "
        "probability; mean over classes.",
    ),
    "aurc": Figure(
        "0..1",
        "lower",
        input_kind=UNCERTAINTY,
        group=LIKELIHOOD,
        title="AURC",
        definition="Area under the risk-coverage curve: the error rate of the inputs that are kept, mean over all "
        "coverages, the most confident first.",
    ),
    "mi_id": Figure(
        "nats",
        "",
        input_kind=MEMBER_DIFFERENCES,
        group=DIVERSITY,
        growth=SMOOTH,
        title="mutual information, ID",
        definition="Mutual information of label and member, H(mean p) − mean H(p), nats, mean over the test inputs. 0 "
        "where all members say the same.",
    ),
    "disagreement": Figure(
        "0..1",
        "",
        input_kind=MEMBER_DIFFERENCES,
        group=DIVERSITY,
        growth=CONSTANT,
        title="disagreement",
        definition="Share of inputs on which two members' classes differ, mean over pairs of members.",
    ),
    "mi_ood": Figure(
        "nats",
        "higher",
        input_kind=MEMBER_DIFFERENCES,
        group=OOD_DETECTION,
        growth=SMOOTH,
        title="mutual information, OOD",
        definition="The same on the inputs out of distribution (OOD).",
    ),
    "auroc": Figure(
        "0..1",
        "higher",
        input_kind=SCORES,
        group=OOD_DETECTION,
        title="AUROC",
        definition="Area under the ROC curve, out-of-distribution inputs positive, by the score 1 − (largest mean "
        "probability). 1/2 is chance.",
    ),
    "aupr": Figure(
        "0..1",
        "higher",
        input_kind=SCORES,
        group=OOD_DETECTION,
        title="AUPR",
        definition="Area under the precision-recall curve (average precision) of the same. Chance is the share of "
        "out-of-distribution inputs.",
    ),
    "fpr95": Figure(
        "0..1",
        "lower",
        input_kind=SCORES,
        group=OOD_DETECTION,
        title="FPR95",
        definition="False positive rate: share of test inputs that are flagged at the highest threshold that finds "
        "95 % of the out-of-distribution inputs.",
    ),
}
OOD_FIGURES = tuple(name for name, figure in FIGURES.items() if figure.group == OOD_DETECTION)
TEMPERATURE = "temperature"
SCALED_FIGURES: dict[str, Figure] = {
    TEMPERATURE: Figure(
        "0.05..20",  # The bounds of `metrics.temperature`.
        "",
        growth=SMOOTH,
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
# Figures that a single member has, so that reports have their means over members.
MEANS_OVER_MEMBERS = tuple(name for name, figure in KNOWN_FIGURES.items() if figure.input_kind != MEMBER_DIFFERENCES)
CONSTANT_FIGURES = tuple(name for name, figure in FIGURES.items() if figure.growth == CONSTANT)
# Figures that a few members decide, if these few are much worse than all other members: all but those that only count
# or sort inputs.
SENSITIVE_FIGURES = tuple(name for name, figure in KNOWN_FIGURES.items() if figure.growth != ROUGH)
# Figures that only grow, or only fall, with the ensemble size; calibration errors may do both.
MONOTONE_FIGURES = tuple(
    name for name, figure in FIGURES.items() if figure.group != CALIBRATION and name not in CONSTANT_FIGURES
)
