"""Gains that matrices and shifts divide by, and the other tensors that shifts need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry.table import Sum, Table


def tensors_of_shifts(table: Table, names: Iterable[str]) -> set[str]:
    """Return the names of the tensors that shifts change or need."""
    needed: set[str | None] = set()
    for name in names:
        needed.add(table.shifts[name].gain)
        for term in table.shifts[name].terms:
            needed |= {term.part.tensor}
            needed |= {part for product in term.products for part in (product.kernel.tensor, product.gain)}
            needed |= set(term.ratio or ()) if isinstance(term, Sum) else {term.gain, term.offset}
    return {name for name in needed if name is not None}


def gains_of(table: Table, matrices: Collection[str] | None = None, shifts: Collection[str] | None = None) -> set[str]:
    """Return the names of the gains that matrices and shifts divide by.

    Args:
        table: the network's symmetry table.
        matrices, shifts: names of groups of matrices and of shifts; None: all.
    """
    found: set[str | None] = {
        turn.gain
        for axes in table.tensors.values()
        for turn in axes.turns
        if matrices is None or turn.matrix in matrices
    }
    for name, shift in table.shifts.items():
        if shifts is None or name in shifts:
            found.add(shift.gain)
            for term in shift.terms:
                found |= {product.gain for product in term.products}
                found |= {(term.ratio or (None, None))[1]} if isinstance(term, Sum) else {term.gain}
    return {name for name in found if name is not None}


def check_gains(table: Table, params: Mapping[str, Tensor], names: Iterable[str], needed: Iterable[str] = ()) -> None:
    """Check that the gains that matrices and shifts divide by are there, and not 0.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> (*shape), or (member, *shape).
        names: names of the gains.
        needed: names of other tensors that have to be there.

    Raises:
        LayoutError: a tensor is missing.
        UsageError: a gain has an entry that is 0.
    """
    divisors = set(names)
    shift_of_gain = {turn.gain: turn.gain_shift for axes in table.tensors.values() for turn in axes.turns}
    for name in sorted({*divisors, *needed}):
        if name not in params:
            raise LayoutError(f"tensor {name!r}", expected=f"it, as {table.network} has it", found="none", tensor=name)
        if name in divisors and bool((params[name] + shift_of_gain.get(name, 0.0) == 0).any()):
            raise UsageError(
                f"gain {name!r}", expected="no entry that is 0, so that matrices and shifts can pass it", found="0",
                do="Leave them out: canonicalize without heads=, align with using='heads'",
            )  # fmt: skip
