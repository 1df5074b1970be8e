"""The independent units of members: runs of draws, or single members. Permutation tests exchange units.

Draws of one run depend on each other, as do snapshots of one member. A test that exchanges single draws treats draws as
independent, and gives p-values that are far too small. A test that exchanges whole units is exact (Good, Permutation,
Parametric and Bootstrap Tests of Hypotheses, 2005, section 3.7: exchangeability of blocks).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.populations.kernels import (
    BandwidthGrid,
    Distances,
    choose_kernels,
    draw_permutations,
    p_value_of_largest,
    permuted_mmd2,
)

INDEPENDENT_METHOD = "independent"  # Value of the column `method` in the rows of independent members.


def unit_numbers(*sets: Collection) -> list[list[int]]:
    """Number the independent units of some sets of members; return each member's number, set by set.

    Rows with the method "independent", or without a method, are grouped by member: all snapshots of a member are one
    unit. Other rows are grouped by the column `run`; draws without a run are one unit. Members with the same content
    hash are one unit. A unit has the same number in all sets.

    >>> import checkpoints_zoo as zoo
    >>> unit_numbers(zoo.load("convnet-digits", n=3), zoo.load("convnet-digits", members="2-3"))
    [[0, 1, 2], [2, 3]]
    """
    names: list[tuple[Hashable, Hashable]] = []  # Name of the unit and content hash of each member.
    for members in sets:
        rows = members.rows.select(["method", "member", "run", "sha256"]).to_pylist()
        collection_key = (members.source.label, members.name)
        for row in rows:
            is_draw = row["method"] not in (None, INDEPENDENT_METHOD)
            unit: Hashable = (
                (*collection_key, row["method"], row["run"]) if is_draw else (*collection_key, None, row["member"])
            )
            names.append((unit, unit if row["sha256"] is None else row["sha256"]))
    parents: dict[Hashable, Hashable] = {}

    def find_root(element: Hashable) -> Hashable:
        while (parent := parents.setdefault(element, element)) != element:
            element = parent
        return element

    for unit, content in names:
        parents[find_root(content)] = find_root(unit)
    numbers: dict[Hashable, int] = {}
    unit_of_member = [numbers.setdefault(find_root(unit), len(numbers)) for unit, _ in names]
    ends = [sum(map(len, sets[: at + 1])) for at in range(len(sets))]
    return [unit_of_member[end - len(members) : end] for end, members in zip(ends, sets, strict=True)]


def positions_by_unit(numbers: Sequence[int]) -> list[list[int]]:
    """Return the positions of each unit's members, units in the order of their first members.

    >>> positions_by_unit([4, 4, 1, 4])
    [[0, 1, 3], [2]]
    """
    units: dict[int, list[int]] = {}
    for position, number in enumerate(numbers):
        units.setdefault(number, []).append(position)
    return list(units.values())


def split_by_unit(members: Collection) -> tuple[Collection, Collection]:
    """Split members into the units at even and at odd positions; return both sets.

    If there is only one unit, its members are split by their positions.
    """
    units = positions_by_unit(unit_numbers(members)[0])
    if len(units) < 2:
        return members[::2], members[1::2]
    even_positions, odd_positions = (
        sorted(position for unit in units[start::2] for position in unit) for start in (0, 1)
    )
    return members.take(even_positions), members.take(odd_positions)


def split_into_subsets(
    first: Collection, second: Collection, subset_size: int | None
) -> list[tuple[Collection, Collection]]:
    """Split two sets into subsets that have about as many members of each set as another subset; return the pairs.

    Whole units stay together, and a subset has two units or more of each set. A set of fewer than two units is split by
    members.

    Args:
        first, second: the two sets, of two members or more.
        subset_size: number of members in a subset, of both sets together; None for a single subset.
    """
    if subset_size is None:
        return [(first, second)]
    units_of_sets = [positions_by_unit(numbers) for numbers in unit_numbers(first, second)]
    if min(map(len, units_of_sets)) < 2:
        units_of_sets = [[[position] for position in range(len(members))] for members in (first, second)]
    count = min(-(-(len(first) + len(second)) // subset_size), *(len(units) // 2 for units in units_of_sets))
    return [
        (first.take(positions[0]), second.take(positions[1]))
        for start in range(count)
        for positions in [
            [sorted(position for unit in units[start::count] for position in unit) for units in units_of_sets]
        ]
    ]


def draw_one_member_per_unit(numbers: Sequence[int], seed: int) -> list[int]:
    """Draw one member of each unit at random; return the positions of these members.

    Args:
        numbers: unit number of each member.
        seed: seed of the random choice.
    """
    generator = torch.Generator().manual_seed(seed)
    random_keys = torch.rand(len(numbers), generator=generator, dtype=torch.float64).tolist()
    return [max(unit, key=lambda position: random_keys[position]) for unit in positions_by_unit(numbers)]


@dataclass(frozen=True)
class Exchange:
    """Members of two sets that take part in a permutation test, grouped into the units that are exchanged.

    If all units of both sets have the same size, all members take part and whole units are exchanged. If the sizes
    differ, one member of each unit takes part, drawn at random.

    Args:
        positions: positions of the compared members, counted over the first set, then over the second; members of one
            unit are adjacent.
        first, second: number of exchanged units in each set.
        size: number of members in each unit.
    """

    positions: Tensor
    first: int
    second: int
    size: int

    @classmethod
    def of_units(cls, first_units: Sequence[int], second_units: Sequence[int], seed: int) -> Exchange | None:
        """Choose the units that are exchanged between two sets; return None if there is no exact test.

        There is no exact test if a set has fewer than two units, or if a unit is in both sets.

        Args:
            first_units, second_units: unit number of each member.
            seed: seed of the random choice of members.

        >>> Exchange.of_units([0, 0, 1, 1], [2, 2, 3, 3], seed=0).size
        2
        >>> Exchange.of_units([0, 0, 0], [1, 2], seed=0) is None
        True
        """
        sets = (first_units, second_units)
        units = [positions_by_unit(numbers) for numbers in sets]
        if min(map(len, units)) < 2 or set(first_units) & set(second_units):
            return None
        unit_sizes = {len(unit) for units_of_set in units for unit in units_of_set}
        if len(unit_sizes) == 1:
            selected_positions = [[position for unit in units_of_set for position in unit] for units_of_set in units]
        else:
            selected_positions = [sorted(draw_one_member_per_unit(numbers, seed)) for numbers in sets]
        positions = torch.tensor(
            [*selected_positions[0], *(len(first_units) + position for position in selected_positions[1])]
        )
        return cls(positions, len(units[0]), len(units[1]), unit_sizes.pop() if len(unit_sizes) == 1 else 1)

    def draw_permutations(self, permutation_count: int, seed: int) -> Tensor:
        """Draw the members of the first set in each permutation; return (member, 1 + permutation) of 0 and 1.

        Column 0 has the original sets.

        Args:
            permutation_count: number of permutations.
            seed: seed of the permutations.
        """
        return draw_permutations(self.first, self.second, permutation_count, seed).repeat_interleave(self.size, 0)

    def test(
        self,
        distances: Distances,
        grid: BandwidthGrid,
        widths: Mapping[str, Sequence[float]] | None,
        permutation_count: int,
        seed: int,
    ) -> float:
        """Test MMD² of the two sets by permutations; return the p-value.

        Args:
            distances: distances between all members of both sets; bandwidths are chosen for the compared members.
            grid, widths: same arguments as in `choose_kernels`.
            permutation_count: number of permutations.
            seed: seed of the permutations.
        """
        compared_distances = self.compared(distances)
        kernels = choose_kernels(compared_distances, self.first * self.size, grid, widths)
        return p_value_of_largest(self.permuted_mmd2(compared_distances, kernels, permutation_count, seed))

    def compared(self, distances: Distances) -> Distances:
        """Return the distances between the compared members, of distances between all members of both sets."""
        at = self.positions.to(distances.l2.device)
        return Distances(distances.weights, *(matrix[at][:, at] for matrix in (distances.l2, distances.l1)))

    def permuted_mmd2(
        self,
        compared_distances: Distances,
        kernels: Sequence[tuple[str, float]],
        permutation_count: int,
        seed: int,
    ) -> Tensor:
        """Estimate MMD² with each kernel for the two sets and for each permutation; return (kernel, 1 + permutation).

        Args:
            compared_distances: distances between the compared members.
            kernels: (name, bandwidth) of each kernel.
            permutation_count: number of permutations.
            seed: seed of the permutations.
        """
        is_in_first = self.draw_permutations(permutation_count, seed).to(compared_distances.l2.device)
        return permuted_mmd2(compared_distances, kernels, is_in_first)
