"""Minimise a sum of monomials over its scales by balancing.

The sum, called mass, is a convex function of the logarithms of the scales. For one scale, with all other scales fixed,
the best factor of a unit balances the mass that grows with the factor and the mass that shrinks with it (Osborne 1960,
"On pre-conditioning of matrices"): grow * u + shrink / u is smallest at u = sqrt(shrink / grow). A sweep balances all
scales in turn. Sweeps alone balance whole layers against each other only slowly. Therefore a Newton step between sweeps
finds one common factor for each scale.

This is one file, because one search takes both of its steps in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.monomials import Block, Monomials, PowerProduct, ScalePower

# Largest number of scales, and largest number of entries of a matrix, for which sweeps alone are faster.
_FEW_SCALES, _SMALL_MATRIX = 4, 1 << 15
_MOST_SWEEPS_WITHOUT_NEWTON = 12  # Number of sweeps up to which sweeps without Newton steps are faster.
_FIRST_SWEEPS = 2  # Number of first sweeps, which may remove nearly all of the mass.
_ADDED_TO_ZEROS = 1e-300  # Number added to both masses of a unit, so that two zeros count as balanced.
_MOST_NEWTON_STEPS, _MOST_HALVINGS = 4, 20  # Largest numbers of Newton steps, and of halvings of one step.
_LEAST_NEWTON_GAIN = 1e-3  # Newton's method ends after a step that removes less than this share of the mass.
_LARGEST_NEWTON_STEP = 4.0  # Largest change of the logarithm of a factor in one Newton step.


@dataclass
class BalanceResult:
    """The result of balancing the scales of members.

    Args:
        squares: scale -> (member, value), the squares of the scales.
        history: (sweep, member), the mass before the first sweep, then the mass after each sweep.
        sweeps: (member), number of sweeps.
        residual: (member), how far the scales are from balance: the sum of |growing mass - shrinking mass| over units,
            as a share of the sum of all growing and shrinking masses.
        converged: (member), whether the search ended before the largest number of sweeps, as the mass no longer fell.
    """

    squares: dict[str, Tensor]
    history: Tensor
    sweeps: Tensor
    residual: Tensor
    converged: Tensor


Key = tuple[str, float]


@dataclass(frozen=True)
class _ScaleUse:
    """The use of a scale along one axis of a block.

    Args:
        block: index of the block in the list of blocks.
        mass: tensor of the block's mass.
        on_rows: whether the scale is along the rows.
        along: powers of all scales along the same axis of the block, including this scale.
        across: powers of all scales along the axis of the block that this scale does not multiply.
        power: exponent of the scale along this axis.
        units: (cell), index of the scale's value in each cell; None: cell c has value c.
    """

    block: int
    mass: Tensor
    on_rows: bool
    along: PowerProduct
    across: PowerProduct
    power: float
    units: Tensor | None


class Balancer:
    """Scales of stacked members, and sums of monomials at these scales.

    Vectors are columns, (member, value, 1) or (member, cell, 1), as batched matrix products need them.

    Args:
        monomials: the sum of monomials to minimise.
    """

    def __init__(self, monomials: Monomials) -> None:
        example = monomials.constant
        self.monomials = monomials
        self.uses: dict[str, list[_ScaleUse]] = {name: [] for name in monomials.sizes}
        # Name of a scale -> largest sum of its exponents in one monomial.
        self.degree = dict.fromkeys(monomials.sizes, 1.0)
        self.powers_of: dict[Key, Tensor] = {
            (n, 1.0): example.new_ones(len(example), k, 1) for n, k in monomials.sizes.items()
        }
        for i, block in enumerate(monomials.blocks):
            degree_in_block: dict[str, float] = {}
            for on_rows, along, across in ((True, block.rows, block.columns), (False, block.columns, block.rows)):
                for part in along:
                    scale_use = _ScaleUse(i, block.mass, on_rows, along, across, part.power, part.units)
                    self.uses[part.scale].append(scale_use)
                    self.powers_of.setdefault((part.scale, part.power), self.powers_of[part.scale, 1.0])
                    degree_in_block[part.scale] = degree_in_block.get(part.scale, 0.0) + abs(part.power)
            for name, degree in degree_in_block.items():
                self.degree[name] = max(self.degree[name], degree)
        self._powers = {name: [p for n, p in self.powers_of if n == name] for name in monomials.sizes}

    @cached_property
    def powers(self) -> Tensor:
        """The power of each scale in each block, (block, scale)."""
        column_of_scale = {name: i for i, name in enumerate(self.uses)}
        powers = self.monomials.constant.new_zeros(len(self.monomials.blocks), len(column_of_scale))
        for i, block in enumerate(self.monomials.blocks):
            for part in (*block.rows, *block.columns):
                powers[i, column_of_scale[part.scale]] += part.power
        return powers

    def multiply_powers(self, powers_on_axis: PowerProduct) -> Tensor:
        """Return the product of the powers along one axis, (member, cell, 1)."""
        product, *other_factors = (
            self.powers_of[p.scale, p.power] if p.units is None else self._powers_of_units(p) for p in powers_on_axis
        )
        for factor in other_factors:
            product = product * factor
        return product

    def _powers_of_units(self, scale_power: ScalePower) -> Tensor:
        return self.powers_of[scale_power.scale, scale_power.power][:, scale_power.units]

    def sum_monomials(self, scale_use: _ScaleUse) -> Tensor:
        """Sum the monomials of a scale's use over the other axis of the block; return (member, cell, 1)."""
        sums = scale_use.mass
        if scale_use.across and scale_use.on_rows:
            sums = torch.bmm(sums, self.multiply_powers(scale_use.across))
        elif scale_use.across:
            # The product is taken with a row vector from the left, because a product with the transposed matrix would
            # read memory with strides.
            sums = torch.bmm(self.multiply_powers(scale_use.across).mT, sums).mT
        return sums * self.multiply_powers(scale_use.along)

    def multiply_squared_scale(self, scale_name: str, factors: Tensor) -> None:
        """Multiply the squared values of a scale by factors, (member, value, 1) or (member, 1, 1); update all powers of
        the scale."""
        squared_scale = self.powers_of[scale_name, 1.0] * factors
        for power in self._powers[scale_name]:
            self.powers_of[scale_name, power] = _raise_to_power(squared_scale, power)

    def sum_block(self, block: Block) -> Tensor:
        """Return the sum of all monomials of a block, (member)."""
        row_sums = torch.bmm(block.mass, self.multiply_powers(block.columns)) if block.columns else block.mass
        return (row_sums * self.multiply_powers(block.rows)).sum((1, 2))

    def growing_and_shrinking_mass(self, scale_name: str, sums_of_uses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mass that grows and the mass that shrinks with each value of a scale, (member, value, 1) each.

        If the powers of the scale in one monomial add up to more than 1, each power counts by its share. If all squares
        are multiplied by r, grow * r**degree + shrink / r**degree is then an upper bound of the mass (by the inequality
        of arithmetic and geometric means), which is exact at r = 1.

        Args:
            scale_name: name of the scale to balance.
            sums_of_uses: sums of monomials, one tensor for each use of the scale, as `sum_monomials` returns them.
        """
        growing_and_shrinking: list[Tensor | None] = [None, None]
        for scale_use, sum_of_use in zip(self.uses[scale_name], sums_of_uses, strict=True):
            share, is_shrinking = abs(scale_use.power) / self.degree[scale_name], int(scale_use.power < 0)
            sum_of_use = sum_of_use if share == 1 else sum_of_use * share
            if scale_use.units is not None:
                sum_of_use = torch.zeros_like(self.powers_of[scale_name, 1.0]).index_add_(
                    1, scale_use.units, sum_of_use
                )
            present_sum = growing_and_shrinking[is_shrinking]
            growing_and_shrinking[is_shrinking] = sum_of_use if present_sum is None else present_sum + sum_of_use
        growing_mass, shrinking_mass = (
            torch.zeros_like(self.powers_of[scale_name, 1.0]) if mass_sum is None else mass_sum
            for mass_sum in growing_and_shrinking
        )
        return growing_mass, shrinking_mass

    def sweep(self, is_frozen: Tensor | None, block_sums: list[Tensor] | None) -> Tensor:
        """Balance each scale in turn; return the decrease of the mass, (member): a lower bound if a degree exceeds 1.

        Args:
            is_frozen: (member), whether to keep the scales of a member; None: no member is frozen.
            block_sums: sum (member) of each block, updated in place; None if the sums are not needed.
        """
        root_differences = []
        for name, uses in self.uses.items():
            if not uses:
                continue
            degree, sums_of_uses = self.degree[name], [self.sum_monomials(scale_use) for scale_use in uses]
            growing_root, shrinking_root = (
                (mass + _ADDED_TO_ZEROS).sqrt_() for mass in self.growing_and_shrinking_mass(name, sums_of_uses)
            )
            squared_factors = (
                shrinking_root / growing_root if degree == 1 else (shrinking_root / growing_root) ** (1 / degree)
            )
            if is_frozen is not None:
                squared_factors = torch.where(is_frozen[:, None, None], 1.0, squared_factors)
            root_differences.append(growing_root - shrinking_root)
            self.multiply_squared_scale(name, squared_factors)
            if block_sums is not None:
                self._update_block_sums(uses, sums_of_uses, squared_factors, block_sums)
        decrease = torch.cat(root_differences, 1).square_().sum((1, 2))
        return decrease if is_frozen is None else decrease.masked_fill(is_frozen, 0.0)

    def _update_block_sums(
        self, uses: list[_ScaleUse], sums_of_uses: list[Tensor], squared_factors: Tensor, block_sums: list[Tensor]
    ) -> None:
        block_indices = [scale_use.block for scale_use in uses]
        for scale_use, sum_of_use in zip(uses, sums_of_uses, strict=True):
            if block_indices.count(scale_use.block) > 1:
                block_sums[scale_use.block] = self.sum_block(self.monomials.blocks[scale_use.block])
            else:
                factors = _raise_to_power(squared_factors, scale_use.power)
                block_sums[scale_use.block] = (
                    sum_of_use * (factors if scale_use.units is None else factors[:, scale_use.units])
                ).sum((1, 2))


def _raise_to_power(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.reciprocal() if power == -1 else values**power


def balance_scales(monomials: Monomials, tolerance: float, most_sweeps: int) -> BalanceResult:
    """Sweep until the mass is minimal; return the scales, and the history of the search.

    A member is done if its last sweep removed less than `tolerance` of its mass, and all further sweeps together would
    remove less as well, at the rate of the last two sweeps.

    Args:
        monomials: the sum of monomials to minimise. For each unit, some monomials grow with the factor of the unit and
            some shrink, or no monomial depends on the factor.
        tolerance: share of the mass; a member is done when a sweep removes less than this share.
        most_sweeps: largest number of sweeps over the scales.
    """
    balancer = Balancer(monomials)
    constant, blocks = monomials.constant, monomials.blocks
    mass = sum((balancer.sum_block(block) for block in blocks), constant)
    is_large = len(monomials.sizes) > _FEW_SCALES or any(
        block.mass.shape[1:].numel() > _SMALL_MATRIX for block in blocks
    )
    # If the sums of the blocks are not used, the decrease of a sweep is exact only for degree 1.
    always_uses_newton = is_large or any(degree != 1 for degree in balancer.degree.values())
    has_ended = torch.full_like(mass, not blocks, dtype=torch.bool)
    masses, sweep_counts, last_decrease = [mass], torch.zeros_like(mass, dtype=torch.int64), mass
    while len(masses) <= most_sweeps and not bool(has_ended.all()):
        is_frozen = has_ended if bool(has_ended.any()) else None
        uses_newton = always_uses_newton or len(masses) > _MOST_SWEEPS_WITHOUT_NEWTON
        # The first sweeps may remove nearly all mass; the remaining mass is summed anew, since a difference of two
        # large sums would be inexact.
        block_sums = [constant] * len(blocks) if uses_newton or len(masses) <= _FIRST_SWEEPS else None
        decrease = balancer.sweep(is_frozen, block_sums)
        if block_sums is None:
            mass = mass - decrease
        elif uses_newton:
            mass = torch.where(
                has_ended, mass, _newton_step(balancer, torch.stack(block_sums, 1), is_frozen) + constant
            )
        else:
            mass = torch.where(has_ended, mass, sum(block_sums, constant))
        sweep_counts += ~has_ended
        masses.append(mass)
        has_small_decrease = decrease <= tolerance * mass
        if bool(has_small_decrease.any()):
            # The remaining decrease is estimated as a geometric series, which does not converge while decreases grow.
            remaining_decrease = torch.where(
                decrease < last_decrease, decrease.square() / (last_decrease - decrease), torch.inf
            )
            has_ended = has_ended | (
                has_small_decrease & ((remaining_decrease <= tolerance * mass) | (decrease <= 1e-15 * mass))
            )
        last_decrease = decrease
    return _summarise_result(balancer, torch.stack(masses), sweep_counts, has_ended)


def _newton_step(balancer: Balancer, block_sums: Tensor, is_frozen: Tensor | None) -> Tensor:
    """Multiply each scale by the common factor that minimises the mass; return the new sum of the blocks, (member).

    Newton's method acts on the logarithms of the factors. Steps that do not lower the mass are halved.

    Args:
        block_sums: (member, block), the sum of each block.
        is_frozen: (member), whether to keep the scales of a member; None: no member is frozen.
    """
    powers = balancer.powers
    log_factors, present_block_sums, masses = (
        block_sums.new_zeros(len(block_sums), powers.shape[1]),
        block_sums,
        block_sums.sum(1),
    )
    identity = torch.eye(powers.shape[1], dtype=block_sums.dtype, device=block_sums.device)
    is_active = torch.ones_like(masses, dtype=torch.bool) if is_frozen is None else ~is_frozen
    for _ in range(_MOST_NEWTON_STEPS):
        curvature = (powers.T * present_block_sums[:, None]) @ powers
        damping = 1e-10 * curvature.diagonal(dim1=1, dim2=2).amax(1) + _ADDED_TO_ZEROS
        step = torch.linalg.solve_ex(curvature + damping[:, None, None] * identity, -present_block_sums @ powers)[0]
        largest_change = step.abs().amax(1, keepdim=True).clamp(min=_LARGEST_NEWTON_STEP)
        step = step * (_LARGEST_NEWTON_STEP / largest_change) * is_active[:, None]
        for halving in range(_MOST_HALVINGS):
            trial_block_sums = block_sums * ((log_factors + step) @ powers.T).exp()
            trial_masses = trial_block_sums.sum(1)
            is_worse = ~(trial_masses <= masses)
            if halving == _MOST_HALVINGS - 1 or not bool(is_worse.any()):
                break
            step = torch.where(is_worse[:, None], step / 2, step)
        is_accepted = is_active & ~is_worse
        is_active = is_accepted & (masses - trial_masses > _LEAST_NEWTON_GAIN * masses)
        log_factors = torch.where(is_accepted[:, None], log_factors + step, log_factors)
        present_block_sums = torch.where(is_accepted[:, None], trial_block_sums, present_block_sums)
        masses = torch.where(is_accepted, trial_masses, masses)
        if not bool(is_active.any()):
            break
    squared_factors = log_factors.exp()
    for i, name in enumerate(balancer.uses):
        balancer.multiply_squared_scale(name, squared_factors[:, i, None, None])
    return masses


def _summarise_result(balancer: Balancer, history: Tensor, sweeps: Tensor, converged: Tensor) -> BalanceResult:
    zero_sums = torch.zeros_like(balancer.monomials.constant)
    unbalanced_mass, moving_mass, squared_scales = zero_sums, zero_sums, {}
    for name, uses in balancer.uses.items():
        growing_mass, shrinking_mass = balancer.growing_and_shrinking_mass(
            name, [balancer.sum_monomials(scale_use) for scale_use in uses]
        )
        unbalanced_mass = unbalanced_mass + (growing_mass - shrinking_mass).abs().sum((1, 2))
        moving_mass = moving_mass + (growing_mass + shrinking_mass).sum((1, 2))
        squared_scales[name] = torch.where(
            (growing_mass > 0) & (shrinking_mass > 0), balancer.powers_of[name, 1.0], 1.0
        )[..., 0]
    residual = torch.where(moving_mass > 0, unbalanced_mass / moving_mass, 0.0)
    return BalanceResult(squared_scales, history, sweeps, residual, converged)
