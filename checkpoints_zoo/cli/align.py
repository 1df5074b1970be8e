"""`zoo-cli align`: members matched to one of them, and what that does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.measuring import png
from checkpoints_zoo.cli.output import Output, facts, output, table
from checkpoints_zoo.cli.selecting import Selection, selecting
from checkpoints_zoo.formats.text import in_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.populations.alignment_table import Alignment
    from checkpoints_zoo.populations.loss_barrier import Barriers

MOST = 16  # members that a table shows


def _reference(context: click.Context, parameter: click.Parameter, value: str) -> int | str:
    """Read what to align to; return a member's id, or "mean"."""
    if value == "mean" or value.isdecimal():
        return value if value == "mean" else int(value)
    raise click.BadParameter(f"{value!r} is neither a member's id nor mean.", context, parameter)


@click.command()
@selecting
@click.option("--to", default="0", callback=_reference, metavar="ID|mean", help="The member to align to, or mean.")
@click.option("--barrier", is_flag=True, help="Measure the loss on the lines between members as well.")
@click.option("--save", metavar="PARQUET", help="Write the permutations, one row a member; members.transform reads it.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw distances and transpositions.")
@output
def command(
    selection: Selection, to: int | str, barrier: bool, save: str | None, plot: str | None, out: Output
) -> None:
    """Align members by permuting their units, and say what that does.

    For each member the transpositions of its permutation, and its squared distance to the reference before and after.
    With --barrier the loss on the straight lines to the reference, before and after; batch norm statistics are
    estimated anew at each point.
    """
    if barrier and isinstance(to, str):
        raise click.UsageError("--barrier needs a member to draw lines from, not the mean.")
    from checkpoints_zoo.populations.alignment_table import alignment_of

    members = selection.load()
    out.say(f"{members.name}: {len(members)} members, {in_bytes(members.nbytes)}, aligned to {to} …")
    aligned = members.align(to)
    found = alignment_of(aligned)
    values: dict[str, Any] = json.loads(found.to_json())
    lines = None
    if barrier:
        from checkpoints_zoo.populations.loss_barrier import barriers

        lines = [barriers(view, to=int(to)) for view in (members, aligned)]
        values["barrier"] = {
            when: json.loads(line.to_json()) for when, line in zip(("before", "after"), lines, strict=True)
        }
    if save:
        out.say(f"permutations: {aligned.write_symmetries(save)}")
    if plot:
        from checkpoints_zoo.populations.alignment_table import alignment_figure

        out.say(f"picture: {alignment_figure(found, plot, lines)}")
    out.data(values, *_blocks(found, lines))


def _blocks(found: Alignment, lines: list[Barriers] | None) -> list[str]:
    rows = found.rows()
    shown = [
        {"member": r["member"], "transpositions": r["transpositions"], "squared distance": r["before"],
         "aligned": r["after"], "nearer by": f"{100 * (1 - r['after'] / r['before']) if r['before'] else 0:.1f} %"}
        for r in rows[:MOST]
    ]  # fmt: skip
    others = [r for r in rows if r["before"]]
    summary: dict[str, Any] = {
        "aligned to": found.to,
        "units": sum(found.sizes.values()),
        "transpositions of a random permutation": round(found.expected, 1),
    }
    if others:
        summary |= {
            "mean transpositions": _mean(r["transpositions"] for r in others),
            "mean squared distance": _mean(r["before"] for r in others),
            "mean squared distance, aligned": _mean(r["after"] for r in others),
        }
    for when, line in zip(("", ", aligned"), lines, strict=True) if lines else ():
        mean = line.mean
        interval = "" if mean.low is None else f" [{mean.low:.3f}, {mean.high:.3f}]"
        summary[f"mean loss barrier{when} (nats)"] = f"{mean.value:.3f}{interval}"
    rest = f"… and {len(rows) - MOST} more; --format json has all." if len(rows) > MOST else ""
    return [table(shown, right=["nearer by"]), rest, facts(summary)]


def _mean(values: Any) -> float:
    listed = list(values)
    return float(sum(listed) / len(listed))
