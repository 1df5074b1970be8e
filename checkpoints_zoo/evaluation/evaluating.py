"""`zoo.evaluate`: members, or their stored predictions, in; a report with intervals and curves over sizes out.

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
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.evaluation.figures import FIGURES, KNOWN, MEANS_OVER_MEMBERS, OOD_FIGURES
from checkpoints_zoo.evaluation.growth import CONSTANT, Growth, check_distance, estimate_growth
from checkpoints_zoo.evaluation.held_out import check_measured, check_share, check_trained, draw_held_out
from checkpoints_zoo.evaluation.metrics import Interval, Plan
from checkpoints_zoo.evaluation.report import Calibrated, Report
from checkpoints_zoo.evaluation.subsets import InMemory, InputSubset, Logits, Population
from checkpoints_zoo.formats.text import whole
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.predictions import Predictions

__all__ = ["Report", "evaluate"]
SMALL_LOGITS = 2**22  # values that one thread is quicker with
SUBSETS = 100  # random ensembles of each size, by default
SHARE = 0.2  # of the inputs held out for the temperature, by default


def evaluate(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None = None,
    ood: ImageInput | Predictions | None = None,
    *,
    sizes: Iterable[int] | None = None,
    temperature: bool = False,
    held_out: float | ImageInput | Predictions | None = None,
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
    sizes, held_out = check_arguments(members, ood, sizes, temperature, held_out, within, subsets, seed)
    run = (device, dtype, batch)
    inside, held = _split(members, _inside(members, data, run), held_out, run)
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
            None if held is None else (held.logits, held.labels),
        )
        values = population.measure([*singles, *(chosen for plan in plans.values() for chosen in plan.chosen)])
        first, calibrated = len(population.names), None
        if held is not None:
            share = held_out if isinstance(held_out, float) else None
            after = _measured(population.scaled_names, values[:, first:], plans, seed)
            calibrated = Calibrated(held.data, held.logits.shape[1], share, **after)
        drawing = population.drawing(None if calibrated is None else calibrated.temperature.value)
    report = Report(
        collection=members.facts.collection if isinstance(members, Predictions) else members.name,
        citation=members.citation,
        data=inside.data,
        ood="" if outside is None else outside.data,
        inputs=inside.logits.shape[1],
        ood_inputs=0 if outside is None else outside.logits.shape[1],
        members=everyone,
        drawing={"member_accuracy": values[:everyone, 0].tolist(), **drawing},
        within={} if within is None else dict(within),
        calibrated=calibrated,
        **_measured(population.names, values[:, :first], plans, seed),
    )
    tuple(report.answers())  # a distance that has no answer is refused now
    return report


def check_arguments(
    members: Collection | Predictions,
    ood: object,
    sizes: Iterable[int] | None,
    temperature: object,
    held_out: float | ImageInput | Predictions | None,
    within: Mapping[str, float | str] | None,
    subsets: int,
    seed: int,
) -> tuple[list[int], float | ImageData | Predictions | None]:
    """Check the arguments of `evaluate`; return the sizes, and the share or images held out, None for none.

    Args, Raises: as of `evaluate`.
    """
    arguments.check_measurable(members)
    arguments.check_draws(seed, subsets)
    known = _sizes(sizes, len(members))
    for figure, distance in (within or {}).items():
        check_distance(figure, distance, [n for n in FIGURES if ood is not None or n not in OOD_FIGURES])
    return known, _held_out(members, temperature, held_out)


def _measured(names: Sequence[str], values: Tensor, plans: Mapping[int, Plan], seed: int) -> dict[str, Any]:
    """Sum up the figures of single members and of random ensembles; return the fields of a report.

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
            growth = estimate_growth(name, singles[:, i], {size: (plans[size], parts[size][:, i]) for size in plans})
            growths[name] = replace(growth, limit=KNOWN[name].within(growth.limit))
    return {"ensemble": curve[members], "member": member, "curve": curve, "growth": growths}


@dataclass(frozen=True)
class _Predicted:
    """Logits of members on some inputs, labels, and the name and fingerprint of the inputs."""

    logits: Tensor | Logits
    labels: Tensor
    data: str


_Run = tuple[str | torch.device, torch.dtype, int]


def _inside(members: Collection | Predictions, data: ImageInput | Predictions | None, run: _Run) -> _Predicted:
    """Return the members' logits on the labelled images."""
    if isinstance(data, Predictions):
        members, data = predictions.check_same(data, members), None
    if not isinstance(members, Predictions):
        chosen = arguments.images_of(members.description) if data is None else images.of(data)
        inside, labels = arguments.labelled(chosen, members.description)
        return _Predicted(_computed(members, inside, run), labels, arguments.image_key(inside))
    if data is not None:
        members.check_data(images.of(data))
    if members.labels is None:
        raise UsageError(
            f"predictions {members.name}",
            expected="predictions on images with labels of the members' classes",
            found="no labels",
            do="Give them as `ood`, and those on the test set first",
        )
    return _Predicted(members, members.labels, members.data)


def _held_out(
    members: Collection | Predictions, temperature: object, held_out: float | ImageInput | Predictions | None
) -> float | ImageData | Predictions | None:
    """Check what the temperature is fitted to; return a share or images, None for no scaling."""
    if not isinstance(temperature, bool):
        found = f"{temperature!r}"[:80]
        raise UsageError("temperature", expected="True or False: it is fitted", found=found)
    if not temperature:
        if held_out is not None:
            raise UsageError("held_out", expected="temperature=True with it", found="temperature=False")
        return None
    if held_out is None or isinstance(held_out, float | int):
        return SHARE if held_out is None else check_share(held_out)
    other = predictions.check_same(held_out, members) if isinstance(held_out, Predictions) else images.of(held_out)
    if isinstance(members, Predictions):
        trained, trained_on = f"{members.facts.data}/train", set[str]()
    else:
        trained = f"{members.description.dataset}/train"
        trained_on = set(members.rows.column("data_fingerprint").to_pylist())
    check_trained(other.data if isinstance(other, Predictions) else arguments.image_key(other), trained, trained_on)
    if isinstance(members, Predictions) and not isinstance(other, Predictions):
        raise _no_members(other, members)
    return other


def _split(
    members: Collection | Predictions,
    inside: _Predicted,
    held_out: float | ImageData | Predictions | None,
    run: _Run,
) -> tuple[_Predicted, _Predicted | None]:
    """Return the logits on the inputs that are measured, and on those held out for the temperature, None for none."""
    if held_out is None:
        return inside, None
    if isinstance(held_out, float | int):
        logits = InMemory(inside.logits) if isinstance(inside.logits, Tensor) else inside.logits
        kept, drawn = draw_held_out(inside.data.partition(" ")[2], logits.shape[1], held_out)
        measured, held = (_Predicted(InputSubset(logits, at), inside.labels[at], inside.data) for at in (kept, drawn))
        return measured, held
    held = _inside(held_out, None, run) if isinstance(held_out, Predictions) else _inside(members, held_out, run)
    check_measured(held.data, inside.data)
    return inside, held


def _outside(members: Collection | Predictions, ood: ImageInput | Predictions, run: _Run) -> _Predicted:
    """Return the members' logits on the images out of distribution."""
    if isinstance(ood, Predictions):
        return _Predicted(predictions.check_same(ood, members), torch.empty(0), ood.data)
    outside = images.of(ood)
    if isinstance(members, Predictions):
        raise _no_members(outside, members)
    return _Predicted(_computed(members, outside, run), torch.empty(0), arguments.image_key(outside))


def _no_members(data: ImageData, members: Predictions) -> UsageError:
    return UsageError(
        f"images {data.name!r} for predictions {members.name}",
        expected="stored predictions on them, since there are no members to run",
        found="images",
        do="Store some with `predict`, or give the collection in place of its predictions",
    )


def _computed(members: Collection, data: ImageData, run: _Run) -> Tensor:
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
        return predictions.logits(members, data, *run)


def _sizes(sizes: Iterable[int] | None, members: int) -> list[int]:
    if sizes is not None and not isinstance(sizes, Iterable):
        raise UsageError("sizes of ensembles", expected="several, such as [1, 8]", found=repr(sizes)[:80])
    chosen = {members}
    for size in (2**i for i in range(members.bit_length())) if sizes is None else sizes:
        known = whole(size)
        if known is None or not 1 <= known <= members:
            expected = f"a whole number from 1 to {members}"
            raise UsageError("size of an ensemble", expected=expected, found=repr(size)[:80])
        chosen.add(known)
    return sorted(chosen)
