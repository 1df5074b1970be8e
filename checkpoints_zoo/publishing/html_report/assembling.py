"""Make the report page of members: measure them and assemble the parts of the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.evaluating import DEFAULT_SUBSETS, check_arguments
from checkpoints_zoo.formats.text import count_with_noun
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.predictions import PosteriorMean, Predictions
from checkpoints_zoo.publishing.html_report import (
    calibration,
    detection,
    mass,
    origin,
    pairs,
    population,
    summary,
    symmetry,
)
from checkpoints_zoo.publishing.html_report.measurements import Measurements, Scaling, measure
from checkpoints_zoo.publishing.html_report.page import Page, path_of

DEFAULT_IMAGES = "default"
OOD_IMAGES_OF = {"digits": "photos"}  # images of the members -> images out of distribution


def report_page(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None = None,
    ood: ImageInput | Predictions | None = DEFAULT_IMAGES,
    *,
    path: str | Path | None = None,
    sizes: Iterable[int] | None = None,
    temperature: bool = False,
    held_out: float | ImageInput | Predictions | None = None,
    within: Mapping[str, float | str] | None = None,
    subsets: int = DEFAULT_SUBSETS,
    device: str | torch.device = "cpu",
    seed: int = 0,
    say: Callable[[str], object] = lambda text: None,
) -> Page:
    """Measure members in every way and put the figures into one HTML file; return the Page.

    The file needs no other file and no network; the same input gives the same bytes. Members are run once. Weights are
    read again for symmetries and mass, of the first 128 members and no more than 2 GiB; if `data` are stored
    predictions, no weights are read. If a part can't be shown, the page says why.

    Args:
        members: collection, or stored predictions on labelled images.
        data: labelled images, as `evaluate` takes them, or the members' stored predictions on them; None for the
            collection's own test set.
        ood: images out of distribution, or stored predictions on them; None for none; "default" for the package's own
            images: patches of photographs for members that were trained on digits.
        path: path of the HTML file, which ends in .html; None for a Page that is not saved.
        sizes: sizes of the ensembles on the curves; None for the powers of two and all members.
        temperature, held_out, within: the same arguments as in `evaluate`.
        subsets: number of random ensembles drawn for each size.
        device: torch device on which the members run.
        seed: seed of all random draws.
        say: function that is called with a line of text for each step.

    Raises:
        UsageError: arguments that `evaluate` refuses, a mixture of images and predictions, or a path without the suffix
            .html.
        DamagedError, NetworkError, SourceNotFound: members that can't be read, or are not finite.

    >>> import checkpoints_zoo as zoo
    >>> page = zoo.report_page(zoo.load("convnet-digits", n=2), ood=None, subsets=4)
    >>> page.title, list(page.panels)[0]
    ('convnet-digits: a population of 2 networks', 'member-accuracy')
    """
    page_path = None if path is None else path_of(path)
    if isinstance(members, PosteriorMean):
        raise UsageError(
            "members of a report page", expected="a collection, or stored predictions", found="a posterior mean",
            do="It has no members: `zoo.evaluate` measures it",
        )  # fmt: skip
    if isinstance(ood, str) and ood == DEFAULT_IMAGES:
        runs_members = isinstance(members, Collection) and not isinstance(data, Predictions)
        ood = (
            OOD_IMAGES_OF.get(members.description.dataset) if runs_members and isinstance(members, Collection) else None
        )
    sizes = list(sizes) if isinstance(sizes, Iterable) else sizes
    checked_sizes, checked_held_out, subsets, seed = check_arguments(
        members, ood, sizes, temperature, held_out, within, subsets, seed
    )
    device = check_device(device)
    origin.page_day()  # Check the environment variable before anything is measured.
    scaling = Scaling(temperature, held_out, within)
    command = origin.command_of(members, data, ood, sizes, scaling, subsets, device, seed)
    scaling = Scaling(temperature, checked_held_out, within)
    measured = measure(members, data, ood, checked_sizes, scaling, subsets, device, seed, command, say)
    page = assemble(measured)
    return page if page_path is None else replace(page, path=page.save(page_path))


def assemble(measured: Measurements) -> Page:
    """Arrange measurements in the parts of a page; return the page."""
    parts = [
        summary.build_part(measured),
        population.build_part(measured),
        calibration.build_part(measured),
        summary.build_sizes_part(measured),
        detection.build_part(measured),
        pairs.build_part(measured),
        symmetry.build_part(measured),
        mass.build_part(measured),
    ]
    title = f"{measured.name}: a population of {count_with_noun(measured.report.members, 'network')}"
    members = measured.members
    subtitle = members.description.title if isinstance(members, Collection) else "From stored predictions"
    return Page(title, subtitle, parts, origin.origin_of(measured), _figure_values(measured))


def _figure_values(measured: Measurements) -> dict[str, Any]:
    """Return the figures of the page as JSON values, grouped by the report that each figure is from."""
    weight_figures = measured.weights
    report_of_name = {
        "evaluation": measured.report,
        "pairwise": measured.pairs,
        "mmd": None if weight_figures is None else weight_figures.stored_mmd,
        "ns": None if weight_figures is None else weight_figures.mmd_without_symmetries,
    }
    return {name: json.loads(report.to_json()) for name, report in report_of_name.items() if report is not None}
