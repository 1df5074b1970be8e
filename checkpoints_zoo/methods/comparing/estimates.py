"""Figures with intervals over runs, and their order in tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from checkpoints_zoo.evaluation.figures import FIGURES, Figure
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.formats.text import finite_or_null

MMD_FIGURES: dict[str, Figure] = {
    "mmd": Figure("", "lower", definition="MMD² of the weights to the reference's, unbiased, mean over kernels."),
    "ns": Figure("", "lower", definition="The same after removing symmetries: scale unit-norm, then permute first."),
}
PREDICTIVE_FIGURES: dict[str, Figure] = {
    "agreement": Figure(
        "0..1", "higher", title="agreement with the reference",
        definition="Share of inputs that get the reference's class.", scale=100,
    ),
    "total_variation": Figure(
        "0..1", "lower", title="total variation to the reference",
        definition="Half the summed differences of probabilities from the reference's, mean over inputs.", scale=100,
    ),
}  # fmt: skip
ALL_FIGURES: dict[str, Figure] = {**MMD_FIGURES, **PREDICTIVE_FIGURES, **FIGURES}

COLUMN_TITLES = {
    "mmd": "MMD", "ns": "NS", "agreement": "Agr", "total_variation": "TV",
    "accuracy": "Acc", "ece": "ECE", "ace": "ACE", "brier": "Brier", "nll": "NLL",
    "aupr": "AUPR", "fpr95": "FPR95", "auroc": "AUROC", "mi_id": "ID MI", "mi_ood": "OOD MI",
}  # fmt: skip
"""The columns of the table, in its order; the other figures are in the frame and in JSON."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its interval.

    Args:
        value: value in the figure's unit; NaN if there is none.
        low, high: ends of the 95 % interval; None if there is no interval.
        p: p-value of the permutation test, for distances; None if there is no exact test, and for other figures.
        runs: value of each run, if the figure is the mean over runs.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    runs: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; numbers that are not finite are null."""
        values: dict[str, Any] = {"value": self.value, "low": self.low, "high": self.high}
        if self.p is not None:
            values["p"] = self.p
        if self.runs:
            values["runs"] = self.runs
        json_values: dict[str, Any] = finite_or_null(values)
        return json_values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the values that `to_json` returned; return the estimate."""
        value = math.nan if values["value"] is None else float(values["value"])
        runs = tuple(math.nan if x is None else float(x) for x in values.get("runs", ()))
        return cls(value, values["low"], values["high"], values.get("p"), runs)


def mean_over_runs(figure: str, run_values: Sequence[float]) -> Estimate:
    """Average a figure over runs; return the mean with Student's 95 % interval, or without an interval for one run.

    Args:
        figure: name of the figure; the interval is cut at this figure's range.
        run_values: value of the figure for each run.

    >>> estimate_of_mean = mean_over_runs("nll", [0.1, 0.2, 0.3])  # 0.2 ± 4.303 · 0.1 / √3
    >>> round(estimate_of_mean.value, 3), round(estimate_of_mean.low, 3), round(estimate_of_mean.high, 3)
    (0.2, 0.0, 0.448)
    """
    run_count, mean = len(run_values), math.fsum(run_values) / len(run_values)
    low = high = None
    if run_count > 1 and math.isfinite(mean):
        from scipy.special import stdtrit

        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in run_values) / (run_count - 1))
        half_width = float(stdtrit(run_count - 1, 0.975)) * spread / math.sqrt(run_count)
        low, high = mean - half_width, mean + half_width
    estimate = estimate_from_interval(figure, Interval(mean, low, high))
    return Estimate(estimate.value, estimate.low, estimate.high, runs=tuple(run_values))


def estimate_from_interval(figure: str, interval: Interval, p: float | None = None) -> Estimate:
    """Return an interval as the estimate of a figure, cut at the figure's range; a distance may be below 0."""
    limited_interval = interval if figure in MMD_FIGURES else ALL_FIGURES[figure].limit_to_range(interval)
    return Estimate(limited_interval.value, limited_interval.low, limited_interval.high, p)
