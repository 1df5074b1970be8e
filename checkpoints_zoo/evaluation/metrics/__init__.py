"""Figures of ensembles and their intervals: tensors in, tensors out.

Probabilities are (input, class) or (member, input, class), float32 or float64, and sum to one over the classes; labels
are (input,) int64. Every metric first checks its arguments; `check=False` leaves the check out, for loops that have
checked the same tensors already.
"""

from __future__ import annotations

from checkpoints_zoo.evaluation.metrics.calibration import Reliability, ace, adaptive_ece, ece, reliability
from checkpoints_zoo.evaluation.metrics.classification import accuracy, brier, nll
from checkpoints_zoo.evaluation.metrics.comparing import agreement, total_variation, wasserstein
from checkpoints_zoo.evaluation.metrics.detection import aupr, auroc, fpr95, ood_score
from checkpoints_zoo.evaluation.metrics.diversity import (
    disagreement,
    disagreement_of_votes,
    entropy,
    mutual_information,
)
from checkpoints_zoo.evaluation.metrics.intervals import (
    FEWEST_MEMBERS_IF_SKEWED,
    Interval,
    Plan,
    band_plan,
    bootstrap_mean,
    jackknife,
    jackknife_plan,
    subset_band,
)
from checkpoints_zoo.evaluation.metrics.scaling import temperature, tempered
from checkpoints_zoo.evaluation.metrics.selective import aurc

__all__ = [
    "FEWEST_MEMBERS_IF_SKEWED",
    "Interval",
    "Plan",
    "Reliability",
    "accuracy",
    "ace",
    "adaptive_ece",
    "agreement",
    "aupr",
    "aurc",
    "auroc",
    "band_plan",
    "bootstrap_mean",
    "brier",
    "disagreement",
    "disagreement_of_votes",
    "ece",
    "entropy",
    "fpr95",
    "jackknife",
    "jackknife_plan",
    "mutual_information",
    "nll",
    "ood_score",
    "reliability",
    "subset_band",
    "temperature",
    "tempered",
    "total_variation",
    "wasserstein",
]
