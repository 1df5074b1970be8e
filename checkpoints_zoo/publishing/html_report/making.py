"""From members to a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation.evaluating import SUBSETS, check_arguments
from checkpoints_zoo.formats.text import counted
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.predictions import Predictions
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
from checkpoints_zoo.publishing.html_report.gather import Measured, Scaling, measure
from checkpoints_zoo.publishing.html_report.page import Page, path_of

DEFAULT = "default"
OOD = {"digits": "photos"}  # images of the members' -> images out of distribution that come with the package


def report(
    members: Collection | Predictions,
    data: ImageInput | Predictions | None = None,
    ood: ImageInput | Predictions | None = DEFAULT,
    *,
    path: str | Path | None = None,
    sizes: Iterable[int] | None = None,
    temperature: bool = False,
    held_out: float | ImageInput | Predictions | None = None,
    within: Mapping[str, float | str] | None = None,
    subsets: int = SUBSETS,
    device: str | torch.device = "cpu",
    seed: int = 0,
    say: Callable[[str], object] = lambda text: None,
) -> Page:
    """Measure members in every way there is and put the figures into one HTML file; return the Page.

    The file needs nothing else and no network; the same input gives the same bytes. Members are run once. Weights are
    read again for symmetries and mass, of the first 128 members and no more than 2 GiB, unless `data` are stored
    predictions: then none are. What can't be shown says why in the page.

    Args:
        members: a collection, or stored predictions on labelled images.
        data: labelled images, as `evaluate` takes them, or the members' stored predictions on them; None for the
            collection's own test set.
        ood: images out of distribution, or stored predictions on them; None for none; "default" for those that come
            with the package: patches of photographs for members that were trained on digits.
        path: of the file, which ends in .html; None for a Page that is not saved yet.
        sizes: of the ensembles on the curves; None for the powers of two and all members.
        temperature, held_out, within: as in `evaluate`.
        subsets: random ensembles drawn for a size.
        device: what the members run on.
        seed: of the draws.
        say: told what is being done, a line at a time.

    Raises:
        UsageError: as in `evaluate`, a mixture of images and predictions, or a path that is no page's.
        DamagedError, NetworkError, SourceNotFound: members that can't be read, or are not finite.

    >>> import checkpoints_zoo as zoo
    >>> page = zoo.report(zoo.load("convnet-digits", n=4), subsets=4)
    >>> page.title, list(page.panels)[0]
    ('convnet-digits: a population of 4 networks', 'member-accuracy')
    """
    place = None if path is None else path_of(path)
    if isinstance(ood, str) and ood == DEFAULT:
        own = isinstance(members, Collection) and not isinstance(data, Predictions)
        ood = OOD.get(members.description.dataset) if own and isinstance(members, Collection) else None
    sizes = list(sizes) if isinstance(sizes, Iterable) else sizes
    known, kept = check_arguments(members, ood, sizes, temperature, held_out, within, subsets, seed)
    on = check_device(device)
    text = origin.command(members, data, ood, sizes, Scaling(temperature, held_out, within), subsets, on, seed)
    found = measure(members, data, ood, known, Scaling(temperature, kept, within), subsets, on, seed, text, say)
    page = page_of(found)
    return page if place is None else replace(page, path=page.save(place))


def page_of(found: Measured) -> Page:
    """Put what was measured into parts; return the page."""
    rooms = (summary, population, calibration)
    parts = [room.part(found) for room in rooms]
    parts += [summary.growing(found), *(room.part(found) for room in (detection, pairs, symmetry, mass))]
    count = found.report.members
    title = f"{found.name}: a population of {counted(count, 'network')}"
    described = found.members.description.title if isinstance(found.members, Collection) else "From stored predictions"
    return Page(title, described, parts, origin.made_of(found), _numbers(found))


def _numbers(found: Measured) -> dict[str, Any]:
    """Return the figures that the page shows as JSON values, as their own reports have them."""
    weighed = found.weighed
    reports = {
        "evaluation": found.report,
        "pairwise": found.pairs,
        "mmd": None if weighed is None else weighed.before,
        "ns": None if weighed is None else weighed.after,
    }
    return {name: json.loads(report.to_json()) for name, report in reports.items() if report is not None}
