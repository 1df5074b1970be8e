"""Calibration errors: how far stated probabilities are from the shares that come true."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints_zoo.evaluation.metrics import _check
from checkpoints_zoo.evaluation.metrics._ties import tie_means


class Reliability(NamedTuple):
    """The bars of a reliability diagram: mean confidence, accuracy and number of inputs, each (bin,)."""

    confidence: Tensor
    accuracy: Tensor
    inputs: Tensor


def ece(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Compare top probability with accuracy in bins of equal width, and return the ECE, in [0, 1].

    The sum over bins of (share of inputs) * |accuracy - mean confidence|: Guo et al., On calibration of
    modern neural networks (2017), with the bins of torchmetrics (a bin holds its lower edge;
    confidence 1 has its own bin).

    Args:
        probs: (input, class) probabilities.
        labels: (input,) classes.
        bins: number of bins.
        check: False when the tensors have been checked before.

    Raises:
        ValueError: if the probabilities, labels or bins are none (see `check`).

    >>> import torch
    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.2500)
    """
    if check:
        _check_all(probs, labels, bins)
    confidence, top = probs.max(-1)
    confidence = confidence.clamp(0, 1).float()  # a mean over members may round to above 1
    of_bin, right = _bins_of(confidence, bins), (top == labels).float()
    # In float32 and in torchmetrics' order, to the last bit what manifests hold.
    count, sure, accurate = (
        confidence.new_zeros(bins + 1).scatter_add_(0, of_bin, values)
        for values in (torch.ones_like(confidence), confidence, right)
    )
    gaps = (accurate / count).nan_to_num() - (sure / count).nan_to_num()
    return (gaps.abs() * (count / count.sum())).sum().to(probs.dtype)


def adaptive_ece(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Compare top probability with accuracy in bins of equal mass, and return the error, in [0, 1].

    The inputs, sorted by confidence, are cut into `bins` runs of equal length (the first ones longer by one
    where that doesn't come out even); the error is the sum over bins of (share of inputs) * |accuracy -
    mean confidence|. Inputs of equal confidence count as equally accurate each, so that the order of the
    inputs doesn't matter. This is torch-uncertainty's AdaptiveCalibrationError (norm l1), which is NaN for
    fewer inputs than bins, where this leaves empty bins out.

    Args:
        probs: (input, class) probabilities.
        labels: (input,) classes.
        bins: number of bins.
        check: False when the tensors have been checked before.

    Raises:
        ValueError: if the probabilities, labels or bins are none (see `check`).

    >>> import torch
    >>> adaptive_ece(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 0]), bins=2)
    tensor(0.3750)
    """
    if check:
        _check_all(probs, labels, bins)
    confidence, top = probs.max(-1)
    return _equal_mass(confidence[None], (top == labels)[None], bins)[0].to(probs.dtype)


def ace(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Average the equal-mass calibration errors of all classes, and return the ACE, in [0, 1].

    For class c of C, sort the n inputs by p(c) and cut them into `bins` runs of equal length (the first
    ones longer by one where that doesn't come out even). With n_b inputs in bin b, mean probability conf(c,
    b) and share of labels that are c acc(c, b),

        ACE = 1/C * sum over c and b of n_b/n * |acc(c, b) - conf(c, b)|

    Inputs of equal p(c) count as being c equally often. Where `bins` divides n this is the ACE of Nixon et
    al., Measuring calibration in deep learning (2019); elsewhere they weigh all bins alike.

    Args:
        probs: (input, class) probabilities.
        labels: (input,) classes.
        bins: number of bins a class.
        check: False when the tensors have been checked before.

    Raises:
        ValueError: if the probabilities, labels or bins are none (see `check`).

    >>> import torch
    >>> ace(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 0]), bins=2)
    tensor(0.3750)
    """
    if check:
        _check_all(probs, labels, bins)
    of_class = F.one_hot(labels, probs.shape[-1]).T
    return _equal_mass(probs.T.contiguous(), of_class, bins).mean().to(probs.dtype)


def reliability(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Reliability:
    """Bin the inputs by top probability, in equal widths, and return the bars of the diagram.

    A bin holds its lower edge, the last one its upper edge too. Confidence and accuracy of an empty bin are
    NaN, which plots leave out.

    Args:
        probs: (input, class) probabilities.
        labels: (input,) classes.
        bins: number of bins.
        check: False when the tensors have been checked before.

    Raises:
        ValueError: if the probabilities, labels or bins are none (see `check`).

    >>> import torch
    >>> reliability(torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([0, 1]), bins=2).accuracy
    tensor([   nan, 0.5000])
    """
    if check:
        _check_all(probs, labels, bins)
    confidence, top = probs.max(-1)
    of_bin = _bins_of(confidence, bins).clamp_(max=bins - 1)
    count = torch.bincount(of_bin, minlength=bins)
    sums = torch.zeros(2, bins, dtype=probs.dtype, device=probs.device)
    sums.index_add_(1, of_bin, torch.stack([confidence, (top == labels).to(probs.dtype)]))
    return Reliability(sums[0] / count, sums[1] / count, count)


def _bins_of(confidence: Tensor, bins: int) -> Tensor:
    """Return the bin of each confidence, by the edges of torchmetrics in the dtype it bins in; that of 1 is `bins`."""
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32, device=confidence.device)
    return torch.bucketize(confidence.float(), edges, right=True) - 1


def _check_all(probs: Tensor, labels: Tensor, bins: int) -> None:
    _check.at_least("bins", 1, bins)
    _check.probabilities(probs)
    _check.classes_of(labels, probs)


def _equal_mass(stated: Tensor, came_true: Tensor, bins: int) -> Tensor:
    """Sum |came true - stated| over bins of equal mass, and return the (column,) mean over inputs, float64.

    Args:
        stated: (column, input) probabilities.
        came_true: (column, input), 0 or 1.
        bins: number of bins.
    """
    ordered, order = _sorted(stated)
    gap = tie_means(ordered, came_true.gather(-1, order).double()) - ordered.double()
    inputs = stated.shape[-1]
    ends = [inputs // bins * bin + min(bin, inputs % bins) for bin in range(bins + 1)]
    # |sum of gaps| is n_b * |acc - conf|; an empty bin sums to 0.
    sums = F.pad(gap.cumsum(-1), (1, 0))[:, ends].diff(dim=-1)
    return sums.abs().sum(-1) / inputs


def _sorted(stated: Tensor) -> tuple[Tensor, Tensor]:
    """Sort probabilities, and return them with the inputs they were of, both (column, input); ties in any order."""
    if stated.dtype != torch.float32 or stated.device.type != "cpu":
        return torch.sort(stated)
    # Bits of floats from 0 on are ordered as the floats. With the input's number behind them numpy sorts them several
    # times faster than torch, which moves an index along.
    inputs = torch.arange(stated.shape[-1])
    keys = stated.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(inputs)
    keys.numpy().sort(-1)
    return (keys >> 32).int().view(torch.float32), keys.bitwise_and_(2**32 - 1)
