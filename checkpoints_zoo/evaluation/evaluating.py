"""`zoo.evaluate`: measure members, or their stored predictions, as ensembles of several sizes.

Axes: logits and probabilities (member, input, class).

This is one file, because it is one call: the arguments, the logits, the figures.
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
from checkpoints_zoo.evaluation.figures import (
    CONSTANT_FIGURES,
    FIGURES,
    KNOWN_FIGURES,
    MEANS_OVER_MEMBERS,
    MEMBER_DIFFERENCES,
    OOD_FIGURES,
    SENSITIVE_FIGURES,
)
from checkpoints_zoo.evaluation.growth import Growth, check_distance, estimate_growth
from checkpoints_zoo.evaluation.held_out import check_not_measured_on, check_not_trained_on, check_share, draw_held_out
from checkpoints_zoo.evaluation.metrics import FEWEST_MEMBERS_IF_SKEWED, Interval, Plan
from checkpoints_zoo.evaluation.report import Report, ScaledFigures
from checkpoints_zoo.evaluation.subsets import InMemory, InputSubset, Logits, Population
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.predictions import PosteriorMean, Predictions

__all__ = ["Report", "evaluate"]
SMALL_LOGITS = 2**22  # Number of logits below which one thread is faster.
DEFAULT_SUBSETS = 100  # Default number of random ensembles of each size.
DEFAULT_HELD_OUT_SHARE = 0.2  # Default share of the inputs that is held out for the temperature.


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
    subsets: int = DEFAULT_SUBSETS,
    seed: int = 0,
) -> Report:
    """Measure members as an ensemble: accuracy, calibration, OOD detection, diversity; return the Report.

    Stored predictions are read in blocks, so that a thousand members need not fit into memory; no weights are read. The
    rounding error of a stored float16 logit l is at most l/2048, and that of a log-probability is at most twice the
    error of the largest logit.

    Args:
        members: a collection, stored predictions on labelled images, or a posterior mean, which has no figures of
            diversity.
        data: labelled images to measure on: a name, a path or address, any other argument of `images.of`, or the
            members' stored predictions on images; None for the collection's own test set. If the members are stored
            predictions, the images must be the images of the predictions; None skips the comparison of images.
        ood: images out of distribution, or stored predictions on such images, given as `data` may be given; None leaves
            out the figures on images out of distribution.
        sizes: sizes of the ensembles to measure; None for the powers of two and the number of all members.
        temperature: whether to measure everything again after temperature scaling, which turns the members' mean
            probabilities p into softmax(log p / T). Each random ensemble has its own temperature T, which gives the
            least NLL on held-out inputs.
        held_out: inputs to which the temperature is fitted: a share of the images (default 0.2), drawn by a rule and
            then left out of all figures; or other labelled images, or stored predictions on them. The held-out images
            must not be the members' training images.
        within: figure -> distance from the figure's limit ("nll": 0.01, or "5%" of the limit): the report then states
            how many members bring the figure within this distance, as `Report.needed` does.
        device, dtype: device and dtype of the computation.
        batch: number of images in each forward pass.
        subsets: number of random ensembles of each size.
        seed: seed of the random choice of ensembles.

    Raises:
        UsageError: the images lack labels, or have other classes or a size that the members can't take; predictions are
            of other members or on other images; there are no held-out inputs; or a distance from a limit is not above
            0.
        DamagedError: weights or logits of a member are not finite.

    >>> import checkpoints_zoo as zoo
    >>> report = zoo.evaluate(zoo.load("convnet-digits", n=4), "digits", ood="photos")
    >>> report["auroc"].value > 0.95
    True
    """
    sizes, held_out, subsets, seed = check_arguments(members, ood, sizes, temperature, held_out, within, subsets, seed)
    compute_options = (device, dtype, batch)
    test, calibration = _split_held_out(
        members, _labelled_logits(members, data, compute_options), held_out, compute_options
    )
    ood_logits = None if ood is None else _ood_logits(members, ood, compute_options, test)
    count = len(members)
    plan_by_size = {
        size: metrics.jackknife_plan(count, seed, subsets, skewness=True)
        if size == count
        else metrics.band_plan(count, size, seed, subsets)
        for size in sizes
    }
    single_member_subsets = [torch.tensor([i]) for i in range(count)]
    with one_thread(math.prod(test.logits.shape) < SMALL_LOGITS):
        population = Population(
            test.logits,
            test.labels,
            None if ood_logits is None else ood_logits.logits,
            None if calibration is None else (calibration.logits, calibration.labels),
        )
        figures_of_subsets = population.measure(
            [*single_member_subsets, *(subset for plan in plan_by_size.values() for subset in plan.chosen)]
        )
        unscaled_count, calibrated_figures = len(population.names), None
        if calibration is not None:
            held_out_share = held_out if isinstance(held_out, float) else None
            scaled_figures = _summarise_figures(
                population.scaled_names, figures_of_subsets[:, unscaled_count:], plan_by_size, seed
            )
            calibrated_figures = ScaledFigures(
                calibration.data, calibration.logits.shape[1], held_out_share, **scaled_figures
            )
        picture_values = population.picture_values(
            None if calibrated_figures is None else calibrated_figures.temperature.value
        )
    has_members = not isinstance(members, PosteriorMean)
    names = [n for n in population.names if has_members or FIGURES[n].input_kind != MEMBER_DIFFERENCES]
    columns = [population.names.index(name) for name in names]
    member_accuracies = figures_of_subsets[:count, population.names.index("accuracy")]
    report = Report(
        collection=members.facts.collection if isinstance(members, Predictions) else members.name,
        citation=members.citation,
        data=test.data,
        ood="" if ood_logits is None else ood_logits.data,
        inputs=test.logits.shape[1],
        ood_inputs=0 if ood_logits is None else ood_logits.logits.shape[1],
        members=count,
        drawing={"member_accuracy": member_accuracies.tolist(), **picture_values},
        within={} if within is None else dict(within),
        calibrated=calibrated_figures,
        has_members=has_members,
        **_summarise_figures(names, figures_of_subsets[:, columns], plan_by_size, seed),
    )
    tuple(report.answers())  # Compute the answers once, to refuse an impossible distance now.
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
) -> tuple[list[int], float | ImageData | Predictions | None, int, int]:
    """Check the arguments of `evaluate`; return the sizes, the held-out share or images, the subsets and the seed.

    The returned held-out share or images are None without temperature scaling. Arguments and errors are the same as in
    `evaluate`.
    """
    arguments.check_measurable(members)
    checked_seed, checked_subset_count = arguments.check_seed_and_subsets(seed, subsets)
    ensemble_sizes = _check_sizes(sizes, len(members))
    for figure, distance in (within or {}).items():
        check_distance(figure, distance, [n for n in FIGURES if ood is not None or n not in OOD_FIGURES])
    return ensemble_sizes, _check_held_out(members, temperature, held_out), checked_subset_count, checked_seed


def _summarise_figures(
    figure_names: Sequence[str], figures_of_subsets: Tensor, plan_by_size: Mapping[int, Plan], seed: int
) -> dict[str, Any]:
    """Summarise the figures of single members and of random ensembles; return the fields of a report.

    Args:
        figure_names: names of the figures.
        figures_of_subsets: measured figures, (subset, figure): rows of the single members, then rows of the subsets of
            each plan.
        plan_by_size: size of ensembles -> plan of the subsets; the last plan is that of all members.
        seed: seed of the bootstrap's resampling.
    """
    member_count = max(plan_by_size)
    single_figures, ensemble_figures = figures_of_subsets[:member_count], figures_of_subsets[member_count:]
    figures_by_size = dict(
        zip(
            plan_by_size,
            torch.split(ensemble_figures, [len(plan.chosen) for plan in plan_by_size.values()]),
            strict=True,
        )
    )
    curve = {
        size: {
            n: KNOWN_FIGURES[n].limit_to_range(x)
            for n, x in zip(figure_names, plan.intervals(figures_by_size[size]), strict=True)
        }
        for size, plan in plan_by_size.items()
    }
    curve[member_count] = {
        n: x.if_enough(member_count) if n in SENSITIVE_FIGURES else x for n, x in curve[member_count].items()
    }
    member_means: dict[str, Interval] = {}
    growth_by_figure: dict[str, Growth] = {}
    for i, name in enumerate(figure_names):
        if name in MEANS_OVER_MEMBERS:
            member_means[name] = (
                KNOWN_FIGURES[name]
                .limit_to_range(metrics.bootstrap_mean(single_figures[:, i], seed=seed))
                .if_enough(member_count)
            )
        if name not in CONSTANT_FIGURES and member_count > 1 and bool(figures_of_subsets[:, i].isfinite().all()):
            growth = estimate_growth(
                name,
                single_figures[:, i],
                {size: (plan_by_size[size], figures_by_size[size][:, i]) for size in plan_by_size},
            )
            growth_by_figure[name] = replace(
                growth, limit=KNOWN_FIGURES[name].limit_to_range(growth.limit).if_enough(member_count)
            )
            if member_count < FEWEST_MEMBERS_IF_SKEWED:
                growth_by_figure[name] = replace(growth_by_figure[name], spread=None)
    return {"ensemble": curve[member_count], "member": member_means, "curve": curve, "growth": growth_by_figure}


@dataclass(frozen=True)
class _LabelledLogits:
    """Logits of members on some inputs, the inputs' labels, and the name and fingerprint of the inputs."""

    logits: Tensor | Logits
    labels: Tensor
    data: str


_ComputeOptions = tuple[str | torch.device, torch.dtype, int]


def _labelled_logits(
    members: Collection | Predictions, data: ImageInput | Predictions | None, options: _ComputeOptions
) -> _LabelledLogits:
    """Return the members' logits on the labelled images."""
    if isinstance(data, Predictions):
        members, data = predictions.check_same_members(data, members), None
    if not isinstance(members, Predictions):
        data_set = arguments.images_of(members.description) if data is None else images.of(data)
        labelled_images, labels = arguments.require_labels(data_set, members.description)
        return _LabelledLogits(
            _compute_logits(members, labelled_images, options), labels, arguments.report_image_name(labelled_images)
        )
    if data is not None:
        members.check_data(images.of(data))
    if members.labels is None:
        raise UsageError(
            f"predictions {members.name}",
            expected="predictions on images with labels of the members' classes",
            found="no labels",
            do="Give them as `ood`, and those on the test set first",
        )
    return _LabelledLogits(members, members.labels, members.data)


def _check_held_out(
    members: Collection | Predictions, temperature: object, held_out: float | ImageInput | Predictions | None
) -> float | ImageData | Predictions | None:
    """Check the argument `held_out`; return a share or images, None for no temperature scaling."""
    if not isinstance(temperature, bool):
        found = f"{temperature!r}"[:80]
        raise UsageError("temperature", expected="True or False: it is fitted", found=found)
    if not temperature:
        if held_out is not None:
            raise UsageError("held_out", expected="temperature=True with it", found="temperature=False")
        return None
    if held_out is None or isinstance(held_out, float | int):
        return DEFAULT_HELD_OUT_SHARE if held_out is None else check_share(held_out)
    held_out_set = (
        predictions.check_same_members(held_out, members) if isinstance(held_out, Predictions) else images.of(held_out)
    )
    if isinstance(members, Predictions):
        training_set_name, training_fingerprints = f"{members.facts.data}/train", set[str]()
    else:
        training_set_name = f"{members.description.dataset}/train"
        training_fingerprints = set(members.rows.column("data_fingerprint").to_pylist())
    check_not_trained_on(
        held_out_set.data if isinstance(held_out_set, Predictions) else arguments.report_image_name(held_out_set),
        training_set_name,
        training_fingerprints,
    )
    if isinstance(members, Predictions) and not isinstance(held_out_set, Predictions):
        raise _unusable_images_error(held_out_set, members)
    return held_out_set


def _split_held_out(
    members: Collection | Predictions,
    test_logits: _LabelledLogits,
    held_out: float | ImageData | Predictions | None,
    options: _ComputeOptions,
) -> tuple[_LabelledLogits, _LabelledLogits | None]:
    """Split test inputs from held-out inputs; return the logits on the test inputs, and on the held-out inputs (None
    for no scaling)."""
    if held_out is None:
        return test_logits, None
    if isinstance(held_out, float | int):
        logits = InMemory(test_logits.logits) if isinstance(test_logits.logits, Tensor) else test_logits.logits
        measured_positions, held_out_positions = draw_held_out(
            test_logits.data.partition(" ")[2], logits.shape[1], held_out
        )
        measured, calibration = (
            _LabelledLogits(InputSubset(logits, positions), test_logits.labels[positions], test_logits.data)
            for positions in (measured_positions, held_out_positions)
        )
        return measured, calibration
    calibration = (
        _labelled_logits(held_out, None, options)
        if isinstance(held_out, Predictions)
        else _labelled_logits(members, held_out, options)
    )
    check_not_measured_on(calibration.data, test_logits.data)
    return test_logits, calibration


def _ood_logits(
    members: Collection | Predictions,
    ood: ImageInput | Predictions,
    options: _ComputeOptions,
    test_logits: _LabelledLogits,
) -> _LabelledLogits:
    """Return the members' logits on the images out of distribution.

    Raises:
        UsageError: the images are the test set itself, which would give an AUROC of 0.5.
    """
    if isinstance(ood, Predictions):
        logits = _LabelledLogits(predictions.check_same_members(ood, members), torch.empty(0), ood.data)
    else:
        ood_images = images.of(ood)
        if isinstance(members, Predictions):
            raise _unusable_images_error(ood_images, members)
        logits = _LabelledLogits(
            _compute_logits(members, ood_images, options), torch.empty(0), arguments.report_image_name(ood_images)
        )
    both_logits = logits.logits, test_logits.logits
    if logits.data == test_logits.data or (
        isinstance(both_logits[0], Tensor)
        and isinstance(both_logits[1], Tensor)
        and torch.equal(both_logits[0], both_logits[1])
    ):
        name = test_logits.data.partition(" ")[0]
        advice = "Give images of another data set as `ood`"
        raise UsageError(
            "images out of distribution", expected=f"others than {name}", found="the same images", do=advice
        )
    return logits


def _unusable_images_error(data: ImageData, members: Predictions) -> UsageError:
    return UsageError(
        f"images {data.name!r} for predictions {members.name}",
        expected="stored predictions on them, since there are no members to run",
        found="images",
        do="Store some with `predict`, or give the collection instead of its predictions",
    )


def _compute_logits(members: Collection, data: ImageData, options: _ComputeOptions) -> Tensor:
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
        return predictions.logits(members, data, *options)


def _check_sizes(sizes: Iterable[int] | None, member_count: int) -> list[int]:
    if sizes is not None and not isinstance(sizes, Iterable):
        raise UsageError("sizes of ensembles", expected="several, such as [1, 8]", found=repr(sizes)[:80])
    checked_sizes = {member_count}
    for size in (2**i for i in range(member_count.bit_length())) if sizes is None else sizes:
        number = whole_number(size)
        if number is None or not 1 <= number <= member_count:
            expected = f"a whole number from 1 to {member_count}"
            raise UsageError("size of an ensemble", expected=expected, found=repr(size)[:80])
        checked_sizes.add(number)
    return sorted(checked_sizes)
