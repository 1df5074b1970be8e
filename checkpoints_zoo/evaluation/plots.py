"""Pictures of reports, as PNG files: the same report gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, path_of, save
from checkpoints_zoo.formats.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from checkpoints_zoo.evaluation.growth import Growth, Needed
    from checkpoints_zoo.evaluation.metrics import Interval


# Curves of figures over the sizes of ensembles, and what all pictures of a report say of it.


FAINTEST = 1e-7  # what is below it is float32's rounding

WIDE, HIGH = 4.0, 2.6  # inches a panel
COLUMNS = 3
PLAIN = ("mean of that size", "a fresh ensemble", "all members")  # in the key of every curve
NAMES = {
    "accuracy": "accuracy (%)", "nll": "NLL (nats)", "brier": "Brier (0..2)", "ece": "ECE (0..1)",
    "adaptive_ece": "adaptive ECE (0..1)", "ace": "ACE (0..1)", "aurc": "AURC (0..1)",
    "mi_id": "mutual information, ID (nats)", "disagreement": "disagreement (0..1)",
    "mi_ood": "mutual information, OOD (nats)", "auroc": "AUROC (0..1)", "aupr": "AUPR (0..1)",
    "fpr95": "FPR95 (0..1)", "temperature": "temperature (0.05..20)",
}  # fmt: skip


class Drawable(Protocol):
    """What a report must have to be drawn: see `evaluation.Report`."""

    @property
    def collection(self) -> str: ...
    @property
    def citation(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def ood(self) -> str: ...
    @property
    def inputs(self) -> int: ...
    @property
    def ood_inputs(self) -> int: ...
    @property
    def members(self) -> int: ...
    @property
    def ensemble(self) -> Mapping[str, Interval]: ...
    @property
    def member(self) -> Mapping[str, Interval]: ...
    @property
    def curve(self) -> Mapping[int, Mapping[str, Interval]]: ...
    @property
    def drawing(self) -> Mapping[str, Any]: ...
    @property
    def growth(self) -> Mapping[str, Growth]: ...
    @property
    def calibrated(self) -> Scaled | None: ...
    def answers(self) -> Iterable[tuple[str, Needed]]: ...


class Scaled(Protocol):
    """The same after temperature scaling: see `evaluated.Calibrated`."""

    @property
    def growth(self) -> Mapping[str, Growth]: ...
    @property
    def ensemble(self) -> Mapping[str, Interval]: ...
    @property
    def curve(self) -> Mapping[int, Mapping[str, Interval]]: ...


def curves(report: Drawable, path: str | Path, figures: Iterable[str] | None = None) -> Path:
    """Draw figures over the sizes of ensembles into a PNG, by temporary name and rename; return its path.

    Args:
        report: of an evaluation.
        path: of the PNG; its folder is made.
        figures: their names, a panel each; None for all of the report's.

    Raises:
        UsageError: no such figure, a name that is no PNG's, or a place that can't be written to.
    """
    names = _names(report, figures)
    return save(lambda: draw_curves(report, names), path_of(path), title(report))


def draw_curves(report: Drawable, figures: Iterable[str] | None = None) -> Figure:
    """Draw a panel a figure; return the figure, whose axes are labelled by the figures' names."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = _names(report, figures)
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    size = (max(2, columns) * WIDE, rows * HIGH + 1.6)
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=size, dpi=DPI, layout=spaced)
    figure.suptitle(f"{title(report)}\n{about(report)}", fontsize=12)
    figure.supxlabel(f"members in the ensemble\n\n{notes(report)}", fontsize=8, color=GREY)
    for at, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, at + 1, label=name)
        curve(report, axes, name, NAMES[name], 100 if name == "accuracy" else 1)
        own_key(axes)
    return figure


def _names(report: Drawable, figures: Iterable[str] | None) -> list[str]:
    """Return the figures that are drawn, those asked for or all; an unknown one is an error."""
    scaled = {} if report.calibrated is None else report.calibrated.ensemble
    known = [n for n in NAMES if n in report.ensemble or n in scaled]
    names = known if figures is None else [figures] if isinstance(figures, str) else list(figures)
    for name in names:
        if name not in known:
            raise UsageError(f"figure {name!r}", expected=f"one of {', '.join(known)}", found="none such")
    if not names:
        raise UsageError("figures of a picture", expected="one or more", found="none")
    return names


def curve(report: Drawable, axes: Axes, name: str, label: str, scale: float) -> None:
    """Draw a figure over the sizes of ensembles: a band for fresh ensembles, a bar for all members, the limit.

    Args:
        report: of an evaluation.
        axes: to draw into.
        name: of the figure; if only scaled ensembles have it, theirs is drawn in its place.
        label: of the axis.
        scale: what to multiply by: 100 for percent.
    """
    sizes = sorted(report.curve)
    if name in report.ensemble:
        _line(axes, report.curve, name, scale, report.members, (BLUE, RED), "")
        _limit(axes, report.growth, name, scale, BLUE)
    scaled = report.calibrated
    if scaled is not None and name in scaled.ensemble:
        _line(axes, scaled.curve, name, scale, report.members, (GREEN, GREEN), "temperature scaled")
        _limit(axes, scaled.growth, name, scale, GREEN)
    for kind, needed in report.answers():
        if needed.figure == name and needed.members is not None:
            what = f"within {needed.within:.3g}{f', {kind}' if kind else ''}: {needed}"
            axes.axvline(needed.members, color=GREEN if kind else BLUE, linestyle=":", linewidth=1.5, label=what)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := _apart(sizes), [f"{size:,}" for size in ticks])
    axes.minorticks_off()
    axes.set(xlim=(sizes[0] / 1.2, sizes[-1] * 1.2), ylabel=label)


def _line(
    axes: Axes,
    figures: Mapping[int, Mapping[str, Interval]],
    name: str,
    scale: float,
    members: int,
    colours: tuple[str, str],
    label: str,
) -> None:
    """Draw one line with its band and bar.

    Args:
        axes: to draw into.
        figures: size -> figure -> interval.
        name, scale: of the figure.
        members: how many there are.
        colours: of the line, and of the bar at all members.
        label: for the key; "" for those of the plain figures.
    """
    colour, full_colour = colours
    sizes = sorted(figures)
    found = [figures[size][name] for size in sizes]
    values = [f.value * scale for f in found]
    axes.plot(sizes, values, color=colour, marker="o", markersize=4.5, label=label or "mean of that size")
    band = [
        (size, f.low * scale, f.high * scale)
        for size, f in zip(sizes, found, strict=True)
        if size < members and f.low is not None and f.high is not None
    ]
    if band:
        at, low, high = zip(*band, strict=True)
        axes.fill_between(
            at, low, high, color=colour, alpha=0.18, linewidth=0, label=None if label else "a fresh ensemble"
        )
    full = figures[members][name]
    if full.low is not None and full.high is not None:
        ends = [[(full.value - full.low) * scale], [(full.high - full.value) * scale]]
        axes.errorbar(
            [members], [full.value * scale], ends, color=full_colour, marker="D", markersize=4, capsize=4,
            linewidth=1.6, label=None if label else "all members",
        )  # fmt: skip


def _limit(axes: Axes, growth: Mapping[str, Growth], name: str, scale: float, colour: str) -> None:
    """Draw a figure's limit, where there is one."""
    if name in growth:
        axes.axhline(growth[name].limit.value * scale, color=colour, linestyle="--", linewidth=1)


def own_key(axes: Axes) -> None:
    """Name what only some panels have, in the corner that curves leave free."""
    shown = [(line, name) for line, name in zip(*axes.get_legend_handles_labels(), strict=True) if name not in PLAIN]
    if shown:
        axes.legend([line for line, _ in shown], [name for _, name in shown], loc="best", fontsize=8)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Return the sizes whose labels have room on a logarithmic axis, the largest first to be kept."""
    room = max(0.06 * math.log2(sizes[-1] / sizes[0]), 1e-9)
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or math.log2(kept[-1] / size) >= room:
            kept.append(size)
    return kept[::-1]


def title(report: Drawable) -> str:
    """Return the title of a report's pictures."""
    return f"{report.collection}, an ensemble of {counted(report.members, 'member')}"


def about(report: Drawable) -> str:
    """Return what was measured, for the line below the title."""
    about = f"{report.data.split(' ')[0]}, {counted(report.inputs, 'input')}"
    if report.ood:
        about += f"; out of distribution: {report.ood.split(' ')[0]}, {counted(report.ood_inputs, 'input')}"
    return about


def notes(report: Drawable) -> str:
    """Say what the intervals mean and which members these are; return the foot of a picture."""
    text = "Bands: where 95 % of fresh ensembles of that size fall. [ ]: 95 % intervals over members,"
    text += " by a delete-d jackknife (a bootstrap for the mean of members)."
    text = text if report.members >= 3 else "Too few members for intervals."
    if report.growth:
        text += "\nDashed: the limit, of an infinite ensemble."
    asked = [
        f"{NAMES[x.figure].partition(' (')[0]} within {x.within:.3g}{f', {kind}' if kind else ''}: {x}"
        for kind, x in report.answers()
    ]
    if asked:
        text += f" Members needed to come near it: {'; '.join(asked)}."
    text = "\n".join("\n".join(wrap(line, 170)) for line in text.split("\n"))
    # Without the source's label, which may be a folder of the machine.
    members = report.citation.rpartition("@")[2]
    shown = members if len(members) <= 150 else f"{members[:100]}…{members[-45:]}"
    return f"{text}\n{f'Members: {shown}' if shown else ''}"


def stated(interval: Interval, scale: float = 1) -> str:
    """Write a figure and its interval, in four digits or the fewer that the interval allows; return the text.

    Args:
        interval: of the figure; bounds that rounding alone sets apart are left out.
        scale: what to multiply by: 100 for percent.
    """
    value = interval.value * scale
    if not math.isfinite(value):
        return "-"
    if interval.low is None or interval.high is None or interval.high - interval.low < FAINTEST:
        return f"{round(value, 7):.4g}"
    half = (interval.high - interval.low) * scale / 2
    places = [1 - math.floor(math.log10(half)), 3 - math.floor(math.log10(max(abs(value), half)))]
    digits = max(0, min(places))
    return f"{value:.{digits}f} [{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


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
