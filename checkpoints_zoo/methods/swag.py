"""SWAG: a Gaussian around the weights along SGD at a constant rate, by torch-uncertainty's class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.methods.method import Run, SettingRange, check_settings, whole_number_range
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgd import continue_training
from checkpoints_zoo.training.seeds import derive_seed


@dataclass(frozen=True)
class Swag:
    """A Gaussian with mean, variance and a low-rank covariance of SGD's weights (Maddox et al. 2019).

    From each mode, SGD continues at a constant rate; torch-uncertainty's `SWAG` collects the weights after each epoch,
    and draws: mean + sqrt(scale) · (sqrt(variance) z + D y / sqrt(max_num_models - 1)), where y and z are standard
    normal and D has the deviations of the last weights from the mean so far (equation 1, where scale is 1/2).
    torch-uncertainty draws a new y for each tensor, so tensors are independent; in the paper all tensors share one y.
    Running statistics are estimated anew for each draw.

    Args:
        lr: the constant learning rate.
        epochs: number of epochs, each of which gives one set of weights.
        scale: factor of the covariance.
        max_num_models: rank of the low-rank part, at most `epochs`.
        var_clamp: smallest variance of a weight.
        diag_covariance: whether the low-rank part is left out.
    """

    lr: float = 0.05
    epochs: int = 20
    scale: float = 0.5
    max_num_models: int = 20
    var_clamp: float = 1e-6
    diag_covariance: bool = False

    name: ClassVar[str] = "swag"
    title: ClassVar[str] = "SWAG"
    source: ClassVar[str] = (
        "Maddox et al. 2019, A simple baseline for Bayesian uncertainty in deep learning (arXiv 1902.02476)"
    )
    needs: ClassVar[tuple[str, ...]] = ("torch-uncertainty>=0.7,<1",)
    independent: ClassVar[bool] = False

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Continue the training of each mode, collect its weights, and draw; return the runs.

        Args:
            problem: the network and its training images.
            runs: number of runs.
            draws: number of draws of each run.
            seed: seed of the order of images and of the draws.

        Raises:
            UsageError: torch-uncertainty is not installed, a setting is out of its range, or a loss was not finite.
        """
        rank = SettingRange(
            f"a whole number from 2 to epochs, {self.epochs}",
            lambda value: whole_number_range(2).allows(value) and value <= self.epochs,
        )
        check_settings(self, runs, draws, max_num_models=rank)
        weights = continue_training(
            problem, runs, seed, schedule="constant", lr=self.lr, epochs_after_mode=range(1, self.epochs + 1)
        )
        with torch.random.fork_rng(devices=[]):
            return [self._draw(problem, list(weights.values()), run, draws, seed) for run in range(runs)]

    def _draw(self, problem: Problem, weights_of_epochs: Sequence[Tensors], run: int, draws: int, seed: int) -> Run:
        fitted_swag = self.collect_weights(
            problem, [{n: t[run] for n, t in tensors.items()} for tensors in weights_of_epochs]
        )
        drawn_tensors: dict[str, list[torch.Tensor]] = {}
        for draw in range(draws):
            network = fitted_swag.sample(self.scale, seed=derive_seed(seed, f"swag {run} {draw}"))
            for name, parameter in network.named_parameters():
                drawn_tensors.setdefault(name, []).append(parameter.detach())
        return Run(problem.finish({name: torch.stack(tensors) for name, tensors in drawn_tensors.items()}))

    def collect_weights(self, problem: Problem, weights_of_epochs: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        """Pass weights to torch-uncertainty's `SWAG` one after another; return the object, ready to draw.

        Args:
            problem: problem whose network has the parameters in `weights_of_epochs`.
            weights_of_epochs: sets of weights in order, each with parameters (and buffers) by name.

        Raises:
            UsageError: torch-uncertainty is not installed.
        """
        swag_class = import_optional("torch_uncertainty.methods.swag", *self.needs).SWAG
        network = problem.network()
        swag = swag_class(
            network,
            cycle_start=0,
            cycle_length=1,
            scale=self.scale,
            diag_covariance=self.diag_covariance,
            max_num_models=self.max_num_models,
            var_clamp=self.var_clamp,
            num_estimators=0,  # Otherwise `SWAG` would draw networks after each epoch.
        )
        with torch.no_grad():
            for epoch, tensors in enumerate(weights_of_epochs, 1):
                for name, parameter in network.named_parameters():
                    parameter.copy_(tensors[name])
                swag.update_wrapper(epoch)
        return swag

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: rates from 1/5 to 1 times the recipe's, scales from 1/4 to 2."""
        return [cls(lr=problem.recipe.lr * part, scale=s) for part in (0.2, 0.5, 1.0) for s in (0.25, 0.5, 1.0, 2.0)]
