"""Predictives of HMC's draws, of an ensemble, of VI, and of Gaussians fitted to them, for all runs and halves of them.

Axes: probabilities (predictive, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.evaluation.metrics import Interval, Plan, agreement, jackknife_plan, total_variation
from checkpoints_zoo.methods.comparing.modes import Mode
from checkpoints_zoo.populations.compact_posterior import evaluated, fitted_to
from checkpoints_zoo.populations.evaluator import Evaluator
from checkpoints_zoo.populations.gaussian import Gaussian

NEAR = ("agreement", "total_variation")


@dataclass(frozen=True)
class Column:
    """What some networks say of the test images, once for each predictive.

    Args:
        probs: their mean probabilities, (predictive, input, class).
        sample_accuracy: mean accuracy of the networks, (predictive,).
        mean_accuracy: of the network of their mean weights, (predictive,); None where there is none.
    """

    probs: Tensor
    sample_accuracy: Tensor
    mean_accuracy: Tensor | None = None

    def near(self, others: Tensor) -> dict[str, Tensor]:
        """Compare each predictive with another one; return figure -> (predictive,).

        Args:
            others: (input, class), or one for each predictive.
        """
        pairs = list(zip(self.probs, others.expand_as(self.probs), strict=True))
        return {
            "agreement": torch.stack([agreement(p, q, check=False) for p, q in pairs]),
            "total_variation": torch.stack([total_variation(p, q, check=False) for p, q in pairs]),
        }

    @property
    def accuracies(self) -> dict[str, Tensor]:
        found = {"sample_accuracy": self.sample_accuracy}
        return found if self.mean_accuracy is None else {**found, "mean_accuracy": self.mean_accuracy}


@dataclass(frozen=True)
class Side:
    """A method's draws, and the Gaussians fitted to them.

    Args:
        plan: halves of its runs (chains, or independent members), the first being all.
        weights: (half, predictive), the share that each predictive has in a figure of a half.
        columns: "sample", "q_d" and "q_r"; "q" of draws that are a Gaussian's already.
        rest: predictive of the runs that a half lacks, (half - 1, input, class).
    """

    plan: Plan
    weights: Tensor
    columns: Mapping[str, Column]
    rest: Tensor

    def halves(self, values: Tensor) -> Tensor:
        """Average a figure of each predictive (predictive,) into one of each half; return (half,)."""
        return self.weights @ values

    def own(self, values: Tensor) -> Interval:
        """Put an interval over the runs around a figure of each predictive (predictive,); return it."""
        return within(self.plan.intervals(self.halves(values)[:, None])[0])


def joined(parts: Sequence[Interval]) -> Interval:
    """Join intervals of one figure, each over the runs of another method: half widths add in squares; return it.

    None where one of the methods has too few runs.
    """
    value, half = parts[0].value, 0.0
    for part in parts:
        if part.high is None:
            return Interval(value, None, None)
        half = math.hypot(half, part.high - value)
    return within(Interval(value, value - half, value + half))


def within(x: Interval) -> Interval:
    """Return an interval cut at 0 and 1."""
    if x.low is None or x.high is None:
        return x
    return Interval(x.value, max(0.0, x.low), min(1.0, x.high))


def of_draws(mode: Mode, to: int | str, judge: Evaluator, splits: int, samples: int, seed: int) -> Side:
    """Measure draws, and Gaussians fitted to them before (q_d) and after (q_r) alignment; return the side.

    Each half of the runs has Gaussians of its own; both get the same noise, each half its own.

    Args:
        mode: the draws and their runs.
        to: what they are aligned to, as `Collection.align` takes it.
        judge: on the test images.
        splits: random halves of the runs.
        samples: networks drawn from each Gaussian.
        seed: of halves and noise.
    """
    plan = jackknife_plan(len(mode.runs), seed, splits)
    chosen = [_positions(mode, some) for some in plan.chosen]
    probs = _probs(mode, judge)
    columns = {"sample": _sample(probs, judge, chosen)}
    for name, view in (("q_d", mode.members), ("q_r", mode.members.align(to=to))):
        columns[name] = _of_gaussians(fitted_to(view, judge, chosen), judge, samples, seed)
    rest = [probs[_without(len(probs), some)].mean(0) for some in chosen[1:]]
    shape = (0, *probs.shape[1:])
    return Side(plan, torch.eye(len(chosen), dtype=torch.float64), columns,
                torch.stack(rest) if rest else probs.new_zeros(shape))  # fmt: skip


def of_gaussians(mode: Mode, judge: Evaluator, splits: int, seed: int) -> Side:
    """Measure draws of runs that are a Gaussian's each, such as VI's: one predictive a run; return the side.

    The network of the means has the mean weights of a run's draws.

    Args:
        mode: the draws and their runs.
        judge: on the test images.
        splits: random halves of the runs.
        seed: of the halves.
    """
    plan = jackknife_plan(len(mode.runs), seed, splits)
    runs = [torch.tensor(run) for run in mode.runs]
    weights = torch.zeros(len(plan.chosen), len(runs), dtype=torch.float64)
    for row, some in zip(weights, plan.chosen, strict=True):
        row[some] = 1 / len(some)
    probs = _probs(mode, judge)
    sample = _sample(probs, judge, runs)
    means = [judge.accuracies(judge.log_probs(q.center)) for q in fitted_to(mode.members, judge, runs)]
    columns = {"q": Column(sample.probs, sample.sample_accuracy, torch.cat(means))}
    return Side(plan, weights, columns, probs.new_zeros((0, *probs.shape[1:])))


def figures(side: Side, column: str, against: Side) -> dict[str, Interval]:
    """Return a column of the table: figure -> value and interval, over the runs of the side and of the one against.

    Args:
        side: whose column.
        column: its name.
        against: what it is compared with; where that is the side itself, each half is compared with its own draws.
    """
    of, target = side.columns[column], against.columns["sample"].probs
    found = {}
    if side is against:
        found = {name: side.own(values) for name, values in of.near(target).items()}
    else:
        own = of.near(target[0])
        # Figure of all runs of the side against each half of the others'.
        theirs = [side.halves(torch.stack([n[row] for n in map(of.near, target)]).T)[0] for row in NEAR]
        for name, values in zip(NEAR, theirs, strict=True):
            other = against.plan.intervals(values[:, None])[0]
            found[name] = joined([side.plan.intervals(side.halves(own[name])[:, None])[0], other])
    return found | {name: side.own(values) for name, values in of.accuracies.items()}


def half_against_half(side: Side, column: str) -> dict[str, Interval]:
    """Compare what one half of the runs gives with the draws of the other; return figure -> mean over the halves.

    Low and high are where 95 % of the halves fall. Empty with fewer than three runs.
    """
    if not len(side.rest):
        return {}
    of = Column(side.columns[column].probs[1:], side.columns[column].sample_accuracy[1:])
    found = {}
    for name, values in of.near(side.rest).items():
        low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
        found[name] = Interval(float(values.mean()), low, high)
    return found


def _probs(mode: Mode, judge: Evaluator) -> Tensor:
    logits = predictions.logits(mode.members, judge.test.data, judge.device, batch=judge.test.batch)
    return logits.double().softmax(-1)


def _sample(probs: Tensor, judge: Evaluator, chosen: Sequence[Tensor]) -> Column:
    right = judge.accuracies(probs)
    return Column(torch.stack([probs[some].mean(0) for some in chosen]),
                  torch.stack([right[some].mean() for some in chosen]))  # fmt: skip


def _of_gaussians(fitted: Sequence[Gaussian], judge: Evaluator, samples: int, seed: int) -> Column:
    noise = torch.Generator().manual_seed(seed)
    found = [evaluated(judge, q, samples, noise) for q in fitted]
    return Column(
        torch.stack([x.probs for x in found]),
        torch.stack([x.accuracies.mean() for x in found]),
        torch.tensor([x.mean_accuracy for x in found], dtype=torch.float64),
    )


def _positions(mode: Mode, runs: Tensor) -> Tensor:
    return torch.tensor([at for run in runs.tolist() for at in mode.runs[run]])


def _without(count: int, chosen: Tensor) -> Tensor:
    rest = torch.ones(count, dtype=torch.bool)
    rest[chosen] = False
    return rest
