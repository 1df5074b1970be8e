"""Members under a lightning Trainer: torch-uncertainty's routine, lightning's checkpoints, lightning-uq-box."""

from __future__ import annotations

import copy
import csv
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.networks.modules import build_architecture
from tests.support import scenarios
from tests.support.neighbours_page import THEIR_OWN, run_section

pytestmark = [pytest.mark.slow, *(pytest.mark.filterwarnings(w) for w in THEIR_OWN)]
Oracle = Callable[[str], ModuleType]
OURS = zoo.interop.torch_uncertainty


@pytest.fixture(scope="module")
def tu(oracle: Oracle) -> Any:
    oracle("torch_uncertainty.methods")
    return oracle("torch_uncertainty.routines")


@pytest.fixture(scope="module")
def box(oracle: Oracle) -> Any:
    return oracle("lightning_uq_box.uq_methods")


def trainer(root: Path | None = None) -> Any:
    from lightning import Trainer

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, default_root_dir=root, **quiet)


def figures(routine: Any, *loaders: Any) -> dict[str, float]:
    found: list[dict[str, float]] = trainer().test(routine, list(loaders), verbose=False)
    return found[0]


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("resnet8-digits", n=4)


@pytest.mark.parametrize(("name", "count"), [("convnet-digits", 5), ("resnet8-digits", 3)])
def test_figures_are_those_of_evaluate(tu: Any, name: str, count: int) -> None:
    members = zoo.load(name, n=count)
    routine = OURS.routine(members, eval_ood=True)
    assert type(routine) is tu.ClassificationRoutine
    ood = zoo.interop.loader(members, "photos", ood=True)
    theirs = figures(routine, zoo.interop.loader(members, "digits"), ood)
    report = zoo.evaluate(members, "digits", ood="photos", sizes=[count], subsets=2)
    assert set(OURS.FIGURES) <= set(FIGURES)
    for figure, key in OURS.FIGURES.items():
        assert theirs[key] == pytest.approx(report[figure].value, abs=1e-5), figure
    assert theirs["test/cplx/params"] == sum(p.numel() for m in members for p in m.model().parameters())


def test_figures_without_out_of_distribution_images(tu: Any, members: zoo.Collection) -> None:
    theirs = figures(OURS.routine(members), zoo.interop.loader(members, "digits"))
    report = zoo.evaluate(members, sizes=[4], subsets=2)
    assert {f for f, key in OURS.FIGURES.items() if key in theirs} == set(OURS.FIGURES) & set(report.ensemble)


def test_figures_of_stored_predictions(tu: Any, members: zoo.Collection, tmp_path: Path) -> None:
    inside, outside = (members.predict(name, tmp_path) for name in ("digits", "photos"))
    loaders = [OURS.loader(x) for x in (inside, outside)]
    theirs = figures(OURS.routine(inside, eval_ood=True), *loaders)
    report = zoo.evaluate(inside, ood=outside, sizes=[4], subsets=2)
    for figure, key in OURS.FIGURES.items():
        assert theirs[key] == pytest.approx(report[figure].value, abs=1e-5), figure


def test_one_member_has_no_disagreement(tu: Any) -> None:
    members = zoo.load("convnet-digits", n=1)
    theirs = figures(OURS.routine(members), zoo.interop.loader(members, "digits"))
    report = zoo.evaluate(members)
    for figure in ("accuracy", "nll", "mi_id"):
        assert theirs[OURS.FIGURES[figure]] == pytest.approx(report[figure].value, abs=1e-5)


@pytest.mark.parametrize("options", [{"chunk": 3}, {"execution": "module"}, {"dtype": torch.float64}])
def test_any_ensemble_in_a_routine_of_ones_own(tu: Any, members: zoo.Collection, options: dict[str, Any]) -> None:
    model = OURS.ensemble(members.ensemble(**options))
    routine = tu.ClassificationRoutine(model, 10, None, is_ensemble=True)
    inputs, labels = (torch.cat(part) for part in zip(*zoo.interop.loader(members, "digits"), strict=True))
    loader: Any = DataLoader(TensorDataset(inputs.to(options.get("dtype"))[:200], labels[:200]), batch_size=64)
    found = figures(routine, loader)["test/cls/NLL"]
    probs = torch.stack([m.model()(inputs[:200]).softmax(-1) for m in members]).mean(0)
    assert found == pytest.approx(float(nll_loss(probs.log(), labels[:200]).detach()), abs=1e-5)
    # The Trainer ran it under inference_mode: gradients still come through afterwards.
    inputs = next(iter(loader))[0].requires_grad_()
    model(inputs).sum().backward()
    assert inputs.grad is not None


def test_modules_for_deep_ensembles(tu: Any, members: zoo.Collection) -> None:
    from torch_uncertainty.methods import deep_ensembles

    inputs = members.preprocess(zoo.images.load("digits").images[:50])
    whole = members.ensemble()
    deep = deep_ensembles(OURS.core_models(whole)).eval()
    assert deep.num_estimators == OURS.ensemble(whole).num_estimators
    found, wanted = OURS.ensemble(whole)(inputs), deep(inputs)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    # They share the ensemble's memory.
    assert deep.core_models[2].fc.bias.data_ptr() == whole.stacked["fc.bias"][2].data_ptr()


def test_checkpoints_read_by_torch_uncertainty_and_lightning(tu: Any, members: zoo.Collection, tmp_path: Path) -> None:
    from torch_uncertainty.methods import deep_ensembles

    inputs = members.preprocess(zoo.images.load("digits").images[:50])
    wanted = torch.stack([m.model()(inputs) for m in members])
    nets = [zoo.load("resnet8-digits")[9].model() for _ in members]
    paths = zoo.interop.lightning.write_checkpoints(members, tmp_path / "model")
    for given in (tmp_path / "model", paths):
        assert torch.equal(deep_ensembles(nets, ckpt_paths=given).eval()(inputs), wanted.flatten(0, 1))
    plain = zoo.interop.lightning.write_checkpoints(members, tmp_path / "plain", prefix="", dtype=torch.float32)
    deep = deep_ensembles(nets, ckpt_paths=plain, use_tu_ckpt_format=False).eval()
    assert torch.equal(deep(inputs), wanted.flatten(0, 1))

    routine = tu.ClassificationRoutine.load_from_checkpoint(paths[1], model=nets[0], num_classes=10, loss=None)
    assert torch.equal(routine.eval()(inputs), wanted[1])
    routine = tu.ClassificationRoutine(nets[3], 10, None)
    loader = zoo.interop.loader(members, "digits")
    found = trainer().test(routine, loader, ckpt_path=str(paths[2]), verbose=False)[0]
    assert found["test/cls/Acc"] == pytest.approx(members[2].row["test_accuracy"], abs=1e-6)


def test_checkpoints_for_torch_uncertaintys_own_net(
    tu: Any, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_uncertainty.methods import deep_ensembles

    frn = oracle("torch_uncertainty.layers.filter_response_norm").FilterResponseNorm2d
    resnet = oracle("torch_uncertainty.models.classification.resnet").resnet
    options = {"arch": 20, "conv_bias": False, "activation_fn": nn.functional.silu, "normalization_layer": frn}
    nets = [resnet(in_channels=3, num_classes=10, style="cifar", **options) for _ in range(2)]
    net = "resnet20-frn-silu"
    monkeypatch.setitem(scenarios.NETS, net, lambda: build_architecture(net, classes=10, conv_bias=False))
    built = scenarios.build(tmp_path / "source", net, members=(0, 1))
    built.description |= {"arguments": {"classes": 10, "conv_bias": False}}
    built.write()
    members = zoo.load("tiny", source=tmp_path / "source")
    zoo.interop.lightning.write_checkpoints(members, tmp_path / "out", upstream=True)
    inputs = torch.randn(4, 3, 32, 32)
    found = deep_ensembles(nets, ckpt_paths=tmp_path / "out").eval()(inputs)
    assert torch.equal(found, torch.cat([m.model()(inputs) for m in members]))


@pytest.fixture(scope="module")
def both(box: Any, members: zoo.Collection, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """An ensemble whose weights stay in memory, and lightning-uq-box's own, of the same members."""
    paths = zoo.interop.lightning.write_checkpoints(members, tmp_path_factory.mktemp("checkpoints"))
    net = box.DeterministicClassification(zoo.load("resnet8-digits")[9].model(), nn.CrossEntropyLoss())
    theirs = box.DeepEnsembleClassification([{"base_model": net, "ckpt_path": p} for p in paths], 10)
    return zoo.interop.lightning_uq_box.deep_ensemble(members), theirs


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, wanted in theirs.items():
        if isinstance(wanted, torch.Tensor):
            assert ours[name].shape == wanted.shape
            assert (ours[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        else:
            assert ours[name] == wanted


def test_steps_of_lightning_uq_box(
    box: Any, both: tuple[Any, Any], members: zoo.Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = both
    batch = next(iter(zoo.interop.lightning_uq_box.loader(members, "digits")))
    batch |= {"row": torch.arange(128)[:, None], "place": ["x"] * 128}  # what goes through to its outputs
    wanted = theirs.predict_step(batch["input"]), theirs.test_step(batch, 0), theirs(batch["input"])
    reads = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: reads.append(args))
    check_same(ours.predict_step(batch["input"]), wanted[0])
    check_same(ours.test_step(batch, 0), wanted[1])
    check_same({"forward": ours(batch["input"])}, {"forward": wanted[2]})
    assert reads == []
    assert isinstance(ours, box.DeepEnsembleClassification)
    assert (ours.n_ensemble_members, ours.num_classes, ours.task) == (4, 10, "multiclass")
    monkeypatch.undo()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):  # noqa: S301 (our own)
        assert type(twin) is type(ours)
        check_same(twin.predict_step(batch["input"]), wanted[0])


def test_a_trainer_with_lightning_uq_box(both: tuple[Any, Any], members: zoo.Collection, tmp_path: Path) -> None:
    rows, metrics = [], []
    for name, model in zip(("ours", "theirs"), both, strict=True):
        model.test_metrics.reset()
        (tmp_path / name).mkdir()
        trainer(tmp_path / name).test(model, zoo.interop.lightning_uq_box.loader(members, "digits"), verbose=False)
        metrics.append(model.test_metrics.compute())
        with (tmp_path / name / model.pred_file_name).open() as file:
            rows.append([[float(x) for x in row[:3]] for row in list(csv.reader(file))[1:]])
    assert len(rows[0]) == 540
    assert torch.allclose(torch.tensor(rows[0]), torch.tensor(rows[1]), rtol=0, atol=1e-5)
    assert metrics[0].keys() == metrics[1].keys()
    assert all(float(metrics[0][n]) == pytest.approx(float(v), abs=1e-5) for n, v in metrics[1].items())


def test_refusals_for_lightning_uq_box(box: Any, members: zoo.Collection) -> None:
    with pytest.raises(UsageError, match="task: expected one of multiclass, binary, multilabel; found 'regression'"):
        zoo.interop.lightning_uq_box.deep_ensemble(members, task="regression")
    with pytest.raises(UsageError, match="num_classes of an ensemble: expected a whole number; found None"):
        zoo.interop.lightning_uq_box.deep_ensemble(members.ensemble())
    assert len(zoo.interop.lightning_uq_box.deep_ensemble(members.ensemble(), 10).ensemble) == 4


@pytest.mark.parametrize("title", ["torch-uncertainty", "lightning", "lightning-uq-box"])
def test_the_page(tu: Any, box: Any, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_section(title)
