"""Detection of inputs out of distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED
from checkpoints_zoo.evaluation.figures import OOD_FIGURES
from checkpoints_zoo.evaluation.report import draw_information
from checkpoints_zoo.evaluation.tables import as_text
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
from checkpoints_zoo.publishing.html_report.summary import draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
LARGEST_POINT_COUNT = 200  # largest number of points of a curve
BIN_COUNT = 40  # number of bins in a histogram of scores


def build_part(measured: Measurements) -> Part:
    """Return the part on inputs out of distribution."""
    title = "Out-of-distribution detection"
    if measured.outputs_outside is None:
        advice = "No images out of distribution were given: --ood NAME (such as photos, svhn) draws these figures."
        return Part("ood", title, [NoteBlock((advice,), True)])
    report = measured.report
    figures = report.ensemble
    scores = [x.scores.double().numpy() for x in (measured.outputs, measured.outputs_outside)]
    roc, precision = roc_points(*scores), precision_points(*scores)
    inside, outside = (x - 1 for x in scores)
    edges = _score_edges(inside, outside)
    means = f"mean {as_text(figures['mi_id'])} nats in and {as_text(figures['mi_ood'])} nats out of distribution"
    description = f"Histograms of mutual information: {means}."
    panels = [
        _score_panel(inside, outside, edges),
        draw_panel(
            "information",
            "Mutual information",
            description,
            lambda axes: draw_information(report, axes, show_auroc=False),
        ),
        _roc_panel(roc, as_text(figures["auroc"])),
        _precision_panel(precision, len(outside) / (len(inside) + len(outside)), as_text(figures["aupr"])),
    ]
    names = ("auroc", "aupr", "fpr95")
    figure_texts = [
        piece for n in names for piece in (term(n), f" {as_text(figures[n])}", ", " if n != names[-1] else "")
    ]
    caption = (
        bold("Telling inputs apart."),
        f" Of {measured.subject}; in distribution: {measured.images}; out of it: ",
        f"{measured.images_ood}. ",
        *figure_texts,
        f"{measured.interval_note}. (a) The score, the largest mean probability with its sign changed. (b) ",
        term("mi_id", "Mutual information"),
        f" of label and member of each input, "
        f"{means}; smaller values are in the first bin. (c), (d) ROC and precision-recall curves of the score, inputs "
        "out of distribution positive.",
    )
    tables = [_score_table(inside, outside, edges), _curves_table("roc-points", "(c) ROC", "flagged", "found", roc)]
    tables.append(_curves_table("precision-points", "(d) Precision-recall", "recall", "precision", precision))
    blocks = [FigureBlock("detection", panels, caption, [tables[0], _information_table(measured), *tables[1:]])]
    if report.members > 1:
        blocks.append(draw_curves(measured, "ood-curves", OOD_FIGURES, 2))
    return Part("ood", title, blocks)


def _score_edges(inside: Array, outside: Array) -> Array:
    low, high = min(inside.min(), outside.min()), max(inside.max(), outside.max())
    edges: Array = np.linspace(low - 1e-9, max(high, low + 1e-6), BIN_COUNT + 1)
    return edges


def _score_panel(inside: Array, outside: Array, edges: Array) -> Panel:
    def draw(axes: Axes) -> None:
        for values, label, colour in ((inside, "in distribution", BLUE), (outside, "out of distribution", RED)):
            axes.hist(
                values, edges.tolist(), weights=np.full(len(values), 100 / len(values)), histtype="stepfilled",
                facecolor=(colour, 0.3), edgecolor=colour, linewidth=1.4, label=label,
            )  # fmt: skip
        axes.set(xlabel="score, −(largest mean probability)", ylabel="share of inputs (%)")

    described = (
        f"Histograms of the score: median {np.median(inside):.3f} in distribution, {np.median(outside):.3f} out of it."
    )
    return draw_panel("scores", "Score", described, draw)


def _roc_panel(points: tuple[Array, Array], auroc: str) -> Panel:
    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1, label="chance")
        axes.plot(100 * points[0], 100 * points[1], color=BLUE, label=f"AUROC {auroc}")
        axes.set(xlabel="test inputs flagged (%)", ylabel="found (%)", xlim=(-1, 101), ylim=(-1, 101))

    return draw_panel("roc", "ROC curve", f"ROC curve, AUROC {auroc}.", draw)


def _precision_panel(points: tuple[Array, Array], chance: float, aupr: str) -> Panel:
    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [100 * chance] * 2, color=GREY, linestyle="--", linewidth=1, label="chance")
        axes.plot(100 * points[0], 100 * points[1], color=BLUE, label=f"AUPR {aupr}")
        low = max(0.0, min(float(points[1].min()), chance) - 0.05)
        axes.set(xlabel="recall: found (%)", ylabel="precision (%)", xlim=(-1, 101), ylim=(100 * low, 101))

    return draw_panel("precision-recall", "Precision and recall", f"Precision-recall curve, AUPR {aupr}.", draw)


def roc_points(inside: Array, outside: Array) -> tuple[Array, Array]:
    """Compute the ROC curve of scores; return share of test inputs flagged, and share of other inputs found.

    Args:
        inside, outside: (input,) scores in and out of distribution.
    """
    flagged, found = _rates(inside, outside)
    plotted_positions = _thin_out_points(flagged, found)
    return flagged[plotted_positions], found[plotted_positions]


def precision_points(inside: Array, outside: Array) -> tuple[Array, Array]:
    """Compute the precision-recall curve of scores; return recall and precision.

    Args:
        inside, outside: (input,) scores in and out of distribution.
    """
    flagged, found = _rates(inside, outside)
    has_detections = found > 0
    flagged, found = flagged[has_detections], found[has_detections]
    precision = found * len(outside) / (found * len(outside) + flagged * len(inside))
    plotted_positions = _thin_out_points(found, precision)
    return found[plotted_positions], precision[plotted_positions]


def _rates(inside: Array, outside: Array) -> tuple[Array, Array]:
    from sklearn.metrics import roc_curve

    is_outside = np.repeat([0, 1], [len(inside), len(outside)])
    flagged, found, _ = roc_curve(is_outside, np.concatenate([inside, outside]), drop_intermediate=False)
    return flagged, found


def _thin_out_points(x: Array, y: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return positions of at most `LARGEST_POINT_COUNT` points of a curve, about equally far apart along the curve,
    with both ends."""
    curve_lengths = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    even_lengths = np.linspace(0, curve_lengths[-1], LARGEST_POINT_COUNT)
    return np.unique(np.searchsorted(curve_lengths, even_lengths).clip(max=len(curve_lengths) - 1))


def _score_table(inside: Array, outside: Array, edges: Array) -> TableBlock:
    counts = [np.histogram(values, edges)[0] / len(values) for values in (inside, outside)]
    rows = [
        (f"{low:.4f} to {high:.4f}".replace("-", "−"), f"{100 * a:.2f}", f"{100 * b:.2f}")
        for low, high, a, b in zip(edges[:-1], edges[1:], *counts, strict=True)
    ]
    header = ("score", "in distribution (%)", "out of distribution (%)")
    return number_table("score-bins", header, rows, "(a) Share of inputs by score.")


def _information_table(measured: Measurements) -> TableBlock:
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    columns = [np.quantile(np.asarray(measured.report.drawing[n], np.float64), shares) for n in ("mi_id", "mi_ood")]
    rows = [(f"{100 * q:.0f}", f"{a:.4g}", f"{b:.4g}") for q, a, b in zip(shares, *columns, strict=True)]
    header = ("quantile (%)", "in distribution (nats)", "out of distribution (nats)")
    return number_table("information-quantiles", header, rows, "(b) Quantiles of the mutual information of inputs.")


def _curves_table(element_id: str, title: str, x: str, y: str, points: tuple[Array, Array]) -> TableBlock:
    rows = [(f"{100 * a:.2f}", f"{100 * b:.2f}") for a, b in zip(*points, strict=True)]
    return number_table(element_id, (f"{x} (%)", f"{y} (%)"), rows, f"{title}: points of the curve.")
