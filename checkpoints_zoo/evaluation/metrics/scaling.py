"""Temperature scaling: a single number that softens or sharpens all probabilities alike."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0
_MOST_STEPS = 100
_STEP_TOLERANCE = 1e-9  # Relative step in 1/T below which the search ends.


def temperature(log_probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Fit the temperature T whose softmax(log_probs / T) gives the labels the least mean NLL; return T, float64.

    Source: Guo et al., On calibration of modern neural networks (2017). The NLL is convex in b = 1/T. The derivative of
    the NLL is the mean of E_b[log p] - log p(label), where the expectation is over the scaled probabilities. Newton's
    method finds the root; a step that would leave the bracket is replaced by bisection of log b. T is between 0.05 and
    20: it is 0.05 if a lower T is always better (all inputs classified correctly), 20 if a higher T is always better,
    and 1 if T does not matter (all probabilities equal).

    Args:
        log_probs: log probabilities (input, class), in nats; for an ensemble, the log of the members' mean
            probabilities, because the members are averaged first and calibrated then (Rahaman & Thiery, Uncertainty
            quantification and deep ensembles, 2021).
        labels: number of the class of each input, (input,).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: log probabilities or labels are wrong; `check=False` skips this.

    >>> log_probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]).log()  # right two times of three
    >>> t = temperature(log_probs, torch.tensor([0, 0, 1]))
    >>> (log_probs / t).softmax(-1)[0, 0]
    tensor(0.6667)
    """
    if check:
        _check.check_log_probabilities(log_probs)
        _check.check_labels(labels, log_probs)
    values = log_probs.double()
    # Subtract the largest log probability, so that no exponential overflows; log 0 becomes the log of the smallest
    # positive float64.
    values = (values - values.amax(-1, keepdim=True)).clamp_(min=-745.0)
    label_log_probs = values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def nll_derivatives(inverse_temperature: float) -> tuple[float, float]:
        """Return the first and second derivative of the mean NLL at 1/T = b."""
        unnormalised_probs = (values * inverse_temperature).exp_()
        total = unnormalised_probs.sum(-1)
        first_derivative = torch.linalg.vecdot(unnormalised_probs, values) / total
        second_derivative = (
            torch.linalg.vecdot(unnormalised_probs.mul_(values), values) / total - first_derivative.square()
        )
        return float((first_derivative - label_log_probs).mean()), float(second_derivative.mean())

    low, high, inverse_temperature = 1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE, 1.0
    slope, curvature = nll_derivatives(inverse_temperature)
    if slope < 0 and nll_derivatives(high)[0] <= 0:
        return values.new_tensor(LOWEST_TEMPERATURE)
    if slope > 0 and nll_derivatives(low)[0] >= 0:
        return values.new_tensor(HIGHEST_TEMPERATURE)
    for _ in range(_MOST_STEPS):
        if slope == 0:
            break
        low, high = (inverse_temperature, high) if slope < 0 else (low, inverse_temperature)
        next_inverse = inverse_temperature - slope / curvature if curvature > 0 else 0.0
        if not low < next_inverse < high:
            next_inverse = (low * high) ** 0.5
        previous_inverse, inverse_temperature = inverse_temperature, next_inverse
        if abs(inverse_temperature - previous_inverse) <= _STEP_TOLERANCE * inverse_temperature:
            break
        slope, curvature = nll_derivatives(inverse_temperature)
    return values.new_tensor(1 / inverse_temperature)


def tempered(log_probs: Tensor, temperature: float | Tensor) -> Tensor:
    """Divide log probabilities by a temperature and normalise the quotients; return log probabilities, (input, class)
    nats.

    Args:
        log_probs: log probabilities (input, class), in nats.
        temperature: the temperature; a temperature above 1 softens the probabilities, a temperature below 1 sharpens
            the probabilities.

    >>> tempered(torch.tensor([[0.8, 0.2]]).log(), 0.5).exp()
    tensor([[0.9412, 0.0588]])
    """
    return (log_probs / temperature).log_softmax(-1)
