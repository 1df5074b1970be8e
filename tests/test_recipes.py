"""Recipes: their checks, their hashes, and the constants written into them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from training.recipes import RECIPES, convnet_digits, resnet8_digits

SMALL = dataclasses.replace(convnet_digits(), name="small")


def test_recipes_are_what_they_are_named() -> None:
    assert {name: recipe().name for name, recipe in RECIPES.items()} == {name: name for name in RECIPES}
    assert convnet_digits().storage == "float32"
    assert resnet8_digits().storage == "float16"


def test_digits_statistics_are_those_of_the_training_split() -> None:
    pixels = images.load("digits", "train").images.numpy() / 255.0
    for recipe in RECIPES.values():
        assert recipe().preprocess.mean == (round(pixels.mean(), 4),)
        assert recipe().preprocess.std == (round(pixels.std(), 4),)


def test_hash_covers_what_decides_the_result() -> None:
    changes: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"epochs": 9},
        {"stack_width": 8},
        {"storage": "float16"},
        {"augmentation": "shift1" if SMALL.augmentation == "none" else "none"},
        {"arguments": {"channels": 1, "classes": 9}},
        {"preprocess": dataclasses.replace(SMALL.preprocess, mean=(0.5,))},
    ]
    hashes = {SMALL.hash, *(dataclasses.replace(SMALL, **change).hash for change in changes)}
    assert len(hashes) == len(changes) + 1
    assert dataclasses.replace(SMALL, save_every=7, name="other").hash == SMALL.hash
    json.dumps(SMALL.to_json())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"architecture": "vgg"},
            "architecture of recipe 'small': expected one of convnet, resnet8, resnet18, resnet20-frn-silu,"
            " optunet; found 'vgg'.",
        ),
        (
            {"dataset": "mnits"},
            "dataset of recipe 'small': expected one of digits, photos, mnist, fashion-mnist, cifar10, cifar100,"
            " tiny-imagenet, svhn; found 'mnits'.",
        ),
        ({"optimizer": "adam"}, "optimizer of recipe 'small': expected one of sgd; found 'adam'."),
        ({"epochs": 0}, "epochs of recipe 'small': expected a whole number of at least 1; found 0."),
        (
            {"stack_width": 2.0},
            "stack_width of recipe 'small': expected a whole number of at least 1; found 2.0.",
        ),
        ({"lr": -0.1}, "lr of recipe 'small': expected a float in [0, inf); found -0.1."),
        ({"lr": float("nan")}, "lr of recipe 'small': expected a float in [0, inf); found nan."),
        ({"momentum": 1.0}, "momentum of recipe 'small': expected a float in [0, 1); found 1.0."),
        (
            {"momentum": 0.0, "nesterov": True},
            "nesterov of recipe 'small': expected a momentum above 0 to go with it; found True.",
        ),
    ],
)
def test_recipes_check_themselves(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        dataclasses.replace(SMALL, **change)
    assert str(error.value) == text
