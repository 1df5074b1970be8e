"""Detection of inputs out of distribution (OOD) by a score: OOD inputs are the positive class and should have higher
scores.

torchmetrics has AUROC and AUPR too, but passes scores outside [0, 1] through a sigmoid, which rounds neighbouring
scores to equal scores. Counting pairs of scores is exact for all scores, and several times faster for a few thousand
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check

CLOSE_TO_1 = 1 - 2**-10  # For a larger probability p, the difference 1 - p has too few exact digits.


def ood_score(probs: Tensor, *, check: bool = True) -> Tensor:
    """Subtract the largest probability of each input from 1, and return the (input,) scores, in [0, 1).

    Source of the score: Hendrycks & Gimpel, A baseline for detecting misclassified and out-of-distribution examples
    (2017). Where the largest probability is close to 1, the score is the sum of the other probabilities, so that inputs
    keep their order also where the largest probability rounds to 1.

    Args:
        probs: (input, class) probabilities; for an ensemble, the mean over its members.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the probabilities are wrong; `check=False` skips this.

    >>> import torch
    >>> ood_score(torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    tensor([0.2500, 0.5000])
    """
    if check:
        _check.check_probabilities(probs)
    largest_probs, top_class = probs.max(-1, keepdim=True)
    sum_of_other_probs = probs.scatter(-1, top_class, 0.0).sum(-1)
    return torch.where(largest_probs.squeeze(-1) > CLOSE_TO_1, sum_of_other_probs, 1 - largest_probs.squeeze(-1))


def auroc(scores: Tensor, is_ood: Tensor, *, check: bool = True) -> Tensor:
    """Integrate the ROC curve, and return the share of pairs whose OOD input scores higher (ties: half).

    Args:
        scores: scores (input,), higher for inputs that look more out of distribution.
        is_ood: whether each input is out of distribution, (input,) bool.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the scores are wrong, or all inputs are of one kind; `check=False` skips this.

    >>> import torch
    >>> auroc(torch.tensor([-0.9, -0.8, -0.5]), torch.tensor([False, True, True]))
    tensor(1.)
    """
    if check:
        _check.check_ood_scores(is_ood, scores)
    positive_scores, negative_scores = scores.masked_select(is_ood).sort().values, scores.masked_select(~is_ood)
    # An input in distribution counts once for each OOD input that scores lower, half for each that scores the same.
    lower_pair_count = torch.searchsorted(positive_scores, negative_scores).sum()
    not_higher_pair_count = torch.searchsorted(positive_scores, negative_scores, right=True).sum()
    return (
        1 - (lower_pair_count + not_higher_pair_count).double() / (2 * len(positive_scores) * len(negative_scores))
    ).to(scores.dtype)


def aupr(scores: Tensor, is_ood: Tensor, *, check: bool = True) -> Tensor:
    """Average the precision over the steps in recall; return the average, in [0, 1]. OOD inputs are the positive class.

    The average precision is the sum of (step in recall) * precision, without interpolation, as in torchmetrics and
    scikit-learn. Random scores give the share of OOD inputs, not one half.

    Args:
        scores: scores (input,), higher for inputs that look more out of distribution.
        is_ood: whether each input is out of distribution, (input,) bool.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the scores are wrong, or all inputs are of one kind; `check=False` skips this.

    >>> import torch
    >>> aupr(torch.tensor([-0.9, -0.8, -0.5]), torch.tensor([False, True, True]))
    tensor(1.)
    """
    if check:
        _check.check_ood_scores(is_ood, scores)
    positive_scores = scores.masked_select(is_ood).sort().values
    negative_scores = scores.masked_select(~is_ood).sort().values
    # Each OOD input is one step in recall, at the precision of a threshold equal to the input's score.
    hit_counts = len(positive_scores) - torch.searchsorted(positive_scores, positive_scores)
    false_alarm_counts = len(negative_scores) - torch.searchsorted(negative_scores, positive_scores)
    return (hit_counts.double() / (hit_counts + false_alarm_counts)).mean().to(scores.dtype)


def fpr95(scores: Tensor, is_ood: Tensor, *, check: bool = True) -> Tensor:
    """Find the highest threshold that flags 95 % of the OOD inputs; return the share of inputs in distribution that the
    threshold flags.

    A threshold flags all inputs whose score is at least the threshold, so all inputs of a tie are flagged, and the
    recall may be above 95 %. torch-uncertainty's FPR95 has the same definition.

    Args:
        scores: scores (input,), higher for inputs that look more out of distribution.
        is_ood: whether each input is out of distribution, (input,) bool.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the scores are wrong, or all inputs are of one kind; `check=False` skips this.

    >>> import torch
    >>> fpr95(torch.tensor([-0.9, -0.8, -0.7, -0.5]), torch.tensor([False, True, False, True]))
    tensor(0.5000)
    """
    if check:
        _check.check_ood_scores(is_ood, scores)
    positive_scores = scores.masked_select(is_ood)
    # Leave out a twentieth of the OOD inputs, rounded down, so that recall is at least 95 %.
    threshold = positive_scores.kthvalue(len(positive_scores) // 20 + 1).values
    return (scores.masked_select(~is_ood) >= threshold).to(scores.dtype).mean()
