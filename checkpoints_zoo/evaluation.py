"""One call from members to a report: the figures of their ensemble, with intervals, and its curve over sizes.

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

from checkpoints_zoo import images, measuring, metrics, plots, predictions
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.device import one_thread
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.figures import FIGURES, MEANS_OVER_MEMBERS, Population
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.metrics import Interval

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
    members: Collection,
    data: str | ImageData | None = None,
    ood: str | ImageData | None = None,
    *,
    sizes: Iterable[int] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    subsets: int = 100,
    seed: int = 0,
) -> Report:
    """Measure members as an ensemble: accuracy, calibration, OOD detection, diversity; return the Report.

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
    labels = measuring.labels_of(inside, members.description)
    sizes = _sizes(sizes, len(members))
    with one_thread(members.nbytes < SMALL_MEMBER * len(members)):
        logits = predictions.logits(members, inside, device, dtype, batch)
        ood_logits = None if outside is None else predictions.logits(members, outside, device, dtype, batch)
    population = Population(logits, labels, ood_logits)
    with one_thread(logits.numel() < SMALL_LOGITS):
        singles = torch.stack([population.figures([i]) for i in range(len(members))])
        curve = {
            size: population.named(
                metrics.jackknife(population.figures, len(members), seed=seed, subsets=subsets)
                if size == len(members)
                else metrics.subset_band(population.figures, len(members), size, seed=seed, subsets=subsets)
            )
            for size in sizes
        }
    means = {
        name: metrics.bootstrap_mean(values, seed=seed)
        for name, values in zip(population.names, singles.T, strict=True)
        if name in MEANS_OVER_MEMBERS
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
