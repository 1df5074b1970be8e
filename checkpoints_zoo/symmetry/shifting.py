"""Shifts of a symmetry table: vectors that are added to parameters without a change of the network's function.

The shifts of a network commute. A matrix, scale, sign or permutation maps the vector of a shift like the axis of the
parameter that the vector lies along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.gains import check_gains, gains_of, tensors_of_shifts
from checkpoints_zoo.symmetry.table import Axes, Outer, Product, Shift, Sum, Table


def shift(table: Table, params: Mapping[str, Tensor], shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the shifts of a table to parameters; return the tensors.

    Sums are computed in float64, then rounded to the dtype of the tensor.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`, or `(member, *shape)` if stacked.
        shifts: name -> vector (entry) for all members, or (member, entry); all entries of a shift of the kind "mean"
            are equal.

    Raises:
        UsageError: a name is unknown, or a vector has another shape, or entries that differ where they must not; or a
            gain that the shift passes is 0.
        LayoutError: a tensor that the shifts need is missing.
    """
    check_shifts(table, shifts)
    check_gains(table, params, gains_of(table, (), shifts), tensors_of_shifts(table, shifts))
    changed = {term.part.tensor for name in shifts for term in table.shifts[name].terms}
    stacked = {name: tensor.ndim > len(table.tensors[name].shape) for name, tensor in params.items()}
    wide = {n: (tensor if stacked[n] else tensor[None]).double().contiguous() for n, tensor in params.items()}
    results = {name: tensor.clone() if name in changed else tensor for name, tensor in wide.items()}
    for name, vector in shifts.items():
        add_shift(table.shifts[name], results, vector.double().reshape(-1, vector.shape[-1]))
    return {
        name: (results[name] if stacked[name] else results[name][0]).to(tensor.dtype) if name in changed else tensor
        for name, tensor in params.items()
    }


def add_shift(one: Shift, params: Mapping[str, Tensor], vector: Tensor) -> None:
    """Add one shift to parameters in place.

    Args:
        one: the shift.
        params: parameters, name -> contiguous float64 (member, *shape).
        vector: (member, entry), or (1, entry).
    """
    vector = vector.to(next(iter(params.values())).device)
    if one.gain is not None:
        vector = vector * params[one.gain]
    # All changes are computed from the parameters before this shift.
    for term, change in [(term, _change(term, vector, params)) for term in one.terms]:
        term.part.of(params[term.part.tensor]).add_(change)


def _change(term: Sum | Outer, vector: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Return what a term of a shift adds to its part, (member, *size) or a shape that broadcasts to it."""
    rank = len(term.part.size)
    if isinstance(term, Outer):
        along = vector.new_ones(1, term.part.size[term.axis]) if term.gain is None else params[term.gain].reciprocal()
        if term.offset is not None:
            total = ((params[term.offset] + vector) * along).sum(-1, keepdim=True)
            vector = -_through(vector, term.products, params) / total
        others = [size for i, size in enumerate(term.part.size) if i != term.axis]
        along = along.reshape(len(along), *[1] * (rank - 1), -1)
        return (vector.reshape(len(vector), *others, 1) * along).movedim(-1, term.axis + 1)
    vector = _through(vector, term.products, params)
    if term.ratio is not None:
        offset, gain = term.ratio
        vector = vector * (params[offset] / (params[gain] if gain else 1.0)).sum(-1, keepdim=True)
    picked = term.factor * _pick(vector, term.entries)
    return picked.reshape(len(picked), *[1] * term.axis, -1, *[1] * (rank - 1 - term.axis))


def _through(vector: Tensor, products: tuple[Product, ...], params: Mapping[str, Tensor]) -> Tensor:
    for product in products:
        kernel = product.kernel.of(params[product.kernel.tensor])
        vector = (kernel @ _pick(vector, product.entries)[..., None])[..., 0]
        if product.is_centred:
            gain = 1.0 if product.gain is None else params[product.gain]
            vector = vector - (vector * gain).mean(-1, keepdim=True) / gain
    return vector


def _pick(vector: Tensor, entries: tuple[int, ...]) -> Tensor:
    index = torch.tensor(entries, device=vector.device)
    return torch.where(index >= 0, vector[..., index.clamp(min=0)], 0.0)


def random_shifts(
    table: Table, generator: torch.Generator, *, members: int | None = None, spread: float = 1.0
) -> dict[str, Tensor]:
    """Draw a vector of normal numbers for each shift; return name -> vector, float64 (entry) or (member, entry).

    Args:
        table: the network's symmetry table.
        generator: source of randomness, on the CPU.
        members: number of vectors of each shift; None: one vector without a member axis.
        spread: standard deviation of the numbers.
    """
    vectors = {}
    for name, one in table.shifts.items():
        count = 1 if one.kind == "mean" else one.size
        drawn = spread * torch.randn(members or 1, count, generator=generator, dtype=torch.float64)
        vectors[name] = drawn.expand(-1, one.size) if members is not None else drawn.expand(-1, one.size)[0]
    return vectors


def check_shifts(table: Table, shifts: Mapping[str, Tensor]) -> None:
    """Check that vectors belong to the shifts of a table.

    Raises:
        UsageError: a name is unknown, or a vector has another shape, or entries that differ where they must not.
    """
    for name, vector in shifts.items():
        known = table.shifts.get(name)
        if known is None or vector.ndim not in (1, 2) or vector.shape[-1] != known.size:
            found = repr(name) if known is None else str(tuple(vector.shape))
            raise UsageError(f"shift {name!r}", expected=f"a vector of a shift of {table.network}", found=found)
        if not bool(vector.isfinite().all()):
            raise UsageError(f"shift {name!r}", expected="finite numbers", found="others")
        if known.kind == "mean" and bool((vector != vector[..., :1]).any()):
            raise UsageError(f"shift {name!r}", expected="equal entries", found="different ones")


def axes_of_vector(table: Table, one: Shift) -> tuple[tuple[int, ...], int]:
    """Return the axes of the parameter that the vector of a shift lies along, and its first entry on the first axis."""
    shape = table.tensors[one.part.tensor].shape
    if one.axis < 0:
        return tuple(i for i in range(len(shape)) if i != -1 - one.axis), 0
    strides = torch.empty(shape, device="meta").stride()
    stride = one.part.stride[one.axis]
    (axis,) = [i for i, n in enumerate(shape) if strides[i] == stride and n > 1][:1] or [0]
    return (axis,), one.part.offset // max(stride, 1) % shape[axis]


def spread_vector(table: Table, one: Shift, vector: Tensor) -> tuple[Axes, Tensor]:
    """Lay the vector of a shift along its parameter, equal along all other axes; return the symmetries of these axes,
    and the tensor (member, *shape).

    Args:
        vector: (member, entry).
    """
    axes = table.tensors[one.part.tensor]
    along, first = axes_of_vector(table, one)
    strides = torch.empty(axes.shape, device="meta").stride()
    tensor = vector.new_zeros(len(vector), *axes.shape)
    part = tensor if one.axis < 0 else tensor.narrow(along[0] + 1, first, one.size)
    part += vector.reshape(len(vector), *(size if i in along else 1 for i, size in enumerate(part.shape[1:])))
    kept = replace(
        axes, shift=0.0,
        moves=tuple(move for move in axes.moves if move.axis in along),
        powers=tuple(power for power in axes.powers if power.axis in along and one.gain is None),
        signs=tuple(power for power in axes.signs if power.axis in along and one.gain is None),
        turns=tuple(replace(t, gain=None) for t in axes.turns if t.part.stride[t.axis] in [strides[i] for i in along]),
    )  # fmt: skip
    return kept, tensor


def collect_vector(table: Table, one: Shift, tensor: Tensor) -> Tensor:
    """Return the vector (member, entry) that is laid along a parameter (member, *shape)."""
    along, first = axes_of_vector(table, one)
    for axis in range(tensor.ndim - 1):
        if axis not in along:
            tensor = tensor.narrow(axis + 1, 0, 1)
    if one.axis >= 0:
        tensor = tensor.narrow(along[0] + 1, first, one.size)
    vector = tensor.reshape(len(tensor), prod(tensor.shape[1:]))
    return vector.mean(-1, keepdim=True).expand_as(vector) if one.kind == "mean" else vector
