"""A test of the corollary that all channels of a layer have the same marginal posterior.

If all channels of a layer are initialised alike, the channels are exchangeable (Laurent et al. 2024, arXiv 2310.08287,
corollary of proposition 1): each channel holds the layer's largest weight with the same probability. Channels of
independently trained networks are exchangeable; channels of many approximate posteriors are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.formats.text import align_columns
from checkpoints_zoo.populations.independent_units import draw_one_member_per_unit, unit_numbers
from checkpoints_zoo.symmetry import Table
from checkpoints_zoo.symmetry.applying import count_stacked_members
from checkpoints_zoo.symmetry.table import Group

_BYTES_AT_ONCE = 1 << 28  # Bytes of members that are read at once.
_MOST_COUNTS = 1 << 22  # Number of simulated counts that are in memory at once.


@dataclass(frozen=True)
class LayerTest:
    """Which unit of a layer holds the largest weight, over the members.

    Args:
        name: name of the layer: its group in the symmetry table.
        tensor: name of the compared weights: the first tensor that writes the layer's units.
        units: unit with the largest weight, (member, block). A layer is one block, unless symmetries never exchange
            some of its units (a grouped kernel on the network's inputs); then each block is tested alone.
        counts: number of members whose largest weight is in each unit, (unit,).
        chi_squared: Pearson's statistic against equal counts, summed over blocks.
        freedom: degrees of freedom of `chi_squared`. If counts are small, `chi_squared` does not follow the
            chi-squared distribution.
        p: probability that exchangeable units give a statistic at least as large. If units are exchangeable, p is
            uniform between 0 and 1.
        adjusted: p after Holm's correction for the number of layers.
    """

    name: str
    tensor: str
    units: Tensor
    counts: Tensor
    chi_squared: float
    freedom: int
    p: float
    adjusted: float


@dataclass(frozen=True)
class Corollary:
    """The test of every layer.

    Args:
        ids: ids of the members that were tested.
        layers: results of the layers, in topological order.
        simulations: number of simulations of the null distribution for each layer.
        seed: seed of the simulations, of broken ties and of random p-values.
    """

    ids: tuple[int, ...]
    layers: tuple[LayerTest, ...]
    simulations: int
    seed: int

    @property
    def p(self) -> float:
        """The smallest adjusted p-value: if it is below 0.05, some layer's channels are not exchangeable."""
        return min((layer.adjusted for layer in self.layers), default=1.0)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        rows = [("layer", "units", "most often", "chi²", "freedom", "p", "p (Holm)")]
        for layer in self.layers:
            top = int(layer.counts.argmax())
            most_often_text = f"unit {top}: {int(layer.counts[top])} of {len(self.ids)}"
            figures = (f"{layer.chi_squared:.4g}", str(layer.freedom), f"{layer.p:.2g}", f"{layer.adjusted:.2g}")
            rows.append((layer.name, str(len(layer.counts)), most_often_text, *figures))
        head = f"Which unit holds a layer's largest weight, over {len(self.ids)} members"
        return f"{head}: p = {self.p:.2g} for all layers\n\n{align_columns(rows)}"


def corollary(members: Collection, *, seed: int = 0, simulations: int = 10_000) -> Corollary:
    """Test each layer: is its largest weight equally often in each of its units? Return the p-values.

    Args:
        members: members of one architecture, one snapshot of each; at least two members or runs. Of draws, one draw of
            each run is tested, chosen at random, because draws of one run depend on each other.
        seed, simulations: same arguments as in `check_layers`.

    Raises:
        SymmetryError: the architecture's symmetries can't be derived.
        UsageError: there are fewer than two members or runs, or several snapshots of one member.
        SelectionError, DamagedError, LayoutError, NetworkError: some members have no weights, or can't be read.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits")
    >>> result = zoo.corollary(members)
    >>> [layer.tensor for layer in result.layers], result.p > 0.05
    (['conv1.weight', 'conv2.weight', 'fc1.weight'], True)
    >>> zoo.corollary(members.canonicalize(permute="max")).p < 0.001
    True
    """
    arguments.check_collection(members)
    seed = arguments.check_seed(seed)
    table = members.symmetry_table
    if len(set(members.ids)) < len(members.ids):
        raise UsageError(
            f"members of {members.name}", expected="one snapshot of each", found="several", do="Leave snapshots out"
        )
    numbers = unit_numbers(members)[0]
    if len(set(numbers)) < 2:
        advice = "Select draws of several runs: draws of one run share its start"
        found = f"{len(members)} of {len(set(numbers))} run"
        raise UsageError(f"draws of {members.name}", expected="two runs or more", found=found, do=advice)
    members = members.take(sorted(draw_one_member_per_unit(numbers, seed)))
    parts: dict[str, list[Tensor]] = {}
    for _, params in members.batches(members._member_count_within(_BYTES_AT_ONCE)):
        for name, values in largest_weights(table, params).items():
            parts.setdefault(name, []).append(values)
    largest_weights_by_group = {name: torch.cat(values) for name, values in parts.items()}
    return _test_layers(table, largest_weights_by_group, members.ids, seed, simulations)


def check_layers(
    symmetry_table: Table, params: Mapping[str, Tensor], *, seed: int = 0, simulations: int = 10_000
) -> Corollary:
    """Test stacked parameters as `corollary` tests a collection; return the p-values.

    The statistic is Pearson's. The null distribution of the statistic is simulated: with many units and few members,
    counts are too small for the chi-squared distribution. Ties between the statistic and simulated statistics are
    broken at random; so p is exactly uniform if channels are exchangeable, for any number of members, units and
    simulations.

    Args:
        symmetry_table: symmetry table of the network.
        params: stacked tensors, name -> (member, *shape): the first tensor that writes each group.
        seed: seed of the simulations, and of how ties of the largest weight (frequent in float16) or statistic are
            broken.
        simulations: number of simulations for each layer; p-values are multiples of about 1 / simulations.

    Raises:
        LayoutError: a tensor is missing, or has another shape.
        UsageError: there are fewer than two members, no simulations, or tensors without a member axis.
        DamagedError: some weights are not finite.
    """
    members, seed = count_stacked_members(symmetry_table, params), arguments.check_seed(seed)
    return _test_layers(symmetry_table, largest_weights(symmetry_table, params), range(members), seed, simulations)


def largest_weights(symmetry_table: Table, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Find the largest weight of each unit in the first kernel that writes the unit; return group -> (member, unit).

    Args:
        symmetry_table: symmetry table of the network.
        params: stacked tensors, name -> (member, *shape).

    Raises:
        LayoutError: a tensor is missing.
        DamagedError: some weights are not finite.
    """
    result = {}
    for name, group in symmetry_table.groups.items():
        if not group.writers:
            continue
        tensor, axis = group.writers[0]
        if tensor not in params:
            raise LayoutError(f"tensor {tensor!r}", expected=f"it, as {symmetry_table.network} has it", found="none")
        values = params[tensor].detach().movedim(axis + 1, 1).flatten(2 if params[tensor].ndim > 2 else 1)
        values = values.amax(2) if values.ndim > 2 else values
        moves = [m for m in symmetry_table.tensors[tensor].moves if m.group == name and m.axis == axis]
        parts = [values[:, m.offset : m.offset + group.size * m.span].reshape(-1, group.size, m.span) for m in moves]
        result[name] = torch.cat(parts, 2).amax(2).cpu()
        if not bool(result[name].isfinite().all()):
            raise DamagedError(f"tensor {tensor!r}", expected="finite weights", found="others", tensor=tensor)
    return result


def _test_layers(
    symmetry_table: Table, weights_by_group: Mapping[str, Tensor], ids: Sequence[int], seed: int, simulations: int
) -> Corollary:
    for option_name, number, smallest in (("members", len(ids), 2), ("simulations", simulations, 1)):
        if number < smallest:
            raise UsageError(option_name, expected=f"{smallest} or more", found=str(number))
    tests = []
    for i, (name, unit_weights) in enumerate(weights_by_group.items()):
        rng = np.random.default_rng([seed % 2**64, i])
        group = symmetry_table.groups[name]
        units = _largest_units(unit_weights, _block_numbers(symmetry_table, group), rng)
        block_count = units.shape[1]
        counts = torch.bincount(units.flatten(), minlength=group.size)
        units_per_block = group.size // block_count
        sum_of_squared_counts = int(counts.square().sum())
        simulated_statistics = _simulate_statistics(len(ids), block_count, units_per_block, simulations, rng)
        # The rank among equal values is drawn at random, so that the statistic's rank, and p, are uniform.
        above_count, tie_count = (
            int((simulated_statistics > sum_of_squared_counts).sum()),
            int((simulated_statistics == sum_of_squared_counts).sum()),
        )
        p = (above_count + rng.random() * (tie_count + 1)) / (simulations + 1)
        chi_squared = sum_of_squared_counts * units_per_block / len(ids) - len(ids) * block_count
        degrees_of_freedom = block_count * (units_per_block - 1)
        tests.append((name, group.writers[0][0], units, counts, chi_squared, degrees_of_freedom, float(p)))
    adjusted_p_values = adjust_p_values_by_holm([test[-1] for test in tests])
    layers = tuple(LayerTest(*test, p) for test, p in zip(tests, adjusted_p_values, strict=True))
    return Corollary(tuple(ids), layers, simulations, seed)


def _block_numbers(symmetry_table: Table, group: Group) -> Tensor:
    """Number the blocks of units that symmetries never exchange with each other; return each unit's block, (unit,)."""
    blocks = torch.arange(group.blocks)
    if group.mover is not None:
        blocks = _block_numbers(symmetry_table, symmetry_table.groups[group.mover])
    return blocks.repeat_interleave(group.size // group.blocks)


def _largest_units(unit_weights: Tensor, block_numbers: Tensor, rng: np.random.Generator) -> Tensor:
    """Find the unit with the largest value in each block, ties broken at random; return (member, block)."""
    random_values = torch.from_numpy(rng.random(unit_weights.shape))
    result = []
    for block in range(int(block_numbers.max()) + 1):
        block_values = torch.where(block_numbers == block, unit_weights.double(), -torch.inf)
        is_largest = block_values == block_values.amax(1, keepdim=True)
        result.append(torch.where(is_largest, random_values, -1.0).argmax(1))
    return torch.stack(result, 1)


def _simulate_statistics(
    member_count: int, block_count: int, unit_count: int, simulation_count: int, rng: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Draw a unit for each member, all units equally probable; return the sum of squared counts of each simulation.

    Pearson's statistic is the sum of squared counts times units / members, less a constant; as a whole number the sum
    has exact ties.
    """
    sums = np.zeros(simulation_count, np.int64)
    step = max(1, _MOST_COUNTS // max(unit_count, member_count))
    for start in range(0, simulation_count, step):
        rows = min(step, simulation_count - start)
        for _ in range(block_count):
            drawn_units = rng.integers(unit_count, size=(rows, member_count)) + unit_count * np.arange(rows)[:, None]
            counts = np.bincount(drawn_units.ravel(), minlength=rows * unit_count).reshape(rows, unit_count)
            sums[start : start + rows] += np.square(counts).sum(1)
    return sums


def adjust_p_values_by_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for the number of tests (Holm 1979); return the adjusted p-values in the same order.

    >>> adjust_p_values_by_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest_so_far = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest_so_far = max(largest_so_far, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest_so_far
    return adjusted
