"""Every method's draws are a collection like any other: loaded, canonicalized, evaluated, published; and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.comparing.draws import MethodFits
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.dropout import Dropout
from checkpoints_zoo.methods.fitting import CHOSEN_SETTINGS, METHODS, method_by_name
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.laplace import Laplace, LaplaceLastLayer
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.training.recipes import convnet_digits
from tests.hub import Hub
from tests.support.publications import ADDRESS, publish, quick

# Two short epochs: what is looked at here is how draws are stored, not how good they are.
RECIPE = dataclasses.replace(convnet_digits(), name="brief-digits", epochs=2, batch_size=250, stack_width=2)
RUNS, DRAWS = 2, 3
BRIEF: dict[str, Method] = {
    "dropout": Dropout(rate=0.1),
    "vi": MeanField(steps=5),
    "swag": Swag(epochs=4, max_num_models=3),
    "laplace": Laplace(temperature=0.01),
    "laplace-last-layer": LaplaceLastLayer(),
    "sgld": Sgld(burn_in=2, thinning=1),
    "sghmc": Sghmc(burn_in=2, thinning=1),
    "csghmc": CyclicalSghmc(cycles=1, steps=10),
    "hmc": Hmc(steps=1, warmup=2),
    "snapshot": Snapshot(),
    "deep-ensemble": DeepEnsemble(),
}
ORACLES = {
    "swag": "torch_uncertainty",
    "laplace": "laplace",
    "laplace-last-layer": "laplace",
    **dict.fromkeys(("vi", "sgld", "sghmc", "csghmc"), "posteriors"),
}


def fitted(name: str, out: Path) -> zoo.Collection:
    return fitting.fit(BRIEF[name], RECIPE, out=out, runs=RUNS, draws=DRAWS)


def test_all_methods_are_here() -> None:
    assert BRIEF.keys() == METHODS.keys()
    for name, kind in METHODS.items():
        assert isinstance(BRIEF[name], kind)
        assert (kind.name, isinstance(method_by_name(name, "nothing"), kind)) == (name, True)
        assert dataclasses.asdict(method_by_name(name, "nothing")) == json.loads(
            json.dumps(dataclasses.asdict(method_by_name(name, "nothing")))
        )
    for collection, methods in CHOSEN_SETTINGS.items():
        assert collection in ("convnet-digits", "resnet8-digits")
        assert all(isinstance(method, METHODS[name]) for name, method in methods.items())
    with pytest.raises(UsageError, match=r"method .swga.: expected one of dropout, vi, .*Did you mean swag"):
        method_by_name("swga", "convnet-digits")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")  # of the methods' own libraries, once imported
@pytest.mark.parametrize("name", BRIEF)
def test_draws_are_a_collection_like_any_other(
    name: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: list[float],
    oracle: Callable[[str], ModuleType],
) -> None:
    out = tmp_path / "out"
    if name in ORACLES:
        oracle(ORACLES[name])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    drawn = fitted(name, out)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = drawn.manifest
    if name == "deep-ensemble":
        assert drawn.name == "brief-digits-deep-ensemble"
        assert list(rows["seed"]) == [1_000_000, 1_000_001, 1_000_002]
        assert set(rows["method"]) == {"independent"}
        assert set(rows["recipe_hash"]) == {RECIPE.hash}
    else:
        assert drawn.name == f"brief-digits-{name}-multi"
        assert set(rows["method"]) == {name}
        assert list(rows["run"]) == [0, 0, 0, 1, 1, 1]
        assert list(rows["draw"]) == [0, 1, 2, 0, 1, 2]
        assert all(rows["data_fingerprint"] == RECIPE.split("train").fingerprint)
    assert rows["test_accuracy"].notna().all()
    assert rows["test_nll"].notna().all()

    loaded = zoo.load(drawn.name, source=out)
    assert (loaded.description.dataset, loaded.description.architecture) == ("digits", "convnet")
    weights = torch.cat([t.flatten(1) for t in loaded.stack().values()], 1)
    assert weights.isfinite().all()
    assert len(weights.unique(dim=0)) >= 2
    canonical = loaded.canonicalize(scale="unit-norm", permute="first")
    inputs = loaded.preprocess(zoo.images.load("digits").images[:20])
    torch.testing.assert_close(canonical.ensemble()(inputs), loaded.ensemble()(inputs), rtol=1e-3, atol=1e-3)
    report = zoo.evaluate(loaded, "digits", ood="photos", sizes=[1], subsets=2)
    assert report["accuracy"].value > 0
    assert zoo.verify(loaded) == []

    again = fitted(name, out)
    assert again.citation == drawn.citation
    known = fitting.read_fit_record(out, drawn.name)
    assert known is not None
    assert (known.method, known.runs, known.draws) == (name, RUNS, DRAWS)
    assert known.settings == dataclasses.asdict(BRIEF[name])

    quick(monkeypatch, waits)
    assert publish(out).repo == ADDRESS
    there = zoo.load(drawn.name, source=ADDRESS)
    assert all(torch.equal(there.stack()[n], t) for n, t in drawn.stack().items())
    for column in ("method", "run", "draw", "sha256"):
        assert there.manifest[column].equals(rows[column])


@pytest.mark.slow
def test_other_draws_under_the_name_are_left(tmp_path: Path) -> None:
    drawn = fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)
    assert drawn.name == "brief-digits-snapshot"
    with pytest.raises(UsageError) as error:
        fitting.fit(Snapshot(lr=0.01), RECIPE, out=tmp_path, runs=1, draws=2)
    assert str(error.value) == (
        f"collection brief-digits-snapshot in folder {tmp_path}: expected none, or draws of snapshot with settings"
        ' {"lr": 0.01, "cycle": 1}; found settings {"lr": 0.05, "cycle": 1}. Give another folder, or delete'
        " manifests/brief-digits-snapshot.parquet there."
    )
    assert zoo.load(drawn.name, source=tmp_path).citation == drawn.citation

    # A kill after the manifest leaves draws without a word on them: they are made again, and are the same.
    (tmp_path / "fits" / f"{drawn.name}.json").unlink()
    with pytest.raises(UsageError, match="expected no members, or the first of these draws; found another draw"):
        fitting.fit(Snapshot(lr=0.01), RECIPE, out=tmp_path, runs=1, draws=2)
    assert fitting.read_fit_record(tmp_path, drawn.name) is None
    assert fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2).citation == drawn.citation
    known = fitting.read_fit_record(tmp_path, drawn.name)
    assert known is not None
    assert known.settings == dataclasses.asdict(Snapshot())
    cases = (
        ({"runs": 0}, "runs: expected a whole number from 1; found 0"),
        ({"draws": 1}, "draws: expected a whole number from 2"),
    )
    for change, text in cases:
        with pytest.raises(UsageError, match=text):
            fitting.fit(Snapshot(), RECIPE, out=tmp_path, **change)


def test_a_gpu_enters_the_key_and_a_processor_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of fits on processors are those of package version 0.1."""
    facts = ["snapshot", {"lr": 0.05, "cycle": 1}, "recipe", "images", 1, 2, 0]
    arguments = ("snapshot", {"cycle": 1, "lr": 0.05}, "recipe", "images", 1, 2, 0, 1)
    for name, more in (("", []), ("Some GPU", ["Some GPU"])):
        key = hashlib.sha256(json.dumps(facts + more, sort_keys=True).encode()).hexdigest()[:16]
        assert fitting.fit_key(*arguments, name) == key
    problem = Problem.of(RECIPE)
    values = [RECIPE.hash, problem.images.fingerprint, 2, torch.__version__]
    assert problem._modes_key(2) == hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]

    fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)
    processor_key, processor_folder = problem._modes_key(2), MethodFits(RECIPE, tmp_path, 1, 2, 0).folder(Snapshot())
    for module in ("fitting", "problem", "comparing.draws"):
        monkeypatch.setattr(f"checkpoints_zoo.methods.{module}.gpu_name", lambda device: "Some GPU")
    assert problem._modes_key(2) != processor_key
    assert MethodFits(RECIPE, tmp_path, 1, 2, 0).folder(Snapshot()) != processor_folder
    with pytest.raises(UsageError, match=r'"cycle": 1\} on Some GPU; found settings \{"lr": 0.05, "cycle": 1\}\. Give'):
        fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)


def test_a_method_of_a_new_version_is_fitted_again(tmp_path: Path) -> None:
    """Issue 16, left over: a version enters the key from 2 on; keys of version 1 are those of package version 0.1."""
    facts = ["snapshot", {"lr": 0.05, "cycle": 1}, "recipe", "images", 1, 2, 0]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    arguments = ("snapshot", {"cycle": 1, "lr": 0.05}, "recipe", "images", 1, 2, 0)
    assert fitting.fit_key(*arguments, version=1) == key
    assert len({fitting.fit_key(*arguments, version=version) for version in (1, 2, 3)}) == 3

    fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)
    record = tmp_path / "fits" / "brief-digits-snapshot.json"
    old = {name: value for name, value in json.loads(record.read_text()).items() if name != "method_version"}
    record.write_text(json.dumps(old))  # as version 0.1 of the package wrote it
    fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)

    class Second(Snapshot):
        version = 2

    with pytest.raises(UsageError, match=r'settings \{"lr": 0.05, "cycle": 1\} and version 2; found settings \{"lr"'):
        fitting.fit(Second(), RECIPE, out=tmp_path, runs=1, draws=2)
    fits = MethodFits(RECIPE, tmp_path, 1, 2, 0)
    assert fits.folder(Second()) != fits.folder(Snapshot())

    class Unnumbered(Snapshot):
        version = "b"

    with pytest.raises(UsageError, match="version of snapshot: expected a whole number from 1; found 'b'"):
        fits.folder(Unnumbered())
