"""Recipes with images of one's own: what is checked, what counts in the hash, other processes, what a source says."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.training import sent_recipes
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.population import StackTrainer
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import RECIPES, convnet_digits

CLASSES = ["red", "green", "blue"]
Pair = tuple[ImageData, ImageData]


def some(count: int, seed: int, size: int = 4, classes: list[str] | None = CLASSES) -> ImageData:
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=drawn)
    pixels = torch.randint(0, 120, (count, 3, size, size), generator=drawn)
    pixels[torch.arange(count), labels] += 80
    return zoo.images.of((pixels.to(torch.uint8), labels), classes=classes, name="whatever", split="other")


def pictures() -> Pair:
    return some(60, 0), some(30, 1)


def one_pixel_else() -> Pair:
    train, test = pictures()
    train.images[0, 0, 0, 0] += 1
    return train, test


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 3))


MINE = Recipe(
    name="mine", architecture="net", build=net, arguments={}, images=pictures, dataset="colours", split_rule="drawn",
    preprocess=zoo.images.Preprocess((4, 4), 3, (0.3,) * 3, (0.2,) * 3), epochs=2, batch_size=20, lr=0.05, momentum=0.9,
    weight_decay=1e-4, stack_width=2, save_every=1, eval_every=1,
)  # fmt: skip


def test_splits_are_called_as_the_recipe_calls_them() -> None:
    train, test = MINE.split("train"), MINE.split("test")
    assert [(d.name, d.split, len(d)) for d in (train, test)] == [("colours", "train", 60), ("colours", "test", 30)]
    assert MINE.split("train") is train
    assert train.fingerprint == pictures()[0].fingerprint
    assert convnet_digits().split("test").fingerprint == zoo.images.load("digits").fingerprint


def test_the_hash_is_of_the_pixels() -> None:
    assert dataclasses.replace(MINE, images=lambda: pictures()).hash == MINE.hash
    assert dataclasses.replace(MINE, images=one_pixel_else).hash != MINE.hash
    assert MINE.to_json()["images"] == {"train": pictures()[0].fingerprint, "test": pictures()[1].fingerprint}
    assert all("images" not in make().to_json() for make in RECIPES.values())


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no pair": (
        lambda: some(3, 0),
        "images of recipe 'mine': expected a function that returns (train, test), each as `zoo.images.of(…)` gives it;"
        " found ImageData(",
    ),
    "no labels": (
        lambda: (some(3, 0), dataclasses.replace(some(3, 0), labels=None, classes=())),
        "images of recipe 'mine', test: expected labels and the names of their classes; found no labels. Give them to"
        " `zoo.images.of((images, labels), classes=[…])`.",
    ),
    "no names": (
        lambda: (some(3, 0, classes=None), some(3, 0)),
        "images of recipe 'mine', train: expected labels and the names of their classes; "
        "found labels without class names.",
    ),
    "another size": (
        lambda: (some(3, 0), some(3, 0, size=5)),
        "images of recipe 'mine', test: expected shape (input, 3, 4, 4), as the recipe's preprocess has it; found shape"
        " (3, 3, 5, 5). `zoo.images.of(…, size=(4, 4), channels=3)` makes them fit.",
    ),
    "another order": (
        lambda: (some(3, 0), some(3, 0, classes=CLASSES[::-1])),
        "images of recipe 'mine', test: expected the classes of train, in their order: red, green, blue; found blue,"
        " green, red. `zoo.images.in_order(test, train.classes)` puts them in order.",
    ),
    "inputs, not pixels": (
        lambda: (some(3, 0), zoo.images.prepared((torch.zeros(3, 3, 4, 4), torch.tensor([0, 1, 2])), classes=CLASSES)),
        "images of recipe 'mine': expected a function that returns (train, test)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_images_that_do_not_fit(case: str) -> None:
    images, text = WRONG[case]
    with pytest.raises(UsageError) as error:
        dataclasses.replace(MINE, images=images).split("train")
    assert str(error.value).startswith(text)


@pytest.mark.parametrize("dataset", ["digits", "Colours", "a/b", ""])
def test_names_that_images_of_ones_own_cannot_have(dataset: str) -> None:
    with pytest.raises(UsageError, match=r"^dataset of recipe 'mine': expected a lower-case name for your own"):
        dataclasses.replace(MINE, dataset=dataset)
    with pytest.raises(UsageError, match=r"^dataset of recipe 'mine': expected one of digits, "):
        dataclasses.replace(MINE, images=None)


def test_other_processes_find_them() -> None:
    there = pickle.loads(pickle.dumps(StackTrainer(MINE, None))).recipe  # noqa: S301 (its own)
    assert (there.images, there.build, there.hash) == (pictures, net, MINE.hash)
    with pytest.raises(UsageError, match=r"^images of recipe 'mine': expected a function or class at the top of a"):
        sent_recipes.serialize_recipe(dataclasses.replace(MINE, images=lambda: pictures()))
    changed = dataclasses.replace(sent_recipes.serialize_recipe(MINE), hash="0" * 16)
    with pytest.raises(UsageError, match=r"Put the same file .*, and the images that it gives, onto every node\.$"):
        sent_recipes.rebuild_recipe(changed)


def test_a_source_names_them(tmp_path: Path) -> None:
    seen: list[Any] = []
    assert train_into(MINE, [0, 1], tmp_path, progress=seen.append) == 2
    assert all(progress.accuracy is not None for progress in seen)
    members = zoo.load("mine", source=tmp_path, architecture=net)
    assert (members.description.dataset, members.classes) == ("colours", ("red", "green", "blue"))
    rows, (train, test) = members.rows.to_pylist(), pictures()
    assert {(row["eval_data"], row["data_fingerprint"]) for row in rows} == {("colours/test", train.fingerprint)}
    inputs = (test.images.float() / 255 - 0.3) / 0.2
    for member, row in zip(members, rows, strict=True):
        with torch.no_grad():
            assert int((member.model()(inputs).argmax(1) == test.labels).sum()) == round(row["test_accuracy"] * 30)
    report = zoo.evaluate(members, test, sizes=[1])
    assert report.member["accuracy"].value == pytest.approx(sum(row["test_accuracy"] for row in rows) / 2, abs=1e-6)
    for asked in (lambda: zoo.evaluate(members), lambda: zoo.pairwise(members)):
        with pytest.raises(UsageError) as error:
            asked()
        assert str(error.value) == (
            "images of mine, test: expected a data set that the package reads by name"
            f" ({', '.join(zoo.images.DATASETS)}); found 'colours': images of the collection's producer."
            " Give these images as an argument:"
            " `zoo.images.of(…)` reads a folder, a file or tensors."
        )
    with pytest.raises(UsageError, match=r"found hash .*: the recipe has changed|found members of"):
        train_into(dataclasses.replace(MINE, images=one_pixel_else), [2], tmp_path)
