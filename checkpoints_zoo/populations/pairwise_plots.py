"""The picture of all pairs: mutual information in and out of distribution, one against the other, disagreement.

The population figure of Laurent et al. 2024 (arXiv 2310.08287). Drawn like `plots`: with Agg and settings of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, path_of, save
from checkpoints_zoo.evaluation.plots import stated

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from checkpoints_zoo.evaluation.metrics import Interval

PANEL = (4.9, 3.9)  # inches
BARS = 40  # of a histogram, at most
DOTS = 3000  # pairs that are drawn one by one; more are counted in hexagons


class Matrices(Protocol):
    """What is known of every pair on some inputs: see `posterior.divergence.Pairs`."""

    @property
    def information(self) -> Tensor: ...
    @property
    def disagreement(self) -> Tensor: ...
    @property
    def inputs(self) -> int: ...


class Drawable(Protocol):
    """What all pairs must have to be drawn: see `posterior.pairwise.Pairwise`."""

    @property
    def collection(self) -> str: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def data(self) -> str: ...
    @property
    def ood(self) -> str: ...
    @property
    def inside(self) -> Matrices: ...
    @property
    def outside(self) -> Matrices | None: ...
    @property
    def figures(self) -> Mapping[str, Interval]: ...


def pairwise_figure(found: Drawable, path: str | Path) -> Path:
    """Draw all pairs into a PNG, by temporary name and rename; return its path.

    Args:
        found: the pairs of two or more members.
        path: of the PNG; its folder is made.

    Raises:
        UsageError: one member, a name that is no PNG's, or a place that can't be written to.
    """
    path = path_of(path)
    if len(found.ids) < 2:
        raise UsageError(f"picture {path}", expected="two members or more", found=f"{len(found.ids)}")
    return save(lambda: draw(found), path, _title(found))


def draw(found: Drawable) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    across, down = (2, 1) if found.outside is None else (2, 2)
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(PANEL[0] * across, PANEL[1] * down + 0.6), dpi=DPI, layout=spaced)
    figure.suptitle(_title(found), fontsize=13, fontweight="bold", parse_math=False)
    figure.supxlabel(_notes(found), fontsize=8, color=GREY, parse_math=False)
    grid = figure.add_gridspec(down, across)
    inside = _pairs(found.inside.information)
    _spread(figure.add_subplot(grid[0, 0], label="id"), inside, found.figures["mi_id"], "a  In distribution", BLUE)
    if found.outside is not None:
        outside = _pairs(found.outside.information)
        axes = figure.add_subplot(grid[0, 1], label="ood")
        _spread(axes, outside, found.figures["mi_ood"], "b  Out of distribution", RED)
        _scatter(figure.add_subplot(grid[1, 0], label="scatter"), inside, outside, found.figures["correlation"])
    title = f"{'b' if found.outside is None else 'd'}  Disagreement"
    _matrix(figure.add_subplot(grid[-1, 1], label="disagreement"), found, title)
    return figure


def _title(found: Drawable) -> str:
    pairs = len(found.ids) * (len(found.ids) - 1) // 2
    return f"{found.collection}: {pairs:,} pair{'s' * (pairs != 1)} of {len(found.ids):,} members".lstrip(": ")


def _notes(found: Drawable) -> str:
    sets = [f"{found.data.split(' ')[0]}, {found.inside.inputs:,} inputs".lstrip(", ")]
    if found.outside is not None:
        sets.append(
            f"out of distribution: {found.ood.split(' ')[0]}, {found.outside.inputs:,} inputs".replace(": ,", ":")
        )
    known = all(x.low is not None for x in found.figures.values())
    note = "[ ]: 95 % intervals by a jackknife over members" if known else "Too few or too like members for intervals"
    return f"{'; '.join(sets)}. {note}."


def _pairs(matrix: Tensor) -> list[float]:
    """Return the values of the upper triangle, a row after the other."""
    kept = matrix.new_ones(matrix.shape).triu(1).bool()
    values: list[float] = matrix[kept].tolist()
    return values


def _spread(axes: Axes, values: Sequence[float], mean: Interval, title: str, colour: str) -> None:
    """Draw how the information of pairs spreads, and its mean."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(high, 1e-9):
        half = max(high / 20, 1e-6)
        low, high, bars = low - half, high + half, 1
    else:
        bars = min(BARS, max(5, round(len(values) ** 0.5)))
    sides = [low + (high - low) * i / bars for i in range(bars)] + [high]
    heights, *_ = axes.hist(values, sides, color=colour, alpha=0.85, edgecolor="white", linewidth=0.5)
    axes.axvline(mean.value, ymax=0.8, color=GREY, linewidth=2, label=f"mean {stated(mean)}")
    axes.set(title=title, xlabel="mutual information of a pair (nats)", ylabel="pairs", ylim=(0, max(heights) / 0.8))
    axes.locator_params(axis="y", integer=True, nbins=6)
    axes.locator_params(axis="x", nbins=6)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left")


def _scatter(axes: Axes, inside: Sequence[float], outside: Sequence[float], correlation: Interval) -> None:
    """Draw the two informations of each pair; say how they correlate."""
    if len(inside) <= DOTS:
        axes.plot(inside, outside, "o", color=BLUE, markersize=3.5, alpha=0.5, markeredgewidth=0)
    else:
        counted = axes.hexbin(inside, outside, gridsize=45, bins="log", mincnt=1, cmap="Blues", linewidths=0.1)
        axes.figure.colorbar(counted, ax=axes, label="pairs", pad=0.02)
    axes.set(title="c  One against the other", xlabel="in distribution (nats)", ylabel="out of distribution (nats)")
    axes.plot([], [], " ", label=f"correlation {stated(correlation)}")
    top = axes.get_ylim()
    axes.set_ylim(top[0], top[1] + 0.12 * (top[1] - top[0]))
    axes.locator_params(axis="x", nbins=6)
    axes.legend(loc="upper left", handlelength=0, handletextpad=0)


def _matrix(axes: Axes, found: Drawable, title: str) -> None:
    """Draw the disagreements of all pairs, members in their order."""
    matrix = found.inside.disagreement.clone().fill_diagonal_(float("nan"))
    known = 100 * matrix[~matrix.isnan()]
    low, high = float(known.min()), float(known.max())
    bounds = (low, high) if high > low else (low - 0.5, high + 0.5)
    drawn = axes.imshow((100 * matrix).numpy(), cmap="viridis", vmin=bounds[0], vmax=bounds[1], interpolation="nearest")
    axes.figure.colorbar(drawn, ax=axes, label="inputs classed differently (%)", pad=0.02)
    axes.grid(visible=False)
    mean = stated(found.figures["disagreement"], 100)
    axes.set(title=title, xlabel=f"member, by position\nmean of pairs {mean} %", ylabel="member, by position")
    axes.locator_params(integer=True, nbins=6)
