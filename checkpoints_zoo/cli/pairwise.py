"""`zoo-cli pairwise`: what every pair of members has in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.cli.measure import PLACES, png
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.populations.pairwise_information import Pairwise

NAMES = {
    "mi_id": "mutual information, ID (nats)", "disagreement": "disagreement, ID (0..1)",
    "mi_ood": "mutual information, OOD (nats)", "disagreement_ood": "disagreement, OOD (0..1)",
    "correlation": "correlation of ID and OOD information",
}  # fmt: skip
ENDINGS = (".parquet", ".csv")


def _frame(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check a table's name before anything is measured; return it."""
    if value is not None and not value.lower().endswith(ENDINGS):
        raise click.BadParameter(f"{value!r} ends neither in .parquet nor in .csv.", context, parameter)
    return value


@click.command()
@selecting
@click.option("--data", metavar="IMAGES", help=f"Images in distribution: {PLACES}; its own test set if none.")
@click.option("--ood", metavar="IMAGES", help="Images out of distribution, likewise, such as photos.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of the members that are left out for the intervals.")
@click.option(
    "--stored", metavar="SOURCE", help="Compare predictions stored there: --data and --ood name sets (digits-test)."
)
@click.option("--plot", metavar="PNG", callback=png, help="Draw the distributions over pairs, and all pairs.")
@click.option("-o", "--out", "path", metavar="FILE", callback=_frame, help="Write one row a pair, .parquet or .csv.")
@output
def command(
    selection: Selection,
    data: str | None,
    ood: str | None,
    device: str,
    seed: int,
    stored: str | None,
    plot: str | None,
    path: str | None,
    out: Output,
) -> None:
    """Compare every pair of members: mutual information ID and OOD, their correlation, disagreement.

    Means over all pairs come with intervals over the members. --out writes the pairs themselves.
    """
    members = selection.load()
    from checkpoints_zoo.populations.pairwise_information import pairwise

    if stored is None:
        on = f"{data or members.description.dataset}{f' against {ood}' if ood else ''}"
        out.say(f"{members.name}: {len(members)} members, {format_bytes(members.nbytes)}, on {on} …")
        found = pairwise(members, data, ood, device=device, seed=seed)
    else:
        from checkpoints_zoo.predictions import predictions_of

        name = data or f"{members.description.dataset}-test"
        out.say(f"{members.name}: stored predictions of {len(members)} members, {name} …")
        inside = predictions_of(members, name, source=stored)
        outside = None if ood is None else predictions_of(members, ood, source=stored)
        found = pairwise(inside, None, outside, device=device, seed=seed)
    if path:
        out.say(f"pairs: {found.write(path)}")
    if plot:
        out.say(f"picture: {found.plot(plot)}")
    out.data(json.loads(found.to_json()), _figures(found), _meaning(found))


def _figures(found: Pairwise) -> str:
    spread = found.to_frame()
    rows = []
    for name, x in found.figures.items():
        least, most = (f"{spread[name].agg(f):.4g}" if name in spread else "-" for f in ("min", "max"))
        rows.append({"": NAMES[name], "all pairs": as_text(x), "lowest pair": least, "highest pair": most})
    return table(rows, right=list(rows[0])[1:])


def _meaning(found: Pairwise) -> str:
    on = f"{found.data.split(' ')[0]}, {found.inside.inputs:,} inputs"
    if found.outside is not None:
        on += f"; OOD: {found.ood.split(' ')[0]}, {found.outside.inputs:,} inputs"
    pairs = f"{len(found):,} pair{'s' * (len(found) != 1)} of {len(found.ids):,} members"
    meaning = "Means over pairs; [ ]: 95 % intervals by a jackknife over members, as pairs share members."
    if len(found.ids) < 3:
        meaning = "Fewer than 3 members say nothing about intervals."
    return f"{pairs}, measured now on {on}.\n{meaning}"
