"""The picture of minimal masses: trained members against their minimum, and how far above it they are.

The figure of Laurent et al. 2024 (arXiv 2310.08287). Drawn like `plots`: with Agg and settings of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, histogram_edges, path_of, save
from checkpoints_zoo.populations.mass import along_training, ends
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (4.8, 4.0)  # inches


def mass_figure(found: MinimalMass, path: str | Path, *, name: str = "", epochs: Sequence[int] | None = None) -> Path:
    """Draw masses beside their minima into a PNG, by temporary name and rename; return its path.

    Args:
        found: of members, or of their snapshots.
        path: of the PNG; its folder is made.
        name: of the collection, for the title.
        epochs: of each snapshot, to draw the masses along training as well; the other panels show the last ones then.

    Raises:
        UsageError: no members, a number of epochs that is not theirs, or a place that can't be written to.
    """
    path = path_of(path)
    if not len(found) or (epochs is not None and len(epochs) != len(found)):
        epoch_count = "" if epochs is None else f" and {len(epochs)} epochs"
        raise UsageError(
            f"picture {path}",
            expected="members, and an epoch of each or none",
            found=f"{len(found)} members{epoch_count}",
        )
    return save(lambda: draw(found, name, epochs), path, f"{name}: mass and minimal mass".lstrip(": "))


def draw(found: MinimalMass, name: str, epochs: Sequence[int] | None) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    last = list(range(len(found))) if epochs is None else ends(found, epochs)
    panels = 2 if epochs is None else 3
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(PANEL[0] * panels, PANEL[1]), dpi=DPI, layout=spaced)
    title = f"{name}: {len(last)} member{'s' * (len(last) != 1)}".lstrip(": ")
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    if float(found.unbounded.max()) > 0:
        units = sum(map(len, found.degenerate.values()))
        note = f"without the mass of units that can shrink without limit: {units} in every member"
        figure.supxlabel(f"{note}, mean {float(found.unbounded.mean()):.4g}", fontsize=8, color=GREY)
    grid = figure.add_gridspec(1, panels)
    before, after = ([float(values[i]) for i in last] for values in (found.before, found.after))
    _masses(figure.add_subplot(grid[0], label="mass"), before, after)
    _excess(figure.add_subplot(grid[1], label="excess"), [float(found.excess[i]) for i in last])
    if epochs is not None:
        _training(figure.add_subplot(grid[2], label="training"), found, epochs)
    return figure


def _masses(axes: Axes, before: Sequence[float], after: Sequence[float]) -> None:
    low, high = min(after), max(before)
    margin = 0.06 * (high - low) or 0.06 * high or 1.0
    ends = [low - margin, high + margin]
    axes.plot(ends, ends, color=GREY, linewidth=1.2, linestyle="--", label="mass = its minimum")
    axes.plot(before, after, "o", color=BLUE, markersize=5, alpha=0.75, markeredgecolor="white", label="a member")
    axes.set(title="Mass and its minimum", xlabel="mass as trained", ylabel="minimum over scales", xlim=ends, ylim=ends)
    axes.set_aspect("equal")
    axes.legend(loc="upper left")


def _excess(axes: Axes, excess: Sequence[float]) -> None:
    mean = sum(excess) / len(excess)
    heights, *_ = axes.hist(excess, histogram_edges(excess), color=BLUE, alpha=0.85, edgecolor="white")
    text = f"mean {mean:.3g}, from {min(excess):.3g} to {max(excess):.3g}"
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=text)
    axes.set(title="Excess", xlabel="mass above its minimum (%)", ylabel="members", ylim=(0, max(heights) / 0.75))
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=7)
    axes.legend(loc="upper left")


def _training(axes: Axes, found: MinimalMass, epochs: Sequence[int]) -> None:
    mean = along_training(found, epochs)
    known = [at.epoch for at in mean]
    lines = (
        (found.before, [at.mass for at in mean], BLUE, "mass"),
        (found.after, [at.minimum for at in mean], GREEN, "its minimum"),
    )
    for values, means, colour, label in lines:
        for member in sorted(set(found.ids)):
            own = sorted((e, float(values[i])) for i, e in enumerate(epochs) if found.ids[i] == member)
            axes.plot([e for e, _ in own], [v for _, v in own], color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(known, means, "o-", color=colour, linewidth=2, markersize=4, label=label)
    axes.set(title="Along training", xlabel="epoch", ylabel="mass (mean over members)", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
