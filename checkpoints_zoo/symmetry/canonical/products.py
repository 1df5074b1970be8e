"""Inner products of the units of two networks: the gain of each pair of units, one group at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import permute, source_entries
from checkpoints_zoo.symmetry.table import Axes, Move, Table

_MOST_CHANGED_ROWS = 0.7  # Share of a product's rows that may change before the whole product is computed anew.
# Number of entries of a tensor up to which its products are always computed anew, because finding the changed rows
# takes longer.
_SMALL_TENSOR = 1 << 14
_ENTRIES_AT_ONCE = 1 << 15  # Largest number of entries converted to float64 at once, to fit into the cache.

Permutations = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Term:
    """One axis of a tensor along which a group moves. Inner products of the group's units are sums over all other
    entries.

    Args:
        name: name of the tensor in the state dict.
        axes: symmetries of the tensor's axes.
        move: the move of the group in this tensor.
        units: number of units that the group has.
    """

    name: str
    axes: Axes
    move: Move
    units: int

    @cached_property
    def other_moves(self) -> tuple[Move, ...]:
        """The moves along other axes of the tensor."""
        return tuple(move for move in self.axes.moves if move.axis != self.move.axis)

    @cached_property
    def kernel_move(self) -> Move | None:
        """The move of the input axis of a grouped kernel; None: the axes of the tensor move independently."""
        return next((move for move in self.axes.moves if move.within), None)

    @cached_property
    def moved_axes(self) -> tuple[int, ...]:
        """Indices of the tensor's other axes along which a group moves."""
        return tuple(sorted({move.axis for move in self.other_moves}))

    @cached_property
    def has_units_first(self) -> bool:
        """Whether units are the first axis in `units_of`, as in memory, or the last axis."""
        return self.move.axis == 0

    def units_of(self, network_tensor: Tensor) -> Tensor:
        """Arrange one network's tensor as (unit, entry of other moved axes, other entry), or with the units as last
        axis; return it."""
        move = self.move
        if move.within:
            return split_axis(network_tensor, 0, move.within).flatten(3).permute(1, 3, 0, 2).flatten(2)
        split_tensor = split_axis(
            network_tensor.narrow(move.axis, move.offset, self.units * move.span), move.axis, self.units
        )
        unmoved_axes = [i for i in range(network_tensor.ndim) if i != move.axis and i not in self.moved_axes]
        axes_of_part = [i + (i > move.axis) for i in (*self.moved_axes, *unmoved_axes)]
        axes = (
            [move.axis, *axes_of_part, move.axis + 1]
            if self.has_units_first
            else [*axes_of_part, move.axis + 1, move.axis]
        )
        moved_entry_count = prod(network_tensor.shape[i] for i in self.moved_axes)
        shape = (self.units, moved_entry_count, -1) if self.has_units_first else (moved_entry_count, -1, self.units)
        return split_tensor.permute(axes).reshape(shape).contiguous()

    def as_matrices(self, units: Tensor, other_units: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices whose product has the inner products of all pairs of units, (unit, other unit).

        Args:
            units, other_units: the same tensor of two networks, as `units_of` returns tensors.
        """
        if self.has_units_first:
            return units.flatten(1), other_units.flatten(1).T
        return units.flatten(0, 1).T, other_units.flatten(0, 1)

    def select(self, units: Tensor, entry_positions: Tensor, buffer: Tensor) -> Tensor:
        """Select entries of a tensor along its other moved axes; return the selected entries.

        Args:
            units: tensor of the network to match, as `units_of` returns tensors.
            entry_positions: positions of the entries to select.
            buffer: flat memory for the result.
        """
        axis = 1 if self.has_units_first else 0
        shape = (*units.shape[:axis], len(entry_positions), *units.shape[axis + 1 :])
        return torch.index_select(units, axis, entry_positions.to(units.device), out=buffer[: prod(shape)].view(shape))

    def source_positions(self, permutations: Permutations) -> Tensor:
        """Return where each entry of the other moved axes was before the permutation; entries are in the order of
        `units_of`.

        For a grouped kernel, the blocks stay in place; entries move only inside the blocks.
        """
        if len(self.other_moves) == 1 and self.kernel_move is None:
            (move,) = self.other_moves
            if len(permutations[move.group]) == self.axes.shape[move.axis]:
                return permutations[move.group]  # the usual case
        if self.kernel_move is not None:
            groups = {move.group for move in self.other_moves}
            permutations_in_blocks = {g: without_block_moves(permutations[g], self.kernel_move.within) for g in groups}
            return torch.cat([axis_entries(self.axes, axis, permutations_in_blocks) for axis in self.moved_axes])
        positions = torch.zeros(1, dtype=torch.int64)
        for axis in self.moved_axes:
            positions = (
                positions[:, None] * self.axes.shape[axis] + axis_entries(self.axes, axis, permutations)
            ).flatten()
        return positions

    def permute_kernel(self, tensor: Tensor, permutations: Permutations) -> Tensor:
        """Return a grouped kernel with its other axes permuted inside the blocks; the blocks stay in place."""
        kernel = self.kernel_move
        if kernel is None:
            raise ValueError(self.name)
        permutations_in_blocks = {
            move.group: without_block_moves(permutations[move.group], kernel.within) for move in self.other_moves
        }
        for axis in self.moved_axes:
            if axis != kernel.axis:
                tensor = tensor.index_select(
                    axis, axis_entries(self.axes, axis, permutations_in_blocks).to(tensor.device)
                )
        if kernel.axis in self.moved_axes:
            columns = permutations_in_blocks[kernel.group].reshape(kernel.within, -1) % tensor.shape[1]
            columns = columns.repeat_interleave(len(tensor) // kernel.within, 0).to(tensor.device)
            tensor = tensor[torch.arange(len(tensor), device=tensor.device)[:, None], columns]
        return tensor


def split_axis(tensor: Tensor, axis: int, part_count: int) -> Tensor:
    """Return a tensor with one axis split into (parts, rest)."""
    return tensor.reshape(*tensor.shape[:axis], part_count, -1, *tensor.shape[axis + 1 :])


def without_block_moves(permutation: Tensor, block_count: int) -> Tensor:
    """Return a permutation (unit) of units in blocks without its permutation of the blocks."""
    units_by_block = permutation.reshape(block_count, -1)
    return units_by_block[units_by_block[:, 0].argsort()].flatten()


def axis_entries(axes: Axes, axis: int, permutations: Permutations) -> Tensor:
    """Return the old position of each entry of an axis, (entry).

    For the input axis of a grouped kernel, which has only one block's inputs, return the old position of every input of
    all blocks, (input).
    """
    moves = [move for move in axes.moves if move.axis == axis]
    if any(move.within for move in moves):
        return permutations[moves[0].group]
    return source_entries(axes, axis, moves, permutations, torch.device("cpu"))


class Reference:
    """The network that other networks are matched to, prepared for inner products.

    Args:
        table: the network's symmetry table.
        tensors: parameters, name -> (*shape): all tensors that are compared, in one dtype on one device.
    """

    def __init__(self, table: Table, tensors: Mapping[str, Tensor]) -> None:
        self.table, self.tensors = table, dict(tensors)
        terms = [
            Term(name, axes, move, table.groups[move.group].size)
            for name, axes in table.tensors.items()
            if name in tensors
            for move in axes.moves
        ]
        self.terms = {g: tuple(t for t in terms if t.move.group == g and t.other_moves) for g in table.groups}
        self._single = {g: tuple(t for t in terms if t.move.group == g and not t.other_moves) for g in table.groups}
        self.units = {
            term: term.units_of(tensors[term.name]) for group_terms in self.terms.values() for term in group_terms
        }
        largest = max((units.numel() for units in self.units.values()), default=0)
        self.buffers = next(iter(tensors.values())).new_empty(2, largest) if tensors else torch.empty(2, 0)
        self.fixed = {g: self.single_axis_entries(g, tensors) for g in table.groups}
        self.names = {g: {t.name for t in terms if t.move.group == g} for g in table.groups}
        # Group -> groups whose gains change when this group is permuted.
        self.readers = {
            g: {t.move.group for t in terms if any(m.group == g for m in t.other_moves)} for g in table.groups
        }

    def single_axis_entries(self, group: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the entries that no other group moves, (entry, unit)."""
        parts = [
            units.flatten(1).T if term.has_units_first else units.flatten(0, 1)
            for term in self._single[group]
            for units in (term.units_of(tensors[term.name]),)
        ]
        return torch.cat(parts) if parts else next(iter(tensors.values())).new_zeros(0, self.table.groups[group].size)

    def objective(
        self, tensors: Mapping[str, Tensor], permutations: Permutations, tensor_names: Collection[str] | None = None
    ) -> float:
        """Permute the tensors of a network; return their inner product with the reference, summed in float64.

        Args:
            tensors: parameters of the network to match, name -> (*shape).
            permutations: group -> permutation, for all groups.
            tensor_names: names of the tensors in the sum; None for all tensors.
        """
        selected_tensors = {n: t for n, t in tensors.items() if tensor_names is None or n in tensor_names}
        permuted_tensors = permute(self.table, selected_tensors, permutations)
        return sum((inner_product(self.tensors[name], tensor) for name, tensor in permuted_tensors.items()), start=0.0)


class Products:
    """The gains of the groups of one network. Products are cached and updated after permutations.

    Args:
        reference: the network that other networks are matched to.
        tensors: parameters of the network to match, name -> (*shape), like the tensors of the reference.
    """

    def __init__(self, reference: Reference, tensors: Mapping[str, Tensor]) -> None:
        self.reference, self.tensors = reference, tensors
        self.dtype = next((tensor.dtype for tensor in tensors.values()), torch.float32)
        self._units: dict[Term, Tensor] = {}
        self._single: dict[str, Tensor] = {}
        self._seen: dict[Term, list[Tensor]] = {}
        self._rows: dict[Term, Tensor] = {}
        self._products: dict[Term, Tensor] = {}

    def gains(self, group: str, permutations: Permutations, left_out_terms: Collection[Term] = ()) -> Tensor:
        """Return the gain in the objective if new unit u is old unit v, (u, v), with all other permutations fixed.

        Args:
            group: name of the group that moves.
            permutations: group -> permutation, for all groups.
            left_out_terms: terms to leave out of the gain.
        """
        if group not in self._single:
            entries = self.reference.single_axis_entries(group, self.tensors)
            self._single[group] = self.reference.fixed[group].T @ entries
        gain_matrix = self._single[group].clone()
        for term in self.reference.terms[group]:
            if term not in left_out_terms:
                gain_matrix += self._updated_products(term, permutations)
        return gain_matrix

    def _updated_products(self, term: Term, permutations: Permutations) -> Tensor:
        """Return the products of a term, updated by the moves along other axes since the last call."""
        current_permutations, last_permutations = (
            [permutations[move.group] for move in term.other_moves],
            self._seen.get(term),
        )
        if last_permutations is not None and all(
            p is q for p, q in zip(current_permutations, last_permutations, strict=True)
        ):
            return self._products[term]
        self._seen[term], reference_units = current_permutations, self.reference.units[term]
        if term.kernel_move is not None:
            units = term.units_of(term.permute_kernel(self.tensors[term.name], permutations))
            self._products[term] = torch.mm(*term.as_matrices(reference_units, units))
            return self._products[term]
        if term not in self._units:
            self._units[term] = term.units_of(self.tensors[term.name])
        units, (first_buffer, second_buffer) = self._units[term], self.reference.buffers
        source_positions, last_source_positions = term.source_positions(permutations), self._rows.get(term)
        if last_source_positions is not None and units.numel() > _SMALL_TENSOR:
            changed_positions = (source_positions != last_source_positions).nonzero()[:, 0]
            if len(changed_positions) <= _MOST_CHANGED_ROWS * len(source_positions):
                difference = term.select(units, source_positions[changed_positions], first_buffer)
                difference -= term.select(units, last_source_positions[changed_positions], second_buffer)
                self._products[term].addmm_(
                    *term.as_matrices(term.select(reference_units, changed_positions, second_buffer), difference)
                )
                self._rows[term] = source_positions
                return self._products[term]
        self._rows[term] = source_positions
        self._products[term] = torch.mm(
            *term.as_matrices(reference_units, term.select(units, source_positions, first_buffer))
        )
        return self._products[term]


def inner_product(tensor: Tensor, other_tensor: Tensor) -> float:
    """Return the inner product of two tensors, summed in float64."""
    x, y = tensor.flatten(), other_tensor.flatten()
    pairs = (
        (x[i : i + _ENTRIES_AT_ONCE], y[i : i + _ENTRIES_AT_ONCE]) for i in range(0, max(1, len(x)), _ENTRIES_AT_ONCE)
    )
    return float(torch.stack([torch.dot(one.double(), other.double()) for one, other in pairs]).sum())
