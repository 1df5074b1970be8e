"""Hamiltonian Monte Carlo on all training images, started at modes; the chains of all runs advance together.

This file has the method, then the posterior that the method samples, then a sampler of any differentiable density. This
is one file, because no other method uses the parts.

Axes: stacked parameters are (run, *shape), draws (run, draw, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.methods.chains import effective_size, rhat
from checkpoints_zoo.methods.method import POSITIVE_RANGE, Run, check_settings
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.networks.ensemble.executions import Runner
from checkpoints_zoo.training.seeds import derive_seed, seeded_generator

MOST_PARAMETERS_TIMES_INPUTS = 10**8  # parameters times inputs: about a minute for each gradient of ten chains
DIAGNOSED_INPUTS = 100  # inputs whose probabilities are diagnosed
_INPUTS_PER_PASS = 200  # inputs a forward pass: activations then fit into a CPU's cache
DIVERGENT_ENERGY_CHANGE = 1000.0  # nats: a trajectory whose energy changes by more is divergent, as in Stan and pyro
MIN_ADAPTATION = 10  # trajectories that dual averaging needs to find a step size

# Function of stacked tensors: returns each chain's log density in nats (chain,), float64, and its stacked gradients.
Density = Callable[[Tensors], tuple[Tensor, Tensors]]


@dataclass(frozen=True)
class Hmc:
    """Full-batch Hamiltonian Monte Carlo for p(θ | images)^(1/T), with unit mass.

    A chain of a few trajectories still depends on its mode: read the chain's R-hat before you treat its draws as draws
        from the posterior.

    Batch norms keep the running statistics of the mode, while sampling and in the draws: the samples are of the
        posterior of the parameters, given the mode's running statistics.

    Args:
        temperature: the temperature T; T = 1 is the Bayes posterior.
        steps: average number of leapfrog steps between two draws; each step needs a gradient over all images.
        warmup: number of trajectories before the first draw, during which step sizes are adapted.
        target: acceptance probability to which the step sizes are adapted.
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

        Each run has a record of numbers: `acceptance`, `step_size`, `divergences`; `log_posterior`, in nats, at T = 1,
        the mean over the draws; R-hat between the halves of the run, and effective sample sizes, of the log posterior
        and of the weights (median and largest). All runs together have the R-hat of the log posterior and of the
        probabilities of the right classes (median and largest).
        """
        check_settings(self, runs, draws, temperature=POSITIVE_RANGE)
        self._check(problem)
        modes, buffers = problem.modes(runs)
        posterior = Posterior(problem, modes, buffers, self.temperature)
        chains = sample(posterior, modes, draws, warmup=self.warmup, steps=self.steps, seed=seed, target=self.target)
        fixed_buffers = {n: b.float().cpu() for n, b in buffers.items() if not is_counter(n)}
        states = [
            {n: d[run].float().contiguous() for n, d in chains.draws.items()}
            | {n: b[run].expand(draws, *b.shape[1:]).clone() for n, b in fixed_buffers.items()}
            for run in range(runs)
        ]
        common_facts = _common_facts(problem, chains, states, self.temperature) if draws >= 4 else {}
        return [
            Run(problem.add_tied_names(state), _chain_facts(chains, run, self.temperature) | common_facts)
            for run, state in enumerate(states)
        ]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return two lengths of a trajectory, at temperature 1: HMC samples the Bayes posterior."""
        return [cls(steps=steps) for steps in (3, 6)]

    def _check(self, problem: Problem) -> None:
        weights = sum(p.numel() for p in problem.network().parameters())
        if weights * problem.count > MOST_PARAMETERS_TIMES_INPUTS:
            raise UsageError(
                f"{self.name} of recipe {problem.recipe.name!r}",
                expected=f"at most {MOST_PARAMETERS_TIMES_INPUTS:,} parameters times inputs: each step takes the"
                " gradient of all inputs",
                found=f"{weights:,} parameters, {problem.count:,} inputs",
                do="Take sghmc, which takes minibatches",
            )


class Posterior:
    """The log posterior of all runs' networks in eval mode, given all images, divided by a temperature.

    Args:
        problem: problem with the prior, the images and the network.
        params: stacked parameters that show the shapes, name -> (run, *shape).
        buffers: stacked buffers of the runs, which do not change.
        temperature: number that divides the log posterior.
    """

    def __init__(
        self, problem: Problem, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], temperature: float
    ) -> None:
        self.problem, self.temperature = problem, temperature
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        self.inputs, self.labels = (
            torch.split(_store_channels_last(problem.inputs), _INPUTS_PER_PASS),
            torch.split(problem.labels, _INPUTS_PER_PASS),
        )
        fixed_buffers = {name: b for name, b in buffers.items() if not is_counter(name)}
        skeleton = problem.network().eval().requires_grad_(False).to(problem.device)
        self.runner = Runner(skeleton, {**problem.add_tied_names(self.leaves), **fixed_buffers})
        if self.runner.program(self.inputs[0]) is not None:
            self.runner.requested = "grouped"  # twice as fast as one run after another

    def __call__(self, stacked_params: Tensors) -> tuple[Tensor, Tensors]:
        """Return each run's log density, nats, (run,), and its gradient, name -> (run, *shape)."""
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.copy_(stacked_params[name])
        run_count, leaf_params = self.runner.member_count, list(self.leaves.values())
        log_density = torch.vmap(self.problem.log_prior)({n: p.double() for n, p in stacked_params.items()})
        negative_precision = -self.problem.prior_precision
        gradients = [(negative_precision * p).detach() for p in stacked_params.values()]
        for inputs, labels in zip(self.inputs, self.labels, strict=True):
            logits = self.runner(inputs).double()  # float32 sums are too coarse for the Metropolis test
            losses = F.cross_entropy(logits.flatten(0, 1), labels.repeat(run_count), reduction="none")
            likelihood_gradients = torch.autograd.grad(
                losses.sum(), leaf_params, allow_unused=True, materialize_grads=True
            )
            log_density = log_density - losses.detach().view(run_count, -1).sum(1)
            torch._foreach_sub_(gradients, list(likelihood_gradients))
        scaled_gradients = torch._foreach_div(gradients, self.temperature)
        return log_density / self.temperature, dict(zip(self.leaves, scaled_gradients, strict=True))


def _store_channels_last(inputs: Tensor) -> Tensor:
    """Store images with their channels last, even a single one; pooling is then ten times as fast."""
    if inputs.dim() != 4:
        return inputs
    image_count, channels, height, width = inputs.shape
    channels_last = inputs.new_empty(image_count, height, width, channels).copy_(inputs.permute(0, 2, 3, 1))
    return channels_last.as_strided(inputs.shape, (height * width * channels, 1, width * channels, channels))


def _chain_facts(chains: Chains, run: int, temperature: float) -> dict[str, float]:
    """Return the diagnostics of one chain, name -> number: acceptance, step size, R-hat and the like."""
    log_density = chains.log_density[run]
    facts = {
        "acceptance": float(chains.acceptance[run]),
        "step_size": float(chains.step_size[run]),
        "divergences": float(chains.divergences[run]),
        "log_posterior": float(log_density.mean() * temperature),
    }
    if len(log_density) >= 4:
        weights = torch.cat([d[run].flatten(1) for d in chains.draws.values()], 1)[None]
        rhat_of_weights = rhat(weights)
        facts |= {
            "rhat_log_posterior": float(rhat(log_density[None, :, None])),
            "rhat": float(rhat_of_weights.median()),
            "rhat_max": float(rhat_of_weights.max()),
            "ess_log_posterior": float(effective_size(log_density[None, :, None])),
            "ess": float(effective_size(weights).median()),
        }
    return facts


def _common_facts(
    problem: Problem, chains: Chains, chain_states: Sequence[Tensors], temperature: float
) -> dict[str, float]:
    """Return the R-hats of all chains together, name -> number, for quantities that symmetries of the weights do not
    change."""
    input_stride = max(1, problem.count // DIAGNOSED_INPUTS)
    inputs, labels = (
        problem.inputs[::input_stride][:DIAGNOSED_INPUTS].cpu(),
        problem.labels[::input_stride][:DIAGNOSED_INPUTS].cpu(),
    )
    skeleton = problem.network().eval().requires_grad_(False)
    with torch.no_grad():
        logits = torch.stack([Runner(skeleton, problem.add_tied_names(state))(inputs) for state in chain_states])
    label_log_probs = logits.double().log_softmax(-1)[:, :, torch.arange(len(labels)), labels]  # (chain, draw, input)
    rhat_of_inputs = rhat(label_log_probs)
    finite_rhat = rhat_of_inputs[~rhat_of_inputs.isnan()]  # a probability of 1 in all draws has no R-hat
    return {
        "rhat_log_posterior_all": float(rhat(chains.log_density[:, :, None])),
        "rhat_predictive_all": float(finite_rhat.median()) if len(finite_rhat) else float("nan"),
        "rhat_predictive_all_max": float(finite_rhat.max()) if len(finite_rhat) else float("nan"),
    }


@dataclass(frozen=True, eq=False)
class Chains:
    """The draws of some chains, and the sampler's record.

    Args:
        draws: name -> (chain, draw, *shape).
        log_density: log density of each draw in nats, (chain, draw), float64.
        acceptance: mean probability of acceptance after warm-up, (chain,).
        step_size: step sizes after warm-up, (chain,).
        divergences: number of divergent trajectories after warm-up, (chain,).
        gradients: number of gradients of each chain.
    """

    draws: Tensors
    log_density: Tensor
    acceptance: Tensor
    step_size: Tensor
    divergences: Tensor
    gradients: int


def sample(
    density: Density,
    start: Mapping[str, Tensor],
    draws: int,
    *,
    warmup: int,
    steps: int,
    seed: int,
    target: float = 0.8,
    mass: Mapping[str, Tensor] | None = None,
) -> Chains:
    """Draw from a density by Hamiltonian Monte Carlo; return the chains.

    Args:
        density: function that computes the log densities and gradients of all chains at once, in float64.
        start: stacked tensors at which the chains start, name -> (chain, *shape).
        draws: number of trajectories after warm-up, each of which gives a draw.
        warmup: number of trajectories before the draws, during which step sizes are adapted; if there are 20 or more,
            only the second half is used.
        steps: mean number of leapfrog steps of a trajectory; each trajectory's number is drawn between steps / 2 and 3
            / 2 * steps, for all chains together.
        seed: seed of all random numbers; the random numbers of a chain do not depend on the number of chains.
        target: acceptance probability to which the step sizes are adapted.
        mass: mass of each dimension, name -> (*shape); None for mass 1 in all dimensions.

    Raises:
        UsageError: the density is not finite at the start.

    >>> normal = lambda at: (-at["x"].square().sum(1).double() / 2, {"x": -at["x"]})
    >>> chains = sample(normal, {"x": torch.zeros(4, 3)}, 500, warmup=200, steps=4, seed=0)
    >>> chains.draws["x"].shape, bool((chains.draws["x"].var() - 1).abs() < 0.1)
    (torch.Size([4, 500, 3]), True)
    """
    flat_density, chain_count = FlatDensity(density, start), len(next(iter(start.values())))
    point = flat_density(torch.cat([tensor.detach().flatten(1) for tensor in start.values()], 1))
    if not bool((point.log_density.isfinite() & point.gradient.isfinite().all(1)).all()):
        raise UsageError(
            "start of the chains", expected="finite log densities", found=str(point.log_density.tolist())[:80]
        )
    root_masses = torch.ones_like(point.position[0])
    if mass is not None:
        root_masses = torch.cat([mass[name].to(root_masses).flatten() for name in start]).sqrt()
    generators = [seeded_generator(derive_seed(seed, f"hmc chain {chain}")) for chain in range(chain_count)]
    length_generator = seeded_generator(derive_seed(seed, "hmc lengths"))
    fewest_steps, most_steps = max(1, steps // 2), steps + steps // 2

    def draw_momenta() -> Tensor:
        random_momenta = [torch.randn(point.position.shape[1:], generator=g, dtype=torch.float64) for g in generators]
        return torch.stack(random_momenta).to(point.position) * root_masses

    step_sizes = StepSizes(find_first_step_size(flat_density, point, draw_momenta(), root_masses), target)
    positions, log_densities = [], []
    acceptance_probabilities, divergence_counts = [], torch.zeros(chain_count, dtype=torch.int64)
    for trajectory in range(warmup + draws):
        if trajectory == warmup // 2 >= MIN_ADAPTATION:  # steps that are accepted near the mode are too long later
            step_sizes = StepSizes(step_sizes.average, target)
        step_count = int(torch.randint(fewest_steps, most_steps + 1, (), generator=length_generator))
        present_sizes = step_sizes.trial if trajectory < warmup else step_sizes.average
        start_momenta = draw_momenta()
        end_point, end_momenta, is_stable = leapfrog(
            flat_density, point, start_momenta, present_sizes, step_count, root_masses
        )
        probability = acceptance_probability(point, start_momenta, end_point, end_momenta, root_masses).where(
            is_stable, 0.0
        )
        uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(probability)
        is_end_accepted = uniform < probability
        point = Point(
            *(
                _select_by_mask(is_end_accepted, new_values, old_values)
                for new_values, old_values in zip(end_point, point, strict=True)
            )
        )
        if trajectory < warmup:
            step_sizes.adapt(probability)
            continue
        positions.append(point.position.cpu())
        log_densities.append(point.log_density.cpu())
        acceptance_probabilities.append(probability.cpu())
        divergence_counts += (~is_stable).cpu()
    return Chains(
        flat_density.unflatten(torch.stack(positions, 1)),
        torch.stack(log_densities, 1),
        torch.stack(acceptance_probabilities).mean(0),
        step_sizes.average.cpu(),
        divergence_counts,
        flat_density.calls,
    )


class Point(NamedTuple):
    """Positions of chains (chain, dimension), log densities (chain,), gradients (chain, dimension)."""

    position: Tensor
    log_density: Tensor
    gradient: Tensor


class FlatDensity:
    """A density as a function of flat positions (chain, dimension).

    Args:
        density: density as a function of stacked tensors.
        shape_tensors: stacked tensors that show the shapes, name -> (chain, *shape).
    """

    def __init__(self, density: Density, shape_tensors: Mapping[str, Tensor]) -> None:
        self.density, self.calls = density, 0
        self.shapes = {name: tensor.shape[1:] for name, tensor in shape_tensors.items()}

    def __call__(self, position: Tensor) -> Point:
        self.calls += 1
        log_density, gradient = self.density(self.unflatten(position))
        return Point(position, log_density, torch.cat([gradient[name].flatten(1) for name in self.shapes], 1))

    def unflatten(self, position: Tensor) -> Tensors:
        """Return the tensors of flat positions (…, dimension), name -> (…, *shape)."""
        parts = torch.split(position, [shape.numel() for shape in self.shapes.values()], -1)
        return {n: p.reshape(*p.shape[:-1], *s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}


def leapfrog(
    flat_density: FlatDensity, point: Point, momenta: Tensor, step_sizes: Tensor, steps: int, root_masses: Tensor
) -> tuple[Point, Tensor, Tensor]:
    """Take leapfrog steps; return the end point, the momenta there, and which chains are stable, (chain,).

    A chain whose energy changes by DIVERGENT_ENERGY_CHANGE nats or is not finite is unstable: such a chain goes back to
        its start and takes no more steps.

    Args:
        flat_density: density that the chains sample.
        point: start of the chains.
        momenta: momenta of the chains, (chain, dimension).
        step_sizes: step size of each chain, (chain,).
        steps: number of steps.
        root_masses: root of the mass of each dimension, (dimension,).
    """
    start_point, start_energy = point, energy(point, momenta, root_masses)
    is_stable = torch.ones_like(start_energy, dtype=torch.bool)
    step = step_sizes[:, None].to(momenta)
    for _ in range(steps):
        half_step_momenta = momenta + step / 2 * point.gradient
        point = flat_density(point.position + step * half_step_momenta / root_masses.square())
        momenta = half_step_momenta + step / 2 * point.gradient
        energy_error = (energy(point, momenta, root_masses) - start_energy).abs()
        is_stable = is_stable & (energy_error < DIVERGENT_ENERGY_CHANGE) & point.gradient.isfinite().all(1)
        if not bool(is_stable.all()):
            point = Point(*(_select_by_mask(is_stable, new, old) for new, old in zip(point, start_point, strict=True)))
            momenta = _select_by_mask(is_stable, momenta, torch.zeros_like(momenta))
    return point, momenta, is_stable


def energy(point: Point, momenta: Tensor, root_masses: Tensor) -> Tensor:
    """Return each chain's energy, potential and kinetic, in nats and float64, (chain,)."""
    return (momenta / root_masses).double().square().sum(1) / 2 - point.log_density


def acceptance_probability(
    start_point: Point, start_momenta: Tensor, end_point: Point, end_momenta: Tensor, root_masses: Tensor
) -> Tensor:
    """Return the probability that the Metropolis test accepts the end of each trajectory, (chain,)."""
    return (
        (energy(start_point, start_momenta, root_masses) - energy(end_point, end_momenta, root_masses))
        .clamp(max=0)
        .exp()
    )


def find_first_step_size(
    flat_density: FlatDensity, point: Point, momenta: Tensor, root_masses: Tensor, initial_size: float = 0.01
) -> Tensor:
    """Double or halve step sizes until one step is accepted with probability about 1/2; return each chain's step size.

    Source: Hoffman & Gelman 2014, algorithm 4.

    Args:
        flat_density, point, momenta, root_masses: the same arguments as in `leapfrog`.
        initial_size: step size of all chains to begin with.
    """
    sizes = torch.full_like(point.log_density, initial_size)
    is_doubling, is_searching = None, torch.ones_like(sizes, dtype=torch.bool)
    for _ in range(60):
        end_point, end_momenta, is_stable = leapfrog(flat_density, point, momenta, sizes, 1, root_masses)
        is_accepted = (
            acceptance_probability(point, momenta, end_point, end_momenta, root_masses).where(is_stable, 0.0) > 0.5
        )
        is_doubling = is_accepted if is_doubling is None else is_doubling
        is_searching = is_searching & (is_accepted == is_doubling)
        if not bool(is_searching.any()):
            break
        sizes = torch.where(is_searching, torch.where(is_doubling, sizes * 2, sizes / 2), sizes)
    return sizes


class StepSizes:
    """Dual averaging of each chain's step size (Hoffman & Gelman 2014, algorithm 5, with their constants).

    Args:
        first_sizes: step sizes to begin with, (chain,).
        target: acceptance probability to which step sizes are adapted.
    """

    def __init__(self, first_sizes: Tensor, target: float) -> None:
        self.target, self.trajectory_count = target, 0
        self.trial = self.average = first_sizes
        self._log_anchor, self._log_average = torch.log(10 * first_sizes), torch.zeros_like(first_sizes)
        self._mean_shortfall = torch.zeros_like(first_sizes)

    def adapt(self, acceptance_probabilities: Tensor) -> None:
        """Adapt the step sizes to the acceptance probabilities (chain,) of a trajectory."""
        self.trajectory_count += 1
        weight = 1 / (self.trajectory_count + 10)
        self._mean_shortfall = (1 - weight) * self._mean_shortfall + weight * (self.target - acceptance_probabilities)
        log_trial = self._log_anchor - math.sqrt(self.trajectory_count) / 0.05 * self._mean_shortfall
        share = self.trajectory_count**-0.75
        self._log_average = share * log_trial + (1 - share) * self._log_average
        self.trial, self.average = log_trial.exp(), self._log_average.exp()


def _select_by_mask(mask: Tensor, new_values: Tensor, old_values: Tensor) -> Tensor:
    return torch.where(mask.view(-1, *[1] * (new_values.dim() - 1)), new_values, old_values)
