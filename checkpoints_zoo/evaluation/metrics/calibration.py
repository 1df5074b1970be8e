"""Calibration errors: differences between predicted probabilities and the shares of inputs that are right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoints_zoo.evaluation.metrics import _check
from checkpoints_zoo.evaluation.metrics._ties import tie_means


class Reliability(NamedTuple):
    """The bars of a reliability diagram: mean confidence, accuracy and number of inputs of each bin, (bin,) each."""

    confidence: Tensor
    accuracy: Tensor
    inputs: Tensor


def ece(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Compare top probability with accuracy in bins of equal width, and return the ECE, in [0, 1].

    The ECE is the sum over bins of `(share of inputs) * |accuracy - mean confidence|`: Guo et al., On calibration of
    modern neural networks (2017). The bins are the same as in `reliability`: a bin includes its lower edge, and the
    last bin also includes confidence 1, for which torchmetrics has one more bin.

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        bins: number of bins.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities, labels or bins are wrong; `check=False` skips this.

    >>> import torch
    >>> ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]))
    tensor(0.2500)
    """
    if check:
        _check_arguments(probs, labels, bins)
    confidence, top_class = probs.max(-1)
    # The mean of probabilities over members may be rounded to a number above 1.
    confidence = confidence.clamp(0, 1).float()
    bin_of_input, is_correct = _bin_numbers(confidence, bins), (top_class == labels).float()
    # The sum is in float32 and in torchmetrics' order, as for the values in manifests.
    counts, confidence_sums, accuracy_sums = (
        confidence.new_zeros(bins).scatter_add_(0, bin_of_input, values)
        for values in (torch.ones_like(confidence), confidence, is_correct)
    )
    gaps = (accuracy_sums / counts).nan_to_num() - (confidence_sums / counts).nan_to_num()
    return (gaps.abs() * (counts / counts.sum())).sum().to(probs.dtype)


def adaptive_ece(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Compare top probability with accuracy in bins of equal mass, and return the error, in [0, 1].

    The inputs, sorted by confidence, are cut into `bins` runs of equal length (the first runs are longer by
    one if the number of inputs is no multiple); the error is the sum over bins of
    `(share of inputs) * |accuracy - mean confidence|`. Inputs of equal confidence share their mean
    accuracy, so that the order of the inputs doesn't matter. The error equals torch-uncertainty's
    AdaptiveCalibrationError (norm l1), except that empty bins are left out: torch-uncertainty returns NaN for fewer
    inputs than bins.

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        bins: number of bins.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities, labels or bins are wrong; `check=False` skips this.

    >>> import torch
    >>> adaptive_ece(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 0]), bins=2)
    tensor(0.3750)
    """
    if check:
        _check_arguments(probs, labels, bins)
    confidence, top_class = probs.max(-1)
    return _equal_mass_errors(confidence[None], (top_class == labels)[None], bins)[0].to(probs.dtype)


def ace(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Tensor:
    """Average the equal-mass calibration errors of all classes, and return the ACE, in [0, 1].

    For class c of C, sort the n inputs by p(c) and cut the sorted inputs into `bins` runs of equal length (the first
    runs are longer by one if n is no multiple of `bins`). Bin b has n_b inputs, the mean probability conf(c, b), and
    the share acc(c, b) of labels that are c::

        ACE = 1/C * sum over c and b of n_b/n * |acc(c, b) - conf(c, b)|

    Inputs of equal p(c) share the mean of their outcomes. If `bins` divides n, the result is the ACE of Nixon et al.,
    Measuring calibration in deep learning (2019); if not, the ACE of Nixon et al. gives all bins the same weight.

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        bins: number of bins for each class.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities, labels or bins are wrong; `check=False` skips this.

    >>> import torch
    >>> ace(torch.tensor([[0.75, 0.25], [0.5, 0.5]]), torch.tensor([0, 0]), bins=2)
    tensor(0.3750)
    """
    if check:
        _check_arguments(probs, labels, bins)
    is_class = F.one_hot(labels, probs.shape[-1]).T
    return _equal_mass_errors(probs.T.contiguous(), is_class, bins).mean().to(probs.dtype)


def reliability(probs: Tensor, labels: Tensor, bins: int = 15, *, check: bool = True) -> Reliability:
    """Bin the inputs by top probability, in equal widths, and return the bars of the diagram.

    A bin includes its lower edge; the last bin also includes its upper edge. Confidence and accuracy of an empty bin
    are NaN, which plots leave out.

    Args:
        probs: (input, class) probabilities.
        labels: number of the class of each input, (input,).
        bins: number of bins.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: probabilities, labels or bins are wrong; `check=False` skips this.

    >>> import torch
    >>> reliability(torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([0, 1]), bins=2).accuracy
    tensor([   nan, 0.5000])
    """
    if check:
        _check_arguments(probs, labels, bins)
    confidence, top_class = probs.max(-1)
    bin_of_input = _bin_numbers(confidence, bins)
    counts = torch.bincount(bin_of_input, minlength=bins)
    sums = torch.zeros(2, bins, dtype=probs.dtype, device=probs.device)
    sums.index_add_(1, bin_of_input, torch.stack([confidence, (top_class == labels).to(probs.dtype)]))
    return Reliability(sums[0] / counts, sums[1] / counts, counts)


def _bin_numbers(confidence: Tensor, bins: int) -> Tensor:
    """Return the number of the bin of each confidence, by the float32 edges of torchmetrics; 1 is in the last bin."""
    bin_edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32, device=confidence.device)
    return (torch.bucketize(confidence.float(), bin_edges, right=True) - 1).clamp_(max=bins - 1)


def _check_arguments(probs: Tensor, labels: Tensor, bins: int) -> None:
    _check.check_at_least("bins", 1, bins)
    _check.check_probabilities(probs)
    _check.check_labels(labels, probs)


def _equal_mass_errors(probabilities: Tensor, outcomes: Tensor, bins: int) -> Tensor:
    """Return the calibration error with bins of equal mass, (column,) float64: the sum over bins of
    |sum of (outcome - probability)|, divided by the number of inputs.

    Args:
        probabilities: (column, input) probabilities.
        outcomes: 0 or 1 for each input, (column, input).
        bins: number of bins.
    """
    sorted_probs, order = _sort_probabilities(probabilities)
    gaps = tie_means(sorted_probs, outcomes.gather(-1, order).double()) - sorted_probs.double()
    inputs = probabilities.shape[-1]
    bin_bounds = [inputs // bins * bin_number + min(bin_number, inputs % bins) for bin_number in range(bins + 1)]
    # The absolute sum of the gaps of a bin is its number of inputs * |accuracy - confidence|; an empty bin sums to 0.
    sums = F.pad(gaps.cumsum(-1), (1, 0))[:, bin_bounds].diff(dim=-1)
    return sums.abs().sum(-1) / inputs


def _sort_probabilities(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each column of probabilities; return the sorted probabilities and the positions of their inputs, (column,
    input) each; ties are in any order."""
    if probabilities.dtype != torch.float32 or probabilities.device.type != "cpu":
        return torch.sort(probabilities)
    # The bits of non-negative floats have the order of the floats. numpy sorts one integer, made of these bits and the
    # input's position, several times faster than torch sorts floats and indices.
    inputs = torch.arange(probabilities.shape[-1])
    keys = probabilities.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(inputs)
    keys.numpy().sort(-1)
    return (keys >> 32).int().view(torch.float32), keys.bitwise_and_(2**32 - 1)
