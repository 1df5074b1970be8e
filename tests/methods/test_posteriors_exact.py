"""SGLD, SGHMC, cyclical SGHMC and mean-field VI against posteriors of linear models in closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

from checkpoints_zoo.methods import chains
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.vi import MeanField
from tests.support.neighbours_page import THEIR_OWN

pytestmark = [pytest.mark.filterwarnings(w) for w in THEIR_OWN]
Tensors = dict[str, Tensor]


class Regression:
    """Linear regression with noise of variance 1/4 and prior precision 2, as methods take a problem; w and b.

    Every batch is all of the inputs, so that nothing but the samplers is random.
    """

    recipe = SimpleNamespace(architecture="a linear model")  # as errors name it
    device = torch.device("cpu")
    noise, precision = 0.25, 2.0

    def __init__(self, design: np.ndarray, targets: np.ndarray) -> None:
        self.design, self.targets = design, targets
        self.inputs, self.labels = torch.tensor(design).float(), torch.tensor(targets).float()
        self.count = len(targets)
        self.lambda_ = design.T @ design / self.noise + self.precision * np.eye(design.shape[1])
        self.mean = np.linalg.solve(self.lambda_, design.T @ targets / self.noise)

    @property
    def log_evidence(self) -> float:
        covariance = self.noise * np.eye(self.count) + self.design @ self.design.T / self.precision
        return float(scipy.stats.multivariate_normal(np.zeros(self.count), covariance).logpdf(self.targets))

    def log_posterior(self, params: Tensors, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        weights = torch.cat([params["w"].flatten(), params["b"]])
        found = inputs @ weights
        likelihood = -(found - labels).square().sum() / (2 * self.noise)
        prior = -self.precision / 2 * weights.square().sum()
        constant = self.count * math.log(2 * math.pi * self.noise) + len(weights) * math.log(
            2 * math.pi / self.precision
        )
        return likelihood + prior - constant / 2, found

    def modes(self, runs: int) -> tuple[Tensors, Tensors]:
        mode = torch.tensor(self.mean).float()
        return {"w": mode[:-1].repeat(runs, 1).view(runs, 2, -1), "b": mode[-1:].repeat(runs, 1)}, {}

    def batches(self, size: int, seeds: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield self.inputs.expand(len(seeds), -1, -1), self.labels.expand(len(seeds), -1)

    def finish(self, params: Tensors) -> Tensors:
        return params


def flat(runs: Sequence[Any]) -> np.ndarray:
    """The draws of all runs, (run, draw, parameter), float64."""
    return np.stack([torch.cat([r.states["w"].flatten(1), r.states["b"]], 1).double().numpy() for r in runs])


@pytest.fixture(scope="module")
def regression() -> Any:
    rng = np.random.default_rng(3)
    turned = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    design = np.linalg.qr(rng.normal(size=(40, 5)))[0] * np.array([3.0, 6.0, 4.0, 5.0, 3.0]) @ turned  # correlated
    return Regression(design, design @ np.array([0.5, -1.0, 0.3, 0.0, 0.8]) + 0.5 * rng.normal(size=40))


@pytest.fixture(scope="module")
def orthogonal() -> Any:
    rng = np.random.default_rng(4)
    design = np.linalg.qr(rng.normal(size=(40, 5)))[0] * np.array([3.0, 6.0, 4.0, 5.0, 2.0])
    return Regression(design, design @ np.array([0.5, -1.0, 0.3, 0.2, 0.8]) + 0.5 * rng.normal(size=40))


@pytest.fixture
def undiagnosed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the diagnostics of chains, which take longer for hundreds of short ones than the chains do."""
    for name in ("rhat", "effective_size"):
        monkeypatch.setattr(chains, name, lambda draws: torch.zeros(1))


def check_moments(draws: np.ndarray, mean: np.ndarray, covariance: np.ndarray, bias: float) -> None:
    """Compare draws of many runs with a Gaussian: five standard errors over the runs, and `bias` of the variances."""
    runs, scale = len(draws), np.sqrt(np.diag(covariance))
    means = draws.mean(1)
    assert (np.abs(means.mean(0) - mean) < 5 * means.std(0, ddof=1) / math.sqrt(runs)).all()
    products = ((draws - mean)[..., :, None] * (draws - mean)[..., None, :]).mean(1)
    error = 5 * products.std(0, ddof=1) / math.sqrt(runs) + bias * np.outer(scale, scale)
    assert (np.abs(products.mean(0) - covariance) < error).all()
    assert (error < 0.22 * np.outer(scale, scale)).all()  # so that the check means something


@pytest.mark.slow
@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_sgld_draws_from_the_posterior_of_a_linear_model(regression: Any, temperature: float) -> None:
    # Its stationary covariance is T Λ⁻¹ (1 − ε Λ / 2)⁻¹: too large by ε λ / 2 at most, here 3 %.
    top = np.linalg.eigvalsh(regression.lambda_)[-1]
    method = Sgld(lr=0.06 / top * regression.count, temperature=temperature, burn_in=130, thinning=12)
    draws = flat(method.fit(regression, 800, 8, seed=0))
    covariance = temperature * np.linalg.inv(regression.lambda_)
    check_moments(draws, regression.mean, covariance, bias=0.035)


def moved(regression: Any, rate: float, friction: float, temperature: float, law: np.ndarray) -> np.ndarray:
    """Move the covariance of (θ − mean, m) on by a step of SGHMC, a linear map with noise."""
    h, one = math.sqrt(rate / regression.count), np.eye(len(regression.mean))
    step = np.block([[one, h * one], [-h * regression.lambda_, (1 - friction) * one]])
    noise = scipy.linalg.block_diag(0 * one, 2 * friction * temperature * one)
    return np.asarray(step @ law @ step.T + noise)


@pytest.mark.slow
@pytest.mark.usefixtures("undiagnosed")
def test_sghmc_draws_from_the_posterior_of_a_linear_model(regression: Any) -> None:
    # The stationary law is nearer to the posterior the smaller lr · λ / friction is.
    friction, lr = 0.2, 0.006 / np.linalg.eigvalsh(regression.lambda_)[-1] * regression.count
    runs = Sghmc(lr=lr, friction=friction, temperature=1.0, burn_in=260, thinning=30).fit(regression, 800, 8, seed=1)
    exact = np.linalg.inv(regression.lambda_)
    law = scipy.linalg.block_diag(exact, np.eye(5))
    for _ in range(3000):
        law = moved(regression, lr, friction, 1.0, law)
    scale = np.sqrt(np.diag(exact))
    assert np.abs((law[:5, :5] - exact) / np.outer(scale, scale)).max() < 0.04
    check_moments(flat(runs), regression.mean, exact, bias=0.04)
    assert np.mean([run.facts["kinetic_temperature"] for run in runs]) == pytest.approx(1, abs=0.04)


@pytest.mark.slow
@pytest.mark.usefixtures("undiagnosed")
def test_cyclical_draws_have_the_law_of_their_steps(regression: Any) -> None:
    # From the mode at rest the covariance is known after each step, whatever the rates and temperatures.
    method = CyclicalSghmc(lr=0.03, friction=0.2, temperature=0.5, cycles=2, steps=120, exploring=0.5)
    draws = flat(method.fit(regression, 1000, 12, seed=2))
    law, wanted = np.zeros((10, 10)), []
    for step in range(240):
        inside = step % 120 / 120
        rate, temperature = 0.03 / 2 * (math.cos(math.pi * inside) + 1), 0.5 if inside >= 0.5 else 0.0
        law = moved(regression, rate, 0.2, temperature, law)
        if inside >= 0.5 and (step + 1) % 10 == 0:
            wanted.append(law[:5, :5])
    assert len(wanted) == 12
    check_moments(draws, regression.mean, np.mean(wanted, 0), bias=0)


def test_a_cycle_explores_without_noise(regression: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Noise of the last step is in the momentum alone, so that the draw is that of gradient ascent with momentum.
    start = regression.mean + 0.3
    params = {"w": torch.tensor(start[None, :4]).float(), "b": torch.tensor(start[None, 4:]).float()}
    monkeypatch.setattr(regression, "modes", lambda runs: (params, {}))
    method = CyclicalSghmc(lr=0.2, friction=0.3, cycles=1, steps=10, exploring=0.9)
    found = flat(method.fit(regression, 1, 1, seed=0))[0, 0]
    theta, velocity = start, np.zeros(5)
    for step in range(10):
        h = math.sqrt(0.2 / 2 * (math.cos(math.pi * step / 10) + 1) / regression.count)
        gradient = -regression.lambda_ @ (theta - regression.mean)
        theta, velocity = theta + h * velocity, 0.7 * velocity + h * gradient
    assert np.abs(found - theta).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_vi_is_exact_where_the_posterior_is_diagonal(orthogonal: Any, temperature: float) -> None:
    method = MeanField(lr=0.05, steps=300, init_log_sd=-3.0, temperature=temperature)
    runs = method.fit(orthogonal, 3, 2000, seed=0)
    draws = flat(runs)
    sd = np.sqrt(temperature / np.diag(orthogonal.lambda_))
    # What the Gaussians are is seen through their draws: 6,000 of them; five standard errors.
    assert (np.abs(draws.mean((0, 1)) - orthogonal.mean) < 5 * sd / math.sqrt(6000)).all()
    assert np.abs(draws.std((0, 1)) / sd - 1).max() < 5 / math.sqrt(12000)
    for run in runs:  # and through the facts: by sticking the landing the last gradients have no noise
        assert run.facts["mean_sd"] == pytest.approx(sd.mean(), rel=1e-3)
        if temperature == 1:
            assert run.facts["elbo"] == pytest.approx(orthogonal.log_evidence, abs=1e-3)


@pytest.mark.slow
def test_vi_of_correlated_parameters_has_the_sds_of_each_given_the_others(regression: Any) -> None:
    # The mean-field optimum of a Gaussian target (Bishop 2006, equation 10.13), from means that are not the mode's.
    method = MeanField(lr=0.03, steps=300, init_log_sd=-3.0, temperature=1.0, samples=4)
    (run,) = method.fit(regression, 1, 4000, seed=0)
    sd, draws = 1 / np.sqrt(np.diag(regression.lambda_)), flat([run])[0]
    assert (np.abs(draws.mean(0) - regression.mean) < 5 * sd / math.sqrt(4000) + 0.02 * sd).all()
    assert np.abs(draws.std(0) / sd - 1).max() < 5 / math.sqrt(8000) + 0.02
    gap = (np.log(np.diag(regression.lambda_)).sum() - np.linalg.slogdet(regression.lambda_)[1]) / 2
    assert run.facts["elbo"] == pytest.approx(regression.log_evidence - gap, abs=0.2)  # the KL divergence


@pytest.mark.slow
def test_chains_that_have_not_mixed_say_so(regression: Any) -> None:
    top = np.linalg.eigvalsh(regression.lambda_)[-1]
    still, mixed = (
        Sgld(lr=lr / top * regression.count, temperature=1.0, burn_in=burn_in, thinning=thinning).fit(
            regression, 20, 100, seed=0
        )
        for lr, burn_in, thinning in ((0.001, 0, 1), (0.2, 50, 8))
    )

    def mean(runs: Sequence[Any], name: str) -> float:
        return float(np.mean([run.facts[name] for run in runs]))

    assert mean(still, "rhat") > 1.3 > 1.03 > mean(mixed, "rhat")
    assert mean(still, "ess") < 6 < 20 < mean(mixed, "ess")
    level = mean(mixed, "log_posterior")  # the mode's, less half a nat a parameter
    peak = float(
        regression.log_posterior(
            {n: p[0] for n, p in regression.modes(1)[0].items()}, (regression.inputs, regression.labels)
        )[0]
    )
    assert level == pytest.approx(peak - 5 / 2, abs=0.35)
