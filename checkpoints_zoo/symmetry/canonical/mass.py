"""The minimal mass of a network: the sum of its squared weights, minimised over its scales and matrices inside heads.

Laurent et al. 2024 (arXiv 2310.08287) call this minimisation the minimum scaled network mass problem. Monomials that
scales can make arbitrarily small are removed from the mass first. Inside a head the minimum has a closed form, see
`head_balancing.balancing_matrices`. Scales and heads are minimised in turn: every critical point of the mass on an
orbit is a minimum (Kempf and Ness 1979).

This is one file, because it is one problem and its result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry.applying import count_stacked_members, rescale
from checkpoints_zoo.symmetry.canonical.balancing import Balancer, balance_scales
from checkpoints_zoo.symmetry.canonical.head_balancing import BALANCED_KINDS, balancing_matrices, sides
from checkpoints_zoo.symmetry.canonical.monomials import BIAS_ROLES, WEIGHT_ROLES, Block, Monomials, collect_monomials
from checkpoints_zoo.symmetry.canonical.shifts import remove_shifts
from checkpoints_zoo.symmetry.elements import identity_element
from checkpoints_zoo.symmetry.matrices import turn
from checkpoints_zoo.symmetry.table import Table

# Largest number of weights that are balanced at once, so that the weights fit into the cache.
_ENTRIES_AT_ONCE = {"cpu": 1 << 22}
_ENTRIES_AT_ONCE_ON_GPU = 1 << 27
_SMALLEST_WEIGHT, _LARGEST_WEIGHT = (
    1e-140,
    1e150,
)  # Smallest and largest magnitude of a weight whose square float64 can hold.
UnitsByScale = Mapping[str, tuple[int, ...]]
Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class MinimalMass:
    """The mass of members, the minimum, the scales that reach the minimum, and a certificate.

    Args:
        ids: ids of the members.
        before: (member), the mass before the minimisation, without the unbounded part.
        after: (member), the minimal mass, without the unbounded part.
        unbounded: (member), the mass that scales can make arbitrarily small. `before` and `after` do not include this
            mass. No scales reach the minimum unless the unbounded mass is 0, see `attained`.
        residual: (member), how far the scales are from the minimum (the certificate). At the minimum, the mass that
            grows with the factor of a unit equals the mass that shrinks with it. The residual is the sum over units of
            the differences between growing and shrinking mass, as a share of the sum of both masses.
        converged: (member), whether the search ended before the largest number of sweeps, as the mass no longer fell.
        sweeps: (member), number of sweeps.
        history: (sweep, member), `before`, then the mass after each sweep.
        scales: scale -> (member, value), for `symmetry.rescale`. All other scales are 1.
        degenerate: scale -> units that can shrink without limit in every member: rows before a batch norm, and units
            that only such rows balance. The scales of units that can shrink without limit stay 1.
        dead: one dict for each member: scale -> units that can shrink without limit in this member only, because their
            inputs or outputs are 0. The scales of units with zero inputs or outputs stay 1.
        held: names of the scales that were not changed: approximate scales, and scales named by `hold`.
        matrices: group of matrices -> (member, copy, unit, unit), applied before the scales, for `symmetry.turn`. Both
            factors of a head have one Gram matrix at the minimum; the residual includes the difference of the two.
        shifts: name -> (member, entry), applied first, for `symmetry.shift`: the biases of keys and values that are
            redundant become 0 if biases count.
        unbalanced: group of matrices -> (member, copy), whether the product of a head has a lower rank than the head
            has units: its mass comes arbitrarily close to an infimum, and stays as it is.
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
    degenerate: UnitsByScale
    dead: tuple[UnitsByScale, ...]
    held: tuple[str, ...]
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    unbalanced: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def excess(self) -> Tensor:
        """The excess of the mass over its minimum, in percent, (member)."""
        return torch.where(self.after > 0, 100 * (self.before - self.after) / self.after, 0.0)

    @property
    def attained(self) -> Tensor:
        """Whether some scales and matrices reach the minimum, (member); if not, the mass only comes arbitrarily close
        to the minimum."""
        is_attained = self.unbounded == 0
        for has_none in self.unbalanced.values():
            is_attained = is_attained & ~has_none.any(1)
        return is_attained

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        count, dead = len(self), sum(len(units) for member in self.dead for units in member.values())
        return "\n".join(
            [
                f"Mass of {count} {'member' if count == 1 else 'members'}: {_format_spread(self.before)}",
                f"Its minimum: {_format_spread(self.after)}",
                f"Excess (%): {_format_spread(self.excess)}",
                f"Balance residual: at most {_largest_or_zero(self.residual):.2g}, "
                f"after at most {_largest_or_zero(self.sweeps):.0f} sweeps",
                f"Not converged: {int((~self.converged).sum())}",
                f"Units that can shrink without limit: {sum(map(len, self.degenerate.values()))} in every member, "
                f"{dead} dead ones",
                f"Mass of these, left out above: {_format_spread(self.unbounded)}",
                f"Scales held: {', '.join(self.held) or 'none'}",
                *self._heads(),
                *self._not_attained(),
            ]
        )

    def _heads(self) -> list[str]:
        count = sum(int(has_none.sum()) for has_none in self.unbalanced.values())
        heads = sum(has_none.shape[1] for has_none in self.unbalanced.values())
        return [f"Products of heads: {heads} in each member, {count} of a lower rank stay as they are"] if heads else []

    def _not_attained(self) -> list[str]:
        count = int((self.unbounded > 0).sum())
        members = f"{count} {'member' if count == 1 else 'members'}"
        text = f"No scales reach the minimum of {members}: the mass left out only comes arbitrarily close to 0"
        return [text] if count else []


def _format_spread(values: Tensor) -> str:
    if not len(values):
        return "none"
    return f"mean {float(values.mean()):.5g}, from {float(values.min()):.5g} to {float(values.max()):.5g}"


def _largest_or_zero(values: Tensor) -> float:
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
    """Minimise the sum of squared weights over all scales that keep the function, and over the matrices inside heads;
    return the mass and its minimum.

    Kernels, linear weights and norm gains have mass, as in the code of Laurent et al. Running statistics have no mass.
    The problem is convex in the logarithms of the scales. The problem is solved by two-level balancing, in float64.

    With all scales held, the mass of queries and keys of a head becomes twice the sum of the singular values of their
    product, and so does that of values and the output layer. Rotations of streams and other shifts are not minimised
    over.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), including all tensors with mass.
        biases: whether biases and the offsets of norms count as mass as well. Redundant biases of keys and values then
            become 0 first.
        hold: names of scales that stay 1.
        approximate: whether to change approximate scales as well. Approximate scales keep the network's function only
            if the norms have eps = 0.
        same: names that share a tensor with an earlier name. A tensor with several names counts once.
        tolerance: share of the mass that ends the search. The search for a member ends if its last sweep removed a
            smaller share, and all further sweeps together would remove a smaller share.
        most: the largest number of sweeps.

    Raises:
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.
        UsageError: the tensors have no member axis, a scale is unknown, the tolerance is not a share, or the square of
            a weight is too large or too small for float64.
        DamagedError: a weight is not finite.

    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[[8.0]]]), "2.weight": torch.tensor([[[2.0]]])}
    >>> mass = minimal_mass(symmetries(net, torch.zeros(1, 1)), weights)
    >>> float(mass.before), float(mass.after)
    (68.0, 32.0)
    """
    free, held = _free_scales(table, hold, approximate)
    members = count_stacked_members(table, params)
    if not 0 < tolerance < 1:
        raise UsageError("tolerance", expected="a share of the mass above 0 and below 1", found=repr(tolerance))
    counted_roles = (*WEIGHT_ROLES, *(BIAS_ROLES if biases else ()))
    names = [name for name, axes in table.tensors.items() if axes.role in counted_roles and name not in same]
    for name in names:
        if name not in params:
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
    chosen = {name: params[name].detach() for name in names}
    _check_range(chosen)
    with torch.inference_mode():
        minimise = _minimise_with_heads if table.is_continuous else _minimise_mass
        parts = [minimise(table, part, free, tolerance, most) for part in _member_chunks(chosen, members)]
    return join_masses(parts, range(members), held)


def join_masses(results: Sequence[MinimalMass], member_ids: Iterable[int], held_scales: tuple[str, ...]) -> MinimalMass:
    """Concatenate the results of members of one network; return one result for all members.

    Args:
        results: one result or more, computed with the same options.
        member_ids: ids of the members of all results, in order.
        held_scales: names of the scales that were not changed.
    """
    history_length = max(len(result.history) for result in results)
    histories = [
        torch.cat([each.history, each.history[-1:].expand(history_length - len(each.history), -1)]) for each in results
    ]
    return MinimalMass(
        ids=tuple(member_ids),
        before=torch.cat([result.before for result in results]),
        after=torch.cat([result.after for result in results]),
        unbounded=torch.cat([result.unbounded for result in results]),
        residual=torch.cat([result.residual for result in results]),
        converged=torch.cat([result.converged for result in results]),
        sweeps=torch.cat([result.sweeps for result in results]),
        history=torch.cat(histories, 1),
        scales={name: torch.cat([result.scales[name] for result in results]) for name in results[0].scales},
        degenerate=results[0].degenerate,
        dead=tuple(units for result in results for units in result.dead),
        held=held_scales,
        **{
            part: {n: torch.cat([getattr(result, part)[n] for result in results]) for n in getattr(results[0], part)}
            for part in ("matrices", "shifts", "unbalanced")
        },
    )


def _free_scales(table: Table, held_scales: Collection[str], approximate: bool) -> tuple[list[str], tuple[str, ...]]:
    for name in held_scales:
        if name not in table.scales:
            raise UsageError(f"scale {name!r}", expected=f"one among {', '.join(table.scales)}", found="another")
    free_scales = [n for n, scale in table.scales.items() if n not in held_scales and (scale.exact or approximate)]
    return free_scales, tuple(n for n in table.scales if n not in free_scales)


def _member_chunks(params: Mapping[str, Tensor], member_count: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a few members at a time."""
    entries_per_member = sum(tensor[0].numel() for tensor in params.values() if len(tensor))
    device_type = next((tensor.device.type for tensor in params.values()), "cpu")
    members_at_once = max(1, _ENTRIES_AT_ONCE.get(device_type, _ENTRIES_AT_ONCE_ON_GPU) // max(1, entries_per_member))
    for start in range(0, max(1, member_count), members_at_once):
        yield {name: tensor[start : start + members_at_once] for name, tensor in params.items()}


def _minimise_mass(
    table: Table, params: Mapping[str, Tensor], free_scales: list[str], tolerance: float, most_sweeps: int
) -> MinimalMass:
    """Minimise the mass of some members, numbered from 0; return the result."""
    monomials = collect_monomials(table, params, list(params), free_scales, torch.float64)
    unbounded_mass = remove_unbounded_mass(monomials)
    if not bool(
        torch.stack([unbounded_mass.mass, *(block.mass.sum((1, 2)) for block in monomials.blocks)]).isfinite().all()
    ):
        _refuse_nonfinite(params)
    member_count = len(monomials.constant)
    degenerate, dead = {}, [dict[str, tuple[int, ...]]() for _ in range(member_count)]
    if any(bool(unit_is_massless.any()) for unit_is_massless in unbounded_mass.has_no_mass.values()):
        unbounded_unit_mass = remove_unbounded_mass(monomials_of_unit_weights(monomials))
        for name, unit_is_massless in unbounded_mass.has_no_mass.items():
            had_mass, has_no_mass = unbounded_unit_mass.had_mass[name][0], unbounded_unit_mass.has_no_mass[name][0]
            if bool((has_no_mass & had_mass).any()):
                degenerate[name] = tuple((has_no_mass & had_mass).nonzero()[:, 0].tolist())
            for member, unit in (unit_is_massless & had_mass & ~has_no_mass).nonzero().tolist():
                dead[member][name] = (*dead[member].get(name, ()), unit)
        monomials.blocks = [block for block in monomials.blocks if bool(block.mass.any())]
    balance_result = balance_scales(monomials, tolerance, most_sweeps)
    return MinimalMass(
        ids=tuple(range(member_count)),
        before=balance_result.history[0],
        after=balance_result.history[-1],
        unbounded=unbounded_mass.mass,
        residual=balance_result.residual,
        converged=balance_result.converged,
        sweeps=balance_result.sweeps,
        history=balance_result.history,
        scales={name: squares.sqrt() for name, squares in balance_result.squares.items()},
        degenerate=degenerate,
        dead=tuple(dead),
        held=(),
    )


def _minimise_with_heads(
    table: Table, params: Mapping[str, Tensor], free_scales: list[str], tolerance: float, most_sweeps: int
) -> MinimalMass:
    """Minimise the mass of some members of a network with attention, numbered from 0; return the result."""
    tensors: Params = {name: tensor.double() for name, tensor in params.items()}
    roles = {table.tensors[name].role for name in params}
    shifts: Params = {}
    if roles & set(BIAS_ROLES):
        tensors, shifts = remove_shifts(table, tensors, [n for n in table.shifts if _is_inside_heads(table, n)])
    first = result = _minimise_mass(table, tensors, free_scales, tolerance, most_sweeps)
    heads = [name for name, matrix in table.matrices.items() if matrix.kind in BALANCED_KINDS]
    matrices, unbalanced = identity_element(table, len(first.ids), first.after.device).matrices, dict[str, Tensor]()
    scales, sweeps, history = dict(result.scales), result.sweeps, list(first.history)
    for round_number in range(most_sweeps):
        tensors = rescale(table, tensors, result.scales)
        step = {}
        for name in heads:
            step[name], unbalanced[name] = balancing_matrices(table.matrices[name], sides(table, tensors, name, roles))
        tensors = turn(table, tensors, step)
        matrices = {name: matrices[name] @ m for name, m in step.items()}
        result = _minimise_mass(table, tensors, free_scales, tolerance, most_sweeps)
        sweeps = sweeps + result.sweeps
        scales = {name: values * result.scales[name] for name, values in scales.items()}
        history.append(result.after)
        has_ended = history[-2] - history[-1] <= tolerance / 10 * history[-1]
        if round_number and bool(has_ended.all()):
            break
    residuals = [result.residual]
    for name in heads:
        grams = [side @ side.mT for side in sides(table, rescale(table, tensors, result.scales), name, roles)]
        apart = (grams[0] - grams[1]).flatten(2).norm(dim=-1).masked_fill(unbalanced[name], 0.0).sum(1)
        total = torch.stack([gram.diagonal(dim1=-2, dim2=-1).sum((1, 2)) for gram in grams]).sum(0)
        residuals.append(torch.where(total > 0, apart / total, 0.0))
    return replace(
        first, after=result.after, residual=torch.stack(residuals).amax(0), converged=result.converged & has_ended,
        sweeps=sweeps, history=torch.stack(history), scales=scales, matrices=matrices, shifts=shifts,
        unbalanced=unbalanced,
    )  # fmt: skip


def _is_inside_heads(table: Table, shift: str) -> bool:
    """Return whether a shift changes redundant biases of keys and values."""
    one = table.shifts[shift]
    kinds = [table.matrices[turn.matrix].kind for turn in table.tensors[one.part.tensor].turns]
    return one.kind == "constant" and one.gain is None and any(kind in BALANCED_KINDS for kind in kinds)


def _check_range(params: Mapping[str, Tensor]) -> None:
    """Refuse weights whose squares float64 cannot hold; squares of weights in narrower dtypes always fit."""
    for name, tensor in params.items():
        if tensor.dtype != torch.float64:
            continue
        magnitudes = tensor.abs()
        is_out_of_range = (
            tensor.isfinite() & (magnitudes > 0) & ((magnitudes < _SMALLEST_WEIGHT) | (magnitudes > _LARGEST_WEIGHT))
        )
        if bool(is_out_of_range.any()):
            member_position = (
                int(is_out_of_range.flatten(1).any(1).nonzero()[0])
                if tensor.ndim > 1
                else int(is_out_of_range.nonzero()[0])
            )
            raise UsageError(
                f"tensor {name!r}",
                expected=f"0, or magnitudes from {_SMALLEST_WEIGHT:.0e} to {_LARGEST_WEIGHT:.0e}, "
                "whose squares float64 holds",
                found=f"{float(magnitudes[is_out_of_range][0]):.3g} in the member at position {member_position}",
            )


def _refuse_nonfinite(params: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        nonfinite_positions = (~tensor.isfinite()).flatten(1).any(1).nonzero()
        if len(nonfinite_positions):
            member_position = int(nonfinite_positions[0])
            raise DamagedError(
                f"tensor {name!r}",
                expected="finite weights",
                found=f"others in the member at position {member_position}",
                tensor=name,
            )


@dataclass
class UnboundedMass:
    """The mass that scales can make arbitrarily small, which was removed from the problem.

    Args:
        had_mass: scale -> (member, unit), whether a unit had mass before the removal.
        has_no_mass: scale -> (member, unit), whether a unit has no mass after the removal.
        mass: (member), the removed mass.
    """

    had_mass: dict[str, Tensor]
    has_no_mass: dict[str, Tensor]
    mass: Tensor


def remove_unbounded_mass(monomials: Monomials) -> UnboundedMass:
    """Set all monomials to zero that scales can make arbitrarily small; return the removed mass.

    Args:
        monomials: the mass. It is changed.
    """
    balancer = Balancer(monomials)
    masses = _masses_by_scale(balancer)
    had_mass = {name: (growing > 0) | (shrinking > 0) for name, (growing, shrinking) in masses.items()}
    removed_mass, is_unbounded_by_scale = torch.zeros_like(monomials.constant), _masks_of_unbounded_units(masses)
    while is_unbounded_by_scale:
        mass_before = _total_mass(monomials)
        for block in monomials.blocks:
            for scale_power, axis in (
                (scale_power, i)
                for i, scale_powers in enumerate((block.rows, block.columns))
                for scale_power in scale_powers
            ):
                if scale_power.scale in is_unbounded_by_scale:
                    is_unbounded = is_unbounded_by_scale[scale_power.scale]
                    is_unbounded = is_unbounded if scale_power.units is None else is_unbounded[:, scale_power.units]
                    block.mass.masked_fill_(is_unbounded if axis == 0 else is_unbounded.mT, 0.0)
        removed_mass += mass_before - _total_mass(monomials)
        masses = _masses_by_scale(balancer)
        is_unbounded_by_scale = _masks_of_unbounded_units(masses)
    has_no_mass = {name: (growing == 0) & (shrinking == 0) for name, (growing, shrinking) in masses.items()}
    return UnboundedMass(
        {n: t[..., 0] for n, t in had_mass.items()}, {n: s[..., 0] for n, s in has_no_mass.items()}, removed_mass
    )


def monomials_of_unit_weights(monomials: Monomials) -> Monomials:
    """Return the monomials of one member whose weights are all 1."""
    blocks = [Block(b.rows, b.columns, torch.ones_like(b.mass[:1])) for b in monomials.blocks]
    return Monomials(monomials.sizes, blocks, monomials.constant[:1])


def _masses_by_scale(balancer: Balancer) -> dict[str, tuple[Tensor, Tensor]]:
    uses = balancer.uses.items()
    return {
        name: balancer.growing_and_shrinking_mass(name, [balancer.sum_monomials(use) for use in scale_uses])
        for name, scale_uses in uses
    }


def _masks_of_unbounded_units(masses: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    is_unbounded_by_scale = {name: (grow > 0) ^ (shrink > 0) for name, (grow, shrink) in masses.items()}
    return {name: is_unbounded for name, is_unbounded in is_unbounded_by_scale.items() if bool(is_unbounded.any())}


def _total_mass(monomials: Monomials) -> Tensor:
    return sum((block.mass.sum((1, 2)) for block in monomials.blocks), torch.zeros_like(monomials.constant))
