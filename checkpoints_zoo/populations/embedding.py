"""The table that turns probabilities into vectors whose squared distances are Jensen-Shannon divergences.

That there are such vectors: Fuglede & Topsøe, Jensen-Shannon divergence and Hilbert space embedding (2004). By
Frullani's integral, for each class,

    H((p + q) / 2) - (H(p) + H(q)) / 2  =  1/4 ∫ (exp(-s p) - exp(-s q))² ds / s²,  s from 0 to ∞.

Steps of a factor 2 in s give the integral to 1.2e-7 (p + q). The values of exp(-s p) over all these s lie close to a
space of few dimensions; coordinates in it are the vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]

TOLERANCE = 1e-6  # nats of a pair, whatever the probabilities, beside float32's rounding
FINER = 9  # bits: rows of the table an octave of probabilities, between which it is linear


@dataclass(frozen=True)
class Embedding:
    """Maps a probability to a vector, so that squared distances of vectors are divergences.

    Args:
        table: (row, component): vectors of 2^-octaves (1 + i / 2^FINER), then on to 1, float32.
        octaves: below 1 that the table covers; what is less probable is taken as the first row.
        bound: the largest error of a divergence, in nats, over all pairs of distributions.
    """

    table: Tensor
    octaves: int
    bound: float

    def __call__(self, probs: Tensor) -> Tensor:
        """Look probabilities up; return vectors (probability, component).

        Args:
            probs: (probability), float32.
        """
        # A float32's bits are linear in its value within an octave: the upper ones count rows, the rest is between two.
        bits = probs.clamp(2.0**-self.octaves, 1.0).view(torch.int32) - ((127 - self.octaves) << 23)
        rows, shares = bits.new_empty(len(bits), 2), probs.new_empty(len(bits), 2)
        torch.bitwise_right_shift(bits, 23 - FINER, out=rows[:, 0])
        torch.add(rows[:, 0], 1, out=rows[:, 1])
        torch.mul(bits & ((1 << (23 - FINER)) - 1), 2.0 ** (FINER - 23), out=shares[:, 1])
        torch.sub(1.0, shares[:, 1], out=shares[:, 0])
        return torch.nn.functional.embedding_bag(rows, self.table, mode="sum", per_sample_weights=shares)

    def to(self, device: torch.device) -> Embedding:
        return replace(self, table=self.table.to(device))


@lru_cache(maxsize=8)
def embedding(classes: int) -> Embedding:
    """Find the fewest components that keep every divergence within the tolerance; return the embedding.

    The error of a class is bounded on a grid, as a share of (p + q) / 2 + 1 / classes, whose sum is at most 2.

    Args:
        classes: how many probabilities sum to one.
    """
    top = math.ceil(math.log2(classes / TOLERANCE))
    # From where s p is nothing, to where even the least probability has been told from 0; the rest goes to the ends.
    s = 2.0 ** np.arange(-20, top + 1)
    width = math.log(2) / s
    width[[0, -1]] *= 2

    def functions(p: Array) -> Array:
        values: Array = -np.expm1(-np.outer(p, s)) * np.sqrt(width) / 2
        return values

    octaves = top + 8
    rows = np.arange((octaves << FINER) + 2)
    at = 2.0 ** ((rows >> FINER) - octaves) * (1 + (rows & ((1 << FINER) - 1)) / (1 << FINER))
    given = torch.tensor([0.0, *np.logspace(-12, 0, 180)], dtype=torch.float32)
    p = given.double().numpy()
    table, whole = functions(at), functions(p)
    for components in range(9 + int(3 * math.log10(classes)), len(s)):  # fewer have never been enough
        weight = 1 / np.sqrt(p + 1 / classes)
        for _ in range(3):  # towards the smallest largest error: what is far off weighs more the next time
            axes = np.linalg.svd(whole * weight[:, None], full_matrices=False)[2][:components]
            missed = ((whole - whole @ axes.T @ axes) ** 2).sum(1) * weight**2
            weight = weight * np.maximum(missed / missed.max(), 1e-3) ** 0.25
        found = Embedding(torch.tensor(table @ axes.T, dtype=torch.float32), octaves, math.inf)
        bound = _error(found(given).double().numpy(), p, classes)
        if bound <= TOLERANCE:
            break
    return replace(found, bound=bound)


def _error(vectors: Array, p: Array, classes: int) -> float:
    """Return the largest error of a divergence by these vectors of the probabilities of a grid."""
    x, y = p[:, None], p[None]
    z = x + y
    plog = [-a * np.log(np.where(a > 0, a, 1)) for a in (z / 2, x, y)]
    exact = plog[0] - (plog[1] + plog[2]) / 2
    norms = (vectors**2).sum(1)
    found = norms[:, None] + norms - 2 * vectors @ vectors.T
    return float(2 * (np.abs(found - exact) / (z / 2 + 1 / classes)).max())
