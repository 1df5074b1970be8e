"""The smallest mass that rescaling can give a network: its sum of squared weights, minimised over its scales.

Laurent et al. 2024 (arXiv 2310.08287), the minimum scaled network mass problem. Monomials that scales can make as small
as one likes are taken out of the mass before it is balanced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import stacked_in
from checkpoints_zoo.symmetry.canonical.balancing import Balancer, balance
from checkpoints_zoo.symmetry.canonical.monomials import BIASES, WEIGHTS, Block, Monomials, collect
from checkpoints_zoo.symmetry.table import Table

_TOGETHER = {"cpu": 1 << 22}  # entries of the members that are balanced at once: what stays in the cache
_TOGETHER_ELSEWHERE = 1 << 27
Units = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MinimalMass:
    """The mass of members, its minimum, the scales that reach it, and how well they do.

    Args:
        ids: of the members.
        before: (member), the mass, but for what is unbounded.
        after: (member), its minimum.
        unbounded: (member), the mass that scales can make as small as one likes; it is in neither of the above.
        residual: (member), the certificate: at the minimum what grows with a unit equals what shrinks with it. The sum
            of the differences over units, as a share of the sum of both.
        converged: (member), whether the stop rule was met.
        sweeps: (member), how many were taken.
        history: (sweep, member), `before`, then the mass after each sweep.
        scales: scale -> (member, value), to be applied with `symmetry.applying.rescale`. Those that are missing are 1.
        degenerate: scale -> units that can shrink without limit in every member (rows before a batch norm, and what
            only they balanced); their scales stay 1.
        dead: for each member, scale -> units that can do so in it alone, since what comes in or goes out is 0; their
            scales stay 1.
        held: scales that were not changed: those that are approximate, and those that were named.
    """

    ids: tuple[int, ...]
    before: Tensor
    after: Tensor
    unbounded: Tensor
    residual: Tensor
    converged: Tensor
    sweeps: Tensor
    history: Tensor
    scales: Mapping[str, Tensor]
    degenerate: Units
    dead: tuple[Units, ...]
    held: tuple[str, ...]

    @property
    def excess(self) -> Tensor:
        """How much larger than its minimum the mass is, in percent, (member)."""
        return torch.where(self.after > 0, 100 * (self.before - self.after) / self.after, 0.0)

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        count, dead = len(self), sum(len(units) for member in self.dead for units in member.values())
        return "\n".join(
            [
                f"Mass of {count} {'member' if count == 1 else 'members'}: {_spread(self.before)}",
                f"Its minimum: {_spread(self.after)}",
                f"Excess (%): {_spread(self.excess)}",
                f"Balance residual: at most {_largest(self.residual):.2g}, "
                f"after at most {_largest(self.sweeps):.0f} sweeps",
                f"Not converged: {int((~self.converged).sum())}",
                f"Units that can shrink without limit: {sum(map(len, self.degenerate.values()))} in every member, "
                f"{dead} dead ones",
                f"Mass of these, left out above: {_spread(self.unbounded)}",
                f"Scales held: {', '.join(self.held) or 'none'}",
            ]
        )


def _spread(values: Tensor) -> str:
    if not len(values):
        return "none"
    return f"mean {float(values.mean()):.5g}, from {float(values.min()):.5g} to {float(values.max()):.5g}"


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


def minimal_mass(
    table: Table,
    params: Mapping[str, Tensor],
    *,
    biases: bool = False,
    hold: Collection[str] = (),
    approximate: bool = False,
    same: Collection[str] = (),
    tolerance: float = 2.5e-7,
    most: int = 2000,
) -> MinimalMass:
    """Minimise the sum of squared weights over all positive scales that leave the function as it is; return both sums.

    Kernels, linear weights and norm gains have mass, as in the authors' code; running statistics never. The problem is
    convex in the logarithms of the scales and is solved by two-level balancing, in float64.

    Args:
        table: of the network.
        params: name -> (member, *shape), every tensor that has mass.
        biases: whether biases and the norms' offsets have mass too.
        hold: names of scales that stay 1.
        approximate: whether scales before norms without running statistics change as well: the function then stays
            the same only where these norms' eps is 0.
        same: names of tensors that are another name's tensor; each tensor has its mass once.
        tolerance: of the mass; a member is done when its last sweep took less, and the next ones would.
        most: sweeps at most.

    Raises:
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.
        UsageError: tensors without a member axis, no such scale, or a tolerance that is none.
        DamagedError: a weight that is not finite.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[8.0]]]), "2.weight": torch.tensor([[[2.0]]])}
    >>> found = minimal_mass(symmetries(net, torch.zeros(1, 1)), weights)
    >>> float(found.before), float(found.after)
    (68.0, 32.0)
    """
    free, held = _free(table, hold, approximate)
    members = stacked_in(table, params)
    if not 0 < tolerance < 1:
        raise UsageError("tolerance", expected="a share of the mass above 0 and below 1", found=repr(tolerance))
    roles = (*WEIGHTS, *(BIASES if biases else ()))
    names = [name for name, axes in table.tensors.items() if axes.role in roles and name not in same]
    for name in names:
        if name not in params:
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    chosen = {name: params[name].detach() for name in names}
    with torch.inference_mode():
        parts = [_solve(table, part, free, tolerance, most) for part in _parts(chosen, members)]
    return join(parts, range(members), held)


def join(parts: Sequence[MinimalMass], ids: Iterable[int], held: tuple[str, ...]) -> MinimalMass:
    """Put members of one network behind one another; return them.

    Args:
        parts: one or more, solved with the same options.
        ids: of all members.
        held: scales that were not changed.
    """
    longest = max(len(part.history) for part in parts)
    histories = [torch.cat([p.history, p.history[-1:].expand(longest - len(p.history), -1)]) for p in parts]
    return MinimalMass(
        ids=tuple(ids),
        before=torch.cat([part.before for part in parts]),
        after=torch.cat([part.after for part in parts]),
        unbounded=torch.cat([part.unbounded for part in parts]),
        residual=torch.cat([part.residual for part in parts]),
        converged=torch.cat([part.converged for part in parts]),
        sweeps=torch.cat([part.sweeps for part in parts]),
        history=torch.cat(histories, 1),
        scales={name: torch.cat([part.scales[name] for part in parts]) for name in parts[0].scales},
        degenerate=parts[0].degenerate,
        dead=tuple(units for part in parts for units in part.dead),
        held=held,
    )


def _free(table: Table, hold: Collection[str], approximate: bool) -> tuple[list[str], tuple[str, ...]]:
    for name in hold:
        if name not in table.scales:
            raise UsageError(f"scale {name!r}", expected=f"one among {', '.join(table.scales)}", found="another")
    free = [n for n, scale in table.scales.items() if n not in hold and (scale.exact or approximate)]
    return free, tuple(n for n in table.scales if n not in free)


def _parts(params: Mapping[str, Tensor], members: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a few members at a time."""
    each = sum(tensor[0].numel() for tensor in params.values() if len(tensor))
    kind = next((tensor.device.type for tensor in params.values()), "cpu")
    step = max(1, _TOGETHER.get(kind, _TOGETHER_ELSEWHERE) // max(1, each))
    for start in range(0, max(1, members), step):
        yield {name: tensor[start : start + step] for name, tensor in params.items()}


def _solve(table: Table, params: Mapping[str, Tensor], free: list[str], tolerance: float, most: int) -> MinimalMass:
    """Balance some members, which are numbered from 0."""
    monomials = collect(table, params, list(params), free, torch.float64)
    found = cut(monomials)
    if not bool(torch.stack([found.mass, *(block.mass.sum((1, 2)) for block in monomials.blocks)]).isfinite().all()):
        _refuse(params)
    members = len(monomials.constant)
    degenerate, dead = {}, [dict[str, tuple[int, ...]]() for _ in range(members)]
    if any(bool(units.any()) for units in found.stuck.values()):
        always = cut(pattern(monomials))
        for name, units in found.stuck.items():
            touched, stuck = always.touched[name][0], always.stuck[name][0]
            if bool((stuck & touched).any()):
                degenerate[name] = tuple((stuck & touched).nonzero()[:, 0].tolist())
            for member, unit in (units & touched & ~stuck).nonzero().tolist():
                dead[member][name] = (*dead[member].get(name, ()), unit)
        monomials.blocks = [block for block in monomials.blocks if bool(block.mass.any())]
    ended = balance(monomials, tolerance, most)
    return MinimalMass(
        tuple(range(members)), ended.history[0], ended.history[-1], found.mass, ended.residual, ended.converged,
        ended.sweeps, ended.history, {n: s.sqrt() for n, s in ended.squares.items()}, degenerate, tuple(dead), (),
    )  # fmt: skip


def _refuse(params: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        bad = (~tensor.isfinite()).flatten(1).any(1).nonzero()
        if len(bad):
            at = int(bad[0])
            raise DamagedError(
                f"tensor {name!r}",
                expected="finite weights",
                found=f"others in the member at position {at}",
                tensor=name,
            )


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
