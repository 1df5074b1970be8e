"""Metrics of selective prediction, which answers only where the confidence is high."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check
from checkpoints_zoo.evaluation.metrics._ties import tie_means
from checkpoints_zoo.evaluation.metrics.detection import ood_score


def aurc(probs: Tensor, labels: Tensor, *, uncertainty: Tensor | None = None, check: bool = True) -> Tensor:
    """Integrate the error rate of the most confident inputs over their share, and return the AURC, in [0, 1].

    The integral uses trapezoids over the coverages 1/n, 2/n, ..., 1, and is divided by their span 1 - 1/n, as in
    torch-uncertainty. The AURC of a single input is its error (NaN in torch-uncertainty). Inputs of equal confidence
    share their mean error. Source: Geifman & El-Yaniv, Selective classification for deep neural networks (2017).

    Args:
        probs: (input, class) probabilities; the largest one of an input is its confidence.
        labels: number of the class of each input, (input,).
        uncertainty: uncertainty of each input, (input,); None to use `ood_score`, which is 1 − the largest probability.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities or labels are wrong; `check=False` skips this.

    >>> import torch
    >>> aurc(torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.8, 0.2]]), torch.tensor([0, 1, 0]))
    tensor(0.0833)
    """
    if check:
        _check.check_probabilities(probs)
        _check.check_labels(labels, probs)
    sorted_uncertainty, order = (ood_score(probs, check=False) if uncertainty is None else uncertainty).sort()
    errors = tie_means(sorted_uncertainty[None], (probs.argmax(-1) != labels)[order].double()[None])[0]
    inputs = len(errors)
    risks = errors.cumsum(-1) / torch.arange(1, inputs + 1, device=probs.device)
    if inputs == 1:
        return risks[0].to(probs.dtype)
    return ((risks.sum() - (risks[0] + risks[-1]) / 2) / (inputs - 1)).to(probs.dtype)
