"""`zoo-cli plot`: the picture of an ensemble."""

from __future__ import annotations

import click

from checkpoints_zoo.cli.measuring import Measurement, measuring, png
from checkpoints_zoo.cli.output import Output, output


@click.command()
@measuring
@click.option(
    "--figures",
    metavar="NAME,…",
    help="Draw these over ensemble size instead, such as brier,auroc; all draws every one.",
)
@click.option("-o", "--out", "path", required=True, metavar="PNG", callback=png, help="Where to draw to.")
@output
def command(measurement: Measurement, figures: str | None, path: str, out: Output) -> None:
    """Measure an ensemble and draw the figures into a PNG.

    Reliability, accuracy and NLL against ensemble size, the members' accuracies, mutual information.
    """
    report = measurement.report(out)
    if figures is None:
        drawn = report.plot(path)
    else:
        drawn = report.plot_curves(path, None if figures == "all" else [name.strip() for name in figures.split(",")])
    out.data({"path": drawn}, str(drawn))
