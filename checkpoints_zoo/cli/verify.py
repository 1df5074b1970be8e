"""`zoo-cli verify` and `zoo-cli audit`: checks of members, and of files."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import DONE, PROBLEMS, Output, fact_lines, format_option, printable, table
from checkpoints_zoo.cli.options import Hardware, hardware_options, import_function
from checkpoints_zoo.errors import (
    AccessError,
    DamagedError,
    FormatError,
    LayoutError,
    NetworkError,
    SourceNotFound,
    ZooError,
)
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.publishing.auditing import Finding, audit
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import open_source

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.training.retrain import RetrainResult

MOST_LINES = 20  # findings of one kind


@click.command()
@click.argument("name", metavar="NAME|DIR|ADDRESS")
@click.option("--source", metavar="SOURCE", help="A folder, or hf://datasets/ORG/NAME[@REVISION].")
@click.option("--sample", default=8, metavar="N", help="Members of each collection whose accuracy is measured again.")
@click.option("--architecture", metavar="MODULE:FUNCTION", help="Builds a network of your own; its code runs.")
@click.option(
    "--retrain", is_flag=False, flag_value=3, type=click.IntRange(min=1), metavar="[N]",
    help="Train N members of each collection again from their rows, spread evenly; 3 if no N is given.",
)  # fmt: skip
@click.option(
    "--recipe", metavar="RECIPE", help="With --retrain: the recipe, if the rows do not name a recipe of the package."
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="FIELD=VALUE",
    help="With --recipe: a field that was set; may be given again.",
)
@hardware_options
@format_option
def verify_command(
    name: str,
    source: str | None,
    sample: int,
    architecture: str | None,
    retrain: int | None,
    recipe: str | None,
    changes: tuple[str, ...],
    hardware: Hardware,
    out: Output,
) -> int:
    """Check members against their manifest: bytes, hashes, duplicates, accuracy.

    NAME is a collection or a citation. In DIR, a folder, and at ADDRESS, hf://datasets/ORG/NAME[@REVISION], every
    collection is checked, with its stored predictions. Members on the Hub are fetched first. Exit code 1: problems were
    found.

    A member that is trained again must have the same bytes if this torch and this processor are those that its row
    names; otherwise the test accuracies are compared.
    """
    if retrain is None and (recipe is not None or changes):
        raise click.UsageError("--recipe and --set need --retrain.")
    if recipe is None and changes:
        raise click.UsageError("--set needs --recipe.")
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.formats.shard_files import Problem
    from checkpoints_zoo.networks.architectures import ARCHITECTURES
    from checkpoints_zoo.predictions import prediction_sets
    from checkpoints_zoo.publishing.verification import verify, verify_predictions

    build = None if architecture is None else import_function(architecture)
    checked: list[dict[str, Any]] = []
    trained: list[dict[str, Any]] = []
    problems: list[Problem] = []
    whole = source is None and name not in catalog.collections() and (_is_address(name) or _is_folder(name))
    names = [name]
    if whole:
        source, names = _collections_of(name)
    for one in names:
        out.say(f"{one}: checking …")
        try:
            members = load(one, source=source)
            if build is not None and members.description.architecture not in ARCHITECTURES:
                members = load(one, source=source, architecture=build)
        except (NetworkError, AccessError):
            raise
        except ZooError as error:
            # What was named and is not there is no finding; in a folder, the others are to be checked too.
            if not whole and not isinstance(error, DamagedError | FormatError | LayoutError):
                raise
            problems.append(Problem(one, None, "manifest", str(error)))
            continue
        found = verify(members, sample)
        size = members.nbytes
        again = [] if retrain is None else _retrained(members, retrain, recipe, changes, hardware, out)
        found += [Problem(one, each.member, "retraining", each.text) for each in again if not each.same]
        trained += [{"collection": one} | asdict(each) for each in again]
        problems += found
        checked.append({"collection": one, "members": len(members), "bytes": size, "problems": len(found)})
        for kind in prediction_sets.set_names(members.source, one) if whole else ():
            out.say(f"{one}/{kind}: checking predictions …")
            found = verify_predictions(members, kind, sample)
            problems += found
            stored = prediction_sets.read_set(members.source, one, kind).rows
            size = manifest.sum_of(stored, "nbytes")
            line = {"collection": f"{one}/{kind}", "members": stored.num_rows, "bytes": size, "problems": len(found)}
            checked.append(line)
    out.data(
        {"checked": checked, "retrained": trained, "problems": [asdict(p) for p in problems]},
        table([{**row, "bytes": format_bytes(row["bytes"])} for row in checked], right=["bytes"]),
        "\n".join(_line_of(each) for each in trained),
        "\n".join(printable(str(p)) for p in problems) or f"All is as the manifest says: {_checked(sample)}.",
    )
    return PROBLEMS if problems else DONE


def _retrained(
    members: Collection,
    count: int,
    recipe: str | None,
    changes: tuple[str, ...],
    hardware: Hardware,
    out: Output,
) -> list[RetrainResult]:
    """Train some members again; return what came of each."""
    from checkpoints_zoo.training.recipes import choose_recipe
    from checkpoints_zoo.training.retrain import retrain

    made = None if recipe is None else choose_recipe(recipe, changes)
    return retrain(members, count, made, hardware.engine(out.say), out.say)


def _line_of(retrained: dict[str, Any]) -> str:
    """Write for people what came of training a member again; return the line."""
    agree = "agree" if retrained["same"] else "DIFFER"
    who = f"member {retrained['member']} of {retrained['collection']}, trained again"
    return printable(f"{who}: {retrained['compared']} {agree}: {retrained['text']}")


def _is_address(name: str) -> bool:
    return name.startswith(hub.SCHEME) and "#" not in name  # a citation names members too


def _is_folder(name: str) -> bool:
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # too long for a path, as a citation may be
        return False


def _collections_of(place: str) -> tuple[str, list[str]]:
    """Return a source at the commit that it has now, and the names of its collections, one at least."""
    source = open_source(place, "")
    names = source.collections()
    if not names:
        raise SourceNotFound(f"source {place}", expected="manifests/NAME.parquet", found="none", path=place)
    return source.display_name, names


def _checked(sample: int) -> str:
    again = f", the accuracy of at most {sample} a collection measured again" if sample > 0 else ""
    return f"every member's place, hash and values, no two alike{again}"


@click.command()
@click.argument("place", metavar="ADDRESS|DIR")
@format_option
def audit_command(place: str, out: Output) -> int:
    """Look for what is wrong with any repo or folder, from hashes, sizes and first bytes.

    ADDRESS is hf://datasets/ORG/NAME[@REVISION]. Found are files and members with one content under several names,
    pickles, LFS pointers and web pages where weights should be, empty and damaged files, rows of manifests whose bytes
    are not there, and stored predictions of other weights. No weights are fetched and nothing is unpickled. Exit code
    1: something was found.
    """
    found = audit(place)
    about = {
        "source": found.source,
        "files": found.files,
        "bytes": found.bytes,
        "looked_into": found.read,
        "collections": found.collections,
        "members": found.members,
        "predictions": found.predictions,
    }
    listed = {"findings": [asdict(f) for f in found.findings], "notes": [asdict(f) for f in found.notes]}
    out.data(
        about | listed,
        fact_lines({**about, "bytes": format_bytes(found.bytes)}),
        "\n".join(_lines(found.findings)) or "Nothing is wrong with them.",
        "\n".join(f"note: {line}" for line in _lines(found.notes)),
    )
    return PROBLEMS if found.findings else DONE


def _lines(findings: list[Finding]) -> list[str]:
    """Write findings for people, of each kind the first few; return the lines."""
    lines, counts = [], Counter[str]()
    for one in findings:
        counts[one.kind] += 1
        if counts[one.kind] <= MOST_LINES:
            lines.append(printable(str(one)))
    more = [
        f"{count - MOST_LINES:,} more: {kind} (--format json lists all)"
        for kind, count in counts.items()
        if count > MOST_LINES
    ]
    return lines + more
