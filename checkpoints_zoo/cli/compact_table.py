"""`zoo-cli compact-table`: HMC, an ensemble and VI, fitted to a recipe and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.cli.output import Output, output

Callback = Callable[[click.Context, click.Parameter, str | None], Path | None]


def _ends(ending: str) -> Callback:
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
def command(
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
    from checkpoints_zoo.training.recipes import chosen

    known = chosen(recipe)
    hmc = replace(HMC, steps=steps, warmup=warmup)
    found = fit_and_compare(known, folder or f"{known.name}-compared", hmc=hmc, say=out.say, **options)
    for path in (json_path, latex):
        if path is not None:
            out.say(f"table: {found.write(path)}")
    out.data(json.loads(found.to_json()), found.to_text())
