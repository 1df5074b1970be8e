"""Files that version 0.1 wrote load, verify and are gone on with.

Version 0.1 of this package (commit 47a0031) wrote the folder `files_of_0_1`:

manifests, shards   two members `tiny` of mlp-digits with four hidden units, after two epochs
predictions         their logits of the first eight test images
.training           the state of a training `cut` of 40 epochs that was killed in epoch 31
aligned.parquet     `members.align(to=0).write_symmetries(…)`
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.fitting import METHODS
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.population import Progress
from checkpoints_zoo.training.recipe_files import vary_recipe
from checkpoints_zoo.training.recipes import recipe_by_name
from checkpoints_zoo.training.retrain import retrain

WRITTEN = Path(__file__).parent / "files_of_0_1"
HASHES = [
    "80b2720cf4167cb2789534913033317caf0e94beef44a41a1d6980b46a324c1b",
    "ddaa465dbc9de21d253aae4fe824b8fcb1ec593d3eaf86aad1cbceb1ad4fff07",
]
# Settings enter the keys of stored fits, so a renamed field would fit every method again.
SETTINGS = {
    "dropout": "rate",
    "vi": "batch_size init_log_sd lr samples start steps temperature",
    "swag": "diag_covariance epochs lr max_num_models scale var_clamp",
    "laplace": "prior temperature",
    "laplace-last-layer": "prior temperature",
    "sgld": "batch_size burn_in lr temperature thinning",
    "sghmc": "batch_size burn_in friction lr temperature thinning",
    "csghmc": "batch_size cycles exploring friction lr steps temperature",
    "hmc": "steps target temperature warmup",
    "snapshot": "cycle lr",
    "deep-ensemble": "",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy the folder, since training writes into it."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "source"))


def test_a_source_loads_verifies_and_evaluates_to_the_same_figures(source: Path) -> None:
    members = zoo.load("tiny", source=source)
    assert members.rows.column("sha256").to_pylist() == HASHES
    assert zoo.load(members.citation).ids == [0, 1]
    assert zoo.verify(members, sample=2) == []
    report = zoo.evaluate(members, "digits", ood=None)
    # What 0.1 measured.
    assert report["accuracy"].value == pytest.approx(0.835185170173645, abs=1 / 540 + 1e-9)
    assert report["nll"].value == pytest.approx(0.7965764981729013, rel=1e-5)
    assert report["brier"].value == pytest.approx(0.35633382201194763, rel=1e-5)


def test_stored_predictions_are_those_of_the_members(source: Path) -> None:
    members, digits = zoo.load("tiny", source=source), zoo.images.load("digits")
    logits = members.ensemble()(members.preprocess(digits.images[:8]))
    assert torch.allclose(members.predictions("eight").logits([0, 1]).float(), logits, rtol=2**-10, atol=1e-4)


def test_stored_permutations_are_applied(source: Path) -> None:
    members = zoo.load("tiny", source=source)
    order = pq.read_table(source / "aligned.parquet").column("permutation fc1").to_pylist()
    moved, weights = members.transform(source / "aligned.parquet").stack(), members.stack()
    for i in range(2):
        assert torch.equal(moved["fc1.weight"][i], weights["fc1.weight"][i][order[i]])
        assert torch.equal(moved["fc2.weight"][i], weights["fc2.weight"][i][:, order[i]])


@pytest.mark.slow
def test_members_are_trained_again(source: Path) -> None:
    assert [result.same for result in retrain(zoo.load("tiny", source=source), 2)] == [True, True]


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on(source: Path) -> None:
    changes = ["arguments.widths=[2]", "lr=0.02", "stack_width=2", "storage=float16"]
    recipe = dataclasses.replace(vary_recipe(recipe_by_name("mlp-digits"), changes), name="cut")
    assert recipe.hash == json.loads((source / ".training" / "cut" / "recipe.json").read_text())["hash"]
    epochs: list[Progress] = []
    assert train_into(recipe, [0, 1], source, progress=epochs.append) == 2
    assert [(p.members, p.epoch) for p in epochs] == [((0, 1), epoch) for epoch in range(31, 41)]
    accuracies = zoo.load("cut", source=source).rows.column("test_accuracy").to_pylist()
    assert accuracies == pytest.approx([0.6, 0.6481481481481481], abs=0.02)  # of 0.1, without a kill


def test_settings_of_methods_keep_their_names() -> None:
    names = {name: " ".join(sorted(f.name for f in dataclasses.fields(METHODS[name]))) for name in SETTINGS}
    assert names == SETTINGS
