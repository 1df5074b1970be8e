"""Networks that methods have to be careful with: tied parameters, random buffers, noise, a build with arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.dropout import find_layers_to_drop_before
from checkpoints_zoo.methods.fitting import METHODS
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.laplace import LaplaceLastLayer
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits
from tests.support.few_digits import some
from tests.support.neighbours_page import THEIR_OWN

pytestmark = [pytest.mark.filterwarnings(w) for w in THEIR_OWN]
BRIEF: dict[str, Any] = {
    "vi": MeanField(steps=5),
    "swag": Swag(epochs=3, max_num_models=2),
    "laplace-last-layer": LaplaceLastLayer(),
    "sgld": Sgld(burn_in=1, thinning=1),
    "sghmc": Sghmc(burn_in=1, thinning=1),
    "csghmc": CyclicalSghmc(cycles=1, steps=10),
    "hmc": Hmc(steps=1, warmup=2),
    "snapshot": Snapshot(),
}
ORACLES = {"swag": "torch_uncertainty", "laplace-last-layer": "laplace"} | dict.fromkeys(
    ("vi", "sgld", "sghmc", "csghmc"), "posteriors"
)


class Tied(nn.Module):
    """Two layers in the middle with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(64, 16), nn.Linear(16, 16)
        self.other, self.last = nn.Linear(16, 16), nn.Linear(16, 10)
        self.other.weight = self.one.weight

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.other(self.one(self.first(images.flatten(1)).relu()).relu()).relu())
        return logits


class TiedLast(nn.Module):
    """A last layer that has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(images.flatten(1)).relu())[:, :10]
        return logits


class Projected(nn.Module):
    """A projection that nothing trains, another in each network."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(64, 16) / 8)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(images.flatten(1) @ self.get_buffer("projection")).relu())
        return logits


def noisy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 10))


def normed_weights() -> nn.Module:
    last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 10))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), last)


def narrow(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def own(build: Callable[..., nn.Module], **changes: Any) -> Recipe:
    own = {"name": "own", "architecture": "own", "arguments": {}, "build": build, "epochs": 1, "stack_width": 2}
    return dataclasses.replace(convnet_digits(), **{**own, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("name", BRIEF)
def test_tied_parameters_are_drawn_as_one(name: str, oracle: Callable[[str], Any]) -> None:
    if name in ORACLES:
        oracle(ORACLES[name])
    problem = Problem(own(Tied), some("train", 100))
    runs = BRIEF[name].fit(problem, 2, 3, 0)
    for run in runs:
        states = run.states
        assert set(states) == set(problem.network().state_dict())
        assert torch.equal(states["one.weight"], states["other.weight"])
        network = problem.network().eval()
        network.load_state_dict({n: t[2] for n, t in states.items()})
        found = problem.inputs.flatten(1)
        for layer in ("first", "one", "other", "last"):  # by the names that a tied weight is trained under
            weight = states["one.weight" if layer == "other" else f"{layer}.weight"][2]
            found = F.linear(found.relu() if layer != "first" else found, weight, states[f"{layer}.bias"][2])
        torch.testing.assert_close(network(problem.inputs), found, rtol=1e-5, atol=1e-5)
    if name not in ("snapshot", "laplace-last-layer"):
        return
    mode = problem.modes(2)[0]["one.weight"]
    assert torch.equal(runs[1].states["other.weight"][0], mode[1])


OTHERS = (
    "dropout before layer {!r}: expected a layer with weights of its own, which masks can be folded into; found {}."
)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (Tied, OTHERS.format("one", "weights that another layer has too")),
        (TiedLast, OTHERS.format("last", "weights that another layer has too")),
        (normed_weights, OTHERS.format("3", "weights that are computed")),
    ],
)
def test_masks_are_folded_into_a_layers_own_weights_alone(build: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(UsageError) as error:
        find_layers_to_drop_before(build(), torch.zeros(2, 1, 8, 8))
    assert str(error.value) == text


def test_a_network_that_fails_keeps_no_hooks() -> None:
    network = narrow(8)
    with pytest.raises(RuntimeError):
        find_layers_to_drop_before(network, torch.zeros(2, 1, 3, 3))
    assert not any(layer._forward_pre_hooks for layer in network.modules())


@pytest.mark.parametrize(("name", "build"), [("laplace", Tied), ("laplace-last-layer", TiedLast)])
def test_tied_parameters_have_no_factors(
    name: str, build: Callable[[], nn.Module], oracle: Callable[[str], Any]
) -> None:
    oracle("laplace")
    problem = Problem(own(build, lr=0.001), some("train", 100))
    with pytest.raises(
        UsageError, match=r"^parameter '\w+\.weight' of architecture 'own': expected a parameter of one "
    ):
        METHODS[name]().fit(problem, 1, 2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vi", "swag", "sgld", "sghmc", "csghmc"])
def test_buffers_that_are_random_are_refused(name: str, oracle: Callable[[str], Any]) -> None:
    oracle(ORACLES[name])
    before = torch.get_rng_state()
    problem = Problem(own(Projected), some("train", 100))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UsageError) as error:
        BRIEF[name].fit(problem, 2, 3, 0)
    assert str(error.value) == (
        "buffer 'projection' of architecture 'own': expected the same values whenever the network is built: draws are "
        "of the parameters alone; found others each time. Build it from a seed of its own, or make it a parameter."
    )


@pytest.mark.parametrize("name", ["hmc", "snapshot"])
def test_buffers_that_are_random_stay_those_of_the_mode(name: str) -> None:
    problem = Problem(own(Projected), some("train", 100))
    runs = BRIEF[name].fit(problem, 2, 3, 0)
    for run, own_buffer in zip(runs, problem.modes(2)[1]["projection"], strict=True):
        assert torch.equal(run.states["projection"], own_buffer.expand(3, 64, 16))
    assert not torch.equal(runs[0].states["projection"], runs[1].states["projection"])


@pytest.mark.parametrize("name", ["vi", "sgld", "sghmc", "csghmc"])
def test_networks_that_can_not_be_mapped_are_refused(name: str, oracle: Callable[[str], Any]) -> None:
    oracle("posteriors")
    with pytest.raises(UsageError) as error:
        BRIEF[name].fit(Problem(own(noisy, stack_width=1), some("train", 100)), 2, 3, 0)
    text = str(error.value)
    assert text.startswith(
        "architecture 'own': expected a module that torch.vmap maps over the runs: no random numbers, no branches on "
        "values; found RuntimeError: vmap: called random operation"
    )
    assert text.endswith("Take swag, hmc or laplace, which run one network after another.")


@pytest.mark.slow
def test_float16_goes_on_with_scaled_gradients() -> None:
    recipe = dataclasses.replace(convnet_digits(), epochs=1, precision="float16", stack_width=2)
    state = Problem(recipe, some("train", 100)).trained_state(2)
    assert state.scaling["scale"].tolist() == [65536.0, 65536.0]  # as torch.amp.GradScaler begins


def test_a_build_with_arguments_is_fitted(tmp_path: Path) -> None:
    recipe = own(narrow, arguments={"width": 12}, epochs=2, batch_size=250)
    drawn = fitting.fit(Snapshot(), recipe, out=tmp_path, runs=2, draws=2)
    assert drawn.stack()["1.weight"].shape == (4, 12, 64)
    again = zoo.load(drawn.name, source=tmp_path, architecture=lambda: narrow(12))
    assert len(again) == 4
