"""Matrices of a symmetry: drawn, inverted, checked and applied to parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.gains import check_gains, gains_of
from checkpoints_zoo.symmetry.table import Matrix, Table, Turn


def turn(table: Table, params: Mapping[str, Tensor], matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map the units of each group of matrices along all axes that have these units; return the tensors.

    An activation v (unit) becomes v A, for the matrix A of its group. A kernel that writes v is multiplied by A, and a
    kernel that reads v by the inverse of A. Products are computed in float64, then rounded to the dtype of the tensor.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`, or `(member, *shape)` if stacked.
        matrices: name -> matrices (copy, unit, unit) for all members, or (member, copy, unit, unit).

    Raises:
        UsageError: a name is unknown, a matrix does not belong to its group, or a gain that it passes is 0.
        LayoutError: the gain of a norm is missing.
    """
    check_matrices(table, matrices)
    check_gains(table, params, gains_of(table, matrices, ()))
    results = dict(params)
    for name, tensor in params.items():
        axes = table.tensors[name]
        turns = [one for one in axes.turns if one.matrix in matrices]
        if not turns:
            continue
        is_stacked = tensor.ndim > len(axes.shape)
        count = max([1, *(len(matrices[one.matrix]) for one in turns if matrices[one.matrix].ndim == 4)])
        stacked = tensor.double() if is_stacked else tensor.double()[None].expand(count, *tensor.shape)
        gains = {one.gain: params[one.gain].double() for one in turns if one.gain is not None}
        turned = turn_tensor(turns, stacked, matrices, gains).to(tensor.dtype)
        has_members = is_stacked or any(matrices[one.matrix].ndim == 4 for one in turns)
        results[name] = turned if has_members else turned[0]
    return results


def turn_tensor(
    turns: Sequence[Turn], tensor: Tensor, matrices: Mapping[str, Tensor], gains: Mapping[str, Tensor]
) -> Tensor:
    """Map the axes of one stacked parameter, float64 (member, *shape); return the new parameter.

    Args:
        turns: what maps the axes.
        tensor: the parameter.
        matrices: as in `turn`.
        gains: name -> the vectors that stand between axes and units, (unit) or (member, unit).
    """
    flat = tensor.reshape(len(tensor), -1).clone()
    for one in turns:
        values = matrices[one.matrix].to(flat.device, torch.float64)
        _turn_axis(flat, one, values, None if one.gain is None else gains[one.gain])
    return flat.reshape(tensor.shape)


def _turn_axis(flat: Tensor, one: Turn, matrices: Tensor, gain: Tensor | None) -> None:
    """Map one axis of a parameter in place.

    Args:
        flat: the parameter, float64 (member, entry).
        one: what maps the axis.
        matrices: (copy, unit, unit) or (member, copy, unit, unit).
        gain: the vector between the axis and the units, (unit) or (member, unit).
    """
    part, entries = axis_of_turn(flat, one)
    maps = matrices[..., list(one.copies), :, :]  # (…, block, unit, unit)
    maps = torch.linalg.inv(maps) if one.dual else maps.mT
    block = part[:, entries]  # (member, block, unit, …)
    rows, factors = block.reshape(*block.shape[:3], -1), gain_factors(one, gain, entries)
    part[:, entries] = (torch.linalg.matmul(maps, rows * factors) / factors).reshape(block.shape)


def axis_of_turn(flat: Tensor, one: Turn) -> tuple[Tensor, Tensor]:
    """Return the part of a parameter with the mapped axis first, a view (member, entry, …), and the positions on that
    axis, (block, unit).

    Args:
        flat: the parameter, contiguous (member, entry).
        one: what maps the axis.
    """
    return one.part.of(flat).movedim(one.axis + 1, 1), torch.tensor(one.entries, device=flat.device)


def gain_factors(one: Turn, gain: Tensor | None, entries: Tensor) -> Tensor:
    """Return the factors between an axis and its units, (member, block, unit, 1) or a shape that broadcasts to it."""
    if gain is None:
        return torch.ones((), dtype=torch.float64, device=entries.device)
    factors = (gain + one.gain_shift).reshape(-1, gain.shape[-1])[:, entries, None]
    return factors.reciprocal() if one.is_divided else factors


def random_matrices(
    matrix: Matrix, generator: torch.Generator, count: int | None = None, condition: float = 4.0
) -> Tensor:
    """Draw matrices of a group; return them, float64 (copy, unit, unit), or (member, copy, unit, unit).

    Args:
        matrix: the group.
        generator: source of randomness, on the CPU.
        count: number of members; None: no member axis.
        condition: largest ratio of the singular values of an invertible or complex matrix; at least 1.
    """
    shape = (matrix.count,) if count is None else (count, matrix.count)
    n = matrix.size
    logs = (torch.rand(*shape, n, generator=generator, dtype=torch.float64) - 0.5) * torch.tensor(condition).log()
    if matrix.kind in ("complex", "turn"):
        angle = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 * torch.pi
        length = logs[..., 0].exp() if matrix.kind == "complex" else torch.ones(shape, dtype=torch.float64)
        a, b = length * angle.cos(), length * angle.sin()
        return torch.stack([torch.stack([a, b], -1), torch.stack([-b, a], -1)], -2)
    if matrix.kind == "centred orthogonal":
        basis = centred_basis(n)
        return basis @ _orthogonal((*shape, n - 1), generator) @ basis.T + torch.full(
            (n, n), 1 / n, dtype=torch.float64
        )
    if matrix.kind == "orthogonal":
        return _orthogonal((*shape, n), generator)
    return _orthogonal((*shape, n), generator) @ torch.diag_embed(logs.exp()) @ _orthogonal((*shape, n), generator)


def centred_basis(size: int) -> Tensor:
    """Return an orthonormal basis of the complement of the vector of ones, float64 (size, size - 1)."""
    columns = torch.cat([torch.ones(size, 1), torch.eye(size)[:, : size - 1]], 1).double()
    basis: Tensor = torch.linalg.qr(columns)[0][:, 1:]
    return basis


def _orthogonal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw orthogonal matrices (*shape, shape[-1]) uniformly (Mezzadri 2007, arXiv math-ph/0609050)."""
    q, r = torch.linalg.qr(torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64))
    drawn: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return drawn


def check_matrices(table: Table, matrices: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    """Check that matrices belong to the groups of a table.

    Raises:
        UsageError: a name is unknown, or a matrix does not belong to its group.
    """
    for name, values in matrices.items():
        matrix = table.matrices.get(name)
        if matrix is None:
            raise UsageError(f"matrices {name!r}", expected=f"one among {', '.join(table.matrices)}", found=repr(name))
        shape = (matrix.count, matrix.size, matrix.size)
        problem = _problem(matrix, values, tolerance) if tuple(values.shape[-3:]) == shape else str(tuple(values.shape))
        if problem:
            raise UsageError(
                f"matrices {name!r}",
                expected=f"{matrix.kind} matrices {shape}, or with a member axis before",
                found=problem,
            )


def _problem(matrix: Matrix, values: Tensor, tolerance: float) -> str:
    """Return why matrices do not belong to a group; "" if they do."""
    values = values.double()
    if values.ndim > 4 or not bool(values.isfinite().all()):
        return f"{values.ndim} axes" if values.ndim > 4 else "entries that are not finite"
    n = matrix.size
    identity = torch.eye(n, dtype=torch.float64, device=values.device)
    is_orthogonal = torch.allclose(values @ values.mT, identity, atol=tolerance)
    if matrix.kind in ("orthogonal", "centred orthogonal", "turn") and not is_orthogonal:
        return "matrices that are not orthogonal"
    if matrix.kind == "centred orthogonal" and not torch.allclose(values.sum(-1), identity.sum(-1), atol=tolerance):
        return "matrices that move the vector of ones"
    if matrix.kind in ("complex", "turn"):
        turned = torch.stack([values[..., 1, 1], -values[..., 1, 0]], -1)
        if not torch.allclose(values[..., 0, :], turned, atol=tolerance):
            return "matrices that do not commute with rotations"
    singular = torch.linalg.svdvals(values)
    return "a matrix that has no inverse" if bool((singular[..., -1] <= 1e-12 * singular[..., 0]).any()) else ""


def permute_matrices(matrix: Matrix, table: Table, values: Tensor, permutations: Mapping[str, Tensor]) -> Tensor:
    """Return matrices (…, copy, unit, unit) in the order of the permuted heads."""
    if matrix.group is None or matrix.group not in permutations:
        return values
    each = matrix.count // table.groups[matrix.group].size
    p = permutations[matrix.group].to(values.device)
    copies = (p[..., None] * each + torch.arange(each, device=p.device)).flatten(-2)
    if copies.ndim == 1:
        return values.index_select(-3, copies)
    expanded = values.expand(len(copies), *values.shape[-3:])
    return expanded.gather(1, copies[..., None, None].expand_as(expanded))
