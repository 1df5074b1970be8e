"""The part on calibration: whether probabilities agree with the share of right predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.report import (
    Bins,
    draw_confidences,
    draw_reliability,
    draw_scaled_reliability,
    reliability_bins,
)
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.publishing.html_report.definitions import term
from checkpoints_zoo.publishing.html_report.markup import bold
from checkpoints_zoo.publishing.html_report.measurements import Measurements
from checkpoints_zoo.publishing.html_report.page import FigureBlock, Part, TableBlock, draw_panel, number_table
from checkpoints_zoo.publishing.html_report.summary import cell, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def build_part(measured: Measurements) -> Part:
    """Return the part on calibration."""
    return Part("calibration", "Calibration", [_reliability_figure(measured), *_scaled_table(measured)])


def _reliability_figure(measured: Measurements) -> FigureBlock:
    report, pooled_bars = measured.report, measured.outputs.pooled
    bins = reliability_bins(report)
    pooled_bins: Bins | None = None
    if pooled_bars is not None and len(measured.inside) > 1:
        pooled_bins = {name: getattr(pooled_bars, name).tolist() for name in ("confidence", "accuracy", "inputs")}

    def draw(axes: Axes) -> None:
        draw_reliability(report, axes, pooled_bins)
        if report.calibrated is not None:
            draw_scaled_reliability(report, report.calibrated, axes)
        axes.set_xlabel("confidence, largest mean probability (0–1)")

    filled_bins = [bin_number for bin_number, input_count in enumerate(bins["inputs"]) if input_count]
    points_text = "; ".join(
        f"confidence {bins['confidence'][bin_number]:.2f}, accuracy {bins['accuracy'][bin_number]:.2f}"
        for bin_number in filled_bins
    )
    ece_text = as_text(report.ensemble["ece"])
    description = f"Reliability diagram of the ensemble in {len(bins['inputs'])} bins, ECE {ece_text}; {points_text}"
    share_text = f"Share of the inputs in each bin; {max(bins['inputs']) / sum(bins['inputs']):.0%} are in the fullest."
    panels = [
        draw_panel("reliability-diagram", "Accuracy against confidence", description, draw),
        draw_panel("confidences", "Confidence", share_text, lambda axes: draw_confidences(report, axes, pooled_bins)),
    ]
    figures = report.ensemble
    line_note = " Line: the predictions of all single members, pooled." if pooled_bins is not None else ""
    caption = (
        bold("Reliability."), f" Of {measured.subject}, on {measured.images}: ",
        term("ece"), f" {as_text(figures['ece'])}, ", term("adaptive_ece"), f" {as_text(figures['adaptive_ece'])}, ",
        term("ace"), f" {as_text(figures['ace'])}{measured.interval_note}. (a) Accuracy of the inputs in each of 15 "
        "bins of the largest probability, and the gap to the mean probability of the bin; where the gap is above the "
        f"bar, the ensemble is too confident.{line_note} (b) Share of the inputs, or of the pooled predictions, in "
        "each bin, on a logarithmic scale.",
    )  # fmt: skip
    return FigureBlock("reliability", panels, caption, [_bins_table(bins, pooled_bins)])


def _bins_table(bins: Bins, pooled_bins: Bins | None) -> TableBlock:
    """Return a table of the reliability bins of the ensemble, and of the single members if there are several."""
    bin_count = len(bins["inputs"])
    rows: list[Sequence[str]] = []
    for bin_number in range(bin_count):
        cells = [f"{bin_number / bin_count:.3f} to {(bin_number + 1) / bin_count:.3f}"]
        for bin_series in (bins, pooled_bins):
            if bin_series is not None:
                cells += [
                    f"{int(bin_series['inputs'][bin_number]):,}",
                    _number_text(bin_series["confidence"][bin_number]),
                    _number_text(bin_series["accuracy"][bin_number]),
                ]
        rows.append(cells)
    header = ["bin", "inputs", "confidence", "accuracy"]
    header += [] if pooled_bins is None else ["pooled inputs", "pooled confidence", "pooled accuracy"]
    return number_table("bins", header, rows, "The bins; pooled: all predictions of single members.")


def _number_text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _scaled_table(measured: Measurements) -> list[TableBlock]:
    """Return a table of the figures before and after temperature scaling."""
    report = measured.report
    calibrated = report.calibrated
    if calibrated is None:
        return []
    rows = [
        (term(name), unit_of(name), cell(report.ensemble[name]) if name in report.ensemble else "–", cell(x))
        for name, x in calibrated.ensemble.items()
    ]
    share_text = (
        "" if calibrated.share is None else f", {calibrated.share:.0%} of the images, in no figure but those of pairs"
    )
    bound_note = " The best temperature is at the bound of the search." if calibrated.at_bound else ""
    intervals_note = " [ ]: 95 % jackknife intervals." if measured.interval_note else ""
    caption = (
        bold("Temperature scaling."), f" Of {measured.subject}, on {measured.images}, before and after its mean "
        "probabilities are scaled by a ", term("temperature"), f", fitted to n = {calibrated.inputs:,} inputs of "
        f"{calibrated.held_out.split(' ')[0]}{share_text}.{bound_note}{intervals_note}",
    )  # fmt: skip
    return [TableBlock("scaled", ("", "unit", "before", "after"), rows, caption, text_columns=(0, 1))]
