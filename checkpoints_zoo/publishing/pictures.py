"""The picture of a collection on its source's card: how its members' test figures spread.

Drawn like `plots`: with Agg and settings of its own, so that the same rows give the same bytes.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, STYLE, histogram_edges
from checkpoints_zoo.formats.text import counted
from checkpoints_zoo.publishing.sections import Section

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from checkpoints_zoo.formats.catalog import Description

INCHES = (9.6, 3.5)
NARROW = 8  # bars that a panel has room for at least


def picture(name: str, rows: pa.Table, description: Description) -> bytes | None:
    """Draw the distributions of a collection's test accuracy and NLL; return a PNG, None where no accuracy is known.

    Args:
        name: of the collection.
        rows: its manifest.
        description: the JSON beside it.
    """
    section = Section(name, description, rows)
    if not section.finite("test_accuracy"):
        return None
    import matplotlib as mpl

    drawn = io.BytesIO()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        facts = {"Title": f"{name}: test figures of its members", "Software": "checkpoints_zoo"}
        draw(section).savefig(drawn, format="png", backend="agg", metadata=facts)
    return drawn.getvalue()


def draw(section: Section) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by the manifest's columns."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    accuracies, losses = [100 * v for v in section.finite("test_accuracy")], section.finite("test_nll")
    sets = {d for d in section.members["eval_data"] if d}
    (named,) = sets if len(sets) == 1 else ("",)
    # The font may lack other letters, and a dollar begins a formula.
    named = named if len(named) <= 60 and named.isascii() and named.isprintable() else ""
    figure = Figure(figsize=INCHES, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03))
    title = f"{section.name}: {counted(len(accuracies), 'member')}{f' on {named}' if named else ''}"
    figure.suptitle(title, fontsize=min(12, 700 / len(title)), fontweight="bold", parse_math=False)
    panels = figure.add_gridspec(1, 2 if losses else 1)
    _histogram(figure.add_subplot(panels[0], label="test_accuracy"), accuracies, "test accuracy (%)", BLUE)
    if losses:
        _histogram(figure.add_subplot(panels[1], label="test_nll"), losses, "test NLL (nats)", GREEN)
    return figure


def _histogram(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    """Draw how values spread, their mean, and their ends, of which one member is hardly a bar."""
    sides = histogram_edges(values)
    heights, *_ = axes.hist(values, sides, color=colour, alpha=0.85, edgecolor="white")
    mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    digits = max(1, 1 - math.floor(math.log10(spread))) if spread > mean * 1e-9 else None
    named = [f"{v:.4g}" if digits is None else f"{v:.{digits}f}" for v in (mean, spread, min(values), max(values))]
    about = f"mean {named[0]}" + (f", standard deviation {named[1]}" if digits is not None else "")
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=about)
    if digits is not None:
        ends = [min(values), max(values)]
        text = f"lowest {named[2]}, highest {named[3]}"
        axes.plot(ends, [0, 0], "^", color=GREY, markersize=6, clip_on=False, zorder=5, label=text)
    axes.set(xlabel=label, ylabel="members", ylim=(0, max(heights) / 0.75))
    if len(sides) <= NARROW:
        middle, half = (sides[0] + sides[-1]) / 2, (sides[1] - sides[0]) * NARROW / 2
        axes.set_xlim(middle - half, middle + half)
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.legend(loc="upper left")
