"""Balance matrices: choose one network for all networks that matrices turn into each other.

The products of queries and keys, and of values and the output layer, stay; their factors become U S^½ and V S^½ for the
product's singular values S. Pairs of units under rotary positions get equal norms. A residual stream is rotated to the
principal axes of the weights that write it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.matrices import axis_of_turn, centred_basis, gain_factors, turn
from checkpoints_zoo.symmetry.table import Axes, Matrix, Table, Turn

_LEAST_SINGULAR = 1e-8  # Singular values below this share of the largest count as 0.
_LEAST_GAP = 1e-9  # Eigenvalues that differ by at most this share of the largest count as equal.
BALANCED_KINDS = ("invertible", "complex")


class Balance(NamedTuple):
    """Balanced members.

    Args:
        tensors: the tensors, name -> float64 (member, *shape).
        matrices: group of matrices -> the applied matrices, (member, copy, unit, unit).
        unbalanced: group of matrices -> (member, copy), whether a matrix stayed the identity: the product has a lower
            rank than the head has units, or two principal axes are equally long.
    """

    tensors: dict[str, Tensor]
    matrices: dict[str, Tensor]
    unbalanced: dict[str, Tensor]


class Sides(NamedTuple):
    """The weights on the two sides of the matrices of a group, float64 (member, copy, unit, column).

    Args:
        written: what is multiplied by the transposed matrix, such as queries.
        read: what is multiplied by the inverse, such as keys.
    """

    written: Tensor
    read: Tensor


def balance_matrices(table: Table, params: Mapping[str, Tensor], streams: bool = False) -> Balance:
    """Balance the matrices inside heads, and rotate streams; return the tensors and the matrices.

    The signs of units and the phases of rotated pairs are still free, see `fix_phases`.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> float64 (member, *shape).
        streams: whether to rotate residual streams as well.
    """
    matrices: dict[str, Tensor] = {}
    unbalanced: dict[str, Tensor] = {}
    folded = _with_gains_of_streams(table, params)
    for name, matrix in table.matrices.items():
        if matrix.kind in BALANCED_KINDS:
            matrices[name], unbalanced[name] = balancing_matrices(matrix, sides(table, folded, name))
    tensors, rotations = turn(table, params, matrices), dict[str, Tensor]()
    for name, matrix in table.matrices.items():
        if matrix.kind not in (*BALANCED_KINDS, "turn") and (streams or not is_stream(matrix)):
            rotations[name], unbalanced[name] = _principal_axes(table, tensors, matrix)
    return Balance(turn(table, tensors, rotations), matrices | rotations, unbalanced)


def _with_gains_of_streams(table: Table, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply kernels that read a stream by the gain before them: rotations of the stream, and scales of the gain, do
    not change the inner products of their rows."""
    folded = dict(params)
    for name, tensor in params.items():
        turns = [t for t in table.tensors[name].turns if t.gain is not None and not t.is_divided]
        if any(is_stream(table.matrices[one.matrix]) for one in turns):
            folded[name] = tensor.double().contiguous().clone()
        for one in turns:
            if one.gain is not None and is_stream(table.matrices[one.matrix]):
                part, entries = axis_of_turn(folded[name].view(len(tensor), -1), one)
                factors = gain_factors(one, params[one.gain].double(), entries)
                part[:, entries] = part[:, entries] * factors.reshape(*factors.shape[:3], *[1] * (part.ndim - 2))
    return folded


def is_stream(matrix: Matrix) -> bool:
    """Return whether orthogonal matrices rotate a residual stream, and not the units inside heads."""
    return matrix.kind in ("orthogonal", "centred orthogonal") and matrix.count == 1


def sides(table: Table, params: Mapping[str, Tensor], name: str, roles: Collection[str] | None = None) -> Sides:
    """Collect the weights on both sides of the matrices of a group.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (member, *shape).
        name: name of the group of matrices.
        roles: roles of the tensors that are collected; None: all.
    """
    columns: dict[bool, list[Tensor]] = {False: [], True: []}
    for axes, one, rows in rows_of_turns(table, params, name):
        if roles is None or axes.role in roles:
            columns[one.dual].append(rows)
    matrix, tensor = table.matrices[name], next(iter(params.values()))
    empty = torch.zeros(len(tensor), matrix.count, matrix.size, 0, dtype=torch.float64, device=tensor.device)
    return Sides(*(torch.cat([empty, *columns[is_read]], -1) for is_read in (False, True)))


def rows_of_turns(table: Table, params: Mapping[str, Tensor], name: str) -> Iterator[tuple[Axes, Turn, Tensor]]:
    """Yield the weights (member, copy, unit, column) that each turn of a group of matrices maps, in float64."""
    matrix = table.matrices[name]
    for tensor, axes in table.tensors.items():
        for one in axes.turns:
            if one.matrix == name and tensor in params:
                part, entries = axis_of_turn(params[tensor].double().contiguous().flatten(1), one)
                gain = None if one.gain is None else params[one.gain].double()
                block = part[:, entries]
                rows = block.reshape(*block.shape[:3], -1) * gain_factors(one, gain, entries)
                yield axes, one, _by_copy(rows, one.copies, matrix.count)


def _by_copy(rows: Tensor, copies: tuple[int, ...], count: int) -> Tensor:
    """Return rows (member, block, unit, column) as (member, copy, unit, column): the columns of the blocks of a copy
    lie side by side, with zeros where a copy has fewer blocks."""
    blocks = [[block for block, copy in enumerate(copies) if copy == c] for c in range(count)]
    width = max(map(len, blocks))
    index = torch.tensor([[*some, *[len(copies)] * (width - len(some))] for some in blocks], device=rows.device)
    padded = torch.cat([rows, torch.zeros_like(rows[:, :1])], 1)
    return padded[:, index].transpose(2, 3).flatten(3)


def balancing_matrices(matrix: Matrix, weights: Sides) -> tuple[Tensor, Tensor]:
    """Return the matrices (member, copy, unit, unit) that balance the two sides, and whether there is none (member,
    copy), for which the identity is returned.

    After balancing, W Wᵀ = R Rᵀ for the written side W and the read side R (unit, column): no invertible matrix, or
    complex number a pair, gives a smaller sum of squares (Kempf and Ness 1979).
    """
    identity = torch.eye(matrix.size, dtype=torch.float64, device=weights.written.device)
    identity = identity.expand(*weights.written.shape[:2], *identity.shape)
    if matrix.kind == "complex":
        norms = [torch.linalg.vector_norm(side, dim=(-2, -1)) for side in weights]
        has_none = ~((norms[0] > 0) & (norms[1] > 0))
        return identity * torch.where(has_none, 1.0, norms[1] / norms[0]).sqrt()[..., None, None], has_none
    if min(side.shape[-1] for side in weights) < matrix.size:
        return identity, torch.ones_like(identity[..., 0, 0], dtype=torch.bool)
    # Thin factors: W = Rᵥᵀ Qᵥᵀ and R = Rₗᵀ Qₗᵀ, so that the product Wᵀ R has the singular values of Rᵥ Rₗᵀ.
    written, read = (torch.linalg.qr(side.mT, mode="r").R for side in weights)
    u, values, _ = torch.linalg.svd(written @ read.mT)
    has_none = ~(values[..., -1] > _LEAST_SINGULAR * values[..., 0])
    safe = torch.where(has_none[..., None, None], identity, written)
    balanced = torch.linalg.solve_triangular(safe, u * values.sqrt()[..., None, :], upper=True)
    return torch.where(has_none[..., None, None], identity, balanced), has_none


def _principal_axes(table: Table, params: Mapping[str, Tensor], matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Return the rotations (member, copy, unit, unit) to the principal axes of the written weights, and whether two of
    them are equally long (member, copy), for which the identity is returned."""
    written, fixed = [], []
    for axes, one, part in rows_of_turns(table, params, matrix.name):
        if not one.dual and not one.is_divided:
            written.append(part)
            fixed += [part] if keeps_other_axes(axes, one) else []
    rows = torch.cat(written, -1)
    size = matrix.size
    basis = centred_basis(size) if matrix.kind == "centred orthogonal" else torch.eye(size, dtype=torch.float64)
    basis = basis.to(rows.device)
    values, vectors = torch.linalg.eigh(basis.T @ rows @ rows.mT @ basis)
    axes_of_rows = basis @ vectors.flip(-1)
    deciding = axes_of_rows.mT @ torch.cat(fixed or written, -1)
    axes_of_rows = axes_of_rows * _sign_of_largest(deciding)[..., None, :]
    rotation = axes_of_rows @ basis.T + (torch.eye(size, dtype=torch.float64, device=rows.device) - basis @ basis.T)
    is_tied = (values.diff(dim=-1) <= _LEAST_GAP * values[..., -1:]).any(-1)
    identity = torch.eye(size, dtype=torch.float64, device=rows.device)
    return torch.where(is_tied[..., None, None], identity, rotation), is_tied


def keeps_other_axes(axes: Axes, one: Turn) -> bool:
    """Return whether no symmetry changes the other axes of a parameter."""
    strides = torch.empty(axes.shape, device="meta").stride()
    changed = {move.axis for move in axes.moves} | {power.axis for power in axes.signs}
    steps = {strides[axis] for axis in changed} | {turn.part.stride[turn.axis] for turn in axes.turns}
    return steps <= {one.part.stride[one.axis]}


def _sign_of_largest(rows: Tensor) -> Tensor:
    """Return the sign (…, row) of the entry of each row (…, row, column) with the largest magnitude; 1 for 0."""
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))[..., 0]
    return torch.where(largest < 0, -1.0, 1.0).to(rows.dtype)


def fix_phases(table: Table, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Choose the signs of units of balanced heads, and the phases of pairs; return the tensors and the matrices.

    The largest weight of a unit becomes positive; the largest weight of a pair, as a complex number, real and positive.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> float64 (member, *shape).
    """
    matrices: dict[str, Tensor] = {}
    for name, matrix in table.matrices.items():
        if is_stream(matrix) or matrix.kind == "centred orthogonal":
            continue  # Their axes have signs already; other signs would move the vector of ones.
        written = sides(table, params, name).written
        if not written.shape[-1]:
            continue
        if matrix.kind in ("complex", "turn"):
            numbers = torch.complex(written[..., 0, :], written[..., 1, :])
            largest = numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))[..., 0]
            matrices[name] = as_matrices(torch.where(largest == 0, 1.0, largest.conj() / largest.abs()))
        else:
            matrices[name] = torch.diag_embed(_sign_of_largest(written))
    return turn(table, params, matrices), matrices


def as_matrices(numbers: Tensor) -> Tensor:
    """Return the matrices (…, 2, 2) that multiply pairs of units, as complex numbers, by numbers (…)."""
    return torch.stack(
        [torch.stack([numbers.real, numbers.imag], -1), torch.stack([-numbers.imag, numbers.real], -1)], -2
    )
