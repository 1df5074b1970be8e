"""Temperature scaling: one number that softens or sharpens all probabilities alike."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check

LOWEST, HIGHEST = 0.05, 20.0
_MOST_STEPS = 100
_EXACT = 1e-9  # relative step in 1/T at which it stands still


def temperature(log_probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Fit the temperature T whose softmax(log_probs / T) gives the labels the least mean NLL; return it, float64.

    Guo et al., On calibration of modern neural networks (2017). In b = 1/T the NLL is convex, its derivative the mean
    of E_b[log p] - log p(label), the expectation taken over the scaled probabilities: its root by Newton's steps, and
    by halving log b where they leave the bracket. T stays within 0.05 and 20: it is 0.05 where the NLL falls all the
    way (all inputs classified correctly), 20 where it rises all the way, and 1 where no T changes it (all
    probabilities equal).

    Args:
        log_probs: (input, class), nats; of an ensemble, the log of the members' mean probabilities: Rahaman & Thiery,
            Uncertainty quantification and deep ensembles (2021), pool first and calibrate then.
        labels: (input,) classes.
        check: False when both have been checked before.

    Raises:
        ValueError: if the log probabilities or labels are none (see `check`).

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]).log()  # right two times of three
    >>> t = temperature(log_probs, torch.tensor([0, 0, 1]))
    >>> (log_probs / t).softmax(-1)[0, 0]
    tensor(0.6667)
    """
    if check:
        _check.log_probabilities(log_probs)
        _check.classes_of(labels, log_probs)
    values = log_probs.double()
    # Below the largest, so that no power overflows; log 0 stands for the least probability there is.
    values = (values - values.amax(-1, keepdim=True)).clamp_(min=-745.0)
    of_label = values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def slopes(b: float) -> tuple[float, float]:
        """Return the first and second derivative of the mean NLL at 1/T = b."""
        powers = (values * b).exp_()
        total = powers.sum(-1)
        first = torch.linalg.vecdot(powers, values) / total
        second = torch.linalg.vecdot(powers.mul_(values), values) / total - first.square()
        return float((first - of_label).mean()), float(second.mean())

    low, high, b = 1 / HIGHEST, 1 / LOWEST, 1.0
    slope, curvature = slopes(b)
    if slope < 0 and slopes(high)[0] <= 0:
        return values.new_tensor(LOWEST)
    if slope > 0 and slopes(low)[0] >= 0:
        return values.new_tensor(HIGHEST)
    for _ in range(_MOST_STEPS):
        if slope == 0:
            break
        low, high = (b, high) if slope < 0 else (low, b)
        after = b - slope / curvature if curvature > 0 else 0.0
        if not low < after < high:
            after = (low * high) ** 0.5
        before, b = b, after
        if abs(b - before) <= _EXACT * b:
            break
        slope, curvature = slopes(b)
    return values.new_tensor(1 / b)


def tempered(log_probs: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide log probabilities by a temperature and normalise them again; return them, (input, class) nats.

    Args:
        log_probs: (input, class), nats.
        temperature: above 1 softens, below 1 sharpens.

    >>> tempered(torch.tensor([[0.8, 0.2]]).log(), 0.5).exp()
    tensor([[0.9412, 0.0588]])
    """
    return (log_probs / temperature).log_softmax(-1)
