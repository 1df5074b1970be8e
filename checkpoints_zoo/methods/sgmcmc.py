"""Stochastic-gradient Markov chains from a mode: SGLD, SGHMC, and SGHMC with a cyclical step size, by posteriors.

Settings are defined as for SGD. A step is `lr` times the gradient of the *mean* loss, so that rates are comparable with
SGD's, and `friction` is 1 − momentum. The package posteriors takes the log density of all N images: in its terms SGLD's
lr is lr / N, SGHMC's lr is h = √(lr / N), and its alpha is friction / h. With `temperature` T the chains sample p(θ |
images)^(1/T); T = 1 is the Bayes posterior of the problem's prior and likelihood.

Axes: stacked parameters are (run, *shape), draws (draw, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.methods.chains import run_chains
from checkpoints_zoo.methods.method import POSTERIORS_REQUIREMENT, Batch, Run, check_settings, log_posterior
from checkpoints_zoo.methods.problem import Problem


@dataclass(frozen=True)
class Sgld:
    """Stochastic-gradient Langevin dynamics, θ ← θ + ε ∇log p(θ) + N(0, 2 ε T).

    Args:
        lr: learning rate: the step size ε times the number of training images.
        temperature: the temperature T.
        burn_in: discarded steps at the start; the first draw is taken `thinning` steps later.
        thinning: number of steps between two draws.
        batch_size: number of images per step; each run has its own images.
    """

    name: ClassVar[str] = "sgld"
    title: ClassVar[str] = "Stochastic-gradient Langevin dynamics"
    source: ClassVar[str] = "Welling & Teh 2011, Bayesian learning via stochastic gradient Langevin dynamics"
    needs: ClassVar[tuple[str, ...]] = (POSTERIORS_REQUIREMENT,)
    independent: ClassVar[bool] = False

    lr: float = 0.03
    temperature: float = 0.03
    burn_in: int = 500
    thinning: int = 20
    batch_size: int = 32

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Run a chain from each mode; return its draws, `thinning` steps apart. See `Method.fit`."""
        check_settings(self, runs, draws)
        sgld: Any = import_optional("posteriors.sgmcmc.sgld", POSTERIORS_REQUIREMENT)
        transform = sgld.build(log_posterior(problem), lr=self.lr / problem.count, temperature=self.temperature)
        state = transform.init(problem.modes(runs)[0])
        recorded_steps = [self.burn_in + self.thinning * (draw + 1) for draw in range(draws)]
        return run_chains(problem, self.name, transform.update, state, recorded_steps, self.batch_size, seed)

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: two rates at temperatures from 0.03 to 1."""
        return [cls(lr=lr, temperature=t) for lr in (0.03, 0.1) for t in (0.03, 0.1, 0.3, 1.0)]


@dataclass(frozen=True)
class Sghmc:
    """Stochastic-gradient Hamiltonian Monte Carlo.

    θ ← θ + h m, m ← (1 − friction) m + h ∇log p(θ) + N(0, 2 friction T), where both right sides have the θ and m of the
    step before. The step is explicit, and stable if lr · (largest curvature of the mean loss) < friction.

    Args:
        lr: learning rate, N · h².
        friction: share of the momentum that is lost in each step, 1 − momentum.
        temperature, burn_in, thinning, batch_size: the same settings as in `Sgld`.
    """

    name: ClassVar[str] = "sghmc"
    title: ClassVar[str] = "Stochastic-gradient Hamiltonian Monte Carlo"
    source: ClassVar[str] = "Chen, Fox & Guestrin 2014, Stochastic gradient Hamiltonian Monte Carlo (arXiv 1402.4102)"
    needs: ClassVar[tuple[str, ...]] = (POSTERIORS_REQUIREMENT,)
    independent: ClassVar[bool] = False

    lr: float = 0.03
    friction: float = 0.3
    temperature: float = 0.03
    burn_in: int = 500
    thinning: int = 20
    batch_size: int = 32

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Run a chain from each mode, without initial momentum; return its draws, `thinning` steps apart. See
        `Method.fit`."""
        check_settings(self, runs, draws)
        sghmc: Any = import_optional("posteriors.sgmcmc.sghmc", POSTERIORS_REQUIREMENT)
        step = math.sqrt(self.lr / problem.count)
        transform = sghmc.build(
            log_posterior(problem), lr=step, alpha=self.friction / step, temperature=self.temperature, momenta=0.0
        )
        state = transform.init(problem.modes(runs)[0])
        recorded_steps = [self.burn_in + self.thinning * (draw + 1) for draw in range(draws)]
        return run_chains(
            problem, self.name, transform.update, state, recorded_steps, self.batch_size, seed, self.friction
        )

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: two rates with stable frictions, at temperatures from 0.03 to 1."""
        rates_and_frictions = ((0.01, 0.1), (0.03, 0.3))
        return [cls(lr=lr, friction=f, temperature=t) for lr, f in rates_and_frictions for t in (0.03, 0.1, 0.3, 1.0)]


@dataclass(frozen=True)
class CyclicalSghmc:
    """SGHMC with a step size that falls by a cosine in each cycle: steps without noise to a new mode, then with noise.

    Step k of a cycle of C has the rate lr/2 · (cos(π k / C) + 1); while k / C is below `exploring`, no noise is added
    (Zhang et al. 2020, algorithm 1 and equation 1). Draws are spread evenly over the remaining steps of each cycle; the
    last step gives a draw.

    Args:
        lr: learning rate N · h² at the start of a cycle.
        cycles: number of cycles, at most one for each draw; the first cycles have one draw more if draws are uneven.
        steps: number of steps of a cycle.
        exploring: share of the steps of a cycle that add no noise.
        friction, temperature, batch_size: the same settings as in `Sghmc`.
    """

    name: ClassVar[str] = "csghmc"
    title: ClassVar[str] = "Cyclical SGHMC: several modes a run"
    source: ClassVar[str] = (
        "Zhang et al. 2020, Cyclical stochastic gradient MCMC for Bayesian deep learning (arXiv 1902.03932)"
    )
    needs: ClassVar[tuple[str, ...]] = (POSTERIORS_REQUIREMENT,)
    independent: ClassVar[bool] = False

    lr: float = 0.03
    friction: float = 0.1
    temperature: float = 0.1
    cycles: int = 5
    steps: int = 500
    exploring: float = 0.7
    batch_size: int = 32

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over all cycles.

        >>> [round(CyclicalSghmc(lr=0.1, steps=4).rate(step), 3) for step in range(5)]
        [0.1, 0.085, 0.05, 0.015, 0.1]
        """
        return self.lr / 2 * (math.cos(math.pi * (step % self.steps) / self.steps) + 1)

    def draw_steps(self, draws: int) -> list[int]:
        """Return the numbers of steps after which draws are taken.

        Raises:
            UsageError: a cycle has more draws than steps with noise.

        >>> CyclicalSghmc(cycles=2, steps=10, exploring=0.6).draw_steps(4)
        [8, 10, 18, 20]
        """
        cycles, first_noisy_step = min(self.cycles, draws), math.ceil(self.exploring * self.steps)
        draws_per_cycle = [draws // cycles + (cycle < draws % cycles) for cycle in range(cycles)]
        noisy_step_count = self.steps - first_noisy_step
        if draws_per_cycle[0] > noisy_step_count:
            raise UsageError(
                f"draws of {self.name} in a cycle",
                expected=f"at most {noisy_step_count:,}, the steps with noise",
                found=f"{draws_per_cycle[0]:,}",
                do="Make cycles longer, or take more of them",
            )
        return [
            cycle * self.steps + first_noisy_step + noisy_step_count * (draw + 1) // count
            for cycle, count in enumerate(draws_per_cycle)
            for draw in range(count)
        ]

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Run a chain from each mode through all cycles; return its draws. See `Method.fit`."""
        check_settings(self, runs, draws)
        sghmc: Any = import_optional("posteriors.sgmcmc.sghmc", POSTERIORS_REQUIREMENT)
        log_density = log_posterior(problem)

        def update(state: Any, batch: Batch) -> tuple[Any, Tensor]:
            step_number = int(state.step)
            step_size = math.sqrt(self.rate(step_number) / problem.count)
            is_exploring = step_number % self.steps < self.exploring * self.steps
            state_and_log_density: tuple[Any, Tensor] = sghmc.update(
                state,
                batch,
                log_density,
                lr=step_size,
                alpha=self.friction / step_size,  # The momentum loses the same share in each step, as in the paper.
                temperature=0.0 if is_exploring else self.temperature,
            )
            return state_and_log_density

        state = sghmc.init(problem.modes(runs)[0], momenta=0.0)
        return run_chains(
            problem, self.name, update, state, self.draw_steps(draws), self.batch_size, seed, self.friction
        )

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: two rates with stable frictions, at temperatures 0.1 and 1."""
        rates_and_frictions = ((0.03, 0.1), (0.1, 0.3))
        return [cls(lr=lr, friction=f, temperature=t) for lr, f in rates_and_frictions for t in (0.1, 1.0)]
