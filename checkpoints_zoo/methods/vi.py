"""Variational inference: a Gaussian with independent parameters, Bayes by backprop, by posteriors.

Axes: stacked parameters are (run, *shape), draws (draw, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.func import stack_module_state

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.methods.method import POSTERIORS_REQUIREMENT, Batch, Run, check_settings, log_posterior
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.seeds import derive_seed, seed_torch

BOUND_STEPS = 100  # Number of last steps from which the bound is estimated.


@dataclass(frozen=True)
class MeanField:
    """The Gaussian with independent parameters that maximises E[log p(θ, labels)] + temperature · entropy.

    At temperature 1 this objective is the evidence lower bound of the problem's prior and likelihood; at lower
    temperatures the Gaussian is narrower (a cold posterior). Gradients are by reparameterisation, sticking the landing
    (Roeder et al. 2017). The optimizer is Adam with a rate that falls to 0 by a cosine.

    Args:
        lr: Adam's learning rate in the first step, for means and for logs of standard deviations.
        steps: number of steps of Adam.
        init_log_sd: initial log of all standard deviations.
        temperature: factor of the entropy.
        samples: number of samples of the Gaussian in each step.
        batch_size: number of images per step; each run has its own images.
        start: initial means: each run's "mode", or a "random" initialisation of the network.
    """

    lr: float = 0.01
    steps: int = 1000
    init_log_sd: float = -4.0
    temperature: float = 0.03
    samples: int = 1
    batch_size: int = 32
    start: str = "mode"

    name: ClassVar[str] = "vi"
    title: ClassVar[str] = "Variational inference, mean-field Gaussian"
    source: ClassVar[str] = (
        "Blundell, Cornebise, Kavukcuoglu & Wierstra 2015, Weight uncertainty in neural networks (arXiv 1505.05424)"
    )
    needs: ClassVar[tuple[str, ...]] = (POSTERIORS_REQUIREMENT,)
    independent: ClassVar[bool] = False

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Fit one Gaussian from each mode, all at the same time, and draw networks; return the runs in order.

        Each run has a record of numbers: `elbo` is E[log p(θ, labels) − log q(θ)] in nats, the mean over the last 100
        steps, which is a bound of the log evidence at every temperature; `mean_sd` is the mean standard deviation of
        the parameters.

        Args:
            problem: the network and its training images.
            runs: number of runs.
            draws: number of draws of each Gaussian.
            seed: seed of the order of images, the samples and the draws.

        Raises:
            UsageError: the package posteriors is not installed, a setting is out of its range, or a Gaussian diverges
                to infinity.
        """
        check_settings(self, runs, draws)
        vi: Any = import_optional("posteriors.vi.diag", POSTERIORS_REQUIREMENT)
        torchopt: Any = import_optional("torchopt", POSTERIORS_REQUIREMENT)
        stacked_log_posterior = log_posterior(problem)

        def log_posterior_and_params(params: Tensors, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            log_posterior_sum, log_posteriors = stacked_log_posterior(params, batch)
            return log_posterior_sum, (
                log_posteriors,
                params,
            )  # The package posteriors offers no other way to get the samples.

        transform = vi.build(
            log_posterior_and_params,
            torchopt.adam(lr=self._learning_rate),
            temperature=self.temperature,
            n_samples=self.samples,
            init_log_sds=self.init_log_sd,
        )
        means = self._initial_means(problem, runs, seed)
        batches = problem.batches(self.batch_size, [derive_seed(seed, f"vi run {run}") for run in range(runs)])
        bounds: list[Tensor] = []
        with seed_torch(derive_seed(seed, "vi noise"), problem.device):
            state = transform.init(means)
            for step in range(self.steps):
                previous_state = state
                state, (log_posteriors, drawn_samples) = transform.update(state, next(batches))
                if step >= self.steps - BOUND_STEPS:
                    bounds.append((log_posteriors - _log_density(previous_state, drawn_samples)).view(-1, runs).mean(0))
            drawn_params = vi.sample(state, (draws,))
        elbo = torch.stack(bounds).double().mean(0).cpu()
        mean_sds = torch.cat([lsd.exp().flatten(1) for lsd in state.log_sd_diag.values()], 1).double().mean(1).cpu()
        if not bool(elbo.isfinite().all()):
            raise UsageError("Gaussian of vi", expected="a finite bound", found="another", do="Lower lr")
        return [
            Run(
                problem.finish({name: tensor[:, run] for name, tensor in drawn_params.items()}),
                {"elbo": float(elbo[run]), "mean_sd": float(mean_sds[run])},
            )
            for run in range(runs)
        ]

    def _learning_rate(self, step_count: Tensor) -> Tensor:
        return self.lr / 2 * ((math.pi * step_count / self.steps).cos() + 1)

    def _initial_means(self, problem: Problem, runs: int, seed: int) -> Tensors:
        """Return the initial means of the Gaussians, (run, *shape)."""
        if self.start == "mode":
            return {name: tensor.detach().clone() for name, tensor in problem.modes(runs)[0].items()}
        networks = []
        for run in range(runs):
            with seed_torch(derive_seed(seed, f"vi start {run}"), problem.device):
                networks.append(problem.recipe.module())
        params, _ = stack_module_state(networks)
        return {name: tensor.detach().to(problem.device) for name, tensor in params.items()}

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: two rates at temperatures from 0.03 to 1."""
        return [cls(lr=lr, temperature=t) for lr in (0.003, 0.01) for t in (0.03, 0.1, 0.3, 1.0)]


def _log_density(state: Any, samples: Tensors) -> Tensor:
    """Return the log density of samples ([sample,] run, *shape) under each run's Gaussian, in nats, ([sample,] run)."""
    log_density_sum: Any = 0.0
    for name, mean in state.params.items():
        log_sd = state.log_sd_diag[name]
        log_densities = -((samples[name] - mean) / log_sd.exp()).square() / 2 - log_sd - math.log(2 * math.pi) / 2
        log_density_sum = log_density_sum + log_densities.flatten(log_densities.ndim - mean.ndim + 1).sum(-1)
    return cast(Tensor, log_density_sum)
