"""The picture of a comparison: how near draws are to a population in weight space, against what they are good for.

After the figures beside the tables of Laurent et al. 2024 (arXiv 2310.08287). Drawn like `plots`: with Agg and settings
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, path_of, save
from checkpoints_zoo.evaluation.plots import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, HIGH = 2.9, 2.5  # inches a panel
PAIRS = 2  # figures a row, each against MMD and against NS
FIGURES = ("accuracy", "nll", "brier", "ece", "ace", "auroc", "aupr", "fpr95", "mi_id", "mi_ood")
DISTANCES = {"mmd": "MMD² × 100", "ns": "NS × 100"}
LEAST = 0.01  # MMD² × 100 that is nothing: smaller ones, and those below 0, lie at the left edge
# Okabe & Ito's, without yellow, and shapes that are told apart in grey too.
COLOURS = (BLUE, RED, GREEN, "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^v<>PXhp"


class Point(Protocol):
    """A figure and its interval: see `comparing.estimates.Estimate`."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


class RowLike(Protocol):
    """What a row must have to be drawn: see `comparing.comparison.Row`."""

    @property
    def method(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, Point]: ...


class Drawable(Protocol):
    """What a comparison must have to be drawn: see `comparing.comparison.Comparison`."""

    @property
    def collection(self) -> str: ...
    @property
    def members(self) -> int: ...
    @property
    def data(self) -> str: ...
    @property
    def ood(self) -> str: ...
    @property
    def rows(self) -> Sequence[RowLike]: ...


def comparison(found: Drawable, path: str | Path) -> Path:
    """Draw each figure against MMD² and NS into a PNG, by temporary name and rename; return its path.

    Args:
        found: of `zoo.compare`.
        path: of the PNG; its folder is made.

    Raises:
        UsageError: no draws, a name that is no PNG's, or a place that can't be written to.
    """
    path = path_of(path)
    if not _drawn(found):
        raise UsageError(f"picture {path}", expected="a comparison with draws of a method", found="none", path=path)
    return save(lambda: draw(found), path, title_of(found))


def title_of(found: Drawable) -> str:
    """Return the title of the picture."""
    return f"Approximate posteriors against {found.members:,} members of {found.collection}"


def draw(found: Drawable) -> Figure:
    """Draw two panels a figure, against MMD² and against NS; return the picture, axes labelled "figure distance"."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = _drawn(found)
    names = [n for n in FIGURES if any(n in row.figures for row in rows)]
    distances = [d for d in DISTANCES if any(d in row.figures for row in rows)]
    lines, columns = math.ceil(len(names) / PAIRS), PAIRS * len(distances)
    size = (max(7.0, columns * WIDE), lines * HIGH + 2.0)
    figure = Figure(figsize=size, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, wspace=0.02))
    on = found.data.split(" ")[0] + (f"; out of distribution: {found.ood.split(' ')[0]}" if found.ood else "")
    figure.suptitle(f"{title_of(found)}\n{on}", fontsize=12, parse_math=False)
    looks = _looks([row.method for row in rows])
    for at, name in enumerate(names):
        shared: Axes | None = None
        for beside, distance in enumerate(distances):
            place = (at // PAIRS) * columns + (at % PAIRS) * len(distances) + beside + 1
            axes = figure.add_subplot(lines, columns, place, label=f"{name} {distance}", sharey=shared)
            _panel(axes, found, rows, name, distance, looks)
            axes.set_ylabel(NAMES[name] if shared is None else "", fontsize=9)
            shared = shared or axes
    _key(figure, rows, looks, lines)
    return figure


def _drawn(found: Drawable) -> list[RowLike]:
    """Return the rows that become markers: all but the reference's."""
    return [row for row in found.rows if row.method != "reference"]


def _looks(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Choose a colour and a marker for each method; return them by its name."""
    names = list(dict.fromkeys(methods))
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}


def _panel(
    axes: Axes,
    found: Drawable,
    rows: Sequence[RowLike],
    name: str,
    distance: str,
    looks: Mapping[str, tuple[str, str]],
) -> None:
    """Draw one figure against one distance, a marker a row, hollow for one mode; dashed: the reference's ensemble."""
    scale = 100 if name == "accuracy" else 1
    for row in rows:
        if name not in row.figures or distance not in row.figures:
            continue
        colour, marker = looks[row.method]
        x, y = row.figures[distance], row.figures[name]
        axes.errorbar(
            [_at(x.value)], [y.value * scale], xerr=_ends(_at, x), yerr=_ends(lambda v: v * scale, y), fmt=marker,
            color=colour, markerfacecolor="white" if row.mode == "one" else colour, markersize=6, linewidth=1,
            markeredgewidth=1.3, alpha=0.9,
        )  # fmt: skip
    for row in found.rows:
        if row.method == "reference" and name in row.figures:
            axes.axhline(row.figures[name].value * scale, color=GREY, linestyle="--", linewidth=1)
    values = [row.figures[name].value * scale for row in found.rows if name in row.figures]
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) > min(finite):  # wide intervals are cut: the markers have to be told apart
        room = 0.12 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - room, max(finite) + room)
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.8, 250)
    axes.set_xticks(ticks := [LEAST, 0.1, 1, 10, 100], [f"≤{LEAST:g}", *(f"{t:g}" for t in ticks[1:])])
    axes.minorticks_off()
    axes.set_xlabel(DISTANCES[distance], fontsize=9)
    axes.tick_params(labelsize=8)
    axes.ticklabel_format(axis="y", useOffset=False)


def _at(value: float) -> float:
    """Return where MMD² lies on the axis."""
    return max(LEAST, 100 * value)


def _ends(place: object, point: Point) -> list[list[float]] | None:
    """Return how far an interval's ends are from the value on the axis, None without an interval."""
    if point.low is None or point.high is None or not callable(place):
        return None
    value = place(point.value)
    return [[max(0.0, value - place(point.low))], [max(0.0, place(point.high) - value)]]


def _key(figure: Figure, rows: Sequence[RowLike], looks: Mapping[str, tuple[str, str]], lines: int) -> None:
    """Name the methods, the fills and the line below all panels."""
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (c, m) in looks.items()]
    fills = {"one": "white", "multi": GREY, "members": GREY}
    words = {"one": "hollow: one mode", "multi": "filled: multi mode", "members": "filled: independent members"}
    for mode in dict.fromkeys(row.mode for row in rows):
        marks.append(
            Line2D([], [], color=GREY, marker="o", markerfacecolor=fills[mode], linestyle="", label=words[mode])
        )
    marks.append(Line2D([], [], color=GREY, linestyle="--", linewidth=1, label="ensemble of the reference"))
    figure.legend(handles=marks, loc="outside lower center", ncols=min(5, len(marks)), fontsize=8.5)
