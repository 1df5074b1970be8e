"""The measurements that a page shows. Each member is run once on the images; weights are read again for symmetries and
mass.

This is one file, because one place says what is read and computed for a page.
"""

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
LARGEST_PAIRED_MEMBER_COUNT = 2000  # largest number of members whose pairs are compared
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
    def has_member_intervals(self) -> bool:
        """Whether the means over single members have intervals, which need more members than an ensemble's figures."""
        return any(mean.low is not None for mean in self.report.member.values())

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
        first_members = slice(LARGEST_PAIRED_MEMBER_COUNT)
        pairs = pairwise(
            inside[first_members], None, None if outside is None else outside[first_members], device=device, seed=seed
        )
    weight_figures = None
    if isinstance(members, Collection) and not isinstance(data, Predictions):
        weight_figures = measure_weights(members, device, seed, say)
    outputs_outside = None if outside is None else pool_outputs(outside, None)
    counted_inputs = None
    if report.calibrated is not None and report.calibrated.share is not None:
        counted_inputs, _ = draw_held_out(inside.facts.fingerprint, inside.shape[1], report.calibrated.share)
    outputs = pool_outputs(inside, inside.labels, counted_inputs)
    return Measurements(members, inside, outside, report, outputs, outputs_outside, pairs, weight_figures, command)


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
        image_arguments = (data, ood, None if isinstance(held_out, float | int) else held_out)
        if any(argument is not None and not isinstance(argument, Predictions) for argument in image_arguments):
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
        _, input_count, class_count = logits.shape
        facts = SetDescription(
            collection=members.name, set=f"{data.name}-{data.split}", data=data.name, split=data.split,
            revision=data.revision, fingerprint=data.fingerprint, inputs=input_count, classes=members.classes,
            preprocessing=dict(members.description.preprocessing), computed="float32",
            view="; ".join(map(str, members._view.steps)), version="", citation="",
            layouts={LOGITS_TENSOR: logits_layout(input_count, class_count, "F32")},
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
        weight_hashes = self.rows.column("sha256").to_pylist()
        return [
            (*key, weight_hash or "")
            for key, weight_hash in zip(self.members._snapshot_keys, weight_hashes, strict=True)
        ]

    def block(self, begin: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values[:, begin:end].to(dtype)

    def one(self, at: int) -> Tensor:
        return self.values[at]

    def _select(self, positions: list[int]) -> Predictions:
        if not positions:
            return super()._select(positions)
        position_range = slice(positions[0], positions[-1] + 1)  # a slice shares memory with the values
        slice_or_positions = (
            position_range if positions == list(range(position_range.start, position_range.stop)) else positions
        )
        return ComputedPredictions(
            self.members.take(positions), self.inside, self.values[slice_or_positions], self.truth
        )


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
    member_count = stored_predictions.shape[0]
    nll = torch.zeros(member_count, dtype=torch.float64)
    scores: list[Tensor] = []
    bars_of_blocks: list[Reliability] = []
    block_start = input_count = 0
    with one_thread(math.prod(stored_predictions.shape) < SMALL_LOGITS):
        for block_logits in stored_predictions.blocks():
            input_positions = torch.arange(block_start, block_start + block_logits.shape[1])
            block_start += block_logits.shape[1]
            if counted_inputs is not None:
                is_counted = torch.isin(input_positions, counted_inputs)
                input_positions, block_logits = input_positions[is_counted], block_logits[:, is_counted]
            input_count += len(input_positions)
            if not len(input_positions):
                continue
            log_probs = block_logits.log_softmax(-1)
            probs = log_probs.exp()
            scores.append(metrics.ood_score(probs.mean(0), check=False))
            if labels is not None:
                repeated_labels = labels[input_positions].expand(member_count, -1)
                nll -= log_probs.gather(-1, repeated_labels.unsqueeze(-1)).squeeze(-1).double().sum(1)
                bars_of_blocks.append(metrics.reliability(probs.flatten(0, 1), repeated_labels.flatten(), check=False))
    pooled_bars = None if labels is None else _join_bars(bars_of_blocks)
    return PooledOutputs(torch.cat(scores), nll / input_count if labels is not None else nll[:0], pooled_bars)


def _join_bars(bars_of_blocks: Sequence[Reliability]) -> Reliability:
    """Merge the reliability bars of several blocks of inputs into one set of bars."""
    inputs_per_bar = torch.stack([block_bars.inputs for block_bars in bars_of_blocks]).sum(0)
    summed_confidence = torch.stack(
        [torch.nan_to_num(block_bars.confidence).double() * block_bars.inputs for block_bars in bars_of_blocks]
    ).sum(0)
    summed_accuracy = torch.stack(
        [torch.nan_to_num(block_bars.accuracy).double() * block_bars.inputs for block_bars in bars_of_blocks]
    ).sum(0)
    return Reliability(summed_confidence / inputs_per_bar, summed_accuracy / inputs_per_bar, inputs_per_bar)


@dataclass(frozen=True)
class WeightFigures:
    """The figures that are computed from the weights of members.

    Args:
        members: the members whose weights are read, the first ones of the collection.
        member_count: number of members of the collection.
        table: table of the network's symmetries; None if it can't be derived.
        reason: reason why there is no symmetry table; "" if there is one.
        stored_mmd, mmd_without_symmetries: MMD² of the members at even positions against the members at odd positions,
            with and without symmetries; both are None for fewer than 4 members, and `mmd_without_symmetries` is None
            without a symmetry table.
        alignment: members aligned to the first member; None for one member, and without a symmetry table.
        masses: smallest masses of the members; None without a symmetry table.
    """

    members: Collection
    member_count: int
    table: Table | None
    reason: str
    stored_mmd: MMD | None
    mmd_without_symmetries: MMD | None
    alignment: Alignment | None
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
    stored_mmd = mmd_without_symmetries = None
    if len(first_members) >= 4 and table is None:
        stored_mmd = mmd(first_members, device=device, seed=seed)
    elif len(first_members) >= 4:
        ns_result = ns(first_members, device=device, seed=seed)
        stored_mmd, mmd_without_symmetries = ns_result.mmd, ns_result.ns
    aligned = (
        alignment(first_members, to=first_members.ids[0]) if table is not None and len(first_members) > 1 else None
    )
    masses = None if table is None else minimal_mass(first_members, device=device)
    return WeightFigures(
        first_members, len(members), table, reason, stored_mmd, mmd_without_symmetries, aligned, masses
    )
