"""Colours and style of all pictures, and the way they become PNG files.

Pictures are drawn with Agg and matplotlib's default settings on figures of their own: the caller's backend and style
are neither used nor changed, and the same figure gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.disk import replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
BARS = 20  # largest number of bars of a histogram
# Okabe & Ito, Color universal design (2008): colour-blind readers can distinguish these colours.
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#606060"
STYLE: Any = {
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold", "font.size": 9.5,
    "grid.color": "#E4E4E4", "legend.fontsize": 9, "legend.frameon": False, "savefig.bbox": None,
}  # fmt: skip


def path_of(path: str | Path) -> Path:
    """Check that the name of a picture ends in .png; return its path.

    Raises:
        UsageError: another ending.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() != ".png":
        raise UsageError(f"picture {path}", expected="a name that ends in .png", found=repr(path.name), path=path)
    return path


def save(make: Callable[[], Figure], path: Path, title: str) -> Path:
    """Draw a figure in the package's style and write it by temporary name and rename; return its path.

    Args:
        make: draws the figure.
        path: of the PNG; its folder is made.
        title: for the file's metadata.

    Raises:
        UsageError: a place that can't be written to.
    """
    import matplotlib as mpl

    try:
        with replace_file(path, "wb") as file, mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)
            metadata = {"Title": title, "Software": "checkpoints_zoo"}
            make().savefig(file, format="png", backend="agg", metadata=metadata)
    except OSError as error:
        expected, found = "a place that can be written to", error.strerror or str(error)
        raise UsageError(
            f"picture {path}", expected=expected, found=found, do="Give another path", path=path
        ) from error
    return path


def panels_figure(panels: int, panel: tuple[float, float], title: str, note: str) -> Figure:
    """Make a figure for panels side by side, with a title above and a note below; return it.

    Args:
        panels: how many.
        panel: width and height of one, inches.
        title, note: of the figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(panel[0] * panels, panel[1]), dpi=DPI, layout=spaced)
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    figure.supxlabel(note, fontsize=8, color=GREY)
    return figure


def histogram_edges(values: Sequence[float]) -> list[float]:
    """Choose the edges of a histogram's bars; return them. Each bar covers equally many possible values.

    Accuracies are multiples of 1 / images: if the values are multiples of a step, the edges are between multiples.

    >>> [round(e, 2) for e in histogram_edges([98.0, 98.5, 99.5])]
    [97.75, 98.25, 98.75, 99.25, 99.75]
    """
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size:
        half = max(size / 2000, 1e-6)
        return [low - half, high + half]
    distinct = sorted(set(values))
    step = min(b - a for a, b in pairwise(distinct))
    steps = (high - low) / step
    if steps <= 10_000 and all(abs((v - low) / step - round((v - low) / step)) < 1e-3 for v in distinct):
        steps_per_bar = math.ceil((round(steps) + 1) / BARS)
        return [low + step * (steps_per_bar * i - 0.5) for i in range(2 + round(steps) // steps_per_bar)]
    bars = min(BARS, max(5, math.ceil(math.sqrt(len(values)))))
    return [low + (high - low) * i / bars for i in range(bars)] + [high]
