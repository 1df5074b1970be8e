"""The picture of an alignment: distances before and after, transpositions, and the loss on the lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, path_of, save
from checkpoints_zoo.populations.alignment_table import Alignment
from checkpoints_zoo.populations.loss_barrier import Barriers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = (4.6, 4.0)  # inches


def alignment_figure(found: Alignment, path: str | Path, lines: Sequence[Barriers] | None = None) -> Path:
    """Draw an alignment into a PNG, by temporary name and rename; return its path.

    Args:
        found: of `zoo.alignment`.
        path: of the PNG; its folder is made.
        lines: losses before and after alignment, for a third panel.

    Raises:
        UsageError: a name that is no PNG's, or a place that can't be written to.
    """
    return save(lambda: draw(found, lines), path_of(path), f"{found.collection}: aligned to {found.to}")


def draw(found: Alignment, lines: Sequence[Barriers] | None) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure

    panels = 3 if lines else 2
    figure = Figure(figsize=(PANEL[0] * panels, PANEL[1]), dpi=DPI, layout="constrained")
    title = f"{found.collection}: {len(found)} member{'s' * (len(found) != 1)} aligned to {found.to}"
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    axes = figure.subplots(1, panels)
    _distances(axes[0], found)
    _transpositions(axes[1], found)
    if lines:
        _losses(axes[2], lines)
    return figure


def _distances(axes: Axes, found: Alignment) -> None:
    axes.scatter(found.before.tolist(), found.after.tolist(), s=14, color=BLUE, edgecolors="none")
    most = float(max(found.before.max(), found.after.max())) * 1.05 or 1.0
    axes.plot([0, most], [0, most], color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, most)
    axes.set_ylim(0, most)
    axes.set_title("Distance to the reference")
    axes.set_xlabel("squared distance as stored")
    axes.set_ylabel("squared distance aligned")


def _transpositions(axes: Axes, found: Alignment) -> None:
    """Draw a box a group, of the share of the transpositions that there can be."""
    groups = [name for name, size in found.sizes.items() if size > 1]
    shares = [(found.transpositions[name] / (found.sizes[name] - 1)).tolist() for name in groups]
    if groups:
        axes.boxplot(shares, orientation="horizontal", widths=0.6, flierprops={"markersize": 3})
        axes.set_yticks(range(1, len(groups) + 1), [f"{n} ({found.sizes[n]})" for n in groups], parse_math=False)
        axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    axes.set_title("Transpositions")
    axes.set_xlabel("share of the most there can be")


def _losses(axes: Axes, lines: Sequence[Barriers]) -> None:
    for line, label, colour in zip(lines, ("as stored", "aligned"), (RED, GREEN), strict=True):
        lambdas = line.lambdas.tolist()
        for losses in line.losses.tolist():
            axes.plot(lambdas, losses, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(lambdas, line.losses.mean(0).tolist(), color=colour, linewidth=2, label=label)
    axes.set_title("Loss on the lines")
    axes.set_xlabel("λ, from the reference to a member")
    axes.set_ylabel("negative log-likelihood (nats)")
    axes.legend()
