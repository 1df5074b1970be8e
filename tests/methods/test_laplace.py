"""Laplace approximations: their draws against laplace-torch driven by hand, and against a Gaussian in closed form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.laplace import Laplace, LaplaceLastLayer
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.problem import FORWARD_BATCH, Problem
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from checkpoints_zoo.training.seeds import derive_seed
from tests.support.neighbours_page import THEIR_OWN

pytestmark = [pytest.mark.filterwarnings(w) for w in THEIR_OWN]
LINK = "ignore:By default `link_approx`:UserWarning"
Tensors = dict[str, Tensor]
Oracle = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def laplace(oracle: Oracle) -> Any:
    return oracle("laplace")


@pytest.fixture(scope="module")
def convnet(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    recipe = dataclasses.replace(convnet_digits(), epochs=4)
    return Problem.of(recipe, held_out=800, folder=tmp_path_factory.mktemp("convnet"))


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    recipe = dataclasses.replace(resnet8_digits(), epochs=1)
    return Problem.of(recipe, held_out=1000, folder=tmp_path_factory.mktemp("resnet"))


def by_hand(laplace: Any, problem: Problem, run: int, of_runs: int, weights: str, prior: str, t: float, n: int) -> Any:
    """What laplace-torch gives its own user: the fitted object, its network, and its samples (draw, weight)."""
    params, buffers = problem.modes(of_runs)
    net = problem.recipe.module()
    net.load_state_dict({name: tensor[run] for name, tensor in {**params, **buffers}.items()}, strict=False)
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and weights == "all":
            module.weight.requires_grad = module.bias.requires_grad = False
    loader = DataLoader(TensorDataset(problem.inputs, problem.labels), batch_size=FORWARD_BATCH)
    given = {"subset_of_weights": weights, "hessian_structure": "kron"}
    found = laplace.Laplace(net, "classification", prior_precision=problem.prior_precision, **given)
    found.fit(loader)
    if prior == "evidence":
        found.optimize_prior_precision(init_prior_prec=problem.prior_precision)
    chosen = found.prior_precision
    other = laplace.Laplace(net, "classification", prior_precision=chosen / t, temperature=t, **given)
    other.fit(loader)
    generator = torch.Generator().manual_seed(derive_seed(7, f"laplace draws {run}"))
    return net, other, other.sample(n, generator=generator), float(chosen)


@pytest.mark.slow
@pytest.mark.filterwarnings(LINK)
@pytest.mark.parametrize(("weights", "kind"), [("all", Laplace), ("last_layer", LaplaceLastLayer)])
@pytest.mark.parametrize(("prior", "temperature"), [("weight-decay", 1.0), ("weight-decay", 0.1), ("evidence", 0.1)])
def test_draws_are_those_of_laplace_torch(
    laplace: Any, convnet: Problem, weights: str, kind: Any, prior: str, temperature: float
) -> None:
    runs = kind(prior, temperature).fit(convnet, 2, 3, seed=7)
    for at, run in enumerate(runs):
        net, _, wanted, precision = by_hand(laplace, convnet, at, 2, weights, prior, temperature, 3)
        for draw in range(3):
            drawn = convnet.recipe.module()
            drawn.load_state_dict({n: t[draw] for n, t in run.states.items()})
            part = drawn if weights == "all" else drawn.get_submodule("fc2")
            found = parameters_to_vector(part.parameters())
            # The Hessian is the same to the last bit; temperature 1/10 rounds once more.
            torch.testing.assert_close(found, wanted[draw], rtol=0, atol=1e-5)
            if weights == "last_layer":
                assert torch.equal(drawn.get_parameter("conv1.weight"), net.get_parameter("conv1.weight"))
        assert math.isclose(run.facts["prior_precision"], precision, rel_tol=1e-5)
    one, other = (run.states["fc2.weight"] for run in runs)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


@pytest.mark.slow
def test_norms_stay_as_they_are(laplace: Any, resnet: Problem) -> None:
    (params, buffers) = resnet.modes(1)
    run = Laplace(temperature=0.01).fit(resnet, 1, 2, seed=7)[0]
    _, _, wanted, _ = by_hand(laplace, resnet, 0, 1, "all", "weight-decay", 0.01, 2)
    norms = [n for n in run.states if "bn" in n or "downsample.1" in n]
    assert {n.rpartition(".")[2] for n in norms} == {"weight", "bias", "running_mean", "running_var"}
    for name in norms:
        mode = {**params, **buffers}[name][0]
        assert torch.equal(run.states[name], mode.expand(2, *mode.shape))
    names = [n for n, _ in resnet.network().named_parameters() if n not in norms]
    drawn = [run.states[n].flatten(1) for n in names]
    torch.testing.assert_close(torch.cat(drawn, 1), wanted, rtol=0, atol=1e-5)
    last = LaplaceLastLayer(temperature=0.01).fit(resnet, 1, 2, seed=7)[0]
    moved = [n for n, t in last.states.items() if not torch.equal(t[0], t[1])]
    assert set(moved) == {"fc.weight", "fc.bias"}
    skeleton = resnet.network()
    skeleton.load_state_dict({n: t[0] for n, t in last.states.items()}, strict=False)


def test_draws_have_the_covariance_of_the_posterior(convnet: Problem) -> None:
    """Of the last layer, whose Hessian is a sum over inputs done by hand: what Kronecker factors are of."""
    precision, temperature, draws = convnet.prior_precision, 0.5, 4000
    run = LaplaceLastLayer(temperature=temperature).fit(convnet, 1, draws, seed=1)[0]
    params, _ = convnet.modes(1)
    net = convnet.recipe.module()
    net.load_state_dict({n: t[0] for n, t in params.items()})
    kept: list[Tensor] = []
    net.get_submodule("fc2").register_forward_hook(lambda _, inputs, __: kept.append(inputs[0].detach()))
    with torch.no_grad():
        p = net(convnet.inputs).softmax(-1).double()
    hessian = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).sum(0)  # of the bias: exact, no factors
    covariance = temperature * torch.linalg.inv(hessian + precision * torch.eye(10))
    drawn = run.states["fc2.bias"].double()
    mode = params["fc2.bias"][0].double()
    spread = covariance.diagonal().sqrt()
    z = (drawn.mean(0) - mode) / spread * draws**0.5
    assert z.abs().max() < 5
    found = drawn.T.cov()
    error = (((spread[:, None] * spread) ** 2 + covariance**2) / draws).sqrt()
    assert ((found - covariance).abs() / error).max() < 5
    assert isinstance(Laplace(), Method)
    assert isinstance(LaplaceLastLayer(), Method)


@pytest.mark.slow
def test_what_is_drawn_is_a_function_of_the_seed(convnet: Problem) -> None:
    before = torch.random.get_rng_state()
    one, again, other = (Laplace(temperature=0.01).fit(convnet, 2, 2, seed=s)[0].states for s in (3, 3, 4))
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one["fc1.weight"], other["fc1.weight"])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in one.values())
    assert {m.prior for m in Laplace.grid(convnet)} == {m.prior for m in LaplaceLastLayer.grid(convnet)}


class Own(nn.Module):
    """A network with a parameter of its own, whose last layer is no linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 8)
        self.gain = nn.Parameter(torch.ones(10))
        self.flatten = nn.Flatten()

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.flatten(self.conv(images) * self.gain[:, None, None])
        return logits


def test_networks_that_have_no_factors_are_refused() -> None:
    recipe = dataclasses.replace(convnet_digits(), architecture="own", arguments={}, build=Own, epochs=1, lr=0.01)
    problem = Problem.of(recipe)
    with pytest.raises(UsageError) as refused:
        Laplace().fit(problem, 1, 2, seed=0)
    assert str(refused.value) == (
        "parameter 'gain' of architecture 'own': expected one of a linear layer, a convolution or a norm: others have "
        "no Kronecker factors; found one of Own. Take laplace-last-layer."
    )
    with pytest.raises(UsageError, match=r"architecture 'own': expected a linear layer as the last; found .*\. Take"):
        LaplaceLastLayer().fit(problem, 1, 2, seed=0)


def test_settings_out_of_range_are_refused(convnet: Problem) -> None:
    with pytest.raises(UsageError, match="expected weight-decay or evidence; found 'none'"):
        Laplace(prior="none").fit(convnet, 1, 2, seed=0)
    with pytest.raises(UsageError, match="temperature of laplace-last-layer: expected a number above 0; found 0"):
        LaplaceLastLayer(temperature=0).fit(convnet, 1, 2, seed=0)


def test_the_package_is_named_where_it_is_missing(convnet: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(UsageError, match=r'pip install "laplace-torch>=0.2.2,<1"'):
        Laplace().fit(convnet, 1, 2, seed=0)
