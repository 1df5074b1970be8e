"""MMD² between two sets of weights, by layer and in total, with a permutation test; NS is MMD² without symmetries.

The estimate is the unbiased one of Gretton et al., A kernel two-sample test (2012), equation 3, with Gaussian kernels
exp(-(d / bandwidth)²) of L2 distances and Laplace kernels exp(-d / bandwidth) of L1 distances, ten bandwidths each, as
Laurent et al. (2024) take them from MMDAgg (Schrab et al., 2023). Kernels are at most 1, so MMD² lies below 2; MMD² has
no unit and is not scaled. The paper does not say how its column "MMD" is scaled, nor how kernels are combined.

This is one file, because NS is the same estimate for the weights of other networks, with the same pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREY, RED, check_picture_path, save_figure
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.formats.selection import parse_citation
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.networks.device import check_device, free_bytes
from checkpoints_zoo.networks.modules import superseded_names
from checkpoints_zoo.populations.independent_units import (
    Exchange,
    split_by_unit,
    split_into_subsets,
    unit_numbers,
)
from checkpoints_zoo.populations.kernels import (
    ALL_TENSORS,
    BandwidthGrid,
    Blocks,
    Distances,
    StackedTensors,
    choose_kernels,
    estimate_mmd2,
    measure_distances,
    p_value_of_largest,
    tensor_groups_from_argument,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

FIGURE_WIDTH, ROW_HEIGHT, LEAST_HEIGHT, MOST_HEIGHT = (
    9.4,
    0.24,
    2.2,
    14.0,
)  # In inches; LEAST_HEIGHT and MOST_HEIGHT bound the figure's height.
MEMORY = 1 << 30  # Bytes of members that are in memory at once, unless they are on a GPU.
TEST_LEVEL = 0.05  # Level of the test, marked in the picture.

TensorGroups = str | Mapping[str, Sequence[str]]  # "layer", "tensor", or name -> names of tensors


@dataclass(frozen=True)
class Discrepancy:
    """How far two sets of members are apart in one group of tensors.

    Args:
        weights: number of weights in the group.
        kernels: (name, bandwidth) of each kernel.
        values: MMD² with each kernel; an unbiased estimate may be below 0.
        value: mean of `values`, which is the MMD² of the mean kernel.
        p_value: p-value of the permutation test: share of permutations with a statistic at least as large. None
            if a set has fewer than two independent units, or if both sets share a unit (see `mmd`).
    """

    weights: int
    kernels: tuple[tuple[str, float], ...]
    values: tuple[float, ...]
    value: float
    p_value: float | None


@dataclass(frozen=True, repr=False)
class MMD(PrintedResult):
    """MMD² of two sets of members, group by group of their tensors.

    Args:
        first, second: citations of the two sets of members, "" if there is none.
        members: number of members in each set.
        permutations: number of permutations of the test.
        groups: group of tensors -> Discrepancy; the group "all" has all weights.
        subsets: number of subsets that both sets are split into.
    """

    first: str
    second: str
    members: tuple[int, int]
    permutations: int
    groups: Mapping[str, Discrepancy]
    subsets: int = 1

    def _one_line(self) -> str:
        return f"{self.members[0]} and {self.members[1]} members, value={self.value:.4g}, p_value={self.p_value:.3g}"

    def to_text(self) -> str:
        """Return a table with one row per group of tensors."""
        return f"{text_table(self.rows(), 60)}\n\n{self.sets_text()}"

    def sets_text(self) -> str:
        """Return a sentence on the compared sets."""
        subsets_text = f" in {self.subsets:,} subsets" if self.subsets > 1 else ""
        sizes_text = f"{self.members[0]:,} against {self.members[1]:,} members{subsets_text}"
        return f"{sizes_text}; {self.permutations:,} permutations."

    @property
    def value(self) -> float:
        """MMD² of all weights together, as the mean over kernels."""
        return self.groups[ALL_TENSORS].value

    @property
    def p_value(self) -> float | None:
        """The p-value of all weights together; None if there is no exact test."""
        return self.groups[ALL_TENSORS].p_value

    def __getitem__(self, group: str) -> Discrepancy:
        """Return the discrepancy of a group of tensors.

        Raises:
            UsageError: there is no such group of tensors.
        """
        if group not in self.groups:
            names = ", ".join(list(self.groups)[:12])
            raise UsageError(f"group {group!r}", expected=f"one of {names}", found="none such")
        return self.groups[group]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per group: group, weights, mmd2 (mean over kernels) and p_value."""
        return [
            {"group": name, "weights": x.weights, "mmd2": x.value, "p_value": x.p_value}
            for name, x in self.groups.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per group and kernel: group, weights, kernel, bandwidth, mmd2; then mean and p-value of the
        group."""
        import pandas as pd

        rows = [
            {"group": name, "weights": x.weights, "kernel": kernel, "bandwidth": width, "mmd2": value,
             "mean_mmd2": x.value, "p_value": x.p_value}
            for name, x in self.groups.items()
            for (kernel, width), value in zip(x.kernels, x.values, strict=True)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return json.dumps({**self.facts(), "groups": self.to_frame().to_dict("records")}, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw MMD² and p-values of all groups into a PNG; return its path.

        Raises:
            UsageError: the path does not end in .png, or the file can't be written.
        """
        return save_figure(lambda: draw_mmd(self), check_picture_path(path), figure_title(self))

    def facts(self) -> dict[str, Any]:
        """Return the citations of both sets, and the numbers of members, subsets and permutations, as JSON values."""
        sets = {"first": self.first, "second": self.second, "members": self.members, "subsets": self.subsets}
        return {**sets, "permutations": self.permutations}


@dataclass(frozen=True, repr=False)
class NS(PrintedResult):
    """MMD² of the stored weights of two sets of members, and MMD² of the weights with the network's symmetries removed.

    Args:
        mmd: MMD of the stored weights.
        ns: MMD of the weights in canonical form.
        scale, permute, streams: arguments of `Collection.canonicalize` that made the canonical form.
    """

    mmd: MMD
    ns: MMD
    scale: str | None
    permute: str | None
    streams: bool

    def _one_line(self) -> str:
        first, second = self.mmd.members
        removal_text = f"scale={self.scale!r}, permute={self.permute!r}, streams={self.streams}"
        return f"{first} and {second} members, mmd={self.mmd.value:.4g}, ns={self.ns.value:.4g}, {removal_text}"

    def to_text(self) -> str:
        """Return a table with one row per group of tensors, before and after removing symmetries."""
        removal_text = f"NS: symmetries removed by scale={self.scale}, permute={self.permute}, streams={self.streams}."
        return f"{text_table(self.rows(), 60)}\n\n{self.mmd.sets_text()}\n{removal_text}"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per group: the columns of `mmd`, and ns_mmd2 and ns_p_value without symmetries."""
        mmd_and_ns_rows = zip(self.mmd.rows(), self.ns.rows(), strict=True)
        return [{**row, "ns_mmd2": other["mmd2"], "ns_p_value": other["p_value"]} for row, other in mmd_and_ns_rows]

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame; rows of single kernels are in `mmd.to_frame()` and `ns.to_frame()`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_json(self) -> str:
        """Return all but single kernels as JSON text."""
        canonical_options = {"scale": self.scale, "permute": self.permute, "streams": self.streams}
        return json.dumps({**self.mmd.facts(), **canonical_options, "groups": self.rows()}, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw MMD² and p-values of all groups, before and after removing symmetries, into a PNG; return its path.

        Raises:
            UsageError: the path does not end in .png, or the file can't be written.
        """
        return save_figure(lambda: draw_mmd(self.mmd, self.ns), check_picture_path(path), figure_title(self.mmd))


def mmd(
    first: Collection,
    second: Collection | None = None,
    *,
    groups: TensorGroups = "layer",
    permutations: int = 999,
    grid: BandwidthGrid = "pooled",
    widths: Mapping[str, Sequence[float]] | None = None,
    subset_size: int | None = None,
    device: str | torch.device = "cpu",
    memory: int | None = None,
    seed: int = 0,
) -> MMD:
    """Compare the weights of two sets of members; return MMD² and p-values of each group of tensors and of all weights.

    The statistic of the test is the largest MMD² over the kernels, each standardised by its own mean and deviation over
    the permutations and the data. Therefore the level of the test is exact for any number of kernels, members and
    permutations: p = (1 + number of the B permutations with a statistic at least as large) / (1 + B).

    Permutations exchange independent units: members, or runs, as draws of one run depend on each other. If all runs
        have the same number of draws, whole runs are exchanged; if not, the test takes one draw of each run, chosen at
        random, while MMD² is still computed from all draws. p is None if a set has fewer than two units, such as draws
        of one run, or if both sets share a unit. Runs of different methods that start at the same modes depend on each
        other too, but no column shows that.

    Args:
        first, second: sets of members of one architecture, two or more each; canonical or aligned views stay so.
            Without a second set, units of the first set at even positions are compared with its units at odd positions
            (if the first set is one unit, its members are compared). Running statistics are not compared.
        groups: "layer" (tensors of a module together), "tensor", or name -> names of tensors.
        permutations: the number B of permutations.
        grid: the pairs that bandwidths are taken from. "pooled": all pairs, which permutations do not change. "cross":
            pairs of one member of each set, at most 500 of either, as in the paper's code. "second": pairs within the
            second set, so that several sets are compared with one on the same scale. p-values are exact with "pooled"
            alone.
        widths: kernel ("gaussian", "laplace") -> bandwidths, in place of the grid; a kernel left out is not used.
        subset_size: number k of members, of both sets together, that are compared with each other; None for all. With
            k, both sets are split into subsets of about k members, and MMD² is the mean of the subsets' MMD² (the
            B-test of Zaremba et al., 2013). Time and memory then grow with the number of members and no longer with
            its square; MMD² is still unbiased, but varies more, and the test permutes within subsets and is exact.
            Bandwidths are those of the first subset.
        device: torch device for the computation; it needs float64.
        memory: bytes of members in memory at once; None for 1 GiB, or on a GPU for half of its free memory. Beside
            them 16 (m + n)² bytes per group of tensors are needed, or 16 k² with `subset_size`. If `memory` is too
            small for all members, the members are read several times.
        seed: seed of the permutations, and of the choice of draws that are compared.

    Raises:
        UsageError: a set has one member only, or groups, bandwidths, number of permutations, size of subsets or device
            are invalid.
        LayoutError: the members have different architectures.
        DamagedError, SourceNotFound, NetworkError: some members can't be read, or are not finite.

    >>> import checkpoints_zoo as zoo
    >>> result = zoo.mmd(zoo.load("convnet-digits", n=16), permutations=99)
    >>> result.members, result.p_value > 0.01
    ((8, 8), True)
    """
    seed = arguments.check_seed(seed)
    first, second = _check_sets(first, second)
    if subset_size is not None and (whole_number(subset_size) or 0) < 4:
        expected = "4 members or more, two of each set"
        raise UsageError("size of subsets", expected=expected, found=repr(subset_size)[:80])
    names = _parameter_names(first._skeleton())
    units = unit_numbers(first, second)
    is_unit_shared = not set(units[0]).isdisjoint(units[1])
    subsets = []
    for one, other in split_into_subsets(first, second, subset_size):
        units = unit_numbers(one, other)
        exchange = None if is_unit_shared else Exchange.of_units(units[0], units[1], seed)
        read_blocks = _read_in_blocks(one, other, names, device, memory)
        subsets.append(Subset(read_blocks, (len(one), len(other)), exchange))
    tensors, citations = tensor_groups_from_argument(groups, names), (first.citation, second.citation)
    return compare_subsets(subsets, tensors, citations, permutations, grid, widths, device, seed)


def ns(
    first: Collection,
    second: Collection | None = None,
    *,
    scale: str | None = "unit-norm",
    permute: str | None = "first",
    streams: bool = False,
    groups: TensorGroups = "layer",
    permutations: int = 999,
    grid: BandwidthGrid = "pooled",
    subset_size: int | None = None,
    device: str | torch.device = "cpu",
    memory: int | None = None,
    seed: int = 0,
) -> NS:
    """Compare the weights of two sets of members before and after removing symmetries; return both results.

    Args:
        first, second: sets of members, as in `mmd`.
        scale, permute, streams: same arguments as in `Collection.canonicalize`.
        groups, permutations, grid, subset_size, device, memory, seed: same arguments as in `mmd`.

    Raises:
        UsageError, LayoutError, DamagedError, SourceNotFound, NetworkError: as in `mmd`.
        SymmetryError: the architecture's symmetries can't be derived.
    """
    pair = _check_sets(first, second)
    views = [c.canonicalize(scale=scale, permute=permute, streams=streams) for c in pair]
    compare = partial(mmd, groups=groups, permutations=permutations, grid=grid, subset_size=subset_size)
    before, after = (compare(*sets, device=device, memory=memory, seed=seed) for sets in (pair, views))
    return NS(before, after, scale, permute, streams)


def distances_between_sets(
    first: Collection,
    second: Collection,
    *,
    groups: TensorGroups = "layer",
    device: str | torch.device = "cpu",
    memory: int | None = None,
) -> dict[str, Distances]:
    """Measure the distances between all members of two sets; return the distances for each group of tensors and for all
    tensors.

    Args:
        first, second: sets as in `mmd`; rows and columns of the distances are the first set's members, then the
            second's.
        groups, device, memory: same arguments as in `mmd`.

    Raises:
        UsageError, LayoutError, DamagedError, SourceNotFound, NetworkError: as in `mmd`.
    """
    first, second = _check_sets(first, second)
    names = _parameter_names(first._skeleton())
    read_blocks = _read_in_blocks(first, second, names, device, memory)
    return _check_finite(
        measure_distances(
            read_blocks, len(first) + len(second), tensor_groups_from_argument(groups, names), _check_float64(device)
        )
    )


def _check_sets(first: Collection, second: Collection | None) -> tuple[Collection, Collection]:
    """Return both sets; without a second set, the units of the first set at even and at odd positions.

    Raises:
        UsageError: a set has fewer than two members, or is no collection.
    """
    for members in (first, *([] if second is None else [second])):
        arguments.check_collection(members, "sets of members, whose weights are compared")
    pair = split_by_unit(first) if second is None else (first, second)
    _check_counts([len(members) for members in pair])
    return pair


def _check_counts(member_counts: Sequence[int]) -> None:
    if min(member_counts) < 2:
        found = " and ".join(map(str, member_counts))
        raise UsageError("sets of members", expected="two members or more in each", found=found)


def _parameter_names(skeleton: nn.Module) -> list[str]:
    """Return the names of the parameters; if several names share one tensor, only the last name, as in an ensemble."""
    tensors, superseded = skeleton.state_dict(keep_vars=True), superseded_names(skeleton)
    return [name for name, t in tensors.items() if isinstance(t, nn.Parameter) and name not in superseded]


def _read_in_blocks(
    first: Collection,
    second: Collection,
    tensor_names: Sequence[str],
    device: str | torch.device,
    memory: int | None,
) -> Blocks:
    """Return a function that reads the members of both sets in blocks, starting at a position."""
    if memory is None:
        gpu = check_device(device)
        memory = (free_bytes(gpu) or 0) // 2 if gpu.type == "cuda" else MEMORY
    size = max(1, memory // (4 * max(c._member_nbytes for c in (first, second))))

    def read_blocks(first_position: int) -> Iterator[StackedTensors]:
        for members in (first, second):
            if first_position < len(members):
                for _, params in members[first_position:].batches(size, device):
                    yield {name: params[name] for name in tensor_names if name in params}
            first_position = max(0, first_position - len(members))

    return read_blocks


@dataclass(frozen=True)
class Subset:
    """Members of two sets that are compared with each other.

    Args:
        read_blocks: function that yields the members in blocks from a position on, those of the first set first.
        member_counts: number of members of each set.
        exchange: units that the permutation test exchanges; None for no test.
    """

    read_blocks: Blocks
    member_counts: tuple[int, int]
    exchange: Exchange | None


def compare_subsets(
    subsets: Sequence[Subset],
    groups: Mapping[str, Sequence[str]],
    citations: tuple[str, str],
    permutations: int,
    grid: BandwidthGrid,
    widths: Mapping[str, Sequence[float]] | None,
    device: str | torch.device,
    seed: int,
) -> MMD:
    """Compare two sets of weights subset by subset; return the mean MMD² and the p-values of each group of tensors and
    of all weights.

    Args:
        subsets: the members that are compared with each other, which are read one subset after the other.
        groups: name -> names of tensors.
        citations: texts that cite the two sets, "" if there is none.
        permutations, grid, widths, device, seed: same arguments as in `mmd`.

    Raises:
        UsageError, LayoutError: as in `mmd`.
    """
    seed = arguments.check_seed(seed)
    if permutations < 1:
        raise UsageError("permutations", expected="1 or more", found=f"{permutations}")
    torch_device = _check_float64(device)
    is_tested = all(subset.exchange is not None for subset in subsets)
    weights: dict[str, int] = {}
    kernels: dict[str, tuple[tuple[str, float], ...]] = {}
    test_kernels: dict[str, tuple[tuple[str, float], ...]] = {}
    values: dict[str, list[tuple[float, ...]]] = {}
    permuted_values: dict[str, Tensor] = {}
    for number, subset in enumerate(subsets):
        _check_counts(subset.member_counts)
        first, second = subset.member_counts
        distances_by_group = measure_distances(subset.read_blocks, first + second, groups, torch_device)
        for name, distances in _check_finite(distances_by_group).items():
            weights[name] = distances.weights
            if name not in kernels:
                kernels[name] = choose_kernels(distances, first, grid, widths)
            values.setdefault(name, []).append(estimate_mmd2(distances, kernels[name], first))
            if is_tested and (exchange := subset.exchange) is not None:
                compared = exchange.compared(distances)
                if name not in test_kernels:
                    test_kernels[name] = choose_kernels(compared, exchange.first * exchange.size, grid, widths)
                permuted = exchange.permuted_mmd2(compared, test_kernels[name], permutations, seed ^ number)
                permuted_values[name] = permuted_values.get(name, 0) + permuted
    discrepancy_by_group = {}
    for name, subset_values in values.items():
        mean_values = tuple(math.fsum(of_kernel) / len(subsets) for of_kernel in zip(*subset_values, strict=True))
        p_value = p_value_of_largest(permuted_values[name]) if is_tested else None
        mean_value = sum(mean_values) / len(mean_values)
        discrepancy_by_group[name] = Discrepancy(weights[name], kernels[name], mean_values, mean_value, p_value)
    member_counts = sum(s.member_counts[0] for s in subsets), sum(s.member_counts[1] for s in subsets)
    return MMD(*citations, member_counts, permutations, discrepancy_by_group, len(subsets))


def _check_float64(device: str | torch.device) -> torch.device:
    """Check that a device exists and supports float64; return the device."""
    torch_device = check_device(device)
    if torch_device.type == "mps":
        raise UsageError("device 'mps'", expected="one that has float64", found="none", do="Use the CPU")
    return torch_device


def _check_finite(distances_by_group: dict[str, Distances]) -> dict[str, Distances]:
    """Check that distances are finite; return the distances by group."""
    damaged_groups = [
        name
        for name, distances in distances_by_group.items()
        if not bool((distances.l2 + distances.l1).isfinite().all())
    ]
    if damaged_groups:
        found = f"others in {damaged_groups[0]!r}"
        raise UsageError("weights of two sets of members", expected="finite ones, with finite squares", found=found)
    return distances_by_group


def draw_mmd(stored_mmd: MMD, canonical_mmd: MMD | None = None) -> Figure:
    """Draw MMD² and p-values, one row per group of tensors; return the figure, whose axes have labels.

    Args:
        stored_mmd: MMD of the weights as they are stored.
        canonical_mmd: MMD of the same sets without symmetries; None to leave it out.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = list(stored_mmd.groups)
    figure_height = min(MOST_HEIGHT, LEAST_HEIGHT + ROW_HEIGHT * len(names))
    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(FIGURE_WIDTH, figure_height), dpi=DPI, layout=layout_engine)
    figure.suptitle(figure_title(stored_mmd), fontsize=12, fontweight="bold", parse_math=False)
    test_note = f"p: {stored_mmd.permutations:,} permutations; not adjusted for many layers"
    if stored_mmd.p_value is None:
        test_note = "No p: too few independent units"
    note = f"MMD²: unbiased, mean over kernels. {test_note}."
    figure.supxlabel(note, fontsize=8, color=GREY)
    grid = figure.add_gridspec(1, 2)
    left = figure.add_subplot(grid[0], label="mmd")
    right = figure.add_subplot(grid[1], label="p", sharey=left)
    draw_discrepancies(left, stored_mmd, canonical_mmd, figure_height)
    draw_p_values(right, stored_mmd, canonical_mmd)
    _add_legend(left, "a  Distance", left.lines[: 1 if canonical_mmd is None else 2])
    _add_legend(right, "b  Permutation test", right.lines[-1:])
    return figure


def _results_to_draw(stored_mmd: MMD, canonical_mmd: MMD | None) -> list[tuple[MMD, str, str, str]]:
    """Return the results that are drawn, each with its colour, marker and label."""
    stored = (stored_mmd, RED, "s", "as stored")
    return [stored] if canonical_mmd is None else [stored, (canonical_mmd, BLUE, "o", "symmetries removed")]


def draw_discrepancies(axes: Axes, stored_mmd: MMD, canonical_mmd: MMD | None, figure_height: float) -> None:
    """Draw MMD² of each group of tensors, one row per group.

    Args:
        axes: matplotlib axes to draw into.
        stored_mmd: MMD of the weights as they are stored.
        canonical_mmd: MMD of the same sets without symmetries; None to leave it out.
        figure_height: height of the figure in inches.
    """
    names = list(stored_mmd.groups)
    for result, colour, marker, label in _results_to_draw(stored_mmd, canonical_mmd):
        values = [result.groups[name].value for name in names]
        axes.plot(values, range(len(names)), marker, color=colour, markersize=5.5, alpha=0.85, label=label)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set(xlabel="MMD²")
    axes.locator_params(axis="x", nbins=6)
    _label_rows(axes, names, figure_height)


def draw_p_values(axes: Axes, stored_mmd: MMD, canonical_mmd: MMD | None) -> None:
    """Draw the p-value of each group of tensors, one row per group, into axes beside the axes of `draw_discrepancies`.

    Args: same arguments as in `draw_discrepancies`.
    """
    names = list(stored_mmd.groups)
    for result, colour, marker, label in _results_to_draw(stored_mmd, canonical_mmd):
        values = [math.nan if (p := result.groups[name].p_value) is None else p for name in names]
        axes.plot(values, range(len(names)), marker, color=colour, markersize=5.5, alpha=0.85, label=label)
    axes.axvline(TEST_LEVEL, color=GREY, linewidth=0.8, linestyle="--", label=f"p = {TEST_LEVEL:g}")
    axes.set(xlabel="p-value", xscale="log", xlim=(0.7 / (1 + stored_mmd.permutations), 1.4))
    axes.tick_params(axis="y", labelleft=False)


def figure_title(comparison: MMD) -> str:
    """Return a title that names the two compared sets."""
    citations = [parse_citation(citation) for citation in (comparison.first, comparison.second)]
    names = ["" if citation is None else citation.name for citation in citations]
    first, second = (f"{count:,}" for count in comparison.members)
    if names[0] == names[1]:
        return f"{names[0]}: {first} members against {second}".lstrip(": ")
    return f"{names[0]} ({first} members) against {names[1]} ({second})"


def _add_legend(axes: Axes, title: str, lines: Sequence[Line2D]) -> None:
    """Put the title of a panel above its axes, and the legend between title and axes."""
    axes.set_title(title, pad=22)
    legend_box = axes.legend(
        handles=lines, loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=2, borderaxespad=0.2, handletextpad=0.4
    )
    legend_box.set_in_layout(False)


def _label_rows(axes: Axes, row_names: Sequence[str], figure_height: float) -> None:
    """Label the rows, from the first layer at the top to all weights; of many rows only every n-th gets a label."""
    label_step = -(-len(row_names) // max(1, int((figure_height - LEAST_HEIGHT) / 0.16)))
    # The last row, all weights together, always gets a label.
    labelled_rows = [i for i in range(len(row_names)) if (len(row_names) - 1 - i) % label_step == 0]
    axes.set_yticks(labelled_rows, [row_names[i] for i in labelled_rows], parse_math=False, fontsize=8.5)
    axes.set_ylim(len(row_names) - 0.4, -0.6)
    axes.axhline(len(row_names) - 1.5, color=GREY, linewidth=0.8)
