"""Whether probabilities are as often right as they say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoints_zoo.evaluation.drawing import BLUE, GREEN, GREY, RED
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.publishing.html_report.charts import Trace, axis, diagonal, layout, line
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured
from checkpoints_zoo.publishing.html_report.page import Chart, Panel, Part, Rows
from checkpoints_zoo.publishing.html_report.summary import cell, unit_of
from checkpoints_zoo.publishing.html_report.tags import tag

Bins = dict[str, list[float]]


def part(found: Measured) -> Part:
    """Return the part on calibration."""
    drawing, pooled = found.report.drawing, found.said.pooled
    whole: Bins = {n: [float(v) for v in drawing[f"reliability_{n}"]] for n in ("confidence", "accuracy", "inputs")}
    single: Bins = {n: [] if pooled is None else getattr(pooled, n).tolist() for n in whole}
    figures = found.report.ensemble
    caption = (
        tag("b", "Reliability. "), f"Of {found.together}, on {found.on}: ",
        word("ece"), f" {as_text(figures['ece'])}, ", word("adaptive_ece"), f" {as_text(figures['adaptive_ece'])}, ",
        word("ace"), f" {as_text(figures['ace'])}{found.known}. (a) Accuracy of the inputs in each of 15 "
        "bins of the largest probability, and the gap to the mean of it there; a bar below the diagonal says too much. "
        "Line: the predictions of all single members, pooled. (b) Share of the inputs, or of the pooled predictions, "
        "in each bin, on a logarithmic scale.",
    )  # fmt: skip
    chart = Chart("reliability", _panels(found, whole, single), caption, 2, _behind(whole, single))
    return Part("calibration", "Calibration", [chart, *_scaled(found)])


def _scaled(found: Measured) -> list[Rows]:
    """Lay out the figures before and after temperature scaling."""
    report = found.report
    after = report.calibrated
    if after is None:
        return []
    rows = [
        (word(name), unit_of(name), cell(report.ensemble[name]) if name in report.ensemble else "–", cell(x))
        for name, x in after.ensemble.items()
    ]
    share = "" if after.share is None else f", {after.share:.0%} of the images, in no figure but those of pairs"
    bound = " None is best there: it is at its bound." if after.at_bound else ""
    caption = (
        tag("b", "Temperature scaling. "), f"Of {found.together}, on {found.on}, before and after its mean "
        "probabilities are scaled by a ", word("temperature"), f", fitted to n = {after.inputs:,} inputs of "
        f"{after.held_out.split(' ')[0]}{share}.{bound}{found.known and ' [ ]: 95 % jackknife intervals.'}",
    )  # fmt: skip
    return [Rows("scaled", ("", "unit", "before", "after"), rows, caption, words=(0, 1))]


def _panels(found: Measured, whole: Bins, single: Bins) -> list[Panel]:
    bins = len(whole["inputs"])
    known = _known(whole)
    ece = as_text(found.report.ensemble["ece"])
    told = f"Reliability diagram of the ensemble in {bins} bins, ECE {ece}; " + "; ".join(
        f"confidence {whole['confidence'][b]:.2f}, accuracy {whole['accuracy'][b]:.2f}" for b in known
    )
    traces = [diagonal(0, 1, "calibrated"), *_bars(whole)]
    if len(found.inside) > 1:
        kept = _known(single)
        x, y = ([single[n][b] for b in kept] for n in ("confidence", "accuracy"))
        traces.append(
            line(x, y, "single members", GREEN, mode="lines+markers", marker={"color": GREEN, "size": 6},
                 hovertemplate="single members: confidence %{x:.3f}, accuracy %{y:.3f}<extra></extra>")
        )  # fmt: skip
    if found.report.calibrated is not None:
        drawing = found.report.drawing
        scaled: Bins = {
            n: [float(v) for v in drawing[f"scaled_reliability_{n}"]] for n in ("confidence", "accuracy", "inputs")
        }
        x, y = ([scaled[n][b] for b in _known(scaled)] for n in ("confidence", "accuracy"))
        name = f"scaled by T = {found.report.calibrated.temperature.value:.3g}"
        traces.append(
            line(x, y, name, GREY, mode="lines+markers", marker={"color": GREY, "size": 7, "symbol": "square"},
                 hovertemplate="scaled: confidence %{x:.3f}, accuracy %{y:.3f}<extra></extra>")
        )  # fmt: skip
    confidence = axis("confidence, largest mean probability (0–1)", range=[0, 1])
    shares = [_shares(whole, "ensemble", BLUE)]
    if len(found.inside) > 1:
        shares.append(_shares(single, "single members", GREEN))
    most = max(whole["inputs"]) / sum(whole["inputs"])
    return [
        Panel("reliability-diagram", "Accuracy against confidence", told, traces,
              layout(confidence, axis("accuracy (0–1)", range=[0, 1.02]), height=340, barmode="overlay")),
        Panel("confidences", "Confidence", f"Share of the inputs in each bin; {most:.0%} are in the fullest.", shares,
              layout(confidence, axis("share of inputs", type="log", tickformat=".3~%", dtick=1), height=340,
                     barmode="group", bargap=0.15)),
    ]  # fmt: skip


def _bars(found: Bins) -> list[Trace]:
    """Draw the accuracy of each bin, and the gap to its confidence."""
    known, bins = _known(found), len(found["inputs"])
    place = {"type": "bar", "x": [(b + 0.5) / bins for b in known], "width": [1 / bins] * len(known)}
    accuracy, confidence, inputs = ([found[n][b] for b in known] for n in ("accuracy", "confidence", "inputs"))
    about = [[c, a, int(n)] for c, a, n in zip(confidence, accuracy, inputs, strict=True)]
    hover = "confidence %{customdata[0]:.3f}, accuracy %{customdata[1]:.3f}, %{customdata[2]:,} inputs<extra></extra>"
    edge = {"color": "white", "width": 0.6}
    gaps = [c - a for c, a in zip(confidence, accuracy, strict=True)]
    hatch = {"shape": "/", "fgcolor": RED, "bgcolor": "rgba(0,0,0,0)", "size": 6, "solidity": 0.25}
    return [
        {**place, "name": "accuracy", "y": accuracy, "marker": {"color": BLUE, "opacity": 0.85, "line": edge},
         "customdata": about, "hovertemplate": hover},
        {**place, "name": "gap", "y": gaps, "base": accuracy, "customdata": about, "hovertemplate": hover,
         "marker": {"color": RED, "pattern": hatch, "line": {"color": RED, "width": 1}}},
    ]  # fmt: skip


def _shares(found: Bins, name: str, colour: str) -> Trace:
    total, bins = sum(found["inputs"]), len(found["inputs"])
    shares = [n / total if n else None for n in found["inputs"]]
    return {
        "type": "bar", "name": name, "x": [(b + 0.5) / bins for b in range(bins)], "y": shares,
        "customdata": [int(n) for n in found["inputs"]], "marker": {"color": colour, "opacity": 0.85},
        "hovertemplate": f"{name}: %{{y:.2%}} (%{{customdata:,}})<extra></extra>",
    }  # fmt: skip


def _known(found: Bins) -> list[int]:
    """Return the bins that are not empty."""
    return [b for b, n in enumerate(found["inputs"]) if n]


def _behind(whole: Bins, single: Bins) -> Rows:
    bins = len(whole["inputs"])
    rows: list[Sequence[str]] = []
    for b in range(bins):
        cells = [f"{b / bins:.3f} to {(b + 1) / bins:.3f}"]
        for found in (whole, single):
            cells += [f"{int(found['inputs'][b]):,}", *(_text(found[n][b]) for n in ("confidence", "accuracy"))]
        rows.append(cells)
    header = ("bin", "inputs", "confidence", "accuracy", "pooled", "confidence", "accuracy")
    return Rows("bins", header, rows, ())


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"
