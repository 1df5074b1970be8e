"""MMD² between two sets of weights, layer by layer and whole, with a permutation test; NS without symmetries.

The unbiased estimate of Gretton et al., A kernel two-sample test (2012), equation 3, with Gaussian kernels
exp(-(d / bandwidth)²) of L2 distances and Laplace kernels exp(-d / bandwidth) of L1 distances, ten bandwidths each, as
Laurent et al. (2024) take them from MMDAgg (Schrab et al., 2023). Kernels are at most 1, so MMD² lies below 2; it has
no unit and is not scaled. What the paper's "MMD" column is scaled by and how it joins kernels is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import measuring
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import tied
from checkpoints_zoo.populations.discrepancies import MMD, NS, Discrepancy
from checkpoints_zoo.populations.distances import Blocks, Distances, Stacked, distances, grouped
from checkpoints_zoo.populations.kernels import Grid, bandwidths, choices, kernels_of, permutation_test, unbiased

__all__ = ["MMD", "NS", "Discrepancy", "apart", "bandwidths", "discrepancy", "mmd", "ns", "unbiased"]

Groups = str | Mapping[str, Sequence[str]]


def discrepancy(
    first: Stacked,
    second: Stacked,
    *,
    groups: Groups = "layer",
    permutations: int = 999,
    grid: Grid = "pooled",
    widths: Mapping[str, Sequence[float]] | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> MMD:
    """Compare two stacked sets of weights; return MMD² and the p-value of each group of tensors and of all.

    Args:
        first, second: name -> (member, …), two members or more.
        groups, permutations, grid, widths, device, seed: as in `mmd`.

    Raises:
        UsageError, LayoutError: as in `mmd`.

    >>> generator = torch.Generator().manual_seed(0)
    >>> first, second = ({"w": torch.randn(20, 5, generator=generator) + shift} for shift in (0, 2))
    >>> found = discrepancy(first, second)
    >>> found.value > 0.1, found.p_value
    (True, 0.001)
    """
    names = list(first)
    counts = tuple(len(next(iter(stacked.values()), ())) for stacked in (first, second))

    def blocks(start: int) -> Iterator[Stacked]:
        for stacked, count in zip((first, second), counts, strict=True):
            if start < count:
                yield {name: tensor[start:] for name, tensor in stacked.items()}
            start = max(0, start - count)

    return _compared(blocks, counts, grouped(groups, names), ("", ""), permutations, grid, widths, device, seed)


def mmd(
    first: Collection,
    second: Collection | None = None,
    *,
    groups: Groups = "layer",
    permutations: int = 999,
    grid: Grid = "pooled",
    widths: Mapping[str, Sequence[float]] | None = None,
    device: str | torch.device = "cpu",
    memory: int = 1 << 30,
    seed: int = 0,
) -> MMD:
    """Compare the weights of two sets of members; return MMD² and the p-value of each group of tensors and of all.

    The test's statistic is the largest MMD² over the kernels, each standardised by its own mean and deviation over the
    permutations, those of the data among them; so its level is exact for any number of kernels, of members and of
    permutations: p = (1 + how many of B are at least as large) / (1 + B).

    Args:
        first, second: of one architecture, two members or more each; canonical or aligned views are read as such.
            Without a second set, members at even positions are compared with those at odd ones. Running statistics
            are no weights.
        groups: "layer" (tensors of a module together), "tensor", or name -> names of tensors.
        permutations: B.
        grid: where bandwidths are taken from: all pairs ("pooled", which permutations do not change); the pairs
            across of 500 members each, as the paper's code does ("cross"); or those within the second set ("second"),
            so that several sets are compared with one on the same scale. p-values of the latter two are not exact.
        widths: kernel ("gaussian", "laplace") -> bandwidths, in place of the grid; a kernel left out is not used.
        device: where to compute; it needs float64.
        memory: bytes of members that are held at once, beside 16 (m + n)² a group. With less than all members in it
            they are read several times.
        seed: of the permutations.

    Raises:
        UsageError: one member, groups, bandwidths, permutations or a device that are none.
        LayoutError: members of different architectures.
        DamagedError, SourceNotFound, NetworkError: members that can't be read, or are not finite.

    >>> import checkpoints_zoo as zoo
    >>> found = zoo.mmd(zoo.load("convnet-digits", n=16), permutations=99)
    >>> found.members, found.p_value > 0.01
    ((8, 8), True)
    """
    first, second = _sets(first, second)
    names = _weights(first.skeleton())
    counts = len(first), len(second)
    cited = first.citation, second.citation
    blocks = _blocks(first, second, names, device, memory)
    return _compared(blocks, counts, grouped(groups, names), cited, permutations, grid, widths, device, seed)


def apart(
    first: Collection,
    second: Collection,
    *,
    groups: Groups = "layer",
    device: str | torch.device = "cpu",
    memory: int = 1 << 30,
) -> dict[str, Distances]:
    """Measure how far apart all members of two sets are; return the distances of each group of tensors and of all.

    Args:
        first, second: as in `mmd`; rows and columns of the distances are the first set's members, then the second's.
        groups, device, memory: as in `mmd`.

    Raises:
        UsageError, LayoutError, DamagedError, SourceNotFound, NetworkError: as in `mmd`.
    """
    first, second = _sets(first, second)
    names = _weights(first.skeleton())
    blocks = _blocks(first, second, names, device, memory)
    return _finite(distances(blocks, len(first) + len(second), grouped(groups, names), _place(device)))


def _blocks(
    first: Collection, second: Collection, names: Sequence[str], device: str | torch.device, memory: int
) -> Blocks:
    """Return what reads the members of both sets from a position on."""
    size = max(1, memory // (4 * max(c.member_nbytes for c in (first, second))))

    def blocks(start: int) -> Iterator[Stacked]:
        for members in (first, second):
            if start < len(members):
                for _, params in members[start:].batches(size, device):
                    yield {name: params[name] for name in names if name in params}
            start = max(0, start - len(members))

    return blocks


def ns(
    first: Collection,
    second: Collection | None = None,
    *,
    scale: str | None = "unit-norm",
    permute: str | None = "first",
    streams: bool = False,
    groups: Groups = "layer",
    permutations: int = 999,
    grid: Grid = "pooled",
    device: str | torch.device = "cpu",
    memory: int = 1 << 30,
    seed: int = 0,
) -> NS:
    """Compare two sets of members as they are and after removing symmetries; return both.

    Args:
        first, second: as in `mmd`.
        scale, permute, streams: as in `Collection.canonicalize`.
        groups, permutations, grid, device, memory, seed: as in `mmd`.

    Raises:
        UsageError, LayoutError, DamagedError, SourceNotFound, NetworkError: as in `mmd`.
        SymmetryError: an architecture whose symmetries can't be derived.
    """
    pair = _sets(first, second)
    views = [c.canonicalize(scale=scale, permute=permute, streams=streams) for c in pair]
    before, after = (
        mmd(*of, groups=groups, permutations=permutations, grid=grid, device=device, memory=memory, seed=seed)
        for of in (pair, views)
    )
    return NS(before, after, scale, permute, streams)


def _sets(first: Collection, second: Collection | None) -> tuple[Collection, Collection]:
    """Return both sets; without a second one, the members of the first at even positions and at odd ones.

    Raises:
        UsageError: fewer than two members in one, or something that has no weights.
    """
    for members in (first, *([] if second is None else [second])):
        if not isinstance(members, Collection):
            raise UsageError(
                "sets of members",
                expected="collections, as `zoo.load` gives them: their weights are compared",
                found=type(members).__name__,
            )
    pair = (first[::2], first[1::2]) if second is None else (first, second)
    _check_counts([len(members) for members in pair])
    return pair


def _check_counts(counts: Sequence[int]) -> None:
    if min(counts) < 2:
        found = " and ".join(map(str, counts))
        raise UsageError("sets of members", expected="two members or more in each", found=found)


def _weights(skeleton: nn.Module) -> list[str]:
    """Return the names of the parameters; of names tied to one tensor the last, as in an ensemble."""
    states, dropped = skeleton.state_dict(keep_vars=True), tied(skeleton)
    return [name for name, t in states.items() if isinstance(t, nn.Parameter) and name not in dropped]


def _compared(
    blocks: Blocks,
    counts: tuple[int, ...],
    groups: Mapping[str, Sequence[str]],
    cited: tuple[str, str],
    permutations: int,
    grid: Grid,
    widths: Mapping[str, Sequence[float]] | None,
    device: str | torch.device,
    seed: int,
) -> MMD:
    first, second = counts
    _check_counts(counts)
    measuring.check_draws(seed)
    if permutations < 1:
        raise UsageError("permutations", expected="1 or more", found=f"{permutations}")
    place = _place(device)
    chosen = choices(first, second, permutations, seed).to(place)
    by_group = {}
    for name, some in _finite(distances(blocks, first + second, groups, place)).items():
        kernels = kernels_of(some, first, grid, widths)
        values, p_value = permutation_test(some, kernels, chosen)
        by_group[name] = Discrepancy(some.weights, kernels, values, sum(values) / len(values), p_value)
    return MMD(*cited, (first, second), permutations, by_group)


def _place(device: str | torch.device) -> torch.device:
    """Check that a device is there and has float64; return it."""
    place = check_device(device)
    if place.type == "mps":
        raise UsageError("device 'mps'", expected="one that has float64", found="none", do="Use the CPU")
    return place


def _finite(apart: dict[str, Distances]) -> dict[str, Distances]:
    """Check that distances are finite; return them."""
    damaged = [name for name, some in apart.items() if not bool((some.l2 + some.l1).isfinite().all())]
    if damaged:
        found = f"others in {damaged[0]!r}"
        raise UsageError("weights of two sets of members", expected="finite ones, with finite squares", found=found)
    return apart
