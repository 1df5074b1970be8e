"""One call from members, or their stored predictions, to a report: figures with intervals, a curve over sizes.

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import images, measuring, metrics, plots, predictions
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.device import one_thread
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.figures import FIGURES, MEANS_OVER_MEMBERS
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.metrics import Interval
from checkpoints_zoo.population import Population
from checkpoints_zoo.predictions import Predictions

if TYPE_CHECKING:
    import pandas as pd


SMALL_MEMBER, SMALL_LOGITS = 2**20, 2**22  # bytes and values that one thread is quicker with


@dataclass(frozen=True)
class Report:
    """The figures of an ensemble, each an Interval (value, low, high).

    Args:
        collection: its name.
        citation: of the members.
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
            raise UsageError(f"figure {figure!r}", expected=f"one of {', '.join(self.ensemble)}", found="none such")
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
            n: getattr(self, n) for n in ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
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
    members: Collection | Predictions,
    data: str | ImageData | None = None,
    ood: str | ImageData | Predictions | None = None,
    *,
    sizes: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    subsets: int = 100,
    seed: int = 0,
) -> Report:
    """Measure members as an ensemble: accuracy, calibration, OOD detection, diversity; return the Report.

    Stored predictions are read in blocks, so that a thousand members need not fit into memory; no weights are read.
    Their float16 logits l are off by at most l/2048, and a log-probability by twice that of the largest.

    Args:
        members: a collection, or stored predictions on labelled images.
        data: labelled images, by name or given; None for the collection's own test set. With stored predictions they
            are only compared with those that these were made on, None for no comparison.
        ood: images out of distribution, by name or given, or stored predictions on them; None leaves those figures
            out.
        sizes: of the ensembles on the curve; None for the powers of two and all members.
        device, dtype: what the members run on and in.
        batch: images a forward pass.
        subsets: random ensembles drawn for a size.
        seed: of the draws.

    Raises:
        UsageError: images without labels, of other classes, or of a size the members can't take; predictions of other
            members or on other images.
        DamagedError: members whose weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> report = zoo.evaluate(zoo.load("convnet-digits", n=4), "digits", ood="photos")
    >>> report["auroc"].value > 0.95
    True
    """
    sizes = _sizes(sizes, len(members))
    run = (device, dtype, batch)
    inside = _inside(members, data, run)
    outside = None if ood is None else _outside(members, ood, run)
    everyone = len(members)
    plans = {
        size: metrics.jackknife_plan(everyone, seed, subsets)
        if size == everyone
        else metrics.band_plan(everyone, size, seed, subsets)
        for size in sizes
    }
    subsets_of = [torch.tensor([i]) for i in range(everyone)]
    with one_thread(math.prod(inside.logits.shape) < SMALL_LOGITS):
        population = Population(inside.logits, inside.labels, None if outside is None else outside.logits)
        values = population.measure([*subsets_of, *(chosen for plan in plans.values() for chosen in plan.chosen)])
    singles, rest = values[:everyone], values[everyone:]
    parts = zip(plans.items(), torch.split(rest, [len(plan.chosen) for plan in plans.values()]), strict=True)
    curve = {size: population.named(plan.intervals(found)) for (size, plan), found in parts}
    means = {
        name: metrics.bootstrap_mean(found, seed=seed)
        for name, found in zip(population.names, singles.T, strict=True)
        if name in MEANS_OVER_MEMBERS
    }
    return Report(
        collection=members.facts.collection if isinstance(members, Predictions) else members.name,
        citation=members.citation,
        data=inside.named,
        ood="" if outside is None else outside.named,
        inputs=inside.logits.shape[1],
        ood_inputs=0 if outside is None else outside.logits.shape[1],
        members=everyone,
        ensemble=curve[everyone],
        member=means,
        curve=curve,
        drawing={"member_accuracy": singles[:, 0].tolist(), **population.drawing()},
    )


@dataclass(frozen=True)
class _Said:
    """What members say of some inputs: logits, labels, and the name and fingerprint of the inputs."""

    logits: Tensor | Predictions
    labels: Tensor
    named: str


_Run = tuple[str | torch.device, torch.dtype, int]


def _inside(members: Collection | Predictions, data: str | ImageData | None, run: _Run) -> _Said:
    """Return what members say of the labelled images."""
    if not isinstance(members, Predictions):
        inside = _images(members.description.dataset if data is None else data)
        labels = measuring.labels_of(inside, members.description)
        return _Said(_computed(members, inside, run), labels, _named(inside))
    if data is not None:
        members.check_data(_images(data))
    if members.labels is None:
        raise UsageError(
            f"predictions {members.name}",
            expected="predictions on images with labels of the members' classes",
            found="no labels",
            do="Give them as `ood`, and those on the test set first",
        )
    return _Said(members, members.labels, members.data)


def _outside(members: Collection | Predictions, ood: str | ImageData | Predictions, run: _Run) -> _Said:
    """Return what members say of the images out of distribution."""
    if isinstance(ood, Predictions):
        found, wanted = ood.keys, members.keys
        if [key[: len(wanted[0])] for key in found] != [tuple(key) for key in wanted]:
            raise UsageError(
                f"predictions {ood.name} for {members.name}",
                expected="those of the same members with the same weights, in the same order",
                found="others",
                do="Take both with `predictions_of` from one selection of members",
            )
        return _Said(ood, torch.empty(0), ood.data)
    outside = _images(ood)
    if isinstance(members, Predictions):
        raise UsageError(
            f"images {outside.name!r} for predictions {members.name}",
            expected="stored predictions on them, since there are no members to run",
            found="images",
            do="Store some with `predict`, or give the collection in place of its predictions",
        )
    return _Said(_computed(members, outside, run), torch.empty(0), _named(outside))


def _computed(members: Collection, data: ImageData, run: _Run) -> Tensor:
    with one_thread(members.nbytes < SMALL_MEMBER * len(members)):
        return predictions.logits(members, data, *run)


def _images(data: str | ImageData) -> ImageData:
    return data if isinstance(data, ImageData) else images.load(data)


def _named(data: ImageData) -> str:
    return f"{data.name}/{data.split} {data.fingerprint}"


def _sizes(sizes: Iterable[int] | None, members: int) -> list[int]:
    wanted = [2**i for i in range(members.bit_length())] if sizes is None else list(sizes)
    for size in wanted:
        if type(size) is not int or not 1 <= size <= members:
            raise UsageError("size of an ensemble", expected=f"a whole number from 1 to {members}", found=repr(size))
    return sorted({*wanted, members})
