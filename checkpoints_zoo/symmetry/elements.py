"""Elements of a symmetry group: permutations, scales, signs, matrices and shifts. The functions of this file draw and
check elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.matrices import check_matrices, random_matrices
from checkpoints_zoo.symmetry.shifting import check_shifts, random_shifts
from checkpoints_zoo.symmetry.table import Group, Table


@dataclass(frozen=True)
class Element:
    """An element of the symmetry group, or one element for each member. Shifts are applied first, then matrices, then
    scales and signs, then permutations.

    Args:
        permutations: group -> permutation, int64 (unit) or (member, unit): new unit u is the former unit
            permutation[u]. The units of all other groups keep their order.
        scales: name of a scale -> positive factors, (value) or (member, value). All other scales are 1.
        signs: name of a sign -> factors 1 or -1, (value) or (member, value). All other signs are 1.
        matrices: name of a group of matrices -> matrices, (copy, unit, unit) or (member, copy, unit, unit). All other
            matrices are the identity.
        shifts: name of a shift -> vector, (entry) or (member, entry). All other shifts are 0.
    """

    permutations: Mapping[str, Tensor] = field(default_factory=dict)
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    signs: Mapping[str, Tensor] = field(default_factory=dict)
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)

    def select(self, members: Tensor | slice | int) -> Element:
        """Return the symmetry of one member, or the symmetries of the selected members."""
        return Element(*({n: v[members] for n, v in part.items()} for part in self.parts()))

    @classmethod
    def concatenate(cls, elements: Sequence[Element]) -> Element:
        """Return the symmetries of several groups of members in one element."""
        parts = zip(*(element.parts() for element in elements), strict=True)
        return cls(*({n: torch.cat([values[n] for values in part]) for n in part[0]} for part in parts))

    @classmethod
    def stack(cls, elements: Sequence[Element]) -> Element:
        """Return the symmetries of single members in one element with a member axis."""
        parts = zip(*(element.parts() for element in elements), strict=True)
        return cls(*({n: torch.stack([values[n] for values in part]) for n in part[0]} for part in parts))

    def cpu(self) -> Element:
        """Return the element in the memory of the CPU."""
        return Element(*({name: values.cpu() for name, values in part.items()} for part in self.parts()))

    def parts(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return the element's permutations, scales, signs, matrices and shifts as a tuple of five mappings."""
        return self.permutations, self.scales, self.signs, self.matrices, self.shifts

    @property
    def changes_values(self) -> bool:
        """Whether values of weights change, and do not only move or change sign."""
        return bool(self.scales or self.matrices or self.shifts)


def identity_element(table: Table, members: int, device: torch.device | str = "cpu") -> Element:
    """Return the symmetry that changes nothing, with a row for each member in each exact part of the group.

    Args:
        table: the network's symmetry table.
        members: number of members.
        device: device of the element's tensors.
    """
    wide: dict[str, Any] = {"dtype": torch.float64, "device": device}
    scales = {name: scale for name, scale in table.scales.items() if scale.exact}
    return Element(
        {name: torch.arange(group.size, device=device).expand(members, -1) for name, group in table.groups.items()},
        {name: torch.ones(members, scale.size, **wide) for name, scale in scales.items()},
        {name: torch.ones(members, sign.size, **wide) for name, sign in table.signs.items()},
        {n: torch.eye(m.size, **wide).expand(members, m.count, -1, -1) for n, m in table.matrices.items()},
        {name: torch.zeros(members, shift.size, **wide) for name, shift in table.shifts.items()},
    )


def random_element(
    table: Table,
    generator: torch.Generator,
    *,
    members: int | None = None,
    approximate: bool = False,
    spread: float = 0.5,
    condition: float = 4.0,
) -> Element:
    """Draw a symmetry with uniformly distributed permutations, signs and rotations; return the symmetry.

    Args:
        table: the network's symmetry table.
        generator: source of randomness, on the CPU.
        members: number of symmetries to draw, one for each member; None: one symmetry without a member axis.
        approximate: whether to draw approximate scales as well.
        spread: standard deviation of the logarithms of the scales, and of the shifts.
        condition: largest condition number of an invertible matrix; at least 1.

    Raises:
        UsageError: the condition number is below 1.
    """
    if not condition >= 1:
        raise UsageError("condition", expected="a condition number, 1 or more", found=repr(condition))
    member_count = 1 if members is None else members
    permutations: dict[str, Tensor] = {}
    for name in table.groups:
        _draw_permutation(table, name, permutations, member_count, generator)
    scales = {
        name: (spread * torch.randn(member_count, scale.size, generator=generator, dtype=torch.float64)).exp()
        for name, scale in table.scales.items()
        if scale.exact or approximate
    }
    signs = {
        name: 2.0 * torch.randint(2, (member_count, sign.size), generator=generator, dtype=torch.float64) - 1
        for name, sign in table.signs.items()
    }
    matrices = {name: random_matrices(m, generator, member_count, condition) for name, m in table.matrices.items()}
    shifts = random_shifts(table, generator, members=member_count, spread=spread)
    element = Element({name: permutations[name] for name in table.groups}, scales, signs, matrices, shifts)
    return element if members is not None else element.select(0)


def _draw_permutation(
    table: Table, group_name: str, drawn_permutations: dict[str, Tensor], member_count: int, generator: torch.Generator
) -> None:
    group = table.groups[group_name]
    if group_name in drawn_permutations:
        return
    width = group.size // group.blocks
    sorting_keys = torch.rand(member_count, group.blocks, width, generator=generator, dtype=torch.float64)
    orders_in_blocks = sorting_keys.argsort(-1)
    block_order = torch.arange(group.blocks).expand(member_count, -1)
    if group.mover is not None:
        _draw_permutation(table, group.mover, drawn_permutations, member_count, generator)
        block_order = drawn_permutations[group.mover]
    drawn_permutations[group_name] = (block_order[..., None] * width + orders_in_blocks).reshape(
        member_count, group.size
    )


def random_transpositions(table: Table, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw permutations that need `count` transpositions in all; return group -> int64 (unit).

    Each transposition joins two cycles of a group, so that none undoes another. Each transposition is drawn uniformly
    among the pairs of units in different cycles. Groups with blocks, and groups that move the blocks of other groups,
    are not permuted.

    Args:
        table: the network's symmetry table.
        count: number of transpositions, from 0 to the sum of (units - 1) over the groups.
        generator: source of randomness, on the CPU.

    Raises:
        UsageError: the count is negative or too large.

    Xiao, Liu, Bamler 2023 (arXiv 2401.00611) define the number of transpositions of a permutation.
    """
    movers = {group.mover for group in table.groups.values()}
    size_of_group = {n: g.size for n, g in table.groups.items() if g.blocks == 1 and n not in movers and g.writers}
    most_transpositions = sum(size - 1 for size in size_of_group.values())
    if not 0 <= count <= most_transpositions:
        raise UsageError(
            f"transpositions of {table.network}", expected=f"0 to {most_transpositions:,}", found=f"{count:,}"
        )
    permutations = {name: torch.arange(size) for name, size in size_of_group.items()}
    cycles = {name: torch.arange(size) for name, size in size_of_group.items()}
    names = list(size_of_group)
    while count:
        # Draw a pair of units uniformly; draw again if both units lie in one cycle of the permutation.
        pair_counts = torch.tensor([size * (size - 1) for size in size_of_group.values()], dtype=torch.float64)
        name = names[int(torch.multinomial(pair_counts, 1, generator=generator))]
        a, b = torch.randperm(size_of_group[name], generator=generator)[:2].tolist()
        p, cycle = permutations[name], cycles[name]
        if cycle[a] != cycle[b]:
            p[[a, b]] = p[[b, a]]
            cycle[cycle == cycle[b]] = int(cycle[a])
            count -= 1
    return permutations


def check_symmetry(table: Table, element: Element) -> None:
    """Check that an element belongs to the symmetry group of a table.

    Raises:
        UsageError: a name is unknown, a permutation is invalid or breaks blocks apart, a scale is not positive, a sign
            is not 1 or -1, or a matrix or shift does not belong to its group.
    """
    check_matrices(table, element.matrices)
    check_shifts(table, element.shifts)
    for name, p in element.permutations.items():
        group = table.groups.get(name)
        if group is None:
            raise UsageError(
                f"permutation {name!r}", expected=f"a group among {', '.join(table.groups)}", found=repr(name)
            )
        _check_permutation(group, p, element.permutations)
    for group in table.groups.values():
        if group.mover in element.permutations and group.name not in element.permutations:
            _check_permutation(group, torch.arange(group.size), element.permutations)
    for name, s in element.scales.items():
        scale = table.scales.get(name)
        if scale is None:
            raise UsageError(f"scale {name!r}", expected=f"one among {', '.join(table.scales)}", found=repr(name))
        if s.ndim not in (1, 2) or s.shape[-1] != scale.size or not bool(((s > 0) & s.isfinite()).all()):
            raise UsageError(
                f"scale {name!r}",
                expected=f"{scale.size} positive values, or (member, {scale.size})",
                found=_describe_tensor(s),
            )
    for name, values in element.signs.items():
        sign = table.signs.get(name)
        if sign is None:
            raise UsageError(f"sign {name!r}", expected=f"one among {', '.join(table.signs)}", found=repr(name))
        if values.ndim not in (1, 2) or values.shape[-1] != sign.size or not bool((values.abs() == 1).all()):
            raise UsageError(
                f"sign {name!r}",
                expected=f"{sign.size} values 1 or -1, or (member, {sign.size})",
                found=_describe_tensor(values),
            )


def _check_permutation(group: Group, permutation: Tensor, all_permutations: Mapping[str, Tensor]) -> None:
    thing = f"permutation {group.name!r}"
    unit_numbers = torch.arange(group.size, device=permutation.device)
    if (
        permutation.dtype != torch.int64
        or permutation.ndim not in (1, 2)
        or permutation.shape[-1] != group.size
        or not bool((permutation.sort(-1)[0] == unit_numbers).all())
    ):
        raise UsageError(
            thing,
            expected=f"each of 0-{group.size - 1} once, int64, or a row of them a member",
            found=_describe_tensor(permutation),
        )
    if group.blocks > 1:
        width = group.size // group.blocks
        default = torch.arange(group.blocks)
        expected_blocks = all_permutations.get(group.mover, default) if group.mover is not None else default
        is_in_block = permutation.div(width, rounding_mode="floor") == expected_blocks.to(
            permutation.device
        ).repeat_interleave(width, -1)
        if not bool(is_in_block.all()):
            place_text = f"in the order that {group.mover!r} gives" if group.mover else "in place"
            raise UsageError(
                thing,
                expected=f"{group.blocks} blocks that stay together, {place_text}",
                found=_describe_tensor(permutation),
            )


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}: {tensor.flatten()[:8].tolist()}"
