"""Hamiltonian Monte Carlo on all training images, from a mode; the chains of all runs advance together.

The sampler itself is in `checkpoints_zoo.methods.hamiltonian`.

Axes: stacked parameters are (run, *shape), draws (run, draw, *shape).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.methods.diagnostics import effective_size, rhat
from checkpoints_zoo.methods.hamiltonian import Chains, sample
from checkpoints_zoo.methods.method import Run
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.settings import POSITIVE, check_settings
from checkpoints_zoo.networks.ensemble.running import Runner

MOST = 10**8  # parameters times inputs: about a minute for each gradient of ten chains
WATCHED = 100  # inputs whose probabilities are watched
_PIECE = 200  # inputs a forward pass: what a layer gives the next stays in a CPU's cache


@dataclass(frozen=True)
class Hmc:
    """Full-batch Hamiltonian Monte Carlo, p(θ | images)^(1/T), with unit mass.

    A chain of a few trajectories has not forgotten its mode: see its R-hat before it is taken for the posterior.

    Batch norms keep the running statistics of the mode, in training and in the draws: what is sampled is the posterior
    of the other parameters, given these.

    Args:
        temperature: T; 1 is the Bayes posterior.
        steps: leapfrog steps from draw to draw, on average; each is a gradient of all images.
        warmup: trajectories before the first draw, in which step sizes are found.
        target: acceptance that step sizes are to bring.
    """

    name: ClassVar[str] = "hmc"
    title: ClassVar[str] = "Full-batch Hamiltonian Monte Carlo"
    source: ClassVar[str] = "Neal 1996; Izmailov, Vikram, Hoffman & Wilson 2021"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False

    temperature: float = 1.0
    steps: int = 6
    warmup: int = 20
    target: float = 0.8

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Run a chain from each mode; return its draws, a trajectory apart. See `Method.fit`.

        A run's facts: `acceptance`, `step_size`, `divergences`; `log_posterior` of the draws, T aside, in nats, their
        mean; R-hat between the halves of the run, of it and of the weights (median and largest), and effective sample
        sizes of its mean and of the weights' (median). Of all runs together: R-hat of the log posterior and of the
        probabilities of the right classes (median and largest).
        """
        check_settings(self, runs, draws, temperature=POSITIVE)
        self._check(problem)
        modes, buffers = problem.modes(runs)
        posterior = Posterior(problem, modes, buffers, self.temperature)
        chains = sample(posterior, modes, draws, warmup=self.warmup, steps=self.steps, seed=seed, target=self.target)
        kept = {n: b.float().cpu() for n, b in buffers.items() if not is_counter(n)}
        states = [
            {n: d[run].float().contiguous() for n, d in chains.draws.items()}
            | {n: b[run].expand(draws, *b.shape[1:]).clone() for n, b in kept.items()}
            for run in range(runs)
        ]
        of_all = _facts_of_all(problem, chains, states, self.temperature) if draws >= 4 else {}
        return [
            Run(problem.whole(state), _facts(chains, run, self.temperature) | of_all)
            for run, state in enumerate(states)
        ]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return lengths of a trajectory; the temperature stays 1, which is what HMC is there for."""
        return [cls(steps=steps) for steps in (3, 6)]

    def _check(self, problem: Problem) -> None:
        weights = sum(p.numel() for p in problem.network().parameters())
        if weights * problem.count > MOST:
            raise UsageError(
                f"{self.name} of recipe {problem.recipe.name!r}",
                expected=f"at most {MOST:,} parameters times inputs: each step takes the gradient of all inputs",
                found=f"{weights:,} parameters, {problem.count:,} inputs",
                do="Take sghmc, which takes minibatches",
            )


class Posterior:
    """The log posterior of all runs' networks in eval mode, given all images, divided by a temperature.

    Args:
        problem: prior, images and network.
        params: name -> (run, *shape), for their shapes.
        buffers: of the runs, which stay as they are.
        temperature: to divide by.
    """

    def __init__(
        self, problem: Problem, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], temperature: float
    ) -> None:
        self.problem, self.temperature = problem, temperature
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        self.inputs, self.labels = (
            torch.split(_channels_last(problem.inputs), _PIECE),
            torch.split(problem.labels, _PIECE),
        )
        fixed = {name: b for name, b in buffers.items() if not is_counter(name)}
        skeleton = problem.network().eval().requires_grad_(False).to(problem.device)
        self.runner = Runner(skeleton, {**problem.whole(self.leaves), **fixed})
        if self.runner.program(self.inputs[0]) is not None:
            self.runner.asked = "grouped"  # side by side they are twice as quick

    def __call__(self, positions: Tensors) -> tuple[Tensor, Tensors]:
        """Return each run's log density, nats, (run,), and its gradient, name -> (run, *shape)."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(positions[name])
        runs, leaves = self.runner.members, list(self.leaves.values())
        level = torch.vmap(self.problem.log_prior)({n: p.double() for n, p in positions.items()})
        pull = -self.problem.prior_precision
        gradient = [(pull * p).detach() for p in positions.values()]
        for inputs, labels in zip(self.inputs, self.labels, strict=True):
            logits = self.runner(inputs).double()  # sums of float32 would lose what the Metropolis test goes by
            losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(runs), reduction="none")
            found = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
            level = level - losses.detach().view(runs, -1).sum(1)
            torch._foreach_sub_(gradient, list(found))
        scaled = torch._foreach_div(gradient, self.temperature)
        return level / self.temperature, dict(zip(self.leaves, scaled, strict=True))


def _channels_last(inputs: Tensor) -> Tensor:
    """Lay images out with their channels last, also if there is one alone; pooling is ten times as quick."""
    if inputs.dim() != 4:
        return inputs
    count, channels, height, width = inputs.shape
    laid = inputs.new_empty(count, height, width, channels).copy_(inputs.permute(0, 2, 3, 1))
    return laid.as_strided(inputs.shape, (height * width * channels, 1, width * channels, channels))


def _facts(chains: Chains, run: int, temperature: float) -> dict[str, float]:
    """Return what one chain says of itself."""
    level = chains.log_density[run]
    facts = {
        "acceptance": float(chains.acceptance[run]),
        "step_size": float(chains.step_size[run]),
        "divergences": float(chains.divergences[run]),
        "log_posterior": float(level.mean() * temperature),
    }
    if len(level) >= 4:
        weights = torch.cat([d[run].flatten(1) for d in chains.draws.values()], 1)[None]
        of_weights = rhat(weights)
        facts |= {
            "rhat_log_posterior": float(rhat(level[None, :, None])),
            "rhat": float(of_weights.median()),
            "rhat_max": float(of_weights.max()),
            "ess_log_posterior": float(effective_size(level[None, :, None])),
            "ess": float(effective_size(weights).median()),
        }
    return facts


def _facts_of_all(problem: Problem, chains: Chains, states: Sequence[Tensors], temperature: float) -> dict[str, float]:
    """Return what all chains say together, of what symmetries of the weights don't change."""
    every = max(1, problem.count // WATCHED)
    inputs, labels = problem.inputs[::every][:WATCHED].cpu(), problem.labels[::every][:WATCHED].cpu()
    skeleton = problem.network().eval().requires_grad_(False)
    with torch.no_grad():
        logits = torch.stack([Runner(skeleton, problem.whole(state))(inputs) for state in states])
    right = logits.double().log_softmax(-1)[:, :, torch.arange(len(labels)), labels]  # (chain, draw, input)
    of_classes = rhat(right)
    moving = of_classes[~of_classes.isnan()]  # probabilities that are 1 in all draws have no R-hat
    return {
        "rhat_log_posterior_all": float(rhat(chains.log_density[:, :, None])),
        "rhat_predictive_all": float(moving.median()) if len(moving) else float("nan"),
        "rhat_predictive_all_max": float(moving.max()) if len(moving) else float("nan"),
    }
