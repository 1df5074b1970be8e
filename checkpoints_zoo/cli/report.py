"""`zoo-cli report`: every figure of a population on one page."""

from __future__ import annotations

from pathlib import Path

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.measure import EvaluationRequest, measurement_options
from checkpoints_zoo.cli.options import OutputFile
from checkpoints_zoo.formats.text import format_bytes


@click.command()
@measurement_options
@click.option(
    "-o", "--out", "path", type=OutputFile(".html", ".htm"), required=True, metavar="HTML", help="The page to write."
)
@format_option
def command(request: EvaluationRequest, path: Path, out: Output) -> None:
    """Write one HTML page with every figure of a population.

    Figures with intervals, the members, calibration, curves against ensemble size, out-of-distribution detection, pairs
    of members, symmetries and mass. The page needs no other file and no network. Without --ood, the images out of
    distribution for members trained on digits are photos; --ood none leaves these figures out. With --stored no weights
    are read, and the parts that need weights are left out.
    """
    from checkpoints_zoo.publishing.html_report import report_page
    from checkpoints_zoo.publishing.html_report.assembling import DEFAULT_IMAGES

    members = request.selection.load()
    data, ood, held_out = request.data_sets(members, DEFAULT_IMAGES if request.stored is None else None)
    page = report_page(
        members, data, ood, path=path, sizes=request.sizes, temperature=request.temperature, held_out=held_out,
        within=request.within, device=request.device, seed=request.seed, say=out.say,
    )  # fmt: skip
    page_values = page.values()
    has_missing_figures = any(part["left_out"] for part in page_values["parts"])
    part_rows = [
        {
            "part": part["title"],
            "figures": len(part["figures"]),
            "tables": len(part["tables"]),
            **({"left out": "; ".join(part["left_out"])} if has_missing_figures else {}),
        }
        for part in page_values["parts"]
    ]
    out.data(page_values, table(part_rows), f"{page.path}, {format_bytes(page_values['bytes'])}")
