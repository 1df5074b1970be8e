"""Shifts of a symmetry table: vectors that are added to parameters without a change of the network's function."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.table import Outer, Part, Product, Sum, Table


def shift(table: Table, params: Mapping[str, Tensor], shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the shifts of a table to parameters, one after the other; return the tensors.

    Sums are computed in float64, then rounded to the dtype of the tensor.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> `(*shape)`.
        shifts: name -> vector (entry); the entries of a shift of the kind "mean" are all equal.

    Raises:
        UsageError: a name is unknown, or a vector has another shape, or entries that differ where they must not.
    """
    for name, vector in shifts.items():
        known = table.shifts.get(name)
        if known is None or tuple(vector.shape) != (known.size,):
            found = repr(name) if known is None else str(tuple(vector.shape))
            raise UsageError(f"shift {name!r}", expected=f"a vector of a shift of {table.network}", found=found)
        if known.kind == "mean" and bool((vector != vector[0]).any()):
            raise UsageError(f"shift {name!r}", expected="equal entries", found="different ones")
    results = {name: tensor.double().contiguous().clone() for name, tensor in params.items()}
    for name, vector in shifts.items():
        one = table.shifts[name]
        values = vector.double()
        # The changes are computed from the parameters before this shift.
        changes = [(term, _change(term, values, results)) for term in one.terms]
        for term, change in changes:
            _view(results[term.part.tensor], term.part).add_(change)
    return {name: tensor.to(params[name].dtype) for name, tensor in results.items()}


def _view(tensor: Tensor, part: Part) -> Tensor:
    return tensor.as_strided(part.size, part.stride, part.offset)


def _change(term: Sum | Outer, vector: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Return what a term of a shift adds to its part."""
    rank = len(term.part.size)
    if isinstance(term, Outer):
        length = term.part.size[term.axis]
        along = torch.ones(length, dtype=torch.float64) if term.gain is None else params[term.gain].reciprocal()
        if term.offset is not None:
            total = ((params[term.offset] + vector) * along).sum()
            vector = -_through(vector, term.products, params) / total
        others = [size for i, size in enumerate(term.part.size) if i != term.axis]
        return (vector.reshape(*others, 1) * along).movedim(-1, term.axis)
    vector = _through(vector, term.products, params)
    if term.ratio is not None:
        offset, gain = term.ratio
        vector = vector * (params[offset] / (params[gain] if gain else 1.0)).sum()
    picked = term.factor * _pick(vector, term.entries)
    return picked.reshape(*[1] * term.axis, -1, *[1] * (rank - 1 - term.axis)).expand(term.part.size)


def _through(vector: Tensor, products: tuple[Product, ...], params: Mapping[str, Tensor]) -> Tensor:
    for product in products:
        vector = _view(params[product.kernel.tensor], product.kernel) @ _pick(vector, product.entries)
    return vector


def _pick(vector: Tensor, entries: tuple[int, ...]) -> Tensor:
    index = torch.tensor(entries)
    return torch.where(index >= 0, vector[index.clamp(min=0)], torch.zeros((), dtype=vector.dtype))


def random_shifts(table: Table, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a vector of standard normal numbers for each shift; return name -> vector, float64 (entry).

    Args:
        table: the network's symmetry table.
        generator: source of randomness, on the CPU.
    """
    vectors = {}
    for name, one in table.shifts.items():
        count = 1 if one.kind == "mean" else one.size
        vectors[name] = torch.randn(count, generator=generator, dtype=torch.float64).expand(one.size)
    return vectors
