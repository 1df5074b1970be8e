"""`zoo-cli align`: members aligned by the symmetries of their network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option, table
from checkpoints_zoo.cli.options import OutputFile, Selection, name_and_size, network_options, parse_reference
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS

if TYPE_CHECKING:
    from checkpoints_zoo.populations.alignment_table import Alignment
    from checkpoints_zoo.populations.loss_barrier import Barriers

LARGEST_ROW_COUNT = 16  # members in a table


@click.command()
@network_options
@click.option(
    "--to", callback=parse_reference, metavar="ID|mean", help="Member to align to, or mean; the first if not given."
)
@click.option(
    "--using",
    metavar="KIND",
    help="Symmetries of a network with attention in use: units, heads, matrices (inside heads) or streams, each with "
    "those before it; all if not given.",
)
@click.option("--barrier", is_flag=True, help="Measure the loss on the lines between members as well.")
@click.option(
    "--save",
    type=OutputFile(".parquet"),
    metavar="PARQUET",
    help="Write the symmetries, one row a member, which members.transform reads.",
)
@click.option("--plot", type=OutputFile(*PICTURE_FORMATS), metavar="PICTURE", help="Draw distances and transpositions.")
@format_option
def align_command(
    selection: Selection,
    to: int | str | None,
    using: str | None,
    barrier: bool,
    save: Path | None,
    plot: Path | None,
    out: Output,
) -> None:
    """Align members by permuting their units, and show the permutations and distances.

    For each member: the transpositions of its permutation, and its squared distance to the reference before and after.
    Networks with attention are aligned by the matrices inside heads and by rotations of residual streams as well.
    --barrier adds the loss on the straight lines to the reference, before and after; batch norm statistics are
    estimated anew at each point.
    """
    if barrier and isinstance(to, str):
        raise click.UsageError("--barrier needs --to ID: lines start at a member, not at the mean.")
    members = selection.load()
    from checkpoints_zoo.populations.alignment_table import measure_alignment

    if to is None and len(members):
        to = members.ids[0]
    out.say(f"{name_and_size(members)}, aligned to {to} …")
    aligned = members.align(to, using=using)
    result = measure_alignment(aligned)
    values: dict[str, Any] = json.loads(result.to_json())
    barriers = None
    if barrier:
        from checkpoints_zoo.populations.loss_barrier import barrier as measure_barrier

        barriers = [measure_barrier(view, to=to if isinstance(to, int) else None) for view in (members, aligned)]
        values["barrier"] = {
            stage: json.loads(barriers_of_view.to_json())
            for stage, barriers_of_view in zip(("before", "after"), barriers, strict=True)
        }
    if save:
        out.say(f"symmetries: {aligned.write_symmetries(save)}")
    if plot:
        out.say(f"picture: {result.plot(plot, barriers)}")
    out.data(values, *_alignment_blocks(result, barriers))


def _alignment_blocks(alignment: Alignment, barriers: list[Barriers] | None) -> list[str]:
    rows = alignment.rows()
    table_rows = [
        {"member": row["member"], "transpositions": row["transpositions"], "squared distance": row["before"],
         "aligned": row["after"],
         "nearer by": f"{100 * (1 - row['after'] / row['before']) if row['before'] else 0:.1f} %"}
        for row in rows[:LARGEST_ROW_COUNT]
    ]  # fmt: skip
    moved_rows = [row for row in rows if row["before"]]
    summary: dict[str, Any] = {
        "aligned to": alignment.to,
        "units": sum(alignment.sizes.values()),
        "transpositions of a random permutation": round(alignment.expected, 1),
    }
    if moved_rows:
        summary |= {
            "mean transpositions": _mean(row["transpositions"] for row in moved_rows),
            "mean squared distance": _mean(row["before"] for row in moved_rows),
            "mean squared distance, aligned": _mean(row["after"] for row in moved_rows),
        }
    for stage_text, barriers_of_view in zip(("", ", aligned"), barriers, strict=True) if barriers else ():
        mean_barrier = barriers_of_view.mean
        interval_text = "" if mean_barrier.low is None else f" [{mean_barrier.low:.3f}, {mean_barrier.high:.3f}]"
        summary[f"mean loss barrier{stage_text} (nats)"] = f"{mean_barrier.value:.3f}{interval_text}"
    omitted_note = (
        f"… and {len(rows) - LARGEST_ROW_COUNT} more; --format json has all." if len(rows) > LARGEST_ROW_COUNT else ""
    )
    return [table(table_rows, right_aligned=["nearer by"]), omitted_note, fact_lines(summary)]


def _mean(values: Iterable[float]) -> float:
    return float(fmean(values))
