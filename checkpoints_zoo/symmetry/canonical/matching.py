"""Match one network to a reference: permute group after group to raise the inner product of the weights.

A visit finds the best permutation of one group, and of the groups whose blocks it moves, while all other groups stay.
A visit solves a linear assignment problem: find the permutation of a matrix's columns with the largest sum on the
diagonal.

This is one file, because a visit needs all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations as orders

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry.canonical.products import Permutations, Products, Reference, Term, split_axis
from checkpoints_zoo.symmetry.gains import gains_of, tensors_of_shifts
from checkpoints_zoo.symmetry.table import Table

STATISTIC_ROLES = ("mean", "variance")
_LEAST_GAIN = 1e-12  # Smallest gain of a visit that counts, as a share of the product of both networks' norms.
_MOST_UNITS_TO_TRY_ALL = 3  # Number of units in a block up to which all orders are tried.
_SMALL_GROUP = 96  # Number of units below which scipy's solver alone is faster.
_SMOOTHING_STAGES = (
    (0.1, 10),
    (0.03, 10),
)  # (smoothing in standard deviations of the gains, number of steps) of each stage.
_LEAST_LOGARITHM = -80.0  # Logarithm of the smallest number in use, which float32 can represent.
Matrix = NDArray[np.float32] | NDArray[np.float64]
Assignment = NDArray[np.int64]
OrdersInBlocks = dict[
    str, NDArray[np.int64]
]  # Group -> (new unit u of the mover, old unit v, place): the order inside the block of v if v becomes u.


@dataclass(frozen=True)
class MemberMatch:
    """The result of matching one member, one row of `Matching`."""

    permutations: Permutations
    sweeps: int
    visits: int
    converged: bool


class Matcher:
    """One reference, prepared once for all members.

    Args:
        table: the network's symmetry table.
        reference: parameters of the reference, name -> (*shape): all tensors that the matching compares, in one dtype.
        name_in_errors: name of the reference in error texts.

    Raises:
        DamagedError: a weight is not finite.
    """

    def __init__(self, table: Table, reference: Mapping[str, Tensor], name_in_errors: str = "the reference") -> None:
        self._table, self._reference, self._families = table, Reference(table, reference), Families(table)
        self._l2_norm = l2_norm(reference, name_in_errors)
        above, below = self._families.above, self._families.below
        # Group -> groups to visit again after this group was permuted.
        self._groups_to_revisit = {
            group: {h for reader in readers for h in (reader, *above[reader])}
            for group, readers in self._reference.readers.items()
        }
        self._linear = {g: not below[g] and g not in self._reference.readers[g] for g in table.groups}

    def match(
        self,
        params: Mapping[str, Tensor],
        start_permutations: Mapping[str, Tensor],
        seed: int,
        most_sweeps: int,
        name_in_errors: str,
    ) -> MemberMatch:
        """Match one network; return its permutations.

        Args:
            params: parameters of the network, name -> (*shape), in the reference's dtype and on its device.
            start_permutations: group -> permutation to start from, (unit).
            seed: seed of the random order in which groups are visited.
            most_sweeps: largest number of sweeps over the groups.
            name_in_errors: name of the network in error texts.

        Raises:
            DamagedError: a weight is not finite.
        """
        products = Products(self._reference, params)
        norm_product = self._l2_norm * l2_norm(params, name_in_errors)
        permutations = {
            g: start_permutations[g].cpu() if g in start_permutations else torch.arange(n.size)
            for g, n in self._table.groups.items()
        }
        group_names, generator = list(permutations), np.random.default_rng(seed)
        groups_to_visit, sweeps, visits = set(group_names), 0, 0
        while groups_to_visit and sweeps < most_sweeps:
            sweeps += 1
            for group in (group_names[i] for i in generator.permutation(len(group_names))):
                if group not in groups_to_visit:
                    continue
                groups_to_visit.discard(group)
                visits += 1
                for name in self._improve_group(products, group, permutations, norm_product):
                    groups_to_visit |= self._groups_to_revisit[name]
        return MemberMatch(permutations, sweeps, visits, not groups_to_visit)

    def objective(self, params: Mapping[str, Tensor], permutations: Permutations) -> float:
        """Return the inner product of the reference and a permuted network, in float64."""
        return self._reference.objective(params, permutations)

    def _improve_group(
        self, products: Products, group: str, permutations: Permutations, norm_product: float
    ) -> list[str]:
        """Permute a group, and the groups whose blocks it moves, if that raises the objective; return the permuted
        groups."""
        best_permutations, gain = best_move(products, self._families, group, permutations)
        permuted_groups = [name for name, p in best_permutations.items() if not torch.equal(p, permutations[name])]
        if not permuted_groups:
            return []
        # Products are rounded. A small gain, or a gain of several groups, is therefore computed exactly.
        rounding_error = torch.finfo(products.dtype).eps * norm_product
        if not self._linear[group] or gain <= rounding_error:
            group_names = {name for group in permuted_groups for name in self._reference.names[group]}
            objective_before, objective_after = (
                self._reference.objective(products.tensors, p, group_names)
                for p in (permutations, permutations | best_permutations)
            )
            gain = objective_after - objective_before
            if gain <= _LEAST_GAIN * norm_product:
                return []
        permutations |= {name: best_permutations[name] for name in permuted_groups}
        return permuted_groups


def matched_tensors(table: Table, params: Mapping[str, Tensor], name_in_errors: str) -> dict[str, Tensor]:
    """Return the tensors that the matching compares: all permuted tensors except statistics and integers; for networks
    with attention, all tensors that a symmetry changes."""
    result = {}
    changed = tensors_of_shifts(table, table.shifts) | gains_of(table)
    for name, axes in table.tensors.items():
        is_changed = bool(table.is_continuous and (axes.turns or axes.powers or axes.signs or name in changed))
        if not (axes.moves or is_changed) or axes.role in STATISTIC_ROLES:
            continue
        if name not in params:
            raise LayoutError(
                f"tensor {name!r} of the {name_in_errors}",
                expected=f"it, as {table.network} has it",
                found="none",
                tensor=name,
            )
        if params[name].is_floating_point():
            result[name] = params[name].detach()
    return result


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype for computations: float64 if one of the dtypes is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def l2_norm(params: Mapping[str, Tensor], name_in_errors: str) -> float:
    """Return the L2 norm of all weights together.

    Raises:
        DamagedError: a weight is not finite.
        UsageError: the weights are so large that their squares are not finite.
    """
    norms = [torch.linalg.vector_norm(tensor) for tensor in params.values()]
    norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    norm_limit = torch.finfo(norms[0].dtype).max ** 0.5 if norms else 1.0
    if norm < norm_limit:
        return norm
    for name, tensor in params.items():
        if not bool(tensor.isfinite().all()):
            raise DamagedError(
                f"tensor {name!r} of {name_in_errors}", expected="finite weights", found="others", tensor=name
            )
    raise UsageError(
        f"weights of {name_in_errors}",
        expected=f"a norm below {norm_limit:.2g}, so that products are finite",
        found=f"{norm:.3g}",
        do="Give them in float64",
    )


class Families:
    """The tree of groups: the children of a group have blocks that the group moves.

    Args:
        table: the network's symmetry table.
    """

    def __init__(self, table: Table) -> None:
        self.groups = table.groups
        self.children = {g: [c.name for c in table.groups.values() if c.mover == g] for g in table.groups}
        self.above: dict[str, tuple[str, ...]] = {}
        for name in table.groups:
            ancestors, mover = [], table.groups[name].mover
            while mover is not None:
                ancestors.append(mover)
                mover = table.groups[mover].mover
            self.above[name] = tuple(ancestors)
        self.below = {g: tuple(c for c in table.groups if g in self.above[c]) for g in table.groups}

    def common_ancestor(self, group: str, other_group: str) -> str | None:
        """Return the closest common ancestor of two groups; None if there is none."""
        return next((g for g in self.above[group] if g in self.above[other_group]), None)


def best_move(
    products: Products, families: Families, group: str, permutations: Permutations
) -> tuple[Permutations, float]:
    """Return the best permutations of a group and of its descendants, and the gain.

    The blocks of the group stay in place. For groups with blocks that the visited group moves, the best order inside a
    block is found for each pair of an old and a new place of the block. If a grouped kernel connects two groups, the
    order of the later group is chosen for the best order of the earlier group.

    Args:
        products: inner products of the reference and the matched network.
        families: the tree of groups.
        group: the group to visit.
        permutations: group -> present permutation, for all groups.
    """
    gains, orders_in_blocks = _Subtree(products, families, group, permutations).solve(group)
    size, block_count = families.groups[group].size, families.groups[group].blocks
    width = size // block_count
    new_permutation = np.empty(size, dtype=np.int64)
    for block in range(block_count):
        old_block = int(permutations[group][block * width]) // width if block_count > 1 else 0
        new_slice, old_slice = (
            slice(block * width, (block + 1) * width),
            slice(old_block * width, (old_block + 1) * width),
        )
        new_permutation[new_slice] = old_block * width + solve_assignment(gains[new_slice, old_slice])
    best_permutations = {group: torch.from_numpy(new_permutation)}
    for name, inner_orders in orders_in_blocks.items():
        child_permutation = (
            inner_orders[np.arange(size), new_permutation] + new_permutation[:, None] * inner_orders.shape[-1]
        )
        best_permutations[name] = torch.from_numpy(child_permutation.flatten())
    unit_numbers, old_permutation = np.arange(size), permutations[group].numpy()
    return best_permutations, float(
        (gains[unit_numbers, new_permutation] - gains[unit_numbers, old_permutation]).sum(dtype=np.float64)
    )


class _Subtree:
    """A group with all its descendants in the tree of groups."""

    def __init__(self, products: Products, families: Families, top_group: str, permutations: Permutations) -> None:
        self._products, self._families, self._permutations = products, families, permutations
        self._connecting_kernels = _kernels_connecting_groups(products.reference, families, top_group)
        self._left_out_terms = [
            term for _, earlier_term, later_term in self._connecting_kernels for term in (earlier_term, later_term)
        ]
        self._kernel_gains: dict[str, Matrix] = {}

    def solve(self, group: str) -> tuple[Matrix, OrdersInBlocks]:
        """Return the best gain if new unit u is old unit v, (u, v), and the orders inside blocks that reach this
        gain."""
        gains = self._products.gains(group, self._permutations, self._left_out_terms)
        gain_matrix: Matrix = gains.cpu().numpy()
        if group in self._kernel_gains:
            gain_matrix = gain_matrix + self._kernel_gains[group]
        orders_in_blocks: OrdersInBlocks = {}
        for child in self._families.children[group]:
            for common_group, earlier_term, later_term in self._connecting_kernels:
                if common_group == group and (
                    later_term.move.group == child or child in self._families.above[later_term.move.group]
                ):
                    kernel_gain = _kernel_gains(self._products, later_term, orders_in_blocks[earlier_term.move.group])
                    self._kernel_gains[later_term.move.group] = (
                        self._kernel_gains.get(later_term.move.group, 0) + kernel_gain
                    )
            child_gains, child_orders = self.solve(child)
            best_gains_of_child, order_of_child = best_orders(child_gains, len(gain_matrix))
            gain_matrix = gain_matrix + best_gains_of_child
            orders_in_blocks[child] = order_of_child
            orders_in_blocks |= {
                name: _nest_orders(order_of_child, inner_orders) for name, inner_orders in child_orders.items()
            }
        return gain_matrix, orders_in_blocks


def best_orders(gains: Matrix, block_count: int) -> tuple[Matrix, NDArray[np.int64]]:
    """Return for each new and old place of a block the largest sum of gains inside the block, (new, old), and the order
    of units with this sum, (new, old, unit).

    Args:
        gains: gain of each move of an old unit to a new place, (new unit, old unit).
        block_count: number of blocks of the units.
    """
    width = len(gains) // block_count
    gains_of_blocks = gains.reshape(block_count, width, block_count, width).transpose(0, 2, 1, 3)
    if width <= _MOST_UNITS_TO_TRY_ALL:
        all_orders = np.array(list(orders(range(width))))
        gain_sums = gains_of_blocks[:, :, np.arange(width), all_orders].sum(-1)
        return gain_sums.max(-1), all_orders[gain_sums.argmax(-1)]
    best_order = np.array(
        [
            [solve_assignment(block_gains) for block_gains in gains_of_new_block]
            for gains_of_new_block in gains_of_blocks
        ]
    )
    return np.take_along_axis(gains_of_blocks, best_order[..., None], -1)[..., 0].sum(-1), best_order


def _nest_orders(mover_orders: NDArray[np.int64], child_orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the orders inside the units of a mover, made from the orders inside the units of its child group, (new,
    old, child unit * place)."""
    block_count, width, child_width = len(mover_orders), mover_orders.shape[-1], child_orders.shape[-1]
    new_units = np.arange(block_count)[:, None, None] * width + np.arange(width)
    old_units = np.arange(block_count)[None, :, None] * width + mover_orders
    result: NDArray[np.int64] = child_orders[new_units, old_units] + mover_orders[..., None] * child_width
    return result.reshape(block_count, block_count, width * child_width)


def _kernels_connecting_groups(
    reference: Reference, families: Families, top_group: str
) -> Sequence[tuple[str, Term, Term]]:
    """Return grouped kernels between two groups with a common ancestor: the ancestor, and the terms of both groups."""
    if len(families.below[top_group]) < 2:
        return ()
    groups_in_order = (top_group, *families.below[top_group])
    result = []
    for later_term in (
        term for group in groups_in_order for term in reference.terms[group] if term.kernel_move is not None
    ):
        for earlier_term in (
            term for group in groups_in_order for term in reference.terms[group] if term.name == later_term.name
        ):
            common_group = families.common_ancestor(earlier_term.move.group, later_term.move.group)
            if len(later_term.axes.moves) != 2 or later_term.kernel_move is None or common_group not in groups_in_order:
                continue
            first_child, second_child = (
                _child_leading_to_group(families, common_group, term.move.group) for term in (earlier_term, later_term)
            )
            if families.groups[common_group].size == later_term.kernel_move.within and groups_in_order.index(
                first_child
            ) < groups_in_order.index(second_child):
                result.append((common_group, earlier_term, later_term))
    return result


def _child_leading_to_group(families: Families, ancestor: str, group: str) -> str:
    """Return the child of `ancestor` on the path to `group` in the tree of groups."""
    group_and_ancestors = (group, *families.above[group])
    return group_and_ancestors[group_and_ancestors.index(ancestor) - 1]


def _kernel_gains(products: Products, later_term: Term, block_orders: NDArray[np.int64]) -> Matrix:
    """Return the gains along the later axis of a grouped kernel, given the best order of its other axis.

    Args:
        products: inner products of the reference and the matched network.
        later_term: the term of the later axis of the kernel.
        block_orders: orders inside the blocks of the kernel's other axis, (new block, old block, place).
    """
    block_count, axis = len(block_orders), 1 - later_term.move.axis
    reference_units, units = (
        split_axis(tensors[later_term.name], 0, block_count).flatten(3)
        for tensors in (products.reference.tensors, products.tensors)
    )
    if axis == 0:
        reference_units, units = reference_units.transpose(1, 2), units.transpose(1, 2)
    gain_rows = []
    for u, orders_of_new_block in enumerate(torch.from_numpy(block_orders).to(units.device)):
        moved_units = units[torch.arange(block_count, device=units.device)[:, None], :, orders_of_new_block].transpose(
            1, 2
        )
        gain_rows.append(reference_units[u].flatten(1) @ moved_units.flatten(0, 1).flatten(1).T)
    result: Matrix = torch.cat(gain_rows).cpu().numpy().astype(np.float64)
    return result


def solve_assignment(gains: Matrix) -> Assignment:
    """Return the permutation p that maximises the sum of gains[u, p[u]], (unit).

    scipy solves the assignment problem exactly. For large matrices, a number is first subtracted from each row and each
    column. The subtraction changes all sums by the same amount, and saves most of the search if the numbers are nearly
    the dual solution.

    Args:
        gains: matrix of finite numbers, (unit, unit).

    >>> solve_assignment(np.array([[1.0, 2.0], [3.0, 5.0]])).tolist()
    [0, 1]
    """
    # scipy.optimize is imported here because it is slow to import and rarely needed.
    from scipy.optimize import linear_sum_assignment

    costs = -gains.astype(np.float64) if len(gains) < _SMALL_GROUP else _reduced_costs(gains)
    places: Assignment = linear_sum_assignment(costs)[1].astype(np.int64, copy=False)
    return places


def _reduced_costs(gains: Matrix) -> NDArray[np.float64]:
    """Return the costs (negative gains) after a number is subtracted from each row and each column."""
    exact_gains = torch.from_numpy(gains)
    row_numbers, column_numbers = smoothed_potentials(exact_gains)
    costs = row_numbers[:, None] - exact_gains
    costs += column_numbers
    costs -= costs.amin(1, keepdim=True)
    result: NDArray[np.float64] = costs.numpy()
    return result


def smoothed_potentials(gains: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number for each row and each column, (unit) each, in float64, whose sums are slightly above the gains.

    The numbers solve the assignment problem smoothed by entropy (Cuturi 2013, arXiv 1306.0895), by Sinkhorn iterations
    in float32.

    Args:
        gains: (unit, unit).
    """
    largest, spread = gains.amax(1), float(gains.std(correction=0))
    row_potentials, column_potentials = largest.double(), torch.zeros(len(gains), dtype=torch.float64)
    if not 0 < spread < float("inf"):
        return row_potentials, column_potentials
    scaled_gains = (gains - largest[:, None]).div_(spread).float()
    scaled_rows, scaled_columns = torch.zeros(2, len(gains))
    for smoothing, steps in _SMOOTHING_STAGES:
        kernel = scaled_gains - scaled_rows[:, None]
        kernel -= scaled_columns
        kernel.div_(smoothing).clamp_(_LEAST_LOGARITHM, -_LEAST_LOGARITHM).exp_()
        column_factors = torch.ones_like(scaled_columns)
        for _ in range(steps):
            row_factors = torch.mv(kernel, column_factors).reciprocal_()
            column_factors = torch.mv(kernel.T, row_factors).reciprocal_()
        scaled_rows, scaled_columns = (
            scaled_rows - smoothing * row_factors.log(),
            scaled_columns - smoothing * column_factors.log(),
        )
    result = row_potentials + spread * scaled_rows.double(), spread * scaled_columns.double()
    return result if all(bool(part.isfinite().all()) for part in result) else (row_potentials, column_potentials)
