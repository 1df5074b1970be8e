"""Linear assignment: which permutation of a matrix's columns has the greatest sum on the diagonal."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALL = 96  # units below which scipy alone is faster
_STAGES = ((0.1, 10), (0.03, 10))  # smoothing, in standard deviations of the gains, and steps with it
_FLOOR = -80.0  # logarithm of the smallest number taken: float32 holds it

Matrix = NDArray[np.float32] | NDArray[np.float64]
Places = NDArray[np.int64]


def assign(gains: Matrix) -> Places:
    """Return the permutation p that maximises the sum of gains[u, p[u]], (unit).

    scipy solves it, exactly, for large matrices after a number is taken off each row and each column: that changes
    all sums alike, and spares most of its search if what is left is nearly the best assignment's dual solution.

    Args:
        gains: (unit, unit), finite.

    >>> assign(np.array([[1.0, 2.0], [3.0, 5.0]])).tolist()
    [0, 1]
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and rarely needed

    costs = -gains.astype(np.float64) if len(gains) < _SMALL else _reduced(gains)
    places: Places = linear_sum_assignment(costs)[1].astype(np.int64, copy=False)
    return places


def _reduced(gains: Matrix) -> NDArray[np.float64]:
    """Return costs, less a number a row and one a column."""
    exact = torch.from_numpy(gains)
    rows, columns = potentials(exact)
    costs = rows[:, None] - exact
    costs += columns
    costs -= costs.amin(1, keepdim=True)
    result: NDArray[np.float64] = costs.numpy()
    return result


def potentials(gains: Tensor) -> tuple[Tensor, Tensor]:
    """Return a number a row and one a column, (unit) each, in float64, whose sums are little more than the gains.

    Those of the assignment smoothed by entropy, found by Sinkhorn's steps (Cuturi 2013, arXiv 1306.0895) in float32.

    Args:
        gains: (unit, unit).
    """
    most, spread = gains.amax(1), float(gains.std(correction=0))
    rows, columns = most.double(), torch.zeros(len(gains), dtype=torch.float64)
    if not 0 < spread < float("inf"):
        return rows, columns
    scaled = (gains - most[:, None]).div_(spread).float()
    up, down = torch.zeros(2, len(gains))
    for smoothing, steps in _STAGES:
        kernel = scaled - up[:, None]
        kernel -= down
        kernel.div_(smoothing).clamp_(_FLOOR, -_FLOOR).exp_()
        right = torch.ones_like(down)
        for _ in range(steps):
            left = torch.mv(kernel, right).reciprocal_()
            right = torch.mv(kernel.T, left).reciprocal_()
        up, down = up - smoothing * left.log(), down - smoothing * right.log()
    found = rows + spread * up.double(), spread * down.double()
    return found if all(bool(part.isfinite().all()) for part in found) else (rows, columns)
