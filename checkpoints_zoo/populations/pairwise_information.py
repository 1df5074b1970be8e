"""What every pair of members has: mutual information in and out of distribution, their correlation, disagreement.

The poster's population figure (Laurent et al., A symmetry-aware exploration of Bayesian neural network posteriors,
2024): how little the mutual information of pairs spreads, and that in and out of distribution hardly correlate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, path_of, save
from checkpoints_zoo.evaluation.figures import figure_of
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import stated
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.disk import replacing
from checkpoints_zoo.images import Given
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.predictions import Predictions, check_same, logits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The table that turns probabilities into vectors whose squared distances are Jensen-Shannon divergences.


Array = npt.NDArray[np.float64]

TOLERANCE = 1e-6  # nats of a pair, whatever the probabilities, beside float32's rounding
FINER = 9  # bits: rows of the table an octave of probabilities, between which it is linear


@dataclass(frozen=True)
class Embedding:
    """Maps a probability to a vector, so that squared distances of vectors are divergences.

    Args:
        table: (row, component): vectors of 2^-octaves (1 + i / 2^FINER), then on to 1, float32.
        octaves: below 1 that the table covers; what is less probable is taken as the first row.
        bound: the largest error of a divergence, in nats, over all pairs of distributions.
    """

    table: Tensor
    octaves: int
    bound: float

    def __call__(self, probs: Tensor) -> Tensor:
        """Look probabilities up; return vectors (probability, component).

        Args:
            probs: (probability), float32.
        """
        # A float32's bits are linear in its value within an octave: the upper ones count rows, the rest is between two.
        bits = probs.clamp(2.0**-self.octaves, 1.0).view(torch.int32) - ((127 - self.octaves) << 23)
        rows, shares = bits.new_empty(len(bits), 2), probs.new_empty(len(bits), 2)
        torch.bitwise_right_shift(bits, 23 - FINER, out=rows[:, 0])
        torch.add(rows[:, 0], 1, out=rows[:, 1])
        torch.mul(bits & ((1 << (23 - FINER)) - 1), 2.0 ** (FINER - 23), out=shares[:, 1])
        torch.sub(1.0, shares[:, 1], out=shares[:, 0])
        return torch.nn.functional.embedding_bag(rows, self.table, mode="sum", per_sample_weights=shares)

    def to(self, device: torch.device) -> Embedding:
        return replace(self, table=self.table.to(device))


@lru_cache(maxsize=8)
def embedding(classes: int) -> Embedding:
    """Find the fewest components that keep every divergence within the tolerance; return the embedding.

    The error of a class is bounded on a grid, as a share of (p + q) / 2 + 1 / classes, whose sum is at most 2.

    Args:
        classes: how many probabilities sum to one.
    """
    top = math.ceil(math.log2(classes / TOLERANCE))
    # From where s p is nothing, to where even the least probability has been told from 0; the rest goes to the ends.
    s = 2.0 ** np.arange(-20, top + 1)
    width = math.log(2) / s
    width[[0, -1]] *= 2

    def functions(p: Array) -> Array:
        values: Array = -np.expm1(-np.outer(p, s)) * np.sqrt(width) / 2
        return values

    octaves = top + 8
    rows = np.arange((octaves << FINER) + 2)
    at = 2.0 ** ((rows >> FINER) - octaves) * (1 + (rows & ((1 << FINER) - 1)) / (1 << FINER))
    given = torch.tensor([0.0, *np.logspace(-12, 0, 180)], dtype=torch.float32)
    p = given.double().numpy()
    table, whole = functions(at), functions(p)
    for components in range(9 + int(3 * math.log10(classes)), len(s)):  # fewer have never been enough
        weight = 1 / np.sqrt(p + 1 / classes)
        for _ in range(3):  # towards the smallest largest error: what is far off weighs more the next time
            axes = np.linalg.svd(whole * weight[:, None], full_matrices=False)[2][:components]
            missed = ((whole - whole @ axes.T @ axes) ** 2).sum(1) * weight**2
            weight = weight * np.maximum(missed / missed.max(), 1e-3) ** 0.25
        found = Embedding(torch.tensor(table @ axes.T, dtype=torch.float32), octaves, math.inf)
        bound = _error(found(given).double().numpy(), p, classes)
        if bound <= TOLERANCE:
            break
    return replace(found, bound=bound)


def _error(vectors: Array, p: Array, classes: int) -> float:
    """Return the largest error of a divergence by these vectors of the probabilities of a grid."""
    x, y = p[:, None], p[None]
    z = x + y
    plog = [-a * np.log(np.where(a > 0, a, 1)) for a in (z / 2, x, y)]
    exact = plog[0] - (plog[1] + plog[2]) / 2
    norms = (vectors**2).sum(1)
    found = norms[:, None] + norms - 2 * vectors @ vectors.T
    return float(2 * (np.abs(found - exact) / (z / 2 + 1 / classes)).max())


# The mutual information of every pair of members, as one product of matrices.


Kind = Literal["logits", "probabilities"]

CACHED = 1 << 16  # probabilities whose vectors stay in a CPU's cache
SUMS = 1e-3  # what rounding to float16 may add to a sum of probabilities
DEPTH = 4096  # of a float32 product: a longer one rounds 1e-5 of its value away where a matrix is small
ROWS = 256  # members of a product, so that little is computed twice


@dataclass(frozen=True)
class Pairs:
    """What every pair of members has, (member, member), float64 on the CPU, symmetric with a zero diagonal.

    Args:
        information: H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, mean over inputs.
        disagreement: share of inputs whose arg-max differs (of equal values the first class counts).
        inputs: how many there were.
    """

    information: Tensor
    disagreement: Tensor
    inputs: int

    def __len__(self) -> int:
        return len(self.information)


def compare(
    predictions: Tensor | Iterable[Tensor],
    kind: Kind = "logits",
    *,
    device: str | torch.device = "cpu",
    memory: int = 1 << 27,
) -> Pairs:
    """Compare all pairs of members on all inputs, in one pass; return their mutual information and disagreement.

    An information is right to 1e-6 nats. float32, added up in float64.

    Args:
        predictions: (member, input, class), any float dtype; or blocks of inputs, each with all members in order.
        kind: what they are; logits may lie within [0, 1], and probabilities may be 0 and 1.
        device: where to compute; blocks are moved there.
        memory: bytes to work in, beside the predictions and a few (member, member) matrices.

    Raises:
        UsageError: no predictions, of one member, of another shape than the first block's, or that are none.

    >>> import torch
    >>> found = compare(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]]), kind="probabilities")
    >>> [round(x, 4) for x in found.information[0].tolist()]  # log 2 = 0.6931
    [0.0, 0.6931, 0.6931]
    """
    if kind not in ("logits", "probabilities"):
        raise UsageError("kind of predictions", expected="'logits' or 'probabilities'", found=repr(kind))
    place, sums, inputs = check_device(device), None, 0
    with _exact_products():
        for block in [predictions] if isinstance(predictions, Tensor) else predictions:
            shape = _check_shape(block, None if sums is None else (len(sums.products), sums.classes))
            sums = sums or _Sums(*shape, place)
            size = max(1, memory // (4 * shape[0] * shape[1] * (sums.embedding.table.shape[1] + 2)))
            for piece in torch.split(block, size, dim=1) if block.shape[1] else ():
                sums.add(piece, kind)
            inputs += block.shape[1]
    if sums is None or not inputs:
        raise UsageError("predictions", expected="an input or more", found="none")
    return Pairs(*sums.means(inputs), inputs)


def over_inputs(members: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Turn blocks of members into blocks of inputs; yield them (member, input, class), as `compare` takes them.

    Args:
        members: blocks (member, input, class); walked once for each block of inputs, so no iterator. Tensors that
            are views of mapped files are read piece by piece.
        size: inputs a block.

    Raises:
        UsageError: blocks that can be walked only once, or a size that is none.
    """
    if isinstance(members, Iterator) or size < 1:
        found = "an iterator" if isinstance(members, Iterator) else f"size {size}"
        raise UsageError("blocks of members", expected="a list or the like, and a size from 1", found=found)
    at = 0
    while pieces := [block[:, at : at + size] for block in members]:
        lengths = {piece.shape[1] for piece in pieces}
        if len(lengths) > 1:
            raise UsageError("blocks of members", expected="the same inputs in each", found="different numbers of them")
        if lengths == {0}:
            return
        yield torch.cat(pieces)
        at += size


class _Sums:
    """Squared distances and agreements of all pairs, added up over inputs."""

    def __init__(self, members: int, classes: int, device: torch.device) -> None:
        self.classes, self.device = classes, device
        self.embedding = embedding(classes).to(device)
        # Metal has no float64.
        self.place = torch.device("cpu") if device.type == "mps" else device
        shape = (members, members)
        self.products, self.agreed = (torch.zeros(shape, dtype=torch.float64, device=self.place) for _ in range(2))
        self.rows = CACHED if device.type == "cpu" else 64 * CACHED

    def add(self, piece: Tensor, kind: Kind) -> None:
        """Add inputs, (member, input, class)."""
        members, inputs, classes = piece.shape
        vectors = torch.empty(
            members, inputs * classes * self.embedding.table.shape[1], dtype=torch.float32, device=self.device
        )
        votes = torch.zeros(members, inputs, classes, dtype=torch.float32, device=self.device)
        centre: Tensor | None = None
        step = max(1, self.rows // (inputs * classes))
        for at in range(0, members, step):
            given = piece[at : at + step].to(self.device)
            given = given if given.dtype == torch.float64 else given.float()
            votes[at : at + step].scatter_(-1, given.argmax(-1, keepdim=True), 1.0)
            probs = (given.softmax(-1) if kind == "logits" else given).float()
            _check_values(probs, at, kind)
            found = self.embedding(probs.reshape(-1)).view(len(given), -1)
            # Distances don't change by it, and their rounding is the smaller the nearer it is to the members.
            centre = found.mean(0) if centre is None else centre
            torch.sub(found, centre, out=vectors[at : at + step])
        self._multiply(vectors, self.products)
        self._multiply(votes.view(members, -1), self.agreed)

    def _multiply(self, vectors: Tensor, total: Tensor) -> None:
        """Add the upper half of vectors @ vectors.T (and what else the blocks of members have)."""
        for part in torch.split(vectors, DEPTH, dim=1):
            for at in range(0, len(part), ROWS):
                found = torch.mm(part[at : at + ROWS], part[at:].T)
                total[at : at + ROWS, at:] += found.to(self.place)

    def means(self, inputs: int) -> tuple[Tensor, Tensor]:
        """Return mean divergences and disagreements, whole and on the CPU."""
        products, agreed = ((t.triu() + t.triu(1).T).cpu() / inputs for t in (self.products, self.agreed))
        norms = products.diagonal()
        information = (norms[:, None] + norms - 2 * products).clamp_(min=0).fill_diagonal_(0)
        return information, (1 - agreed).fill_diagonal_(0)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Let float32 products be float32's, whatever precision the caller has allowed elsewhere."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def _check_shape(block: Tensor, known: tuple[int, int] | None) -> tuple[int, int]:
    """Return the (members, classes) of a block.

    Raises:
        UsageError: it has none, or others than those before.
    """
    shape = f"{str(block.dtype).removeprefix('torch.')} of shape {tuple(block.shape)}"
    if block.ndim != 3 or not block.is_floating_point() or block.shape[0] < 2 or block.shape[2] < 2:
        expected = "(member, input, class) floats, of two members and two classes or more"
        raise UsageError("predictions", expected=expected, found=shape)
    members, _, classes = block.shape
    if known not in (None, (members, classes)):
        raise UsageError("block of predictions", expected=f"{known[0]} members, {known[1]} classes", found=shape)
    return members, classes


def _check_values(probs: Tensor, first: int, kind: Kind) -> None:
    """Check that probabilities of members are some.

    Args:
        probs: (member, input, class).
        first: position of the first member.
        kind: of what was given.

    Raises:
        UsageError: they are not.
    """
    totals = probs.sum(-1)
    if kind == "logits":
        wrong, expected = ~totals.isfinite().all(-1), "finite logits, or −inf for a probability of 0"
    else:
        off = ((totals - 1).abs() > SUMS) | (probs.amin(-1) < 0) | ~totals.isfinite()
        wrong, expected = off.any(-1), "no negative one, and a sum of 1 over the classes"
    if bool(wrong.any()):
        member = first + int(wrong.nonzero()[0, 0])
        found = f"others for the member at position {member}"
        do = "" if kind == "logits" else "Logits need kind='logits'"
        raise UsageError(kind, expected=expected, found=found, do=do)


# Tables of figures as files, by temporary name and rename.


def write(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write a table as Parquet or CSV, by the ending of the name; return its path.

    Args:
        frame: its rows, without the index.
        path: of the file; its folder is made.

    Raises:
        UsageError: another ending.
        StorageError: a place that can't be written to.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = Path(path).expanduser()
    writers = {".parquet": pyarrow.parquet.write_table, ".csv": pyarrow.csv.write_csv}
    if path.suffix.lower() not in writers:
        expected = "a name that ends in .parquet or .csv"
        raise UsageError(f"table {path}", expected=expected, found=repr(path.name), path=path)
    with shard_files.writing_into(path.parent), replacing(path) as temporary, temporary.open("wb") as file:
        writers[path.suffix.lower()](pa.Table.from_pandas(frame, preserve_index=False), file)
    return path


def write_text(text: str, path: str | Path) -> Path:
    """Write a text, with an end of line; return its path.

    Args:
        text: such as JSON, or a table for LaTeX.
        path: of the file; its folder is made.

    Raises:
        StorageError: a place that can't be written to.
    """
    path = Path(path).expanduser()
    with shard_files.writing_into(path.parent), replacing(path) as temporary:
        temporary.write_text(f"{text}\n", encoding="utf-8")
    return path


# The picture of all pairs: mutual information in and out of distribution, one against the other, disagreement.


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


ROUNDING = 1e-7  # of float32
FIGURES = {
    "mi_id": ("nats", "mutual information of label and member of a pair, mean over inputs and pairs"),
    "disagreement": ("0..1", "share of inputs on which the classes of a pair differ, mean over pairs"),
    "mi_ood": ("nats", "the same as mi_id on the out-of-distribution inputs"),
    "disagreement_ood": ("0..1", "the same as disagreement on the out-of-distribution inputs"),
    "correlation": ("-1..1", "Pearson's, of mi_id and mi_ood over pairs"),
}


@dataclass(frozen=True)
class Pairwise:
    """All pairs of some members, and what they are on average.

    Args:
        collection: its name.
        citation: of the members.
        ids: of the members, in the order of the matrices.
        data, ood: names and fingerprints of the images, ood "" without any.
        inside, outside: the matrices; outside None without images out of distribution.
        figures: name -> Interval by a jackknife over members, as pairs that share one are not independent.
    """

    collection: str
    citation: str
    ids: tuple[int, ...]
    data: str
    ood: str
    inside: Pairs
    outside: Pairs | None
    figures: Mapping[str, Interval]

    def __len__(self) -> int:
        return len(self.ids) * (len(self.ids) - 1) // 2

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure.

        Raises:
            UsageError: no such figure.
        """
        return figure_of(self.figures, figure)

    def to_frame(self) -> pd.DataFrame:
        """Return one row a pair: member_a, member_b, then mi_id, disagreement, mi_ood, disagreement_ood."""
        import pandas as pd

        first, second = upper(len(self.ids))
        ids = torch.tensor(self.ids)
        columns = {"member_a": ids[first].numpy(), "member_b": ids[second].numpy()}
        columns |= {
            name: matrix[first, second].numpy() for name, matrix in _matrices(self.inside, self.outside).items()
        }
        return pd.DataFrame(columns)

    def to_json(self) -> str:
        """Return the figures, not the pairs, as JSON text; what could not be computed is null."""
        rows: list[dict[str, object]] = []
        for name, x in self.figures.items():
            bounds = {"value": x.value, "low": x.low, "high": x.high}
            known = {key: None if v is None or not math.isfinite(v) else v for key, v in bounds.items()}
            rows.append({"figure": name, **known, "unit": FIGURES[name][0]})
        facts = {"collection": self.collection, "citation": self.citation, "data": self.data, "ood": self.ood}
        inputs = {"inputs": self.inside.inputs, "ood_inputs": 0 if self.outside is None else self.outside.inputs}
        counts = {"members": len(self.ids), "pairs": len(self), **inputs}
        return json.dumps({**facts, **counts, "level": 0.95, "figures": rows}, indent=1)

    def write(self, path: str | Path) -> Path:
        """Write one row a pair, as `to_frame` has them, as .parquet or .csv; return the file's path.

        Raises:
            UsageError: another ending of the name.
            StorageError: a place that can't be written to.
        """
        return write(self.to_frame(), path)

    def plot(self, path: str | Path) -> Path:
        """Draw histograms of both informations, one against the other, and disagreements into a PNG; return its path.

        Raises:
            UsageError: a name that is no PNG's, or a place that can't be written to.
        """
        return pairwise_figure(self, path)


def pairwise(
    members: Collection | Predictions,
    data: Given | None = None,
    ood: Given | Predictions | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    memory: int = 1 << 27,
    seed: int = 0,
) -> Pairwise:
    """Compare every pair of members on images; return the matrices and their means, with intervals.

    Args:
        members: two or more of a collection, or their stored predictions, which say what images they are on.
        data: images in distribution, as `images.of` takes them; None for the collection's own test set. Labels are
            not used.
        ood: images out of distribution, or the same members' stored predictions on them; None for none.
        device, dtype: what the members run on and in; pairs are computed there too, in float32.
        batch: images a forward pass.
        memory: bytes to compare in, beside the members' logits.
        seed: of the intervals.

    Raises:
        UsageError: one member, predictions of others, or images of a size the members can't take.
        DamagedError: members whose weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> found = zoo.pairwise(zoo.load("convnet-digits", n=8), "digits", ood="photos")
    >>> len(found), found["mi_ood"].value > 5 * found["mi_id"].value
    (28, True)
    """
    arguments.check_measurable(members)
    arguments.check_draws(seed)
    name = members.facts.collection if isinstance(members, Predictions) else members.name
    if len(members) < 2:
        raise UsageError(f"pairs of {name}", expected="two members or more", found=f"{len(members)}")

    def compared(shown: Given | Predictions) -> tuple[Pairs, str]:
        if isinstance(shown, Predictions):
            check_same(shown, members)
            return compare(shown.blocks(), device=device, memory=memory), shown.data
        if isinstance(members, Predictions):
            do = "Give the collection, to run its members on images"
            raise UsageError(f"pairs of predictions {members.name}", expected="no images", found="some", do=do)
        given = images.in_order(images.of(shown), members.classes)
        found = compare(logits(members, given, device, dtype, batch), device=device, memory=memory)
        return found, arguments.image_key(given)

    if data is not None:
        inside, named = compared(data)
    else:
        own = members if isinstance(members, Predictions) else arguments.images_of(members.description)
        inside, named = compared(own)
    outside, named_ood = (None, "") if ood is None else compared(ood)
    result = measure(inside, outside, ids=members.ids, seed=seed)
    return replace(result, collection=name, citation=members.citation, data=named, ood=named_ood)


def measure(
    inside: Pairs, outside: Pairs | None = None, *, ids: Sequence[int] | None = None, seed: int = 0
) -> Pairwise:
    """Average over pairs that were compared; return them with their means and intervals.

    Args:
        inside, outside: what `compare` found on inputs in and out of distribution, of the same members.
        ids: of the members; None for their positions.
        seed: of the intervals.

    Raises:
        UsageError: other numbers of members.

    >>> import torch
    >>> logits = torch.randn(5, 20, 3, generator=torch.Generator().manual_seed(0))
    >>> found = measure(compare(logits[:, :10]), compare(logits[:, 10:]))
    >>> print(f"{found['mi_id'].low:.2f} {found['mi_id'].value:.2f} {found['mi_id'].high:.2f}")
    0.04 0.09 0.13
    """
    counts = {len(inside), *([] if outside is None else [len(outside)]), *([] if ids is None else [len(ids)])}
    if len(counts) > 1:
        raise UsageError("members", expected="as many in each", found=" and ".join(map(str, sorted(counts))))
    names = tuple(range(len(inside)) if ids is None else ids)
    return Pairwise("", "", names, "", "", inside, outside, _figures(_matrices(inside, outside), seed))


def correlation(first: Tensor, second: Tensor, seed: int = 0) -> Interval:
    """Correlate two figures of pairs over all pairs; return Pearson's correlation with its jackknife interval.

    Leaving out members, not pairs: Arvesen, Jackknifing U-statistics (1969). On Fisher's scale, so that the interval
    stays within -1 and 1. NaN where a figure is the same for all pairs.

    Args:
        first, second: (member, member), symmetric; the diagonal is not used.
        seed: of the members that are left out.

    Raises:
        UsageError: matrices of other shapes.

    >>> import torch
    >>> a = torch.arange(25.0).reshape(5, 5)
    >>> correlation(a + a.T, -(a + a.T)).value
    -1.0
    """
    if first.ndim != 2 or first.shape[0] != first.shape[1] or first.shape != second.shape or len(first) < 2:
        found = f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
        raise UsageError("figures of pairs", expected="two matrices (member, member), of two or more", found=found)
    return _figures({"mi_id": first, "mi_ood": second}, seed)["correlation"]


def upper(members: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second member of every pair, (pair,) each, in the order of the upper triangle."""
    first, second = torch.triu_indices(members, members, 1)
    return first, second


def _matrices(inside: Pairs, outside: Pairs | None) -> dict[str, Tensor]:
    found = {"mi_id": inside.information, "disagreement": inside.disagreement}
    if outside is not None:
        found |= {"mi_ood": outside.information, "disagreement_ood": outside.disagreement}
    return found


def _figures(matrices: Mapping[str, Tensor], seed: int) -> dict[str, Interval]:
    """Average over pairs, and correlate; return the intervals by name."""
    members = len(next(iter(matrices.values())))
    at = upper(members)
    means = {name: float(matrix.double()[at].mean()) for name, matrix in matrices.items()}
    # From their means, so that sums of squares lose nothing to rounding.
    terms = {name: (matrix.double() - means[name]).fill_diagonal_(0) for name, matrix in matrices.items()}
    correlated = "mi_ood" in terms
    if correlated:
        x, y = terms["mi_id"], terms["mi_ood"]
        terms |= {"xx": x * x, "yy": y * y, "xy": x * y}
    stacked = torch.stack(list(terms.values()))
    # What rounding leaves of a figure that is the same for all pairs is no variance.
    least = [(ROUNDING * float(matrices[n].abs().max())) ** 2 for n in ("mi_id", "mi_ood") if n in matrices]

    def figure(chosen: Tensor) -> Tensor:
        among = torch.zeros(members, dtype=torch.float64)
        among[chosen] = 1
        found = dict(zip(terms, (stacked @ among) @ among / (len(chosen) * (len(chosen) - 1)), strict=True))
        values = [found[name] for name in matrices]
        if correlated:
            mean_x, mean_y = found["mi_id"], found["mi_ood"]
            spread_x, spread_y = found["xx"] - mean_x**2, found["yy"] - mean_y**2
            slope = (found["xy"] - mean_x * mean_y) / (spread_x * spread_y).sqrt()
            differ = spread_x > least[0] and spread_y > least[1]
            values.append(slope.clamp(-1, 1).atanh() if differ else slope.new_tensor(math.nan))
        return torch.stack(values)

    results = metrics.jackknife(figure, members, seed=seed)
    by_name = zip(matrices, results[: len(matrices)], strict=True)
    intervals = {name: _shifted(x, means[name], FIGURES[name][0]) for name, x in by_name}
    if correlated:
        fisher = results[-1]
        low, high = (None if bound is None else math.tanh(bound) for bound in (fisher.low, fisher.high))
        intervals["correlation"] = Interval(math.tanh(fisher.value), low, high)
    return intervals


def _shifted(interval: Interval, by: float, unit: str) -> Interval:
    """Return an interval that lies higher, cut at 0 and at what a figure of a unit is at most."""
    most = 1.0 if unit == "0..1" else math.inf
    bounds = (interval.low, interval.high)
    low, high = (None if bound is None else min(max(0.0, bound + by), most) for bound in bounds)
    return replace(interval, value=interval.value + by, low=low, high=high)
