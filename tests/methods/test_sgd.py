"""SWAG, snapshot ensembles, deep ensembles: against plain torch scripts, torch-uncertainty's class and numpy."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble, check_no_shared_members, train_members
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgd import continue_training
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.training.population import train_stack
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from checkpoints_zoo.training.seeds import derive_seed, epoch_order
from tests.support.few_digits import some
from tests.support.tiny import TINY

RUNS, SEED = 2, 5
Tensors = dict[str, Tensor]


def small(recipe: Recipe, **changes: Any) -> Problem:
    """The posterior of a recipe's network given a hundred images: three steps an epoch, two epochs to a mode."""
    recipe = dataclasses.replace(recipe, name="small", **{"epochs": 2, **changes})
    return Problem(recipe, some("train", 100))


def script(problem: Problem, run: int, lr: float, after: list[int], cycle: int = 0) -> list[Tensors]:
    """Train a mode on as a plain torch script does, at a constant rate, or with warm restarts after `cycle` epochs.

    Returns:
        State dicts, without counters, after some of the epochs.
    """
    recipe, data = problem.recipe, problem.images
    params, buffers = problem.modes(RUNS)
    network = problem.network().train()
    network.load_state_dict({name: tensor[run] for name, tensor in {**params, **buffers}.items()})
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    each, found = len(data) // recipe.batch_size, []
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    if cycle:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, cycle * each)
    assert data.labels is not None
    for epoch in range(1, after[-1] + 1):
        order = epoch_order(derive_seed(SEED, f"run {run}"), recipe.epochs + epoch - 1, len(data))
        for seen in torch.split(order[: each * recipe.batch_size], recipe.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(recipe.preprocess(data.images[seen])), data.labels[seen])
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step()
        if epoch in after:
            state = network.state_dict()
            found.append({name: t.clone() for name, t in state.items() if "tracked" not in name})
    return found


def near(one: Tensors, other: Tensors, atol: float = 2e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023


RECIPES = [convnet_digits(), dataclasses.replace(convnet_digits(), stack_width=1), resnet8_digits()]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=["convnet", "alone", "resnet8"])
def test_weights_on_the_way_are_a_scripts(recipe: Recipe) -> None:
    problem = small(recipe)
    found = continue_training(problem, RUNS, SEED, schedule="constant", lr=0.02, epochs_after_mode=[1, 3])
    assert list(found) == [1, 3]
    for run in range(RUNS):
        for wanted, tensors in zip(script(problem, run, 0.02, [1, 3]), found.values(), strict=True):
            near(wanted, {name: tensor[run] for name, tensor in tensors.items()})


BY_EPOCH = dataclasses.replace(convnet_digits(), schedule_unit="epoch")  # its rate would not fall within a cycle of one


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, BY_EPOCH], ids=["convnet", "alone", "resnet8", "by-epoch"])
def test_snapshots_are_a_scripts(recipe: Recipe) -> None:
    problem = small(recipe)
    before = torch.get_rng_state()
    runs = Snapshot(lr=0.03, cycle=2).fit(problem, RUNS, 3, SEED)
    assert torch.equal(torch.get_rng_state(), before)
    params, buffers = problem.modes(RUNS)
    for at, run in enumerate(runs):
        mode = {name: t[at] for name, t in {**params, **buffers}.items() if "tracked" not in name}
        for draw, wanted in enumerate([mode, *script(problem, at, 0.03, [2, 4], cycle=2)]):
            near(wanted, {name: tensor[draw] for name, tensor in run.states.items()})


def test_a_snapshot_ensemble_is_a_recipe_with_restarts() -> None:
    """Its first snapshot is the mode of the recipe without; all are minima that the rate has fallen to 0 at."""
    problem = small(convnet_digits(), stack_width=2)
    ensemble = dataclasses.replace(
        problem.recipe, epochs=4, schedule="cosine-restarts", milestones=(2, 3), snapshots=(2, 3)
    )
    members = train_stack(ensemble, (1_000_000, 1_000_001), problem.images)
    runs = Snapshot(lr=ensemble.lr).fit(problem, 2, 3, SEED)
    for member, run in zip(members, runs, strict=True):
        near(member.snapshots[2], {name: t[0] for name, t in run.states.items()}, atol=1e-6)
        assert not torch.equal(member.snapshots[3]["fc1.weight"], member.state["fc1.weight"])


@pytest.mark.parametrize("method", [Snapshot(), Swag(epochs=3, max_num_models=2)], ids=["snapshot", "swag"])
def test_same_seed_same_draws(method: Snapshot | Swag, uncertainty: ModuleType) -> None:
    problem = small(convnet_digits(), epochs=1)
    before = torch.get_rng_state()
    one, again, other = ([run.states for run in method.fit(problem, RUNS, 3, seed)] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    whole = set(problem.network().state_dict())
    for run in range(RUNS):
        assert one[run].keys() == whole
        assert all(torch.equal(tensor, again[run][name]) for name, tensor in one[run].items())
        assert not torch.equal(one[run]["fc1.weight"][-1], other[run]["fc1.weight"][-1])
        assert len(torch.unique(one[run]["fc1.weight"].flatten(1), dim=0)) == 3
    assert not torch.equal(one[0]["fc1.weight"], one[1]["fc1.weight"])


@pytest.fixture(scope="module")
def uncertainty(oracle: Callable[[str], ModuleType]) -> ModuleType:
    return oracle("torch_uncertainty.methods.swag")


def walked(network: nn.Module, steps: int) -> list[Tensors]:
    """Weights of a random walk."""
    random = torch.Generator().manual_seed(3)
    at = {name: p.detach().clone() for name, p in network.named_parameters()}
    found = []
    for _ in range(steps):
        at = {name: t + 0.1 * torch.randn(t.shape, generator=random) for name, t in at.items()}
        found.append(at)
    return found


@pytest.mark.parametrize("diagonal", [False, True])
def test_swag_is_its_formula(diagonal: bool, uncertainty: ModuleType) -> None:
    """Maddox et al. 2019, section 3.2 and equation 1, whose 1/2 is our scale, with numpy in float64."""
    problem = small(convnet_digits())
    weights = walked(problem.network(), 6)
    rank, clamp, scale = 4, 0.02, 0.7
    swag = Swag(epochs=6, max_num_models=rank, var_clamp=clamp, scale=scale, diag_covariance=diagonal)
    with torch.random.fork_rng(devices=[]):
        drawn = swag.collect_weights(problem, weights).sample(scale, seed=11)
    random = torch.Generator().manual_seed(11)
    for name, parameter in drawn.named_parameters():
        path = np.stack([tensors[name].double().numpy().ravel() for tensors in weights])
        so_far = np.stack([path[: n + 1].mean(0) for n in range(len(path))])
        mean, variance = path.mean(0), np.maximum((path**2).mean(0) - path.mean(0) ** 2, clamp)
        wanted = np.sqrt(variance) * torch.randn(parameter.shape, generator=random).double().numpy().ravel()
        if not diagonal:
            deviations = (path - so_far)[-rank:]
            wanted += deviations.T @ torch.randn(rank, generator=random).double().numpy() / math.sqrt(rank - 1)
        wanted = mean + math.sqrt(scale) * wanted
        np.testing.assert_allclose(parameter.detach().double().numpy().ravel(), wanted, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [convnet_digits(), resnet8_digits()], ids=lambda recipe: recipe.name)
def test_draws_are_torch_uncertaintys(recipe: Recipe, uncertainty: ModuleType) -> None:
    """Driven as its users do: `update_wrapper` called after each epoch of a network's training.

    Of the very same weights: it takes variances as differences in float32, whose rounding is up to 3e-4 in a draw.
    """
    problem, epochs = small(recipe), 4
    method = Swag(lr=0.02, epochs=epochs, scale=0.3, max_num_models=3, var_clamp=1e-8)
    runs = method.fit(problem, RUNS, 2, SEED)
    path = continue_training(problem, RUNS, SEED, schedule="constant", lr=0.02, epochs_after_mode=range(1, epochs + 1))
    for at, run in enumerate(runs):
        network = problem.network()
        theirs = uncertainty.SWAG(network, 0, 1, max_num_models=3, var_clamp=1e-8, num_estimators=1)
        with torch.random.fork_rng(devices=[]):
            for epoch, weights in path.items():
                network.load_state_dict({name: t[at] for name, t in weights.items()}, strict=False)
                theirs.update_wrapper(epoch)
            for draw in range(2):
                drawn = theirs.sample(0.3, seed=derive_seed(SEED, f"swag {at} {draw}"))
                torch.optim.swa_utils.update_bn([problem.inputs], drawn)
                wanted = {name: t for name, t in drawn.state_dict().items() if "tracked" not in name}
                found = {name: t[draw] for name, t in run.states.items()}
                assert all(torch.equal(found[name], p) for name, p in drawn.named_parameters())
                near(wanted, found)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Snapshot(cycle=0), "cycle of snapshot: expected a whole number from 1; found 0."),
        (Snapshot(lr=0.0), "lr of snapshot: expected a number above 0; found 0.0."),
        (Swag(epochs=3), "max_num_models of swag: expected a whole number from 2 to epochs, 3; found 20."),
        (
            Snapshot(lr=1e9),
            "rate 1e+09 from a mode of 'small': expected finite losses; found others. Lower the rate.",
        ),
    ],
)
def test_settings_that_can_not_be(method: Snapshot | Swag, text: str) -> None:
    with pytest.raises(UsageError) as error:
        method.fit(small(convnet_digits(), epochs=1), 1, 3, SEED)
    assert str(error.value) == text


def test_a_deep_ensembles_runs_are_modes() -> None:
    problem = small(resnet8_digits(), epochs=1)
    params, buffers = problem.modes(3)
    runs = DeepEnsemble().fit(problem, 3, 1, SEED)
    for at, run in enumerate(runs):
        mode = {name: t[at] for name, t in {**params, **buffers}.items() if "tracked" not in name}
        near(mode, {name: tensor[0] for name, tensor in run.states.items()}, atol=0)
    with pytest.raises(UsageError) as error:
        DeepEnsemble().fit(problem, 3, 2, SEED)
    assert str(error.value) == "draws of a deep ensemble: expected 1: a run is a member; found 2."


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ensemble")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        train_members(TINY, out, "tiny-deep-ensemble", 4)
    return out


@pytest.mark.slow
def test_members_of_a_deep_ensemble_are_trained_members(trained: Path) -> None:
    members, said = zoo.load("tiny-deep-ensemble", source=trained), list[str]()
    rows = members.manifest
    assert rows["member"].tolist() == rows["seed"].tolist() == [1_000_000, 1_000_001, 1_000_002, 1_000_003]
    assert set(rows["method"]) == {"independent"}
    assert set(rows["recipe"]) == {"tiny"}
    assert set(rows["recipe_hash"]) == {TINY.hash}
    assert rows["test_accuracy"].notna().all()
    [wanted, *_] = train_stack(TINY, (1_000_000, 1_000_001, 1_000_002), zoo.images.load("digits", "train"))
    assert all(torch.equal(tensor, wanted.state[n]) for n, tensor in members[0].state_dict().items())
    train_members(TINY, trained, "tiny-deep-ensemble", 4, say=said.append)  # there already
    assert said == [f"tiny-deep-ensemble: 4 of these members are in {trained} already"]


def test_members_that_are_in_the_reference_are_refused(trained: Path) -> None:
    members, reference = zoo.load("tiny-deep-ensemble", source=trained), zoo.load("convnet-digits")
    check_no_shared_members(members, reference)
    with pytest.raises(UsageError) as error:
        check_no_shared_members(reference[3:5], reference)
    assert str(error.value) == (
        "members of convnet-digits: expected none that are in convnet-digits; found the same weights as 3-4 there."
    )


@pytest.mark.parametrize("kind", [Swag, Snapshot, DeepEnsemble])
def test_they_are_methods(kind: type[Swag | Snapshot | DeepEnsemble]) -> None:
    assert isinstance(kind(), Method)
    grid = kind.grid(small(convnet_digits()))
    assert len(set(grid)) == len(grid) >= 1
