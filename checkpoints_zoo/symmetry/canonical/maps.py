"""Canonical maps: choose one network for all networks that symmetries turn into each other.

As in Laurent et al. 2024 (arXiv 2310.08287), units are scaled first, then sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.applying import count_members
from checkpoints_zoo.symmetry.canonical.head_balancing import balance_matrices, fix_phases
from checkpoints_zoo.symmetry.canonical.matching import l2_norm, matched_tensors
from checkpoints_zoo.symmetry.canonical.permutation import SORTING_KEYS, sort_units
from checkpoints_zoo.symmetry.canonical.scaling import check_rows, unit_norm
from checkpoints_zoo.symmetry.canonical.shifts import remove_shifts
from checkpoints_zoo.symmetry.canonical.signs import fix_signs
from checkpoints_zoo.symmetry.elements import Element
from checkpoints_zoo.symmetry.table import Table

SCALING_METHODS = ("unit-norm",)
HEAD_METHODS = ("balanced",)
# dtype -> largest rounding error of a scaled value, as a share of the value.
_TOLERANCES = {torch.float64: 2.0**-40, torch.float32: 2.0**-16}
_TOLERANCES_OF_HEADS = {torch.float64: 2.0**-30, torch.float32: 2.0**-12}  # The same of a balanced value.


def canonicalize(
    table: Table,
    params: Mapping[str, Tensor],
    *,
    scale: str | None = None,
    permute: str | None = None,
    streams: bool = False,
    approximate: bool = False,
    heads: str | None = None,
) -> tuple[dict[str, Tensor], Element]:
    """Scale the members, balance heads, then sort units and heads; return the tensors, and the applied symmetry.

    `symmetry.apply` with the returned symmetry turns the parameters into the returned tensors, up to rounding if there
    are scales. `symmetry.apply` with the inverse of the returned symmetry turns the returned tensors back into the
    parameters.

    Scaled values have rounding errors, which make equal units differ in the last bits. After scaling, values count as
    equal if they differ by at most 2^-16 of the larger one in float32, and 2^-40 in float64.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape), or (*shape) for one member.
        scale: "unit-norm", see `scaling.unit_norm` and `signs.fix_signs`; None: no scaling, and all dtypes stay the
            same.
        permute: sort by the "first" weight, the "max" weight or the "norm" of the row of each unit, see
            `permutation.sort_units`; None: no sorting. "norm" is refused if scaling makes all norms 1.
        streams: whether to sort the units of residual streams as well, or to rotate them, see
            `head_balancing.balance_matrices`.
        approximate: whether to change approximate scales as well.
        heads: "balanced" for networks with attention: remove shifts (`shifts.remove_shifts`), and balance the matrices
            inside heads, in float64; None: neither. Two members that differ by these symmetries get the same tensors up
            to rounding, unless a product of a head has a lower rank than the head has units.

    Raises:
        UsageError: an option has an unknown value, units should be sorted by norms that are all 1, or a scale has no
            row of weights.
        LayoutError: a tensor is missing, is unknown to the table, or has another shape.
        DamagedError: heads are balanced, and a weight is not finite.

    >>> import torch
    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[-4.0], [2.0]]), "2.weight": torch.tensor([[1.0, 3.0]])}
    >>> tensors, element = canonicalize(symmetries(net, torch.zeros(1, 1)), weights, scale="unit-norm", permute="first")
    >>> tensors["0.weight"].tolist(), tensors["2.weight"].tolist()
    ([[1.0], [-1.0]], [[6.0, 4.0]])
    >>> element.permutations["0"].tolist(), element.scales["0"].tolist()
    ([1, 0], [0.25, 0.5])
    """
    check_options(scale, permute, heads)
    members = count_members(table, params)
    check_scaling(table, scale, permute, streams, approximate)
    tensors = dict(params) if members is not None else {n: t[None] for n, t in params.items()}
    element, dtypes = Element(), {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    if heads is not None and table.is_continuous:
        l2_norm(matched_tensors(table, tensors, "members"), "the members")  # Refuses missing and damaged tensors.
    if heads is not None:
        tensors = {name: tensor.double() if name in dtypes else tensor for name, tensor in tensors.items()}
        tensors, shifts = remove_shifts(table, tensors)
        element = replace(element, shifts=shifts)
    if scale is not None:
        tensors, scales, _ = unit_norm(table, tensors, approximate=approximate)
        element = replace(element, scales=scales)
    if heads is not None:
        tensors, matrices, _ = balance_matrices(table, tensors, streams)
        element = replace(element, matrices=matrices)
    if scale is not None:
        tensors, signs = fix_signs(table, tensors)
        element = replace(element, signs=signs)
    if heads is not None:
        tensors, phases = fix_phases(table, tensors)
        matrices = {n: m @ phases[n] if n in phases else m for n, m in element.matrices.items()}
        element = replace(element, matrices=phases | matrices)
        widened = {name: torch.promote_types(dtype, torch.float32) for name, dtype in dtypes.items()}
        tensors = {name: tensor.to(widened.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    if permute is not None:
        tolerances = _TOLERANCES if heads is None else _TOLERANCES_OF_HEADS
        tolerance = max((tolerances[t.dtype] for t in tensors.values() if t.dtype in tolerances), default=0.0)
        tolerance = tolerance if element.changes_values or element.signs else 0.0
        tensors, permutations = sort_units(table, tensors, permute, streams, tolerance)
        element = replace(element, permutations=permutations)
    return (tensors, element) if members is not None else ({n: t[0] for n, t in tensors.items()}, element.select(0))


def check_options(scale: str | None, permute: str | None, heads: str | None = None) -> None:
    """Check the options of `canonicalize`.

    Raises:
        UsageError: an option has an unknown value.
    """
    for name, option, options in (
        ("scale", scale, SCALING_METHODS), ("permute", permute, SORTING_KEYS), ("heads", heads, HEAD_METHODS),
    ):  # fmt: skip
        if option is not None and option not in options:
            raise UsageError(name, expected=f"{', '.join(map(repr, options))}, or None", found=repr(option))


def check_scaling(table: Table, scale: str | None, permute: str | None, streams: bool, approximate: bool) -> None:
    """Check that the options of `canonicalize` are possible for a table.

    Raises:
        UsageError: units should be sorted by norms that are all 1, or a scale has no row of weights.
    """
    if scale is not None:
        check_rows(table, approximate)
        if permute == "norm":
            _check_norms(table, streams, approximate)


def _check_norms(table: Table, streams: bool, approximate: bool) -> None:
    """Refuse to sort by norms that scaling makes equal: rounding errors would decide the order."""
    scaled = {s.writers[0]: s.size for s in table.scales.values() if s.exact or approximate}
    for group in table.groups.values():
        if group.writers and (streams or not group.stream) and scaled.get(group.writers[0], 1) > 1:
            raise UsageError(
                "permute",
                expected=f"'first' or 'max': the rows of {group.writers[0][0]} all have norm 1 once they are scaled",
                found="'norm'",
            )
