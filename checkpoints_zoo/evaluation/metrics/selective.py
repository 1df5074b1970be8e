"""Selective prediction: answering only where the confidence is high."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check
from checkpoints_zoo.evaluation.metrics._ties import tie_means


def aurc(probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Integrate the error rate of the most confident inputs over their share, and return the AURC, in [0, 1].

    Trapezoids over the coverages 1/n, 2/n, ..., 1, divided by 1 - 1/n, their span, as torch-uncertainty
    normalises it; for a single input (where that is NaN) its error. Inputs of equal confidence count as
    equally wrong each: the mean over their orders. Geifman & El-Yaniv, Selective classification for deep
    neural networks (2017).

    Args:
        probs: (input, class) probabilities; the confidence is the largest.
        labels: (input,) classes.
        check: False when both have been checked before.

    Raises:
        ValueError: if the probabilities or labels are none (see `check`).

    >>> import torch
    >>> aurc(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0]))
    tensor(0.0833)
    """
    if check:
        _check.probabilities(probs)
        _check.classes_of(labels, probs)
    confidence, top = probs.max(-1)
    ordered, order = confidence.sort(descending=True)
    wrong = tie_means(ordered[None], (top != labels)[order].double()[None])[0]
    n = len(wrong)
    risk = wrong.cumsum(-1) / torch.arange(1, n + 1, device=probs.device)
    if n == 1:
        return risk[0].to(probs.dtype)
    return ((risk.sum() - (risk[0] + risk[-1]) / 2) / (n - 1)).to(probs.dtype)
