"""`zoo-cli mmd`: the distance of two sets of members in weight space."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.options import NONE_WORD, OutputFile, Selection, network_options
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS
from checkpoints_zoo.formats.selection import parse_citation
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.populations.discrepancy import MMD, NS

FIGURE_LABELS = {"mmd2": "MMD²", "p_value": "p", "ns_mmd2": "NS", "ns_p_value": "p of NS"}


def _none_if_none(context: click.Context, parameter: click.Parameter, value: str) -> str | None:
    """Return the value of an option; None if it is the word "none"."""
    return None if value == NONE_WORD else value


@click.command()
@network_options
@click.argument("other", metavar="[OTHER]", required=False)
@click.option("--other-source", metavar="SOURCE", help="The source of OTHER; the source of NAME if not given.")
@click.option("--as-stored", is_flag=True, help="Compare the weights as they are stored only, not without symmetries.")
@click.option(
    "--scale", type=click.Choice(["unit-norm", "none"]), default="unit-norm", metavar="unit-norm|none",
    callback=_none_if_none, help="How scales are removed.",
)  # fmt: skip
@click.option(
    "--permute", type=click.Choice(["first", "max", "norm", "none"]), default="first", metavar="first|max|norm|none",
    callback=_none_if_none, help="Key that units are sorted by: their first weight, largest weight, or norm.",
)  # fmt: skip
@click.option("--streams", is_flag=True, help="Sort the units of residual streams too.")
@click.option(
    "--groups", type=click.Choice(["layer", "tensor"]), default="layer", metavar="layer|tensor",
    help="Compare layers, or tensors, beside all weights together.",
)  # fmt: skip
@click.option("--permutations", default=999, metavar="B", help="Permutations of the test; p is 1/(1 + B) or more.")
@click.option(
    "--subset-size", type=int, metavar="K",
    help="Compare the members in subsets of K, so that time grows with their number and not with its square.",
)  # fmt: skip
@click.option("--device", default="cpu", metavar="DEVICE", help="Where to compute, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of the permutations.")
@click.option(
    "--plot", type=OutputFile(*PICTURE_FORMATS), metavar="PICTURE", help="Draw MMD² and p-values, one layer a row."
)
@format_option
def command(
    selection: Selection,
    other: str | None,
    other_source: str | None,
    as_stored: bool,
    scale: str | None,
    permute: str | None,
    streams: bool,
    plot: Path | None,
    out: Output,
    **options: Any,
) -> None:
    """Compare the weights of two sets of members: MMD² by layer, before and after removing symmetries.

    OTHER is a citation, or a collection from which the same options select. Without OTHER, the members at even
    positions are compared with the members at odd positions. A permutation test gives a p-value for each layer.
    """
    if other is None and other_source is not None:
        raise click.UsageError("--other-source needs an OTHER.")
    members = selection.load()
    other_members = None if other is None else load_other(selection, other, other_source)
    size_text = format_bytes(sum(c.nbytes for c in (members, other_members) if c is not None))
    other_text = "their other half" if other_members is None else f"{len(other_members)} of {other_members.name}"
    out.say(f"{members.name}: {len(members)} members against {other_text}, {size_text} …")
    from checkpoints_zoo.populations.discrepancy import mmd, ns

    result: MMD | NS
    if as_stored:
        result = mmd(members, other_members, **options)
    else:
        result = ns(members, other_members, scale=scale, permute=permute, streams=streams, **options)
    if plot:
        out.say(f"picture: {result.plot(plot)}")
    out.data(
        json.loads(result.to_json()), _result_table(result), _explanation_text(result, are_halves=other_members is None)
    )


def load_other(selection: Selection, collection: str, source: str | None) -> Collection:
    """Return the members with which the selected members are compared."""
    if parse_citation(collection):
        return Selection(collection, None, None, None, None, source).load()
    return replace(selection, name=collection, source=source or selection.source).load()


def _result_table(result: MMD | NS) -> str:
    rows = []
    for row in result.rows():
        text_of_label = {
            FIGURE_LABELS[key]: "-" if row[key] is None else f"{row[key]:.3g}" for key in FIGURE_LABELS if key in row
        }
        rows.append({"layer": row["group"], "weights": f"{row['weights']:,}"} | text_of_label)
    return table(rows, right_aligned=list(rows[0])[1:])


def _explanation_text(result: MMD | NS, are_halves: bool) -> str:
    from checkpoints_zoo.populations.discrepancy import MMD

    stored_mmd = result if isinstance(result, MMD) else result.mmd
    first_count, second_count = stored_mmd.members
    compared_sets = (
        f"{first_count} at even positions against {second_count} at odd positions"
        if are_halves
        else f"{first_count} against {second_count}"
    )
    subsets_text = f" and {stored_mmd.subsets} subsets" if stored_mmd.subsets > 1 else ""
    lines = [
        f"Members: {compared_sets}. MMD² is unbiased (0 on average if both sets come from one distribution), and "
        f"the mean over {len(stored_mmd['all'].kernels)} kernels{subsets_text}."
    ]
    if not isinstance(result, MMD):
        scale_text = f"scale {result.scale}" if result.scale else ""
        permute_text = f"permute {result.permute}" if result.permute else ""
        removed_text = (
            ", ".join(
                setting_text
                for setting_text in (scale_text, permute_text, "streams" if result.streams else "")
                if setting_text
            )
            or "none"
        )
        lines.append(f"NS: MMD² with symmetries removed ({removed_text}).")
    if stored_mmd.p_value is None:
        lines.append("No p: a set has fewer than two independent members or runs, or both sets share one.")
    else:
        lines.append(
            f"p: share of {stored_mmd.permutations:,} permutations with at least this MMD²; not adjusted for many"
            " layers. Of draws, runs are exchanged, or one draw of each run."
        )
    return "\n".join(lines)
