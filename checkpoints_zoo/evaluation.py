"""One call from members to a report: the figures of their ensemble, with intervals, and its curve over sizes.

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import images, metrics, plots
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.metrics import Interval

if TYPE_CHECKING:
    import pandas as pd


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
    "disagreement": Figure(
        "0..1", "", "share of inputs on which two members' classes differ, mean over pairs"
    ),
    "mi_ood": Figure("nats", "higher", "mutual information, mean over the out-of-distribution inputs"),
    "auroc": Figure("0..1", "higher", "area under the ROC curve, out-of-distribution inputs positive"),
    "aupr": Figure("0..1", "higher", "area under the precision-recall curve, the same"),
    "fpr95": Figure(
        "0..1", "lower", "false positives where 95 % of the out-of-distribution inputs are found"
    ),
}
OOD_FIGURES = ("mi_ood", "auroc", "aupr", "fpr95")
MEANS_OVER_MEMBERS = tuple(n for n in FIGURES if n not in ("mi_id", "disagreement", "mi_ood"))


@dataclass(frozen=True)
class Report:
    """The figures of an ensemble, each an Interval (value, low, high).

    Args:
        collection: its name.
        citation: of the members, "" if they were given as an ensemble.
        data, ood: names and fingerprints of the images ("digits/test 0123456789abcdef"), ood "" without any.
        inputs, ood_inputs: how many.
        members: how many.
        ensemble: figure -> value of all members together; low and high by a delete-d jackknife.
        member: figure -> mean over the single members; low and high by a bootstrap over members.
        curve: size -> figure -> mean over ensembles of that size; low and high say where the figure of a fresh
            ensemble of that size falls (for all members: as `ensemble`).
        drawing: what the picture needs beside: per-member accuracy, reliability bins, information per input.
    """

    collection: str
    citation: str
    data: str
    ood: str
    inputs: int
    ood_inputs: int
    members: int
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Mapping[int, Mapping[str, Interval]]
    drawing: Mapping[str, Any] = field(repr=False, compare=False)

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble.

        Raises:
            UsageError: no such figure.
        """
        if figure not in self.ensemble:
            raise UsageError(
                f"figure {figure!r}", expected=f"one of {', '.join(self.ensemble)}", found="none such"
            )
        return self.ensemble[figure]

    def _rows(self) -> list[dict[str, Any]]:
        parts = [("ensemble", size, figures) for size, figures in self.curve.items()]
        parts.append(("mean of members", 1, self.member))
        return [
            {"of": of, "members": size, "figure": name, "value": x.value, "low": x.low, "high": x.high,
             "unit": FIGURES[name].unit, "better": FIGURES[name].better}
            for of, size, figures in parts
            for name, x in figures.items()
        ]  # fmt: skip

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure and size: of, members, figure, value, low, high, unit, better."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the report as JSON text; what could not be computed is null."""
        facts = {
            n: getattr(self, n)
            for n in ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
        }
        rows = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            for row in self._rows()
        ]
        return json.dumps({**facts, "level": 0.95, "figures": rows}, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw reliability, curves over ensemble size, member accuracies and information into a PNG; return its path.

        Args:
            path: of the PNG.
        """
        return plots.report(self, Path(path))


def evaluate(
    members: Collection,
    data: str | ImageData | None = None,
    ood: str | ImageData | None = None,
    *,
    sizes: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    subsets: int = 200,
    seed: int = 0,
) -> Report:
    """Measure members as an ensemble: accuracy, calibration, out-of-distribution detection, diversity; return the Report.

    Args:
        members: a collection.
        data: labelled images, by name or given; None for the collection's own test set.
        ood: images out of distribution, by name or given; None leaves those figures out.
        sizes: of the ensembles on the curve; None for the powers of two and all members.
        device, dtype: what the members run on and in.
        batch: images a forward pass.
        subsets: random ensembles drawn for a size.
        seed: of the draws.

    Raises:
        UsageError: images without labels, of other classes, or of a size the members can't take.
        DamagedError: members whose weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> report = zoo.evaluate(zoo.load("convnet-digits", n=4), "digits", ood="photos")
    >>> report["auroc"].value > 0.95
    True
    """
    inside = _images(members.description.dataset if data is None else data)
    outside = None if ood is None else _images(ood)
    if inside.labels is None or tuple(inside.classes) != members.classes:
        raise UsageError(
            f"images {inside.name!r} for {members.name}",
            expected=f"labels of the classes {', '.join(members.classes[:12])}, in this order",
            found=f"classes {', '.join(inside.classes[:12])}" if inside.labels is not None else "no labels",
            do="Give the test set of the collection, or images whose classes are in its order",
        )
    sizes = _sizes(sizes, len(members))
    logits = members.logits(inside, device, dtype, batch)
    ood_logits = None if outside is None else members.logits(outside, device, dtype, batch)
    population = _Population(logits, inside.labels, ood_logits)
    singles = torch.stack([population.figures([i]) for i in range(len(members))])
    means = {
        name: metrics.bootstrap_mean(values, seed=seed)
        for name, values in zip(population.names, singles.T, strict=True)
        if name in MEANS_OVER_MEMBERS
    }
    curve = {
        size: population.named(
            metrics.jackknife(population.figures, len(members), seed=seed, subsets=subsets)
            if size == len(members)
            else metrics.subset_band(population.figures, len(members), size, seed=seed, subsets=subsets)
        )
        for size in sizes
    }
    everyone = curve[len(members)]
    return Report(
        collection=members.name,
        citation=members.citation,
        data=_named(inside),
        ood="" if outside is None else _named(outside),
        inputs=len(inside),
        ood_inputs=0 if outside is None else len(outside),
        members=len(members),
        ensemble=everyone,
        member=means,
        curve=curve,
        drawing={"member_accuracy": singles[:, 0].tolist(), **population.drawing()},
    )


class _Population:
    """Predictions of all members, and the figures of any subset of them."""

    def __init__(self, logits: Tensor, labels: Tensor, ood_logits: Tensor | None) -> None:
        self.log_probs = logits.log_softmax(-1)
        self.probs = self.log_probs.exp()
        self.labels = labels
        self.ood_probs = None if ood_logits is None else ood_logits.softmax(-1)
        self.is_ood = torch.arange(len(labels) + (0 if ood_logits is None else ood_logits.shape[1])) >= len(
            labels
        )
        self.names = [n for n in FIGURES if ood_logits is not None or n not in OOD_FIGURES]
        # Entropies of single members are the same in every subset.
        self.entropy = metrics.entropy(self.probs).mean(-1)
        self.ood_entropy = None if self.ood_probs is None else metrics.entropy(self.ood_probs).mean(-1)

    def figures(self, subset: Iterable[int] | Tensor) -> Tensor:
        """Return the figures of the ensemble of these members, (figure,) float64, in the order of `names`."""
        at = torch.as_tensor(list(subset) if not isinstance(subset, Tensor) else subset)
        probs, labels, k = self.probs[at].mean(0), self.labels, len(at)
        log_probs = torch.logsumexp(self.log_probs[at], 0) - math.log(k)
        found = [
            metrics.accuracy(probs, labels, check=False),
            metrics.nll(log_probs, labels, check=False),
            metrics.brier(probs, labels, check=False),
            metrics.ece(probs, labels, check=False),
            metrics.adaptive_ece(probs, labels, check=False),
            metrics.ace(probs, labels, check=False),
            metrics.aurc(probs, labels, check=False),
            (metrics.entropy(probs, check=False).mean() - self.entropy[at].mean()).clamp(min=0),
            metrics.disagreement(self.probs[at], check=False) if k > 1 else torch.tensor(math.nan),
        ]
        if self.ood_probs is not None and self.ood_entropy is not None:
            ood_probs = self.ood_probs[at].mean(0)
            scores = torch.cat(
                [metrics.ood_score(probs, check=False), metrics.ood_score(ood_probs, check=False)]
            )
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


def _images(data: str | ImageData) -> ImageData:
    return data if isinstance(data, ImageData) else images.load(data)


def _named(data: ImageData) -> str:
    return f"{data.name}/{data.split} {data.fingerprint}"


def _sizes(sizes: Iterable[int] | None, members: int) -> list[int]:
    wanted = [2**i for i in range(members.bit_length())] if sizes is None else list(sizes)
    for size in wanted:
        if type(size) is not int or not 1 <= size <= members:
            raise UsageError(
                "size of an ensemble", expected=f"a whole number from 1 to {members}", found=repr(size)
            )
    return sorted({*wanted, members})
