"""`zoo-cli compact` and `zoo-cli compact-table`: Gaussians over weights, compared with an ensemble."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.options import (
    IMAGES_HELP,
    OutputFile,
    OutputFolder,
    Selection,
    name_and_size,
    network_options,
    parse_reference,
)
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS
from checkpoints_zoo.evaluation.tables import as_text

if TYPE_CHECKING:
    from checkpoints_zoo.populations.compact_posterior import Compact

ROW_LABELS_AND_SCALES = {
    "agreement": ("agreement (0..1)", 1), "total_variation": ("total variation (0..1)", 1),
    "sample_accuracy": ("accuracy of samples (%)", 100), "mean_accuracy": ("accuracy of the mean (%)", 100),
}  # fmt: skip


@click.command()
@network_options
@click.option(
    "--data", metavar="IMAGES", help=f"Labelled images: {IMAGES_HELP}; the collection's test set if not given."
)
@click.option(
    "--to", callback=parse_reference, metavar="ID|mean", help="What to align to; the first member if not given."
)
@click.option(
    "--against", metavar="HMC", help="A collection of HMC's draws in the same source: compare everything with it."
)
@click.option(
    "--vi", metavar="VI", help="With --against: a collection of a variational posterior's draws in the same source."
)
@click.option(
    "--samples",
    type=int,
    metavar="N",
    help="Networks drawn from each Gaussian; the number of members, at most 100, if not given.",
)
@click.option("--splits", default=20, metavar="N", help="Random halves of the members behind the intervals.")
@click.option(
    "--statistics",
    metavar="IMAGES",
    help="Training images for batch norm statistics; the collection's own if not given.",
)
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the networks on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of the samples and the random halves.")
@click.option(
    "--plot",
    type=OutputFile(*PICTURE_FORMATS),
    metavar="PICTURE",
    help="Draw standard deviations, accuracies and pruning.",
)
@format_option
def compact_command(
    selection: Selection,
    data: str | None,
    to: int | str | None,
    against: str | None,
    vi: str | None,
    plot: Path | None,
    out: Output,
    **options: Any,
) -> None:
    """Fit a Gaussian to the members before and after alignment; compare both with the ensemble.

    q_d is fitted to the members as they are, q_r to the members whose units were permuted to match a reference:
    mean and variance of every weight. Samples of both are compared with the ensemble, as in Xiao, Liu and Bamler 2023.
    With --against, the ensemble and the Gaussians fitted to HMC's draws and to the ensemble are compared with HMC, as
    in the table of that paper.
    """
    if against is not None:
        return _compare_with_hmc(selection, against, vi, data, to, plot, out, options)
    if vi is not None:
        raise click.UsageError("--vi needs --against, a collection of HMC's draws.")
    members = selection.load()
    from checkpoints_zoo.methods.comparing.compact_comparison import compact

    out.say(f"{name_and_size(members)} …")
    result = compact(members, data, to=to, **options)
    if plot:
        out.say(f"picture: {result.plot(plot)}")
    out.data(result.values(), _gaussians_table(result), _table_of_halves(result), _explanation_text(result))


def _compare_with_hmc(
    selection: Selection,
    hmc_name: str,
    vi_name: str | None,
    data: str | None,
    align_to: int | str | None,
    picture_path: Path | None,
    out: Output,
    compact_options: dict[str, Any],
) -> None:
    if picture_path is not None:
        raise click.UsageError("--plot can't draw a comparison with --against.")
    if isinstance(align_to, int):
        raise click.UsageError(
            "--to ID can't be combined with --against: draws are aligned to the first of each, or to their mean."
        )
    ensemble, hmc = selection.load(), selection.other_collection(hmc_name).load()
    vi_draws = None if vi_name is None else selection.other_collection(vi_name).load()
    from checkpoints_zoo.methods.comparing.compact_comparison import compact

    out.say(f"{ensemble.name}: {len(ensemble)} members against {len(hmc)} draws of {hmc.name} …")
    result = compact(ensemble, data, against=hmc, vi=vi_draws, to=align_to, **compact_options)
    out.data(json.loads(result.to_json()), result.to_text())


def _gaussians_table(comparison: Compact) -> str:
    columns = {name: comparison.table[name] for name in ("members", "q_d", "q_r")}
    rows = [
        {"": label} | {name: as_text(column[key], scale) if key in column else "-" for name, column in columns.items()}
        for key, (label, scale) in ROW_LABELS_AND_SCALES.items()
    ]
    gain_text = f"Alignment changes the accuracy of the mean by {as_text(comparison.gain, 100)} points."
    return f"{table(rows, right_aligned=list(columns))}\n\n{gain_text}"


def _table_of_halves(comparison: Compact) -> str:
    if not comparison.held_out:
        return ""
    columns = {name: comparison.held_out[name] for name in ("members", "q_d", "q_r")}
    rows = [
        {"one half against the other": ROW_LABELS_AND_SCALES[key][0]}
        | {name: as_text(column[key]) for name, column in columns.items()}
        for key in ("agreement", "total_variation")
    ]
    return table(rows, right_aligned=list(columns))


def _explanation_text(comparison: Compact) -> str:
    lines = [
        f"Measured now on {comparison.data.split(' ')[0]}, {comparison.inputs:,} inputs; "
        f"{comparison.samples} samples of each, aligned to {comparison.to}."
    ]
    if comparison.statistics:
        image_set = comparison.statistics.split(" ")[0]
        lines.append(
            f"Running statistics of means and samples: from {comparison.statistics_images:,} images of {image_set}."
        )
    lines.append(
        "Agreement and total variation compare the averaged predictions of the members, or of samples, with the"
        " ensemble's."
    )
    if comparison.held_out:
        lines.append("[ ]: 95 % jackknife intervals over members; for halves, the range of 95 % of the splits.")
    else:
        lines.append("There are no intervals for fewer than 3 members.")
    return "\n".join(lines)


@click.command()
@click.argument("recipe", metavar="RECIPE")
@click.option(
    "--out", "folder", type=OutputFolder(), metavar="DIR", help="Where draws are stored; RECIPE-compared if not given."
)
@click.option("--runs", default=10, metavar="N", help="Chains of HMC, and fits of VI.")
@click.option("--draws", default=100, metavar="N", help="Draws of each chain and fit, and members of the ensemble.")
@click.option("--steps", default=50, metavar="N", help="Leapfrog steps of HMC between two draws, on average.")
@click.option("--warmup", default=100, metavar="N", help="Trajectories of HMC before the first draw.")
@click.option("--samples", type=int, metavar="N", help="Networks drawn from each Gaussian; at most 100 if not given.")
@click.option("--splits", default=20, metavar="N", help="Random halves of runs and members behind the intervals.")
@click.option("--to", type=click.Choice(["mean"]), metavar="mean", help="Align draws to their mean, not to the first.")
@click.option("--workers", type=int, metavar="N", help="Processes; one a core if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to fit and run the networks on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of fits, samples and random halves.")
@click.option("--json", "json_path", metavar="JSON", type=OutputFile(".json"), help="Write the result as JSON.")
@click.option("--latex", metavar="TEX", type=OutputFile(".tex"), help="Write the table for LaTeX.")
@format_option
def compact_table_command(
    recipe: str,
    folder: Path | None,
    steps: int,
    warmup: int,
    json_path: Path | None,
    latex: Path | None,
    out: Output,
    **options: Any,
) -> None:
    """Fit HMC and VI to a recipe, train an ensemble by it, and compare all with HMC, before and after alignment.

    The table is that of Xiao, Liu and Bamler 2023: q_d is a Gaussian fitted to draws as they are, q_r one fitted to
    draws that were aligned to one of them. HMC and VI approximate the posterior at temperature 1. If you have the draws
    already, `zoo-cli compact NAME --against HMC --vi VI` gives the same table.
    """
    from checkpoints_zoo.methods.comparing.compact_comparison import DEFAULT_HMC, fit_and_compare
    from checkpoints_zoo.training.recipes import recipe_from_options

    chosen_recipe = recipe_from_options(recipe)
    hmc_method = replace(DEFAULT_HMC, steps=steps, warmup=warmup)
    result = fit_and_compare(
        chosen_recipe, folder or f"{chosen_recipe.name}-compared", hmc=hmc_method, say=out.say, **options
    )
    for table_path in (json_path, latex):
        if table_path is not None:
            out.say(f"table: {result.write(table_path)}")
    out.data(json.loads(result.to_json()), result.to_text())
