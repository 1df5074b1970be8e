"""The result of `zoo.compare`: a row for each method and mode, figures with intervals; tables and a picture.

This is one file, because its tables and its picture show the same rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, check_picture_path, save_figure
from checkpoints_zoo.evaluation.figures import KNOWN_FIGURES, MONOTONE_FIGURES
from checkpoints_zoo.evaluation.tables import write_frame, write_text
from checkpoints_zoo.formats.printing import PrintedResult
from checkpoints_zoo.formats.text import align_columns, escape_latex
from checkpoints_zoo.methods.comparing.equivalent_size import EquivalentSize
from checkpoints_zoo.methods.comparing.estimates import ALL_FIGURES, COLUMN_TITLES, Estimate
from checkpoints_zoo.populations.kernels import ALL_TENSORS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

JSON_VERSION = 1  # Version of the JSON text.
REFERENCE = "reference"

TABLE_SCALE = 100  # The tables show all figures times 100, as the paper does.
MODE_TITLES = {"one": "one mode", "multi": "multi mode", "members": "members"}
COLUMN_NAMES = {"aurc": "AURC"} | COLUMN_TITLES

PANEL_WIDTH, PANEL_HEIGHT = 2.9, 2.5  # Size of a panel in inches.
FIGURES_PER_ROW = 2  # Number of figures in a row of panels; each figure has two panels, for MMD and for NS.
DRAWN_FIGURES = ("accuracy", "nll", "brier", "ece", "ace", "auroc", "aupr", "fpr95", "mi_id", "mi_ood")
DISTANCE_TITLES = {"mmd": "MMD² × 100", "ns": "NS × 100"}
SMALLEST_DRAWN = 0.01  # MMD² × 100; smaller and negative values are drawn at the left edge.
# The colours of Okabe & Ito without yellow. Markers differ too, for prints in grey.
METHOD_COLOURS = (BLUE, RED, GREEN, "#CC79A7", "#56B4E9", "#E69F00", "#000000")
METHOD_MARKERS = "osD^v<>PXhp"


@dataclass(frozen=True)
class Row:
    """The figures of one method in one mode.

    Args:
        method: name of the method; "reference" for the population itself.
        mode: how draws form ensembles. "one": each run alone, figures are means over runs. "multi": some draws of all
            runs together. "members": independent members.
        runs: number of runs; each independent member is a run.
        draws: number of draws of an ensemble.
        figures: figure -> estimate: "mmd" and "ns" of all weights, and the figures of `zoo.evaluate`.
        layers: "mmd" and "ns" -> layer -> estimate.
        corollary: p-value of `zoo.corollary`, all layers together. None in mode "one", where all draws come from one
            run, and for a network without a table of symmetries.
        corollary_layers: layer -> p-value, not adjusted for the number of layers.
        worth: figure -> size of the ensembles of independent members that have the figure on average.
    """

    method: str
    mode: str
    runs: int
    draws: int
    figures: Mapping[str, Estimate]
    layers: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    corollary: float | None = None
    corollary_layers: Mapping[str, float] = field(default_factory=dict)
    worth: Mapping[str, EquivalentSize] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Estimate:
        """Return a figure.

        Raises:
            UsageError: there is no such figure.
        """
        if figure not in self.figures:
            raise UsageError(f"figure {figure!r}", expected=f"one of {', '.join(self.figures)}", found="none such")
        return self.figures[figure]

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {
            "method": self.method, "mode": self.mode, "runs": self.runs, "draws": self.draws,
            "figures": {n: x.to_json() for n, x in self.figures.items()},
            "layers": {n: {g: x.to_json() for g, x in estimates.items()} for n, estimates in self.layers.items()},
            "corollary": self.corollary, "corollary_layers": dict(self.corollary_layers),
            "worth": {n: x.to_json() for n, x in self.worth.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the values that `to_json` returned; return the row."""
        figures = {n: Estimate.from_json(x) for n, x in values["figures"].items()}
        layers = {
            n: {g: Estimate.from_json(x) for g, x in estimates.items()} for n, estimates in values["layers"].items()
        }
        worth = {n: EquivalentSize.from_json(x) for n, x in values["worth"].items()}
        plain_fields = {n: values[n] for n in ("method", "mode", "runs", "draws", "corollary", "corollary_layers")}
        return cls(figures=figures, layers=layers, worth=worth, **plain_fields)


@dataclass(frozen=True, repr=False)
class Comparison(PrintedResult):
    """Approximate posteriors compared with a population.

    Args:
        collection: name of the collection whose recipe the methods were fitted to.
        reference: citation of the population.
        members: number of members of the population.
        data, ood: names and fingerprints of the images; `ood` is "" if there are none.
        rows: rows of the methods in their order; mode "one" comes before mode "multi". The last row is the reference:
            its figures are of the ensemble of all members; its "mmd" and "ns" compare the members at even positions
            with the members at odd positions.
        methods: method -> record of the method's draws as JSON values: settings, seconds, acceptance and the like of
            each run, searches.
        left_out: method -> reason why the method has no rows.
        settings: permutations, seed, removal of symmetries, number of images, versions: JSON values.
    """

    collection: str
    reference: str
    members: int
    data: str
    ood: str
    rows: tuple[Row, ...]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def _one_line(self) -> str:
        methods = list(dict.fromkeys(row.method for row in self.rows))
        return f"{self.collection!r}, {self.members} members, {', '.join(methods)}, on {self.data.split(' ')[0]}"

    def __getitem__(self, key: tuple[str, str]) -> Row:
        """Return the row of a method and a mode, such as ("swag", "multi").

        Raises:
            UsageError: there is no such row.
        """
        for row in self.rows:
            if (row.method, row.mode) == key:
                return row
        names = ", ".join(f"({row.method!r}, {row.mode!r})" for row in self.rows)
        raise UsageError(f"row {key!r}", expected=f"one of {names}", found="none such")

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each method, mode, figure and group of tensors.

        Only MMD and NS have groups other than "all".

        Columns: method, mode, runs, draws, figure, group, value, low, high, p, unit, better, worth, worth_low,
        worth_high. Values have the figures' units and are not multiplied by 100.
        """
        import pandas as pd

        return pd.DataFrame(list(self._table_rows()))

    def _table_rows(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            row_fields = {"method": row.method, "mode": row.mode, "runs": row.runs, "draws": row.draws}
            for name, x in row.figures.items():
                groups = {**row.layers.get(name, {}), ALL_TENSORS: x}
                for group, y in groups.items():
                    worth = row.worth.get(name) if group == ALL_TENSORS else None
                    yield {
                        **row_fields, "figure": name, "group": group, "value": y.value, "low": y.low, "high": y.high,
                        "p": y.p, "unit": ALL_FIGURES[name].unit, "better": ALL_FIGURES[name].better,
                        "worth": None if worth is None else worth.members,
                        "worth_low": None if worth is None else worth.low,
                        "worth_high": None if worth is None else worth.high,
                    }  # fmt: skip
            if row.corollary is not None:
                empty_fields = dict.fromkeys(("low", "high", "worth", "worth_low", "worth_high"))
                for group, p in {**row.corollary_layers, ALL_TENSORS: row.corollary}.items():
                    yield {
                        **row_fields, "figure": "corollary", "group": group, "value": p, "p": p, "unit": "",
                        "better": "", **empty_fields,
                    }  # fmt: skip

    def to_json(self) -> str:
        """Return the result as JSON text, which `from_json` reads."""
        plain_fields = {n: getattr(self, n) for n in ("collection", "reference", "members", "data", "ood")}
        values = {
            "version": JSON_VERSION,
            **plain_fields,
            "level": 0.95,
            "meaning": explain_comparison(self),
            "rows": [row.to_json() for row in self.rows],
            "methods": self.methods,
            "left_out": self.left_out,
            "settings": self.settings,
        }
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` returned; return the comparison.

        Raises:
            FormatError: the text is something else, or was written by a newer version.
        """
        try:
            values = json.loads(text)
            if values["version"] != JSON_VERSION:
                raise FormatError("comparison", expected=f"version {JSON_VERSION}", found=str(values["version"])[:80])
            plain_fields = {
                n: values[n]
                for n in ("collection", "reference", "members", "data", "ood", "methods", "left_out", "settings")
            }
            return cls(rows=tuple(Row.from_json(row) for row in values["rows"]), **plain_fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("comparison", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, with the columns of Laurent et al. 2024, all figures times 100."""
        columns = [n for n in COLUMN_TITLES if any(n in row.figures for row in self.rows)]
        lines = [
            r"% Figures times 100: shares in \%, Brier 0..200, NLL and mutual information in nats; MMD^2 has no unit.",
            rf"\begin{{tabular}}{{ll{'r' * len(columns)}}}",
            r"\toprule",
            " & ".join(["Method", "Mode", *(escape_latex(COLUMN_TITLES[n]) for n in columns)]) + r" \\",
        ]
        previous_block = ""
        for row in self.rows:
            block = "reference" if row.method == "reference" else "method"
            lines += [r"\midrule"] if block != previous_block else []
            previous_block = block
            cells = [_latex_value(row.figures.get(n)) for n in columns]
            lines.append(" & ".join([escape_latex(row.method), escape_latex(MODE_TITLES[row.mode]), *cells]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])

    def to_text(self) -> str:
        """Return the tables as text: figures, equivalent numbers of members, p-values, and explanations."""
        columns = [n for n in COLUMN_TITLES if any(n in row.figures for row in self.rows)]
        figure_rows = [
            {**_row_title_cells(row), "runs × draws": _size_text(row)}
            | {COLUMN_TITLES[n]: format_estimate(row.figures.get(n)) for n in columns}
            for row in self.rows
        ]
        worth_columns = [n for n in MONOTONE_FIGURES if any(n in row.worth for row in self.rows)]
        worth_rows = [
            _row_title_cells(row)
            | {COLUMN_NAMES[n]: row.worth[n].short if n in row.worth else "-" for n in worth_columns}
            for row in self.rows
            if row.worth
        ]
        p_value_rows = [
            _row_title_cells(row) | {"MMD": _p_text(row.figures.get("mmd")), "NS": _p_text(row.figures.get("ns")),
                           "corollary": "-" if row.corollary is None else f"{row.corollary:.2g}"}
            for row in self.rows
        ]  # fmt: skip
        blocks = [
            "All figures times 100: MMD² and NS (no unit), shares in %, Brier (0..200), NLL and mutual information in"
            f" nats × 100.\n{_align_table(figure_rows)}",
            f"Worth as many independent members of the reference:\n{_align_table(worth_rows)}"
            if worth_rows and worth_columns
            else "",
            f"p-values:\n{_align_table(p_value_rows)}",
            "\n".join(explain_comparison(self)),
        ]
        return "\n\n".join(block for block in blocks if block)

    def write_json(self, path: str | Path) -> Path:
        """Write the comparison as JSON; return the file's path.

        Raises:
            StorageError: the file can't be written.
        """
        return write_text(self.to_json(), path)

    def write_latex(self, path: str | Path) -> Path:
        """Write the table for LaTeX; return the file's path.

        Raises:
            StorageError: the file can't be written.
        """
        return write_text(self.to_latex(), path)

    def write_frame(self, path: str | Path) -> Path:
        """Write the rows of `to_frame` as .csv or .parquet; return the file's path.

        Raises:
            UsageError: the name has another ending.
            StorageError: the file can't be written.
        """
        return write_frame(self.to_frame(), path)

    def plot(self, path: str | Path) -> Path:
        """Draw each figure against MMD² and NS into a PNG, with one marker for each method; return its path.

        Raises:
            UsageError: there are no draws, the path does not end in .png, or the file can't be written.
        """
        path = check_picture_path(path)
        if not _method_rows(self):
            raise UsageError(f"picture {path}", expected="a comparison with draws of a method", found="none", path=path)
        return save_figure(lambda: draw_comparison(self), path, picture_title(self))


def explain_comparison(comparison: Comparison) -> list[str]:
    """Explain rows, figures and intervals; return the lines."""
    measured_on = comparison.data.split(" ")[0] + (
        f"; OOD: {comparison.ood.split(' ')[0]}" if comparison.ood else "; no OOD images"
    )
    lines = [
        f"Measured on {measured_on}. Reference: {comparison.members:,} members; its own MMD and NS are those of its"
        " members at even positions against those at odd ones.",
        "One mode: each run's draws alone, mean over runs ± Student's 95 % interval. Multi mode: every R-th draw of all"
        " R runs together; members: independent ones; both ± a 95 % delete-d jackknife, over runs or members. One run"
        " has no interval.",
        "MMD: MMD² of all weights, unbiased, mean over 20 kernels; bandwidths from the reference's own pairs, so that"
        " all rows are on one scale. Draws at one point far from the reference have 1 + its mean kernel, below 2."
        " NS: the same after scale unit-norm, permute first.",
        *(
            [
                "Agr: share of images that get the reference's class; TV: total variation to the reference's"
                " probabilities, both of mean predictions. The reference's own are those of its halves."
            ]
            if any("agreement" in row.figures for row in comparison.rows)
            else []
        ),
        f"p of MMD and NS: {comparison.settings.get('permutations', 0):,} permutations, bandwidths from all pairs of"
        " the draws that take part. Draws of one run depend on each other, so one draw of each run takes part, chosen"
        " at random; independent members all do. One mode is a single run, and has no p-value.",
        "Corollary: p-value that each layer's largest weight is equally often in each unit, of the same draws.",
        "Worth: the size at which ensembles of the reference's members have the figure on average; [ ] by the figure's"
        " own interval; <1: worse than a single member, >: than all members at hand.",
    ]
    return lines + [f"Left out: {name}: {reason}" for name, reason in comparison.left_out.items()]


def format_estimate(estimate: Estimate | None, scale: float = TABLE_SCALE) -> str:
    """Format a figure and half its interval, with as many digits as the interval allows; return the text.

    >>> format_estimate(Estimate(0.97712, 0.97312, 0.98112)), format_estimate(Estimate(0.05)), format_estimate(None)
    ('97.7±0.4', '5.00', '-')
    """
    if estimate is None or not math.isfinite(estimate.value):
        return "-"
    value = estimate.value * scale
    if estimate.low is None or estimate.high is None:
        return f"{value:.{_decimal_places(value)}f}"
    half_width = max(estimate.high - estimate.value, estimate.value - estimate.low) * scale
    digits = _decimal_places(value)
    if half_width > 0:
        power = math.floor(math.log10(half_width))
        digits = min(4, max(0, (half_width < 2 * 10**power) - power))  # An interval that begins with 1 gets two digits.
    return f"{value:.{digits}f}±{half_width:.{digits}f}"


def _decimal_places(value: float) -> int:
    """Return the number of digits after the point for three significant digits: 0 to 4."""
    return 2 if value == 0 else min(4, max(0, 2 - math.floor(math.log10(abs(value)))))


def _latex_value(estimate: Estimate | None) -> str:
    text = format_estimate(estimate)
    return "--" if text == "-" else "$" + text.replace("±", r" \pm ") + "$"


def _row_title_cells(row: Row) -> dict[str, str]:
    return {"method": row.method, "mode": MODE_TITLES[row.mode]}


def _size_text(row: Row) -> str:
    if row.mode == "members":
        return f"{row.draws:,}"
    return f"{row.runs} × {row.draws if row.mode == 'one' else row.draws // row.runs}"


def _p_text(estimate: Estimate | None) -> str:
    return "-" if estimate is None or estimate.p is None else f"{estimate.p:.2g}"


def _align_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Align rows in columns, the first two to the left, all others to the right; return the text."""
    if not rows:
        return ""
    return align_columns([list(rows[0]), *(list(row.values()) for row in rows)], range(2, len(rows[0])))


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw two panels for each figure, against MMD² and against NS; return the picture.

    Each panel's axes have a label such as "nll mmd": the figure and the distance of the panel.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = _method_rows(comparison)
    figure_names = [n for n in DRAWN_FIGURES if any(n in row.figures for row in rows)]
    distance_names = [d for d in DISTANCE_TITLES if any(d in row.figures for row in rows)]
    row_count, column_count = math.ceil(len(figure_names) / FIGURES_PER_ROW), FIGURES_PER_ROW * len(distance_names)
    size = (max(7.0, column_count * PANEL_WIDTH), row_count * PANEL_HEIGHT + 2.0)
    picture = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, wspace=0.02))
    measured_on = comparison.data.split(" ")[0] + (
        f"; out of distribution: {comparison.ood.split(' ')[0]}" if comparison.ood else ""
    )
    picture.suptitle(f"{picture_title(comparison)}\n{measured_on}", fontsize=12, parse_math=False)
    colour_and_marker_of = _choose_colours_and_markers([row.method for row in rows])
    for figure_number, figure_name in enumerate(figure_names):
        first_axes: Axes | None = None
        for distance_number, distance_name in enumerate(distance_names):
            panel_number = (
                (figure_number // FIGURES_PER_ROW) * column_count
                + (figure_number % FIGURES_PER_ROW) * len(distance_names)
                + distance_number
                + 1
            )
            axes = picture.add_subplot(
                row_count, column_count, panel_number, label=f"{figure_name} {distance_name}", sharey=first_axes
            )
            _draw_panel(axes, comparison, rows, figure_name, distance_name, colour_and_marker_of)
            axes.set_ylabel(KNOWN_FIGURES[figure_name].label if first_axes is None else "", fontsize=9)
            first_axes = first_axes or axes
    _add_legend(picture, rows, colour_and_marker_of, row_count)
    return picture


def picture_title(comparison: Comparison) -> str:
    """Return the title of the picture."""
    return f"Approximate posteriors against {comparison.members:,} members of {comparison.collection}"


def _method_rows(comparison: Comparison) -> list[Row]:
    """Return the rows that are drawn as markers: all but the reference."""
    return [row for row in comparison.rows if row.method != "reference"]


def _choose_colours_and_markers(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Choose a colour and a marker for each method; return method -> (colour, marker)."""
    method_names = list(dict.fromkeys(methods))
    return {
        name: (METHOD_COLOURS[i % len(METHOD_COLOURS)], METHOD_MARKERS[i % len(METHOD_MARKERS)])
        for i, name in enumerate(method_names)
    }


def _draw_panel(
    axes: Axes,
    comparison: Comparison,
    rows: Sequence[Row],
    figure_name: str,
    distance_name: str,
    colour_and_marker_of: Mapping[str, tuple[str, str]],
) -> None:
    """Draw one figure against one distance: a marker for each row (hollow for mode "one"), and a dashed line for the
    reference's ensemble."""
    scale = KNOWN_FIGURES[figure_name].scale
    for row in rows:
        if figure_name not in row.figures or distance_name not in row.figures:
            continue
        colour, marker = colour_and_marker_of[row.method]
        x, y = row.figures[distance_name], row.figures[figure_name]
        axes.errorbar(
            [_axis_position(x.value)], [y.value * scale], xerr=_error_bars(_axis_position, x),
            yerr=_error_bars(lambda v: v * scale, y), fmt=marker, color=colour,
            markerfacecolor="white" if row.mode == "one" else colour, markersize=6, linewidth=1, markeredgewidth=1.3,
            alpha=0.9,
        )  # fmt: skip
    for row in comparison.rows:
        if row.method == "reference" and figure_name in row.figures:
            axes.axhline(row.figures[figure_name].value * scale, color=GREY, linestyle="--", linewidth=1)
    values = [row.figures[figure_name].value * scale for row in comparison.rows if figure_name in row.figures]
    finite_values = [value for value in values if math.isfinite(value)]
    if finite_values and max(finite_values) > min(
        finite_values
    ):  # Wide intervals are cut, so that markers stay distinct.
        margin = 0.12 * (max(finite_values) - min(finite_values))
        axes.set_ylim(min(finite_values) - margin, max(finite_values) + margin)
    axes.set_xscale("log")
    axes.set_xlim(SMALLEST_DRAWN * 0.8, 250)
    axes.set_xticks(
        ticks := [SMALLEST_DRAWN, 0.1, 1, 10, 100], [f"≤{SMALLEST_DRAWN:g}", *(f"{t:g}" for t in ticks[1:])]
    )
    axes.minorticks_off()
    axes.set_xlabel(DISTANCE_TITLES[distance_name], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.ticklabel_format(axis="y", useOffset=False)


def _axis_position(distance: float) -> float:
    """Return the position of an MMD² or NS on the axis."""
    return max(SMALLEST_DRAWN, 100 * distance)


def _error_bars(axis_position_of: object, estimate: Estimate) -> list[list[float]] | None:
    """Return the distances of an interval's ends from the value on the axis; None without an interval."""
    if estimate.low is None or estimate.high is None or not callable(axis_position_of):
        return None
    value = axis_position_of(estimate.value)
    return [[max(0.0, value - axis_position_of(estimate.low))], [max(0.0, axis_position_of(estimate.high) - value)]]


def _add_legend(
    picture: Figure, rows: Sequence[Row], colour_and_marker_of: Mapping[str, tuple[str, str]], row_count: int
) -> None:
    """Add a legend of methods, fills and the dashed line below all panels."""
    from matplotlib.lines import Line2D

    legend_lines = [
        Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (c, m) in colour_and_marker_of.items()
    ]
    fill_colour_of_mode = {"one": "white", "multi": GREY, "members": GREY}
    fill_text_of_mode = {
        "one": "hollow: one mode",
        "multi": "filled: multi mode",
        "members": "filled: independent members",
    }
    for mode in dict.fromkeys(row.mode for row in rows):
        legend_lines.append(
            Line2D(
                [],
                [],
                color=GREY,
                marker="o",
                markerfacecolor=fill_colour_of_mode[mode],
                linestyle="",
                label=fill_text_of_mode[mode],
            )
        )
    legend_lines.append(Line2D([], [], color=GREY, linestyle="--", linewidth=1, label="ensemble of the reference"))
    picture.legend(handles=legend_lines, loc="outside lower center", ncols=min(5, len(legend_lines)), fontsize=8.5)
