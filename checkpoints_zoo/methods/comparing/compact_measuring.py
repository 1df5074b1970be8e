"""Measuring of draws and of the Gaussians fitted to them: the columns of the table in compact_comparison.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.evaluation.metrics import Interval, Plan, agreement, jackknife_plan, total_variation
from checkpoints_zoo.methods.comparing.draw_ensembles import DrawEnsemble
from checkpoints_zoo.populations.compact_posterior import evaluate_gaussian, fit_gaussians
from checkpoints_zoo.populations.gaussian import Gaussian
from checkpoints_zoo.populations.predictives import join_intervals
from checkpoints_zoo.populations.untrained_networks import Evaluator

DISTANCE_ROWS = ("agreement", "total_variation")  # Rows of the table that compare predictions.


@dataclass(frozen=True)
class ColumnPredictives:
    """Predictive distributions of some networks on the test images, and the networks' accuracies.

    Args:
        probs: mean probabilities of the networks, (predictive, input, class).
        sample_accuracy: mean accuracy of the networks, (predictive,).
        mean_accuracy: accuracy of the network with the mean weights, (predictive,); None for columns without such a
            network.
    """

    probs: Tensor
    sample_accuracy: Tensor
    mean_accuracy: Tensor | None = None

    def distances_to(self, target_probs: Tensor) -> dict[str, Tensor]:
        """Compare each predictive distribution with a target distribution; return figure -> values, (predictive,).

        Args:
            target_probs: probabilities (input, class) of the target, or one tensor (input, class) for each predictive
                distribution.
        """
        pairs = list(zip(self.probs, target_probs.expand_as(self.probs), strict=True))
        return {
            "agreement": torch.stack([agreement(p, q, check=False) for p, q in pairs]),
            "total_variation": torch.stack([total_variation(p, q, check=False) for p, q in pairs]),
        }

    @property
    def accuracies(self) -> dict[str, Tensor]:
        values = {"sample_accuracy": self.sample_accuracy}
        return values if self.mean_accuracy is None else {**values, "mean_accuracy": self.mean_accuracy}


@dataclass(frozen=True)
class MethodPredictives:
    """Predictive distributions of a method's draws, and of the Gaussians fitted to the draws, for all runs and for
    halves of the runs.

    Args:
        plan: halves of the method's runs (chains, or independent members); the first entry has all runs.
        weights: weight of each predictive distribution in a figure of a half, (half, predictive).
        columns: names of the columns: "sample", "q_d" and "q_r"; "q" if the draws come from a Gaussian.
        other_half_probs: mean probabilities of the runs that are not in a half, (half - 1, input, class).
    """

    plan: Plan
    weights: Tensor
    columns: Mapping[str, ColumnPredictives]
    other_half_probs: Tensor

    def average_halves(self, predictive_values: Tensor) -> Tensor:
        """Average a figure of the predictive distributions, (predictive,), over each half; return (half,)."""
        return self.weights @ predictive_values

    def interval(self, predictive_values: Tensor) -> Interval:
        """Compute the interval of a figure over the runs; return the interval.

        Args:
            predictive_values: figure of each predictive distribution, (predictive,).
        """
        return _cut_at_0_and_1(self.plan.intervals(self.average_halves(predictive_values)[:, None])[0])


def measure_draws(
    draws: DrawEnsemble, to: int | str, evaluator: Evaluator, splits: int, samples: int, seed: int
) -> MethodPredictives:
    """Measure draws, and Gaussians fitted to the draws before (q_d) and after (q_r) alignment; return the predictive
    distributions of draws and Gaussians.

    Each half of the runs gets its own Gaussians and its own noise; q_d and q_r get the same noise.

    Args:
        draws: draws and the runs that they belong to.
        to: reference that the draws are aligned to: any reference that `Collection.align` takes.
        evaluator: evaluator of networks on the test images.
        splits: number of random halves of the runs.
        samples: number of networks drawn from each Gaussian.
        seed: seed of halves and noise.
    """
    plan = jackknife_plan(len(draws.runs), seed, splits)
    positions_of_subsets = [_positions_of_runs(draws, runs) for runs in plan.chosen]
    probs = _compute_probabilities(draws, evaluator)
    columns = {"sample": _predictives_of_draws(probs, evaluator, positions_of_subsets)}
    for name, view in (("q_d", draws.members), ("q_r", draws.members.align(to=to))):
        columns[name] = _predictives_of_gaussians(
            fit_gaussians(view, evaluator, positions_of_subsets), evaluator, samples, seed
        )
    mean_probs_of_others = [
        probs[_mask_of_other_positions(len(probs), half)].mean(0) for half in positions_of_subsets[1:]
    ]
    other_half_probs = (
        torch.stack(mean_probs_of_others) if mean_probs_of_others else probs.new_zeros((0, *probs.shape[1:]))
    )
    return MethodPredictives(plan, torch.eye(len(positions_of_subsets), dtype=torch.float64), columns, other_half_probs)


def measure_gaussians(draws: DrawEnsemble, evaluator: Evaluator, splits: int, seed: int) -> MethodPredictives:
    """Measure runs whose draws come from a Gaussian, such as runs of VI; return the figures of the runs.

    Each run of the method has one predictive distribution. The mean weights of a run's draws make the network that
    stands for the Gaussian's mean.

    Args:
        draws: draws and the runs that they belong to.
        evaluator: evaluator of networks on the test images.
        splits: number of random halves of the runs.
        seed: seed of the halves.
    """
    plan = jackknife_plan(len(draws.runs), seed, splits)
    positions_of_runs = [torch.tensor(run) for run in draws.runs]
    weights = torch.zeros(len(plan.chosen), len(positions_of_runs), dtype=torch.float64)
    for predictive_weights, chosen_runs in zip(weights, plan.chosen, strict=True):
        predictive_weights[chosen_runs] = 1 / len(chosen_runs)
    probs = _compute_probabilities(draws, evaluator)
    sample_predictives = _predictives_of_draws(probs, evaluator, positions_of_runs)
    accuracies_of_means = [
        evaluator.accuracies(evaluator.log_probs(q.center))
        for q in fit_gaussians(draws.members, evaluator, positions_of_runs)
    ]
    columns = {
        "q": ColumnPredictives(
            sample_predictives.probs, sample_predictives.sample_accuracy, torch.cat(accuracies_of_means)
        )
    }
    return MethodPredictives(plan, weights, columns, probs.new_zeros((0, *probs.shape[1:])))


def table_column(method: MethodPredictives, column_name: str, against: MethodPredictives) -> dict[str, Interval]:
    """Return a column of the table: figure -> value and interval, over the runs of both methods.

    Args:
        method: method that has the column.
        column_name: name of the column.
        against: method to compare with; if `against` is `method` itself, each half of the runs is compared with the
            draws of that half.
    """
    predictives, target_probs = method.columns[column_name], against.columns["sample"].probs
    interval_by_row = {}
    if method is against:
        interval_by_row = {
            name: method.interval(values) for name, values in predictives.distances_to(target_probs).items()
        }
    else:
        distances = predictives.distances_to(target_probs[0])
        # `distance_intervals` compares all runs of the method with each half of the other method's runs.
        distance_intervals = [
            method.average_halves(torch.stack([n[row] for n in map(predictives.distances_to, target_probs)]).T)[0]
            for row in DISTANCE_ROWS
        ]
        for name, values in zip(DISTANCE_ROWS, distance_intervals, strict=True):
            reference_interval = against.plan.intervals(values[:, None])[0]
            interval_by_row[name] = join_intervals(
                [method.plan.intervals(method.average_halves(distances[name])[:, None])[0], reference_interval]
            )
    return interval_by_row | {name: method.interval(values) for name, values in predictives.accuracies.items()}


def compare_halves(method: MethodPredictives, column_name: str) -> dict[str, Interval]:
    """Compare one half of a method's runs, or the Gaussian fitted to this half, with the draws of the other half;
    return figure -> mean.

    Low and high are the range of 95 % of the halves. The result is empty if there are fewer than three runs.
    """
    if not len(method.other_half_probs):
        return {}
    half_predictives = ColumnPredictives(
        method.columns[column_name].probs[1:], method.columns[column_name].sample_accuracy[1:]
    )
    interval_by_row = {}
    for name, values in half_predictives.distances_to(method.other_half_probs).items():
        low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
        interval_by_row[name] = Interval(float(values.mean()), low, high)
    return interval_by_row


def _cut_at_0_and_1(interval: Interval) -> Interval:
    """Return an interval cut at 0 and 1."""
    if interval.low is None or interval.high is None:
        return interval
    return Interval(interval.value, max(0.0, interval.low), min(1.0, interval.high))


def _compute_probabilities(draws: DrawEnsemble, evaluator: Evaluator) -> Tensor:
    logits = predictions.logits(draws.members, evaluator.test.data, evaluator.device, batch=evaluator.test.batch)
    return logits.double().softmax(-1)


def _predictives_of_draws(
    probs: Tensor, evaluator: Evaluator, positions_of_subsets: Sequence[Tensor]
) -> ColumnPredictives:
    accuracies_of_draws = evaluator.accuracies(probs)
    return ColumnPredictives(
        torch.stack([probs[positions].mean(0) for positions in positions_of_subsets]),
        torch.stack([accuracies_of_draws[positions].mean() for positions in positions_of_subsets]),
    )


def _predictives_of_gaussians(
    gaussians: Sequence[Gaussian], evaluator: Evaluator, sample_count: int, seed: int
) -> ColumnPredictives:
    noise_generator = torch.Generator().manual_seed(seed)
    evaluated_gaussians = [evaluate_gaussian(evaluator, q, sample_count, noise_generator) for q in gaussians]
    return ColumnPredictives(
        torch.stack([x.probs for x in evaluated_gaussians]),
        torch.stack([x.accuracies.mean() for x in evaluated_gaussians]),
        torch.tensor([x.mean_accuracy for x in evaluated_gaussians], dtype=torch.float64),
    )


def _positions_of_runs(draws: DrawEnsemble, runs: Tensor) -> Tensor:
    return torch.tensor([at for run in runs.tolist() for at in draws.runs[run]])


def _mask_of_other_positions(draw_count: int, positions: Tensor) -> Tensor:
    is_outside = torch.ones(draw_count, dtype=torch.bool)
    is_outside[positions] = False
    return is_outside
