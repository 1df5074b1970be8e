"""How well chains have mixed: rank-normalised split R-hat, and effective sample sizes.

Source: Vehtari, Gelman, Simpson, Carpenter & Bürkner 2021, Rank-normalization, folding, and localization: an improved
R-hat, Bayesian Analysis 16. Below 1.01 they call chains mixed; NaN is what a quantity that never changes has.

Axes: draws are (chain, draw, quantity); what is returned is (quantity,), float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError


def rhat(draws: Tensor) -> Tensor:
    """Compute the rank-normalised split R-hat, the larger one of location and spread; return it.

    Each chain is cut into halves, so that one chain has an R-hat too.

    Args:
        draws: (chain, draw, quantity), 4 draws or more.

    Raises:
        UsageError: fewer draws.

    >>> still, moving = torch.tensor([1.0, -1.0, 2.0, -2.0] * 5), torch.arange(20.0)
    >>> rhat(torch.stack([still, moving], -1)[None]).round(decimals=2)
    tensor([0.9900, 2.1200], dtype=torch.float64)
    """
    halves = _halves(draws)
    middle = halves.flatten(0, 1).quantile(0.5, dim=0)
    folded = (halves - middle).abs()
    return torch.fmax(plain_rhat(_normal_scores(halves)), plain_rhat(_normal_scores(folded)))  # whichever is a number


def plain_rhat(draws: Tensor) -> Tensor:
    """Compute R-hat of chains as they are, neither split nor ranked (equations 1 to 4); return it.

    Args:
        draws: (chain, draw, quantity), 2 chains and 2 draws or more.
    """
    within, total = _variances(draws.double())
    return (total / within).sqrt()


def effective_size(draws: Tensor) -> Tensor:
    """Compute the effective sample size of means over all chains' draws (equations 10 to 13); return it.

    Autocorrelations are summed in pairs, as long as the pairs are positive, and made to fall (Geyer 1992). It is at
    most S · log10(S) of S draws.

    Args:
        draws: (chain, draw, quantity), 4 draws or more.

    Raises:
        UsageError: fewer draws.

    >>> independent = torch.randn(4, 500, 1, generator=torch.Generator().manual_seed(0))
    >>> effective_size(independent).round(decimals=-2)
    tensor([2100.], dtype=torch.float64)
    """
    halves = _halves(draws)
    chains, length = halves.shape[:2]
    within, total = _variances(halves)
    # Their biased autocovariances, each chain's own, are what equation 10 takes.
    covariance = _autocovariance(halves).mean(0) * length / (length - 1)
    correlation = 1 - (within - covariance) / total  # (lag, quantity)
    correlation[0] = 1
    pairs = correlation[: length // 2 * 2].reshape(length // 2, 2, -1).sum(1)
    positive = (pairs > 0).cummin(0).values
    summed = (pairs.cummin(0).values * positive).sum(0)
    size = chains * length
    most = size * torch.tensor(float(size)).log10().double()
    found = (size / (2 * summed - 1)).clamp(max=most)
    return torch.where(found > 0, found, torch.where(total > 0, most, torch.nan))


def _halves(draws: Tensor) -> Tensor:
    """Cut chains into halves, (2 · chain, draw / 2, quantity), float64; the middle one of an odd number is left out."""
    if draws.dim() != 3 or draws.shape[1] < 4:
        raise UsageError(
            "draws of chains", expected="(chain, draw, quantity), with 4 draws or more", found=str(tuple(draws.shape))
        )
    half = draws.shape[1] // 2
    return torch.cat([draws[:, :half], draws[:, -half:]]).double()


def _variances(chains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance within chains, and the one estimated of all (equations 2 and 3), each (quantity,)."""
    length = chains.shape[1]
    within = chains.var(1).mean(0)
    return within, (length - 1) / length * within + chains.mean(1).var(0)


def _normal_scores(chains: Tensor) -> Tensor:
    """Replace values by the normal quantiles of their ranks among all (equation 14), ties by their mean rank."""
    values = chains.flatten(0, 1).T.contiguous()  # (quantity, draw)
    ordered = values.sort(1).values
    below, upto = torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
    rank = (below + upto + 1) / 2
    scores: Tensor = torch.special.ndtri((rank.double() - 3 / 8) / (values.shape[1] + 1 / 4))
    return scores.T.reshape(chains.shape)


def _autocovariance(chains: Tensor) -> Tensor:
    """Return each chain's autocovariances, divided by the number of draws: (chain, lag, quantity)."""
    length = chains.shape[1]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1)
    summed: Tensor = torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=1)
    return summed[:, :length] / length
