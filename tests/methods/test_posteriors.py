"""SGLD, SGHMC, cyclical SGHMC and mean-field VI: reproducible, those of posteriors alone, and refused where wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from checkpoints_zoo.training.seeds import derive_seed
from tests.support.neighbours_page import THEIR_OWN

pytestmark = [pytest.mark.filterwarnings(w) for w in THEIR_OWN]
Tensors = dict[str, Tensor]
CONVNET = dataclasses.replace(convnet_digits(), epochs=1, batch_size=250, stack_width=3)
QUICK: dict[str, Any] = {
    "sgld": Sgld(lr=0.01, temperature=1.0, burn_in=3, thinning=2),
    "sghmc": Sghmc(lr=0.003, temperature=1.0, burn_in=3, thinning=2),
    "csghmc": CyclicalSghmc(lr=0.003, cycles=2, steps=6, exploring=0.5),
    "vi": MeanField(steps=5),
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return Problem.of(CONVNET, folder=tmp_path_factory.mktemp("modes"))


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    recipe = dataclasses.replace(resnet8_digits(), epochs=1, batch_size=250, stack_width=2)
    return Problem.of(recipe, folder=tmp_path_factory.mktemp("normed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(QUICK))
def test_draws_are_distinct_and_those_of_their_seed(problem: Problem, name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (QUICK[name].fit(problem, 3, 3, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(first) == 3
    for one, two, third in zip(first, again, other, strict=True):
        assert set(one.states) == {n for n in problem.network().state_dict() if not is_counter(n)}
        assert one.facts == pytest.approx(two.facts, nan_ok=True)
        for tensor in one.states.values():
            assert (tensor.dtype, tensor.device.type, len(tensor)) == (torch.float32, "cpu", 3)
        assert all(torch.equal(one.states[n], two.states[n]) for n in one.states)
        assert not any(torch.equal(one.states[n], third.states[n]) for n in one.states)
        assert all(not torch.equal(t[a], t[b]) for t in one.states.values() for a, b in ((0, 1), (0, 2), (1, 2)))


def chained(problem: Problem, method: Any, seed: int, steps: int) -> Tensors:
    """The parameters of posteriors' own chain from the first mode, without our product and loop."""
    sampler: Any = import_optional(f"posteriors.sgmcmc.{method.name}", "posteriors")
    params = {n: p[0] for n, p in problem.modes(3)[0].items()}
    kept = {} if method.name == "sgld" else {"alpha": method.friction / math.sqrt(method.lr / problem.count)}
    step = method.lr / problem.count if method.name == "sgld" else math.sqrt(method.lr / problem.count)
    update = sampler.build(problem.log_posterior, lr=step, temperature=method.temperature, **kept).update
    state = sampler.init(params) if method.name == "sgld" else sampler.init(params, 0.0)
    batches = problem.batches(method.batch_size, [derive_seed(seed, f"{method.name} run 0")])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, f"{method.name} noise"))
        for _ in range(steps):
            inputs, labels = next(batches)
            state, _ = update(state, (inputs[0], labels[0]))
    return dict(state.params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_chains_are_those_of_posteriors_alone(problem: Problem, name: str, temperature: float) -> None:
    # Without noise, each of three is what it is alone; with the noise of one generator, one chain is.
    method = dataclasses.replace(QUICK[name], temperature=temperature, burn_in=3, thinning=2)
    runs = method.fit(problem, 3, 2, seed=9) if temperature == 0 else _one(problem, method)
    wanted = chained(problem, method, 9, steps=7)
    start = problem.modes(3)[0]
    for tensor_name, tensor in wanted.items():
        moved_by = (tensor - start[tensor_name][0]).abs().max()
        assert (runs[0].states[tensor_name][1] - tensor).abs().max() < 1e-4 * moved_by


def _one(problem: Problem, method: Any) -> Any:
    params = {n: p[:1] for n, p in problem.modes(3)[0].items()}
    alone = Problem(problem.recipe, problem.images)
    object.__setattr__(alone, "modes", lambda runs: (params, {}))
    return method.fit(alone, 1, 2, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(QUICK))
def test_networks_with_batch_norm_are_drawn_with_statistics_of_their_own(normed: Problem, name: str) -> None:
    problem = normed
    runs = QUICK[name].fit(problem, 2, 2, seed=0)
    for run in runs:
        states = run.states
        assert set(states) == {n for n in problem.network().state_dict() if not is_counter(n)}
        module = problem.network().eval()
        for draw in range(2):
            module.load_state_dict({n: t[draw] for n, t in states.items()}, strict=False)
            seen: list[Tensor] = []
            module.get_submodule("bn1").register_forward_pre_hook(
                lambda layer, inputs, seen=seen: seen.append(inputs[0])
            )
            with torch.no_grad():
                module(problem.inputs)
            wanted = seen[-1].mean((0, 2, 3))
            assert (states["bn1.running_mean"][draw] - wanted).abs().max() < 0.02 * wanted.abs().max()
        assert not torch.equal(states["bn1.running_var"][0], states["bn1.running_var"][1])


def test_a_random_start_is_not_the_mode(problem: Problem) -> None:
    method = MeanField(steps=1, lr=1e-6, init_log_sd=-20.0, start="random")
    runs = method.fit(problem, 2, 2, seed=3)
    modes = problem.modes(2)[0]
    for run in range(2):
        assert (runs[run].states["fc1.weight"][0] - modes["fc1.weight"][run]).abs().max() > 0.05
    assert not torch.allclose(runs[0].states["fc1.weight"], runs[1].states["fc1.weight"], rtol=0, atol=0.05)


def test_cyclical_rates_and_draws_are_those_of_the_paper() -> None:
    method = CyclicalSghmc(lr=0.5, cycles=4, steps=100, exploring=0.8)
    total = 400
    for step in (1, 2, 50, 100, 101, 399, 400):  # equation 1, which counts from 1
        inside = ((step - 1) % math.ceil(total / 4)) / math.ceil(total / 4)
        assert method.rate(step - 1) == pytest.approx(0.5 / 2 * (math.cos(math.pi * inside) + 1), rel=1e-12)
    assert method.draw_steps(10) == [86, 93, 100, 186, 193, 200, 290, 300, 390, 400]
    assert method.draw_steps(2) == [100, 200]
    with pytest.raises(UsageError) as raised:
        method.draw_steps(81)
    assert str(raised.value) == (
        "draws of csghmc in a cycle: expected at most 20, the steps with noise; found 21. "
        "Make cycles longer, or take more of them."
    )


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Sgld(lr=0.0), "lr of sgld: expected a number above 0; found 0.0."),
        (Sghmc(friction=1.5), "friction of sghmc: expected a number above 0 and at most 1; found 1.5."),
        (CyclicalSghmc(exploring=1.0), "exploring of csghmc: expected a number from 0 and below 1; found 1.0."),
        (
            Sghmc(lr=50.0, burn_in=20),
            "chains of sghmc: expected finite parameters; found others in run 0 at step 22. "
            "Lower lr: the step has to be small for the largest curvature.",
        ),
        (MeanField(start="mean"), "start of vi: expected mode or random; found 'mean'."),
    ],
)
def test_settings_out_of_range_are_refused(problem: Problem, method: Any, text: str) -> None:
    with pytest.raises(UsageError) as raised:
        dataclasses.replace(method, **({"thinning": 2} if hasattr(method, "thinning") else {})).fit(problem, 3, 2, 0)
    assert str(raised.value) == text


@pytest.mark.parametrize("kind", [Sgld, Sghmc, CyclicalSghmc, MeanField])
def test_the_grid_has_settings_of_the_method(problem: Problem, kind: Any) -> None:
    grid = kind.grid(problem)
    assert len(grid) == len(set(grid)) > 1
    assert all(type(method) is kind for method in grid)
