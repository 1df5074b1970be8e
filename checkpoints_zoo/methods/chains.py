"""Run the chains of all runs together, and diagnose their mixing: R-hat and effective sample sizes.

Equation numbers refer to Vehtari et al., Rank-normalization, folding, and localization: an improved R-hat (2021).

Axes: stacked parameters are (run, *shape), draws (draw, *shape); in diagnostics (chain, draw, quantity).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.method import Batch, Run
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.seeds import derive_seed, seed_torch

Update = Callable[[Any, Batch], tuple[Any, Tensor]]
# Largest number of parameters, evenly spaced, for which R-hat and effective sample sizes are computed.
DIAGNOSED_PARAMETERS = 10_000


def run_chains(
    problem: Problem,
    method_name: str,
    update: Update,
    state: Any,
    draw_steps: Sequence[int],
    batch_size: int,
    seed: int,
    friction: float | None = None,
) -> Sequence[Run]:
    """Run the chains of all runs together, and keep draws; return the runs in order.

    Each run has a record of numbers: `log_posterior` is the log posterior density given all images, in nats, averaged
    over the draws. The value of one draw is the mean of the estimates in the steps since the previous draw. With 4
    draws or more, `rhat_log_posterior` is the split R-hat of the draws' log posteriors, and `rhat` and `ess` are
    medians over the parameters. `kinetic_temperature` is the mean squared momentum times 1 − friction / 2, which is T
    if the step is small.

    Args:
        problem: the problem whose posterior the chains sample.
        method_name: name of the method.
        update: update function of the package posteriors, for all runs together; the function returns the state and
            each run's log density.
        state: state of all chains.
        draw_steps: rising numbers of steps after which a draw is taken.
        batch_size: number of images per step; each run has its own images.
        seed: seed of all random numbers.
        friction: share of the momenta that is lost in each step; None for chains without momenta.

    Raises:
        UsageError: a chain diverges to infinity.
    """
    run_count = len(next(iter(state.params.values())))
    batches = problem.batches(batch_size, [derive_seed(seed, f"{method_name} run {run}") for run in range(run_count)])
    recent_log_densities: deque[Tensor] = deque(
        maxlen=min((after - before for before, after in pairwise(draw_steps)), default=draw_steps[0])
    )
    draws: list[Tensors] = []
    mean_log_densities: list[Tensor] = []
    temperatures: list[Tensor] = []
    with seed_torch(derive_seed(seed, f"{method_name} noise"), problem.device):
        for step in range(1, draw_steps[-1] + 1):
            state, log_density = update(state, next(batches))
            recent_log_densities.append(log_density)
            if step == draw_steps[len(draws)]:
                draws.append({n: p.cpu() for n, p in state.params.items()})
                mean_log_densities.append(torch.stack(list(recent_log_densities)).mean(0).cpu())
                if friction is not None:
                    temperatures.append((1 - friction / 2) * _mean_square(state.momenta))
                _check_finite(method_name, draws[-1], step)

    log_density = torch.stack(mean_log_densities).double()
    finished_runs = []
    for run in range(run_count):
        params = {n: torch.stack([draw[n][run] for draw in draws]) for n in draws[0]}
        flat_params = torch.cat([p.flatten(1) for p in params.values()], 1)
        flat_params = flat_params[:, :: math.ceil(flat_params.shape[1] / DIAGNOSED_PARAMETERS)]
        facts = {"log_posterior": float(log_density[:, run].mean())}
        if len(draws) >= 4:
            facts["rhat_log_posterior"] = float(rhat(log_density[None, :, run, None]))
            facts["rhat"] = float(rhat(flat_params[None]).nanmedian())
            facts["ess"] = float(effective_size(flat_params[None]).nanmedian())
        if temperatures:
            facts["kinetic_temperature"] = float(torch.stack(temperatures).mean(0)[run])
        finished_runs.append(Run(problem.finish(params), facts))
    return finished_runs


def _mean_square(momenta: Tensors) -> Tensor:
    """Return the mean squared momentum of each run, (run,)."""
    return torch.cat([m.flatten(1) for m in momenta.values()], 1).square().mean(1).cpu()


def _check_finite(method_name: str, params: Tensors, step: int) -> None:
    is_finite = torch.stack([p.isfinite().flatten(1).all(1) for p in params.values()]).all(0)
    if not bool(is_finite.all()):
        raise UsageError(
            f"chains of {method_name}",
            expected="finite parameters",
            found=f"others in run {int((~is_finite).nonzero()[0])} at step {step:,}",
            do="Lower lr: the step has to be small for the largest curvature",
        )


def rhat(draws: Tensor) -> Tensor:
    """Return the rank-normalised split R-hat: the larger of the R-hats of the chains' location and of the chains'
    spread.

    Each chain is cut into halves, so that a single chain has an R-hat too.

    Args:
        draws: draws (chain, draw, quantity), 4 draws or more.

    Raises:
        UsageError: there are fewer than 4 draws.

    >>> constant, rising = torch.tensor([1.0, -1.0, 2.0, -2.0] * 5), torch.arange(20.0)
    >>> rhat(torch.stack([constant, rising], -1)[None]).round(decimals=2)
    tensor([0.9900, 2.1200], dtype=torch.float64)
    """
    halves = _split_chains(draws)
    median = halves.flatten(0, 1).quantile(0.5, dim=0)
    deviations = (halves - median).abs()
    return torch.fmax(plain_rhat(_normal_scores(halves)), plain_rhat(_normal_scores(deviations)))  # fmax ignores NaN


def plain_rhat(draws: Tensor) -> Tensor:
    """Compute the R-hat of chains that are neither split nor ranked (equations 1 to 4 of Vehtari et al. 2021); return
    the R-hat.

    Args:
        draws: draws (chain, draw, quantity), 2 chains and 2 draws or more.
    """
    within, total = _variances(draws.double())
    return (total / within).sqrt()


def effective_size(draws: Tensor) -> Tensor:
    """Compute the effective sample size of means over all chains' draws (Vehtari et al. 2021, equations 10 to 13);
    return the size.

    Autocorrelations are summed in pairs up to the first negative pair, and no pair counts more than the pair before
    (Geyer 1992). The size is at most S · log10(S) for S draws.

    Args:
        draws: draws (chain, draw, quantity), 4 draws or more.

    Raises:
        UsageError: there are fewer than 4 draws.

    >>> independent = torch.randn(4, 500, 1, generator=torch.Generator().manual_seed(0))
    >>> effective_size(independent).round(decimals=-2)
    tensor([2100.], dtype=torch.float64)
    """
    halves = _split_chains(draws)
    chain_count, length = halves.shape[:2]
    within, total = _variances(halves)
    # Equation 10 of Vehtari et al. takes the biased autocovariance of each chain.
    covariance = _autocovariance(halves).mean(0) * length / (length - 1)
    correlation = 1 - (within - covariance) / total  # (lag, quantity)
    correlation[0] = 1
    pair_sums = correlation[: length // 2 * 2].reshape(length // 2, 2, -1).sum(1)
    is_counted = (pair_sums > 0).cummin(0).values
    correlation_sum = (pair_sums.cummin(0).values * is_counted).sum(0)
    draw_count = chain_count * length
    largest_size = draw_count * torch.tensor(float(draw_count)).log10().double()
    sizes = (draw_count / (2 * correlation_sum - 1)).clamp(max=largest_size)
    return torch.where(sizes > 0, sizes, torch.where(total > 0, largest_size, torch.nan))


def _split_chains(draws: Tensor) -> Tensor:
    """Cut each chain into halves without an odd middle draw; return (2 · chain, draw / 2, quantity), float64."""
    if draws.dim() != 3 or draws.shape[1] < 4:
        raise UsageError(
            "draws of chains", expected="(chain, draw, quantity), with 4 draws or more", found=str(tuple(draws.shape))
        )
    half_length = draws.shape[1] // 2
    return torch.cat([draws[:, :half_length], draws[:, -half_length:]]).double()


def _variances(chains: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance within chains and the estimated total variance (Vehtari et al. 2021, equations 2 and 3), each
    (quantity,)."""
    length = chains.shape[1]
    within = chains.var(1).mean(0)
    return within, (length - 1) / length * within + chains.mean(1).var(0)


def _normal_scores(chains: Tensor) -> Tensor:
    """Replace values by the normal quantiles of their ranks (Vehtari et al. 2021, equation 14); equal values get their
    mean rank."""
    values = chains.flatten(0, 1).T.contiguous()  # (quantity, draw)
    sorted_values = values.sort(1).values
    count_below, count_below_or_equal = (
        torch.searchsorted(sorted_values, values),
        torch.searchsorted(sorted_values, values, right=True),
    )
    rank = (count_below + count_below_or_equal + 1) / 2
    scores: Tensor = torch.special.ndtri((rank.double() - 3 / 8) / (values.shape[1] + 1 / 4))
    return scores.T.reshape(chains.shape)


def _autocovariance(chains: Tensor) -> Tensor:
    """Return each chain's autocovariances, divided by the number of draws: (chain, lag, quantity)."""
    length = chains.shape[1]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1)
    lagged_sums: Tensor = torch.fft.irfft(spectrum.abs().square(), n=2 * length, dim=1)
    return lagged_sums[:, :length] / length
