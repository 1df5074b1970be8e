"""Agreement and total variation of two ensembles' predictions on the same inputs, with intervals over members.

The comparison is that of Izmailov et al., What are Bayesian neural network posteriors really like? (2021): the mean
prediction of an ensemble is compared with the mean prediction of another method's draws.

Axes: logits and probabilities (member, input, class).

This is one file, because the figures and their intervals use the same subsets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.figures import find_figure
from checkpoints_zoo.evaluation.metrics import Interval, jackknife_plan
from checkpoints_zoo.evaluation.subsets import InMemory, Logits
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.predictions import PosteriorMean, Predictions

if TYPE_CHECKING:
    import pandas as pd

BLOCK_BYTES = 1 << 24  # Bytes of the mean probabilities of all subsets on a block of inputs.
DISTANCE_FIGURES = {
    "agreement": ("0..1", "share of inputs to which both give the same class"),
    "total_variation": ("0..1", "half the sum over classes of |p - q|, mean over inputs"),
}


@dataclass(frozen=True, repr=False)
class PredictiveComparison(PrintedResult):
    """Two predictive distributions compared with each other; each is the mean of its members' probabilities.

    Args:
        first, second: citations of the members of each set.
        members: number of members of each population.
        data: name and fingerprint of the images.
        inputs: number of inputs.
        figures: "agreement" and "total_variation", with intervals over the members of both sets.
    """

    first: str
    second: str
    members: tuple[int, int]
    data: str
    inputs: int
    figures: Mapping[str, Interval]

    def _one_line(self) -> str:
        figures = ", ".join(f"{name} {x.value:.4g}" for name, x in self.figures.items())
        return f"{self.members[0]} and {self.members[1]} members on {self.data.split(' ')[0]}, {figures}"

    def to_text(self) -> str:
        """Return a table of the figures, with their intervals."""
        rows = [{"figure": n, "value": str(x), "unit": DISTANCE_FIGURES[n][0]} for n, x in self.figures.items()]
        sets = f"{self.members[0]:,} against {self.members[1]:,} members"
        return f"{text_table(rows)}\n\n{sets}, on {self.data.split(' ')[0]}, {self.inputs:,} inputs."

    def __getitem__(self, figure: str) -> Interval:
        """Return the interval of a figure.

        Raises:
            UsageError: there is no such figure.
        """
        return find_figure(self.figures, figure)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"figure": name, "value": x.value, "low": x.low, "high": x.high, "unit": DISTANCE_FIGURES[name][0]}
            for name, x in self.figures.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per figure: figure, value, low, high, unit."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the result as JSON text."""
        facts = {n: getattr(self, n) for n in ("first", "second", "members", "data", "inputs")}
        return json.dumps({**facts, "level": 0.95, "figures": self._rows()}, indent=1)


def compare_predictives(
    first: Collection | Predictions,
    second: Collection | Predictions,
    data: ImageInput | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    subsets: int = 100,
    seed: int = 0,
) -> PredictiveComparison:
    """Compare the ensembles of two sets of members on the same images; return agreement and total variation.

    Two ensembles of one population differ too; the difference is larger for fewer members.

    Args:
        first, second: collections with the same classes, or stored predictions on the same images, or posterior means.
        data: images, as `images.of` takes them; None for a collection's own test set, or the images of stored
            predictions. Labels are not used.
        device, dtype: torch device and dtype of the members' networks.
        batch: number of images in a forward pass.
        subsets: number of random halves of either set from which the intervals are computed.
        seed: seed of the random halves.

    Raises:
        UsageError: the classes differ, the predictions are on other images, or the images have a size that the members
            can't take.
        DamagedError: some members have weights or logits that are not finite.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=16)
    >>> result = zoo.compare_predictives(members[:8], members[8:])
    >>> result["agreement"].value > 0.95, result["total_variation"].value < 0.05
    (True, True)
    """
    for members in (first, second):
        arguments.check_measurable(members)
    seed, subsets = arguments.check_seed_and_subsets(seed, subsets)
    if first.classes != second.classes:
        expected, found = (", ".join(members.classes[:12]) for members in (first, second))
        raise UsageError("classes of two predictives", expected=f"{expected}, in this order", found=found)
    given_images = None if data is None else images.in_order(images.of(data), first.classes)
    run_options = (device, dtype, batch)
    first_logits, second_logits = (
        _member_logits(first, given_images, run_options),
        _member_logits(second, given_images, run_options),
    )
    if first_logits.data != second_logits.data:
        expected, found = (
            f"predictions on images {member_logits.data}" for member_logits in (first_logits, second_logits)
        )
        raise UsageError("images of two predictives", expected=expected, found=found)
    shared = not _weight_hashes(first).isdisjoint(_weight_hashes(second))
    fixed = isinstance(first, PosteriorMean), isinstance(second, PosteriorMean)
    figures = compare_logits(
        first_logits.logits, second_logits.logits, shared=shared, fixed=fixed, subsets=subsets, seed=seed
    )
    counts = len(first), len(second)
    return PredictiveComparison(
        first.citation, second.citation, counts, first_logits.data, first_logits.logits.shape[1], figures
    )


def compare_logits(
    first: Tensor | Logits,
    second: Tensor | Logits,
    *,
    shared: bool = False,
    fixed: tuple[bool, bool] = (False, False),
    subsets: int = 100,
    seed: int = 0,
) -> dict[str, Interval]:
    """Compare two predictive distributions by the logits of their members; return the figures with intervals.

    A delete-half jackknife over each set's members, with all members of the other set, gives two intervals. The two
    sets are independent, so the squares of their half widths add up. A set of fewer than three members gives no
    interval.

    Args:
        first, second: logits (member, input, class), on the same inputs.
        shared: whether some members are in both sets; if so, there are no intervals.
        fixed: whether each set is a posterior mean, which has no members; intervals are then over the other set alone.
        subsets: number of random halves of either set.
        seed: seed of the random halves.

    Raises:
        UsageError: the numbers of inputs or classes differ.

    >>> logits = torch.tensor([[[4.0, 0.0], [0.0, 4.0]]])
    >>> compare_logits(logits, -logits)["agreement"].value
    0.0
    """
    logits_of_sets = [InMemory(logits) if isinstance(logits, Tensor) else logits for logits in (first, second)]
    shapes = [tuple(logits.shape) for logits in logits_of_sets]
    if shapes[0][1:] != shapes[1][1:] or len(shapes[0]) != 3 or 0 in shapes[0] or 0 in shapes[1]:
        expected = "logits (member, input, class) on the same inputs and classes"
        raise UsageError("two predictives", expected=expected, found=f"shapes {shapes[0]} and {shapes[1]}")
    plans = [jackknife_plan(members, seed, subsets) for members, *_ in shapes]
    memberships = [_subset_membership(plan.chosen, plan.members) for plan in plans]
    _, inputs, classes = shapes[0]
    size = max(1, BLOCK_BYTES // (4 * classes * sum(len(w) + w.shape[1] for w in memberships)))
    sums = [torch.zeros(len(w), len(DISTANCE_FIGURES), dtype=torch.float64) for w in memberships]
    for at in range(0, inputs, size):
        means = [
            _mean_probabilities(logits, w, at, min(inputs, at + size))
            for logits, w in zip(logits_of_sets, memberships, strict=True)
        ]
        # Row 0 of a set's means is the mean over all members of the set.
        for figure_sums, subset_probs, other_ensemble_probs in zip(
            sums, means, (means[1][0], means[0][0]), strict=True
        ):
            figure_sums[:, 0] += (subset_probs.argmax(-1) == other_ensemble_probs.argmax(-1)).sum(1)
            figure_sums[:, 1] += (subset_probs - other_ensemble_probs).abs_().sum(-1).double().sum(1) / 2
    first_intervals, second_intervals = (
        plan.intervals(figure_sums / inputs) for plan, figure_sums in zip(plans, sums, strict=True)
    )
    if shared or all(fixed):
        return {name: Interval(x.value, None, None) for name, x in zip(DISTANCE_FIGURES, first_intervals, strict=True)}
    return {
        name: join_intervals([x for x, is_fixed in zip(parts, fixed, strict=True) if not is_fixed])
        for name, *parts in zip(DISTANCE_FIGURES, first_intervals, second_intervals, strict=True)
    }


def figures_of_subsets(logits: Logits, subsets: Sequence[Tensor], others: Tensor) -> Tensor:
    """Compare the mean predictions of subsets of members with one predictive distribution; return (subset, figure),
    float64, with the figures in the order of `DISTANCE_FIGURES`.

    Args:
        logits: logits of the members.
        subsets: positions of the members of each subset.
        others: probabilities of the other distribution, (input, class), float64.
    """
    members, inputs, classes = logits.shape
    membership = _subset_membership(subsets, members)
    size = max(1, BLOCK_BYTES // (8 * classes * sum(membership.shape)))
    sums = torch.zeros(len(subsets), len(DISTANCE_FIGURES), dtype=torch.float64)
    for begin in range(0, inputs, size):
        means = _mean_probabilities(logits, membership, begin, min(inputs, begin + size)).double()
        wanted = others[begin : begin + size]
        sums[:, 0] += (means.argmax(-1) == wanted.argmax(-1)).sum(1)
        sums[:, 1] += (means - wanted).abs_().sum((-1, -2)) / 2
    return sums / inputs


def mean_probabilities(logits: Logits) -> Tensor:
    """Return the mean probabilities of all members, (input, class), float64."""
    members, inputs, classes = logits.shape
    membership = torch.ones(1, members)
    size = max(1, BLOCK_BYTES // (4 * classes * members))
    blocks = [
        _mean_probabilities(logits, membership, begin, min(inputs, begin + size))[0].double()
        for begin in range(0, inputs, size)
    ]
    return torch.cat(blocks)


@dataclass(frozen=True)
class _MemberLogits:
    """Logits of members on some images, and the name and fingerprint of the images."""

    logits: Logits
    data: str


def _member_logits(
    members: Collection | Predictions,
    given_images: ImageData | None,
    run_options: tuple[str | torch.device, torch.dtype, int],
) -> _MemberLogits:
    if isinstance(members, Predictions):
        if given_images is not None:
            members.check_data(given_images)
        return _MemberLogits(members, members.data)
    data = arguments.images_of(members.description) if given_images is None else given_images
    return _MemberLogits(InMemory(predictions.logits(members, data, *run_options)), arguments.report_image_name(data))


def _weight_hashes(members: Collection | Predictions) -> set[object]:
    """Return the hashes of the members' weights; a member without a hash is named by collection, id and epoch."""
    if isinstance(members, Predictions):
        return {weights for *_, weights in members.keys}
    hashes = members.rows.column("sha256").to_pylist()
    return {known or (members.name, *key) for known, key in zip(hashes, members._snapshot_keys, strict=True)}


def _subset_membership(subsets: Sequence[Tensor], members: int) -> Tensor:
    """Return 1 for each member of a subset, else 0, (subset, member)."""
    membership = torch.zeros(len(subsets), members)
    for row, chosen in zip(membership, subsets, strict=True):
        row[chosen] = 1
    return membership


def _mean_probabilities(logits: Logits, membership: Tensor, first_input: int, end_input: int) -> Tensor:
    """Return mean probabilities of subsets on some inputs, (subset, input, class)."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    probs = logits.block(first_input, end_input, kind).softmax(-1)
    # The sum is divided instead of the weights, so that the mean of equal probabilities is exactly their value.
    sums = membership.to(kind) @ probs.flatten(1)
    return sums.view(len(membership), *probs.shape[1:]) / membership.to(kind).sum(1)[:, None, None]


def join_intervals(intervals: Sequence[Interval]) -> Interval:
    """Join the intervals of one figure over independent sets of members or runs; return one interval, cut at 0 and 1.

    The squares of half widths add up. The value is the value of the first interval; if one of the intervals is missing,
    there is no joint interval.

    Args:
        intervals: one interval for each set: the members of the set are resampled, all members of the other sets take
            part.
    """
    value, half_width = intervals[0].value, 0.0
    for interval in intervals:
        if interval.high is None:
            return Interval(value, None, None)
        half_width = math.hypot(half_width, interval.high - interval.value)
    return Interval(value, max(0.0, value - half_width), min(1.0, value + half_width))
