"""What ships in the package: two collections, really trained, as large and as good as they are said to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.training.packing import layout_of
from checkpoints_zoo.training.recipes import RECIPES

ROOT = Path(zoo.__file__).parent / "embedded"
COLLECTIONS = {"convnet-digits": (64, 0.965, torch.float32), "resnet8-digits": (16, 0.975, torch.float16)}


def test_it_is_small_and_complete() -> None:
    paths = [p for p in ROOT.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in paths) < 3_000_000
    named = {f"shards/{n}/{p.name}" for n in COLLECTIONS for p in (ROOT / "shards" / n).iterdir()}
    assert named == {path for n in COLLECTIONS for path in zoo.load(n).rows.column("path").to_pylist()}
    assert len(paths) == len(named) + 2 * len(COLLECTIONS)


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
    members = zoo.load(name)
    inputs = members.preprocess(zoo.images.load("digits").images).to(dtype)
    with torch.no_grad():
        looped = torch.stack([m.model(dtype=dtype)(inputs) for m in members])
        stacked = members.ensemble(dtype=dtype)(inputs)
    assert float((stacked - looped).abs().max()) <= tolerance * float(looped.abs().max())
