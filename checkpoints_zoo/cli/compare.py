"""`zoo-cli compare`: approximate posteriors against a population."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, facts, output
from checkpoints_zoo.cli.measure import PLACES, png

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.methods.comparing.prepared import RemainingWork

FRAMES = (".csv", ".parquet")


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Read names with commas between them, or "none"; return them."""
    return None if value is None else () if value == "none" else tuple(name.strip() for name in value.split(","))


def _frame(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check a table's name before anything is fitted; return it."""
    if value is not None and not value.lower().endswith(FRAMES):
        raise click.BadParameter(f"{value!r} ends neither in .csv nor in .parquet.", context, parameter)
    return value


def _draws(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Read LABEL=COLLECTION@SOURCE; return the name and the source of each label's collection."""
    found: dict[str, tuple[str, str]] = {}
    for value in values:
        label, given, rest = value.partition("=")
        name, at, source = rest.partition("@")
        if not (given and at and label and name and source) or label in found:
            raise click.BadParameter(f"{value!r} is no LABEL=COLLECTION@SOURCE, each label once.", context, parameter)
        found[label] = (name, source)
    return found


@click.command()
@selecting
@click.option(
    "--methods", callback=_names, metavar="A,B,…|none", help="Which; all that can be fitted here if not given."
)
@click.option(
    "--with", "others", multiple=True, callback=_draws, metavar="LABEL=NAME@SOURCE",
    help="Draws that you have, as a collection in a source, beside the methods.",
)  # fmt: skip
@click.option("--reference", metavar="NAME", help="The population to compare with, where NAME lies; NAME if not given.")
@click.option("--recipe", metavar="FILE.py[:NAME]", help="What NAME was trained by, where no recipe here has its name.")
@click.option("--data", metavar="IMAGES", help=f"Labelled images: {PLACES}; its own test set if not given.")
@click.option(
    "--ood",
    metavar="IMAGES|none",
    help="Images out of distribution, likewise; those usual for the data set if not given.",
)
@click.option(
    "--out", "folder", metavar="FOLDER", help="For draws and cells, to go on with; NAME-compared if not given."
)
@click.option("--runs", default=10, metavar="RUNS", help="Posteriors that each method is fitted to.")
@click.option("--draws", default=100, metavar="DRAWS", help="Draws of each run.")
@click.option("--permutations", default=999, metavar="B", help="Of the tests; p is 1/(1 + B) or more.")
@click.option("--search", is_flag=True, help="Search for each method's settings on held-out training images first.")
@click.option("--workers", type=int, metavar="N", help="Processes; one a core if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to fit and measure on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of fits, permutations and subsets.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw each figure against MMD and NS.")
@click.option("--json", "json_file", metavar="FILE", help="Write the JSON there too.")
@click.option("--latex", "latex_file", metavar="FILE", help="Write the table for LaTeX there too.")
@click.option("--table", "frame_file", metavar="FILE", callback=_frame, help="Write all figures, .csv or .parquet.")
@click.option("--dry-run", is_flag=True, help="Say what would be fitted and measured, and end.")
@output
def command(
    selection: Selection,
    methods: tuple[str, ...] | None,
    others: dict[str, tuple[str, str]],
    reference: str | None,
    recipe: str | None,
    data: str | None,
    ood: str | None,
    folder: str | None,
    draws: int,
    plot: str | None,
    json_file: str | None,
    latex_file: str | None,
    frame_file: str | None,
    dry_run: bool,
    out: Output,
    **options: Any,
) -> None:
    """Compare approximate posteriors with a population: MMD, NS, accuracy, calibration, OOD detection, diversity.

    Methods are fitted to NAME's recipe, several at once. What was fitted or measured before is read from --out: a run
    that was cut off goes on.
    """
    members = selection.load()
    from checkpoints_zoo.methods.comparing.study import prepare
    from checkpoints_zoo.training.recipes import choose_recipe

    prepared = prepare(
        members,
        methods,
        data,
        ood,
        out=folder,
        reference=None if reference is None else _load(selection, reference, selection.source),
        draws={label: _load(selection, name, source) for label, (name, source) in others.items()},
        recipe=None if recipe is None else choose_recipe(recipe),
        per_run=draws,
        say=out.say,
        **options,
    )
    if dry_run:
        todo = prepared.todo()
        out.data(asdict(todo), _todo(todo))
        return
    found = prepared.run()
    for path, write in (
        (json_file, found.write_json), (latex_file, found.write_latex), (frame_file, found.write_frame),
    ):  # fmt: skip
        if path is not None:
            out.say(f"table: {write(path)}")
    if plot:
        out.say(f"picture: {found.plot(plot)}")
    out.data(json.loads(found.to_json()), found.to_text())


def _load(selection: Selection, name: str, source: str | None) -> Collection:
    """Return all members of another collection of the same network."""
    return Selection(name, None, None, None, None, source, selection.architecture).load()


def _todo(todo: RemainingWork) -> str:
    return facts(
        {
            "to be fitted": list(todo.fits) or "nothing",
            "cells to be measured": len(todo.cells),
            "and those of methods to be fitted": "yes" if todo.fits else "none",
            "cells that are there": todo.found,
            "left out": [f"{name} ({reason})" for name, reason in todo.left_out.items()] or "nothing",
            **{f"draws of {name}": folder for name, folder in todo.folders.items()},
        }
    )
