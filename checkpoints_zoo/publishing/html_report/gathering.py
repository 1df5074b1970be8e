"""Everything that a page shows, measured: the members are run once; weights are read again for what needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import held_out as aside
from checkpoints_zoo.evaluation import measuring
from checkpoints_zoo.evaluation.evaluating import Report, evaluate
from checkpoints_zoo.formats.text import counted, in_bytes
from checkpoints_zoo.images import Given, ImageData
from checkpoints_zoo.populations.pairwise_information import Pairwise, pairwise
from checkpoints_zoo.predictions import Predictions, check_same
from checkpoints_zoo.publishing.html_report.running import Said, run, walk
from checkpoints_zoo.publishing.html_report.weighing import Weighed, weigh

MOST_PAIRED = 2000  # members whose pairs are compared
Say = Callable[[str], object]


@dataclass(frozen=True)
class Scaling:
    """What is asked of temperature scaling and of limits, as in `evaluate`."""

    temperature: bool
    held_out: float | Given | Predictions | None
    within: Mapping[str, float | str] | None


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
    said: Said
    said_outside: Said | None
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


def measure(
    members: Collection | Predictions,
    data: Given | Predictions | None,
    ood: Given | Predictions | None,
    sizes: Iterable[int] | None,
    scaling: Scaling,
    subsets: int,
    device: str | torch.device,
    seed: int,
    command: str,
    say: Say,
) -> Measured:
    """Measure members, or their stored predictions; return what a page shows.

    Args, Raises: as of `reporting.report`.
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
        left, _ = aside.drawn(inside.facts.fingerprint, inside.shape[1], report.calibrated.share)
    said = walk(inside, inside.labels, left)
    return Measured(members, inside, outside, report, said, said_outside, pairs, weighed, command)


def _no_members(inside: Predictions) -> UsageError:
    return UsageError(
        f"images for predictions {inside.name}",
        expected="stored predictions on them, since no members are run",
        found="images",
        do="Give predictions for all, or images for all",
    )


def _predicted(
    members: Collection | Predictions,
    data: Given | Predictions | None,
    ood: Given | Predictions | None,
    held_out: float | Given | Predictions | None,
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
    given = measuring.own(inside.description) if data is None or isinstance(data, Predictions) else images.of(data)
    others = ood if ood is None or isinstance(ood, Predictions) else images.of(ood)
    against = "" if others is None else f" against {others.name}"
    say(f"{inside.name}: {counted(len(inside), 'member')}, {in_bytes(inside.nbytes)}, on {given.name}{against} …")
    said = run(inside, given, device, labelled=True)
    return said, run(inside, others, device, labelled=False) if isinstance(others, ImageData) else others
