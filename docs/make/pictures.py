"""The pictures of README.md and of the pages, drawn from `convnet-digits`: `python -m docs.make --measure pictures`.

Backgrounds are transparent and letters are grey, so that a picture can be read on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation.drawing import BLUE, GREEN, RED, save_figure
from docs.make.formats import SHARD, read_header

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1]
INK = "#7d8590"  # 3.7 : 1 or more on white and on the dark pages of GitHub and of the site
PALE_BLUE = "#4c8fb8"
STYLE: Any = {
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "text.color": INK, "xtick.color": INK,
    "ytick.color": INK, "grid.color": "#7d859040", "axes.facecolor": "none", "figure.facecolor": "none",
}  # fmt: skip


def draw_pictures(folder: Path = DOCS, subsets: int = 100, lines: int = 16) -> None:
    """Measure the collection, and write all pictures into a folder.

    Args:
        folder: gets the pictures.
        subsets: number of random ensembles of each size.
        lines: number of lines between members.
    """
    members = zoo.load("convnet-digits")
    report = zoo.evaluate(members, "digits", ood="photos", subsets=subsets)
    pictures: dict[str, tuple[str, Callable[[Figure], None]]] = {
        "population": (
            "A population of 64 networks",
            lambda figure: _draw_population(figure, members[: lines + 1], report),
        ),
        "intervals": ("The intervals of a report", lambda figure: _draw_intervals(figure, report)),
        "views": ("One layer of two networks, through three views", lambda figure: _draw_views(figure, members)),
        "shard": ("The bytes of a shard", _draw_shard),
    }
    for name, (title, draw) in pictures.items():
        save_figure(partial(_make_figure, draw), folder / f"{name}.svg", title)


def _make_figure(draw: Callable[[Figure], None]) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update(STYLE)  # `save_figure` restores the settings
    figure = Figure(layout="constrained")
    draw(figure)
    return figure


def _draw_population(figure: Figure, few: zoo.Collection, report: zoo.Report) -> None:
    """Draw what more members bring, and what alignment does to the line between two."""
    figure.set_size_inches(10, 2.9)
    curves, detection, lines = figure.subplots(1, 3)
    _draw_curve(curves, report, "nll", BLUE)
    curves.set(title="More networks, fewer surprises", ylabel="negative log-likelihood (nats)")
    _draw_curve(detection, report, "auroc", GREEN)
    detection.set(title="They disagree on the unknown", ylabel="AUROC against photos")
    for collection, colour, label in ((few, RED, "as trained"), (few.align(to=0), BLUE, "units matched")):
        found = zoo.barrier(collection)
        places, losses = found.lambdas.numpy(), found.losses.numpy()
        lines.plot(places, losses.T, color=colour, alpha=0.25, linewidth=0.8)
        lines.plot(places, losses.mean(0), color=colour, linewidth=2, label=label)
    lines.set(title="Strangers are neighbours", ylabel="loss on the line (nats)", xlabel="from one network to another")
    lines.legend(loc="upper left", fontsize=8, handlelength=1)


def _draw_curve(axes: Axes, report: zoo.Report, name: str, colour: str) -> None:
    """Draw a figure against the number of members, with the range of 95 % of new ensembles."""
    sizes = sorted(report.curve)[:-1]
    figures = [report.curve[size][name] for size in sizes]
    low, high = ([getattr(f, end) for f in figures] for end in ("low", "high"))
    axes.fill_between(sizes, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(sizes, [f.value for f in figures], color=colour, marker="o", markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.set_xlabel("networks in the ensemble")


def _draw_intervals(figure: Figure, report: zoo.Report) -> None:
    """Draw the three kinds of intervals: of the mean member, of new ensembles, of all members."""
    figure.set_size_inches(7.5, 3.2)
    axes = figure.subplots()
    _draw_curve(axes, report, "nll", BLUE)
    axes.set_ylabel("negative log-likelihood (nats)")
    for size, interval, name, shift in (
        (1, report.member["nll"], 'report.member["nll"]', 10),
        (report.members, report["nll"], 'report["nll"]', 0),
    ):
        low, high = interval.low or 0.0, interval.high or 0.0
        ends = [[interval.value - low], [high - interval.value]]
        axes.errorbar([size], [interval.value], ends, color=RED, marker="s", capsize=4)
        axes.annotate(name, (size, high), (shift, 8), textcoords="offset points", color=RED, ha="center")
    middle = report.curve[4]["nll"]
    axes.annotate('report.curve[4]["nll"]', (4, middle.high), (6, 4), textcoords="offset points", color=BLUE)


def _draw_views(figure: Figure, members: zoo.Collection) -> None:
    """Draw the last layer of two members: as trained, canonical, and aligned to the first of them."""
    figure.set_size_inches(10, 2.6)
    two = members[:2]
    views = {
        "as trained": two,
        'canonicalize(permute="norm")': two.canonicalize(permute="norm"),
        "align(to=0)": two.align(to=0),
    }
    panels = figure.subplots(2, 3)
    for column, (name, view) in enumerate(views.items()):
        weights = view.stack()["fc2.weight"].numpy()
        for row in range(2):
            axes = panels[row][column]
            bound = float(abs(weights[row]).max())
            axes.imshow(weights[row], cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[], title=name if row == 0 else "")
            axes.grid(visible=False)
            if column == 0:
                axes.set_ylabel(f"member {two.ids[row]}")
            if row == 1:
                axes.set_xlabel("hidden units")


def _draw_shard(figure: Figure) -> None:
    """Draw a shard's bytes: length, header, members; and the tensors of its first member."""
    figure.set_size_inches(10, 2.6)
    whole, one = figure.subplots(2, 1)
    start, tensors = read_header(SHARD.read_bytes())
    names = [name for name in tensors if name.startswith("000000/")]
    ends = [start + tensors[name]["data_offsets"][1] for name in names]
    begins = [start + tensors[name]["data_offsets"][0] for name in names]
    nbytes = max(ends) - min(begins)
    for axes in (whole, one):
        axes.set(yticks=[])
        axes.grid(visible=False)
        axes.spines[["left"]].set_visible(False)
    text: Any = {"ha": "center", "va": "center", "color": "white", "fontsize": 8.5}
    whole.barh(0, start, left=0, color=INK)
    whole.text(start / 2, 0, "length, header", **text)
    for member in range(6):
        begin = start + member * nbytes
        whole.barh(0, nbytes, left=begin, color=BLUE if member == 0 else PALE_BLUE, edgecolor="white", linewidth=0.5)
        whole.text(begin + nbytes / 2, 0, f"member {member}", **text)
    whole.set(title="the file, to member 5 of 63", xlabel="bytes", xlim=(0, start + 6 * nbytes))
    for number, (name, begin, end) in enumerate(zip(names, begins, ends, strict=True)):
        one.barh(0, end - begin, left=begin, color=BLUE if number % 2 == 0 else GREEN, edgecolor="white", linewidth=0.5)
        if end - begin > 0.04 * nbytes:
            one.text((begin + end) / 2, 0, name.partition("/")[2], **text)
    one.set(title="member 0", xlabel="bytes", xlim=(min(begins), max(ends)))
