"""`zoo-cli plot`: the picture of an ensemble."""

from __future__ import annotations

import click

from checkpoints_zoo.cli.measuring import Measurement, measuring, png
from checkpoints_zoo.cli.output import Output, output


@click.command()
@measuring
@click.option("-o", "--out", "path", required=True, metavar="PNG", callback=png, help="Where to draw to.")
@output
def command(measurement: Measurement, path: str, out: Output) -> None:
    """Measure an ensemble and draw the figures into a PNG.

    Reliability, accuracy and NLL against ensemble size, the members' accuracies, mutual information.
    """
    drawn = measurement.report(out).plot(path)
    out.data({"path": drawn}, str(drawn))
