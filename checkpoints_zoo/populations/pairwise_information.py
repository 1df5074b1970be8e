"""Mutual information of every pair of members in and out of distribution, their correlation, and disagreement.

The picture follows the figure of the population in Laurent et al., A symmetry-aware exploration of Bayesian neural
network posteriors, 2024: the mutual information of pairs varies little, and its values in and out of distribution
hardly correlate.

This is one file, because its pictures show the figures of the same pairs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, check_picture_path, save_figure
from checkpoints_zoo.evaluation.figures import find_figure
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import as_text, write_frame
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.formats.text import finite_or_null
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.populations.divergence import Pairs, compare_pairs
from checkpoints_zoo.predictions import Predictions, check_same_members, logits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAIR_FIGURES = {
    "mi_id": ("nats", "mutual information of label and member of a pair, mean over inputs and pairs"),
    "disagreement": ("0..1", "share of inputs on which the classes of a pair differ, mean over pairs"),
    "mi_ood": ("nats", "the same as mi_id on the out-of-distribution inputs"),
    "disagreement_ood": ("0..1", "the same as disagreement on the out-of-distribution inputs"),
    "correlation": ("-1..1", "Pearson's, of mi_id and mi_ood over pairs"),
}
FLOAT32_ROUNDING = 1e-7  # Relative rounding error of float32.

PANEL_SIZE = (4.9, 3.9)  # Width and height of a panel in inches.
MOST_BARS = 40  # Largest number of bars of a histogram.
MOST_DOTS = 3000  # Largest number of pairs that are drawn as dots; more pairs are drawn as counts in hexagons.


@dataclass(frozen=True, repr=False)
class Pairwise(PrintedResult):
    """Figures of all pairs of some members, and their means with intervals.

    Args:
        collection: name of the collection.
        citation: text that cites the members.
        ids: ids of the members, in the order of the matrices.
        data, ood: names and fingerprints of the images, ood "" if there are none.
        inside, outside: matrices of the pairs' figures in and out of distribution; `outside` is None if there are no
            images out of distribution.
        figures: figure -> Interval by a jackknife over members, as pairs that share a member are not independent.
    """

    collection: str
    citation: str
    ids: tuple[int, ...]
    data: str
    ood: str
    inside: Pairs
    outside: Pairs | None
    figures: Mapping[str, Interval]

    def _one_line(self) -> str:
        figures = ", ".join(f"{name} {x.value:.4g}" for name, x in self.figures.items())
        return (
            f"{self.collection!r}, {len(self)} pairs of {len(self.ids)} members on {self.data.split(' ')[0]}, {figures}"
        )

    def to_text(self) -> str:
        """Return a table of the means over pairs, with their intervals."""
        rows = [{"figure": n, "mean": as_text(x), "unit": PAIR_FIGURES[n][0]} for n, x in self.figures.items()]
        pairs = f"{len(self):,} pairs of {len(self.ids):,} members of {self.collection}, on {self.data.split(' ')[0]}"
        return f"{text_table(rows)}\n\n{pairs}{f'; OOD: {self.ood.split()[0]}' if self.ood else ''}."

    def __len__(self) -> int:
        return len(self.ids) * (len(self.ids) - 1) // 2

    def __getitem__(self, figure: str) -> Interval:
        """Return the interval of a figure.

        Raises:
            UsageError: there is no such figure.
        """
        return find_figure(self.figures, figure)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per pair: member_a, member_b, then mi_id, disagreement, mi_ood, disagreement_ood."""
        import pandas as pd

        first, second = upper_triangle(len(self.ids))
        ids = torch.tensor(self.ids)
        columns = {"member_a": ids[first].numpy(), "member_b": ids[second].numpy()}
        columns |= {
            name: matrix[first, second].numpy() for name, matrix in _matrix_by_figure(self.inside, self.outside).items()
        }
        return pd.DataFrame(columns)

    def to_json(self) -> str:
        """Return the figures, without the pairs, as JSON text; figures that could not be computed are null."""
        rows: list[dict[str, object]] = []
        for name, x in self.figures.items():
            bounds = {"value": x.value, "low": x.low, "high": x.high}
            known = finite_or_null(bounds)
            rows.append({"figure": name, **known, "unit": PAIR_FIGURES[name][0]})
        facts = {"collection": self.collection, "citation": self.citation, "data": self.data, "ood": self.ood}
        inputs = {"inputs": self.inside.inputs, "ood_inputs": 0 if self.outside is None else self.outside.inputs}
        counts = {"members": len(self.ids), "pairs": len(self), **inputs}
        return json.dumps({**facts, **counts, "level": 0.95, "figures": rows}, indent=1)

    def write(self, path: str | Path) -> Path:
        """Write the rows of `to_frame` as .parquet or .csv; return the file's path.

        Raises:
            UsageError: the path has another suffix.
            StorageError: the file can't be written.
        """
        return write_frame(self.to_frame(), path)

    def plot(self, path: str | Path) -> Path:
        """Draw mutual information in and out of distribution, and disagreements, into a PNG; return its path.

        Raises:
            UsageError: there is only one member, the path does not end in .png, or the file can't be written.
        """
        path = check_picture_path(path)
        if len(self.ids) < 2:
            raise UsageError(f"picture {path}", expected="two members or more", found=f"{len(self.ids)}")
        return save_figure(lambda: draw_pairwise(self), path, _title(self))


def pairwise(
    members: Collection | Predictions,
    data: ImageInput | None = None,
    ood: ImageInput | Predictions | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    memory: int = 1 << 27,
    seed: int = 0,
) -> Pairwise:
    """Compare every pair of members on images; return the matrices and their means, with intervals.

    Args:
        members: two members or more of a collection, or their stored predictions, which name their images.
        data: images in distribution, as `images.of` takes them; None for the collection's own test set. Labels are
            not used.
        ood: images out of distribution, or the same members' stored predictions on images out of distribution; None to
            compare only in distribution.
        device, dtype: torch device and dtype of the members' networks; pairs are computed on this device in float32.
        batch: number of images in a forward pass.
        memory: bytes of memory for the comparison, beside the members' logits.
        seed: seed of the random subsets from which the intervals are computed.

    Raises:
        UsageError: there is only one member, the predictions are of other members, or the images have a size that the
            members can't take.
        DamagedError: some members have weights or logits that are not finite.

    >>> import checkpoints_zoo as zoo
    >>> pairs = zoo.pairwise(zoo.load("convnet-digits", n=8), "digits", ood="photos")
    >>> len(pairs), pairs["mi_ood"].value > 5 * pairs["mi_id"].value
    (28, True)
    """
    arguments.check_measurable(members)
    seed = arguments.check_seed(seed)
    name = members.facts.collection if isinstance(members, Predictions) else members.name
    if len(members) < 2:
        raise UsageError(f"pairs of {name}", expected="two members or more", found=f"{len(members)}")

    def compare_on(data: ImageInput | Predictions) -> tuple[Pairs, str]:
        if isinstance(data, Predictions):
            check_same_members(data, members)
            return compare_pairs(data.blocks(), device=device, memory=memory), data.data
        if isinstance(members, Predictions):
            do = "Give the collection, to run its members on images"
            raise UsageError(f"pairs of predictions {members.name}", expected="no images", found="some", do=do)
        renumbered_images = images.in_order(images.of(data), members.classes)
        pairs = compare_pairs(logits(members, renumbered_images, device, dtype, batch), device=device, memory=memory)
        return pairs, arguments.report_image_name(renumbered_images)

    if data is not None:
        inside, image_name = compare_on(data)
    else:
        default_data = members if isinstance(members, Predictions) else arguments.images_of(members.description)
        inside, image_name = compare_on(default_data)
    outside, ood_image_name = (None, "") if ood is None else compare_on(ood)
    result = summarise_pairs(inside, outside, ids=members.ids, seed=seed)
    return replace(result, collection=name, citation=members.citation, data=image_name, ood=ood_image_name)


def summarise_pairs(
    inside: Pairs, outside: Pairs | None = None, *, ids: Sequence[int] | None = None, seed: int = 0
) -> Pairwise:
    """Average the figures of compared pairs; return the pairs with the means and their intervals.

    Args:
        inside, outside: results of `compare_pairs` for inputs in and out of distribution, of the same members.
        ids: ids of the members; None for their positions.
        seed: seed of the random subsets from which the intervals are computed.

    Raises:
        UsageError: the numbers of members differ.

    >>> import torch
    >>> logits = torch.randn(5, 20, 3, generator=torch.Generator().manual_seed(0))
    >>> pairs = summarise_pairs(compare_pairs(logits[:, :10]), compare_pairs(logits[:, 10:]))
    >>> print(f"{pairs['mi_id'].low:.2f} {pairs['mi_id'].value:.2f} {pairs['mi_id'].high:.2f}")
    0.04 0.09 0.27
    """
    counts = {len(inside), *([] if outside is None else [len(outside)]), *([] if ids is None else [len(ids)])}
    if len(counts) > 1:
        raise UsageError("members", expected="as many in each", found=" and ".join(map(str, sorted(counts))))
    names = tuple(range(len(inside)) if ids is None else ids)
    return Pairwise("", "", names, "", "", inside, outside, _compute_figures(_matrix_by_figure(inside, outside), seed))


def upper_triangle(member_count: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second member of every pair, (pair,) each, in the order of the upper triangle."""
    first, second = torch.triu_indices(member_count, member_count, 1)
    return first, second


def _matrix_by_figure(inside: Pairs, outside: Pairs | None) -> dict[str, Tensor]:
    matrices = {"mi_id": inside.information, "disagreement": inside.disagreement}
    if outside is not None:
        matrices |= {"mi_ood": outside.information, "disagreement_ood": outside.disagreement}
    return matrices


def _compute_figures(matrices: Mapping[str, Tensor], seed: int) -> dict[str, Interval]:
    """Compute means over pairs, and the correlation; return figure -> interval."""
    members = len(next(iter(matrices.values())))
    at = upper_triangle(members)
    means = {name: float(matrix.double()[at].mean()) for name, matrix in matrices.items()}
    # Sums are of differences from the means, so that sums of squares lose no digits to rounding.
    centred_matrices = {name: (matrix.double() - means[name]).fill_diagonal_(0) for name, matrix in matrices.items()}
    has_ood = "mi_ood" in centred_matrices
    if has_ood:
        x, y = centred_matrices["mi_id"], centred_matrices["mi_ood"]
        centred_matrices |= {"xx": x * x, "yy": y * y, "xy": x * y}
    stacked = torch.stack(list(centred_matrices.values()))
    # A smaller variance comes from rounding: the figure is the same for all pairs.
    smallest_variances = [
        (FLOAT32_ROUNDING * float(matrices[n].abs().max())) ** 2 for n in ("mi_id", "mi_ood") if n in matrices
    ]

    def figures_of_subset(member_positions: Tensor) -> Tensor:
        is_included = torch.zeros(members, dtype=torch.float64)
        is_included[member_positions] = 1
        means_among = dict(
            zip(
                centred_matrices,
                (stacked @ is_included) @ is_included / (len(member_positions) * (len(member_positions) - 1)),
                strict=True,
            )
        )
        values = [means_among[name] for name in matrices]
        if has_ood:
            mean_x, mean_y = means_among["mi_id"], means_among["mi_ood"]
            variance_x, variance_y = means_among["xx"] - mean_x**2, means_among["yy"] - mean_y**2
            correlation = (means_among["xy"] - mean_x * mean_y) / (variance_x * variance_y).sqrt()
            differ = variance_x > smallest_variances[0] and variance_y > smallest_variances[1]
            values.append(correlation.clamp(-1, 1).atanh() if differ else correlation.new_tensor(math.nan))
        return torch.stack(values)

    results = metrics.jackknife(figures_of_subset, members, seed=seed, skewness=True)
    by_name = zip(matrices, results[: len(matrices)], strict=True)
    intervals = {name: _shift_interval(x, means[name], PAIR_FIGURES[name][0]) for name, x in by_name}
    if has_ood:
        fisher_interval = results[-1]
        low, high = (
            None if bound is None else math.tanh(bound) for bound in (fisher_interval.low, fisher_interval.high)
        )
        intervals["correlation"] = Interval(math.tanh(fisher_interval.value), low, high)
    return intervals


def _shift_interval(interval: Interval, offset: float, unit: str) -> Interval:
    """Shift an interval by an offset; return the shifted interval, cut at 0 and at the unit's largest value."""
    upper_bound = 1.0 if unit == "0..1" else math.inf
    bounds = (interval.low, interval.high)
    low, high = (None if bound is None else min(max(0.0, bound + offset), upper_bound) for bound in bounds)
    return replace(interval, value=interval.value + offset, low=low, high=high)


def draw_pairwise(pairs: Pairwise) -> Figure:
    """Draw the panels; return the figure, whose axes have the names of the panels as labels."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns, rows = (2, 1) if pairs.outside is None else (2, 2)
    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03)
    figure = Figure(figsize=(PANEL_SIZE[0] * columns, PANEL_SIZE[1] * rows + 0.6), dpi=DPI, layout=layout_engine)
    figure.suptitle(_title(pairs), fontsize=13, fontweight="bold", parse_math=False)
    figure.supxlabel(_note_below(pairs), fontsize=8, color=GREY, parse_math=False)
    grid = figure.add_gridspec(rows, columns)
    inside = upper_triangle_values(pairs.inside.information)
    draw_histogram(
        figure.add_subplot(grid[0, 0], label="id"), inside, pairs.figures["mi_id"], "a  In distribution", BLUE
    )
    if pairs.outside is not None:
        outside = upper_triangle_values(pairs.outside.information)
        axes = figure.add_subplot(grid[0, 1], label="ood")
        draw_histogram(axes, outside, pairs.figures["mi_ood"], "b  Out of distribution", RED)
        draw_scatter(figure.add_subplot(grid[1, 0], label="scatter"), inside, outside, pairs.figures["correlation"])
    title = f"{'b' if pairs.outside is None else 'd'}  Disagreement"
    draw_matrix(figure.add_subplot(grid[-1, 1], label="disagreement"), pairs, title)
    return figure


def _title(pairs: Pairwise) -> str:
    pair_count_text = f"{len(pairs):,} pair{'s' * (len(pairs) != 1)}"
    return f"{pairs.collection}: {pair_count_text} of {len(pairs.ids):,} members".lstrip(": ")


def _note_below(pairs: Pairwise) -> str:
    sets = [f"{pairs.data.split(' ')[0]}, {pairs.inside.inputs:,} inputs".lstrip(", ")]
    if pairs.outside is not None:
        sets.append(
            f"out of distribution: {pairs.ood.split(' ')[0]}, {pairs.outside.inputs:,} inputs".replace(": ,", ":")
        )
    has_intervals = all(x.low is not None for x in pairs.figures.values())
    note = (
        "[ ]: 95 % intervals by a jackknife over members"
        if has_intervals
        else "Too few or too like members for intervals"
    )
    return f"{'; '.join(sets)}. {note}."


def upper_triangle_values(matrix: Tensor) -> list[float]:
    """Return the values of the upper triangle, row by row."""
    is_above_diagonal = matrix.new_ones(matrix.shape).triu(1).bool()
    values: list[float] = matrix[is_above_diagonal].tolist()
    return values


def draw_histogram(axes: Axes, pair_information: Sequence[float], mean: Interval, title: str, colour: str) -> None:
    """Draw a histogram of the pairs' information, and its mean."""
    low, high = min(pair_information), max(pair_information)
    if high - low <= 1e-9 * max(high, 1e-9):
        half_width = max(high / 20, 1e-6)
        low, high, bars = low - half_width, high + half_width, 1
    else:
        bars = min(MOST_BARS, max(5, round(len(pair_information) ** 0.5)))
    edges = [low + (high - low) * i / bars for i in range(bars)] + [high]
    bar_heights, *_ = axes.hist(pair_information, edges, color=colour, alpha=0.85, edgecolor="white", linewidth=0.5)
    axes.axvline(mean.value, ymax=0.8, color=GREY, linewidth=2, label=f"mean {as_text(mean)}")
    axes.set(
        title=title, xlabel="mutual information of a pair (nats)", ylabel="pairs", ylim=(0, max(bar_heights) / 0.8)
    )
    axes.locator_params(axis="y", integer=True, nbins=6)
    axes.locator_params(axis="x", nbins=6)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left")


def draw_scatter(axes: Axes, inside: Sequence[float], outside: Sequence[float], correlation: Interval) -> None:
    """Draw each pair's information in and out of distribution, and their correlation."""
    if len(inside) <= MOST_DOTS:
        axes.plot(inside, outside, "o", color=BLUE, markersize=3.5, alpha=0.5, markeredgewidth=0)
    else:
        hexagons = axes.hexbin(inside, outside, gridsize=45, bins="log", mincnt=1, cmap="Blues", linewidths=0.1)
        axes.figure.colorbar(hexagons, ax=axes, label="pairs", pad=0.02)
    axes.set(title="c  One against the other", xlabel="in distribution (nats)", ylabel="out of distribution (nats)")
    axes.plot([], [], " ", label=f"correlation {as_text(correlation)}")
    top = axes.get_ylim()
    axes.set_ylim(top[0], top[1] + 0.12 * (top[1] - top[0]))
    axes.locator_params(axis="x", nbins=6)
    axes.legend(loc="upper left", handlelength=0, handletextpad=0)


def draw_matrix(axes: Axes, pairs: Pairwise, title: str) -> None:
    """Draw the disagreements of all pairs as a matrix, with members in the collection's order."""
    matrix = pairs.inside.disagreement.clone().fill_diagonal_(float("nan"))
    percentages = 100 * matrix[~matrix.isnan()]
    low, high = float(percentages.min()), float(percentages.max())
    bounds = (low, high) if high > low else (low - 0.5, high + 0.5)
    drawn = axes.imshow((100 * matrix).numpy(), cmap="viridis", vmin=bounds[0], vmax=bounds[1], interpolation="nearest")
    axes.figure.colorbar(drawn, ax=axes, label="inputs classed differently (%)", pad=0.02)
    axes.grid(visible=False)
    mean = as_text(pairs.figures["disagreement"], 100)
    axes.set(title=title, xlabel=f"member, by position\nmean of pairs {mean} %", ylabel="member, by position")
    axes.locator_params(integer=True, nbins=6)
