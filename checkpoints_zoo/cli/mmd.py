"""`zoo-cli mmd`: how far two sets of members are apart in weight space."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.cli.measure import png
from checkpoints_zoo.formats.selection import parse_citation
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.populations.discrepancy import MMD, NS

NAMES = {"mmd2": "MMD²", "p_value": "p", "ns_mmd2": "NS", "ns_p_value": "p of NS"}


def _word(context: click.Context, parameter: click.Parameter, value: str) -> str | None:
    """Read a word or "none"; return it, None for that."""
    return None if value == "none" else value


@click.command()
@selecting
@click.argument("other", metavar="[OTHER]", required=False)
@click.option("--other-source", metavar="SOURCE", help="Where OTHER lies; where NAME does if not given.")
@click.option("--as-stored", is_flag=True, help="Leave the symmetries in: no second comparison without them.")
@click.option(
    "--scale", type=click.Choice(["unit-norm", "none"]), default="unit-norm", metavar="unit-norm|none", callback=_word,
    help="How scales are removed.",
)  # fmt: skip
@click.option(
    "--permute", type=click.Choice(["first", "max", "norm", "none"]), default="first", metavar="first|max|norm|none",
    callback=_word, help="What units are sorted by: their first weight, the largest, or their norm.",
)  # fmt: skip
@click.option("--streams", is_flag=True, help="Sort the units of residual streams too.")
@click.option(
    "--groups", type=click.Choice(["layer", "tensor"]), default="layer", metavar="layer|tensor",
    help="What is compared beside all weights together.",
)  # fmt: skip
@click.option("--permutations", default=999, metavar="B", help="Of the test; p is 1/(1 + B) or more.")
@click.option("--device", default="cpu", metavar="DEVICE", help="Where to compute, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of the permutations.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw MMD² and p-values, one layer a row.")
@output
def command(
    selection: Selection,
    other: str | None,
    other_source: str | None,
    as_stored: bool,
    scale: str | None,
    permute: str | None,
    streams: bool,
    plot: str | None,
    out: Output,
    **options: Any,
) -> None:
    """Compare the weights of two sets of members: MMD² by layer, before and after removing symmetries.

    OTHER is a collection, from which the same options select, or a citation. Without it, NAME's members at even
    positions are compared with those at odd ones. A permutation test gives each layer a p-value.
    """
    if other is None and other_source is not None:
        raise click.UsageError("--other-source needs an OTHER.")
    first = selection.load()
    second = None if other is None else _other(selection, other, other_source)
    size = format_bytes(sum(c.nbytes for c in (first, second) if c is not None))
    against = "their other half" if second is None else f"{len(second)} of {second.name}"
    out.say(f"{first.name}: {len(first)} members against {against}, {size} …")
    from checkpoints_zoo.populations.discrepancy import mmd, ns

    found: MMD | NS
    if as_stored:
        found = mmd(first, second, **options)
    else:
        found = ns(first, second, scale=scale, permute=permute, streams=streams, **options)
    if plot:
        out.say(f"picture: {found.plot(plot)}")
    out.data(json.loads(found.to_json()), _groups(found), _meaning(found, halves=second is None))


def _other(selection: Selection, name: str, source: str | None) -> Collection:
    """Return the second set of members."""
    if parse_citation(name):
        return Selection(name, None, None, None, None, source).load()
    return replace(selection, name=name, source=source or selection.source).load()


def _groups(found: MMD | NS) -> str:
    rows = []
    for row in found.rows():
        texts = {NAMES[key]: f"{row[key]:.3g}" for key in NAMES if key in row}
        rows.append({"layer": row["group"], "weights": f"{row['weights']:,}"} | texts)
    return table(rows, right=list(rows[0])[1:])


def _meaning(found: MMD | NS, halves: bool) -> str:
    from checkpoints_zoo.populations.discrepancy import MMD

    before = found if isinstance(found, MMD) else found.mmd
    one, other = before.members
    rule = f": the {one} at even positions against the {other} at odd ones" if halves else f": {one} against {other}"
    lines = [
        f"Members{rule}. MMD² is unbiased (0 on average where both sets are draws of one distribution), the mean over"
        f" {len(before['all'].kernels)} kernels."
    ]
    if not isinstance(found, MMD):
        words = [f"scale {found.scale}" if found.scale else "", f"permute {found.permute}" if found.permute else ""]
        removed = ", ".join(w for w in [*words, "streams" if found.streams else ""] if w) or "none"
        lines.append(f"NS: the same with symmetries removed ({removed}).")
    lines.append(
        f"p: share of {before.permutations:,} permutations at least as far apart; not adjusted for many layers."
    )
    return "\n".join(lines)
