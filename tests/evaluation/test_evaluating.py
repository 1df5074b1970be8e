"""A report's figures against other packages' on the same logits, and its intervals against the rules they follow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.evaluating import Report
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.images import ImageData

Oracle = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits")


@pytest.fixture(scope="module")
def report(members: zoo.Collection) -> Report:
    return zoo.evaluate(members, "digits", ood="photos", sizes=[1, 8, 64])


@pytest.fixture(scope="module")
def predictions(members: zoo.Collection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities (member, input, class) on both sets, by a plain loop over modules and numpy, and the labels."""
    found = []
    for name in ("digits", "photos"):
        inputs = members.preprocess(zoo.images.load(name).images)
        with torch.no_grad():
            logits = np.stack([m.model()(inputs).double().numpy() for m in members])
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        found.append(powers / powers.sum(-1, keepdims=True))
    labels = zoo.images.load("digits").labels
    assert labels is not None
    return found[0], found[1], labels.numpy()


def by_torch_uncertainty(oracle: Oracle, probs: np.ndarray, ood: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The figures that torch-uncertainty has, on mean probabilities (input, class)."""
    tu = oracle("torch_uncertainty.metrics")
    p, q, y = torch.tensor(probs.mean(0)), torch.tensor(ood.mean(0)), torch.tensor(labels)
    classes = p.shape[-1]
    found = {}
    for name, metric in {
        "brier": tu.BrierScore(num_classes=classes),
        "adaptive_ece": tu.AdaptiveCalibrationError(task="multiclass", num_classes=classes, num_bins=15, norm="l1"),
        "aurc": tu.AURC(),
        "nll": tu.CategoricalNLL(),
    }.items():
        metric.update(p.float(), y)
        found[name] = float(metric.compute())
    fpr = tu.FPR95(pos_label=1)
    scores = torch.cat([1 - p.max(-1).values, 1 - q.max(-1).values])
    fpr.update(scores, torch.cat([torch.zeros(len(p)), torch.ones(len(q))]).long())
    found["fpr95"] = float(fpr.compute())
    for name, x in (("mi_id", probs), ("mi_ood", ood)):
        metric = tu.MutualInformation()
        metric.update(torch.tensor(x).transpose(0, 1))
        found[name] = float(metric.compute())
    disagreement = tu.Disagreement()
    disagreement.update(torch.tensor(probs).transpose(0, 1))
    found["disagreement"] = float(disagreement.compute())
    return found


def by_scikit_learn(probs: np.ndarray, ood: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, average_precision_score, log_loss, roc_auc_score

    p, q = probs.mean(0), ood.mean(0)
    positive = np.r_[np.zeros(len(p)), np.ones(len(q))]
    scores = -np.r_[p.max(1), q.max(1)]
    return {
        "accuracy": accuracy_score(labels, p.argmax(1)),
        "nll": log_loss(labels, p),
        "auroc": roc_auc_score(positive, scores),
        "aupr": average_precision_score(positive, scores),
    }


def by_hand(probs: np.ndarray, ood: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """What no other package has, and what is short enough to write twice: sums over bins and pairs."""
    p = probs.mean(0)
    confidence, right = p.max(1), p.argmax(1) == labels
    ece = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence >= low) & (confidence < low + 1 / 15)
        ece += abs(right[inside].sum() - confidence[inside].sum()) / len(p)
    classwise = []
    for c in range(p.shape[1]):
        order = np.argsort(p[:, c], kind="stable")
        gaps = [abs((labels[part] == c).sum() - p[part, c].sum()) for part in np.array_split(order, 15)]
        classwise.append(sum(gaps) / len(p))
    votes = probs.argmax(-1)
    pairs = [np.mean(a != b) for i, a in enumerate(votes) for b in votes[i + 1 :]]
    found = {"ece": ece, "ace": float(np.mean(classwise)), "disagreement": float(np.mean(pairs))}
    for name, x in (("mi_id", probs), ("mi_ood", ood)):
        entropy = [-(y * np.log(np.maximum(y, 1e-300))).sum(-1) for y in (x.mean(0), x)]
        found[name] = float(entropy[0].mean() - entropy[1].mean())
    return found


@pytest.mark.slow
def test_every_figure_equals_another_package(
    report: Report, predictions: tuple[np.ndarray, np.ndarray, np.ndarray], oracle: Oracle
) -> None:
    checked = set()
    for others in (by_torch_uncertainty(oracle, *predictions), by_scikit_learn(*predictions), by_hand(*predictions)):
        for name, value in others.items():
            assert report[name].value == pytest.approx(value, abs=1e-5), name
            checked.add(name)
    assert checked == set(FIGURES)


@pytest.mark.slow
def test_figures_of_single_members_are_means(
    report: Report, predictions: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    probs, ood, labels = predictions
    singles = [by_scikit_learn(probs[i : i + 1], ood[i : i + 1], labels) for i in range(len(probs))]
    for name in singles[0]:
        values = np.array([s[name] for s in singles])
        interval, band = report.member[name], report.curve[1][name]
        assert interval.value == pytest.approx(values.mean(), abs=1e-5)
        # The mean over members: about two standard errors. A fresh member: about two standard deviations.
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert interval.low is not None
        assert interval.high is not None
        # Wider than Student's interval where members are skewed.
        assert 0.85 < (interval.high - interval.low) / 2 / (1.998 * error) < 1.4
        assert band.low is not None
        if band.low > 0:
            wide = 1.99834 * values.std() * math.sqrt((1 + 1 / 64) / (1 - 1 / 64))
            assert band.value - band.low == pytest.approx(wide, rel=1e-3)


def test_the_ensemble_beats_its_members(report: Report) -> None:
    assert report["accuracy"].value > report.member["accuracy"].value
    assert report["nll"].value < report.member["nll"].value
    assert report["auroc"].value >= 0.98
    assert report["mi_ood"].value > report["mi_id"].value > 0
    for size in (1, 8):
        assert report.curve[size]["nll"].value >= report["nll"].value


def test_report_as_json_and_frame(report: Report) -> None:
    facts = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert facts["citation"] == zoo.load("convnet-digits").citation
    frame = report.to_frame()
    assert len(frame) == len(facts["figures"]) == 3 * len(FIGURES) + len(report.member)
    row = frame[(frame.of == "ensemble") & (frame.members == 64) & (frame.figure == "nll")].iloc[0]
    assert row["value"] == report["nll"].value
    assert (row["unit"], row["better"]) == ("nats", "lower")


def test_bounds_stay_within_the_range_of_the_figure(report: Report) -> None:
    for figures in (*report.curve.values(), report.member):
        for name, interval in figures.items():
            if interval.low is not None and interval.high is not None:
                assert 0 <= interval.low <= interval.value <= interval.high <= FIGURES[name].highest_value


def test_one_member_has_figures_without_bounds() -> None:
    report = zoo.evaluate(zoo.load("convnet-digits", n=1), "digits", ood="photos")
    assert report["accuracy"].value > 0.9
    assert report["accuracy"].low is None
    assert math.isnan(report["disagreement"].value)
    assert report["mi_id"].value == pytest.approx(0, abs=1e-7)
    assert '"value": null' in report.to_json()


def test_float16_members_with_batch_norm() -> None:
    members = zoo.load("resnet8-digits", n=4)
    report = zoo.evaluate(members, sizes=[4])
    assert "auroc" not in report.ensemble
    assert report["accuracy"].value > 0.97
    with pytest.raises(UsageError, match=r"figure 'auroc': expected one of accuracy, .*disagreement; found none such"):
        report["auroc"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"classes": tuple("012345678x")}, "8, 9; found 'x' among the 10 classes of the images"),
        ({"labels": None}, "found no labels"),
    ],
)
def test_images_of_other_classes_are_refused(change: dict[str, object], text: str) -> None:
    digits = zoo.images.load("digits")
    facts = {n: getattr(digits, n) for n in ("name", "split", "images", "labels", "classes")}
    with pytest.raises(UsageError, match=text):
        zoo.evaluate(zoo.load("convnet-digits", n=2), ImageData(**{**facts, **change}))  # type: ignore[arg-type]


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="size of an ensemble: expected a whole number from 1 to 2; found 3"):
        zoo.evaluate(zoo.load("convnet-digits", n=2), sizes=[1, 3])
