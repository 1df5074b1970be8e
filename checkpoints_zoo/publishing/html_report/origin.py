"""The origin of a page: its members, the command that makes it, versions of packages, and days."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import PurePath, PurePosixPath
from urllib.parse import unquote, urlparse

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.evaluating import DEFAULT_SUBSETS
from checkpoints_zoo.formats.selection import Citation, parse_citation
from checkpoints_zoo.images import DATASETS, ImageInput
from checkpoints_zoo.predictions import Predictions
from checkpoints_zoo.publishing.html_report.measurements import Measurements, Scaling
from checkpoints_zoo.publishing.html_report.population import training_days
from checkpoints_zoo.sources.source import Source

Images = ImageInput | Predictions | None


def command_of(
    members: Collection | Predictions,
    data: Images,
    ood: Images,
    sizes: Iterable[int] | None,
    scaling: Scaling,
    subsets: int,
    device: torch.device,
    seed: int,
) -> str:
    """Write the command that makes a page again; return "" if no command does.

    Only the last part of a folder's path is written, because the page may be published.
    """
    data_are_stored = isinstance(data, Predictions)
    held_out = None if isinstance(scaling.held_out, float | int) else scaling.held_out
    value_of_option = {"--data": data, "--ood": ood, "--held-out": held_out}
    argument_of_option = {
        option: _command_line_argument(value, data_are_stored)
        for option, value in value_of_option.items()
        if value is not None
    }
    if (
        isinstance(members, Predictions)
        or members._view.steps
        or "" in argument_of_option.values()
        or subsets != DEFAULT_SUBSETS
    ):
        return ""
    command_words = ["zoo-cli", "report", *_selection_arguments(members)]
    if isinstance(data, Predictions):
        command_words += ["--stored", _source_argument(data.stored.source)]
    command_words += [
        word
        for option_and_argument in {**argument_of_option, "--ood": argument_of_option.get("--ood", "none")}.items()
        for word in option_and_argument
    ]
    command_words += ["--sizes", ",".join(map(str, sizes))] if sizes is not None else []
    command_words += ["--temperature"] if scaling.temperature else []
    command_words += ["--held-out", str(scaling.held_out)] if isinstance(scaling.held_out, float | int) else []
    command_words += [
        word for figure, distance in (scaling.within or {}).items() for word in ("--within", f"{figure}={distance}")
    ]
    command_words += ["--device", str(device)] if device.type != "cpu" else []
    command_words += ["--seed", str(seed)] if seed else []
    return shlex.join([*command_words, "--out", "report.html"])


def _command_line_argument(image_input: ImageInput | Predictions, names_stored_set: bool) -> str:
    """Return the name of images or predictions on the command line; "" if the command line can't name them."""
    if isinstance(image_input, Predictions):
        return image_input.facts.set if names_stored_set else ""
    if isinstance(image_input, os.PathLike):
        return PurePath(image_input).name or "/"
    if isinstance(image_input, str) and not names_stored_set:
        is_known_name = image_input.partition("/")[0] in DATASETS or image_input.startswith("hf://")
        return image_input if is_known_name else PurePath(image_input).name or "/"
    return ""


def _selection_arguments(members: Collection) -> list[str]:
    """Return the words of the command line that select the members."""
    citation = parse_citation(members.citation)
    if citation is None or not citation.label.startswith("file:"):
        return [members.citation]
    return [members.name, "--members", citation.ids, "--source", _last_part(citation.label)]


def _source_argument(source: Source) -> str:
    return _last_part(source.label) if source.label.startswith("file:") else source.label


def _last_part(label: str) -> str:
    return PurePosixPath(unquote(urlparse(label).path)).name or "/"


def public_citation(citation: str) -> str:
    """Return a citation without the path of a folder on this machine."""
    cited: Citation | None = parse_citation(citation)
    if cited is None or not cited.label.startswith("file:"):
        return citation
    return f"{_last_part(cited.label)}@{cited.commit}/{cited.name}#{cited.ids}~{cited.check}"


def origin_of(measured: Measurements) -> dict[str, str]:
    """Return the facts on a page's origin, name -> value: data, members, versions."""
    report = measured.report
    facts = {"command": measured.command, "citation": public_citation(report.citation), "images": report.data}
    facts |= {"out of distribution": report.ood, "made with": ", ".join(_versions())}
    if isinstance(measured.members, Collection):
        facts["members trained"] = training_days(measured.members)
    facts["page made"] = page_day()
    return {name: text for name, text in facts.items() if text}


def _versions() -> Iterable[str]:
    for package in ("checkpoints-zoo", "torch", "matplotlib"):
        yield f"{package} {version(package)}"


def page_day() -> str:
    """Return the day in the environment variable SOURCE_DATE_EPOCH, "" if it is not set; today's date would change the
    page's bytes.

    Raises:
        UsageError: the environment variable SOURCE_DATE_EPOCH is not a time.
    """
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not seconds:
        return ""
    try:
        return datetime.fromtimestamp(int(seconds), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError) as error:
        expected = "seconds since 1970, as a whole number"
        raise UsageError("SOURCE_DATE_EPOCH", expected=expected, found=repr(seconds)[:40]) from error
