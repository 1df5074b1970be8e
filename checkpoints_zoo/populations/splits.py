"""Figures of Gaussians fitted to members, on all members and on random halves of them, and intervals from these.

Axes: probabilities (member, input, class).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.populations.evaluator import PIECE, Evaluator
from checkpoints_zoo.populations.gaussian import Gaussian

ROWS = {
    "agreement": "share of inputs given the same class as by the ensemble, 0..1",
    "total_variation": "distance to the ensemble's probabilities, 0..1",
    "sample_accuracy": "mean test accuracy of the samples, 0..1",
    "mean_accuracy": "test accuracy of the network of the means, 0..1",
}


@dataclass(frozen=True)
class Networks:
    """What a Gaussian's networks do on the test images.

    Args:
        probs: mean over the samples, (input, class).
        accuracies: of the samples, (sample,).
        mean_accuracy: of the network of the means.
    """

    probs: Tensor
    accuracies: Tensor
    mean_accuracy: float


class Measured:
    """The figures of one subset of the members, and of the Gaussians fitted to it."""

    def __init__(self, subset: Tensor, probs: Tensor, networks: Mapping[str, Networks], judge: Evaluator) -> None:
        rest = torch.ones(len(probs), dtype=torch.bool)
        rest[subset] = False
        own, labels = probs[subset].mean(0), judge.labels
        singles = (probs[subset].argmax(-1) == labels).double().mean(-1)
        self.accuracies = {"members": tuple(singles.tolist())}
        self.figures = {"members": {**_apart(own, own), "sample_accuracy": float(singles.mean())}}
        self.ensemble_accuracy = float(metrics.accuracy(own, labels, check=False))
        others = probs[rest].mean(0) if rest.any() else own
        self.held_out = {"members": _apart(own, others)}
        for name, q in networks.items():
            self.accuracies[name] = tuple(q.accuracies.tolist())
            accuracies = {"sample_accuracy": float(q.accuracies.mean()), "mean_accuracy": q.mean_accuracy}
            self.figures[name] = {**_apart(q.probs, own), **accuracies}
            self.held_out[name] = _apart(q.probs, others)

    @property
    def flat(self) -> dict[tuple[str, str], float]:
        """Return the figures by column and row, the ensemble's accuracy, and the gain of the mean's accuracy."""
        gain = self.figures["q_r"]["mean_accuracy"] - self.figures["q_d"]["mean_accuracy"]
        flat = {(of, row): value for of, figures in self.figures.items() for row, value in figures.items()}
        return {**flat, ("ensemble", "accuracy"): self.ensemble_accuracy, ("gain", "accuracy"): gain}


def measure(
    judge: Evaluator,
    probs: Tensor,
    subsets: Sequence[Tensor],
    fitted: Mapping[str, Sequence[Gaussian]],
    samples: int,
    seed: int,
) -> list[Measured]:
    """Sample the Gaussians fitted to each subset of the members, and compare them with its ensemble; return all.

    Args:
        judge: evaluates networks.
        probs: of the members, (member, input, class).
        subsets: positions of members.
        fitted: name -> a Gaussian a subset; all names get the same noise, each subset its own.
        samples: networks drawn from each Gaussian.
        seed: of the noise.
    """
    noise = {name: torch.Generator().manual_seed(seed) for name in fitted}
    found = []
    for i, subset in enumerate(subsets):
        networks = {name: evaluated(judge, q[i], samples, noise[name]) for name, q in fitted.items()}
        found.append(Measured(subset, probs, networks, judge))
    return found


def intervals(measured: Sequence[Measured], members: int, splits: int, seed: int) -> dict[tuple[str, str], Interval]:
    """Return the first of the measured, which has all members, with jackknife intervals from the others.

    Args:
        measured: on all members, then on the subsets of `halves`.
        members, splits, seed: as in `halves`.
    """
    spread = iter(measured)
    found = metrics.jackknife(
        lambda _: torch.tensor(list(next(spread).flat.values()), dtype=torch.float64), members, seed, splits
    )
    return {key: _within(key, x) for key, x in zip(measured[0].flat, found, strict=True)}


def halves(members: int, splits: int, seed: int) -> list[Tensor]:
    """Return the subsets that the jackknife is going to ask for, beside all members."""
    asked: list[Tensor] = []

    def ask(chosen: Tensor) -> Tensor:
        asked.append(chosen)
        return torch.zeros(1)

    metrics.jackknife(ask, members, seed, splits)
    return asked[1:]


def evaluated(judge: Evaluator, q: Gaussian, samples: int, generator: torch.Generator) -> Networks:
    """Evaluate samples of a Gaussian and the network of its means; return what they do.

    Args:
        judge: evaluates networks.
        q: the Gaussian.
        samples: how many.
        generator: of the noise.
    """
    probs: Tensor | float = 0.0
    accuracies = []
    for count in _steps(q, samples):
        log_probs = judge.log_probs(q.sample(count, generator))
        probs = probs + log_probs.exp().sum(0)
        accuracies.append(judge.accuracies(log_probs))
    center = float(judge.accuracies(judge.log_probs(q.center)))
    return Networks(torch.as_tensor(probs) / samples, torch.cat(accuracies), center)


def pruned(judge: Evaluator, q: Gaussian, levels: Sequence[float], by: str) -> tuple[float, ...]:
    """Return the accuracy of a Gaussian's pruned means at each level, statistics estimated anew."""
    at, found = 0, []
    for count in _steps(q, len(levels)):
        found += judge.accuracies(judge.log_probs(q.pruned(levels[at : at + count], by))).tolist()
        at += count
    return tuple(found)


def _steps(q: Gaussian, count: int) -> list[int]:
    """Cut a number of networks into as many at a time as fit."""
    most = max(1, PIECE // max(1, 4 * sum(mean.numel() for mean in q.mean.values())))
    return [min(most, count - at) for at in range(0, count, most)]


def _within(key: tuple[str, str], x: Interval) -> Interval:
    """Cut an interval at the figure's range: 0..1, and for a difference -1..1."""
    if x.low is None or x.high is None:
        return x
    return replace(x, low=max(x.low, -1.0 if key[0] == "gain" else 0.0), high=min(x.high, 1.0))


def held_out(splits: Sequence[Measured]) -> dict[str, dict[str, Interval]]:
    """Return figures against the ensemble of the other half: means over splits, and where 95 % of the splits fall."""
    if not splits:
        return {}
    found: dict[str, dict[str, Interval]] = {}
    for of, figures in splits[0].held_out.items():
        found[of] = {}
        for row in figures:
            values = torch.tensor([split.held_out[of][row] for split in splits], dtype=torch.float64)
            low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
            found[of][row] = Interval(float(values.mean()), low, high)
    return found


def _apart(probs: Tensor, ensemble: Tensor) -> dict[str, float]:
    return {
        "agreement": float(metrics.agreement(probs, ensemble, check=False)),
        "total_variation": float(metrics.total_variation(probs, ensemble, check=False)),
    }
