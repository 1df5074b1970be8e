"""One call from members, or their stored predictions, to a report: figures with intervals, a curve over sizes.

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import growth, measuring, metrics
from checkpoints_zoo.evaluation import held_out as aside
from checkpoints_zoo.evaluation.figures import FIGURES, KNOWN, MEANS_OVER_MEMBERS, OOD_FIGURES
from checkpoints_zoo.evaluation.growth import CONSTANT, Growth
from checkpoints_zoo.evaluation.metrics import Interval, Plan
from checkpoints_zoo.evaluation.report import Calibrated, Report
from checkpoints_zoo.evaluation.subsets import Held, Logits, Part, Population
from checkpoints_zoo.formats.text import whole
from checkpoints_zoo.images import Given, ImageData
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.predictions import Predictions

__all__ = ["Report", "evaluate"]
SMALL_LOGITS = 2**22  # values that one thread is quicker with
SUBSETS = 100  # random ensembles of a size where nothing else is said
SHARE = 0.2  # of the inputs that are held out for the temperature where nothing else is said


def evaluate(
    members: Collection | Predictions,
    data: Given | Predictions | None = None,
    ood: Given | Predictions | None = None,
    *,
    sizes: Iterable[int] | None = None,
    temperature: bool = False,
    held_out: float | Given | Predictions | None = None,
    within: Mapping[str, float | str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    subsets: int = SUBSETS,
    seed: int = 0,
) -> Report:
    """Measure members as an ensemble: accuracy, calibration, OOD detection, diversity; return the Report.

    Stored predictions are read in blocks, so that a thousand members need not fit into memory; no weights are read.
    Their float16 logits l are off by at most l/2048, and a log-probability by twice that of the largest.

    Args:
        members: a collection, or stored predictions on labelled images.
        data: labelled images: their name, their place, or whatever `images.of` takes, or the members' stored
            predictions on them; None for the collection's own test set. Where the members are stored predictions,
            images are only compared with those that these were made on, None for no comparison.
        ood: images out of distribution, given likewise, or stored predictions on them; None leaves those figures out.
        sizes: of the ensembles on the curve; None for the powers of two and all members.
        temperature: whether to measure everything again after temperature scaling: the members' mean probabilities p
            become softmax(log p / T), with T of the least NLL on inputs held out, for each random ensemble its own.
        held_out: for the temperature: a share of the images, 0.2 if not given, drawn by a rule and then left out of
            all figures; or other labelled images, or stored predictions on them. Never what the members were trained
            on.
        within: figure -> distance from its limit ("nll": 0.01, or "5%" of it), for which the members needed are found,
            as by `Report.needed`, and shown with the report.
        device, dtype: what the members run on and in.
        batch: images a forward pass.
        subsets: random ensembles drawn for a size.
        seed: of the draws.

    Raises:
        UsageError: images without labels, of other classes, or of a size the members can't take; predictions of other
            members or on other images; inputs held out that are none; a distance from a limit that is none.
        DamagedError: members whose weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> report = zoo.evaluate(zoo.load("convnet-digits", n=4), "digits", ood="photos")
    >>> report["auroc"].value > 0.95
    True
    """
    sizes, wanted = checked(members, ood, sizes, temperature, held_out, within, subsets, seed)
    run = (device, dtype, batch)
    inside, held = _parts(members, _inside(members, data, run), wanted, run)
    outside = None if ood is None else _outside(members, ood, run)
    everyone = len(members)
    plans = {
        size: metrics.jackknife_plan(everyone, seed, subsets)
        if size == everyone
        else metrics.band_plan(everyone, size, seed, subsets)
        for size in sizes
    }
    singles = [torch.tensor([i]) for i in range(everyone)]
    with one_thread(math.prod(inside.logits.shape) < SMALL_LOGITS):
        population = Population(
            inside.logits,
            inside.labels,
            None if outside is None else outside.logits,
            None if held is None else (held.said.logits, held.said.labels),
        )
        values = population.measure([*singles, *(chosen for plan in plans.values() for chosen in plan.chosen)])
        first, calibrated = len(population.names), None
        if held is not None:
            after = _measured(population.scaled_names, values[:, first:], plans, seed)
            calibrated = Calibrated(held.said.named, held.said.logits.shape[1], held.share, **after)
        drawing = population.drawing(None if calibrated is None else calibrated.temperature.value)
    report = Report(
        collection=members.facts.collection if isinstance(members, Predictions) else members.name,
        citation=members.citation,
        data=inside.named,
        ood="" if outside is None else outside.named,
        inputs=inside.logits.shape[1],
        ood_inputs=0 if outside is None else outside.logits.shape[1],
        members=everyone,
        drawing={"member_accuracy": values[:everyone, 0].tolist(), **drawing},
        within={} if within is None else dict(within),
        calibrated=calibrated,
        **_measured(population.names, values[:, :first], plans, seed),
    )
    tuple(report.answers())  # what can't be answered is said now
    return report


def checked(
    members: Collection | Predictions,
    ood: object,
    sizes: Iterable[int] | None,
    temperature: object,
    held_out: float | Given | Predictions | None,
    within: Mapping[str, float | str] | None,
    subsets: int,
    seed: int,
) -> tuple[list[int], float | ImageData | Predictions | None]:
    """Check what `evaluate` is asked before anything is run; return the sizes, and what is held out, None for none.

    Args, Raises: as of `evaluate`.
    """
    measuring.check_measurable(members)
    measuring.check_draws(seed, subsets)
    found = _sizes(sizes, len(members))
    for figure, distance in (within or {}).items():
        growth.check(figure, distance, [n for n in FIGURES if ood is not None or n not in OOD_FIGURES])
    return found, _wanted(members, temperature, held_out)


def _measured(names: Sequence[str], values: Tensor, plans: Mapping[int, Plan], seed: int) -> dict[str, Any]:
    """Sum up the figures of single members and of random ensembles; return what a report has of them.

    Args:
        names: of the figures.
        values: (subset, figure), each member and then each plan's subsets.
        plans: size -> the subsets; the last of all members.
        seed: of the bootstrap.
    """
    members = max(plans)
    singles, rest = values[:members], values[members:]
    parts = dict(zip(plans, torch.split(rest, [len(plan.chosen) for plan in plans.values()]), strict=True))
    curve = {
        size: {n: KNOWN[n].within(x) for n, x in zip(names, plan.intervals(parts[size]), strict=True)}
        for size, plan in plans.items()
    }
    member: dict[str, Interval] = {}
    growths: dict[str, Growth] = {}
    for i, name in enumerate(names):
        if name in MEANS_OVER_MEMBERS:
            member[name] = KNOWN[name].within(metrics.bootstrap_mean(singles[:, i], seed=seed))
        if name not in CONSTANT and members > 1 and bool(values[:, i].isfinite().all()):
            found = growth.growth(name, singles[:, i], {size: (plans[size], parts[size][:, i]) for size in plans})
            growths[name] = replace(found, limit=KNOWN[name].within(found.limit))
    return {"ensemble": curve[members], "member": member, "curve": curve, "growth": growths}


@dataclass(frozen=True)
class _Said:
    """What members say of some inputs: logits, labels, and the name and fingerprint of the inputs."""

    logits: Tensor | Logits
    labels: Tensor
    named: str


@dataclass(frozen=True)
class _Aside:
    """What members say of the inputs held out, and their share of the measured ones, None for other images."""

    said: _Said
    share: float | None


_Run = tuple[str | torch.device, torch.dtype, int]


def _inside(members: Collection | Predictions, data: Given | Predictions | None, run: _Run) -> _Said:
    """Return what members say of the labelled images."""
    if isinstance(data, Predictions):
        members, data = predictions.check_same(data, members), None
    if not isinstance(members, Predictions):
        given = measuring.own(members.description) if data is None else images.of(data)
        inside, labels = measuring.labelled(given, members.description)
        return _Said(_computed(members, inside, run), labels, measuring.named(inside))
    if data is not None:
        members.check_data(images.of(data))
    if members.labels is None:
        raise UsageError(
            f"predictions {members.name}",
            expected="predictions on images with labels of the members' classes",
            found="no labels",
            do="Give them as `ood`, and those on the test set first",
        )
    return _Said(members, members.labels, members.data)


def _wanted(
    members: Collection | Predictions, temperature: object, held_out: float | Given | Predictions | None
) -> float | ImageData | Predictions | None:
    """Check what the temperature is to be fitted to; return a share or images, None for no scaling."""
    if not isinstance(temperature, bool):
        found = f"{temperature!r}"[:80]
        raise UsageError("temperature", expected="True or False: it is fitted", found=found)
    if not temperature:
        if held_out is not None:
            raise UsageError("held_out", expected="temperature=True with it", found="temperature=False")
        return None
    if held_out is None or isinstance(held_out, float | int):
        return SHARE if held_out is None else aside.check_share(held_out)
    given = predictions.check_same(held_out, members) if isinstance(held_out, Predictions) else images.of(held_out)
    if isinstance(members, Predictions):
        trained, trained_on = f"{members.facts.data}/train", set[str]()
    else:
        trained = f"{members.description.dataset}/train"
        trained_on = set(members.rows.column("data_fingerprint").to_pylist())
    aside.check_trained(given.data if isinstance(given, Predictions) else measuring.named(given), trained, trained_on)
    if isinstance(members, Predictions) and not isinstance(given, Predictions):
        raise _no_members(given, members)
    return given


def _parts(
    members: Collection | Predictions, inside: _Said, wanted: float | ImageData | Predictions | None, run: _Run
) -> tuple[_Said, _Aside | None]:
    """Set inputs aside for the temperature; return what members say of those that are measured, and of those."""
    if wanted is None:
        return inside, None
    if isinstance(wanted, float | int):
        logits = Held(inside.logits) if isinstance(inside.logits, Tensor) else inside.logits
        left, drawn = aside.drawn(inside.named.partition(" ")[2], logits.shape[1], wanted)
        measured, held = (_Said(Part(logits, at), inside.labels[at], inside.named) for at in (left, drawn))
        return measured, _Aside(held, wanted)
    held = _inside(wanted, None, run) if isinstance(wanted, Predictions) else _inside(members, wanted, run)
    aside.check_measured(held.named, inside.named)
    return inside, _Aside(held, None)


def _outside(members: Collection | Predictions, ood: Given | Predictions, run: _Run) -> _Said:
    """Return what members say of the images out of distribution."""
    if isinstance(ood, Predictions):
        return _Said(predictions.check_same(ood, members), torch.empty(0), ood.data)
    outside = images.of(ood)
    if isinstance(members, Predictions):
        raise _no_members(outside, members)
    return _Said(_computed(members, outside, run), torch.empty(0), measuring.named(outside))


def _no_members(given: ImageData, members: Predictions) -> UsageError:
    return UsageError(
        f"images {given.name!r} for predictions {members.name}",
        expected="stored predictions on them, since there are no members to run",
        found="images",
        do="Store some with `predict`, or give the collection in place of its predictions",
    )


def _computed(members: Collection, data: ImageData, run: _Run) -> Tensor:
    with one_thread(members._member_nbytes < SMALL_MEMBER):
        return predictions.logits(members, data, *run)


def _sizes(sizes: Iterable[int] | None, members: int) -> list[int]:
    if sizes is not None and not isinstance(sizes, Iterable):
        raise UsageError("sizes of ensembles", expected="several, such as [1, 8]", found=repr(sizes)[:80])
    found = {members}
    for size in (2**i for i in range(members.bit_length())) if sizes is None else sizes:
        known = whole(size)
        if known is None or not 1 <= known <= members:
            expected = f"a whole number from 1 to {members}"
            raise UsageError("size of an ensemble", expected=expected, found=repr(size)[:80])
        found.add(known)
    return sorted(found)
