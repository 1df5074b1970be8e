"""Dropout: draws against networks whose inputs are masked by hooks, training against a script, torch-uncertainty's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.dropout import Dropout, MaskedLayer, draw_masks, find_layers_to_drop_before, fold_masks
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from checkpoints_zoo.training.seeds import derive_seed, epoch_order
from tests.support.few_digits import some

RATE = 0.2
Masks = Mapping[str, Tensor]


@contextmanager
def masked(network: nn.Module, masks: Masks) -> Iterator[None]:
    """Multiply the inputs of layers by masks, (unit,) or (batch, unit), channels on the second axis."""

    def multiply(mask: Tensor) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        def hook(layer: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            if isinstance(layer, nn.Linear):
                return (torch.einsum("b...u,bu->b...u", given[0], mask.expand(len(given[0]), -1)),)
            return (torch.einsum("bu...,bu->bu...", given[0], mask.expand(len(given[0]), -1)),)

        return hook

    hooks = [network.get_submodule(name).register_forward_pre_hook(multiply(mask)) for name, mask in masks.items()]
    yield
    for hook in hooks:
        hook.remove()


class Tokens(nn.Module):
    """Linear layers on (batch, token, feature), and a convolution over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.mix = nn.Linear(4, 4)
        self.along = nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.mix(self.embed(inputs).tanh()).relu()
        logits: Tensor = self.head(self.along(tokens.mT).mean(2))
        return logits


def grouped() -> nn.Module:
    """Kernels of two and of four groups, one that grows the image, and one bias that is missing."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=2, bias=False), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1, padding_mode="reflect"), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 12 * 12, 3),
    )  # fmt: skip


def of_the_package(name: str) -> Callable[[], nn.Module]:
    return lambda: zoo.load(name, n=1)[0].model()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnet": (of_the_package("convnet-digits"), (1, 8, 8)),
    "resnet8": (of_the_package("resnet8-digits"), (1, 8, 8)),
    "grouped": (grouped, (1, 8, 8)),
    "tokens": (Tokens, (5, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_is_the_network_with_that_mask(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    network = build().to(dtype)
    inputs = torch.randn(7, *shape, dtype=dtype)
    layers = find_layers_to_drop_before(network, inputs[:2])
    wanted = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)][1:]
    assert sorted(layer.name for layer in layers) == sorted(wanted)
    masks = {y.name: (torch.rand(3, y.units) >= RATE).to(dtype) / (1 - RATE) for y in layers}
    states = fold_masks(network.state_dict(), layers, masks)
    network.eval()
    for draw in range(3):
        with masked(network, {n: mask[draw] for n, mask in masks.items()}), torch.no_grad():
            expected = network(inputs)
        drawn = build().to(dtype).eval()
        drawn.load_state_dict({n: t[draw] for n, t in states.items()})
        with torch.no_grad():
            assert (drawn(inputs) - expected).abs().max() <= 1e-6 * expected.abs().max()


def with_modules(network: nn.Module, layers: list[MaskedLayer]) -> nn.Module:
    """Put torch's dropout before layers, whole channels before convolutions."""
    for layer in layers:
        parent, _, own = layer.name.rpartition(".")
        found = network.get_submodule(layer.name)
        kind = nn.Dropout if isinstance(found, nn.Linear) else nn.Dropout2d
        setattr(network.get_submodule(parent), own, nn.Sequential(kind(RATE), found))
    return network


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "resnet8"])
def test_draws_have_the_moments_of_torch_uncertaintys(name: str, oracle: Callable[[str], ModuleType]) -> None:
    """Mean and variance of logits and probabilities over 2,000 draws: within 4.5 standard errors, one in 147,000."""
    methods = oracle("torch_uncertainty.methods.mc_dropout")
    draws, problem = 2000, small(resnet8_digits() if name == "resnet8" else convnet_digits())
    network = NETWORKS[name][0]()
    inputs = zoo.images.load("digits").images[:6]
    inputs = problem.recipe.preprocess(inputs)
    layers = find_layers_to_drop_before(network, inputs)
    states = fold_masks(network.state_dict(), layers, draw_masks(layers, RATE, draws, 1))
    ensemble = zoo.Ensemble(network, {n: t for n, t in states.items() if "tracked" not in n}, range(draws))
    theirs = methods.mc_dropout(with_modules(copy.deepcopy(network), layers), draws).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        one, other = ensemble(inputs).double(), theirs(inputs).unflatten(0, (draws, -1)).double()
    for a, b in ((one, other), (one.softmax(-1), other.softmax(-1))):
        error = ((a.var(0) + b.var(0)) / draws).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() / error).max() < 4.5
        squares = [(t - t.mean(0)).square() for t in (a, b)]
        error = ((squares[0].var(0) + squares[1].var(0)) / draws).sqrt()
        assert ((squares[0].mean(0) - squares[1].mean(0)).abs() / error).max() < 4.5


def small(recipe: Recipe, **changes: Any) -> Problem:
    """The posterior of a recipe's network given a hundred images: three steps an epoch, two epochs."""
    recipe = dataclasses.replace(recipe, name="small", **{"epochs": 2, **changes})
    return Problem(recipe, some("train", 100))


def script(problem: Problem, member: int, rate: float) -> dict[str, Tensor]:
    """Train one member with dropout as a plain torch script does; return its state dict."""
    recipe, data = problem.recipe, problem.images
    torch.manual_seed(derive_seed(member, "init"))
    network = recipe.module()
    assert data.labels is not None
    layers = [n for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    of = {n: getattr(m, "in_channels", 0) or m.in_features for n, m in network.named_modules() if n in layers}
    optimizer = torch.optim.SGD(
        network.parameters(), recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
    each = len(data) // recipe.batch_size
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * each)
    for step in range(recipe.epochs * each):
        epoch, at = divmod(step, each)
        seen = epoch_order(member, epoch, len(data))[at * recipe.batch_size :][: recipe.batch_size]
        own = torch.Generator().manual_seed(derive_seed(member, f"dropout {step}"))
        noise = torch.rand(len(seen), sum(of[n] for n in layers[1:]), generator=own)
        parts = torch.split((noise >= rate).float() / (1 - rate), [of[n] for n in layers[1:]], dim=1)
        with masked(network, dict(zip(layers[1:], parts, strict=True))):
            loss = F.cross_entropy(network(recipe.preprocess(data.images[seen])), data.labels[seen])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
    return network.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [convnet_digits(), resnet8_digits()], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("width", [1, 2])
def test_training_is_a_scripts(recipe: Recipe, width: int) -> None:
    """Alone and in a stack: what is drawn, times 1 - rate where units are kept, are the script's weights."""
    problem = small(recipe, stack_width=width)
    before = torch.get_rng_state()
    runs = Dropout(RATE).fit(problem, 2, 20, 3)
    assert torch.equal(torch.get_rng_state(), before)
    layers = {layer.name for layer in find_layers_to_drop_before(problem.network(), problem.inputs[:2])}
    for at, run in enumerate(runs):
        with torch.random.fork_rng(devices=[]):
            wanted = script(problem, 1_000_000 + at, RATE)
        assert run.states.keys() == {name for name in wanted if "tracked" not in name}
        for name, drawn in run.states.items():
            if name.removesuffix(".weight") in layers:
                kept = drawn != 0
                assert kept.any(0).all()  # in some draw; of 20 draws at rate 1/5 none drops a unit twenty times
                drawn = torch.where(kept, drawn * (1 - RATE), wanted[name])
                assert 0.6 < kept.float().mean() < 0.95
            torch.testing.assert_close(drawn, wanted[name].expand_as(drawn), rtol=0, atol=2e-5)


def test_same_seed_same_draws() -> None:
    problem = small(convnet_digits(), epochs=1)
    one, again, other = (Dropout(RATE).fit(problem, 1, 3, seed)[0].states for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["fc1.weight"], other["fc1.weight"])
    assert torch.equal(one["conv1.weight"], other["conv1.weight"])  # its input is never dropped
    assert len(torch.unique(one["fc2.weight"].flatten(1), dim=0)) == 3


def test_masks_are_evenly_drawn() -> None:
    masks = draw_masks([MaskedLayer("a", 3, 1, False), MaskedLayer("b", 5, 1, False)], RATE, 4000, 1)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {"a": (4000, 3), "b": (4000, 5)}
    both = torch.cat(list(masks.values()), 1)
    assert set(both.flatten().tolist()) == {0.0, 1.25}
    error = (RATE * (1 - RATE) / 4000) ** 0.5
    assert ((both == 0).double().mean(0) - RATE).abs().max() < 4 * error
    assert (torch.corrcoef(both.T) - torch.eye(8)).abs().max() < 4 / 4000**0.5


class Twice(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.first, self.again = calls, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs.flatten(1))
        for _ in range(self.calls):
            features = self.again(features)
        logits: Tensor = features[:, :10]
        return logits


class Patches(nn.Module):
    """A second layer that takes each row of an image as an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows = nn.Conv2d(1, 1, 1), nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.rows(self.first(inputs).view(-1, 8)).view(-1, 8, 10).mean(1)
        return logits


class Standardised(nn.Linear):
    """A layer whose weights are not those that it multiplies by."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight / self.weight.std(), self.bias)


def standardised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), Standardised(32, 10))


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


ONCE = "dropout before layer {!r}: expected a layer that is called once, with all inputs; found {}."


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Twice(2), ONCE.format("again", "2 calls")),
        (lambda: Twice(0), ONCE.format("again", "0 calls")),
        (Patches, ONCE.format("rows", "another batch")),
        (one_layer, "dropout: expected two linear or convolutional layers or more; found 1."),
    ],
)
def test_networks_that_it_can_not_drop(build: Callable[[], nn.Module], text: str) -> None:
    problem = small(convnet_digits(), architecture="own", arguments={}, build=build)
    with pytest.raises(UsageError) as error:
        Dropout().fit(problem, 1, 2, 0)
    assert str(error.value) == text


def test_layers_with_other_weights_than_their_own() -> None:
    problem = small(convnet_digits(), architecture="own", arguments={}, build=standardised, epochs=1, lr=0.001)
    with pytest.raises(UsageError) as error:
        Dropout(0.5).fit(problem, 1, 2, 0)
    assert str(error.value).startswith(
        "dropout in architecture 'own': expected linear and convolutional layers that multiply their input by their "
        "own weights alone; found logits that differ by "
    )


@pytest.mark.parametrize("rate", [0.0, 1.0, float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(UsageError, match=r"^rate of dropout: expected a number between 0 and 1; found "):
        Dropout(rate).fit(small(convnet_digits()), 1, 2, 0)


def test_losses_that_are_not_finite() -> None:
    with pytest.raises(UsageError, match=r"^dropout at rate 0.05: expected finite losses; found others\."):
        Dropout().fit(small(convnet_digits(), lr=1e9), 1, 2, 0)


def test_it_is_a_method() -> None:
    assert isinstance(Dropout(), Method)
    grid = Dropout.grid(small(convnet_digits()))
    assert len(set(grid)) == len(grid) > 3
