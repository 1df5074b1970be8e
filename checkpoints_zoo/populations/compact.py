"""The compact posterior: how much of an ensemble a diagonal Gaussian over weights keeps, before and after alignment.

Xiao, Liu & Bamler 2023, A compact representation for Bayesian neural networks by removing permutation symmetry
(arXiv 2401.00611). q_d is fitted to the members as they are, q_r to the members aligned to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import measuring
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.images import Given
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.populations.evaluator import PIECE, Evaluator, evaluator
from checkpoints_zoo.populations.gaussian import RULES, Gaussian, fit_subsets
from checkpoints_zoo.populations.splits import ROWS, halves, held_out, intervals, measure, pruned

if TYPE_CHECKING:
    import pandas as pd

LEVELS = tuple(i / 20 for i in range(20))
MOST = 100  # samples, where their number is not given


@dataclass(frozen=True, eq=False)
class Compact:
    """Gaussians fitted to members before (q_d) and after (q_r) alignment, and how they compare with the ensemble.

    Args:
        collection, citation: of the members.
        to: what they were aligned to: "member 0", or "the mean".
        data: name and fingerprint of the images evaluated on.
        inputs, members, samples, splits, seed: how many, and the seed of samples and splits.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" without any.
        statistics_images: how many.
        table: column ("members", "q_d", "q_r") -> row of `ROWS` -> Interval: against the ensemble of all members, which
            the Gaussians were fitted to; low and high by a jackknife over members. Members have no mean.
        held_out: the same for "agreement" and "total_variation", fitted to one random half of the members and compared
            with the ensemble of the other: mean over the splits, low and high where 95 % of the splits fall.
        ensemble_accuracy: of all members.
        gain: accuracy of q_r's mean minus that of q_d's.
        q_d, q_r: the Gaussians.
        levels: shares of weights pruned, 0..1.
        pruning: rule of `Gaussian.pruned` -> "q_d", "q_r" -> accuracy of the pruned means at each level.
        drawing: what the picture needs beside: accuracies of the members and the samples.
    """

    collection: str
    citation: str
    to: str
    data: str
    inputs: int
    members: int
    samples: int
    splits: int
    seed: int
    statistics: str
    statistics_images: int
    table: Mapping[str, Mapping[str, Interval]]
    held_out: Mapping[str, Mapping[str, Interval]]
    ensemble_accuracy: Interval
    gain: Interval
    q_d: Gaussian = field(repr=False)
    q_r: Gaussian = field(repr=False)
    levels: tuple[float, ...] = field(repr=False)
    pruning: Mapping[str, Mapping[str, tuple[float, ...]]] = field(repr=False)
    drawing: Mapping[str, tuple[float, ...]] = field(repr=False)

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure: of, figure, value, low, high, held_out."""
        import pandas as pd

        rows = [
            {"of": of, "figure": name, "value": x.value, "low": x.low, "high": x.high, "held_out": held}
            for held, table in ((False, self.table), (True, self.held_out))
            for of, figures in table.items()
            for name, x in figures.items()
        ]
        return pd.DataFrame(rows)

    def values(self) -> dict[str, Any]:
        """Return the figures as JSON values; of the standard deviations, their quantiles."""
        names = (
            "collection", "citation", "to", "data", "inputs", "members", "samples", "splits", "seed", "statistics",
            "statistics_images",
        )  # fmt: skip
        quantiles = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]
        sigmas = {n: q.sigmas.double().sort().values for n, q in (("q_d", self.q_d), ("q_r", self.q_r))}
        return {
            **{name: getattr(self, name) for name in names},
            "level": self.gain.level,
            "table": {of: {n: asdict(x) for n, x in figures.items()} for of, figures in self.table.items()},
            "held_out": {of: {n: asdict(x) for n, x in figures.items()} for of, figures in self.held_out.items()},
            "ensemble_accuracy": asdict(self.ensemble_accuracy),
            "gain": asdict(self.gain),
            "weights": len(sigmas["q_d"]),
            "sigma": {
                name: {f"{q:g}": float(s[round(q * (len(s) - 1))]) for q in quantiles} for name, s in sigmas.items()
            },
            "pruning": {"levels": list(self.levels), **self.pruning},
        }

    def to_json(self) -> str:
        """Return the figures as JSON text."""
        return json.dumps(self.values(), indent=1)


def compact(
    members: Collection,
    data: Given | None = None,
    *,
    to: int | str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    levels: Sequence[float] = LEVELS,
    statistics: Given | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> Compact:
    """Fit diagonal Gaussians to members before and after alignment, and compare both with the ensemble; return all.

    Members have the running statistics they are stored with; those of every other network are estimated anew.

    Args:
        members: two or more, not aligned yet.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        to: id of the member that the others are aligned to, or "mean"; None for the first.
        samples: networks drawn from each Gaussian; None for as many as members, at most 100.
        splits: random halves of the members that the intervals come from.
        seed: of samples and splits.
        levels: shares of weights to prune, 0..1.
        statistics: images for running statistics, by name (the training split) or as `images.of` takes them; None for
            the collection's own.
        device: what the networks run on, in float32.
        batch: images a forward pass, at most.

    Raises:
        UsageError: fewer than two members, images without labels or of other classes, a number out of its range.
        SymmetryError: an architecture whose symmetries can't be derived.
        MemberNotFound: no such member to align to.
        DamagedError: weights or logits that are not finite.

    >>> import checkpoints_zoo as zoo
    >>> found = compact(zoo.load("convnet-digits", n=8), splits=2, samples=4)
    >>> found.gain.value > 0.1
    True
    """
    if len(members) < 2:
        found = f"{len(members)} of {members.name}"
        expected = "two or more: one has no variance"
        raise UsageError("members of a compact posterior", expected=expected, found=found, do="Select more members")
    drawn = min(len(members), MOST) if samples is None else samples
    for thing, number, least in (("samples", drawn, 1), ("splits", splits, 2)):
        if type(number) is not int or number < least:
            raise UsageError(
                f"{thing} of a compact posterior", expected=f"a whole number from {least}", found=repr(number)
            )
    judge = evaluator(members, data, statistics, device, batch)
    target: int | str = members.ids[0] if to is None else to
    aligned = members.align(to=target)
    with one_thread(members.member_nbytes < SMALL_MEMBER and judge.device.type == "cpu"):
        subsets = [torch.arange(len(members)), *halves(len(members), splits, seed)]
        probs = predictions.logits(members, judge.test.data, judge.device, batch=batch).double().softmax(-1)
        fitted = {"q_d": fitted_to(members, judge, subsets), "q_r": fitted_to(aligned, judge, subsets)}
        measured = measure(judge, probs, subsets, fitted, drawn, seed)
        pruning = {rule: {name: pruned(judge, q[0], levels, rule) for name, q in fitted.items()} for rule in RULES}
    figures = intervals(measured, len(members), splits, seed)
    return Compact(
        collection=members.name,
        citation=members.citation,
        to="the mean" if target == "mean" else f"member {target}",
        data=measuring.named(judge.test.data),
        inputs=len(judge.test.data),
        members=len(members),
        samples=drawn,
        splits=len(subsets) - 1,
        seed=seed,
        statistics=judge.statistics,
        statistics_images=judge.statistics_images,
        table={of: {row: figures[of, row] for row in ROWS if (of, row) in figures} for of in ("members", *fitted)},
        held_out=held_out(measured[1:]),
        ensemble_accuracy=figures["ensemble", "accuracy"],
        gain=figures["gain", "accuracy"],
        q_d=fitted["q_d"][0],
        q_r=fitted["q_r"][0],
        levels=tuple(levels),
        pruning=pruning,
        drawing=measured[0].accuracies,
    )


def fitted_to(members: Collection, judge: Evaluator, subsets: Sequence[Tensor]) -> list[Gaussian]:
    """Fit a Gaussian to each of some subsets of the members, which are read once; return them.

    Args:
        members: aligned or not.
        judge: of networks of their architecture.
        subsets: positions of two members or more each.
    """
    chosen = torch.zeros(len(subsets), len(members), dtype=torch.bool)
    for row, subset in zip(chosen, subsets, strict=True):
        row[subset] = True
    read = members.batches(members.held_by(PIECE), judge.device, torch.float32)
    return fit_subsets((stacked for _, stacked in read), chosen, judge.device, modules.tied(members.skeleton()))
