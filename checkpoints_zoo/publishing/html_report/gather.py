"""Everything that a page shows, measured: the members are run once; weights are read again for what needs them."""

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
from checkpoints_zoo.formats.text import counted, format_bytes
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.alignment_table import Alignment, alignment
from checkpoints_zoo.populations.discrepancy import MMD, mmd, ns
from checkpoints_zoo.populations.mass import minimal_mass
from checkpoints_zoo.populations.pairwise_information import Pairwise, pairwise
from checkpoints_zoo.predictions import Predictions, check_same
from checkpoints_zoo.predictions.prediction_sets import LOGITS, PredictionSet, SetDescription, layout_of
from checkpoints_zoo.symmetry import Table
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

MOST_MEMBERS, MOST_BYTES = 128, 2**31  # whose weights are read
MOST_PAIRED = 2000  # members whose pairs are compared
Say = Callable[[str], object]


@dataclass(frozen=True)
class Measured:
    """What a page shows.

    Args:
        members: a collection, or predictions where nothing else was given.
        inside, outside: what the members say in and out of distribution; `outside` None without such images.
        report: of the ensemble.
        said, said_outside: what the members say of each input.
        pairs: None for one member.
        weighed: None where weights were not read.
        command: that makes the same page again, "" where none does.
    """

    members: Collection | Predictions
    inside: Predictions
    outside: Predictions | None
    report: Report
    said: Outputs
    said_outside: Outputs | None
    pairs: Pairwise | None
    weighed: Weighed | None
    command: str

    @property
    def name(self) -> str:
        """Of the collection."""
        return self.report.collection

    @property
    def together(self) -> str:
        """Who is measured as one."""
        count = self.report.members
        return "the one member" if count == 1 else f"all {count:,} members as one ensemble"

    @property
    def known(self) -> str:
        """What intervals there are, "" for none."""
        return " (95 % jackknife intervals)" if self.report.members > 2 else ""

    @property
    def on(self) -> str:
        """Which images in distribution, and how many."""
        return f"{self.report.data.split(' ')[0]}, n = {self.report.inputs:,} inputs"

    @property
    def on_ood(self) -> str:
        """Which images out of distribution, and how many."""
        return f"{self.report.ood.split(' ')[0]}, n = {self.report.ood_inputs:,} inputs"


@dataclass(frozen=True)
class Scaling:
    """What is asked of temperature scaling and of limits, as in `evaluate`."""

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
) -> Measured:
    """Measure members, or their stored predictions; return what a page shows.

    Args, Raises: as of `report`.
    """
    inside, outside = _predicted(members, data, ood, scaling.held_out, device, say)
    say(f"{inside.facts.collection}: random ensembles of every size …")
    report = evaluate(
        members, inside, outside, sizes=sizes, temperature=scaling.temperature, held_out=scaling.held_out,
        within=scaling.within, device=device, subsets=subsets, seed=seed,
    )  # fmt: skip
    pairs = None
    if len(inside) > 1:
        say(f"{report.collection}: pairs of members …")
        some = slice(MOST_PAIRED)
        pairs = pairwise(inside[some], None, None if outside is None else outside[some], device=device, seed=seed)
    weighed = None
    if isinstance(members, Collection) and not isinstance(data, Predictions):
        weighed = weigh(members, device, seed, say)
    said_outside = None if outside is None else walk(outside, None)
    left = None
    if report.calibrated is not None and report.calibrated.share is not None:
        left, _ = draw_held_out(inside.facts.fingerprint, inside.shape[1], report.calibrated.share)
    said = walk(inside, inside.labels, left)
    return Measured(members, inside, outside, report, said, said_outside, pairs, weighed, command)


def _predicted(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None,
    ood: ImageInput | Predictions | None,
    held_out: float | ImageInput | Predictions | None,
    device: str | torch.device,
    say: Say,
) -> tuple[Predictions, Predictions | None]:
    """Run members, unless what they say is given; return what they say in and out of distribution.

    Raises:
        UsageError: a mixture of predictions and images, or predictions of others.
    """
    inside = data if isinstance(data, Predictions) else members
    if isinstance(inside, Predictions):
        shown = (data, ood, None if isinstance(held_out, float | int) else held_out)
        if any(x is not None and not isinstance(x, Predictions) for x in shown):
            raise _no_members(inside)
        check_same(inside, members)
        say(f"{inside.name}: stored predictions of {counted(len(inside), 'member')} …")
        return inside, ood if isinstance(ood, Predictions) else None
    given = (
        arguments.images_of(inside.description) if data is None or isinstance(data, Predictions) else images.of(data)
    )
    others = ood if ood is None or isinstance(ood, Predictions) else images.of(ood)
    against = "" if others is None else f" against {others.name}"
    say(f"{inside.name}: {counted(len(inside), 'member')}, {format_bytes(inside.nbytes)}, on {given.name}{against} …")
    said = run(inside, given, device, labelled=True)
    return said, run(inside, others, device, labelled=False) if isinstance(others, ImageData) else others


def _no_members(inside: Predictions) -> UsageError:
    return UsageError(
        f"images for predictions {inside.name}",
        expected="stored predictions on them, since no members are run",
        found="images",
        do="Give predictions for all, or images for all",
    )


class Computed(Predictions):
    """Predictions that were computed just now, in float32.

    Args:
        members: whose.
        inside: the images they are on.
        values: (member, input, class) logits.
        labels: (input,), None for images without.
    """

    def __init__(self, members: Collection, inside: ImageData, values: Tensor, labels: Tensor | None) -> None:
        _, inputs, classes = values.shape
        facts = SetDescription(
            collection=members.name, set=f"{inside.name}-{inside.split}", data=inside.name, split=inside.split,
            revision=inside.revision, fingerprint=inside.fingerprint, inputs=inputs, classes=members.classes,
            preprocessing=dict(members.description.preprocessing), computed="float32",
            view="; ".join(map(str, members._view.steps)), version="", citation="",
            layouts={LOGITS: layout_of(inputs, classes, "F32")},
            labels=None if labels is None else tuple(labels.tolist()),
        )  # fmt: skip
        super().__init__(PredictionSet(members.source, facts, members.rows), members.rows, ("", members._commit))
        self.members, self.inside, self.values, self.truth = members, inside, values, labels

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
        near = slice(positions[0], positions[-1] + 1)  # the values of neighbours are not copied
        some = near if positions == list(range(near.start, near.stop)) else positions
        return Computed(self.members.take(positions), self.inside, self.values[some], self.truth)


def run(members: Collection, inside: ImageData, device: str | torch.device, *, labelled: bool) -> Predictions:
    """Run members on images; return their predictions.

    Args:
        members: whose.
        inside: the images.
        device: what the members run on, in float32.
        labelled: whether labels are needed.

    Raises:
        UsageError: images without labels of the members' classes where they are needed, or of a size that the members
            can't take.
        DamagedError: members whose weights or logits are not finite.
    """
    labels = None
    if labelled:
        inside, labels = arguments.require_labels(inside, members.description)
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
        return Computed(members, inside, predictions.logits(members, inside, device), labels)


@dataclass(frozen=True)
class Outputs:
    """The members' outputs, pooled: of all members for each input, of each member over all inputs.

    Args:
        largest: (input,) largest mean probability.
        nll: (member,) mean negative log-likelihood of the labels in nats; empty without labels.
        pooled: the bars of a reliability diagram over the inputs of all single members; None without labels.
    """

    largest: Tensor
    nll: Tensor
    pooled: Reliability | None


def walk(found: Predictions, labels: Tensor | None, some: Tensor | None = None) -> Outputs:
    """Walk over predictions once, in blocks of inputs; return what members say.

    Args:
        found: the predictions.
        labels: (input,), None for images without.
        some: positions of the inputs that count, rising; None for all.
    """
    members = found.shape[0]
    nll = torch.zeros(members, dtype=torch.float64)
    largest: list[Tensor] = []
    bars: list[Reliability] = []
    at = count = 0
    with one_thread(math.prod(found.shape) < SMALL_LOGITS):
        for block in found.blocks():
            here = torch.arange(at, at + block.shape[1])
            at += block.shape[1]
            if some is not None:
                kept = torch.isin(here, some)
                here, block = here[kept], block[:, kept]
            count += len(here)
            if not len(here):
                continue
            log_probs = block.log_softmax(-1)
            probs = log_probs.exp()
            largest.append(probs.mean(0).amax(-1))
            if labels is not None:
                true = labels[here].expand(members, -1)
                nll -= log_probs.gather(-1, true.unsqueeze(-1)).squeeze(-1).double().sum(1)
                bars.append(metrics.reliability(probs.flatten(0, 1), true.flatten(), check=False))
    pooled = None if labels is None else _pooled(bars)
    return Outputs(torch.cat(largest), nll / count if labels is not None else nll[:0], pooled)


def _pooled(bars: Sequence[Reliability]) -> Reliability:
    """Join the bars of blocks of inputs."""
    count = torch.stack([b.inputs for b in bars]).sum(0)
    confidence = torch.stack([torch.nan_to_num(b.confidence).double() * b.inputs for b in bars]).sum(0)
    accuracy = torch.stack([torch.nan_to_num(b.accuracy).double() * b.inputs for b in bars]).sum(0)
    return Reliability(confidence / count, accuracy / count, count)


@dataclass(frozen=True)
class Weighed:
    """What the weights of some members say.

    Args:
        members: the first ones, as many as are read.
        of: how many there are.
        table: of the symmetries; None where none can be derived.
        why: there is no table.
        before, after: members at even positions against those at odd ones, as they are and without symmetries; None for
            less than 4 members, and `after` without a table.
        aligned: to the first member; None for one member, and without a table.
        masses: None without a table.
    """

    members: Collection
    of: int
    table: Table | None
    why: str
    before: MMD | None
    after: MMD | None
    aligned: Alignment | None
    masses: MinimalMass | None


def weigh(members: Collection, device: str | torch.device, seed: int, say: Callable[[str], object]) -> Weighed:
    """Measure what weights say, of the first 128 members and no more than 2 GiB; return it.

    Args:
        members: whose.
        device: where to compute.
        seed: of the permutations of the test.
        say: told what is being done.

    Raises:
        DamagedError, LayoutError, NetworkError, SourceNotFound: weights that can't be read.
    """
    some = members[: max(1, min(MOST_MEMBERS, MOST_BYTES // members._member_nbytes))]
    say(f"{members.name}: weights of {counted(len(some), 'member')}, {format_bytes(some.nbytes)} …")
    table, why = None, ""
    try:
        table = some.symmetry_table
    except SymmetryError as error:
        why = str(error)
    before = after = None
    if len(some) >= 4 and table is None:
        before = mmd(some, device=device, seed=seed)
    elif len(some) >= 4:
        both = ns(some, device=device, seed=seed)
        before, after = both.mmd, both.ns
    aligned = alignment(some, to=some.ids[0]) if table is not None and len(some) > 1 else None
    masses = None if table is None else minimal_mass(some, device=device)
    return Weighed(some, len(members), table, why, before, after, aligned, masses)
