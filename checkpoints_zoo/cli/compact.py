"""`zoo-cli compact` and `zoo-cli compact-table`: what a Gaussian over weights keeps of an ensemble."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.cli.measure import PLACES, png
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.populations.compact_posterior import Compact


ROWS = {
    "agreement": ("agreement (0..1)", 1), "total_variation": ("total variation (0..1)", 1),
    "sample_accuracy": ("accuracy of samples (%)", 100), "mean_accuracy": ("accuracy of the mean (%)", 100),
}  # fmt: skip


def _reference(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Read what members are aligned to, an id or "mean"; return it."""
    if value is None or value == "mean":
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a member's id nor mean.", context, parameter) from None


@click.command()
@selecting
@click.option("--data", metavar="IMAGES", help=f"Labelled images: {PLACES}; its own test set if none.")
@click.option("--to", callback=_reference, metavar="ID|mean", help="What to align to; the first member if not given.")
@click.option("--against", metavar="HMC", help="Draws of HMC, a collection of the same source: compare all with it.")
@click.option("--vi", metavar="VI", help="Draws of a variational posterior, likewise, beside --against.")
@click.option("--samples", type=int, metavar="N", help="Networks drawn; as many as members, at most 100, if not given.")
@click.option("--splits", default=20, metavar="N", help="Random halves of the members behind the intervals.")
@click.option("--statistics", metavar="IMAGES", help="Training images for statistics, likewise; its own if none.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the networks on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of the samples and the random halves.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw standard deviations, accuracies and pruning as well.")
@output
def compact_command(
    selection: Selection,
    data: str | None,
    to: int | str | None,
    against: str | None,
    vi: str | None,
    plot: str | None,
    out: Output,
    **options: Any,
) -> None:
    """Fit a Gaussian to the members before and after alignment; compare both with the ensemble.

    q_d is fitted to the members as they are, q_r to the members whose units were permuted to match a reference:
    mean and variance of every weight. Samples of both are compared with the ensemble, as in Xiao, Liu and Bamler 2023.
    With --against, the ensemble and Gaussians fitted to HMC's draws and to it are compared with HMC, as in their table.
    """
    if against is not None:
        return _against(selection, against, vi, data, to, plot, out, options)
    if vi is not None:
        raise click.UsageError("--vi needs --against, HMC's draws.")
    from checkpoints_zoo.methods.comparing.compact_comparison import compact

    members = selection.load()
    out.say(f"{members.name}: {len(members)} members, {format_bytes(members.nbytes)} …")
    found = compact(members, data, to=to, **options)
    if plot:
        out.say(f"picture: {found.plot(plot)}")
    out.data(found.values(), _paper(found), _halves(found), _meaning(found))


def _against(
    selection: Selection,
    against: str,
    vi: str | None,
    data: str | None,
    to: int | str | None,
    plot: str | None,
    out: Output,
    options: dict[str, Any],
) -> None:
    if plot is not None:
        raise click.UsageError("--plot draws no table of --against.")
    if isinstance(to, int):
        raise click.UsageError("--against aligns draws to the first of each, or with --to mean to their mean.")
    from checkpoints_zoo.methods.comparing.compact_comparison import compact

    ensemble, hmc = selection.load(), _beside(selection, against).load()
    drawn = None if vi is None else _beside(selection, vi).load()
    out.say(f"{ensemble.name}: {len(ensemble)} members against {len(hmc)} draws of {hmc.name} …")
    found = compact(ensemble, data, against=hmc, vi=drawn, to=to, **options)
    out.data(json.loads(found.to_json()), found.to_text())


def _beside(selection: Selection, name: str) -> Selection:
    """Select all of another collection of the same source."""
    return Selection(name, None, None, None, None, selection.source, selection.architecture)


def _paper(found: Compact) -> str:
    columns = {"members": found.table["members"], "q_d": found.table["q_d"], "q_r": found.table["q_r"]}
    rows = [
        {"": text} | {of: as_text(x[row], scale) if row in x else "-" for of, x in columns.items()}
        for row, (text, scale) in ROWS.items()
    ]
    gain = f"Alignment changes the accuracy of the mean by {as_text(found.gain, 100)} points."
    return f"{table(rows, right=list(columns))}\n\n{gain}"


def _halves(found: Compact) -> str:
    if not found.held_out:
        return ""
    columns = {"members": found.held_out["members"], "q_d": found.held_out["q_d"], "q_r": found.held_out["q_r"]}
    rows = [
        {"one half against the other": ROWS[row][0]} | {of: as_text(x[row]) for of, x in columns.items()}
        for row in ("agreement", "total_variation")
    ]
    return table(rows, right=list(columns))


def _meaning(found: Compact) -> str:
    lines = [
        f"Measured now on {found.data.split(' ')[0]}, {found.inputs:,} inputs; {found.samples} samples of each,"
        f" aligned to {found.to}."
    ]
    if found.statistics:
        source = found.statistics.split(" ")[0]
        lines.append(f"Running statistics of means and samples: from {found.statistics_images:,} images of {source}.")
    lines.append(
        "Agreement and total variation: the averaged predictions of the members, or of samples, against the ensemble's."
    )
    if found.held_out:
        lines.append("[ ]: 95 % jackknife intervals over members; of halves, where 95 % of the splits fall.")
    else:
        lines.append("Fewer than 3 members say nothing about intervals.")
    return "\n".join(lines)


def _ends(ending: str) -> Callable[[click.Context, click.Parameter, str | None], Path | None]:
    """Return what checks that a file's name has an ending, before anything is fitted."""

    def checked(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
        if value is not None and not value.lower().endswith(ending):
            raise click.BadParameter(f"{value!r} does not end in {ending}.", context, parameter)
        return None if value is None else Path(value)

    return checked


@click.command()
@click.argument("recipe", metavar="RECIPE")
@click.option("--out", "folder", metavar="FOLDER", help="Where draws are kept; RECIPE-compared if not given.")
@click.option("--runs", default=10, metavar="N", help="Chains of HMC, and fits of VI.")
@click.option("--draws", default=100, metavar="N", help="Draws of each, and members of the ensemble.")
@click.option("--steps", default=50, metavar="N", help="Leapfrog steps of HMC from draw to draw, on average.")
@click.option("--warmup", default=100, metavar="N", help="Trajectories of HMC before the first draw.")
@click.option("--samples", type=int, metavar="N", help="Networks drawn from each Gaussian; at most 100 if not given.")
@click.option("--splits", default=20, metavar="N", help="Random halves of runs and members behind the intervals.")
@click.option("--to", type=click.Choice(["mean"]), metavar="mean", help="Align draws to their mean, not to the first.")
@click.option("--workers", type=int, metavar="N", help="Processes; one a core if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to fit and run the networks on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of fits, samples and random halves.")
@click.option("--json", "json_path", metavar="JSON", callback=_ends(".json"), help="Write the JSON there too.")
@click.option("--latex", metavar="TEX", callback=_ends(".tex"), help="Write the table for LaTeX there too.")
@output
def compact_table_command(
    recipe: str,
    folder: str | None,
    steps: int,
    warmup: int,
    json_path: Path | None,
    latex: Path | None,
    out: Output,
    **options: Any,
) -> None:
    """Fit HMC and VI to a recipe, train an ensemble by it, and compare all with HMC, before and after alignment.

    The table is that of Xiao, Liu and Bamler 2023: q_d is a Gaussian fitted to draws as they are, q_r one fitted to
    draws that were aligned to one of them. HMC and VI are of the posterior at temperature 1. Of draws at hand,
    `zoo-cli compact NAME --against HMC --vi VI` gives the same.
    """
    from checkpoints_zoo.methods.comparing.compact_comparison import HMC, fit_and_compare
    from checkpoints_zoo.training.recipes import choose_recipe

    known = choose_recipe(recipe)
    hmc = replace(HMC, steps=steps, warmup=warmup)
    found = fit_and_compare(known, folder or f"{known.name}-compared", hmc=hmc, say=out.say, **options)
    for path in (json_path, latex):
        if path is not None:
            out.say(f"table: {found.write(path)}")
    out.data(json.loads(found.to_json()), found.to_text())
