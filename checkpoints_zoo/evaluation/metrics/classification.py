"""Accuracy, negative log-likelihood and Brier score of one predictive distribution."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from checkpoints_zoo.evaluation.metrics import _check


def accuracy(probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Count the inputs whose most probable class is their label, and return their share, in [0, 1].

    If several classes are equally probable, the first one counts.

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities or labels are wrong; `check=False` skips this.

    >>> import torch
    >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    tensor(0.5000)
    """
    if check:
        _check.check_probabilities(probs)
        _check.check_labels(labels, probs)
    return (probs.argmax(-1) == labels).to(probs.dtype).mean()


def nll(log_probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Average the negative log probability of the label over the inputs, and return the average in nats.

    The result is inf if a label has probability 0. For an ensemble, compute the log probabilities without underflow as
    `torch.logsumexp(member_log_probs, 0) - math.log(members)`.

    Args:
        log_probs: log probabilities (input, class), in nats.
        labels: number of the class of each input, (input,).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: log probabilities or labels are wrong; `check=False` skips this.

    >>> import torch
    >>> nll(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]))
    tensor(0.6931)
    """
    if check:
        _check.check_log_probabilities(log_probs)
        _check.check_labels(labels, log_probs)
    return F.nll_loss(log_probs, labels)


def brier(probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Average the squared distance to the label's indicator over the inputs, and return the average, in [0, 2].

    The squared distance is summed over classes, not averaged: Brier, Verification of forecasts expressed in terms of
    probability (1950).

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities or labels are wrong; `check=False` skips this.

    >>> import torch
    >>> brier(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    tensor(1.)
    """
    if check:
        _check.check_probabilities(probs)
        _check.check_labels(labels, probs)
    one_hot_labels = F.one_hot(labels, probs.shape[-1]).to(probs.dtype)
    return (probs - one_hot_labels).square().sum(-1).mean()
