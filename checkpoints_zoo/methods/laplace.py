"""Laplace approximations around a mode, by laplace-torch: Gaussians with a Kronecker-factored curvature.

Draws are weights of networks, which laplace-torch calls the "nn" predictive. The default predictive of laplace-torch,
the linearised network, has no draws of weights.

Axes: stacked parameters are (run, *shape), draws (draw, *shape).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.methods.method import POSITIVE_RANGE, Run, check_settings
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import FORWARD_BATCH, Problem
from checkpoints_zoo.training.seeds import derive_seed, seed_torch

LAPLACE_REQUIREMENT = "laplace-torch>=0.2.2,<1"
FACTORED_LAYERS = (nn.Linear, nn.Conv2d)
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm)
PRIOR_RULES = ("weight-decay", "evidence")
EVIDENCE_STEPS = 100


@dataclass(frozen=True)
class Laplace:
    """A Gaussian over the weights of all linear layers and convolutions.

    Norm layers keep the parameters and statistics of the mode.

    Args:
        prior: rule for the precision of the prior: "weight-decay" takes N times the weight decay, "evidence"
            takes the precision with the highest evidence, which differs between runs.
        temperature: the temperature T of p(θ | images)^(1/T): the covariance is T times the covariance of the
            posterior.
    """

    name: ClassVar[str] = "laplace"
    title: ClassVar[str] = "Laplace approximation, Kronecker-factored"
    source: ClassVar[str] = "Ritter, Botev & Barber 2018; Daxberger et al. 2021"
    needs: ClassVar[tuple[str, ...]] = (LAPLACE_REQUIREMENT,)
    independent: ClassVar[bool] = False
    weights: ClassVar[str] = "all"

    prior: str = "weight-decay"
    temperature: float = 1.0

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Fit a Gaussian to each mode; return its draws. See `Method.fit`.

        Each run has a record of numbers: `prior_precision`, `log_evidence` (laplace's estimate of the log marginal
        likelihood, nats).
        """
        check_settings(self, runs, draws, temperature=POSITIVE_RANGE)
        return _fit_gaussians(self.weights, self.prior, self.temperature, problem, runs, draws, seed)

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries on a problem."""
        return [cls(prior, t) for prior in PRIOR_RULES for t in (0.003, 0.01, 0.03, 0.1, 1.0)]


@dataclass(frozen=True)
class LaplaceLastLayer:
    """A Gaussian over the weights of the last layer; all other tensors stay at the mode.

    Args:
        prior, temperature: the same settings as in `Laplace`.
    """

    name: ClassVar[str] = "laplace-last-layer"
    title: ClassVar[str] = "Laplace approximation of the last layer, Kronecker-factored"
    source: ClassVar[str] = "Kristiadi, Hein & Hennig 2020; Daxberger et al. 2021"
    needs: ClassVar[tuple[str, ...]] = (LAPLACE_REQUIREMENT,)
    independent: ClassVar[bool] = False
    weights: ClassVar[str] = "last_layer"

    prior: str = "weight-decay"
    temperature: float = 1.0

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Fit a Gaussian to each mode's last layer; return its draws. See `Laplace.fit`."""
        check_settings(self, runs, draws, temperature=POSITIVE_RANGE)
        return _fit_gaussians(self.weights, self.prior, self.temperature, problem, runs, draws, seed)

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries on a problem."""
        return [cls(prior, t) for prior in PRIOR_RULES for t in (0.01, 0.03, 0.1, 0.3, 1.0)]


def _fit_gaussians(
    subset_of_weights: str, prior_rule: str, temperature: float, problem: Problem, runs: int, draws: int, seed: int
) -> Sequence[Run]:
    laplace_torch = import_optional("laplace", LAPLACE_REQUIREMENT)
    modes, buffers = problem.modes(runs)
    # The order and the batch size are fixed: the Kronecker factors depend on both.
    loader: Any = DataLoader(TensorDataset(problem.inputs, problem.labels), batch_size=FORWARD_BATCH)
    finished_runs = []
    for run in range(runs):
        mode = {n: t[run] for n, t in {**modes, **buffers}.items()}
        network = network_at_mode(problem, mode)
        if subset_of_weights == "all":
            freeze_norms(network, problem.recipe.architecture)
            check_untied(problem, [name for name, p in network.named_parameters() if p.requires_grad])
        posterior = laplace_torch.Laplace(
            network,
            "classification",
            subset_of_weights=subset_of_weights,
            hessian_structure="kron",
            prior_precision=problem.prior_precision,
        )
        with seed_torch(derive_seed(seed, f"laplace run {run}"), problem.device):
            _fit_posterior(posterior, loader, prior_rule, problem.recipe.architecture)
        log_evidence, prior_precision = float(posterior.log_marginal_likelihood()), float(posterior.prior_precision)
        posterior.temperature, posterior.prior_precision = temperature, prior_precision / temperature
        generator = torch.Generator(problem.device).manual_seed(derive_seed(seed, f"laplace draws {run}"))
        drawn_tensors = _split_draws(posterior.sample(draws, generator=generator), network, posterior)
        check_untied(problem, drawn_tensors)
        fixed_tensors = {n: t.expand(draws, *t.shape) for n, t in mode.items() if not is_counter(n)}
        draws_and_buffers = {
            n: t.detach().float().cpu().contiguous() for n, t in (fixed_tensors | drawn_tensors).items()
        }
        finished_runs.append(
            Run(
                problem.add_tied_names(draws_and_buffers),
                {"prior_precision": prior_precision, "log_evidence": log_evidence},
            )
        )
    return finished_runs


def check_untied(problem: Problem, parameter_names: Iterable[str]) -> None:
    """Check that no two layers share a parameter.

    Raises:
        UsageError: several layers share a parameter.
    """
    if tied := sorted(set(parameter_names) & {name for pair in problem.tied_names.items() for name in pair}):
        raise UsageError(
            f"parameter {tied[0]!r} of architecture {problem.recipe.architecture!r}",
            expected="a parameter of one layer: Kronecker factors are of each layer's own",
            found="one that layers share",
            do="Take sghmc or swag",
        )


def network_at_mode(problem: Problem, mode: Mapping[str, Tensor]) -> nn.Module:
    """Return a network in eval mode with the tensors of a mode, name -> tensor."""
    network = problem.network().to(problem.device).eval()
    parameters = network.state_dict()
    network.load_state_dict(
        {name: tensor for name, tensor in problem.add_tied_names(mode).items() if name in parameters}
    )
    return network


def freeze_norms(network: nn.Module, architecture_name: str) -> None:
    """Exclude the parameters of norm layers from the Gaussian: laplace-torch skips parameters without gradients.

    Raises:
        UsageError: a layer with parameters is neither a norm nor has Kronecker factors.
    """
    for path, layer in network.named_modules():
        parameters = [name for name, _ in layer.named_parameters(path, recurse=False)]
        if isinstance(layer, NORM_LAYERS):
            layer.requires_grad_(False)
        elif parameters and not isinstance(layer, FACTORED_LAYERS):
            raise UsageError(
                f"parameter {parameters[0]!r} of architecture {architecture_name!r}",
                expected="one of a linear layer, a convolution or a norm: others have no Kronecker factors",
                found=f"one of {type(layer).__name__}",
                do="Take laplace-last-layer",
            )


def _fit_posterior(posterior: Any, loader: Any, prior_rule: str, architecture_name: str) -> None:
    """Fit laplace-torch's posterior in place.

    Raises:
        UsageError: laplace-torch can't take the network.
    """
    try:
        posterior.fit(loader)
    except ValueError as error:
        if "linear last layer" not in str(error):
            raise
        raise UsageError(
            f"architecture {architecture_name!r}",
            expected="a linear layer as the last",
            found=str(error),
            do="Take laplace",
        ) from error
    if prior_rule == "evidence":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="By default `link_approx`", category=UserWarning)  # not called
            posterior.optimize_prior_precision(
                method="marglik", n_steps=EVIDENCE_STEPS, init_prior_prec=posterior.prior_precision
            )


def _split_draws(drawn_vectors: Tensor, network: nn.Module, posterior: Any) -> Tensors:
    """Split draws (draw, weight) into tensors, name -> (draw, *shape), in the order of laplace-torch."""
    layer = getattr(posterior.model, "last_layer", None)
    if layer is None:
        shapes = {n: p.shape for n, p in network.named_parameters() if p.requires_grad}
    else:
        layer_name = next(n for n, m in posterior.model.model.named_modules() if m is layer)
        shapes = {f"{layer_name}.{n}": p.shape for n, p in layer.named_parameters()}
    weight_parts = torch.split(drawn_vectors, [shape.numel() for shape in shapes.values()], 1)
    return {
        n: part.reshape(len(drawn_vectors), *shape)
        for (n, shape), part in zip(shapes.items(), weight_parts, strict=True)
    }
