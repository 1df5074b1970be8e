"""Fix signs: choose one network for all networks that changes of sign turn into each other.

The gain of a norm becomes positive. If the gain is 0, and for weights without a norm, the largest entry of a row
becomes positive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.applying import count_stacked_members, flip_tensor
from checkpoints_zoo.symmetry.table import Axes, Power, Sign, Table

_TOLERANCE = 2.0**-16  # Entries that differ from the largest entry by at most this share count as equally large.
_DECIDING_ROLES = (
    "gain",
    "weight",
    "bias",
    "offset",
    "mean",
)  # Roles of the tensors that decide signs, in order of precedence.


def fix_signs(table: Table, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Choose all signs; return the tensors and the signs (member, value).

    The first tensor that the sign multiplies and that is not 0 decides the sign: a gain, then a row of weights, then
    biases and other tensors. The largest entry of the deciding tensor becomes positive. If several entries are equally
    large, the sum of their signs decides, then the sum of all entries, then the sum of their cubes.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape). Tensors that no sign multiplies may be missing.

    Raises:
        LayoutError: a tensor is unknown to the table or has another shape.
        UsageError: the tensors have no member axis.
    """
    tensors, signs, undecided_signs = dict(params), dict[str, Tensor](), dict(table.signs)
    member_count = count_stacked_members(table, params) if params else 0
    while undecided_signs:
        sign, deciding_tensors = _next_sign(table, undecided_signs)
        del undecided_signs[sign.name]
        values = torch.zeros(member_count, sign.size, dtype=torch.float64)
        for name, power in deciding_tensors:
            if name in tensors:
                votes = _vote_on_signs(table.tensors[name], power, tensors[name], sign.size)
                values = values.to(votes.device)
                values = torch.where(values == 0, votes, values)
        signs[sign.name] = values = torch.where(values == 0, 1.0, values)
        for name, axes in table.tensors.items():
            if name in tensors and any(power.scale == sign.name for power in axes.signs):
                # Adding 0.0 turns -0.0 into 0.0.
                tensors[name] = flip_tensor(axes, tensors[name], {sign.name: values}) + 0.0
    return tensors, {name: signs[name] for name in table.signs}


def _next_sign(table: Table, undecided_signs: Mapping[str, Sign]) -> tuple[Sign, list[tuple[str, Power]]]:
    """Return the sign to choose next, and the tensors that have this sign but no other sign that is still to be
    chosen."""
    deciding_tensors_of_sign = {
        name: sorted(_deciding_tensors(table, name, undecided_signs), key=lambda item: item[0])
        for name in undecided_signs
    }
    name = min(
        undecided_signs,
        key=lambda name: (
            deciding_tensors_of_sign[name][0][0] if deciding_tensors_of_sign[name] else len(_DECIDING_ROLES) + 1
        ),
    )
    return undecided_signs[name], [(tensor, power) for _, tensor, power in deciding_tensors_of_sign[name]]


def _deciding_tensors(
    table: Table, sign_name: str, undecided_signs: Mapping[str, Sign]
) -> Iterator[tuple[float, str, Power]]:
    """Yield (rank, tensor, power) of the tensors that can decide a sign."""
    axes_of_rows = {writer for group in table.groups.values() for writer in group.writers}
    for tensor_name, axes in table.tensors.items():
        powers = [power for power in axes.signs if power.scale in undecided_signs]
        for power in powers:
            is_alone = all(other is power or _are_apart(power, other) for other in powers)
            if power.scale == sign_name and is_alone and not power.within:
                rank = float(_DECIDING_ROLES.index(axes.role) if axes.role in _DECIDING_ROLES else len(_DECIDING_ROLES))
                is_column = axes.role == "weight" and (tensor_name, power.axis) not in axes_of_rows
                yield rank + 0.5 * is_column, tensor_name, power


def _are_apart(power: Power, other: Power) -> bool:
    """Return whether two signs multiply different entries of one axis."""
    is_before = power.offset + power.length <= other.offset or other.offset + other.length <= power.offset
    return power.axis == other.axis and is_before


def _vote_on_signs(axes: Axes, power: Power, tensor: Tensor, value_count: int) -> Tensor:
    """Return the sign, (member, value), that makes the largest entry of each value's row positive. The sums of the
    entries and of their cubes decide if several entries are the largest; the sign is 0 if nothing decides."""
    part = tensor.narrow(power.axis + 1, power.offset, power.length).movedim(power.axis + 1, 1).double()
    rows = part.reshape(len(tensor), value_count, prod(part.shape[1:]) // value_count)
    magnitudes = rows.abs()
    largest = magnitudes.amax(-1, keepdim=True)
    signs_of_values = torch.zeros_like(largest[..., 0])
    is_near_largest = magnitudes >= (1 - _TOLERANCE) * largest
    for votes in ((rows.sign() * is_near_largest), rows, rows**3):
        vote_sum, magnitude_sum = votes.sum(-1), votes.abs().sum(-1)
        sign_vote = torch.where(vote_sum.abs() > _TOLERANCE * magnitude_sum, vote_sum.sign(), 0.0)
        signs_of_values = torch.where(signs_of_values == 0, sign_vote, signs_of_values)
    return signs_of_values
