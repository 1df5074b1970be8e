"""Monomials that scales can make as small as one likes: they are taken out of the mass before it is balanced.

What grows with a unit but shrinks with none goes to zero with it: a row before a batch norm. With it goes what other
units are balanced by, so that these follow. What is left has a minimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.canonical.balancing import Balancer
from checkpoints_zoo.symmetry.canonical.monomials import Block, Monomials


@dataclass
class Cut:
    """What was taken out.

    Args:
        touched: scale -> (member, value), which units had any mass.
        stuck: scale -> (member, value), which units have none any more.
        mass: (member), of what was taken out.
    """

    touched: dict[str, Tensor]
    stuck: dict[str, Tensor]
    mass: Tensor


def cut(monomials: Monomials) -> Cut:
    """Set all monomials to zero that scales can make as small as one likes; return what that left.

    Args:
        monomials: changed in place.
    """
    balancer = Balancer(monomials)
    ends = _ends(balancer)
    touched = {name: (grow > 0) | (shrink > 0) for name, (grow, shrink) in ends.items()}
    mass, one_sided = torch.zeros_like(monomials.constant), _one_sided(ends)
    while one_sided:
        before = _sum(monomials)
        for block in monomials.blocks:
            for part, axis in ((part, i) for i, side in enumerate((block.rows, block.columns)) for part in side):
                if part.scale in one_sided:
                    gone = one_sided[part.scale]
                    gone = gone if part.units is None else gone[:, part.units]
                    block.mass.masked_fill_(gone if axis == 0 else gone.mT, 0.0)
        mass += before - _sum(monomials)
        ends = _ends(balancer)
        one_sided = _one_sided(ends)
    stuck = {name: (grow == 0) & (shrink == 0) for name, (grow, shrink) in ends.items()}
    return Cut({n: t[..., 0] for n, t in touched.items()}, {n: s[..., 0] for n, s in stuck.items()}, mass)


def pattern(monomials: Monomials) -> Monomials:
    """Return the monomials of one member whose weights are all 1: what any member's may be."""
    blocks = [Block(b.rows, b.columns, torch.ones_like(b.mass[:1])) for b in monomials.blocks]
    return Monomials(monomials.sizes, blocks, monomials.constant[:1])


def _ends(balancer: Balancer) -> dict[str, tuple[Tensor, Tensor]]:
    uses = balancer.uses.items()
    return {name: balancer.ends(name, [balancer.terms(use) for use in own]) for name, own in uses}


def _one_sided(ends: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    found = {name: (grow > 0) ^ (shrink > 0) for name, (grow, shrink) in ends.items()}
    return {name: units for name, units in found.items() if bool(units.any())}


def _sum(monomials: Monomials) -> Tensor:
    return sum((block.mass.sum((1, 2)) for block in monomials.blocks), torch.zeros_like(monomials.constant))
