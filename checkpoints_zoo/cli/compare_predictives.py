"""`zoo-cli compare-predictives`: agreement and total variation of the predictions of two ensembles."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.mmd import load_other
from checkpoints_zoo.cli.options import IMAGES_HELP, Selection, network_options
from checkpoints_zoo.evaluation.tables import as_text

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.populations.predictives import PredictiveComparison
    from checkpoints_zoo.predictions import Predictions

FIGURE_LABELS = {"agreement": "agreement (0..1)", "total_variation": "total variation (0..1)"}


@click.command()
@network_options
@click.argument("other", metavar="[OTHER]", required=False)
@click.option("--other-source", metavar="SOURCE", help="Source of OTHER, if it is not that of NAME.")
@click.option(
    "--probabilities", "file", metavar="FILE",
    help="Mean probabilities (.npy, .csv; an image a row) in place of OTHER, on this machine or at https://… or gs://….",
)  # fmt: skip
@click.option("--data", metavar="IMAGES", help=f"Images: {IMAGES_HELP}; the collection's test set if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
@click.option("--subsets", default=100, metavar="N", help="Random halves of the members behind the intervals.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of the random halves.")
@format_option
def command(
    selection: Selection,
    other: str | None,
    other_source: str | None,
    file: str | None,
    data: str | None,
    device: str,
    subsets: int,
    seed: int,
    out: Output,
) -> None:
    """Compare the averaged predictions of two sets of members: agreement and total variation.

    OTHER is a citation, or a collection from which the same options select. --probabilities compares with a posterior
    mean in a file. Without these, the members at even positions are compared with the members at odd positions.
    """
    if other is None and other_source is not None:
        raise click.UsageError("--other-source needs an OTHER.")
    if other is not None and file is not None:
        raise click.UsageError("--probabilities stands in place of OTHER.")
    members = selection.load()
    from checkpoints_zoo.populations.independent_units import split_by_unit
    from checkpoints_zoo.populations.predictives import compare_predictives
    from checkpoints_zoo.predictions import predictions_from_probabilities

    images_text = data or members.description.dataset
    first_members: Collection
    second_members: Collection | Predictions
    if file is not None:
        first_members, second_members = members, predictions_from_probabilities(file, data=images_text)
        second_text = f"the mean in {file}"
    elif other is not None:
        first_members, second_members = members, load_other(selection, other, other_source)
        second_text = f"{len(second_members)} of {second_members.name}"
    else:
        first_members, second_members = split_by_unit(members)
        second_text = "the other half"
    out.say(f"{first_members.name}: {len(first_members)} members against {second_text}, on {images_text} …")
    result = compare_predictives(first_members, second_members, data, device=device, subsets=subsets, seed=seed)
    out.data(json.loads(result.to_json()), _figures_table(result), _explanation_text(result, file))


def _figures_table(comparison: PredictiveComparison) -> str:
    return table(
        [{"": FIGURE_LABELS[name], "value": as_text(x)} for name, x in comparison.figures.items()],
        right_aligned=["value"],
    )


def _explanation_text(comparison: PredictiveComparison, file: str | None) -> str:
    first_count, second_count = comparison.members
    sentence_start = (
        f"Measured now on {comparison.data.split(' ')[0]}, {comparison.inputs:,} inputs: the mean probabilities of"
    )
    second_text = f"those of {second_count}" if file is None else f"the mean in {file}"
    intervals_note = f"[ ]: 95 % jackknife intervals over the members{' of both' if file is None else ''}."
    if all(x.low is None for x in comparison.figures.values()):
        intervals_note = "There are no intervals for fewer than 3 members, or if both sets share a member."
    return f"{sentence_start} {first_count} members against {second_text}.\n{intervals_note}"
