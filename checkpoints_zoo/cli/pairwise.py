"""`zoo-cli pairwise`: mutual information and disagreement of every pair of members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.options import IMAGES_HELP, NONE_WORD, OutputFile, Selection, name_and_size, network_options
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.text import count_with_noun

if TYPE_CHECKING:
    from checkpoints_zoo.populations.pairwise_information import Pairwise

FIGURE_LABELS = {
    "mi_id": "mutual information, ID (nats)", "disagreement": "disagreement, ID (0..1)",
    "mi_ood": "mutual information, OOD (nats)", "disagreement_ood": "disagreement, OOD (0..1)",
    "correlation": "correlation of ID and OOD information",
}  # fmt: skip


@click.command()
@network_options
@click.option(
    "--data", metavar="IMAGES", help=f"Images in distribution: {IMAGES_HELP}; the collection's test set if not given."
)
@click.option("--ood", metavar="IMAGES|none", help="Images out of distribution, likewise, such as photos.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of the subsets of members behind the intervals.")
@click.option(
    "--stored",
    metavar="SOURCE",
    help="Compare predictions that this source has: --data and --ood name sets (digits-test).",
)
@click.option(
    "--plot",
    type=OutputFile(*PICTURE_FORMATS),
    metavar="PICTURE",
    help="Draw the distributions over pairs, and all pairs.",
)
@click.option(
    "-o",
    "--out",
    "path",
    type=OutputFile(".parquet", ".csv"),
    metavar="FILE",
    help="Write one row a pair, .parquet or .csv.",
)
@format_option
def command(
    selection: Selection,
    data: str | None,
    ood: str | None,
    device: str,
    seed: int,
    stored: str | None,
    plot: Path | None,
    path: Path | None,
    out: Output,
) -> None:
    """Compare every pair of members: mutual information ID and OOD, their correlation, disagreement.

    Means over all pairs have intervals over the members. --out writes the figures of each pair.
    """
    ood = None if ood == NONE_WORD else ood
    members = selection.load()
    from checkpoints_zoo.populations.pairwise_information import pairwise

    if stored is None:
        images_text = f"{data or members.description.dataset}{f' against {ood}' if ood else ''}"
        out.say(f"{name_and_size(members)}, on {images_text} …")
        result = pairwise(members, data, ood, device=device, seed=seed)
    else:
        from checkpoints_zoo.predictions import predictions_of

        prediction_set = data or f"{members.description.dataset}-test"
        out.say(f"{members.name}: stored predictions of {count_with_noun(len(members), 'member')}, {prediction_set} …")
        id_predictions = predictions_of(members, prediction_set, source=stored)
        ood_predictions = None if ood is None else predictions_of(members, ood, source=stored)
        result = pairwise(id_predictions, None, ood_predictions, device=device, seed=seed)
    if path:
        out.say(f"pairs: {result.write(path)}")
    if plot:
        out.say(f"picture: {result.plot(plot)}")
    out.data(json.loads(result.to_json()), _figures_table(result), _explanation_text(result))


def _figures_table(result: Pairwise) -> str:
    pairs_frame = result.to_frame()
    rows = []
    for name, figure in result.figures.items():
        lowest_text, highest_text = (
            f"{pairs_frame[name].agg(aggregation):.4g}" if name in pairs_frame else "-"
            for aggregation in ("min", "max")
        )
        rows.append(
            {
                "": FIGURE_LABELS[name],
                "all pairs": as_text(figure),
                "lowest pair": lowest_text,
                "highest pair": highest_text,
            }
        )
    return table(rows, right_aligned=list(rows[0])[1:])


def _explanation_text(result: Pairwise) -> str:
    images_text = f"{result.data.split(' ')[0]}, {result.inside.inputs:,} inputs"
    if result.outside is not None:
        images_text += f"; OOD: {result.ood.split(' ')[0]}, {result.outside.inputs:,} inputs"
    pairs_text = f"{count_with_noun(len(result), 'pair')} of {len(result.ids):,} members"
    intervals_note = "Means over pairs; [ ]: 95 % intervals by a jackknife over members, since pairs share members."
    if len(result.ids) < 3:
        intervals_note = "There are no intervals for fewer than 3 members."
    return f"{pairs_text}, measured now on {images_text}.\n{intervals_note}"
