"""Pictures of reports, as PNG files: the same report gives the same bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.curve_plots import (
    FAINTEST,
    PLAIN,
    Drawable,
    Scaled,
    about,
    curve,
    notes,
    own_key,
    title,
)
from checkpoints_zoo.evaluation.curve_plots import stated as stated
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, path_of, save
from checkpoints_zoo.formats.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (11.0, 8.4)


def report(report: Drawable, path: str | Path) -> Path:
    """Draw a report into a PNG, by temporary name and rename; return its path.

    Args:
        report: of an evaluation.
        path: of the PNG; its folder is made.

    Raises:
        UsageError: a name that is no PNG's, or a place that can't be written to.
    """
    return save(lambda: draw(report), path_of(path), title(report))


def draw(report: Drawable) -> Figure:
    """Draw a report's four panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=INCHES, dpi=DPI, layout=spaced)
    figure.suptitle(f"{title(report)}\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 0.958, about(report), ha="center", va="top", color=GREY, fontsize=10)
    figure.supxlabel(notes(report), fontsize=8, color=GREY)
    panels = figure.add_gridspec(2, 2)
    upper = panels[0, 0].subgridspec(2, 1, height_ratios=(3.2, 1), hspace=0.04)
    bars = figure.add_subplot(upper[0], label="reliability")
    _reliability(report, bars, figure.add_subplot(upper[1], label="counts", sharex=bars))
    upper = panels[0, 1].subgridspec(2, 1, hspace=0.04)
    accuracy = figure.add_subplot(upper[0], label="accuracy")
    curve(report, accuracy, "accuracy", "accuracy (%)", 100)
    accuracy.set_ylim(top=min(accuracy.get_ylim()[1], 100.2))
    accuracy.tick_params(labelbottom=False)
    _key(accuracy, "b  Accuracy and NLL against ensemble size")
    nll = figure.add_subplot(upper[1], label="nll", sharex=accuracy)
    curve(report, nll, "nll", "NLL (nats)", 1)
    nll.set(xlabel="members in the ensemble", ylim=(max(nll.get_ylim()[0], 0), None))
    own_key(nll)
    _accuracies(report, figure.add_subplot(panels[1, 0], label="member accuracy"))
    _information(report, figure.add_subplot(panels[1, 1], label="information"))
    return figure


def _key(axes: Axes, title: str) -> None:
    """Put the title of a panel above its axes, and the key between the two."""
    axes.set_title(title, pad=22)
    parts = zip(*axes.get_legend_handles_labels(), strict=True)
    shown = [(line, name) for line, name in parts if name in PLAIN or axes.get_label() == "reliability"]
    key = axes.legend(
        [line for line, _ in shown], [name for _, name in shown],
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=3, borderaxespad=0.2, handlelength=1.6,
        columnspacing=1.6, handletextpad=0.6,
    )  # fmt: skip
    # The title has made room for it; its width is not to narrow the axes.
    key.set_in_layout(False)


def _reliability(report: Drawable, axes: Axes, counts: Axes) -> None:
    """Draw accuracy over confidence in bins, the gap between the two, and the inputs of each bin."""
    confidence, accuracy, inputs = (
        [float(v) for v in report.drawing[f"reliability_{n}"]] for n in ("confidence", "accuracy", "inputs")
    )
    bins = len(inputs)
    filled, width = [b for b in range(bins) if inputs[b]], 1 / bins
    middles, shown = [(b + 0.5) / bins for b in filled], [accuracy[b] for b in filled]
    gaps = [confidence[b] - accuracy[b] for b in filled]
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="perfect calibration")
    axes.bar(middles, shown, width, color=BLUE, alpha=0.85, edgecolor="white", label="accuracy")
    axes.bar(
        middles, gaps, width, bottom=shown, color="none", edgecolor=RED, hatch="////", linewidth=1.2,
        label="gap to mean confidence",
    )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy (0..1)")
    axes.tick_params(labelbottom=False)
    _key(axes, "a  Reliability diagram")
    # In the corner above the bars, which may be anywhere.
    axes.set_title(f"ECE {stated(report.ensemble['ece'])}", loc="right", pad=22, fontsize=10, fontweight="normal")
    if report.calibrated is not None:
        _scaled_reliability(report, report.calibrated, axes)
    counts.bar(middles, [inputs[b] for b in filled], width, color=GREY, edgecolor="white")
    counts.set(yscale="log", ylim=(0.7, 3 * max(inputs)), ylabel="inputs", xlabel="confidence of the top class")
    counts.minorticks_off()
    counts.yaxis.set_major_formatter("{x:,.0f}")


def _scaled_reliability(report: Drawable, scaled: Scaled, axes: Axes) -> None:
    """Draw accuracy over confidence after temperature scaling, a point a bin, over the bars from before."""
    found = [report.drawing[f"scaled_reliability_{n}"] for n in ("confidence", "accuracy", "inputs")]
    points = [(c, a) for c, a, n in zip(*found, strict=True) if n]
    stating = f"scaled by T = {stated(scaled.ensemble['temperature'])}\nECE {stated(scaled.ensemble['ece'])}"
    line = axes.plot(*zip(*points, strict=True), color=GREEN, marker="o", markersize=4, linewidth=1.2)
    key = axes.get_legend()
    box = axes.legend(line, [stating], loc="upper left", fontsize=8, frameon=True, framealpha=0.85, edgecolor="none")
    box.set_in_layout(False)
    if key is not None:  # a second one takes its place
        axes.add_artist(key)


def _accuracies(report: Drawable, axes: Axes) -> None:
    """Draw the members' accuracies, their mean and the ensemble's."""
    correct = [round(a * report.inputs) for a in report.drawing["member_accuracy"]]
    # Whole numbers of inputs, so that no bar holds more of the possible values than its neighbour.
    apart = max(correct) - min(correct)
    step = math.ceil((apart + 1) / 16)
    edges = [(min(correct) - 0.5 + step * i) * 100 / report.inputs for i in range(2 + apart // step)]
    heights, *_ = axes.hist(
        [c * 100 / report.inputs for c in correct], edges, color=BLUE, alpha=0.85, edgecolor="white",
        label=counted(report.members, "member"),
    )  # fmt: skip
    mean, everyone = report.member["accuracy"], report.ensemble["accuracy"]
    named = f"mean of members: {stated(mean, 100)}", f"ensemble: {stated(everyone, 100)}"
    axes.axvline(mean.value * 100, ymax=0.72, color=GREY, linestyle="--", label=named[0])
    axes.axvline(everyone.value * 100, ymax=0.72, color=RED, linewidth=2, label=named[1])
    axes.set(title="c  Accuracy of the members", xlabel="accuracy (%)", ylabel="members")
    axes.set_ylim(0, float(max(heights)) * 1.5)
    sides, near = axes.get_xlim(), everyone.value * 100
    axes.set_xlim(min(sides[0], near - 0.4), max(sides[1], near + 0.4))
    axes.locator_params(axis="y", integer=True)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.legend(loc="upper left")


def _information(report: Drawable, axes: Axes) -> None:
    """Draw how much the members disagree about each input, in and out of distribution."""
    import numpy as np

    axes.set(title="d  Mutual information of label and member", ylabel="share of inputs")
    sets = [("mi_id", "in distribution", BLUE), ("mi_ood", "out of distribution", RED)]
    values = {n: np.asarray(report.drawing[n], np.float64) for n, *_ in sets if report.drawing.get(n)}
    together = np.concatenate(list(values.values()))
    if together.max() <= FAINTEST:
        text = "one member has none" if report.members == 1 else "none: the members agree on all inputs"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    lowest = 10.0 ** math.floor(math.log10(max(np.quantile(together, 0.01), FAINTEST)))
    edges = np.geomspace(lowest, together.max() * 1.02, 41).tolist()
    top = 0.0
    for name, what, colour in (s for s in sets if s[0] in values):
        found = np.clip(values[name], lowest, None)
        shares, _, _ = axes.hist(
            found, edges, weights=np.full(len(found), 1 / len(found)), histtype="stepfilled",
            facecolor=(colour, 0.35), edgecolor=colour, linewidth=1.4,
            label=f"{what}, mean {stated(report.ensemble[name])}",
        )  # fmt: skip
        top = max(top, float(np.max(shares)))
    clipped = "; the first bar: that or less" if together.min() < lowest else ""
    axes.set_xlabel(f"mutual information of an input (nats{clipped})")
    axes.set(xscale="log", xlim=(lowest / 1.1, edges[-1] * 1.1), ylim=(0, top * 1.5))
    detected = f"AUROC {stated(report.ensemble['auroc'])}, by 1 − largest probability" if report.ood else ""
    axes.plot([], [], " ", label=detected or "no out-of-distribution inputs were given")
    axes.legend(loc="upper left")
