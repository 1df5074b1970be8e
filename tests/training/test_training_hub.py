"""The recipes of large networks, trained for a few steps on small sets of the true schema from the loopback Hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.formats.layout import is_statistic
from checkpoints_zoo.training import population
from checkpoints_zoo.training.population import TrainedMember, train_stack
from checkpoints_zoo.training.recipe_files import vary_recipe
from checkpoints_zoo.training.recipes import recipe_by_name
from tests.hub import Hub
from tests.support.image_sets import forgotten, published_images  # noqa: F401 (a fixture)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch_size", "changes"),
    [
        ("resnet20-frn-silu-cifar10", 6, ["stack_width=2"]),
        ("resnet18-cifar10", 2, ["precision=float32"]),  # many processors emulate bfloat16
        ("optunet-mnist", 6, ["stack_width=2"]),
    ],
)
def test_two_members_from_the_hub_to_modules(
    hub: Hub, name: str, batch_size: int, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command trains and exports two members; loaded back, they give the logits of the trained weights, rounded
    to what is stored, to the last bit."""
    changes = ["epochs=1", f"batch_size={batch_size}", *changes]
    recipe = vary_recipe(recipe_by_name(name), changes)
    made = published_images(hub, recipe.dataset, inputs=2 * batch_size)  # an epoch of two steps
    kept: list[TrainedMember] = []

    def keeping(*arguments: Any, **options: Any) -> list[TrainedMember]:
        kept.extend(found := train_stack(*arguments, **options))
        return found

    monkeypatch.setattr(population, "train_stack", keeping)
    command = ["train", name, "--members", "0-1", "--out", str(tmp_path), *(a for c in changes for a in ("--set", c))]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    members = zoo.load(name, source=tmp_path)
    assert members.ids == [0, 1]
    for row in members.rows.to_pylist():
        assert row["recipe"] == f"{name} {' '.join(sorted(changes))}"
        assert (row["recipe_hash"], row["epochs"], row["batch_size"]) == (recipe.hash, 1, batch_size)
        assert row["data_fingerprint"] == made["train"].fingerprint == images.load(recipe.dataset, "train").fingerprint
        assert row["eval_data"] == f"{recipe.dataset}/test"
    inputs = members.preprocess(made["test"].images)
    labels = made["test"].labels
    assert labels is not None
    assert [trained.member for trained in kept] == [0, 1]
    for trained in kept:
        assert (trained.status, trained.reason) == ("ok", "")
        stored = {
            n: t if is_statistic(n) or recipe.storage == "float32" else t.half().float()
            for n, t in trained.state.items()
        }
        module = recipe.skeleton()
        started = {n: t.clone() for n, t in module.state_dict().items()}
        module.load_state_dict({**started, **stored})
        loaded = members.member(trained.member)
        with torch.no_grad():
            logits = module.eval()(inputs)
            assert torch.equal(loaded.model()(inputs), logits)
        assert logits.isfinite().all()
        right = float((logits.argmax(1) == labels).double().mean())
        assert loaded.row["test_accuracy"] == pytest.approx(right, abs=1e-9)
        assert all(
            not torch.equal(started[n], stored[n]) for n in stored if n.endswith("weight") and stored[n].ndim > 1
        )


@pytest.mark.slow
def test_a_set_without_a_whole_batch_is_refused(hub: Hub, tmp_path: Path) -> None:
    published_images(hub, "cifar10", inputs=10)
    done = CliRunner().invoke(main, ["train", "resnet18-cifar10", "--members", "0", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "data set 'cifar10': expected labels, and at least 128 inputs; found 10 inputs with labels." in done.stderr


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny-imagenet", "mnist", "svhn"])
def test_a_small_network_trains_on_every_set(hub: Hub, name: str) -> None:
    made = published_images(hub, name, inputs=24)["train"]
    channels, height, width = made.images.shape[1:]
    recipe = dataclasses.replace(
        recipe_by_name("resnet20-frn-silu-cifar10"),
        name="small", architecture="resnet8", dataset=name, epochs=1, batch_size=12,
        arguments={"widths": (2, 2, 2), "channels": channels, "classes": len(made.classes)},
        preprocess=images.Preprocess((height, width), channels, (0.5,) * channels, (0.25,) * channels),
    )  # fmt: skip
    for member in train_stack(dataclasses.replace(recipe, stack_width=2), (0, 1), images.load(name, "train")):
        assert member.status == "ok"
        assert member.train_loss > 0
