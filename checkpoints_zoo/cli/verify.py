"""`zoo-cli verify`: members checked against their manifest, and trained again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import DONE, PROBLEMS, Output, format_option, report_error, table
from checkpoints_zoo.cli.options import IMAGES_HELP, Hardware, hardware_options, import_function
from checkpoints_zoo.errors import (
    AccessError,
    DamagedError,
    FormatError,
    LayoutError,
    NetworkError,
    SourceNotFound,
    ZooError,
    explain_missing_packages,
)
from checkpoints_zoo.formats import arrow_tables, catalog
from checkpoints_zoo.formats.shard_files import Problem
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.publishing.byte_checks import check_stored_members, check_stored_predictions
from checkpoints_zoo.sources import hub_addresses
from checkpoints_zoo.sources.finding import open_source, select_members

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.training.retrain import RetrainResult


@click.command()
@click.argument("name", metavar="NAME|DIR|ADDRESS")
@click.option("--source", metavar="SOURCE", help="A folder, hf://datasets/ORG/NAME[@REVISION], https://… or gs://….")
@click.option("--sample", default=8, metavar="N", help="Members of each collection whose accuracy is measured again.")
@click.option("--architecture", metavar="MODULE:FUNCTION", help="Builds a network of your own; its code runs.")
@click.option(
    "--data", metavar="IMAGES",
    help=f"The images that accuracies are claimed on, if the package does not have them: {IMAGES_HELP}.",
)  # fmt: skip
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
    data: str | None,
    retrain: int | None,
    recipe: str | None,
    changes: tuple[str, ...],
    hardware: Hardware,
    out: Output,
) -> int:
    """Check members against their manifest: bytes, hashes, duplicates, accuracy.

    NAME is a collection or a citation. In DIR, a folder, and at ADDRESS, hf://datasets/ORG/NAME[@REVISION], every
    collection is checked, with its stored predictions. Members on the Hub are fetched first. The output states each
    check and its number of members, and the checks that were impossible. Exit code 1: problems were found.

    A member that is trained again must have the same bytes if torch, the processor and the number of threads are those
    that its row names; otherwise the test accuracies are compared. OMP_NUM_THREADS sets the number of threads.
    """
    if retrain is None and (recipe is not None or changes):
        raise click.UsageError("--recipe and --set need --retrain.")
    if recipe is None and changes:
        raise click.UsageError("--set needs --recipe.")
    checks_bytes_alone = sample < 1 and retrain is None and architecture is None and data is None and " + " not in name
    if not checks_bytes_alone:
        otherwise = "or give --sample 0 and no other option, which checks bytes and hashes"
        with explain_missing_packages("a check of accuracies", otherwise):
            from checkpoints_zoo.collection.collection import load
            from checkpoints_zoo.publishing.verification import check_members, claimed_images, verify_predictions

    build = None if architecture is None else import_function(architecture)
    checked_rows: list[dict[str, Any]] = []
    lines: list[str] = []
    trained_rows: list[dict[str, Any]] = []
    problems: list[Problem] = []
    errors: list[ZooError] = []
    is_whole_source = source is None and name not in catalog.collections() and (_is_address(name) or _is_folder(name))
    names = [name]
    if is_whole_source:
        source, names = _collections_of(name)
    for collection in names:
        out.say(f"{collection}: checking …")
        members: Collection | None = None
        try:
            if checks_bytes_alone:
                selected = select_members(collection, source=source)
            else:
                members = load(collection, source=source)
                if build is not None and members.description.architecture not in ARCHITECTURES:
                    members = load(collection, source=source, architecture=build)
                claimed_data = None if data is None else claimed_images(members, data)
        except ZooError as error:
            if isinstance(error, NetworkError | AccessError):
                errors.append(error)
                continue
            # A missing name is an error of the user, not a problem of a member. In a folder, an unreadable collection
            # does not stop the checks of the others.
            if not is_whole_source and not isinstance(error, DamagedError | FormatError | LayoutError):
                raise
            problems.append(Problem(collection, None, "manifest", str(error)))
            continue
        if members is None:
            (result, _), retrain_results, opened_source = check_stored_members(selected), [], selected.source
        else:
            result, opened_source = check_members(members, sample, claimed_data), members.source
            retrain_results = [] if retrain is None else _retrain(members, retrain, recipe, changes, hardware, out)
        result.problems += [
            Problem(collection, retrain_result.member, "retraining", retrain_result.text)
            for retrain_result in retrain_results
            if not retrain_result.same
        ]
        trained_rows += [{"collection": collection} | asdict(retrain_result) for retrain_result in retrain_results]
        problems += result.problems
        lines += result.lines()
        errors += [] if result.error is None else [result.error]
        checked_rows.append(
            {
                "collection": collection, "members": result.members, "bytes": result.nbytes, "read": result.read,
                "hashed": result.hashed, "measured": result.measured, "problems": len(result.problems),
                "impossible": dict(result.impossible),
            }
        )  # fmt: skip
        for set_name in prediction_sets.list_set_names(opened_source, collection) if is_whole_source else ():
            out.say(f"{collection}/{set_name}: checking predictions …")
            try:
                if members is None:
                    _, prediction_problems = check_stored_predictions(opened_source, collection, set_name)
                else:
                    prediction_problems = verify_predictions(members, set_name, sample)
                prediction_rows = prediction_sets.read_set(opened_source, collection, set_name).rows
            except (NetworkError, AccessError) as error:
                errors.append(error)
                continue
            problems += prediction_problems
            row = {"collection": f"{collection}/{set_name}", "members": prediction_rows.num_rows}
            checked_rows.append(
                {**row, "bytes": arrow_tables.sum_of(prediction_rows, "nbytes"), "problems": len(prediction_problems)}
            )
    table_rows = [
        {key: row[key] for key in ("collection", "members", "bytes", "problems")}
        | {"bytes": format_bytes(row["bytes"])}
        for row in checked_rows
    ]
    verdict = "\n".join(map(str, problems))
    if not problems and not errors:
        verdict = "No problems were found."
    out.data(
        {"checked": checked_rows, "retrained": trained_rows, "problems": [asdict(problem) for problem in problems]},
        table(table_rows, right_aligned=["bytes"]),
        "\n".join(lines),
        "\n".join(_retrained_line(retrain_result) for retrain_result in trained_rows),
        verdict,
    )
    for later_error in errors[1:] if not problems else errors:
        report_error(later_error)
    if errors and not problems:
        raise errors[0]
    return PROBLEMS if problems else DONE


def _retrain(
    members: Collection,
    member_count: int,
    recipe: str | None,
    changes: tuple[str, ...],
    hardware: Hardware,
    out: Output,
) -> list[RetrainResult]:
    """Train some members again; return the result of each comparison."""
    from checkpoints_zoo.training.recipes import recipe_from_options
    from checkpoints_zoo.training.retrain import retrain

    chosen_recipe = None if recipe is None else recipe_from_options(recipe, changes)
    return retrain(members, member_count, chosen_recipe, hardware.engine(out.say), out.say)


def _retrained_line(retrained: dict[str, Any]) -> str:
    """Return the result of training a member again as a line of text."""
    agreement_word = "agree" if retrained["same"] else "DIFFER"
    subject_text = f"member {retrained['member']} of {retrained['collection']}, trained again"
    return f"{subject_text}: {retrained['compared']} {agreement_word}: {retrained['text']}"


def _is_address(argument: str) -> bool:
    # An address with "#" is a citation, which selects members.
    return argument.startswith(hub_addresses.ADDRESS_SCHEME) and "#" not in argument


def _is_folder(argument: str) -> bool:
    try:
        return Path(argument).is_dir()
    except (OSError, ValueError):  # the argument, perhaps a citation, is too long for a path
        return False


def _collections_of(place: str) -> tuple[str, list[str]]:
    """Return the address of a source at its current commit, and the names of its collections, at least one."""
    source = open_source(place, "")
    names = source.collections()
    if not names:
        raise SourceNotFound(f"source {place}", expected="manifests/NAME.parquet", found="none", path=place)
    return source.display_name, names
