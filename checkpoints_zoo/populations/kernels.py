"""Distances of members in weight space, their kernels, the unbiased MMD² of two sets, and its permutation test.

Axes: kernel and distance matrices (member, member), of both sets, the first set first.

This is one file, because the test permutes the members of the kernel matrices that are made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats.progress import progress

StackedTensors = Mapping[str, Tensor]
# Function that yields members in blocks from a position on, always in the same order.
Blocks = Callable[[int], Iterable[StackedTensors]]
BandwidthGrid = Literal["pooled", "cross", "second"]

ALL_TENSORS = "all"  # Name of the group of all tensors.
KERNELS = ("gaussian", "laplace")
BANDWIDTH_COUNT = 10  # Number of bandwidths of each kernel.
MOST_PAIRED_MEMBERS = 500  # Number of members of each set from which the paper's code takes bandwidths.

FLOAT64_COLUMNS = 1 << 14  # Number of weights that are converted to float64 at once.
FLOAT32_COLUMNS = 1 << 11  # Number of absolute differences that are summed in float32.
ROUNDING_SHARE = 64 * 2.2e-16  # A squared distance below this share of the squared norms is set to 0.
TIE_TOLERANCE = 1e-9  # Standardised statistics that differ by less than this are equal up to rounding.
FLAT_TOLERANCE = 1e-12  # A standard deviation of MMD² below this share of the kernel is rounding.


@dataclass(frozen=True)
class Distances:
    """Distances between members in one group of tensors, (member, member) each, float64.

    Args:
        weights: number of weights in the group.
        l2: squared Euclidean distances, Σ (a - b)².
        l1: sums of absolute differences, Σ |a - b|.
    """

    weights: int
    l2: Tensor
    l1: Tensor


def measure_distances(
    read_blocks: Blocks, member_count: int, groups: Mapping[str, Sequence[str]], device: torch.device
) -> dict[str, Distances]:
    """Measure the distances of all pairs of members; return the distances by group, and for all groups' tensors as
    "all".

    Args:
        read_blocks: function that yields the members in blocks from a position on. Three blocks are in memory at once;
            if there are k blocks, each is read about k / 2 times.
        member_count: number of members.
        groups: name -> names of its tensors; a tensor may be in several groups.
        device: torch device for the computation; it needs float64.

    Raises:
        LayoutError: some members have tensors with other names or shapes than the first members.
    """
    distances = {
        name: torch.zeros(2, member_count, member_count, dtype=torch.float64, device=device)
        for name in [*groups, ALL_TENSORS]
    }
    all_names = list(dict.fromkeys(name for names in groups.values() for name in names))
    groups_of_tensor = {name: [g for g, names in groups.items() if name in names] + [ALL_TENSORS] for name in all_names}
    shapes: dict[str, torch.Size] = {}
    row = 0
    for row_block in progress(
        read_blocks(0), member_count, "distances", size=lambda block: len(next(iter(block.values())))
    ):
        shapes = shapes or {name: row_block[name].shape[1:] for name in all_names if name in row_block}
        rows, column = slice(row, row + len(row_block[all_names[0]])), row
        for column_block in chain([row_block], read_blocks(rows.stop)):
            _check_shapes(column_block, all_names, shapes)
            columns = slice(column, column + len(column_block[all_names[0]]))
            for name in all_names:
                a = row_block[name].to(device).flatten(1)
                b = a if column_block is row_block else column_block[name].to(device).flatten(1)
                l2_and_l1 = _pair_distances(a, b)
                for group in groups_of_tensor[name]:
                    distances[group][:, rows, columns] += l2_and_l1
            column = columns.stop
        row = rows.stop
    weights = {
        name: sum(shapes[n].numel() for n in names) for name, names in [*groups.items(), (ALL_TENSORS, all_names)]
    }
    halves = {name: l2_and_l1.triu(1) for name, l2_and_l1 in distances.items()}
    return {name: Distances(weights[name], *(half + half.transpose(1, 2))) for name, half in halves.items()}


def _pair_distances(first_rows: Tensor, second_rows: Tensor) -> Tensor:
    """Return squared L2 and L1 distances of rows, (2, member, member), float64; for one set of rows given twice, only
    the entries above the diagonal."""
    result = torch.zeros(2, len(first_rows), len(second_rows), dtype=torch.float64, device=first_rows.device)
    for at in range(0, first_rows.shape[1], FLOAT64_COLUMNS):
        columns = slice(at, at + FLOAT64_COLUMNS)
        # The first member is the origin: differences of float32 values are exact in float64.
        origin = first_rows[:1, columns].double()
        first_chunk = first_rows[:, columns].double() - origin
        second_chunk = first_chunk if second_rows is first_rows else second_rows[:, columns].double() - origin
        norms = first_chunk.square().sum(1)[:, None] + second_chunk.square().sum(1)
        squared_distances = torch.addmm(norms, first_chunk, second_chunk.T, alpha=-2)
        result[0] += squared_distances.masked_fill(squared_distances < ROUNDING_SHARE * norms, 0)
    kind = torch.float64 if first_rows.dtype == torch.float64 else torch.float32
    for at in range(0, first_rows.shape[1], FLOAT32_COLUMNS):
        first_l1_chunk, second_l1_chunk = (t[:, at : at + FLOAT32_COLUMNS].to(kind) for t in (first_rows, second_rows))
        result[1] += _l1_distances(first_l1_chunk, None if second_rows is first_rows else second_l1_chunk)
    return result


def _l1_distances(first_rows: Tensor, second_rows: Tensor | None) -> Tensor:
    """Return L1 distances between rows of two sets, (member, member); of one set, if the second set is None, only the
    distances above the diagonal.

    `torch.cdist` takes five times as long for a pair as `torch.pdist` on a CPU, so pdist is faster even though it
    measures the pairs inside both sets too.
    """
    rows = first_rows if second_rows is None else torch.cat([first_rows, second_rows])
    distances = rows.new_zeros(len(rows), len(rows))
    upper_pairs = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
    distances[upper_pairs[0], upper_pairs[1]] = torch.pdist(rows, p=1)
    return distances if second_rows is None else distances[: len(first_rows), len(first_rows) :]


def _check_shapes(block: StackedTensors, tensor_names: Sequence[str], shapes: Mapping[str, torch.Size]) -> None:
    """Check that a block has the same tensors as the first block.

    Raises:
        LayoutError: the tensors differ.
    """
    for name in tensor_names:
        if name not in shapes or name not in block or block[name].shape[1:] != shapes[name]:
            expected = f"shape {tuple(shapes[name])} for every member" if name in shapes else "it in every member"
            found = f"shape {tuple(block[name].shape[1:])}" if name in block else "no such tensor"
            raise LayoutError(f"tensor {name!r}", expected=expected, found=found, tensor=name)


def tensors_by_layer(tensor_names: Iterable[str]) -> dict[str, list[str]]:
    """Group tensors by the module that they belong to; return layer -> names of the layer's tensors, in order.

    >>> tensors_by_layer(["conv1.weight", "conv1.bias", "fc.weight"])
    {'conv1': ['conv1.weight', 'conv1.bias'], 'fc': ['fc.weight']}
    """
    names_by_layer: dict[str, list[str]] = {}
    for name in tensor_names:
        names_by_layer.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return names_by_layer


def tensor_groups_from_argument(
    groups: str | Mapping[str, Sequence[str]], tensor_names: Sequence[str]
) -> dict[str, list[str]]:
    """Check a choice of groups; return name -> names of its tensors.

    Args:
        groups: "layer", "tensor", or name -> names of tensors.
        tensor_names: names of the tensors.

    Raises:
        UsageError: the groups are another word, or name a tensor that does not exist.
    """
    if isinstance(groups, str):
        groups_by_kind = {"layer": tensors_by_layer(tensor_names), "tensor": {name: [name] for name in tensor_names}}
        if groups not in groups_by_kind:
            raise UsageError("groups of tensors", expected="'layer', 'tensor' or a mapping", found=repr(groups)[:80])
        return groups_by_kind[groups]
    names_by_group = {name: list(tensors) for name, tensors in groups.items()}
    for name, tensors in names_by_group.items():
        unknown_tensors = [t for t in tensors if t not in tensor_names]
        if name == ALL_TENSORS or unknown_tensors or not tensors:
            found = f"{unknown_tensors[0]!r}" if unknown_tensors else f"the name {name!r}" if tensors else "none"
            expected = f"names among {', '.join(tensor_names[:12])}, and another name of the group than {ALL_TENSORS!r}"
            raise UsageError(f"group {name!r} of tensors", expected=expected, found=found)
    return names_by_group


def bandwidths(distances: Tensor, count: int = BANDWIDTH_COUNT) -> Tensor:
    """Choose bandwidths as MMDAgg does; return a geometric grid (bandwidth), float64.

    The grid goes from half the smallest distance to twice the largest. A smallest distance below 0.1 is replaced by the
    5 % quantile (at least 0.1), a largest distance below 0.3 by 0.3.

    Args:
        distances: distances between members, (pair).
        count: number of bandwidths.

    >>> bandwidths(torch.tensor([1.0, 2.0, 4.0]), count=3).tolist()
    [0.5, 2.0, 8.0]
    """
    sorted_distances = distances.flatten().double().sort().values
    smallest = float(sorted_distances[0])
    if smallest < 0.1:
        smallest = max(float(sorted_distances[int(0.05 * len(sorted_distances))]), 0.1)
    low, high = smallest / 2, 2 * max(float(sorted_distances[-1]), 0.3)
    return torch.tensor([low * (high / low) ** (i / max(1, count - 1)) for i in range(count)], dtype=torch.float64)


def choose_kernels(
    distances: Distances, first_count: int, grid: BandwidthGrid, widths: Mapping[str, Sequence[float]] | None
) -> tuple[tuple[str, float], ...]:
    """Return (name of the kernel, bandwidth) for each kernel.

    Raises:
        UsageError: the grid or a kernel is unknown, or a bandwidth is not positive.
    """
    if widths is not None:
        kernels_and_widths = [(kernel, float(width)) for kernel, values in widths.items() for width in values]
        if not kernels_and_widths or any(k not in KERNELS or not 0 < w < math.inf for k, w in kernels_and_widths):
            expected = "positive bandwidths of 'gaussian' or 'laplace'"
            raise UsageError("widths of kernels", expected=expected, found=repr(dict(widths))[:80])
        return tuple(kernels_and_widths)
    if grid not in ("pooled", "cross", "second"):
        raise UsageError("grid of bandwidths", expected="'pooled', 'cross' or 'second'", found=repr(grid)[:80])
    members = len(distances.l2)
    upper_pairs = torch.triu_indices(members, members, 1, device=distances.l2.device)
    kernels_and_widths = []
    for kernel, matrix in zip(KERNELS, (distances.l2.sqrt(), distances.l1), strict=True):
        pairs_across = matrix[: min(first_count, MOST_PAIRED_MEMBERS), first_count : first_count + MOST_PAIRED_MEMBERS]
        pairs_inside = upper_pairs if grid != "second" else upper_pairs[:, upper_pairs[0] >= first_count]
        pairs = pairs_across if grid == "cross" else matrix[pairs_inside[0], pairs_inside[1]]
        kernels_and_widths += [(kernel, width) for width in bandwidths(pairs).tolist()]
    return tuple(kernels_and_widths)


def kernel_matrix(distances: Distances, kernel: str, width: float) -> Tensor:
    """Return a kernel of all pairs, (member, member): exp(−(L2 / width)²) of "gaussian", exp(−L1 / width) of "laplace".

    Args:
        distances: distances between all members, (member, member).
        kernel, width: name and bandwidth of the kernel.
    """
    return torch.exp(-(distances.l2 / width**2 if kernel == "gaussian" else distances.l1 / width))


def unbiased_mmd2(kernel_values: Tensor, is_chosen: Tensor) -> Tensor:
    """Estimate MMD² between the chosen members and all other members, without bias; return MMD² (choice), float64.

    The estimate is the mean of the kernel over pairs within each set (without pairs of a member with itself), minus
    twice the mean over pairs between the sets.

    Args:
        kernel_values: values of the kernel, (member, member), symmetric.
        is_chosen: 1 for chosen members, else 0, (member, choice); each choice has the same number of members.

    >>> kernel = torch.tensor([[1.0, 0.9, 0.1, 0.2], [0.9, 1, 0.1, 0.2], [0.1, 0.1, 1, 0.8], [0.2, 0.2, 0.8, 1]])
    >>> f"{unbiased_mmd2(kernel, torch.tensor([[1], [1], [0], [0]])).item():.4f}"  # 0.9 + 0.8 - 2 * 0.15
    '1.4000'
    """
    pairs = kernel_values.double().clone().fill_diagonal_(0)
    is_chosen = is_chosen.double()
    first = int(is_chosen[:, 0].sum())
    second = len(is_chosen) - first
    row = pairs.sum(1)
    within = (is_chosen * (pairs @ is_chosen)).sum(0)
    across = row @ is_chosen - within
    sum_of_others = row.sum() - within - 2 * across
    return within / (first * (first - 1)) + sum_of_others / (second * (second - 1)) - 2 * across / (first * second)


def estimate_mmd2(distances: Distances, kernels: Sequence[tuple[str, float]], first_count: int) -> tuple[float, ...]:
    """Estimate MMD² of two sets with each kernel, without bias; return the estimates.

    Args:
        distances: distances between all members, (member, member); the first set comes first.
        kernels: (name, bandwidth) of each kernel.
        first_count: number of members of the first set.
    """
    is_in_first = (torch.arange(len(distances.l2), device=distances.l2.device) < first_count).double()[:, None]
    return tuple(float(unbiased_mmd2(kernel_matrix(distances, *kernel), is_in_first)) for kernel in kernels)


def draw_permutations(first_unit_count: int, second_unit_count: int, permutation_count: int, seed: int) -> Tensor:
    """Draw the units that form the first set in each permutation; return (unit, 1 + permutation): 1 for the units of
    the first set, else 0.

    Column 0 is the original split.

    Args:
        first_unit_count, second_unit_count: number of units in each set.
        permutation_count: number of random splits.
        seed: seed of the random choice.
    """
    units = first_unit_count + second_unit_count
    keys = torch.rand(permutation_count, units, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    is_in_first = torch.zeros(permutation_count + 1, units, dtype=torch.float64)
    is_in_first[0, :first_unit_count] = 1
    is_in_first[1:].scatter_(1, keys.argsort(1)[:, :first_unit_count], 1.0)
    return is_in_first.T.contiguous()


def permuted_mmd2(distances: Distances, kernels: Sequence[tuple[str, float]], is_in_first: Tensor) -> Tensor:
    """Estimate MMD² for each kernel and each split of the members; return (kernel, 1 + permutation), float64.

    A kernel with the same value for all pairs, up to rounding, holds no information: its estimates are 0.

    Args:
        distances: distances between the compared members.
        kernels: (name, bandwidth) of each kernel.
        is_in_first: 1 for the members of the first set, else 0, (member, 1 + permutation).
    """
    estimates = torch.zeros(len(kernels), is_in_first.shape[1], dtype=torch.float64, device=is_in_first.device)
    for i, (kernel, width) in enumerate(kernels):
        pairs = kernel_matrix(distances, kernel, width)
        values = unbiased_mmd2(pairs, is_in_first)
        if float(values.std(correction=0)) > FLAT_TOLERANCE * float(pairs.fill_diagonal_(0).max()):
            estimates[i] = values
    return estimates


def p_value_of_largest(estimates: Tensor) -> float:
    """Test the largest MMD² over the kernels, each standardised over permutations; return the p-value.

    Means and deviations include the original split beside the permutations, so that under the null hypothesis all are
    exchangeable and the p-value is exact (Hemerik & Goeman, Exact testing with random permutations, 2018). The maximum
    over standardised kernels takes the place of MMDAgg's search for levels.

    Args:
        estimates: MMD² with each kernel, (kernel, 1 + permutation); column 0 is the original split.
    """
    spreads = estimates.std(1, correction=0, keepdim=True)
    standardised = (estimates - estimates.mean(1, keepdim=True)) / spreads.masked_fill(spreads == 0, 1)
    largest = standardised.amax(0)
    reached_count = int((largest[1:] >= largest[0] - TIE_TOLERANCE).sum())
    return (1 + reached_count) / len(largest)
