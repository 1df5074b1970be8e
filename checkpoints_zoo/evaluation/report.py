"""The result of an evaluation: figures with intervals, curves over sizes, before and after temperature scaling.

This is one file, because a report makes its own tables and pictures; functions that need matplotlib or pandas import
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import growth
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, PURPLE, RED, check_picture_path, save_figure
from checkpoints_zoo.evaluation.figures import (
    CALIBRATION,
    FIGURES,
    KNOWN_FIGURES,
    MEMBER_DIFFERENCES,
    SENSITIVE_FIGURES,
    TEMPERATURE,
    find_figure,
)
from checkpoints_zoo.evaluation.growth import Growth, Needed
from checkpoints_zoo.evaluation.held_out import HELD_OUT_RULE
from checkpoints_zoo.evaluation.metrics import FEWEST_MEMBERS_IF_SKEWED, Interval
from checkpoints_zoo.evaluation.tables import ROUNDING_ERROR, as_text
from checkpoints_zoo.formats.printing import PrintedResult
from checkpoints_zoo.formats.text import align_columns, count_with_noun, finite_or_null, one_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SIZE = (11.0, 8.4)  # Width and height of a report's picture in inches.
PANEL_WIDTH, PANEL_HEIGHT = 4.0, 2.6  # Width and height in inches of one panel of curves.
NOTE_LETTERS_PER_INCH, NOTE_LINE_HEIGHT = 15.4, 0.14  # Letters an inch, and height in inches, of lines of notes.
LONGEST_AXIS_LABEL = 20  # Largest number of letters in a line of an axis label.
PANEL_COLUMNS = 3  # Number of columns of panels in a picture of curves.
MOST_SIZES = 3  # Largest number of ensemble sizes in a text table.
USUAL_LEGEND_ENTRIES = ("mean of that size", "a new ensemble", "all members")  # Legend entries of every curve.
TITLE_PAD = 22  # Space in points between a panel and its title, for a legend.
FEW_INPUTS = 10  # Bars of bins with fewer inputs than FEW_INPUTS are pale.
Curve = Mapping[int, Mapping[str, Interval]]
Bins = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class ScaledFigures:
    """The figures after temperature scaling; each ensemble's mean probabilities have their own temperature.

    Args:
        held_out: name and fingerprint of the images that the temperatures were fitted to.
        inputs: number of the held-out inputs.
        share: the share of the report's images that was held out; None if other images were used.
        ensemble, member, curve: tables as in the report, with the figure "temperature" and without figures that scaling
            does not change.
        growth: figure -> the figure's limit, and the distance of each ensemble size from the limit.
    """

    held_out: str
    inputs: int
    share: float | None
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble after scaling.

        Raises:
            UsageError: there is no figure of this name.
        """
        return find_figure(self.ensemble, figure)

    @property
    def temperature(self) -> Interval:
        """The temperature of the whole ensemble."""
        return self.ensemble[TEMPERATURE]

    @property
    def at_bound(self) -> bool:
        """Whether the temperature is the lowest or highest allowed value, so that the best value may lie outside."""
        return self.temperature.value in (
            KNOWN_FIGURES[TEMPERATURE].lowest_value,
            KNOWN_FIGURES[TEMPERATURE].highest_value,
        )

    def needed(self, figure: str, within: float | str) -> Needed:
        """Return the number of members needed after scaling, as `Report.needed` does."""
        return growth.needed_members(self.growth, figure, within)

    def to_json(self) -> dict[str, Any]:
        """Return the temperature and its held-out inputs as JSON values."""
        rule = None if self.share is None else HELD_OUT_RULE
        facts = {"held_out": self.held_out, "inputs": self.inputs, "share": self.share, "rule": rule}
        return {**facts, **asdict(self.temperature), "at_bound": self.at_bound}


@dataclass(frozen=True, repr=False)
class Report(PrintedResult):
    """The result of an evaluation: figures of ensembles, each an Interval (value, low, high).

    Args:
        collection: name of the collection.
        citation: citation of the members.
        data, ood: names and fingerprints of the images ("digits/test 0123456789abcdef"); ood is "" if there are none.
        inputs, ood_inputs: number of test inputs, and number of inputs out of distribution.
        members: number of measured members.
        ensemble: figure -> value of the ensemble of all members; low and high are from a delete-d jackknife, which
            leaves out half of the members (d = N/2).
        member: figure -> mean over the single members; low and high are from a bootstrap over members.
        curve: size -> figure -> mean over ensembles of that size; low and high bound the figure of a new ensemble of
            that size (for all members, low and high are the same as in `ensemble`).
        drawing: further values for the picture: accuracy of each member, reliability bins, mutual information of each
            input.
        growth: figure -> the figure's limit (the figure of an infinite ensemble), and the distance of each ensemble
            size from the limit.
        within: figure -> requested distance from the limit.
        calibrated: the figures after temperature scaling; None without scaling.
        has_members: whether members were measured; a posterior mean has none, and no figures of diversity.
    """

    collection: str
    citation: str
    data: str
    ood: str
    inputs: int
    ood_inputs: int
    members: int
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    drawing: Mapping[str, Any] = field(repr=False, compare=False)
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)
    within: Mapping[str, float | str] = field(default_factory=dict)
    calibrated: ScaledFigures | None = None
    has_members: bool = True

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble.

        Raises:
            UsageError: there is no figure of this name, or a posterior mean has no such figure.
        """
        if not self.has_members and figure in FIGURES and FIGURES[figure].input_kind == MEMBER_DIFFERENCES:
            expected = "a figure that is defined without members"
            found = "one of the differences between members, and a posterior mean has none"
            raise UsageError(f"figure {figure!r}", expected=expected, found=found)
        return find_figure(self.ensemble, figure)

    def _one_line(self) -> str:
        figures = ", ".join(f"{n} {self.ensemble[n].value:.4g}" for n in ("accuracy", "nll") if n in self.ensemble)
        return f"{self.collection!r}, {count_with_noun(self.members, 'member')} on {self.data.split(' ')[0]}, {figures}"

    def to_text(self, sizes: Iterable[int] | None = None, figures: Iterable[str] = KNOWN_FIGURES) -> str:
        """Return a table with one figure a row and one ensemble size a column, and lines that explain the table.

        Args:
            sizes: ensemble sizes of the columns; None for the smallest, a middle and the largest size.
            figures: names of the figures in the rows.
        """
        all_sizes = sorted(self.curve)
        shown_sizes = (
            all_sizes if len(all_sizes) <= MOST_SIZES else [all_sizes[0], all_sizes[len(all_sizes) // 2], all_sizes[-1]]
        )
        return _report_text(self, shown_sizes if sizes is None else list(sizes), list(figures))

    @property
    def limits(self) -> dict[str, Interval]:
        """Figure -> estimate for an infinite ensemble of such members, with an interval over members."""
        return {name: x.limit for name, x in self.growth.items()}

    def needed(self, figure: str, within: float | str) -> Needed:
        """Return how many members bring the mean figure within some distance of its limit.

        Args:
            figure: name of the figure.
            within: the allowed distance from the limit, in the figure's unit, or as a share of the limit ("5%").

        Raises:
            UsageError: there is no figure of this name, or the distance is not above 0.

        >>> import checkpoints_zoo as zoo
        >>> report = zoo.evaluate(zoo.load("convnet-digits", n=16))
        >>> print(report.needed("brier", within=0.002))
        8
        """
        return growth.needed_members(self.growth, figure, within)

    @property
    def remarks(self) -> list[str]:
        """Sentences about missing intervals, and about figures that are best for fewer than all members."""
        return _remarks_on(self, self.ensemble)

    def answers(self) -> Iterator[tuple[str, Needed]]:
        """Yield the needed members for each distance in `within`: ("", needed) before scaling, ("scaled", needed)
        after."""
        for figure, within in self.within.items():
            yield "", self.needed(figure, within)
            if self.calibrated is not None and figure in self.calibrated.growth:
                yield "scaled", self.calibrated.needed(figure, within)

    def _rows(self) -> list[dict[str, Any]]:
        rows = list(_figure_rows(self.curve, self.member, ""))
        if self.calibrated is not None:
            rows += _figure_rows(self.calibrated.curve, self.calibrated.member, ", scaled")
        return rows

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each figure and size; columns: of, members, figure, value, low, high, unit,
        better."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the report as JSON text, with null for values that could not be computed."""
        report_fields = {
            n: getattr(self, n) for n in ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
        }
        growths = {"ensemble": self.growth}
        if self.calibrated is not None:
            growths["ensemble, scaled"] = self.calibrated.growth
        limits = [
            {"of": row_kind, "figure": name, **asdict(x.limit)}
            for row_kind, growth_by_figure in growths.items()
            for name, x in growth_by_figure.items()
        ]
        needed = [{"of": "ensemble, scaled" if scaled else "ensemble", **asdict(x)} for scaled, x in self.answers()]
        values = {
            **report_fields,
            "level": 0.95,
            "temperature": None if self.calibrated is None else self.calibrated.to_json(),
            "needed": needed,
            "remarks": self.remarks,
            "limits": limits,
            "figures": self._rows(),
        }
        return json.dumps(finite_or_null(values), indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw reliability, curves over ensemble size, member accuracies and mutual information into a PNG file; return
        its path.

        Equal reports give files with equal bytes.

        Args:
            path: path of the PNG file; its folder is made if missing. The file is written under a temporary name and
                then renamed.

        Raises:
            UsageError: the name does not end in .png, or the file can't be written.
        """
        return save_figure(
            lambda: draw_report(self), check_picture_path(path), picture_title(self), citation_without_source(self)
        )

    def plot_curves(self, path: str | Path, figures: Iterable[str] | None = None) -> Path:
        """Draw figures over ensemble size, with bands, limits and needed members, into a PNG file; return its path.

        Args:
            path: path of the PNG file; its folder is made if missing. The file is written under a temporary name and
                then renamed.
            figures: names of the figures, one panel each; None for all figures.

        Raises:
            UsageError: a figure does not exist, the name does not end in .png, or the file can't be written.
        """
        names = _select_figures(self, figures)
        return save_figure(
            lambda: draw_curves(self, names),
            check_picture_path(path),
            picture_title(self),
            citation_without_source(self),
        )


def _figure_rows(curve: Curve, member: Mapping[str, Interval], kind_suffix: str) -> Iterator[dict[str, Any]]:
    """Yield one table row for each figure and size.

    Args:
        curve, member: the fields `curve` (figures by ensemble size) and `member` (mean figures of single members) of a
            report.
        kind_suffix: text that is appended to the column "of": "" or ", scaled".
    """
    kinds_sizes_figures = [("ensemble", size, figures) for size, figures in curve.items()]
    kinds_sizes_figures.append(("mean of members", 1, member))
    for row_kind, size, figures in kinds_sizes_figures:
        for name, x in figures.items():
            description = KNOWN_FIGURES[name]
            yield {
                "of": f"{row_kind}{kind_suffix}", "members": size, "figure": name, "value": x.value, "low": x.low,
                "high": x.high, "unit": description.unit, "better": description.better,
            }  # fmt: skip


def _report_text(report: Report, sizes: Sequence[int], figures: Sequence[str]) -> str:
    """Lay out a report and explain its intervals; return the text."""
    header_cells = ["ensemble of", *(f"{size:,}" for size in sizes)]
    rows = []
    for scaled, curve in ((False, report.curve), (True, report.calibrated.curve if report.calibrated else None)):
        for name in figures:
            if curve is None or name not in curve[report.members]:
                continue
            label = f"{KNOWN_FIGURES[name].label}{', scaled' if scaled and name != TEMPERATURE else ''}"
            rows.append([label, *(as_text(curve[size][name], KNOWN_FIGURES[name].scale) for size in sizes)])
    table = align_columns([header_cells, *rows], range(1, len(header_cells)))
    blocks = [table, "\n".join(_needed_members_lines(report)), _measurement_notes(report)]
    return "\n\n".join(block for block in blocks if block)


def _needed_members_lines(report: Report) -> Iterator[str]:
    """Yield a line of text for each distance in `within` that states the needed number of members."""
    for kind, answer in report.answers():
        growths = report.calibrated.growth if kind and report.calibrated is not None else report.growth
        scale = KNOWN_FIGURES[answer.figure].scale
        name, _, unit = KNOWN_FIGURES[answer.figure].label.removesuffix(")").rpartition(" (")
        within = f"{answer.within * scale:.4g}{'' if '..' in unit else f' {unit}'}"
        limit = as_text(growths[answer.figure].limit, scale)
        yield f"members needed for {name}{f', {kind},' if kind else ''} within {within} of its limit {limit}: {answer}"


def _measurement_notes(report: Report) -> str:
    """Return sentences on the measured members and inputs, the meaning of intervals, and the report's remarks."""
    measured_on = f"{report.data.split(' ')[0]}, {report.inputs:,} inputs"
    if report.ood:
        measured_on += f"; OOD: {report.ood.split(' ')[0]}, {report.ood_inputs:,} inputs"
    intervals = "[ ]: the range of 95 % of new ensembles of that size; for all members, a 95 % jackknife interval."
    if report.calibrated is not None:
        measured_on += (
            f". Temperature fitted to {report.calibrated.inputs:,} inputs of {report.calibrated.held_out.split(' ')[0]}"
        )
        if report.calibrated.at_bound:
            measured_on += ", on which no temperature is best: it is at its bound"
    lines = [one_line(f"Measured now on {measured_on}.", 400), *([intervals] if report.members >= 3 else [])]
    return "\n".join([*lines, *(line for remark in report.remarks for line in wrap(remark, 118))])


def _remarks_on(report: Report, figures: Iterable[str]) -> list[str]:
    """Return the remarks of a report that are about some of its figures."""
    names = [name for name in report.ensemble if name in set(figures)]
    return [*_sentences_on_missing_intervals(report, names), *_sentences_on_better_small_sizes(report, names)]


def _sentences_on_missing_intervals(report: Report, figures: Sequence[str]) -> Iterator[str]:
    """Yield sentences on the intervals of figures that the report leaves out, with the reason."""
    if not report.has_members:
        titles = [figure.title for figure in FIGURES.values() if figure.input_kind == MEMBER_DIFFERENCES]
        yield f"A posterior mean has no members: no intervals, and {'; '.join(titles)} are not defined."
    elif report.members < 3:
        yield "No intervals: they need 3 members or more."
    elif report.members < FEWEST_MEMBERS_IF_SKEWED:
        names = [KNOWN_FIGURES[name].title for name in KNOWN_FIGURES if name in SENSITIVE_FIGURES and name in figures]
        if not names:
            return
        share = 100 * 0.9**report.members
        yield (
            f"No intervals of limits, of means of members, and of the ensemble's {'; '.join(names)}: they need "
            f"{FEWEST_MEMBERS_IF_SKEWED} members or more. If a tenth of the population is far worse than the others, "
            f"{share:.0f} % of samples of {report.members} members have none of these, and an interval would miss the "
            "truth."
        )


def _sentences_on_better_small_sizes(report: Report, figures: Sequence[str]) -> Iterator[str]:
    """Yield sentences on figures that are best for fewer than all members, with a possible reason."""
    chance_texts: list[str] = []
    calibration_texts: list[str] = []
    other_texts: list[str] = []
    for name in figures:
        full_value = report.ensemble[name]
        sign = {"higher": 1, "lower": -1}.get(KNOWN_FIGURES[name].better)
        if sign is None or name not in report.growth:
            continue
        values = {size: sign * intervals[name].value for size, intervals in report.curve.items() if name in intervals}
        best_size = max(values, key=lambda size: values[size])
        if best_size == report.members or values[best_size] - values[report.members] <= ROUNDING_ERROR:
            continue
        bound = full_value.high if sign > 0 else full_value.low
        if bound is None or values[best_size] <= sign * bound:
            chance_texts.append(f"{KNOWN_FIGURES[name].title} (for {count_with_noun(best_size, 'member')})")
            continue
        scale = KNOWN_FIGURES[name].scale
        ends = f"{report.curve[best_size][name].value * scale:.3g}", f"{full_value.value * scale:.3g}"
        text = f"{KNOWN_FIGURES[name].title} ({ends[0]} for {count_with_noun(best_size, 'member')}, {ends[1]} for all)"
        (calibration_texts if KNOWN_FIGURES[name].group == CALIBRATION else other_texts).append(text)
    if calibration_texts:
        yield (
            f"Worse for all members than for fewer: {', '.join(calibration_texts)}. The mean of more members is less "
            "confident; where confidence is below accuracy, calibration gets worse. Temperature scaling corrects this."
        )
    if other_texts:
        yield (
            f"Worse for all members than for fewer: {', '.join(other_texts)}. Averaging probabilities does not improve "
            "every figure, and members that are worse than the others pull the mean down."
        )
    if chance_texts:
        yield (
            f"Best for fewer than all members: {', '.join(chance_texts)}. The difference is within the interval of all "
            "members, so it may be chance."
        )


def draw_report(report: Report) -> Figure:
    """Draw a report's four panels; return the matplotlib figure, whose axes have labels that name the panels."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=PICTURE_SIZE, dpi=DPI, layout=layout_engine)
    figure.suptitle(f"{picture_title(report)}\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 0.958, picture_subtitle(report), ha="center", va="top", color=GREY, fontsize=10)
    figure.supxlabel(picture_notes(report, PICTURE_SIZE[0]), fontsize=8, color=GREY)
    panel_grid = figure.add_gridspec(
        20, 2
    )  # All panels share one grid, so that the left and right edges of upper and lower panels are aligned.
    reliability_axes = figure.add_subplot(panel_grid[:8, 0], label="reliability")
    draw_reliability(report, reliability_axes)
    if report.calibrated is not None:
        draw_scaled_reliability(report, report.calibrated, reliability_axes)
        reliability_axes.lines[-1].set_label("_scaled")  # The scaled bars get their entry in a separate legend.
    reliability_axes.tick_params(labelbottom=False)
    _add_legend(reliability_axes, "a  Reliability diagram")
    if report.calibrated is not None:
        reliability_legend = reliability_axes.get_legend()
        label = f"scaled by T = {as_text(report.calibrated.temperature)}\nECE {as_text(report.calibrated['ece'])}"
        legend_box = reliability_axes.legend(
            reliability_axes.lines[-1:],
            [label],
            loc="upper left",
            fontsize=8,
            frameon=True,
            framealpha=0.85,
            edgecolor="none",
        )
        legend_box.set_in_layout(False)
        if reliability_legend is not None:  # The second legend has replaced the first one, so add that again.
            reliability_axes.add_artist(reliability_legend)
    # The legend stands above the axes, since bars may be anywhere inside.
    reliability_axes.set_title(
        f"ECE {as_text(report.ensemble['ece'])}", loc="right", pad=TITLE_PAD, fontsize=10, fontweight="normal"
    )
    draw_confidences(report, figure.add_subplot(panel_grid[8:10, 0], label="counts", sharex=reliability_axes))
    accuracy_axes = figure.add_subplot(panel_grid[:5, 1], label="accuracy")
    draw_curve(report, accuracy_axes, "accuracy")
    accuracy_axes.set_ylim(top=min(accuracy_axes.get_ylim()[1], 100.2))
    accuracy_axes.tick_params(labelbottom=False)
    _add_legend(accuracy_axes, "b  Accuracy and NLL against ensemble size")
    nll_axes = figure.add_subplot(panel_grid[5:10, 1], label="nll", sharex=accuracy_axes)
    draw_curve(report, nll_axes, "nll")
    nll_axes.set(xlabel="members in the ensemble", ylim=(max(nll_axes.get_ylim()[0], 0), None))
    _add_panel_legend(nll_axes)
    member_axes = figure.add_subplot(panel_grid[10:, 0], label="member accuracy", title="c  Accuracy of the members")
    draw_member_accuracies(report, member_axes)
    information_axes = figure.add_subplot(
        panel_grid[10:, 1], label="information", title="d  Mutual information of label and member"
    )
    draw_information(report, information_axes)
    return figure


def _add_legend(axes: Axes, title: str) -> None:
    """Put the title of a panel above the panel's axes, and the legend between title and axes."""
    axes.set_title(title, pad=TITLE_PAD)
    parts = zip(*axes.get_legend_handles_labels(), strict=True)
    legend_entries = [
        (line, name) for line, name in parts if name in USUAL_LEGEND_ENTRIES or axes.get_label() == "reliability"
    ]
    legend_box = axes.legend(
        [line for line, _ in legend_entries], [name for _, name in legend_entries],
        loc="lower left", bbox_to_anchor=(-0.01, 0.985), ncols=3, borderaxespad=0.2, handlelength=1.6,
        columnspacing=1.6, handletextpad=0.6,
    )  # fmt: skip
    # The title's padding leaves space for the legend; the legend's width must not narrow the axes.
    legend_box.set_in_layout(False)


def draw_reliability(report: Report, axes: Axes, pooled_bins: Bins | None = None) -> None:
    """Draw the accuracy in bins of confidence, and each bin's gap between accuracy and confidence; bins of fewer than
    10 inputs are pale.

    Args:
        report: the report to draw.
        axes: matplotlib axes to draw into.
        pooled_bins: "confidence", "accuracy" and "inputs" of the bins of all single members; None draws no line for
            single members.
    """
    from matplotlib.colors import to_rgba

    bins = reliability_bins(report)
    filled_bins, width = [b for b, n in enumerate(bins["inputs"]) if n], 1 / len(bins["inputs"])
    bin_middles = [(b + 0.5) * width for b in filled_bins]
    confidence, accuracy, inputs = ([bins[n][b] for b in filled_bins] for n in ("confidence", "accuracy", "inputs"))
    gaps = [c - a for c, a in zip(confidence, accuracy, strict=True)]
    bar_opacities = [0.85 if n >= FEW_INPUTS else 0.2 for n in inputs]
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    axes.bar(
        bin_middles, accuracy, width, color=[to_rgba(BLUE, x) for x in bar_opacities], edgecolor="white", linewidth=0.8
    )
    axes.bar(bin_middles, gaps, width * 0.3, bottom=accuracy, color=[to_rgba(RED, x) for x in bar_opacities])
    # The legend would show the first bar, which may be pale.
    pale_note = f" (pale: under {FEW_INPUTS} inputs)" if min(inputs) < FEW_INPUTS else ""
    axes.plot([], [], "s", color=to_rgba(BLUE, 0.85), markersize=8, label=f"accuracy{pale_note}")
    axes.plot([], [], "s", color=to_rgba(RED, 0.85), markersize=5, label="gap to confidence")
    if pooled_bins is not None:
        points = _points_of_filled_bins(pooled_bins)
        axes.plot(*points, color=PURPLE, marker="o", markersize=4, linewidth=1.2, label="single members")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy (0..1)")


def draw_confidences(report: Report, axes: Axes, pooled_bins: Bins | None = None) -> None:
    """Draw the share of the inputs in each bin of confidence on a logarithmic scale.

    Arguments are the same as in `draw_reliability`.
    """
    counts_colours_labels = [(reliability_bins(report)["inputs"], GREY if pooled_bins is None else BLUE, "ensemble")]
    counts_colours_labels += [] if pooled_bins is None else [(pooled_bins["inputs"], PURPLE, "single members")]
    least_share = 1.0
    for i, (inputs, colour, label) in enumerate(counts_colours_labels):
        width, total = 1 / len(inputs), sum(inputs)
        filled_bins = [b for b, n in enumerate(inputs) if n]
        shares = [100 * inputs[b] / total for b in filled_bins]
        bar_lefts = [(b + i / len(counts_colours_labels)) * width for b in filled_bins]
        axes.bar(
            bar_lefts, shares, width / len(counts_colours_labels), align="edge", color=colour, edgecolor="white",
            linewidth=0.5, label=label,
        )  # fmt: skip
        least_share = min(least_share, *shares)
    axes.set(yscale="log", xlim=(0, 1), ylim=(least_share / 2, 200), ylabel="inputs (%)")
    axes.set_xlabel("confidence of the top class")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")


def reliability_bins(report: Report, scaled: bool = False) -> Bins:
    """Return "confidence", "accuracy" and "inputs" of the bins of a report, before or after temperature scaling."""
    key_prefix = "scaled_" if scaled else ""
    return {
        n: [float(v) for v in report.drawing[f"{key_prefix}reliability_{n}"]]
        for n in ("confidence", "accuracy", "inputs")
    }


def _points_of_filled_bins(bins: Bins) -> tuple[list[float], list[float]]:
    """Return confidence and accuracy of the bins that hold inputs."""
    filled_bins = [b for b, n in enumerate(bins["inputs"]) if n]
    return [bins["confidence"][b] for b in filled_bins], [bins["accuracy"][b] for b in filled_bins]


def draw_scaled_reliability(report: Report, scaled: ScaledFigures, axes: Axes) -> None:
    """Draw accuracy over confidence after temperature scaling: one point a bin, over the unscaled bars."""
    label = f"scaled by T = {as_text(scaled.ensemble['temperature'])}"
    confidences_and_accuracies = _points_of_filled_bins(reliability_bins(report, scaled=True))
    axes.plot(*confidences_and_accuracies, color=GREEN, marker="s", markersize=4, linewidth=1.2, label=label)


def draw_member_accuracies(report: Report, axes: Axes) -> None:
    """Draw the members' accuracies, their mean and the ensemble's."""
    correct = [round(a * report.inputs) for a in report.drawing["member_accuracy"]]
    # Edges are between numbers of correct inputs, so that each bar covers equally many possible values.
    spread = max(correct) - min(correct)
    step = math.ceil((spread + 1) / 16)
    accuracy_edges = [(min(correct) - 0.5 + step * i) * 100 / report.inputs for i in range(2 + spread // step)]
    draw_member_values(report, axes, "accuracy", [c * 100 / report.inputs for c in correct], accuracy_edges)


def draw_member_values(
    report: Report, axes: Axes, figure: str, member_values: Sequence[float], bar_edges: Sequence[float]
) -> None:
    """Draw a histogram of a figure of the single members, with their mean and the ensemble's figure.

    Args:
        report: the report to draw.
        axes: matplotlib axes to draw into.
        figure: name of the figure.
        member_values: value of each member, (member,), in the unit of the picture.
        bar_edges: edges of the histogram's bars.
    """
    scale = KNOWN_FIGURES[figure].scale
    mean, ensemble_interval = report.member[figure], report.ensemble[figure]
    bar_heights, *_ = axes.hist(
        member_values,
        list(bar_edges),
        color=BLUE,
        alpha=0.85,
        edgecolor="white",
        label=count_with_noun(report.members, "member"),
    )
    labels = f"mean of members: {as_text(mean, scale)}", f"ensemble: {as_text(ensemble_interval, scale)}"
    axes.axvline(mean.value * scale, ymax=0.72, color=GREY, linestyle="--", label=labels[0])
    axes.axvline(ensemble_interval.value * scale, ymax=0.72, color=RED, linewidth=2, label=labels[1])
    axes.set(xlabel=KNOWN_FIGURES[figure].label, ylabel="members")
    axes.set_ylim(0, float(max(bar_heights)) * 1.5)
    ends = min(bar_edges[0], ensemble_interval.value * scale), max(bar_edges[-1], ensemble_interval.value * scale)
    axis_margin = 0.05 * (ends[1] - ends[0])
    right = ends[1] + axis_margin
    axes.set_xlim(ends[0] - axis_margin, min(right, max(ends[1], 100)) if scale == 100 else right)
    axes.locator_params(axis="y", integer=True)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.legend(loc="upper left")


def draw_information(report: Report, axes: Axes, show_auroc: bool = True) -> None:
    """Draw histograms of the mutual information of inputs, in and out of distribution."""
    import numpy as np

    axes.set(ylabel="share of inputs")
    keys_names_colours = [("mi_id", "in distribution", BLUE), ("mi_ood", "out of distribution", RED)]
    values = {n: np.asarray(report.drawing[n], np.float64) for n, *_ in keys_names_colours if report.drawing.get(n)}
    all_information = np.concatenate(list(values.values()))
    if all_information.max() <= ROUNDING_ERROR:
        text = "one member has none" if report.members == 1 else "none: the members agree on all inputs"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    lowest = 10.0 ** math.floor(math.log10(max(np.quantile(all_information, 0.01), ROUNDING_ERROR)))
    edges = np.geomspace(lowest, all_information.max() * 1.02, 41).tolist()
    highest_bar = 0.0
    for name, description, colour in (s for s in keys_names_colours if s[0] in values):
        clipped_information = np.clip(values[name], lowest, None)
        shares, _, _ = axes.hist(
            clipped_information, edges, weights=np.full(len(clipped_information), 1 / len(clipped_information)),
            histtype="stepfilled", facecolor=(colour, 0.35), edgecolor=colour, linewidth=1.4,
            label=f"{description}, mean {as_text(report.ensemble[name])}",
        )  # fmt: skip
        highest_bar = max(highest_bar, float(np.max(shares)))
    note = "; the first bar: that or less" if all_information.min() < lowest else ""
    axes.set_xlabel(f"mutual information of an input (nats{note})")
    axes.set(xscale="log", xlim=(lowest / 1.1, edges[-1] * 1.1), ylim=(0, highest_bar * 1.5))
    auroc_text = f"AUROC {as_text(report.ensemble['auroc'])}, by 1 − largest probability" if report.ood else ""
    if show_auroc:
        axes.plot([], [], " ", label=auroc_text or "no out-of-distribution inputs were given")
    axes.legend(loc="upper left")


def draw_curves(report: Report, figures: Iterable[str] | None = None) -> Figure:
    """Draw a panel for each of a report's figures; return the picture, whose axes have the figures' names as labels."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = _select_figures(report, figures)
    columns = min(PANEL_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    width = max(2, columns) * PANEL_WIDTH
    notes = f"members in the ensemble\n\n{picture_notes(report, width, names)}"
    size = (width, rows * PANEL_HEIGHT + 0.9 + NOTE_LINE_HEIGHT * len(notes.split("\n")))
    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=size, dpi=DPI, layout=layout_engine)
    figure.suptitle(f"{picture_title(report)}\n{picture_subtitle(report)}\n", fontsize=12)
    figure.supxlabel(notes, fontsize=8, color=GREY)
    handle_of_entry: dict[str, Any] = {}
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, number, label=name)
        draw_curve(report, axes, name)
        _add_panel_legend(axes)
        handles, labels = axes.get_legend_handles_labels()
        handle_of_entry |= zip(labels, handles, strict=True)
    entries = [entry for entry in USUAL_LEGEND_ENTRIES if entry in handle_of_entry]
    # The title's last line is empty: the legend stands there, 0.48 inches below the picture's upper edge.
    legend_place = (0.5, 1 - 0.48 / size[1])
    figure.legend(
        [handle_of_entry[entry] for entry in entries], entries, loc="upper center", bbox_to_anchor=legend_place,
        ncols=3, borderaxespad=0,
    )  # fmt: skip
    return figure


def _select_figures(report: Report, figures: Iterable[str] | None) -> list[str]:
    """Return the names of the requested figures, or of all figures.

    Raises:
        UsageError: a figure is unknown, or no figure is requested.
    """
    scaled_figures = {} if report.calibrated is None else report.calibrated.ensemble
    available_figures = [n for n in KNOWN_FIGURES if n in report.ensemble or n in scaled_figures]
    names = available_figures if figures is None else [figures] if isinstance(figures, str) else list(figures)
    for name in names:
        if name not in available_figures:
            raise UsageError(f"figure {name!r}", expected=f"one of {', '.join(available_figures)}", found="none such")
    if not names:
        raise UsageError("figures of a picture", expected="one or more", found="none")
    return names


def draw_curve(report: Report, axes: Axes, figure: str) -> None:
    """Draw a figure over the sizes of ensembles: a band for new ensembles, a bar for all members, the limit.

    Args:
        report: the report to draw.
        axes: matplotlib axes to draw into.
        figure: name of the figure; the curve of temperature-scaled ensembles is drawn too, if such ensembles have the
            figure.
    """
    sizes, scale = sorted(report.curve), KNOWN_FIGURES[figure].scale
    if figure in report.ensemble:
        _draw_size_curve(axes, report.curve, figure, scale, report.members, (BLUE, RED), "")
        _draw_limit(axes, report.growth, figure, scale, BLUE)
    scaled = report.calibrated
    if scaled is not None and figure in scaled.ensemble:
        _draw_size_curve(axes, scaled.curve, figure, scale, report.members, (GREEN, GREEN), "temperature scaled")
        _draw_limit(axes, scaled.growth, figure, scale, GREEN)
    for kind, needed in report.answers():
        if needed.figure == figure and needed.members is not None:
            answer_text = f"within {needed.within:.3g}{f', {kind}' if kind else ''}: {needed}"
            axes.axvline(needed.members, color=GREEN if kind else BLUE, linestyle=":", linewidth=1.5, label=answer_text)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := _spaced_ticks(sizes), [f"{size:,}" for size in ticks])
    axes.minorticks_off()
    label = "\n".join(wrap(KNOWN_FIGURES[figure].label, LONGEST_AXIS_LABEL))
    axes.set(xlim=(sizes[0] / 1.2, sizes[-1] * 1.2), ylabel=label)


def _draw_size_curve(
    axes: Axes,
    curve: Mapping[int, Mapping[str, Interval]],
    figure: str,
    scale: float,
    member_count: int,
    colours: tuple[str, str],
    legend_label: str,
) -> None:
    """Draw a figure over ensemble sizes as one line with its band and bar.

    Args:
        axes: matplotlib axes to draw into.
        curve: size of ensembles -> figure -> interval.
        figure, scale: name of the figure, and factor of its values in pictures.
        member_count: number of all members.
        colours: colour of the line, and colour of the bar at the size of all members.
        legend_label: text for the legend; "" for the three usual entries.
    """
    colour, all_members_colour = colours
    sizes = sorted(curve)
    intervals = [curve[size][figure] for size in sizes]
    values = [x.value * scale for x in intervals]
    axes.plot(sizes, values, color=colour, marker="o", markersize=4.5, label=legend_label or "mean of that size")
    band_points = [
        (size, x.low * scale, x.high * scale)
        for size, x in zip(sizes, intervals, strict=True)
        if size < member_count and x.low is not None and x.high is not None
    ]
    if band_points:
        band_sizes, low, high = zip(*band_points, strict=True)
        axes.fill_between(
            band_sizes,
            low,
            high,
            color=colour,
            alpha=0.18,
            linewidth=0,
            label=None if legend_label else "a new ensemble",
        )
    all_members_interval = curve[member_count][figure]
    if all_members_interval.low is not None and all_members_interval.high is not None:
        ends = [
            [(all_members_interval.value - all_members_interval.low) * scale],
            [(all_members_interval.high - all_members_interval.value) * scale],
        ]
        axes.errorbar(
            [member_count], [all_members_interval.value * scale], ends, color=all_members_colour, marker="D",
            markersize=4, capsize=4, linewidth=1.6, label=None if legend_label else "all members",
        )  # fmt: skip


def _draw_limit(axes: Axes, growth_by_figure: Mapping[str, Growth], figure: str, scale: float, colour: str) -> None:
    """Draw the limit of a figure, if the figure has a limit."""
    if figure in growth_by_figure:
        axes.axhline(growth_by_figure[figure].limit.value * scale, color=colour, linestyle="--", linewidth=1)


def _add_panel_legend(axes: Axes) -> None:
    """Draw a legend for lines that only some panels have, at the place where the legend covers the curves least."""
    legend_entries = [
        (line, name)
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
        if name not in USUAL_LEGEND_ENTRIES
    ]
    if legend_entries:
        axes.legend([line for line, _ in legend_entries], [name for _, name in legend_entries], loc="best", fontsize=8)


def _spaced_ticks(sizes: Sequence[int]) -> list[int]:
    """Choose ticks from the largest size down so that their labels do not overlap on a logarithmic axis."""
    least_log2_distance = max(0.06 * math.log2(sizes[-1] / sizes[0]), 1e-9)
    tick_sizes: list[int] = []
    for size in reversed(sizes):
        if not tick_sizes or math.log2(tick_sizes[-1] / size) >= least_log2_distance:
            tick_sizes.append(size)
    return tick_sizes[::-1]


def picture_title(report: Report) -> str:
    """Return the title of a report's pictures."""
    return f"{report.collection}, an ensemble of {count_with_noun(report.members, 'member')}"


def picture_subtitle(report: Report) -> str:
    """Return the line below a picture's title: images and numbers of inputs."""
    text = f"{report.data.split(' ')[0]}, {count_with_noun(report.inputs, 'input')}"
    if report.ood:
        text += f"; out of distribution: {report.ood.split(' ')[0]}, {count_with_noun(report.ood_inputs, 'input')}"
    return text


def citation_without_source(report: Report) -> str:
    """Return the citation of the members without the source, which may be a private folder of this machine."""
    return report.citation.rpartition("@")[2]


def picture_notes(report: Report, width: float, figures: Iterable[str] | None = None) -> str:
    """Return the lines of text below a picture: the meaning of the intervals, the needed members, and the members'
    ids.

    Args:
        report: the drawn report.
        width: width of the picture in inches.
        figures: names of the figures in a picture of curves; None for the picture of the whole report.
    """
    letters = int(width * NOTE_LETTERS_PER_INCH)
    names = [*KNOWN_FIGURES] if figures is None else [*figures]
    text = ""
    if report.members >= 3:
        text = "Bands: where 95 % of new ensembles of that size fall. Error bars and [ ]: 95 % intervals over members,"
        has_bootstrap = figures is None and report.member["accuracy"].low is not None
        text += f" by a delete-d jackknife{' (a bootstrap for the mean of members)' if has_bootstrap else ''}."
    if report.growth:
        text += "\nDashed: the limit, of an infinite ensemble."
    needed = [
        f"{KNOWN_FIGURES[x.figure].short_title or KNOWN_FIGURES[x.figure].title} within {x.within:.3g}"
        f"{f', {kind}' if kind else ''}: {x}"
        for kind, x in report.answers()
        if x.figure in names
    ]
    if needed:
        text += f" Members needed to come near it: {'; '.join(needed)}."
    text = "\n".join("\n".join(wrap(line, letters)) for line in [*text.split("\n"), *_remarks_on(report, names)])
    # The commit and the check digits of the citation are in the metadata of the picture's file.
    members = citation_without_source(report).partition("/")[2].rpartition("~")[0]
    limit = letters - 20
    shortened_members = members if len(members) <= limit else f"{members[: limit * 2 // 3]}…{members[-limit // 4 :]}"
    return f"{text}\n{f'Members: {shortened_members}' if shortened_members else ''}"
