"""Minimise a sum of monomials over its scales by balancing.

The sum, called mass, is a convex function of the logarithms of the scales. For one scale, with all other scales fixed,
the best factor of a unit balances the mass that grows with the factor and the mass that shrinks with it (Osborne 1960,
"On pre-conditioning of matrices"): grow * u + shrink / u is smallest at u = sqrt(shrink / grow). A sweep balances all
scales in turn. Sweeps alone balance whole layers against each other only slowly. Therefore a Newton step between sweeps
finds one common factor for each scale.
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
_ADDED_TO_ZEROS = 1e-300  # Number added to a unit's growing and shrinking mass, so that two zeros count as balanced.
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
        like = monomials.constant
        self.monomials = monomials
        self.uses: dict[str, list[_ScaleUse]] = {name: [] for name in monomials.sizes}
        # Name of a scale -> largest sum of its exponents in one monomial.
        self.degree = dict.fromkeys(monomials.sizes, 1.0)
        self.powers_of: dict[Key, Tensor] = {
            (n, 1.0): like.new_ones(len(like), k, 1) for n, k in monomials.sizes.items()
        }
        for i, block in enumerate(monomials.blocks):
            degrees: dict[str, float] = {}
            for on_rows, along, across in ((True, block.rows, block.columns), (False, block.columns, block.rows)):
                for part in along:
                    use = _ScaleUse(i, block.mass, on_rows, along, across, part.power, part.units)
                    self.uses[part.scale].append(use)
                    self.powers_of.setdefault((part.scale, part.power), self.powers_of[part.scale, 1.0])
                    degrees[part.scale] = degrees.get(part.scale, 0.0) + abs(part.power)
            for name, degree in degrees.items():
                self.degree[name] = max(self.degree[name], degree)
        self._powers = {name: [p for n, p in self.powers_of if n == name] for name in monomials.sizes}

    @cached_property
    def powers(self) -> Tensor:
        """The power of each scale in each block, (block, scale)."""
        places = {name: i for i, name in enumerate(self.uses)}
        powers = self.monomials.constant.new_zeros(len(self.monomials.blocks), len(places))
        for i, block in enumerate(self.monomials.blocks):
            for part in (*block.rows, *block.columns):
                powers[i, places[part.scale]] += part.power
        return powers

    def multiply_powers(self, powers_on_axis: PowerProduct) -> Tensor:
        """Return the product of the powers along one axis, (member, cell, 1)."""
        first, *more = (
            self.powers_of[p.scale, p.power] if p.units is None else self._powers_of_units(p) for p in powers_on_axis
        )
        for factor in more:
            first = first * factor
        return first

    def _powers_of_units(self, scale_power: ScalePower) -> Tensor:
        return self.powers_of[scale_power.scale, scale_power.power][:, scale_power.units]

    def sum_monomials(self, use: _ScaleUse) -> Tensor:
        """Sum the monomials of a scale's use over the other axis of the block; return (member, cell, 1)."""
        sums = use.mass
        if use.across and use.on_rows:
            sums = torch.bmm(sums, self.multiply_powers(use.across))
        elif use.across:
            # The product is taken with a row vector from the left, because a product with the transposed matrix would
            # read memory with strides.
            sums = torch.bmm(self.multiply_powers(use.across).mT, sums).mT
        return sums * self.multiply_powers(use.along)

    def multiply_squares(self, scale_name: str, factors: Tensor) -> None:
        """Multiply the squares of a scale by (member, value, 1) or (member, 1, 1)."""
        squares = self.powers_of[scale_name, 1.0] * factors
        for power in self._powers[scale_name]:
            self.powers_of[scale_name, power] = _raise_to_power(squares, power)

    def sum_block(self, block: Block) -> Tensor:
        """Return the sum of all monomials of a block, (member)."""
        sums = torch.bmm(block.mass, self.multiply_powers(block.columns)) if block.columns else block.mass
        return (sums * self.multiply_powers(block.rows)).sum((1, 2))

    def grow_and_shrink(self, scale_name: str, terms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mass that grows and the mass that shrinks with each value of a scale, (member, value, 1) each.

        If the powers of the scale in one monomial add up to more than 1, each power counts by its share. If all squares
        are multiplied by r, grow * r**degree + shrink / r**degree is then an upper bound of the mass (by the inequality
        of arithmetic and geometric means), which is exact at r = 1.

        Args:
            scale_name: name of the scale to balance.
            terms: sums of monomials, one tensor for each use of the scale, as `sum_monomials` returns them.
        """
        sums: list[Tensor | None] = [None, None]
        for use, term in zip(self.uses[scale_name], terms, strict=True):
            share, end = abs(use.power) / self.degree[scale_name], int(use.power < 0)
            term = term if share == 1 else term * share
            if use.units is not None:
                term = torch.zeros_like(self.powers_of[scale_name, 1.0]).index_add_(1, use.units, term)
            present = sums[end]
            sums[end] = term if present is None else present + term
        grow, shrink = (torch.zeros_like(self.powers_of[scale_name, 1.0]) if total is None else total for total in sums)
        return grow, shrink

    def sweep(self, is_frozen: Tensor | None, totals: list[Tensor] | None) -> Tensor:
        """Balance each scale in turn; return the decrease of the mass, (member): a lower bound if a degree exceeds 1.

        Args:
            is_frozen: (member), whether to keep the scales of a member; None: no member is frozen.
            totals: sum (member) of each block, updated in place; None if the sums are not needed.
        """
        changes = []
        for name, uses in self.uses.items():
            if not uses:
                continue
            degree, terms = self.degree[name], [self.sum_monomials(use) for use in uses]
            grow, shrink = ((end + _ADDED_TO_ZEROS).sqrt_() for end in self.grow_and_shrink(name, terms))
            ratio = shrink / grow if degree == 1 else (shrink / grow) ** (1 / degree)
            if is_frozen is not None:
                ratio = torch.where(is_frozen[:, None, None], 1.0, ratio)
            changes.append(grow - shrink)
            self.multiply_squares(name, ratio)
            if totals is not None:
                self._update_totals(uses, terms, ratio, totals)
        decrease = torch.cat(changes, 1).square_().sum((1, 2))
        return decrease if is_frozen is None else decrease.masked_fill(is_frozen, 0.0)

    def _update_totals(self, uses: list[_ScaleUse], terms: list[Tensor], ratio: Tensor, totals: list[Tensor]) -> None:
        blocks = [use.block for use in uses]
        for use, term in zip(uses, terms, strict=True):
            if blocks.count(use.block) > 1:
                totals[use.block] = self.sum_block(self.monomials.blocks[use.block])
            else:
                factors = _raise_to_power(ratio, use.power)
                totals[use.block] = (term * (factors if use.units is None else factors[:, use.units])).sum((1, 2))


def _raise_to_power(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.reciprocal() if power == -1 else values**power


def balance_scales(monomials: Monomials, tolerance: float, most: int) -> BalanceResult:
    """Sweep until the mass is minimal; return the scales, and the history of the search.

    A member is done if its last sweep removed less than `tolerance` of its mass, and all further sweeps together would
    remove less as well, at the rate of the last two sweeps.

    Args:
        monomials: the sum of monomials to minimise. For each unit, some monomials grow with the factor of the unit and
            some shrink, or no monomial depends on the factor.
        tolerance: share of the mass; a member is done when a sweep removes less than this share.
        most: largest number of sweeps over the scales.
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
    history, sweeps, last_decrease = [mass], torch.zeros_like(mass, dtype=torch.int64), mass
    while len(history) <= most and not bool(has_ended.all()):
        is_frozen = has_ended if bool(has_ended.any()) else None
        uses_newton = always_uses_newton or len(history) > _MOST_SWEEPS_WITHOUT_NEWTON
        # The first sweeps may remove nearly all mass; the remaining mass is summed anew, since a difference of two
        # large sums would be inexact.
        totals = [constant] * len(blocks) if uses_newton or len(history) <= _FIRST_SWEEPS else None
        decrease = balancer.sweep(is_frozen, totals)
        if totals is None:
            mass = mass - decrease
        elif uses_newton:
            mass = torch.where(has_ended, mass, _newton_step(balancer, torch.stack(totals, 1), is_frozen) + constant)
        else:
            mass = torch.where(has_ended, mass, sum(totals, constant))
        sweeps += ~has_ended
        history.append(mass)
        has_small_decrease = decrease <= tolerance * mass
        if bool(has_small_decrease.any()):
            # The remaining decrease is estimated as a geometric series, which does not converge while decreases grow.
            remaining = torch.where(decrease < last_decrease, decrease.square() / (last_decrease - decrease), torch.inf)
            has_ended = has_ended | (
                has_small_decrease & ((remaining <= tolerance * mass) | (decrease <= 1e-15 * mass))
            )
        last_decrease = decrease
    return _summarise_result(balancer, torch.stack(history), sweeps, has_ended)


def _newton_step(balancer: Balancer, totals: Tensor, is_frozen: Tensor | None) -> Tensor:
    """Multiply each scale by the common factor that minimises the mass; return the new sum of the blocks, (member).

    Newton's method acts on the logarithms of the factors. Steps that do not lower the mass are halved.

    Args:
        totals: (member, block), the sum of each block.
        is_frozen: (member), whether to keep the scales of a member; None: no member is frozen.
    """
    powers = balancer.powers
    shift, present_totals, sums = totals.new_zeros(len(totals), powers.shape[1]), totals, totals.sum(1)
    identity = torch.eye(powers.shape[1], dtype=totals.dtype, device=totals.device)
    is_active = torch.ones_like(sums, dtype=torch.bool) if is_frozen is None else ~is_frozen
    for _ in range(_MOST_NEWTON_STEPS):
        curvature = (powers.T * present_totals[:, None]) @ powers
        size = 1e-10 * curvature.diagonal(dim1=1, dim2=2).amax(1) + _ADDED_TO_ZEROS
        step = torch.linalg.solve_ex(curvature + size[:, None, None] * identity, -present_totals @ powers)[0]
        largest_change = step.abs().amax(1, keepdim=True).clamp(min=_LARGEST_NEWTON_STEP)
        step = step * (_LARGEST_NEWTON_STEP / largest_change) * is_active[:, None]
        for half in range(_MOST_HALVINGS):
            trial = totals * ((shift + step) @ powers.T).exp()
            trial_sums = trial.sum(1)
            got_worse = ~(trial_sums <= sums)
            if half == _MOST_HALVINGS - 1 or not bool(got_worse.any()):
                break
            step = torch.where(got_worse[:, None], step / 2, step)
        accepted = is_active & ~got_worse
        is_active = accepted & (sums - trial_sums > _LEAST_NEWTON_GAIN * sums)
        shift = torch.where(accepted[:, None], shift + step, shift)
        present_totals = torch.where(accepted[:, None], trial, present_totals)
        sums = torch.where(accepted, trial_sums, sums)
        if not bool(is_active.any()):
            break
    factors = shift.exp()
    for i, name in enumerate(balancer.uses):
        balancer.multiply_squares(name, factors[:, i, None, None])
    return sums


def _summarise_result(balancer: Balancer, history: Tensor, sweeps: Tensor, converged: Tensor) -> BalanceResult:
    zero_sums = torch.zeros_like(balancer.monomials.constant)
    unbalanced, total_flow, squares = zero_sums, zero_sums, {}
    for name, uses in balancer.uses.items():
        grow, shrink = balancer.grow_and_shrink(name, [balancer.sum_monomials(use) for use in uses])
        unbalanced = unbalanced + (grow - shrink).abs().sum((1, 2))
        total_flow = total_flow + (grow + shrink).sum((1, 2))
        squares[name] = torch.where((grow > 0) & (shrink > 0), balancer.powers_of[name, 1.0], 1.0)[..., 0]
    residual = torch.where(total_flow > 0, unbalanced / total_flow, 0.0)
    return BalanceResult(squares, history, sweeps, residual, converged)
