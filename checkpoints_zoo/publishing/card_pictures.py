"""Pictures of a card: histograms of the members' test figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pyarrow as pa

from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, histogram_edges, png_bytes
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.text import count_with_noun
from checkpoints_zoo.publishing.card_sections import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PICTURE_INCHES = (9.6, 3.5)
FEWEST_BARS = 8  # a histogram with fewer bars has bars as narrow as one with this number


def can_draw() -> bool:
    """Return whether pictures can be drawn: the core of the package is installed without matplotlib."""
    return find_spec("matplotlib") is not None


def picture_path(collection: str) -> str:
    """Return the path of a collection's picture in its source."""
    return f"cards/{collection}.png"


def picture(collection: str, rows: pa.Table, description: Description) -> bytes | None:
    """Draw the distributions of a collection's test accuracy and NLL; return a PNG, or None if no accuracy is known or
    matplotlib is not installed.

    Args:
        collection: name of the collection.
        rows: manifest of the collection.
        description: description of the collection.
    """
    section = Section(collection, description, rows)
    if not section.finite_values("test_accuracy") or not can_draw():
        return None
    return png_bytes(lambda: draw_histograms(section), f"{collection}: test figures of its members")


def draw_histograms(section: Section) -> Figure:
    """Draw histograms of test accuracy and NLL; return the figure. The label of each matplotlib axes is the name of its
    manifest column."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    accuracies, losses = [100 * v for v in section.finite_values("test_accuracy")], section.finite_values("test_nll")
    set_names = {d for d in section.member_values["eval_data"] if d}
    (set_name,) = set_names if len(set_names) == 1 else ("",)
    set_name = set_name if len(set_name) <= 60 else ""
    figure = Figure(
        figsize=PICTURE_INCHES, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    )
    title = f"{section.name}: {count_with_noun(len(accuracies), 'member')}{f' on {set_name}' if set_name else ''}"
    figure.suptitle(title, fontsize=min(12, 700 / len(title)), fontweight="bold")
    grid = figure.add_gridspec(1, 2 if losses else 1)
    _histogram(figure.add_subplot(grid[0], label="test_accuracy"), accuracies, "test accuracy (%)", BLUE, axis_end=100)
    if losses:
        _histogram(figure.add_subplot(grid[1], label="test_nll"), losses, "test NLL (nats)", GREEN)
    return figure


def _histogram(
    axes: Axes, values: Sequence[float], axis_label: str, colour: str, axis_end: float | None = None
) -> None:
    """Draw a histogram of values, a line at their mean, and marks at the smallest and the largest value."""
    bin_edges = histogram_edges(values)
    bin_heights, *_ = axes.hist(values, bin_edges, color=colour, alpha=0.85, edgecolor="white")
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    decimals = max(1, 1 - math.floor(math.log10(deviation))) if deviation > mean * 1e-9 else None
    number_texts = [
        f"{v:.4g}" if decimals is None else f"{v:.{decimals}f}" for v in (mean, deviation, min(values), max(values))
    ]
    mean_text = f"mean {number_texts[0]}" + (f", standard deviation {number_texts[1]}" if decimals is not None else "")
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=mean_text)
    if decimals is not None:
        extreme_values = [min(values), max(values)]
        extremes_text = f"lowest {number_texts[2]}, highest {number_texts[3]}"
        axes.plot(extreme_values, [0, 0], "^", color=GREY, markersize=6, clip_on=False, zorder=5, label=extremes_text)
    axes.set(xlabel=axis_label, ylabel="members", ylim=(0, max(bin_heights) / 0.75))
    if len(bin_edges) <= FEWEST_BARS:
        range_middle, half_width = (bin_edges[0] + bin_edges[-1]) / 2, (bin_edges[1] - bin_edges[0]) * FEWEST_BARS / 2
        axes.set_xlim(range_middle - half_width, range_middle + half_width)
    if axis_end is not None:
        axes.set_xlim(right=min(axes.get_xlim()[1], max(axis_end, bin_edges[-1])))
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.legend(loc="upper left")
