"""`zoo-cli report`: every figure of a population on one page."""

from __future__ import annotations

import click

from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.cli.measure import Measurement, measuring
from checkpoints_zoo.formats.text import in_bytes

NONE = "none"


def _page(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Check the page's name before anything is measured; return it."""
    if not value.lower().endswith((".html", ".htm")):
        raise click.BadParameter(f"{value!r} does not end in .html.", context, parameter)
    return value


@click.command()
@measuring
@click.option("-o", "--out", "path", required=True, metavar="HTML", callback=_page, help="Where to write the page to.")
@output
def command(measurement: Measurement, path: str, out: Output) -> None:
    """Write one HTML page with every figure of a population.

    Figures with intervals, the members, calibration, curves against ensemble size, out-of-distribution detection, pairs
    of members, symmetries and mass. The page needs no other file and no network. Without --ood, members trained on
    digits are shown photos; --ood none leaves these figures out. With --stored no weights are read: the parts that need
    them say so.
    """
    from checkpoints_zoo.publishing.html_report import report_page
    from checkpoints_zoo.publishing.html_report.assembling import DEFAULT

    asked = measurement
    members = asked.selection.load()
    default = DEFAULT if asked.stored is None else None
    data, ood, held_out = asked.shown(members, {None: default, NONE: None}.get(asked.ood, asked.ood))
    page = report_page(
        members, data, ood, path=path, sizes=asked.sizes, temperature=asked.temperature, held_out=held_out,
        within=asked.within, device=asked.device, seed=asked.seed, say=out.say,
    )  # fmt: skip
    values = page.values()
    rows = [
        {
            "part": p["title"],
            "figures": len(p["figures"]),
            "tables": len(p["tables"]),
            "left out": "; ".join(p["left_out"]),
        }
        for p in values["parts"]
    ]
    out.data(values, table(rows), f"{page.path}, {in_bytes(values['bytes'])}")
