"""What ships in the package: the trained collections, as large and as good as they are said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.training.loop import initial_state, measure_accuracies, train_epochs
from checkpoints_zoo.training.packing import layout_of
from checkpoints_zoo.training.recipes import RECIPES
from checkpoints_zoo.training.retrain import retrain

ROOT = Path(zoo.__file__).parent / "embedded"
DRAWS = "mlp-digits-hmc"  # tests/docs/test_hmc_page.py
COLLECTIONS = {
    "convnet-digits": (64, 0.965, torch.float32),
    "convnet-digits-varied": (60, 0.8, torch.float16),
    "resnet8-digits": (16, 0.975, torch.float16),
    "vit-digits": (32, 0.955, torch.float16),
}


def test_it_is_small_and_complete() -> None:
    paths = [p for p in ROOT.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in paths) < 6_000_000
    names = [*COLLECTIONS, DRAWS]
    named = {f"shards/{n}/{p.name}" for n in names for p in (ROOT / "shards" / n).iterdir()}
    assert named == {path for n in names for path in zoo.load(n).rows.column("path").to_pylist()}
    assert len(paths) == len(named) + 2 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIONS)
def test_members_are_as_good_as_claimed(name: str) -> None:
    count, least, _ = COLLECTIONS[name]
    members = zoo.load(name)
    assert members.ids == list(range(count))
    assert zoo.verify(members, sample=count) == []
    digits = zoo.images.load("digits")
    assert len(digits) >= 500
    accuracies = np.array(members.rows.column("test_accuracy").to_pylist())
    assert accuracies.mean() >= least
    # Counted again, by a plain loop over modules.
    inputs = members.preprocess(digits.images)
    with torch.no_grad():
        right = [float((m.model()(inputs).argmax(-1) == digits.labels).double().mean()) for m in members]
    assert right == pytest.approx(list(accuracies), abs=2 / len(digits) + 1e-9)


@pytest.mark.parametrize("name", COLLECTIONS)
def test_rows_belong_to_the_recipe(name: str) -> None:
    recipe, members = RECIPES[name](), zoo.load(name)
    rows = members.rows.to_pylist()
    assert {r["recipe_hash"] for r in rows} == {recipe.hash}
    assert {r["data_fingerprint"] for r in rows} == {zoo.images.load("digits", "train").fingerprint}
    assert len({r["sha256"] for r in rows}) == len({r["run_id"] for r in rows}) == len(rows)
    assert members.description.layouts == {recipe.storage: layout_of(recipe)}
    listing = catalog.find_listing(name)
    assert (listing.members, listing.bytes) == (len(rows), members.nbytes)
    for fact in ("title", "architecture", "dataset", "licence"):
        assert getattr(listing, fact) == getattr(members.description, fact), fact


@pytest.mark.parametrize("name", COLLECTIONS)
def test_weights_and_statistics_have_their_dtypes(name: str) -> None:
    for tensor, stacked in zoo.load(name).stack().items():
        assert stacked.dtype == (torch.float32 if "running" in tensor else COLLECTIONS[name][2]), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ensemble_equals_a_loop_over_models(name: str, dtype: torch.dtype, tolerance: float) -> None:
    members = zoo.load(name, n=12)
    inputs = members.preprocess(zoo.images.load("digits").images[:200]).to(dtype)
    with torch.no_grad():
        looped = torch.stack([m.model(dtype=dtype)(inputs) for m in members])
        stacked = members.ensemble(dtype=dtype)(inputs)
    assert float((stacked - looped).abs().max()) <= tolerance * float(looped.abs().max())


def test_varied_members_have_settings_of_their_own() -> None:
    recipe = RECIPES["convnet-digits-varied"]()
    members = zoo.load("convnet-digits-varied", snapshots=True)
    rows = members.rows.to_pylist()
    assert [(row["member"], row["epoch"]) for row in rows] == [(m, e) for m in range(60) for e in (1, 4, 12, 40)]
    for row in rows:
        assert {field: row[field] for field in recipe.varied} == {
            field: getattr(recipe.of_member(row["member"]), field) for field in recipe.varied
        }
    accuracies = [row["test_accuracy"] for row in rows if row["final"]]
    assert min(accuracies) < 0.6
    assert max(accuracies) > 0.97
    root = ROOT / "shards" / "convnet-digits-varied"
    paths = [*root.iterdir(), *(ROOT / "manifests").glob("convnet-digits-varied.*")]
    assert sum(path.stat().st_size for path in paths) < 2_000_000


def test_vision_transformers_are_small() -> None:
    paths = [*(ROOT / "shards" / "vit-digits").iterdir(), *(ROOT / "manifests").glob("vit-digits.*")]
    assert sum(path.stat().st_size for path in paths) < 1_500_000


@pytest.mark.slow
def test_members_are_trained_again() -> None:
    """Bit for bit where they were trained, on one thread; by accuracy elsewhere."""
    results = retrain(zoo.load("convnet-digits-varied"), 2)
    assert [(result.member, result.same) for result in results] == [(0, True), (30, True)]


@pytest.mark.slow
def test_a_vision_transformer_begins_as_the_one_that_ships() -> None:
    """Loss and accuracy after the first epochs, written down in a training that ended with the bytes of member 0."""
    recipe = RECIPES["vit-digits"]()
    state, train, test = initial_state(recipe, [0]), recipe.split("train"), recipe.split("test")
    epochs = train_epochs(recipe, [0], state, train)
    for loss, accuracy in ((2.342251, 69), (2.134803, 151), (1.738541, 277)):
        next(epochs)
        assert float(state.loss) == pytest.approx(loss, abs=1e-4)
        assert float(measure_accuracies(recipe, state, train, test)) * len(test) == pytest.approx(accuracy, abs=2.01)
