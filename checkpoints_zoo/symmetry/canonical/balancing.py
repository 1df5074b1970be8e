"""The scales that make a sum of monomials smallest, found by balancing.

The mass is a convex function of the logarithms of the scales. Where all scales but one are held, the best value of
each of its units makes what grows with it and what shrinks with it equal (Osborne 1960, "On pre-conditioning of
matrices"): out * u + in / u is smallest at u = sqrt(in / out). Sweeps over all scales do so in turn. What they are
slow at are differences between whole layers: between sweeps, one factor a scale is found by Newton's method.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.monomials import Block, Monomials, Part, Side

_FEW, _SMALL = 4, 1 << 15  # with so few scales and such small matrices, sweeps alone are faster,
_MANY = 12  # unless they take more than this
_DROPS = 2  # sweeps that may take nearly all of the mass
_TINY = 1e-300  # added to both ends of a unit: 0 and 0 are balanced
_NEWTON, _HALVINGS = 4, 20  # steps at most
_WORTH = 1e-3  # of the mass: a step that takes less is the last
_STEP = 4.0  # the most that one Newton step changes the logarithm of a factor


@dataclass
class Balanced:
    """Where balancing ended.

    Args:
        squares: scale -> (member, value), the squares of the scales.
        history: (sweep, member), the mass before the first sweep and after each.
        sweeps: (member), how many a member took.
        residual: (member), the sum of |growing - shrinking| over units, as a share of the sum of both.
        converged: (member), whether the stop rule was met.
    """

    squares: dict[str, Tensor]
    history: Tensor
    sweeps: Tensor
    residual: Tensor
    converged: Tensor


Key = tuple[str, float]


@dataclass(frozen=True)
class _Use:
    """A scale on one side of a block.

    Args:
        block: the block's position.
        mass: the block's.
        on_rows: which side.
        own, other: what multiplies the cells of this side, and of the other.
        power: of the scale.
        units: as in `Part`.
    """

    block: int
    mass: Tensor
    on_rows: bool
    own: Side
    other: Side
    power: float
    units: Tensor | None


class Balancer:
    """Scales of stacked members, and sums of monomials at these scales.

    Vectors are columns, (member, value, 1) or (member, cell, 1): what batched products take and give.

    Args:
        monomials: what to make small.
    """

    def __init__(self, monomials: Monomials) -> None:
        like = monomials.constant
        self.monomials = monomials
        self.uses: dict[str, list[_Use]] = {name: [] for name in monomials.sizes}
        self.degree = dict.fromkeys(monomials.sizes, 1.0)  # the most that a scale's powers add up to in a monomial
        self.raised: dict[Key, Tensor] = {(n, 1.0): like.new_ones(len(like), k, 1) for n, k in monomials.sizes.items()}
        for i, block in enumerate(monomials.blocks):
            degrees: dict[str, float] = {}
            for on_rows, own, other in ((True, block.rows, block.columns), (False, block.columns, block.rows)):
                for part in own:
                    use = _Use(i, block.mass, on_rows, own, other, part.power, part.units)
                    self.uses[part.scale].append(use)
                    self.raised.setdefault((part.scale, part.power), self.raised[part.scale, 1.0])
                    degrees[part.scale] = degrees.get(part.scale, 0.0) + abs(part.power)
            for name, degree in degrees.items():
                self.degree[name] = max(self.degree[name], degree)
        self._powers = {name: [p for n, p in self.raised if n == name] for name in monomials.sizes}

    @cached_property
    def powers(self) -> Tensor:
        """Each block's powers of whole scales, (block, scale)."""
        places = {name: i for i, name in enumerate(self.uses)}
        powers = self.monomials.constant.new_zeros(len(self.monomials.blocks), len(places))
        for i, block in enumerate(self.monomials.blocks):
            for part in (*block.rows, *block.columns):
                powers[i, places[part.scale]] += part.power
        return powers

    def product(self, side: Side) -> Tensor:
        """Multiply the powers along a side that has some; return (member, cell, 1)."""
        first, *more = (self.raised[p.scale, p.power] if p.units is None else self._taken(p) for p in side)
        for factor in more:
            first = first * factor
        return first

    def _taken(self, part: Part) -> Tensor:
        return self.raised[part.scale, part.power][:, part.units]

    def terms(self, use: _Use) -> Tensor:
        """Sum the monomials of a use over the other side; return (member, cell, 1)."""
        sums = use.mass
        if use.other and use.on_rows:
            sums = torch.bmm(sums, self.product(use.other))
        elif use.other:
            # As a row from the left: a transposed matrix is read across.
            sums = torch.bmm(self.product(use.other).mT, sums).mT
        return sums * self.product(use.own)

    def multiply(self, name: str, factors: Tensor) -> None:
        """Multiply the squares of a scale by (member, value, 1) or (member, 1, 1)."""
        squares = self.raised[name, 1.0] * factors
        for power in self._powers[name]:
            self.raised[name, power] = _raised(squares, power)

    def total(self, block: Block) -> Tensor:
        """Return a block's sum (member)."""
        sums = torch.bmm(block.mass, self.product(block.columns)) if block.columns else block.mass
        return (sums * self.product(block.rows)).sum((1, 2))

    def ends(self, name: str, terms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Sum what grows and what shrinks with each value of a scale; return both, (member, value, 1).

        Where powers of the scale in one monomial add up to more than 1, each is counted by its share: then
        grow * r**degree + shrink / r**degree bounds the mass at squares r times these from above (the inequality of
        arithmetic and geometric means), and is the mass at r = 1.

        Args:
            terms: of its uses.
        """
        sums: list[Tensor | None] = [None, None]
        for use, term in zip(self.uses[name], terms, strict=True):
            share, end = abs(use.power) / self.degree[name], int(use.power < 0)
            term = term if share == 1 else term * share
            if use.units is not None:
                term = torch.zeros_like(self.raised[name, 1.0]).index_add_(1, use.units, term)
            known = sums[end]
            sums[end] = term if known is None else known + term
        grow, shrink = (torch.zeros_like(self.raised[name, 1.0]) if total is None else total for total in sums)
        return grow, shrink

    def sweep(self, frozen: Tensor | None, totals: list[Tensor] | None) -> Tensor:
        """Balance each scale in turn; return the decrease (member) of the mass, a lower bound where degrees pass 1.

        Args:
            frozen: (member), who keeps the present scales; None: nobody.
            totals: each block's sum (member), which is brought up to date; None where they are not needed.
        """
        changes = []
        for name, uses in self.uses.items():
            if not uses:
                continue
            degree, terms = self.degree[name], [self.terms(use) for use in uses]
            grow, shrink = ((end + _TINY).sqrt_() for end in self.ends(name, terms))
            ratio = shrink / grow if degree == 1 else (shrink / grow) ** (1 / degree)
            if frozen is not None:
                ratio = torch.where(frozen[:, None, None], 1.0, ratio)
            changes.append(grow - shrink)
            self.multiply(name, ratio)
            if totals is not None:
                self._retotal(uses, terms, ratio, totals)
        decrease = torch.cat(changes, 1).square_().sum((1, 2))
        return decrease if frozen is None else decrease.masked_fill(frozen, 0.0)

    def _retotal(self, uses: list[_Use], terms: list[Tensor], ratio: Tensor, totals: list[Tensor]) -> None:
        met = [use.block for use in uses]
        for use, term in zip(uses, terms, strict=True):
            if met.count(use.block) > 1:
                totals[use.block] = self.total(self.monomials.blocks[use.block])
            else:
                factors = _raised(ratio, use.power)
                totals[use.block] = (term * (factors if use.units is None else factors[:, use.units])).sum((1, 2))


def _raised(values: Tensor, power: float) -> Tensor:
    return values if power == 1 else values.reciprocal() if power == -1 else values**power


def balance(monomials: Monomials, tolerance: float, most: int) -> Balanced:
    """Sweep until the mass is smallest; return the scales and how they were found.

    A member is done when its last sweep took less than `tolerance` of its mass, and what further sweeps would take
    at the rate of the last two is less as well.

    Args:
        monomials: what to make small; each unit that a monomial grows with shrinks another.
        tolerance: share of the mass.
        most: sweeps at most.
    """
    balancer = Balancer(monomials)
    constant, blocks = monomials.constant, monomials.blocks
    mass = sum((balancer.total(block) for block in blocks), constant)
    large = len(monomials.sizes) > _FEW or any(block.mass.shape[1:].numel() > _SMALL for block in blocks)
    # Without the blocks' sums, a sweep's decrease is known exactly for degree 1 alone.
    always = large or any(degree != 1 for degree in balancer.degree.values())
    done = torch.full_like(mass, not blocks, dtype=torch.bool)
    history, sweeps, before = [mass], torch.zeros_like(mass, dtype=torch.int64), mass
    while len(history) <= most and not bool(done.all()):
        frozen = done if bool(done.any()) else None
        two_level = always or len(history) > _MANY
        # The first sweeps may take nearly all: what is left is then no difference of two sums.
        totals = [constant] * len(blocks) if two_level or len(history) <= _DROPS else None
        decrease = balancer.sweep(frozen, totals)
        if totals is None:
            mass = mass - decrease
        elif two_level:
            mass = torch.where(done, mass, _shift(balancer, torch.stack(totals, 1), frozen) + constant)
        else:
            mass = torch.where(done, mass, sum(totals, constant))
        sweeps += ~done
        history.append(mass)
        small = decrease <= tolerance * mass
        if bool(small.any()):
            # What is left, as a geometric series; as long as sweeps take more and more, there's none.
            left = torch.where(decrease < before, decrease.square() / (before - decrease), torch.inf)
            done = done | (small & ((left <= tolerance * mass) | (decrease <= 1e-15 * mass)))
        before = decrease
    return _ended(balancer, torch.stack(history), sweeps, done)


def _shift(balancer: Balancer, totals: Tensor, frozen: Tensor | None) -> Tensor:
    """Multiply each scale by the factor that makes the mass smallest; return the sum (member) of the blocks then.

    Newton's method on the logarithms, halving steps that do not lower the mass.

    Args:
        totals: (member, block), each block's sum.
        frozen: as in `sweep`.
    """
    powers = balancer.powers
    shift, now, sums = totals.new_zeros(len(totals), powers.shape[1]), totals, totals.sum(1)
    ridge = torch.eye(powers.shape[1], dtype=totals.dtype, device=totals.device)
    active = torch.ones_like(sums, dtype=torch.bool) if frozen is None else ~frozen
    for _ in range(_NEWTON):
        curvature = (powers.T * now[:, None]) @ powers
        size = 1e-10 * curvature.diagonal(dim1=1, dim2=2).amax(1) + _TINY
        step = torch.linalg.solve_ex(curvature + size[:, None, None] * ridge, -now @ powers)[0]
        step = step * (_STEP / step.abs().amax(1, keepdim=True).clamp(min=_STEP)) * active[:, None]
        for half in range(_HALVINGS):
            trial = totals * ((shift + step) @ powers.T).exp()
            new = trial.sum(1)
            worse = ~(new <= sums)
            if half == _HALVINGS - 1 or not bool(worse.any()):
                break
            step = torch.where(worse[:, None], step / 2, step)
        taken = active & ~worse
        active = taken & (sums - new > _WORTH * sums)
        shift = torch.where(taken[:, None], shift + step, shift)
        now, sums = torch.where(taken[:, None], trial, now), torch.where(taken, new, sums)
        if not bool(active.any()):
            break
    factors = shift.exp()
    for i, name in enumerate(balancer.uses):
        balancer.multiply(name, factors[:, i, None, None])
    return sums


def _ended(balancer: Balancer, history: Tensor, sweeps: Tensor, converged: Tensor) -> Balanced:
    nothing = torch.zeros_like(balancer.monomials.constant)
    unbalanced, through, squares = nothing, nothing, {}
    for name, uses in balancer.uses.items():
        grow, shrink = balancer.ends(name, [balancer.terms(use) for use in uses])
        unbalanced = unbalanced + (grow - shrink).abs().sum((1, 2))
        through = through + (grow + shrink).sum((1, 2))
        squares[name] = torch.where((grow > 0) & (shrink > 0), balancer.raised[name, 1.0], 1.0)[..., 0]
    residual = torch.where(through > 0, unbalanced / through, 0.0)
    return Balanced(squares, history, sweeps, residual, converged)
