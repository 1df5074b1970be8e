"""Pictures of the compact posterior, and of loss barriers before and after alignment.

After the figures of Xiao, Liu & Bamler 2023 (arXiv 2401.00611). Drawn like `plots`: with Agg and settings of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, path_of, save
from checkpoints_zoo.populations.compact import Compact
from checkpoints_zoo.populations.loss_barrier import Barriers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

PANEL = (4.6, 3.9)  # inches
COLOURS = {"members": GREY, "q_d": RED, "q_r": BLUE}
NAMES = {"members": "members", "q_d": "$q_d$, before alignment", "q_r": "$q_r$, after alignment"}
SYMBOLS = {"members": "members", "q_d": "$q_d$", "q_r": "$q_r$"}


def compact_figure(found: Compact, path: str | Path) -> Path:
    """Draw the standard deviations, the accuracies of samples and the pruned means into a PNG; return its path.

    Args:
        found: of `compact`.
        path: of the PNG; its folder is made. It is written by temporary name and rename.

    Raises:
        UsageError: a name that is no PNG's, or a place that can't be written to.
    """
    return save(lambda: draw_compact(found), path_of(path), f"{found.collection}: compact posterior")


def barrier_figure(before: Barriers, after: Barriers, path: str | Path, *, name: str = "") -> Path:
    """Draw losses and accuracies along lines between members, before and after alignment, into a PNG; return its path.

    Args:
        before, after: of the same pairs.
        path: of the PNG; its folder is made. It is written by temporary name and rename.
        name: of the collection, for the title.

    Raises:
        UsageError: other pairs, a name that is no PNG's, or a place that can't be written to.
    """
    path = path_of(path)
    if before.pairs != after.pairs:
        expected, found = "the same pairs before and after alignment", f"{len(before)} and {len(after)}, not all alike"
        raise UsageError(f"picture {path}", expected=expected, found=found, path=path)
    return save(lambda: draw_barriers(before, after, name), path, f"{name}: loss barrier".lstrip(": "))


def draw_compact(found: Compact) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    counts = f"{found.members} members, aligned to {found.to}; {found.samples} samples"
    figure = _figure(3, f"{found.collection}: {counts}", f"{found.data.split(' ')[0]}, {found.inputs:,} inputs")
    grid = figure.add_gridspec(1, 3)
    _sigmas(figure.add_subplot(grid[0], label="sigma"), {"q_d": found.q_d.sigmas, "q_r": found.q_r.sigmas})
    _accuracies(figure.add_subplot(grid[1], label="accuracy"), found)
    _pruning(figure.add_subplot(grid[2], label="pruning"), found)
    return figure


def draw_barriers(before: Barriers, after: Barriers, name: str) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    first = {a for a, _ in before.pairs}
    lines = f"{len(before)} line{'s' * (len(before) != 1)}" + (f" from member {min(first)}" if len(first) == 1 else "")
    note = f"{before.data.split(' ')[0]}, {before.inputs:,} inputs"
    if before.statistics:
        source = before.statistics.split(" ")[0]
        note += f"; running statistics at every point from {before.statistics_images:,} images of {source}"
    figure = _figure(2, f"{name}: {lines}".lstrip(": "), note)
    grid = figure.add_gridspec(1, 2)
    for column, (label, scale, unit) in enumerate((("loss", 1, "NLL (nats)"), ("accuracy", 100, "accuracy (%)"))):
        axes = figure.add_subplot(grid[column], label=label)
        for of, colour, when in ((before, RED, "before"), (after, BLUE, "after")):
            values = (of.losses if label == "loss" else of.accuracies) * scale
            for line in values.tolist():
                axes.plot(of.lambdas.tolist(), line, color=colour, linewidth=0.7, alpha=0.25)
            text = f"{when} alignment" + (f": mean barrier {of.barriers.mean():.3g} nats" if label == "loss" else "")
            axes.plot(of.lambdas.tolist(), values.mean(0).tolist(), color=colour, linewidth=2.2, label=text)
        title = "Loss on the line" if label == "loss" else "Accuracy on the line"
        axes.set(title=title, xlabel="λ: share of the second member", ylabel=unit, xlim=(0, 1))
        axes.set_ylim(0, max(float(of.losses.max()) for of in (before, after)) * 1.35 if label == "loss" else 101)
        axes.legend(loc="upper right" if label == "loss" else "lower left")
    return figure


def _figure(panels: int, title: str, note: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(PANEL[0] * panels, PANEL[1]), dpi=DPI, layout=spaced)
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel(note, fontsize=8, color=GREY)
    return figure


def _sigmas(axes: Axes, sigmas: dict[str, Tensor]) -> None:
    import numpy as np

    values = {name: s.double().cpu().numpy() for name, s in sigmas.items()}
    edges = np.linspace(0, max(float(own.max()) for own in values.values()) or 1.0, 41).tolist()
    top = 0.0
    for name, own in values.items():
        heights, *_ = axes.hist(
            own, edges, histtype="stepfilled", facecolor=(COLOURS[name], 0.3), edgecolor=COLOURS[name], linewidth=1.4,
            label=f"{NAMES[name]}: median {np.median(own):.3g}",
        )  # fmt: skip
        top = max(top, float(np.max(heights)))
    axes.set(title="Standard deviations", xlabel="σ of a weight", ylabel="weights", ylim=(0, top * 1.35))
    axes.set_xlim(0, None)
    axes.legend(loc="upper right")


def _accuracies(axes: Axes, found: Compact) -> None:
    edges = [5.0 * i for i in range(21)]
    top = 0.0
    for name, accuracies in found.drawing.items():
        shares = [100 * a for a in accuracies]
        what = SYMBOLS[name] if name == "members" else f"samples of {SYMBOLS[name]}"
        weights = [1 / len(shares)] * len(shares)
        heights, *_ = axes.hist(
            shares, edges, weights=weights, histtype="stepfilled", facecolor=(COLOURS[name], 0.3),
            edgecolor=COLOURS[name], linewidth=1.4,
            label=f"{what}: mean {sum(shares) / len(shares):.1f} %",
        )  # fmt: skip
        top = max(top, float(max(heights)))
    for name in ("q_d", "q_r"):
        mean = 100 * found.table[name]["mean_accuracy"].value
        text = f"mean of {SYMBOLS[name]}: {mean:.1f} %"
        axes.axvline(mean, ymax=0.6, color=COLOURS[name], linewidth=2, linestyle="--", label=text)
    axes.set(title="Accuracies", xlabel="test accuracy (%)", ylabel="share", xlim=(0, 100), ylim=(0, top * 1.75))
    axes.set_yticks([i / 5 for i in range(6) if i / 5 <= top * 1.2])
    axes.legend(loc="upper left")


def _pruning(axes: Axes, found: Compact) -> None:
    levels = [100 * level for level in found.levels]
    words = {"sigma": "lowest σ kept", "snr": "largest |μ|/σ kept"}
    for rule, style in (("sigma", "-"), ("snr", ":")):
        for name, accuracies in found.pruning[rule].items():
            shown: Sequence[float] = [100 * a for a in accuracies]
            label = f"mean of {SYMBOLS[name]}, {words[rule]}"
            axes.plot(levels, shown, style, color=COLOURS[name], marker="o", markersize=3, label=label)
    axes.set(title="Pruning", xlabel="weights set to 0 (%)", ylabel="test accuracy (%)", ylim=(0, 135))
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper right", ncols=2, fontsize=7.5)
