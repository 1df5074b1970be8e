"""Recipes: their checks, their hashes, and the constants written into them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.images import CLASSES
from checkpoints_zoo.images.data_sets import HUB_SETS
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training.learning_rates import learning_rate
from checkpoints_zoo.training.packing import layout_of
from checkpoints_zoo.training.recipes import RECIPES, convnet_digits, recipe_by_name, resnet8_digits

SMALL = dataclasses.replace(convnet_digits(), name="small")
DIGITS = [name for name in RECIPES if RECIPES[name]().dataset == "digits"]
ON_HUB = [name for name in RECIPES if name not in DIGITS]


def test_hashes_of_recipes_on_digits_stay() -> None:
    # Written down when the collections in the package, and the first draws of mlp-digits, were made.
    assert {name: RECIPES[name]().hash for name in DIGITS} == {
        "convnet-digits": "ae606040d89c27c9", "resnet8-digits": "7a0a70396032c29b",
        "mlp-digits": "898eb72f9912d570", "convnet-digits-varied": "13b870a5f7d27b81",
        "vit-digits": "7eae11d079f6989d",
    }  # fmt: skip


def test_the_collections_of_the_catalog_have_recipes() -> None:
    """Each with the architecture, data, preprocessing and number of members that the catalog knows."""
    for name, listing in catalog.collections().items():
        if "hmc" in name:  # draws of a sampler
            continue
        if listing.architecture.startswith("transformers/"):  # language models in model repos
            continue
        recipe = recipe_by_name(name)
        assert (recipe.title, recipe.architecture, recipe.dataset) == (
            listing.title, listing.architecture, listing.dataset,
        )  # fmt: skip
        wanted = 1024 if name == "resnet20-frn-silu-cifar10" else listing.members
        assert recipe.members == wanted
        if listing.archives is not None:
            assert recipe.preprocess.to_json() == listing.archives.preprocessing
            assert CLASSES[recipe.dataset] == listing.archives.classes


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_HUB)
def test_recipes_fit_their_data(name: str) -> None:
    recipe, there = RECIPES[name](), HUB_SETS[RECIPES[name]().dataset]
    assert recipe.preprocess.size == there.size
    assert recipe.preprocess.channels == recipe.arguments["channels"] == there.channels
    assert recipe.arguments["classes"] == len(there.classes)
    state = build_architecture(recipe.architecture, **recipe.arguments).state_dict()
    assert layout_of(recipe) == modules.layout_of(state, layout_of_dtype(recipe.storage))


def layout_of_dtype(storage: str) -> torch.dtype:
    return {"float16": torch.float16, "float32": torch.float32}[storage]


def test_numbers_of_the_published_collections_nearest_recipes() -> None:
    """From torch-uncertainty's procedures at 195924a3, its tiny-imagenet experiment, and optuMNIST."""
    numbers = {
        n: (r.lr, r.momentum, r.nesterov, r.weight_decay, r.batch_size, r.epochs, r.milestones, r.gamma)
        for n, r in ((n, RECIPES[n]()) for n in ON_HUB)
        if n != "resnet20-frn-silu-cifar10"
    }
    assert numbers == {
        "resnet18-cifar10": (0.05, 0.9, False, 5e-4, 128, 75, (25, 50), 0.1),
        "resnet18-cifar100": (0.1, 0.9, True, 5e-4, 128, 75, (25, 50), 0.1),
        "resnet18-tiny-imagenet": (0.2, 0.9, False, 1e-4, 256, 200, (), 0.1),
        "optunet-mnist": (0.04, 0.0, False, 2e-4, 64, 60, (15, 30), 0.5),
    }
    tiny = RECIPES["resnet18-tiny-imagenet"]()
    assert learning_rate(tiny, 100 * 390, 200 * 390) == pytest.approx(0.1)


def test_a_name_that_is_none_names_the_nearest() -> None:
    assert recipe_by_name("resnet18-tinyimagenet") == RECIPES["resnet18-tiny-imagenet"]()
    with pytest.raises(UsageError) as error:
        recipe_by_name("resnet18-cifar")
    assert str(error.value) == (
        f"recipe 'resnet18-cifar': expected one of {', '.join(RECIPES)}, or a Python file; found no such name."
        " Did you mean resnet18-cifar10?"
    )


def test_recipes_are_what_they_are_named() -> None:
    assert {name: recipe().name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}
    assert convnet_digits().storage == "float32"
    assert resnet8_digits().storage == "float16"


def test_digits_statistics_are_those_of_the_training_split() -> None:
    pixels = images.load("digits", "train").images.numpy() / 255.0
    for name in DIGITS:
        assert RECIPES[name]().preprocess.mean == (round(pixels.mean(), 4),)
        assert RECIPES[name]().preprocess.std == (round(pixels.std(), 4),)


def test_hash_covers_what_decides_the_result() -> None:
    changes: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"epochs": 9},
        {"stack_width": 8},
        {"storage": "float16"},
        {"augmentation": "shift1" if SMALL.augmentation == "none" else "none"},
        {"arguments": {"channels": 1, "classes": 9}},
        {"preprocess": dataclasses.replace(SMALL.preprocess, mean=(0.5,))},
        {"schedule": "multistep", "milestones": (3,)},
        {"schedule": "multistep", "milestones": (3,), "gamma": 0.2},
        {"schedule": "multistep", "milestones": (3, 4)},
        {"schedule": "cosine-restarts", "milestones": (3,)},
        {"schedule_unit": "epoch"},
        {"warmup_epochs": 1},
        {"label_smoothing": 0.1},
        {"precision": "bfloat16"},
        {"channels_last": True, "stack_width": 1},
        {"compile": True},
        {"averaging": "ema"},
        {"averaging": "ema", "averaging_decay": 0.9},
        {"averaging": "swa", "averaging_start": 3},
        {"snapshots": (0,)},
    ]
    hashes = {SMALL.hash, *(dataclasses.replace(SMALL, **change).hash for change in changes)}
    assert len(hashes) == len(changes) + 1
    undecided: dict[str, Any] = {"save_every": 7, "name": "other", "members": 9, "eval_every": 2, "made_from": "small"}
    assert dataclasses.replace(SMALL, **undecided).hash == SMALL.hash
    for change in changes:
        json.dumps(dataclasses.replace(SMALL, **change).to_json())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"architecture": "vgg"},
            f"architecture of recipe 'small': expected one of {', '.join(ARCHITECTURES)}; found 'vgg'.",
        ),
        (
            {"dataset": "mnits"},
            "dataset of recipe 'small': expected one of digits, photos, mnist, fashion-mnist, cifar10, cifar100,"
            " tiny-imagenet, svhn; found 'mnits'.",
        ),
        ({"optimizer": "lion"}, "optimizer of recipe 'small': expected one of sgd, adam, adamw; found 'lion'."),
        ({"epochs": 0}, "epochs of recipe 'small': expected a whole number from 1 to 1,000,000; found 0."),
        (
            {"stack_width": 2.0},
            "stack_width of recipe 'small': expected a whole number from 1 to 4,096; found 2.0.",
        ),
        ({"lr": -0.1}, "lr of recipe 'small': expected a float in [0, inf); found -0.1."),
        ({"lr": float("nan")}, "lr of recipe 'small': expected a float in [0, inf); found nan."),
        ({"momentum": 1.0}, "momentum of recipe 'small': expected a float in [0, 1); found 1.0."),
        (
            {"momentum": 0.0, "nesterov": True},
            "nesterov of recipe 'small': expected a momentum above 0 to go with it; found True.",
        ),
        ({"nesterov": 1}, "nesterov of recipe 'small': expected one of False, True; found 1."),
        (
            {"milestones": (3,)},
            "milestones of recipe 'small': expected epochs with cosine-restarts and multistep alone; found (3,).",
        ),
        (
            {"schedule": "multistep"},
            "milestones of recipe 'small': expected epochs with cosine-restarts and multistep alone; found ().",
        ),
        (
            {"schedule": "multistep", "milestones": (5, 5)},
            "milestones of recipe 'small': expected epochs from 1, in order; found (5, 5).",
        ),
        (
            {"snapshots": (40,)},
            "snapshots of recipe 'small': expected epochs from 0, in order and below the last, 40; found (40,).",
        ),
        (
            {"averaging": "swa", "averaging_start": 40},
            "averaging_start of recipe 'small': expected less than the 40 epochs of the recipe; found 40.",
        ),
        (
            {"channels_last": True},
            "channels_last of recipe 'small': expected a stack_width of 1 to go with it; found True.",
        ),
        (
            {"schedule": "one-cycle", "warmup_epochs": 1},
            "warmup_epochs of recipe 'small': expected 0: the schedule one-cycle has a warm-up; found 1.",
        ),
        (
            {"precision": "float64"},
            "precision of recipe 'small': expected one of float32, bfloat16, float16; found 'float64'.",
        ),
    ],
)
def test_recipes_check_themselves(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        dataclasses.replace(SMALL, **change)
    assert str(error.value) == text
