"""What a page was made of and with: members, command, versions, days."""

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
from checkpoints_zoo.evaluation.evaluating import SUBSETS
from checkpoints_zoo.formats.selection import Citation, parse_citation
from checkpoints_zoo.images import DATASETS, ImageInput
from checkpoints_zoo.predictions import Predictions
from checkpoints_zoo.publishing.html_report.gather import Measured, Scaling
from checkpoints_zoo.publishing.html_report.population import created
from checkpoints_zoo.sources.source import Source

Shown = ImageInput | Predictions | None


def command(
    members: Collection | Predictions,
    data: Shown,
    ood: Shown,
    sizes: Iterable[int] | None,
    scaling: Scaling,
    subsets: int,
    device: torch.device,
    seed: int,
) -> str:
    """Write the command that makes a page again; return it, "" where the command line can't say it.

    Folders are named by their last part alone: a page may go anywhere.
    """
    stored = isinstance(data, Predictions)
    held_out = None if isinstance(scaling.held_out, float | int) else scaling.held_out
    shown = {"--data": data, "--ood": ood, "--held-out": held_out}
    words = {option: _word(given, stored) for option, given in shown.items() if given is not None}
    if isinstance(members, Predictions) or members._view.steps or "" in words.values() or subsets != SUBSETS:
        return ""
    written = ["zoo-cli", "report", *_named(members)]
    if isinstance(data, Predictions):
        written += ["--stored", _folder(data.stored.source)]
    written += [word for pair in {**words, "--ood": words.get("--ood", "none")}.items() for word in pair]
    written += ["--sizes", ",".join(map(str, sizes))] if sizes is not None else []
    written += ["--temperature"] if scaling.temperature else []
    written += ["--held-out", str(scaling.held_out)] if isinstance(scaling.held_out, float | int) else []
    written += [word for figure, x in (scaling.within or {}).items() for word in ("--within", f"{figure}={x}")]
    written += ["--device", str(device)] if device.type != "cpu" else []
    written += ["--seed", str(seed)] if seed else []
    return shlex.join([*written, "--out", "report.html"])


def _word(given: ImageInput | Predictions, stored: bool) -> str:
    """Return how the command line names images or predictions, "" where it can't."""
    if isinstance(given, Predictions):
        return given.facts.set if stored else ""
    if isinstance(given, os.PathLike):
        return PurePath(given).name or "/"
    if isinstance(given, str) and not stored:
        named = given.partition("/")[0] in DATASETS or given.startswith("hf://")
        return given if named else PurePath(given).name or "/"
    return ""


def _named(members: Collection) -> list[str]:
    """Return the words that select the members."""
    cited = parse_citation(members.citation)
    if cited is None or not cited.label.startswith("file:"):
        return [members.citation]
    return [members.name, "--members", cited.ids, "--source", _last(cited.label)]


def _folder(source: Source) -> str:
    return _last(source.label) if source.label.startswith("file:") else source.label


def _last(label: str) -> str:
    return PurePosixPath(unquote(urlparse(label).path)).name or "/"


def cited(citation: str) -> str:
    """Return a citation as a page shows it: without a folder of the machine."""
    found: Citation | None = parse_citation(citation)
    if found is None or not found.label.startswith("file:"):
        return citation
    return f"{_last(found.label)}@{found.commit}/{found.name}#{found.ids}~{found.check}"


def made_of(found: Measured) -> dict[str, str]:
    """Return what a page was made of and with, a word and what it is each."""
    report = found.report
    facts = {"command": found.command, "citation": cited(report.citation), "images": report.data}
    facts |= {"out of distribution": report.ood, "made with": ", ".join(_versions())}
    if isinstance(found.members, Collection):
        facts["members trained"] = created(found.members)
    facts["page made"] = _day()
    return {name: text for name, text in facts.items() if text}


def _versions() -> Iterable[str]:
    for package in ("checkpoints-zoo", "torch", "plotly"):
        yield f"{package} {version(package)}"


def _day() -> str:
    """Return the day that SOURCE_DATE_EPOCH says, "" without one: the clock would make each page another one.

    Raises:
        UsageError: a SOURCE_DATE_EPOCH that is no time.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not given:
        return ""
    try:
        return datetime.fromtimestamp(int(given), UTC).date().isoformat()
    except (ValueError, OverflowError, OSError) as error:
        expected = "seconds since 1970, as a whole number"
        raise UsageError("SOURCE_DATE_EPOCH", expected=expected, found=repr(given)[:40]) from error
