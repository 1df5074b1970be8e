"""Diversity of all pairs of members."""

from __future__ import annotations

from checkpoints_zoo.evaluation.drawing import BLUE, RED
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.populations.pairwise_information import (
    Pairwise,
    draw_histogram,
    draw_matrix,
    draw_scatter,
    upper_triangle,
    upper_triangle_values,
)
from checkpoints_zoo.publishing.html_report.definitions import term
from checkpoints_zoo.publishing.html_report.markup import bold
from checkpoints_zoo.publishing.html_report.measurements import Measurements
from checkpoints_zoo.publishing.html_report.page import (
    FigureBlock,
    NoteBlock,
    Panel,
    Part,
    TableBlock,
    draw_panel,
    number_table,
)
from checkpoints_zoo.publishing.html_report.summary import cell

# Figure -> key of its definition in `TERMS`, label and unit.
LABELS = {
    "mi_id": ("pair", "mutual information of a pair, ID", "nats"),
    "disagreement": ("disagreement", "disagreement, ID", "0–1"),
    "mi_ood": ("pair", "mutual information of a pair, OOD", "nats"),
    "disagreement_ood": ("disagreement_ood", "disagreement, OOD", "0–1"),
    "correlation": ("correlation", "correlation of the two informations", "−1–1"),
}


def build_part(measured: Measurements) -> Part:
    """Return the part on pairs of members."""
    pairs = measured.pairs
    if pairs is None:
        return Part("pairs", "Pairs of members", [NoteBlock(("Pairs need two members or more.",), True)])
    member_count = len(measured.inside)
    count_note = f" (the first {len(pairs.ids):,} of {member_count:,} members)" if len(pairs.ids) < member_count else ""
    return Part(
        "pairs",
        "Pairs of members",
        [_mean_figures_table(pairs, count_note), _pairs_figure(measured, pairs, count_note)],
    )


def _mean_figures_table(pairs: Pairwise, count_note: str) -> TableBlock:
    rows = [(term(LABELS[n][0], LABELS[n][1]), LABELS[n][2], cell(x)) for n, x in pairs.figures.items()]
    caption = (
        bold("All pairs."),
        f" Means over {len(pairs):,} pairs{count_note}, [ ]: 95 % jackknife intervals over members, as "
        "pairs that share a member are not independent.",
    )
    return TableBlock("pairwise", ("", "unit", "mean of pairs"), rows, caption, text_columns=(0, 1))


def _pairs_figure(measured: Measurements, pairs: Pairwise, count_note: str) -> FigureBlock:
    id_information = upper_triangle_values(pairs.inside.information)
    panels = [_spread_panel("pairs-id", "In distribution", pairs, "mi_id", id_information, BLUE)]
    panels_text, images_text = (
        "(a) Histogram over pairs. ",
        f"{pairs.data.split(' ')[0]}, n = {pairs.inside.inputs:,} inputs",
    )
    if pairs.outside is not None:
        ood_information = upper_triangle_values(pairs.outside.information)
        correlation = pairs.figures["correlation"]
        description = (
            f"One mutual information against the other, for {len(id_information):,} pairs: "
            f"correlation {as_text(correlation)}."
        )
        panels += [
            _spread_panel("pairs-ood", "Out of distribution", pairs, "mi_ood", ood_information, RED),
            draw_panel("pairs-scatter", "One against the other", description,
                       lambda axes: draw_scatter(axes, id_information, ood_information, correlation)),
        ]  # fmt: skip
        panels_text = (
            "(a), (b) Histograms over pairs in and out of distribution. (c) One against the other, a dot a pair. "
        )
        images_text += f"; out of distribution: {measured.images_ood}"
    description = f"Disagreement of all pairs, mean {as_text(pairs.figures['disagreement'], 100)} %."
    panels.append(draw_panel("disagreement", "Disagreement", description, lambda axes: draw_matrix(axes, pairs, "")))
    caption = (
        bold("Diversity of pairs."),
        " ",
        term("pair", "Mutual information"),
        f" and disagreement of {len(pairs):,} "
        f"pairs of members{count_note} on {images_text}. {panels_text}({'abcd'[len(panels) - 1]}) Share of inputs that "
        "two members class differently, members in their order. The figure of Laurent et al. (2024).",
    )
    return FigureBlock("diversity", panels, caption, [_pairs_table(pairs)])


def _spread_panel(element_id: str, title: str, pairs: Pairwise, figure: str, values: list[float], colour: str) -> Panel:
    """Draw the distribution of the pairs' mutual information."""
    mean_figure = pairs.figures[figure]
    description = (
        f"Histogram of the mutual information of {len(values):,} pairs, from {min(values):.3g} to {max(values):.3g} "
        f"nats, mean {mean_figure.value:.3g}."
    )
    return draw_panel(
        element_id, title, description, lambda axes: draw_histogram(axes, values, mean_figure, "", colour)
    )


def _pairs_table(pairs: Pairwise) -> TableBlock:
    matrices_and_titles = [
        (pairs.inside.information, 1, "information, ID (nats)"),
        (pairs.inside.disagreement, 100, "disagreement, ID (%)"),
    ]
    if pairs.outside is not None:
        matrices_and_titles += [(pairs.outside.information, 1, "information, OOD (nats)")]
        matrices_and_titles += [(pairs.outside.disagreement, 100, "disagreement, OOD (%)")]
    pair_positions = upper_triangle(len(pairs.ids))
    id_texts = [
        (f"{pairs.ids[first_position]}", f"{pairs.ids[second_position]}")
        for first_position, second_position in zip(*(positions.tolist() for positions in pair_positions), strict=True)
    ]
    number_texts = [
        [f"{scale * value:.4g}" for value in matrix[pair_positions].tolist()]
        for matrix, scale, _ in matrices_and_titles
    ]
    rows = [(*pair, *cells) for pair, *cells in zip(id_texts, *number_texts, strict=True)]
    header = ("member", "other member", *(title for *_, title in matrices_and_titles))
    return number_table("pairs-numbers", header, rows, "Each pair of members.")
