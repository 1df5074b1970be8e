"""Ties: a metric that sorts inputs by score gives all inputs of equal score the mean of their values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def tie_means(scores: Tensor, values: Tensor) -> Tensor:
    """Replace each value by the mean over the inputs of equal score, and return the values (column, input).

    The metric then depends neither on the order of the inputs nor on the processor (torch.sort returns ties in any
    order). A metric that is linear in the values then equals its average over all orders of the ties.

    Args:
        scores: scores (column, input), sorted along the inputs.
        values: values (column, input), in the same order as the scores.
    """
    is_new_score = scores[:, 1:] != scores[:, :-1]
    if bool(is_new_score.all()):
        return values
    tie_index = F.pad(is_new_score.cumsum(-1), (1, 0))
    tie_sums = torch.zeros_like(values).scatter_add_(-1, tie_index, values)
    sizes = torch.zeros_like(values).scatter_add_(-1, tie_index, torch.ones_like(values))
    return (tie_sums / sizes).gather(-1, tie_index)
