"""Remove shifts: choose one network for all networks that shifts turn into each other.

Redundant biases and offsets become 0, kernels that read a centred activation lose what its mean of zero hides, and
kernels that write an activation that only layer norms read get the mean 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.gains import check_gains, gains_of, tensors_of_shifts
from checkpoints_zoo.symmetry.shifting import add_shift
from checkpoints_zoo.symmetry.table import Outer, Shift, Table

_KINDS = ("reader", "writer", "constant", "mean")  # Kernels come before the constants that pass them.
_MOST_ROUNDS = 4


def remove_shifts(
    table: Table, params: Mapping[str, Tensor], names: Collection[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Shift the members to where all shifts are 0; return the tensors and the applied shifts (member, entry).

    Two exceptions: an offset that a kernel without a bias balances becomes the gain of its norm, since an offset of 0
    would lose what the kernel adds; and numbers that only shifts of one entry each fix stay where they are.

    Args:
        table: the network's symmetry table.
        params: parameters, name -> float64 (member, *shape), including all shifted tensors.
        names: names of the shifts to remove; None: all.

    Raises:
        LayoutError: a tensor that the shifts need is missing.
        UsageError: a gain that a shift passes is 0.
    """
    chosen = [shift for name, shift in table.shifts.items() if names is None or name in names]
    all_names = {shift.name for shift in chosen}
    check_gains(table, params, gains_of(table, (), all_names), tensors_of_shifts(table, all_names))
    results = {name: tensor.contiguous().clone() for name, tensor in params.items()}
    applied: dict[str, Tensor] = {}
    for _ in range(_MOST_ROUNDS):  # Constants change the means of biases, and constants that come after them.
        largest = 0.0
        for one in sorted(chosen, key=lambda shift: _KINDS.index(shift.kind)):
            vector = _removing_vector(one, results)
            add_shift(one, results, vector)
            applied[one.name] = applied[one.name] + vector if one.name in applied else vector
            largest = max(largest, float(vector.abs().max()) if vector.numel() else 0.0)
        if largest < 1e-14:
            break
    return results, {name: applied[name] for name in table.shifts if name in applied}


def _removing_vector(one: Shift, params: Mapping[str, Tensor]) -> Tensor:
    """Return the vector (member, entry) that removes one shift."""
    term = one.terms[0]
    part = term.part.of(params[term.part.tensor])
    if isinstance(term, Outer):
        weights = torch.ones((), dtype=part.dtype) if term.gain is None else params[term.gain]
        weights = weights.reshape(-1, *[1] * (part.ndim - 2), weights.shape[-1]) if weights.ndim else weights
        return -(part.movedim(term.axis + 1, -1) * weights).mean(-1).reshape(len(part), -1)
    means = part.movedim(term.axis + 1, -1).reshape(len(part), -1, part.shape[term.axis + 1]).mean(1)
    if one.kind == "mean":
        return -means.mean(-1, keepdim=True).expand_as(means)
    gain = 1.0 if one.gain is None else params[one.gain]
    target = 1.0 if any(isinstance(t, Outer) for t in one.terms) else 0.0
    is_free = torch.tensor(term.entries, device=part.device) >= 0
    return torch.where(is_free, target - means / gain, 0.0)
