"""What every pair of members has."""

from __future__ import annotations

import numpy as np

from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.populations.pairwise_information import Pairwise, upper_triangle
from checkpoints_zoo.publishing.html_report.charts import (
    DOTS,
    axis,
    bars,
    count_axis,
    counts,
    dots,
    edges_of,
    layout,
    matrix,
    upright,
)
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured
from checkpoints_zoo.publishing.html_report.page import Chart, Note, Panel, Part, Rows
from checkpoints_zoo.publishing.html_report.summary import cell
from checkpoints_zoo.publishing.html_report.tags import tag

NAMES = {
    "mi_id": ("pair", "mutual information of a pair, ID", "nats"),
    "disagreement": ("disagreement", "disagreement, ID", "0–1"),
    "mi_ood": ("pair", "mutual information of a pair, OOD", "nats"),
    "disagreement_ood": ("disagreement_ood", "disagreement, OOD", "0–1"),
    "correlation": ("correlation", "correlation of the two informations", "−1–1"),
}


def part(found: Measured) -> Part:
    """Return the part on pairs of members."""
    pairs = found.pairs
    if pairs is None:
        return Part("pairs", "Pairs of members", [Note(("Pairs need two members or more.",), True)])
    on = f"{pairs.data.split(' ')[0]}, n = {pairs.inside.inputs:,} inputs"
    rows = [(word(NAMES[name][0], NAMES[name][1]), NAMES[name][2], cell(x)) for name, x in pairs.figures.items()]
    some = (
        f" (the first {len(pairs.ids):,} of {len(found.inside):,} members)"
        if len(pairs.ids) < len(found.inside)
        else ""
    )
    about = (
        tag("b", "All pairs. "), f"Means over {len(pairs):,} pairs{some}, [ ]: 95 % jackknife intervals over members, "
        "as pairs that share a member are not independent.",
    )  # fmt: skip
    panels = [_spread("pairs-id", "In distribution", pairs, "mi_id")]
    if pairs.outside is not None:
        panels += [_spread("pairs-ood", "Out of distribution", pairs, "mi_ood"), _scatter(pairs)]
    drawn, block = _disagreement(pairs)
    panels.append(drawn)
    against = f"; out of distribution: {found.on_ood}" if pairs.outside is not None else ""
    spread = "(a) Histogram over pairs. "
    if pairs.outside is not None:
        spread = "(a), (b) Histograms over pairs in and out of distribution. (c) One against the other, a dot a pair. "
    letters = "abcd"[len(panels) - 1]
    blocks = f" Each cell is the mean of {block} × {block} members." if block > 1 else ""
    dense = " Cells hold as many pairs as the scale says." if len(pairs) > DOTS and pairs.outside is not None else ""
    shown = (
        tag("b", "Diversity of pairs. "), word("pair", "Mutual information"), f" and disagreement of {len(pairs):,} "
        f"pairs of members{some} on {on}{against}. {spread}({letters}) Share of inputs that two members class "
        f"differently, members in their order.{blocks}{dense} The figure of Laurent et al. (2024).",
    )  # fmt: skip
    table = Rows("pairwise", ("", "unit", "mean of pairs"), rows, about, words=(0, 1))
    return Part("pairs", "Pairs of members", [table, Chart("diversity", panels, shown)])


def _spread(name: str, title: str, pairs: Pairwise, figure: str) -> Panel:
    """Draw how the mutual information of pairs spreads."""
    matrices = pairs.inside if figure == "mi_id" or pairs.outside is None else pairs.outside
    values: list[float] = matrices.information[upper_triangle(len(pairs.ids))].tolist()
    edges = edges_of(values)
    heights = counts(values, edges)
    mean = pairs.figures[figure]
    traces = [
        bars(edges, heights, "pairs", BLUE if figure == "mi_id" else RED, "pairs") | {"showlegend": False},
        upright(mean.value, max(heights) * 1.06, f"mean {as_text(mean)}", GREY),
    ]
    told = (
        f"Histogram of the mutual information of {len(values):,} pairs, from {min(values):.3g} to {max(values):.3g} "
        f"nats, mean {mean.value:.3g}."
    )
    x = axis("mutual information of a pair (nats)", nticks=7)
    return Panel(name, title, told, traces, layout(x, count_axis("pairs", heights)))


def _scatter(pairs: Pairwise) -> Panel:
    """Draw the two informations of each pair."""
    outside = pairs.inside if pairs.outside is None else pairs.outside
    at = upper_triangle(len(pairs.ids))
    x, y = (m.information[at].tolist() for m in (pairs.inside, outside))
    names = []
    if len(x) <= DOTS:
        names = [f"members {pairs.ids[a]} and {pairs.ids[b]}" for a, b in zip(*at, strict=True)]
    correlation = pairs.figures["correlation"]
    traces = dots(x, y, names, f"correlation {as_text(correlation)}", BLUE, "ID %{x:.4g}, OOD %{y:.4g} nats")
    told = f"One mutual information against the other, for {len(x):,} pairs: correlation {as_text(correlation)}."
    drawn = layout(axis("in distribution (nats)", nticks=7), axis("out of distribution (nats)"))
    keyed = [{**trace, "showlegend": len(x) <= DOTS} for trace in traces]
    return Panel("pairs-scatter", "One against the other", told, keyed, drawn)


def _disagreement(pairs: Pairwise) -> tuple[Panel, int]:
    values = 100 * pairs.inside.disagreement.numpy().copy()
    np.fill_diagonal(values, np.nan)
    mean = pairs.figures["disagreement"]
    trace, block = matrix(values, "inputs (%)", "members at %{x} and %{y}: %{z:.3g} %")
    told = f"Disagreement of all pairs, mean {as_text(mean, 100)} %."
    size = [-0.5, len(values) - 0.5]
    x = axis("member, by position", range=size, showgrid=False, constrain="domain")
    y = axis("member, by position", range=size[::-1], showgrid=False, scaleanchor="x", constrain="domain")
    return Panel("disagreement", "Disagreement", told, [trace], layout(x, y, key=False)), block
