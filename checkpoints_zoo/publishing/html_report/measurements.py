"""The measurements that a page shows. Each member is run once on the images; weights are read again for symmetries and
mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError, UsageError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.evaluation.evaluating import SMALL_LOGITS, Report, evaluate
from checkpoints_zoo.evaluation.held_out import draw_held_out
from checkpoints_zoo.evaluation.metrics import Reliability
from checkpoints_zoo.formats.text import count_with_noun, format_bytes
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.alignment_table import Alignment, alignment
from checkpoints_zoo.populations.discrepancy import MMD, mmd, ns
from checkpoints_zoo.populations.mass import minimal_mass
from checkpoints_zoo.populations.pairwise_information import Pairwise, pairwise
from checkpoints_zoo.predictions import Predictions, check_same_members
from checkpoints_zoo.predictions.prediction_sets import LOGITS_TENSOR, PredictionSet, SetDescription, logits_layout
from checkpoints_zoo.symmetry import Table
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

LARGEST_MEMBER_COUNT, LARGEST_WEIGHT_BYTES = (
    128,
    2**31,
)  # largest number of members, and of bytes, whose weights are read
LARGEST_PAIRED_COUNT = 2000  # largest number of members whose pairs are compared
Say = Callable[[str], object]


@dataclass(frozen=True)
class Measurements:
    """The measurements that a page shows.

    Args:
        members: collection, or predictions if there is no collection.
        inside, outside: predictions in and out of distribution; `outside` is None without images out of distribution.
        report: report of the ensemble, as returned by `evaluate`.
        outputs, outputs_outside: predictions pooled over members and over inputs.
        pairs: diversity of all pairs of members; None for one member.
        weights: figures of the weights; None if no weights were read.
        command: command that makes the same page again; "" if no command does.
    """

    members: Collection | Predictions
    inside: Predictions
    outside: Predictions | None
    report: Report
    outputs: PooledOutputs
    outputs_outside: PooledOutputs | None
    pairs: Pairwise | None
    weights: WeightFigures | None
    command: str

    @property
    def name(self) -> str:
        """The collection's name."""
        return self.report.collection

    @property
    def subject(self) -> str:
        """Words for the measured ensemble, such as "all 64 members as one ensemble"."""
        member_count = self.report.members
        return "the one member" if member_count == 1 else f"all {member_count:,} members as one ensemble"

    @property
    def interval_note(self) -> str:
        """The kind of the intervals in brackets, for a caption; "" if there are no intervals."""
        return " (95 % jackknife intervals)" if self.report.members > 2 else ""

    @property
    def images(self) -> str:
        """The images in distribution and their number."""
        return f"{self.report.data.split(' ')[0]}, n = {self.report.inputs:,} inputs"

    @property
    def images_ood(self) -> str:
        """The images out of distribution and their number."""
        return f"{self.report.ood.split(' ')[0]}, n = {self.report.ood_inputs:,} inputs"


@dataclass(frozen=True)
class Scaling:
    """Arguments of `evaluate` for temperature scaling and for ensemble-size limits."""

    temperature: bool
    held_out: float | ImageInput | Predictions | None
    within: Mapping[str, float | str] | None


def measure(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None,
    ood: ImageInput | Predictions | None,
    sizes: Iterable[int] | None,
    scaling: Scaling,
    subsets: int,
    device: str | torch.device,
    seed: int,
    command: str,
    say: Say,
) -> Measurements:
    """Measure members or their stored predictions; return all measurements for a page.

    Args, Raises: as in `report_page`.
    """
    inside, outside = _predict(members, data, ood, scaling.held_out, device, say)
    say(f"{inside.facts.collection}: random ensembles of every size …")
    report = evaluate(
        members, inside, outside, sizes=sizes, temperature=scaling.temperature, held_out=scaling.held_out,
        within=scaling.within, device=device, subsets=subsets, seed=seed,
    )  # fmt: skip
    pairs = None
    if len(inside) > 1:
        say(f"{report.collection}: pairs of members …")
        first = slice(LARGEST_PAIRED_COUNT)
        pairs = pairwise(inside[first], None, None if outside is None else outside[first], device=device, seed=seed)
    weights = None
    if isinstance(members, Collection) and not isinstance(data, Predictions):
        weights = measure_weights(members, device, seed, say)
    outputs_outside = None if outside is None else pool_outputs(outside, None)
    weight_figures = None
    if report.calibrated is not None and report.calibrated.share is not None:
        weight_figures, _ = draw_held_out(inside.facts.fingerprint, inside.shape[1], report.calibrated.share)
    outputs = pool_outputs(inside, inside.labels, weight_figures)
    return Measurements(members, inside, outside, report, outputs, outputs_outside, pairs, weights, command)


def _predict(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None,
    ood: ImageInput | Predictions | None,
    held_out: float | ImageInput | Predictions | None,
    device: str | torch.device,
    say: Say,
) -> tuple[Predictions, Predictions | None]:
    """Run members unless the data are stored predictions; return the predictions in and out of distribution.

    Raises:
        UsageError: a mixture of predictions and images, or predictions of other members.
    """
    measured = data if isinstance(data, Predictions) else members
    if isinstance(measured, Predictions):
        arguments_given = (data, ood, None if isinstance(held_out, float | int) else held_out)
        if any(x is not None and not isinstance(x, Predictions) for x in arguments_given):
            raise _images_for_predictions(measured)
        check_same_members(measured, members)
        say(f"{measured.name}: stored predictions of {count_with_noun(len(measured), 'member')} …")
        return measured, ood if isinstance(ood, Predictions) else None
    test_set = (
        arguments.images_of(measured.description) if data is None or isinstance(data, Predictions) else images.of(data)
    )
    ood_images = ood if ood is None or isinstance(ood, Predictions) else images.of(ood)
    ood_text = "" if ood_images is None else f" against {ood_images.name}"
    say(
        f"{measured.name}: {count_with_noun(len(measured), 'member')}, {format_bytes(measured.nbytes)}, "
        f"on {test_set.name}{ood_text} …"
    )
    inside_predictions = compute_predictions(measured, test_set, device, labelled=True)
    if isinstance(ood_images, ImageData):
        return inside_predictions, compute_predictions(measured, ood_images, device, labelled=False)
    return inside_predictions, ood_images


def _images_for_predictions(predictions: Predictions) -> UsageError:
    return UsageError(
        f"images for predictions {predictions.name}",
        expected="stored predictions on them, since no members are run",
        found="images",
        do="Give predictions for all, or images for all",
    )


class ComputedPredictions(Predictions):
    """Predictions in memory, computed in float32.

    Args:
        members: members that made the predictions.
        data: images on which the predictions were made.
        logits: logits of shape (member, input, class).
        labels: labels of shape (input,); None for images without labels.
    """

    def __init__(self, members: Collection, data: ImageData, logits: Tensor, labels: Tensor | None) -> None:
        _, inputs, classes = logits.shape
        facts = SetDescription(
            collection=members.name, set=f"{data.name}-{data.split}", data=data.name, split=data.split,
            revision=data.revision, fingerprint=data.fingerprint, inputs=inputs, classes=members.classes,
            preprocessing=dict(members.description.preprocessing), computed="float32",
            view="; ".join(map(str, members._view.steps)), version="", citation="",
            layouts={LOGITS_TENSOR: logits_layout(inputs, classes, "F32")},
            labels=None if labels is None else tuple(labels.tolist()),
        )  # fmt: skip
        super().__init__(PredictionSet(members.source, facts, members.rows), members.rows, ("", members._commit))
        self.members, self.inside, self.values, self.truth = members, data, logits, labels

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def citation(self) -> str:
        return self.members.citation

    @property
    def keys(self) -> list[tuple[int, int, str]]:
        hashes = self.rows.column("sha256").to_pylist()
        return [(*key, digest or "") for key, digest in zip(self.members._keys, hashes, strict=True)]

    def block(self, begin: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values[:, begin:end].to(dtype)

    def one(self, at: int) -> Tensor:
        return self.values[at]

    def _select(self, positions: list[int]) -> Predictions:
        if not positions:
            return super()._select(positions)
        neighbours = slice(positions[0], positions[-1] + 1)  # a slice shares memory with the values
        chosen = neighbours if positions == list(range(neighbours.start, neighbours.stop)) else positions
        return ComputedPredictions(self.members.take(positions), self.inside, self.values[chosen], self.truth)


def compute_predictions(
    members: Collection, data: ImageData, device: str | torch.device, *, labelled: bool
) -> Predictions:
    """Run members on images; return their predictions.

    Args:
        members: members whose networks are run.
        data: images on which the members are run.
        device: torch device on which the members run, in float32.
        labelled: whether the images need labels.

    Raises:
        UsageError: images lack labels of the members' classes though labels are needed, or have a size that the members
            can't take.
        DamagedError: weights or logits of a member are not finite.
    """
    labels = None
    if labelled:
        data, labels = arguments.require_labels(data, members.description)
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
        return ComputedPredictions(members, data, predictions.logits(members, data, device), labels)


@dataclass(frozen=True)
class PooledOutputs:
    """Outputs of members, pooled over the members for each input and over the inputs for each member.

    Args:
        scores: out-of-distribution scores of shape (input,): 1 - the largest mean probability, as in
            `metrics.ood_score`.
        nll: mean negative log-likelihood of the labels, in nats, of shape (member,); empty without labels.
        pooled: bars of the reliability diagram of the single members, over all inputs of all members; None without
            labels.
    """

    scores: Tensor
    nll: Tensor
    pooled: Reliability | None


def pool_outputs(
    stored_predictions: Predictions, labels: Tensor | None, counted_inputs: Tensor | None = None
) -> PooledOutputs:
    """Read predictions once, in blocks of inputs; return the pooled outputs.

    Args:
        stored_predictions: the predictions.
        labels: labels of shape (input,); None for images without labels.
        counted_inputs: positions of the used inputs, in ascending order; None for all inputs.
    """
    members = stored_predictions.shape[0]
    nll = torch.zeros(members, dtype=torch.float64)
    scores: list[Tensor] = []
    bars: list[Reliability] = []
    at = input_count = 0
    with one_thread(math.prod(stored_predictions.shape) < SMALL_LOGITS):
        for block in stored_predictions.blocks():
            input_positions = torch.arange(at, at + block.shape[1])
            at += block.shape[1]
            if counted_inputs is not None:
                counts = torch.isin(input_positions, counted_inputs)
                input_positions, block = input_positions[counts], block[:, counts]
            input_count += len(input_positions)
            if not len(input_positions):
                continue
            log_probs = block.log_softmax(-1)
            probs = log_probs.exp()
            scores.append(metrics.ood_score(probs.mean(0), check=False))
            if labels is not None:
                label_log_probs = labels[input_positions].expand(members, -1)
                nll -= log_probs.gather(-1, label_log_probs.unsqueeze(-1)).squeeze(-1).double().sum(1)
                bars.append(metrics.reliability(probs.flatten(0, 1), label_log_probs.flatten(), check=False))
    pooled = None if labels is None else _join_bars(bars)
    return PooledOutputs(torch.cat(scores), nll / input_count if labels is not None else nll[:0], pooled)


def _join_bars(bars: Sequence[Reliability]) -> Reliability:
    """Merge the reliability bars of several blocks of inputs into one set of bars."""
    inputs_per_bar = torch.stack([b.inputs for b in bars]).sum(0)
    confidence = torch.stack([torch.nan_to_num(b.confidence).double() * b.inputs for b in bars]).sum(0)
    accuracy = torch.stack([torch.nan_to_num(b.accuracy).double() * b.inputs for b in bars]).sum(0)
    return Reliability(confidence / inputs_per_bar, accuracy / inputs_per_bar, inputs_per_bar)


@dataclass(frozen=True)
class WeightFigures:
    """The figures that are computed from the weights of members.

    Args:
        members: the members whose weights are read, the first ones of the collection.
        total: number of members of the collection.
        table: table of the network's symmetries; None if it can't be derived.
        reason: reason why there is no symmetry table; "" if there is one.
        before, after: MMD² of the members at even positions against the members at odd positions, with and without
            symmetries; both are None for fewer than 4 members, and `after` is None without a symmetry table.
        aligned: members aligned to the first member; None for one member, and without a symmetry table.
        masses: smallest masses of the members; None without a symmetry table.
    """

    members: Collection
    total: int
    table: Table | None
    reason: str
    before: MMD | None
    after: MMD | None
    aligned: Alignment | None
    masses: MinimalMass | None


def measure_weights(members: Collection, device: str | torch.device, seed: int, say: Say) -> WeightFigures:
    """Compute the figures of the weights of the first 128 members, and no more than 2 GiB; return the figures.

    Args:
        members: members whose weights are read.
        device: torch device for the computation.
        seed: seed of the permutations of the test.
        say: function that is called with a line of text for each step.

    Raises:
        DamagedError, LayoutError, NetworkError, SourceNotFound: a member's weights can't be read.
    """
    first_members = members[: max(1, min(LARGEST_MEMBER_COUNT, LARGEST_WEIGHT_BYTES // members._member_nbytes))]
    say(
        f"{members.name}: weights of {count_with_noun(len(first_members), 'member')}, "
        f"{format_bytes(first_members.nbytes)} …"
    )
    table, reason = None, ""
    try:
        table = first_members.symmetry_table
    except SymmetryError as error:
        reason = str(error)
    before = after = None
    if len(first_members) >= 4 and table is None:
        before = mmd(first_members, device=device, seed=seed)
    elif len(first_members) >= 4:
        discrepancies = ns(first_members, device=device, seed=seed)
        before, after = discrepancies.mmd, discrepancies.ns
    aligned = (
        alignment(first_members, to=first_members.ids[0]) if table is not None and len(first_members) > 1 else None
    )
    masses = None if table is None else minimal_mass(first_members, device=device)
    return WeightFigures(first_members, len(members), table, reason, before, after, aligned, masses)
