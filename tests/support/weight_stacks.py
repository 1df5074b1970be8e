"""MMD² of two stacks of weights that are no collections, by the code behind `zoo.mmd`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from checkpoints_zoo.populations.discrepancy import MMD, Subset, TensorGroups, compare_subsets
from checkpoints_zoo.populations.independent_units import Exchange
from checkpoints_zoo.populations.kernels import BandwidthGrid, StackedTensors, tensor_groups_from_argument


def mmd_of_stacks(
    first: StackedTensors,
    second: StackedTensors,
    *,
    groups: TensorGroups = "layer",
    permutations: int = 999,
    grid: BandwidthGrid = "pooled",
    widths: Mapping[str, Sequence[float]] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> MMD:
    """Compare two stacks, name -> (member, …); the options are those of `zoo.mmd`."""
    names = list(first)
    counts = (len(next(iter(first.values()), ())), len(next(iter(second.values()), ())))

    def blocks(start: int) -> Iterator[StackedTensors]:
        for stacked, count in zip((first, second), counts, strict=True):
            if start < count:
                yield {name: tensor[start:] for name, tensor in stacked.items()}
            start = max(0, start - count)

    exchange = Exchange.of_units(range(counts[0]), range(counts[0], sum(counts)), seed)
    tensors = tensor_groups_from_argument(groups, names)
    subset = Subset(blocks, counts, exchange)
    return compare_subsets([subset], tensors, ("", ""), permutations, grid, widths, device, seed)
