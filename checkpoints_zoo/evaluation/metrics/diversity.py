"""Metrics of how much the members of an ensemble differ on the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.evaluation.metrics import _check


def entropy(probs: Tensor, *, check: bool = True) -> Tensor:
    """Sum -p log p over the last axis, and return the entropies in nats, (...,), where 0 log 0 = 0.

    Args:
        probs: (..., class) probabilities.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the probabilities are wrong; `check=False` skips this.

    >>> import torch
    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    if check:
        _check.check_probabilities(probs, axes=None)
    # torch.special.entr is not used, because torch.special.entr takes several times as long on a CPU. The clamp of the
    # probabilities only ensures that 0 * log 0 is 0.
    return (probs.clamp_min(torch.finfo(probs.dtype).tiny).log_().neg_() * probs).sum(-1)


def mutual_information(probs: Tensor, *, check: bool = True) -> Tensor:
    """Subtract the members' mean entropy from the entropy of their mean, and return (input,) values in nats.

    H(mean p) - mean H(p), between 0 (all members alike) and the log of the number of classes: Depeweg et al.,
    Decomposition of uncertainty (2018). Mutual information can't be negative, so negative rounding errors are set to 0.
    For many subsets of the same members, compute the members' entropies once and use `(entropy(mean) -
    entropies[chosen].mean(0)).clamp(min=0)`.

    Args:
        probs: (member, input, class) probabilities.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the probabilities are wrong; `check=False` skips this.

    >>> import torch
    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    if check:
        _check.check_probabilities(probs, _check.MEMBER_INPUT_CLASS)
    total_entropy = entropy(probs.mean(0), check=False)
    return (total_entropy - entropy(probs, check=False).mean(0)).clamp_(min=0)


def disagreement(probs: Tensor, *, check: bool = True) -> Tensor:
    """Average, over pairs of members, the share of inputs to which both members give different classes; return the
    average, in [0, 1].

    If several classes are equally probable, the first one counts. The result is NaN for a single member, which has no
    pair.

    Args:
        probs: (member, input, class) probabilities.
        check: whether to check the arguments; False if they were checked before.

    Raises:
        ValueError: the probabilities are wrong; `check=False` skips this.

    >>> import torch
    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]]]))
    tensor(0.6667)
    """
    if check:
        _check.check_probabilities(probs, _check.MEMBER_INPUT_CLASS)
    return disagreement_of_votes(probs.argmax(-1), probs.shape[-1]).to(probs.dtype)


def disagreement_of_votes(voted: Tensor, classes: int) -> Tensor:
    """Average, over pairs of members, the share of inputs to which both members give different classes; return the
    average, float64 in [0, 1].

    The result is NaN for a single member, which has no pair.

    Args:
        voted: class that each member predicts for each input, (member, input).
        classes: number of classes.

    >>> import torch
    >>> disagreement_of_votes(torch.tensor([[0], [0], [1]]), classes=2)
    tensor(0.6667, dtype=torch.float64)
    """
    members, inputs = voted.shape
    vote_counts = torch.zeros(inputs, classes, dtype=torch.int64, device=voted.device)
    vote_counts.scatter_add_(
        -1,
        voted.T,
        torch.ones(1, 1, dtype=torch.int64, device=voted.device).expand(voted.T.shape),
    )
    # If m_c of m members vote for class c, m*m - sum of m_c*m_c of the m*(m - 1) ordered pairs differ.
    differing_pairs = inputs * members**2 - vote_counts.square().sum()
    return differing_pairs.double() / (inputs * members * (members - 1))
