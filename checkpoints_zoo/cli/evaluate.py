"""`zoo-cli evaluate`: the figures of an ensemble."""

from __future__ import annotations

import click

from checkpoints_zoo.cli.measuring import Measurement, few, measuring, png, table_of, values_of
from checkpoints_zoo.cli.output import Output, output


@click.command()
@measuring
@click.option("--plot", metavar="PNG", callback=png, help="Draw the figures as well.")
@output
def command(measurement: Measurement, plot: str | None, out: Output) -> None:
    """Measure an ensemble: accuracy, calibration, diversity, out-of-distribution detection.

    Figures come with intervals over the members. Without --sizes a table shows at most three of them; --format
    json has all.
    """
    report = measurement.report(out)
    if plot:
        out.say(f"picture: {report.plot(plot)}")
    out.data(values_of(report), table_of(report, report.curve if measurement.sizes else few(report.curve)))
