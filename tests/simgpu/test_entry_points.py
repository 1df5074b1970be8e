"""Every entry point on a card that is not the current one: the results are the CPU's up to rounding.

Two executions of a network differ by rounding only, in float32 by less than 1e-5 of the largest logit (what `Ensemble`
promises), so log-probabilities differ by less than twice that; the largest logit of these members is below 64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.predictions import running
from tests.support.few_digits import some

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]
LARGEST_LOGIT = 64.0
ROUNDING = 2e-5 * LARGEST_LOGIT
SECOND = "cuda:1"
Found = dict[str, Any]
CASES: dict[str, tuple[Callable[[str, Path], Found], float]] = {}


def case(tolerance: float) -> Callable[[Callable[[str, Path], Found]], Callable[[str, Path], Found]]:
    """Add an entry point: a function of device and folder that returns values by name, and how far they may differ."""

    def add(function: Callable[[str, Path], Found]) -> Callable[[str, Path], Found]:
        CASES[function.__name__] = function, tolerance
        return function

    return add


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 convolutions from TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def convnets(n: int = 4) -> Collection:
    return zoo.load("convnet-digits", n=n)


def resnets(n: int = 3) -> Collection:
    return zoo.load("resnet8-digits", n=n)


def digits() -> ImageData:
    return some("test", 30)


def photos() -> ImageData:
    whole = zoo.images.load("photos")
    return dataclasses.replace(whole, images=whole.images[:20], labels=None)


@case(ROUNDING)
def evaluate(device: str, folder: Path) -> Found:
    report = zoo.evaluate(convnets(), digits(), ood=photos(), device=device, subsets=2)
    return {name: x.value for name, x in (report.ensemble | report.member).items()}


@case(ROUNDING)
def evaluate_norms_by_size(device: str, folder: Path) -> Found:
    report = zoo.evaluate(resnets(), digits(), sizes=[1, 2], temperature=True, held_out=0.5, device=device, subsets=2)
    return {f"{size} {name}": x.value for size, figures in report.curve.items() for name, x in figures.items()}


@case(1e-5 * LARGEST_LOGIT + LARGEST_LOGIT / 1024)  # two logits are stored in float16, each rounded by 1/2048
def predict(device: str, folder: Path) -> Found:
    stored = resnets().predict(digits(), folder / device.replace(":", "-"), device=device)
    return {"logits": stored.logits()}


@case(1e-5 * LARGEST_LOGIT)
def logits_of_groups(device: str, folder: Path) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "GROUP_BYTES", 2 * 2 * resnets().nbytes // 3)
        return {"logits": predictions.logits(resnets(5), digits(), device, batch=16)}


@case(ROUNDING)
def pairwise(device: str, folder: Path) -> Found:
    found = zoo.pairwise(convnets(), digits(), ood=photos(), device=device)
    assert found.outside is not None
    return {"inside": found.inside.information, "outside": found.outside.information}


@case(1e-9)  # float64 on the same float32 weights
def ns(device: str, folder: Path) -> Found:
    found = zoo.ns(convnets(4), permutations=9, device=device)
    return {"mmd": found.mmd.value, "p": found.mmd.p_value, "ns": found.ns.value}


@case(1e-4)  # scales are products of norms: 1e-6 a layer
def canonicalize(device: str, folder: Path) -> Found:
    found: Found = {}
    for options in (
        {"permute": "first"}, {"permute": "max"}, {"permute": "norm"}, {"scale": "unit-norm"},
        {"scale": "unit-norm", "permute": "max"},
    ):  # fmt: skip
        stacked = convnets(2).canonicalize(**options).stack(device, torch.float32)  # type: ignore[arg-type]
        found |= {f"{options} {name}": tensor for name, tensor in stacked.items()}
    return found


@case(0.0)  # permutations alone
def canonicalize_streams(device: str, folder: Path) -> Found:
    return dict(resnets(2).canonicalize(permute="norm", streams=True).stack(device, torch.float32))


@case(0.0)
def align(device: str, folder: Path) -> Found:
    members = convnets(3)
    return dict(members.align(to=members.ids[0]).stack(device, torch.float32))


@case(0.0)
def align_to_mean(device: str, folder: Path) -> Found:
    return dict(convnets(3).align(to="mean").stack(device, torch.float32))


@case(1e-4)  # heads are balanced, and streams turned, in float64
def transformers(device: str, folder: Path) -> Found:
    members = zoo.load("vit-digits", n=1)
    canonical = members.canonicalize(heads="balanced", scale="unit-norm", permute="norm", streams=True)
    found = {f"canonical {name}": tensor for name, tensor in canonical.stack(device, torch.float32).items()}
    back = canonical.align(to=members[0])  # matched in two sweeps
    found |= {f"aligned {name}": tensor for name, tensor in back.stack(device, torch.float32).items()}
    mass = zoo.minimal_mass(members, device=device)
    images = members.preprocess(zoo.images.load("digits").images[:8])
    logits = members.ensemble(device)(images.to(device)) / LARGEST_LOGIT
    return found | {"mass": mass.after / mass.before, "logits": logits}


@case(1e-4 * LARGEST_LOGIT)  # of rescaled weights
def ensemble_of_a_view(device: str, folder: Path) -> Found:
    view = convnets(3).canonicalize(scale="unit-norm", permute="first")
    return {"logits": view.ensemble(device)(view.preprocess(digits().images).to(device))}


@case(ROUNDING)
def barrier(device: str, folder: Path) -> Found:
    found = zoo.barrier(resnets(2), data=digits(), points=3, statistics=some("train", 64), device=device)
    return {"losses": found.losses, "accuracies": found.accuracies}


@case(ROUNDING)
def compact(device: str, folder: Path) -> Found:
    found = zoo.compact(convnets(4), digits(), samples=3, splits=2, device=device)
    return {f"{c} {row}": x.value for c, rows in found.table.items() for row, x in rows.items()}


@case(1e-4)
def minimal_mass(device: str, folder: Path) -> Found:
    found = zoo.minimal_mass(convnets(3), device=device)
    return {"before": found.before / found.before, "after": found.after / found.before}


@case(ROUNDING)
def compare_predictives(device: str, folder: Path) -> Found:
    members = convnets(6)
    found = zoo.compare_predictives(members[:3], members[3:], digits(), device=device, subsets=2)
    return {name: x.value for name, x in found.figures.items()}


@case(1e-5 * LARGEST_LOGIT)
def model(device: str, folder: Path) -> Found:
    member = resnets()[0]
    state = member.state_dict(device, torch.float32)
    assert {t.device for t in state.values()} == {torch.empty(0, device=device).device}
    return {"logits": member.model(device)(member.selected.preprocess(digits().images).to(device)).detach()}


@case(1e-5 * LARGEST_LOGIT)
def batches_while_an_ensemble_runs(device: str, folder: Path) -> Found:
    members = resnets(4)
    inputs = members.preprocess(digits().images).to(device)
    found: Found = {}
    for ids, stacked in members.batches(2, device, torch.float32):
        with torch.no_grad():
            found[str(ids)] = zoo.Ensemble(members._skeleton(), stacked, ids)(inputs)
    return found


@case(1e-5 * LARGEST_LOGIT)
def ensemble_in_chunks(device: str, folder: Path) -> Found:
    members = resnets(5)
    with torch.no_grad():
        return {"logits": members.ensemble(device, chunk=2)(members.preprocess(digits().images).to(device))}


@case(1e-5 * LARGEST_LOGIT)
def ensemble_moved(device: str, folder: Path) -> Found:
    members = resnets()
    ensemble, inputs = members.ensemble().to(device), members.preprocess(digits().images)
    there = ensemble(inputs.to(device)).detach()
    assert ensemble.cpu()(inputs).device.type == "cpu"
    return {"logits": there, "mean": ensemble.predict(inputs)}


@case(1e-4)  # relative to the largest, of sums over 10 classes and 30 inputs
def gradients_of_inputs(device: str, folder: Path) -> Found:
    members = resnets()
    inputs = members.preprocess(digits().images).to(device).requires_grad_()
    members.ensemble(device)(inputs).softmax(-1).square().sum().backward()
    assert inputs.grad is not None
    return {"gradient": inputs.grad / inputs.grad.abs().max()}


@pytest.mark.parametrize("name", CASES)
def test_an_entry_point_gives_the_cpus_results(name: str, tmp_path: Path) -> None:
    function, tolerance = CASES[name]
    on_cpu, on_card = function("cpu", tmp_path), function(SECOND, tmp_path)
    assert on_cpu.keys() == on_card.keys()
    for key, wanted in on_cpu.items():
        found, expected = _value(on_card[key]), _value(wanted)
        assert torch.equal(found.isnan(), expected.isnan()), key
        bound = float((found - expected).abs().nan_to_num().max())
        assert bound <= tolerance, f"{key}: differs by {bound:.3g} from the CPU's"


def _value(value: Any) -> Tensor:
    return torch.as_tensor(float("nan") if value is None else value).detach().cpu().double()
