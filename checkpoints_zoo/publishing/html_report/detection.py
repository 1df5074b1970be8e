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
    ensemble_figures = report.ensemble
    id_and_ood_scores = [x.scores.double().numpy() for x in (measured.outputs, measured.outputs_outside)]
    roc_curve, precision_curve = roc_points(*id_and_ood_scores), precision_points(*id_and_ood_scores)
    id_scores, ood_scores = (x - 1 for x in id_and_ood_scores)
    bin_edges = _score_edges(id_scores, ood_scores)
    id_mean, ood_mean = as_text(ensemble_figures["mi_id"]), as_text(ensemble_figures["mi_ood"])
    means_text = f"mean {id_mean} nats in and {ood_mean} nats out of distribution"
    description = f"Histograms of mutual information: {means_text}."
    panels = [
        _score_panel(id_scores, ood_scores, bin_edges),
        draw_panel(
            "information",
            "Mutual information",
            description,
            lambda axes: draw_information(report, axes, show_auroc=False),
        ),
        _roc_panel(roc_curve, as_text(ensemble_figures["auroc"])),
        _precision_panel(
            precision_curve, len(ood_scores) / (len(id_scores) + len(ood_scores)), as_text(ensemble_figures["aupr"])
        ),
    ]
    figure_names = ("auroc", "aupr", "fpr95")
    figure_texts = [
        text_piece
        for figure in figure_names
        for text_piece in (
            term(figure),
            f" {as_text(ensemble_figures[figure])}",
            ", " if figure != figure_names[-1] else "",
        )
    ]
    caption = (
        bold("Telling inputs apart."),
        f" Of {measured.subject}; in distribution: {measured.images}; out of it: ",
        f"{measured.images_ood}. ",
        *figure_texts,
        f"{measured.interval_note}. (a) The score, the largest mean probability with its sign changed. (b) ",
        term("mi_id", "Mutual information"),
        f" of label and member of each input, "
        f"{means_text}; smaller values are in the first bin. (c), (d) ROC and precision-recall curves of the score, "
        "inputs out of distribution positive.",
    )
    tables = [
        _score_table(id_scores, ood_scores, bin_edges),
        _curves_table("roc-points", "(c) ROC", "flagged", "found", roc_curve),
    ]
    tables.append(_curves_table("precision-points", "(d) Precision-recall", "recall", "precision", precision_curve))
    blocks = [FigureBlock("detection", panels, caption, [tables[0], _information_table(measured), *tables[1:]])]
    if report.members > 1:
        blocks.append(draw_curves(measured, "ood-curves", OOD_FIGURES, 2))
    return Part("ood", title, blocks)


def _score_edges(id_scores: Array, ood_scores: Array) -> Array:
    lowest_score, highest_score = min(id_scores.min(), ood_scores.min()), max(id_scores.max(), ood_scores.max())
    bin_edges: Array = np.linspace(lowest_score - 1e-9, max(highest_score, lowest_score + 1e-6), BIN_COUNT + 1)
    return bin_edges


def _score_panel(id_scores: Array, ood_scores: Array, bin_edges: Array) -> Panel:
    def draw(axes: Axes) -> None:
        for scores, label, colour in ((id_scores, "in distribution", BLUE), (ood_scores, "out of distribution", RED)):
            axes.hist(
                scores, bin_edges.tolist(), weights=np.full(len(scores), 100 / len(scores)), histtype="stepfilled",
                facecolor=(colour, 0.3), edgecolor=colour, linewidth=1.4, label=label,
            )  # fmt: skip
        axes.set(xlabel="score, −(largest mean probability)", ylabel="share of inputs (%)")

    id_median, ood_median = np.median(id_scores), np.median(ood_scores)
    description = f"Histograms of the score: median {id_median:.3f} in distribution, {ood_median:.3f} out of it."
    return draw_panel("scores", "Score", description, draw)


def _roc_panel(curve_points: tuple[Array, Array], auroc_text: str) -> Panel:
    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1, label="chance")
        axes.plot(100 * curve_points[0], 100 * curve_points[1], color=BLUE, label=f"AUROC {auroc_text}")
        axes.set(xlabel="test inputs flagged (%)", ylabel="found (%)", xlim=(-1, 101), ylim=(-1, 101))

    return draw_panel("roc", "ROC curve", f"ROC curve, AUROC {auroc_text}.", draw)


def _precision_panel(curve_points: tuple[Array, Array], chance_precision: float, aupr_text: str) -> Panel:
    def draw(axes: Axes) -> None:
        axes.plot([0, 100], [100 * chance_precision] * 2, color=GREY, linestyle="--", linewidth=1, label="chance")
        axes.plot(100 * curve_points[0], 100 * curve_points[1], color=BLUE, label=f"AUPR {aupr_text}")
        lowest_precision = max(0.0, min(float(curve_points[1].min()), chance_precision) - 0.05)
        axes.set(xlabel="recall: found (%)", ylabel="precision (%)", xlim=(-1, 101), ylim=(100 * lowest_precision, 101))

    return draw_panel("precision-recall", "Precision and recall", f"Precision-recall curve, AUPR {aupr_text}.", draw)


def roc_points(id_scores: Array, ood_scores: Array) -> tuple[Array, Array]:
    """Compute the ROC curve of scores; return share of test inputs flagged, and share of other inputs found.

    Args:
        id_scores, ood_scores: (input,) scores in and out of distribution.
    """
    flagged_shares, found_shares = _rates(id_scores, ood_scores)
    plotted_positions = _thin_out_points(flagged_shares, found_shares)
    return flagged_shares[plotted_positions], found_shares[plotted_positions]


def precision_points(id_scores: Array, ood_scores: Array) -> tuple[Array, Array]:
    """Compute the precision-recall curve of scores; return recall and precision.

    Args:
        id_scores, ood_scores: (input,) scores in and out of distribution.
    """
    flagged_shares, found_shares = _rates(id_scores, ood_scores)
    has_detections = found_shares > 0
    flagged_shares, found_shares = flagged_shares[has_detections], found_shares[has_detections]
    precisions = found_shares * len(ood_scores) / (found_shares * len(ood_scores) + flagged_shares * len(id_scores))
    plotted_positions = _thin_out_points(found_shares, precisions)
    return found_shares[plotted_positions], precisions[plotted_positions]


def _rates(id_scores: Array, ood_scores: Array) -> tuple[Array, Array]:
    from sklearn.metrics import roc_curve

    is_outside = np.repeat([0, 1], [len(id_scores), len(ood_scores)])
    flagged_shares, found_shares, _ = roc_curve(
        is_outside, np.concatenate([id_scores, ood_scores]), drop_intermediate=False
    )
    return flagged_shares, found_shares


def _thin_out_points(x_values: Array, y_values: Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return positions of at most `LARGEST_POINT_COUNT` points of a curve, about equally far apart along the curve,
    with both ends."""
    curve_lengths = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x_values)) + np.abs(np.diff(y_values)))])
    evenly_spaced_lengths = np.linspace(0, curve_lengths[-1], LARGEST_POINT_COUNT)
    return np.unique(np.searchsorted(curve_lengths, evenly_spaced_lengths).clip(max=len(curve_lengths) - 1))


def _score_table(id_scores: Array, ood_scores: Array, bin_edges: Array) -> TableBlock:
    shares_in_bins = [np.histogram(scores, bin_edges)[0] / len(scores) for scores in (id_scores, ood_scores)]
    rows = [
        (f"{bin_start:.4f} to {bin_end:.4f}".replace("-", "−"), f"{100 * id_share:.2f}", f"{100 * ood_share:.2f}")
        for bin_start, bin_end, id_share, ood_share in zip(bin_edges[:-1], bin_edges[1:], *shares_in_bins, strict=True)
    ]
    header = ("score", "in distribution (%)", "out of distribution (%)")
    return number_table("score-bins", header, rows, "(a) Share of inputs by score.")


def _information_table(measured: Measurements) -> TableBlock:
    quantile_shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    quantiles_of_both = [
        np.quantile(np.asarray(measured.report.drawing[figure], np.float64), quantile_shares)
        for figure in ("mi_id", "mi_ood")
    ]
    rows = [
        (f"{100 * share:.0f}", f"{id_quantile:.4g}", f"{ood_quantile:.4g}")
        for share, id_quantile, ood_quantile in zip(quantile_shares, *quantiles_of_both, strict=True)
    ]
    header = ("quantile (%)", "in distribution (nats)", "out of distribution (nats)")
    return number_table("information-quantiles", header, rows, "(b) Quantiles of the mutual information of inputs.")


def _curves_table(
    element_id: str, title: str, x_label: str, y_label: str, curve_points: tuple[Array, Array]
) -> TableBlock:
    rows = [(f"{100 * x_value:.2f}", f"{100 * y_value:.2f}") for x_value, y_value in zip(*curve_points, strict=True)]
    return number_table(element_id, (f"{x_label} (%)", f"{y_label} (%)"), rows, f"{title}: points of the curve.")
