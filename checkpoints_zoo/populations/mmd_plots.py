"""The picture of an MMD: how far two sets of members are apart in each layer, before and after removing symmetries.

After the NS column of Laurent et al. 2024 (arXiv 2310.08287). Drawn like `plots`: with Agg and settings of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, path_of, save
from checkpoints_zoo.formats.selection import parse_citation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH, ROW, LEAST, MOST = 9.4, 0.24, 2.2, 14.0  # inches: of the figure, a group, and the figure's height
LEVEL = 0.05


class Group(Protocol):
    """What is known of a group of tensors: see `posterior.discrepancies.Discrepancy`."""

    @property
    def weights(self) -> int: ...
    @property
    def value(self) -> float: ...
    @property
    def p_value(self) -> float: ...


class Drawable(Protocol):
    """What a comparison must have to be drawn: see `posterior.discrepancies.MMD`."""

    @property
    def first(self) -> str: ...
    @property
    def second(self) -> str: ...
    @property
    def members(self) -> tuple[int, int]: ...
    @property
    def permutations(self) -> int: ...
    @property
    def groups(self) -> Mapping[str, Group]: ...


def mmd_figure(before: Drawable, after: Drawable | None, path: str | Path) -> Path:
    """Draw MMD² and p-values, one group of tensors a row, into a PNG, by temporary name and rename; return its path.

    Args:
        before: of the weights as they are stored.
        after: of the same sets without symmetries; None for none.
        path: of the PNG; its folder is made.

    Raises:
        UsageError: a name that is no PNG's, or a place that can't be written to.
    """
    return save(lambda: draw(before, after), path_of(path), title_of(before))


def draw(before: Drawable, after: Drawable | None = None) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = list(before.groups)
    height = min(MOST, LEAST + ROW * len(names))
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout=spaced)
    figure.suptitle(title_of(before), fontsize=12, fontweight="bold", parse_math=False)
    note = f"MMD²: unbiased, mean over kernels. p: {before.permutations:,} permutations; not adjusted for many layers."
    figure.supxlabel(note, fontsize=8, color=GREY)
    sides = [(before, RED, "s", "as stored"), *([] if after is None else [(after, BLUE, "o", "symmetries removed")])]
    grid = figure.add_gridspec(1, 2)
    left = figure.add_subplot(grid[0], label="mmd")
    right = figure.add_subplot(grid[1], label="p", sharey=left)
    for found, colour, marker, label in sides:
        for axes, values in (
            (left, [found.groups[name].value for name in names]),
            (right, [found.groups[name].p_value for name in names]),
        ):
            axes.plot(values, range(len(names)), marker, color=colour, markersize=5.5, alpha=0.85, label=label)
    left.axvline(0, color=GREY, linewidth=0.8)
    left.set(xlabel="MMD²")
    left.locator_params(axis="x", nbins=6)
    _rows(left, names, height)
    line = right.axvline(LEVEL, color=GREY, linewidth=0.8, linestyle="--", label=f"p = {LEVEL:g}")
    right.set(xlabel="p-value", xscale="log", xlim=(0.7 / (1 + before.permutations), 1.4))
    right.tick_params(axis="y", labelleft=False)
    _key(left, "a  Distance", left.lines[: len(sides)])
    _key(right, "b  Permutation test", [line])
    return figure


def title_of(found: Drawable) -> str:
    """Return words for the sets that are compared."""
    cited = [parse_citation(citation) for citation in (found.first, found.second)]
    names = ["" if citation is None else citation.name for citation in cited]
    one, other = (f"{count:,}" for count in found.members)
    if names[0] == names[1]:
        return f"{names[0]}: {one} members against {other}".lstrip(": ")
    return f"{names[0]} ({one} members) against {names[1]} ({other})"


def _key(axes: Axes, title: str, lines: Sequence[Line2D]) -> None:
    """Put the title of a panel above its axes, and the key between the two."""
    axes.set_title(title, pad=22)
    key = axes.legend(
        handles=lines, loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=2, borderaxespad=0.2, handletextpad=0.4
    )
    key.set_in_layout(False)


def _rows(axes: Axes, names: Sequence[str], height: float) -> None:
    """Name the rows, from the first layer at the top to all weights; of too many, as many as there is room for."""
    every = -(-len(names) // max(1, int((height - LEAST) / 0.16)))
    # The last row is all weights together, which is named in any case.
    shown = [i for i in range(len(names)) if (len(names) - 1 - i) % every == 0]
    axes.set_yticks(shown, [names[i] for i in shown], parse_math=False, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.axhline(len(names) - 1.5, color=GREY, linewidth=0.8)
