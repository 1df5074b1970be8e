"""Agreement, total variation and Wasserstein distance between two predictive distributions."""

from __future__ import annotations

from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check


def agreement(probs: Tensor, others: Tensor, *, check: bool = True) -> Tensor:
    """Count the inputs for which two predictive distributions have the same most probable class, and return their
    share, in [0, 1].

    Source: Izmailov et al., What are Bayesian neural network posteriors really like? (2021). If probabilities are
    equal, the first class counts.

    Args:
        probs, others: probabilities of both distributions, (input, class).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: one of the tensors is wrong, or their shapes differ; `check=False` skips this.

    >>> import torch
    >>> agreement(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.5000)
    """
    if check:
        _check_same_shape(probs, others)
    return (probs.argmax(-1) == others.argmax(-1)).to(probs.dtype).mean()


def total_variation(probs: Tensor, others: Tensor, *, check: bool = True) -> Tensor:
    """Average half the summed absolute differences of two predictive distributions over the inputs; return the average,
    in [0, 1].

    Args:
        probs, others: probabilities of both distributions, (input, class).
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: one of the tensors is wrong, or their shapes differ; `check=False` skips this.

    >>> import torch
    >>> total_variation(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[0.7, 0.3], [0.2, 0.8]]))
    tensor(0.3000)
    """
    if check:
        _check_same_shape(probs, others)
    return (probs - others).abs().sum(-1).mean() / 2


def wasserstein(samples: Tensor, others: Tensor, order: int = 2) -> Tensor:
    """Average over the inputs the Wasserstein distance between samples of two distributions of a number; return the
    average, in the unit of the samples.

    Samples in their order are matched with each other: the mean of abs(x₍ᵢ₎ − y₍ᵢ₎)^order, to the power 1/order. The
    order 1 is what the NeurIPS 2021 competition on approximate inference computed, under the name W2 and with a minus
    sign.

    Args:
        samples, others: samples of both distributions, (input, sample), as many of both.
        order: order of the distance, 1 or more.

    Raises:
        ValueError: one of the tensors is wrong, or their shapes differ, or the order is below 1.

    >>> import torch
    >>> wasserstein(torch.tensor([[0.0, 1.0]]), torch.tensor([[4.0, 1.0]]))  # √((1 + 9) / 2)
    tensor(2.2361)
    """
    for name, values in (("samples", samples), ("others", others)):
        _check.check_floats(name, values, ("input", "sample"))
    if samples.shape != others.shape:
        expected, found = f"shape {tuple(samples.shape)}, as samples", f"shape {tuple(others.shape)}"
        raise _check.argument_error("others", expected, found, "Give as many samples of both, on the same inputs")
    if order < 1:
        raise _check.argument_error("order", "1 or more", repr(order), "2 is usual")
    distances = (samples.sort(-1).values - others.sort(-1).values).abs()
    return (distances**order).mean(-1).pow(1 / order).mean()


def _check_same_shape(probs: Tensor, others: Tensor) -> None:
    _check.check_probabilities(probs)
    _check.check_probabilities(others)
    if probs.shape != others.shape:
        expected, found = f"shape {tuple(probs.shape)}, as probs", f"shape {tuple(others.shape)}"
        raise _check.argument_error("others", expected, found, "Give both on the same inputs and classes")
