"""Reports from stored predictions, against the same logits in memory, other packages, and a bound on memory."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics, subsets
from checkpoints_zoo.evaluation.evaluating import Report
from checkpoints_zoo.evaluation.subsets import Population
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.populations.divergence import compare_pairs
from checkpoints_zoo.predictions import Predictions, predict, predictions_of
from tests.support.commands import run, values
from tests.support.kills import forks

ROOT = Path(__file__).resolve().parents[2]
COUNT = 8


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits", n=COUNT)


@pytest.fixture(scope="module")
def folder(members: zoo.Collection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    for name in ("digits", "photos"):
        predict(members, name, root)
    return root


@pytest.fixture(scope="module")
def stored(members: zoo.Collection, folder: Path) -> tuple[Predictions, Predictions]:
    inside, outside = (predictions_of(members, f"{n}-test", source=folder) for n in ("digits", "photos"))
    return inside, outside


@pytest.fixture(scope="module")
def report(stored: tuple[Predictions, Predictions]) -> Report:
    return zoo.evaluate(stored[0], ood=stored[1], subsets=12)


def numbers(report: Report) -> dict[tuple[object, ...], float]:
    """Every value and bound of a report."""
    rows = json.loads(report.to_json())["figures"]
    return {(r["of"], r["members"], r["figure"], k): r[k] for r in rows for k in ("value", "low", "high")}


COUNTED = ("accuracy", "disagreement", "fpr95", "ece", "adaptive_ece", "ace")  # an input more or less is a jump


def close(one: Report, other: Report, smooth: float, counted: float) -> None:
    a, b = numbers(one), numbers(other)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if value is None:
            assert b[key] is None, key
        else:
            assert math.isclose(value, b[key], abs_tol=counted if key[2] in COUNTED else smooth, rel_tol=0), key


@pytest.mark.slow
def test_the_members_themselves_give_the_same_to_rounding(members: zoo.Collection, report: Report) -> None:
    again = zoo.evaluate(members, "digits", ood="photos", subsets=12)
    # Logits up to 32 in float16: a log-probability is off by 2 * 32 / 2048 at most, in a mean far less is left. What
    # counts inputs may count one of 540 otherwise.
    close(report, again, smooth=2e-4, counted=1 / 540)
    facts = ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
    assert [getattr(report, f) for f in facts] == [getattr(again, f) for f in facts]
    assert report.drawing["member_accuracy"] == pytest.approx(again.drawing["member_accuracy"], abs=1e-6)
    for name in ("mi_id", "mi_ood"):
        assert report.drawing[name] == pytest.approx(again.drawing[name], abs=2e-3)


@pytest.mark.slow
def test_blocks_change_nothing(
    stored: tuple[Predictions, Predictions], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subsets, "BLOCK_BYTES", 7 * 4 * COUNT * 10)  # 7 inputs, 540 = 77 * 7 + 1
    monkeypatch.setattr(subsets, "MOST_READ_BYTES", 2 * 14 * COUNT * 10)  # two blocks
    monkeypatch.setattr(subsets, "SUBSETS_PER_PASS", 7)
    monkeypatch.setattr(subsets, "MOST_MEAN_BYTES", 3 * 4 * 540 * 10)  # 3 subsets
    close(zoo.evaluate(stored[0], ood=stored[1], subsets=12), report, smooth=1e-6, counted=1e-6)


def test_every_figure_of_a_subset_equals_a_direct_one(
    stored: tuple[Predictions, Predictions], oracle: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subsets, "BLOCK_BYTES", 50 * 4 * COUNT * 10)
    inside, outside = stored
    labels = inside.labels
    assert labels is not None
    subset = torch.tensor([1, 4, 6])
    found = Population(inside, labels, outside)
    values = dict(zip(found.names, found.measure([subset, torch.tensor([2]), subset])[0].tolist(), strict=True))
    p, q = (x.logits([1, 4, 6], torch.float64).softmax(-1) for x in stored)
    mean, ood = p.mean(0).numpy(), q.mean(0).numpy()
    y = labels.numpy()
    sklearn, torchmetrics = oracle("sklearn.metrics"), oracle("torchmetrics.functional.classification")
    positive = np.r_[np.zeros(len(mean)), np.ones(len(ood))]
    scores = -np.r_[mean.max(1), ood.max(1)]
    tensor = torch.from_numpy(mean)
    votes = p.argmax(-1).numpy()
    wanted = {
        "accuracy": np.mean(mean.argmax(1) == y),
        "nll": -np.mean(np.log(mean[np.arange(len(y)), y])),
        "brier": np.mean(((mean - np.eye(10)[y]) ** 2).sum(1)),
        "ece": float(torchmetrics.multiclass_calibration_error(tensor, labels, num_classes=10, n_bins=15, norm="l1")),
        "adaptive_ece": metrics.adaptive_ece(tensor, labels).item(),
        "ace": metrics.ace(tensor, labels).item(),
        "aurc": metrics.aurc(tensor, labels).item(),
        "mi_id": metrics.mutual_information(p).mean().item(),
        "disagreement": np.mean([np.mean(votes[i] != votes[j]) for i, j in ((0, 1), (0, 2), (1, 2))]),
        "mi_ood": metrics.mutual_information(q).mean().item(),
        "auroc": sklearn.roc_auc_score(positive, scores),
        "aupr": sklearn.average_precision_score(positive, scores),
        "fpr95": metrics.fpr95(torch.from_numpy(scores), torch.from_numpy(positive) == 1).item(),
    }
    assert values == pytest.approx(wanted, abs=1e-5)


def test_logits_in_float64_and_inside_0_to_1() -> None:
    generator = torch.Generator().manual_seed(0)
    for kind in (torch.float64, torch.float32, torch.float16):
        logits = torch.rand(5, 40, 3, generator=generator, dtype=torch.float64).to(kind)
        labels = torch.randint(3, (40,), generator=generator)
        found = Population(logits, labels, None).measure([torch.tensor([0, 2]), torch.arange(5)])
        for row, some in zip(found, ([0, 2], list(range(5))), strict=True):
            probs = logits[some].double().softmax(-1)
            assert row[1].item() == pytest.approx(metrics.nll(probs.mean(0).log(), labels).item(), abs=1e-6)
            assert row[7].item() == pytest.approx(metrics.mutual_information(probs).mean().item(), abs=1e-6)
            assert row[8].item() == pytest.approx(metrics.disagreement(probs).item(), abs=1e-12)


def test_logits_of_extreme_size() -> None:
    """One member, one class present, ties, probabilities of 0 and 1."""
    logits = torch.tensor([[[1e4, 0.0], [1e4, 0.0], [0.0, 0.0]]])
    found = Population(logits, torch.zeros(3, dtype=torch.int64), None)
    (row,) = found.measure([torch.tensor([0])])
    figures = dict(zip(found.names, row.tolist(), strict=True))
    assert figures["accuracy"] == 1
    assert figures["nll"] == pytest.approx(math.log(2) / 3, abs=1e-6)
    assert figures["brier"] == pytest.approx(0.5 / 3, abs=1e-6)
    assert math.isnan(figures["disagreement"])


def test_all_pairs_from_blocks(stored: tuple[Predictions, Predictions]) -> None:
    inside, _ = stored
    found = compare_pairs(inside.blocks(100))
    probs = inside.logits(dtype=torch.float64).softmax(-1)
    assert found.inputs == 540
    wanted = metrics.mutual_information(probs[[2, 5]]).mean().item()
    assert found.information[2, 5].item() == pytest.approx(wanted, abs=1e-6)


# ---- what is refused ----
def refusals(
    stored: tuple[Predictions, Predictions], members: zoo.Collection
) -> Iterator[tuple[Callable[[], object], str]]:
    inside, outside = stored
    images = zoo.images.load("photos")
    yield lambda: zoo.evaluate(outside), "predictions convnet-digits/photos-test: expected predictions on images with"
    yield (
        lambda: zoo.evaluate(inside, ood="photos"),
        "images 'photos' for predictions convnet-digits/digits-test: expected stored predictions on them, since there "
        "are no members to run; found images. Store some with `predict`",
    )
    yield lambda: zoo.evaluate(inside, images), "predictions convnet-digits/digits-test: expected 2,000 inputs, finger"
    others = "expected those of the same members with the same weights, in the same order; found members "
    yield lambda: zoo.evaluate(inside, ood=outside[:4]), f"{others}0-3."
    yield lambda: zoo.evaluate(inside[::-1], ood=outside), f"{others}0-7."
    yield lambda: zoo.evaluate(members[:2], "digits", ood=outside), f"{others}0-7."


def test_sets_that_do_not_match_are_refused(stored: tuple[Predictions, Predictions], members: zoo.Collection) -> None:
    for call, text in refusals(stored, members):
        with pytest.raises(UsageError) as caught:
            call()
        assert text in str(caught.value)


def test_members_with_stored_predictions_out_of_distribution(
    members: zoo.Collection, stored: tuple[Predictions, Predictions]
) -> None:
    few = zoo.images.load("digits")
    some = ImageData("few", "test", few.images[:40], few.labels[:40], few.classes)  # type: ignore[index]
    found = zoo.evaluate(members, some, ood=stored[1], sizes=[COUNT], subsets=3)
    assert found["auroc"].value == pytest.approx(
        zoo.evaluate(members, some, ood="photos", sizes=[COUNT], subsets=3)["auroc"].value, abs=1e-4
    )


# ---- the command line ----
@pytest.mark.slow
def test_predict_and_evaluate_by_the_command_line(tmp_path: Path, report: Report) -> None:
    for name in ("digits", "photos/test"):
        result = run(
            "predict", "convnet-digits", "-n", str(COUNT), "--data", name, "--out", tmp_path, "--format", "json"
        )
        found = values(result)
        assert (found["members"], found["classes"]) == (COUNT, 10)
        assert found["predictions"] == f"convnet-digits/{name.split('/')[0]}-test"
        assert found["labelled"] == (name == "digits")
    result = run(
        "evaluate", "convnet-digits", "-n", str(COUNT), "--stored", tmp_path, "--ood", "photos-test", "--format", "json"
    )
    rows = {
        r["figure"]: r["value"] for r in values(result)["figures"] if r["of"] == "ensemble" and r["members"] == COUNT
    }
    assert rows == pytest.approx({name: x.value for name, x in report.ensemble.items()}, abs=1e-6)
    result = run("evaluate", "convnet-digits", "--stored", tmp_path)
    assert result.exit_code == 3
    assert "found none for members 8-63" in result.stderr


# ---- memory ----
def megabytes(name: str) -> float:
    """Read a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def growth_of_a_large_evaluation(root: Path) -> float | None:
    """Evaluate 120 members; return by how many MB this process grew at most meanwhile, None where nobody can tell."""
    spec = importlib.util.spec_from_file_location("predictions_benchmark", ROOT / "benchmarks" / "predictions.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for name, signal, seed in ((benchmark.INSIDE, 3.0, 1), (benchmark.OUTSIDE, 0.0, 2)):
        benchmark.write(root, name, 120, 5000, 30, signal, seed)  # 36 MB, 72 MB in float32
    subsets.MOST_MEAN_BYTES, subsets.MOST_READ_BYTES, subsets.BLOCK_BYTES = 2**22, 2**22, 2**21

    def measure(members: int, chosen: list[torch.Tensor]) -> None:
        inside, outside = (benchmark.opened(root, name)[:members] for name in (benchmark.INSIDE, benchmark.OUTSIDE))
        Population(inside, inside.labels, outside).measure(chosen)

    measure(8, [torch.tensor([0, 1])])  # imports what is imported late
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # what is free already would hide growth
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return None
    before = megabytes("VmRSS")
    measure(120, [torch.arange(k) for k in range(2, 120, 24)])
    return megabytes("VmHWM") - before


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    # A process of its own: what other tests have left in this one takes room by chance.
    with ProcessPoolExecutor(1, forks()) as pool:
        most = pool.submit(growth_of_a_large_evaluation, tmp_path).result()
    if most is None:
        pytest.skip("this machine can't reset a process's peak memory")
    assert 5 < most < 60  # MB, of 72 in float16 and 144 in float32; 36 here, and the allocator adds what it likes
