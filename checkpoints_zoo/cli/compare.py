"""`zoo-cli compare`: approximate posteriors compared with a population."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option
from checkpoints_zoo.cli.options import IMAGES_HELP, OutputFile, OutputFolder, Selection, network_options
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS

if TYPE_CHECKING:
    from checkpoints_zoo.methods.comparing.prepared import RemainingWork


def _parse_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Parse names separated by commas, or "none"; return the names."""
    return None if value is None else () if value == "none" else tuple(name.strip() for name in value.split(","))


def _parse_draws(
    context: click.Context, parameter: click.Parameter, option_values: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Parse LABEL=NAME@SOURCE; return the name and the source of each label's collection."""
    address_of_label: dict[str, tuple[str, str]] = {}
    for option_value in option_values:
        label, _, collection_address = option_value.partition("=")
        name, _, source = collection_address.partition("@")
        if not (label and name and source) or label in address_of_label:
            raise click.BadParameter(
                f"{option_value!r} is no LABEL=NAME@SOURCE with a label of its own.", context, parameter
            )
        address_of_label[label] = (name, source)
    return address_of_label


def _split_source(collection: str) -> tuple[str, str | None]:
    """Split NAME@SOURCE; return the name, and the source or None. A citation, which begins with its source, is no such
    pair."""
    name, _, source = collection.partition("@")
    return (collection, None) if "://" in name or "#" in source else (name, source or None)


@click.command()
@network_options
@click.option(
    "--methods",
    callback=_parse_names,
    metavar="A,B,…|none",
    help="Methods to fit; all whose packages are installed if not given.",
)
@click.option(
    "--with", "address_of_label", multiple=True, callback=_parse_draws, metavar="LABEL=NAME@SOURCE",
    help="A collection of draws that you have, compared like a method; may be given again.",
)  # fmt: skip
@click.option(
    "--reference",
    metavar="NAME[@SOURCE]",
    help="The population to compare with, in the same source if none is given; the members of NAME if left out.",
)
@click.option(
    "--recipe", metavar="FILE.py[:NAME]", help="The recipe that trained NAME, if no recipe of the package has its name."
)
@click.option(
    "--data", metavar="IMAGES", help=f"Labelled images: {IMAGES_HELP}; the collection's test set if not given."
)
@click.option(
    "--ood",
    metavar="IMAGES|none",
    help="Images out of distribution, likewise; the usual images for the data set if not given.",
)
@click.option(
    "--out",
    "folder",
    type=OutputFolder(),
    metavar="DIR",
    help="Where draws and measurements are stored and found again; NAME-compared if not given.",
)
@click.option("--runs", default=10, metavar="RUNS", help="Independent fits of each method.")
@click.option("--draws", default=100, metavar="DRAWS", help="Draws of each run.")
@click.option("--permutations", default=999, metavar="B", help="Permutations of the tests; p is 1/(1 + B) or more.")
@click.option("--search", is_flag=True, help="Search for each method's settings on held-out training images first.")
@click.option("--workers", type=int, metavar="N", help="Processes; one a core if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to fit and measure on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of fits, permutations and subsets.")
@click.option(
    "--plot", type=OutputFile(*PICTURE_FORMATS), metavar="PICTURE", help="Draw each figure against MMD and NS."
)
@click.option(
    "--page", type=OutputFile(".html", ".htm"), metavar="HTML",
    help="Write a leaderboard; what logits determine is measured again, from the logits in --out.",
)  # fmt: skip
@click.option("--json", "json_file", type=OutputFile(".json"), metavar="JSON", help="Write the result as JSON.")
@click.option("--latex", "latex_file", type=OutputFile(".tex"), metavar="TEX", help="Write the table for LaTeX.")
@click.option(
    "--table",
    "frame_file",
    type=OutputFile(".csv", ".parquet"),
    metavar="FILE",
    help="Write all figures, .csv or .parquet.",
)
@click.option("--dry-run", is_flag=True, help="List what would be fitted and measured, and stop.")
@format_option
def command(
    selection: Selection,
    methods: tuple[str, ...] | None,
    address_of_label: dict[str, tuple[str, str]],
    reference: str | None,
    recipe: str | None,
    data: str | None,
    ood: str | None,
    folder: Path | None,
    draws: int,
    plot: Path | None,
    page: Path | None,
    json_file: Path | None,
    latex_file: Path | None,
    frame_file: Path | None,
    dry_run: bool,
    out: Output,
    **options: Any,
) -> None:
    """Compare approximate posteriors with a population: MMD, NS, agreement, calibration, OOD detection, diversity.

    Methods are fitted to NAME's recipe, several at a time. Earlier fits and measurements are read from --out: an
    interrupted run continues.
    """
    members = selection.load()
    from checkpoints_zoo.methods.comparing.study import prepare_comparison
    from checkpoints_zoo.training.recipes import recipe_from_options

    prepared = prepare_comparison(
        members,
        methods,
        data,
        ood,
        out=folder,
        reference=None if reference is None else selection.other_collection(*_split_source(reference)).load(),
        draws={
            label: selection.other_collection(name, source).load() for label, (name, source) in address_of_label.items()
        },
        recipe=None if recipe is None else recipe_from_options(recipe),
        per_run=draws,
        say=out.say,
        **options,
    )
    if dry_run:
        remaining_work = prepared.remaining_work()
        out.data(asdict(remaining_work), _remaining_work_text(remaining_work))
        return
    result = prepared.run(from_logits=page is not None)
    for table_path, write_table in (
        (json_file, result.write_json), (latex_file, result.write_latex), (frame_file, result.write_frame),
    ):  # fmt: skip
        if table_path is not None:
            out.say(f"table: {write_table(table_path)}")
    if page:
        from checkpoints_zoo.publishing.html_report import leaderboard_page

        out.say(f"page: {leaderboard_page(result, page).path}")
    if plot:
        out.say(f"picture: {result.plot(plot)}")
    out.data(json.loads(result.to_json()), result.to_text())


def _remaining_work_text(remaining_work: RemainingWork) -> str:
    return fact_lines(
        {
            "to be fitted": list(remaining_work.fits) or "nothing",
            "cells to be measured": len(remaining_work.cells),
            "and those of methods to be fitted": "yes" if remaining_work.fits else "none",
            "cells that are there": remaining_work.found,
            "left out": [f"{name} ({reason})" for name, reason in remaining_work.left_out.items()] or "nothing",
            **{f"draws of {name}": draws_folder for name, draws_folder in remaining_work.folders.items()},
        }
    )
