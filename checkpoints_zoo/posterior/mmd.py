"""MMD² between two sets of weights, layer by layer and whole, with a permutation test; NS without symmetries.

The unbiased estimate of Gretton et al., A kernel two-sample test (2012), equation 3, with Gaussian kernels
exp(-(d / bandwidth)²) of L2 distances and Laplace kernels exp(-d / bandwidth) of L1 distances, ten bandwidths each, as
Laurent et al. (2024) take them from MMDAgg (Schrab et al., 2023). Kernels are at most 1, so MMD² lies below 2; it has
no unit and is not scaled. What the paper's "MMD" column is scaled by and how it joins kernels is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpoints_zoo.collection import Collection
from checkpoints_zoo.device import check_device
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.posterior.distances import WHOLE, Blocks, Stacked, distances, grouped
from checkpoints_zoo.posterior.kernels import Grid, bandwidths, choices, kernels_of, permutation_test, unbiased

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MMD", "NS", "Discrepancy", "bandwidths", "discrepancy", "mmd", "ns", "unbiased"]

Groups = str | Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Discrepancy:
    """How far two sets of members are apart in one group of tensors.

    Args:
        weights: how many the group has.
        kernels: (name, bandwidth) of each kernel.
        values: MMD² with each kernel, unbiased: it may be below 0.
        value: their mean, which is the MMD² of the mean of the kernels.
        p_value: of the permutation test over all kernels: share of permutations at least as far apart.
    """

    weights: int
    kernels: tuple[tuple[str, float], ...]
    values: tuple[float, ...]
    value: float
    p_value: float


@dataclass(frozen=True)
class MMD:
    """Two sets of members against each other.

    Args:
        first, second: citations of the members, "" where there is none.
        members: how many each set has.
        permutations: of the test.
        groups: name -> Discrepancy; "all" is all weights together.
    """

    first: str
    second: str
    members: tuple[int, int]
    permutations: int
    groups: Mapping[str, Discrepancy]

    @property
    def value(self) -> float:
        """MMD² of all weights together, mean over kernels."""
        return self.groups[WHOLE].value

    @property
    def p_value(self) -> float:
        """Of all weights together."""
        return self.groups[WHOLE].p_value

    def __getitem__(self, group: str) -> Discrepancy:
        """Return a group.

        Raises:
            UsageError: no such group.
        """
        if group not in self.groups:
            names = ", ".join(list(self.groups)[:12])
            raise UsageError(f"group {group!r}", expected=f"one of {names}", found="none such")
        return self.groups[group]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a group and kernel: group, weights, kernel, bandwidth, mmd2; then the group's mean and p."""
        import pandas as pd

        rows = [
            {"group": name, "weights": x.weights, "kernel": kernel, "bandwidth": width, "mmd2": value,
             "mean_mmd2": x.value, "p_value": x.p_value}
            for name, x in self.groups.items()
            for (kernel, width), value in zip(x.kernels, x.values, strict=True)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        facts = {"first": self.first, "second": self.second, "members": self.members}
        rows = self.to_frame().to_dict("records")
        return json.dumps({**facts, "permutations": self.permutations, "groups": rows}, indent=1)


@dataclass(frozen=True)
class NS:
    """Two sets of members as they are stored, and with the symmetries of their network removed.

    Args:
        mmd: of the weights as they are stored.
        ns: of their canonical form.
        scale, permute: how that was made.
    """

    mmd: MMD
    ns: MMD
    scale: str | None
    permute: str | None


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
    second: Collection,
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
            Running statistics are no weights.
        groups: "layer" (tensors of a module together), "tensor", or name -> names of tensors.
        permutations: B.
        grid: where bandwidths are taken from: all pairs ("pooled", which permutations do not change), or the pairs
            across of 500 members each, as the paper's code does ("cross": p-values are not exact then).
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
    >>> members = zoo.load("convnet-digits", n=16)
    >>> found = zoo.mmd(members[:8], members[8:], permutations=99)
    >>> found.p_value > 0.01
    True
    """
    names = _weights(first.skeleton())
    each = max(c.nbytes // max(1, len(c)) for c in (first, second))
    size = max(1, memory // (4 * max(1, each)))

    def blocks(start: int) -> Iterator[Stacked]:
        for members in (first, second):
            if start < len(members):
                for _, params in members[start:].batches(size, device):
                    yield {name: params[name] for name in names if name in params}
            start = max(0, start - len(members))

    counts = len(first), len(second)
    cited = first.citation, second.citation
    return _compared(blocks, counts, grouped(groups, names), cited, permutations, grid, widths, device, seed)


def ns(
    first: Collection,
    second: Collection,
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
    views = [c.canonicalize(scale=scale, permute=permute, streams=streams) for c in (first, second)]
    before, after = (
        mmd(
            *pair, groups=groups, permutations=permutations, grid=grid, device=device, memory=memory, seed=seed
        )
        for pair in ((first, second), views)
    )  # fmt: skip
    return NS(before, after, scale, permute)


def _weights(skeleton: nn.Module) -> list[str]:
    """Return the names of the parameters; of names tied to one tensor the last, as in an ensemble."""
    parameters = {id(parameter) for parameter in skeleton.parameters()}
    states = skeleton.state_dict(keep_vars=True)
    last = {id(tensor): name for name, tensor in states.items() if id(tensor) in parameters}
    return list(last.values())


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
    if min(counts) < 2:
        raise UsageError("sets of members", expected="two members or more in each", found=f"{first} and {second}")
    if permutations < 1:
        raise UsageError("permutations", expected="1 or more", found=f"{permutations}")
    place = check_device(device)
    if place.type == "mps":
        raise UsageError("device 'mps'", expected="one that has float64", found="none", do="Use the CPU")
    apart = distances(blocks, first + second, groups, place)
    chosen = choices(first, second, permutations, seed).to(place)
    found = {}
    for name, some in apart.items():
        kernels = kernels_of(some, first, grid, widths)
        values, p_value = permutation_test(some, kernels, chosen)
        found[name] = Discrepancy(some.weights, kernels, values, sum(values) / len(values), p_value)
    return MMD(*cited, (first, second), permutations, found)
