"""Figures against torch-uncertainty, torchmetrics, scikit-learn, scipy, or a loop by hand, all to 1e-5."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional.classification as torchmetrics
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from checkpoints_zoo.evaluation import metrics

close = pytest.approx
TOLERANCE = {"rel": 1e-5, "abs": 1e-5}
FIGURES = (metrics.accuracy, metrics.brier, metrics.ece, metrics.adaptive_ece, metrics.ace, metrics.aurc)
Oracle = Callable[[str], ModuleType]


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = True, fewest: int = 1) -> tuple[Tensor, Tensor]:
    """Draw probabilities (input, class) and labels (input,): sharp, flat, tied, one-hot, of one class."""
    inputs, classes = draw(st.integers(fewest, 60)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sharpness = draw(st.sampled_from([0.1, 1.0, 5.0]))
    logits = sharpness * torch.randn(inputs, classes, generator=generator, dtype=dtype)
    probs = logits.softmax(-1)
    kind = draw(st.sampled_from(["plain", "rounded", "sure", "flat"])) if ties else "plain"
    if kind == "rounded":
        probs = (probs * 4).round() + 0.25
        probs /= probs.sum(-1, keepdim=True)
    elif kind == "sure":
        probs = torch.nn.functional.one_hot(logits.argmax(-1), classes).to(dtype)
    elif kind == "flat":
        probs = torch.full_like(probs, 1 / classes)
    labels = torch.randint(classes, (inputs,), generator=generator)
    return probs, torch.zeros_like(labels) if draw(st.booleans()) else labels


@st.composite
def members(draw: st.DrawFn, fewest: int = 1) -> Tensor:
    """Draw probabilities (member, input, class) of the same sorts as `cases`."""
    rows, _ = draw(cases())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    orders = [torch.randperm(len(rows), generator=generator) for _ in range(draw(st.integers(fewest, 6)))]
    return torch.stack([rows[order] for order in orders])


@st.composite
def detections(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw scores (input,) in [-1, 0], many of them equal or 0 or -1, and kinds (input,), both present."""
    levels = draw(st.sampled_from([1, 2, 5, 10**6]))
    scores = draw(st.lists(st.integers(0, levels), min_size=2, max_size=60))
    kinds = draw(st.lists(st.booleans(), min_size=len(scores) - 2, max_size=len(scores) - 2))
    return -torch.tensor(scores) / levels, torch.tensor([True, False, *kinds])


def untied(probs: Tensor) -> bool:
    """Tell whether torch-uncertainty has one answer: it breaks ties as the processor's sort happens to."""
    return len(probs.amax(-1).float().unique()) == len(probs)


def equal_mass_by_hand(stated: list[float], came_true: list[float], bins: int) -> float:
    """Loop over sorted inputs and bins; inputs of equal probability share what came true."""
    shared = {p: np.mean([t for q, t in zip(stated, came_true, strict=True) if q == p]) for p in set(stated)}
    total = 0.0
    for run in np.array_split(sorted(stated), bins):
        if len(run):
            total += len(run) / len(stated) * abs(np.mean([shared[p] for p in run]) - np.mean(run))
    return total


@pytest.mark.slow
@given(cases())
def test_accuracy_and_brier_equal_the_oracles(oracle: Oracle, case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    classes = probs.shape[1]
    theirs = torchmetrics.multiclass_accuracy(probs, labels, classes, average="micro")
    assert float(metrics.accuracy(probs, labels)) == close(float(theirs), **TOLERANCE)
    brier = oracle("torch_uncertainty.metrics.classification").BrierScore(num_classes=classes)
    brier.update(probs, labels)
    assert float(metrics.brier(probs, labels)) == close(float(brier.compute()), **TOLERANCE)
    assert metrics.brier(probs, labels).dtype == metrics.accuracy(probs, labels).dtype == probs.dtype


@pytest.mark.slow
@given(cases())
def test_nll_equals_the_oracle_and_is_infinite_where_a_label_had_probability_zero(
    oracle: Oracle, case: tuple[Tensor, Tensor]
) -> None:
    probs, labels = case
    nll = oracle("torch_uncertainty.metrics.classification").CategoricalNLL()
    nll.update(probs, labels)
    ours = float(metrics.nll(probs.log(), labels))
    assert ours == close(float(nll.compute()), **TOLERANCE)
    assert math.isinf(ours) == bool((probs[range(len(labels)), labels] == 0).any())


@pytest.mark.slow
@given(cases(), st.sampled_from([1, 4, 15]))
def test_ece_equals_a_loop_and_torch_uncertainty(oracle: Oracle, case: tuple[Tensor, Tensor], bins: int) -> None:
    probs, labels = case
    confidence, top = (values.numpy() for values in probs.max(-1))
    edges = np.linspace(0, 1, bins + 1, dtype=np.float32)
    of_bin = np.searchsorted(edges, confidence.astype(np.float32), side="right").clip(max=bins)
    total = 0.0
    for bin_ in set(of_bin):
        chosen = of_bin == bin_
        gap = np.mean(top[chosen] == labels.numpy()[chosen]) - np.mean(confidence[chosen])
        total += np.mean(chosen) * abs(gap)
    # On an edge of a bin, the last bit of the edge decides: there only the packages agree.
    if np.abs(confidence[:, None] - edges[1:-1]).min(initial=1) > 1e-6:
        assert float(metrics.ece(probs, labels, bins)) == close(total, **TOLERANCE)
    if confidence.max() >= 1:  # torchmetrics has a bin of its own for confidence 1
        return
    theirs = oracle("torch_uncertainty.metrics.classification").CalibrationError(
        task="multiclass", num_classes=probs.shape[1], num_bins=bins
    )
    theirs.update(probs, labels)
    assert float(metrics.ece(probs, labels, bins)) == close(float(theirs.compute()), **TOLERANCE)


def test_a_bin_includes_its_lower_edge() -> None:
    probs = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.625, 0.375]])
    _, _, inputs = metrics.reliability(probs, torch.tensor([0, 0, 0]), bins=4)
    assert inputs.tolist() == [0, 0, 2, 1]
    assert float(metrics.ece(probs[:2], torch.tensor([0, 1]), bins=4)) == close((0.25 + 0.5) / 2, **TOLERANCE)


def test_ece_of_a_mean_that_rounds_to_above_one_is_not_taken_for_logits() -> None:
    probs = torch.tensor([[1.0000001, 0.0], [0.75, 0.25]])
    assert float(metrics.ece(probs, torch.tensor([0, 0]))) == close(0.125, **TOLERANCE)


@pytest.mark.slow
@given(cases(ties=False, fewest=15))
def test_adaptive_ece_equals_torch_uncertainty(oracle: Oracle, case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    assume(untied(probs))
    theirs = oracle("torch_uncertainty.metrics.classification").AdaptiveCalibrationError(
        task="multiclass", num_classes=probs.shape[1], num_bins=15, norm="l1"
    )
    theirs.update(probs, labels)
    assert float(metrics.adaptive_ece(probs, labels)) == close(float(theirs.compute()), **TOLERANCE)


@pytest.mark.slow
@given(cases(), st.sampled_from([1, 4, 15]))
def test_adaptive_ece_and_ace_equal_a_loop(case: tuple[Tensor, Tensor], bins: int) -> None:
    probs, labels = case
    confidence, top = probs.max(-1)
    by_hand = equal_mass_by_hand(confidence.tolist(), (top == labels).double().tolist(), bins)
    assert float(metrics.adaptive_ece(probs, labels, bins)) == close(by_hand, **TOLERANCE)
    columns = [
        equal_mass_by_hand(probs[:, c].tolist(), (labels == c).double().tolist(), bins) for c in range(probs.shape[1])
    ]
    assert float(metrics.ace(probs, labels, bins)) == close(np.mean(columns), **TOLERANCE)


@given(cases())
def test_reliability_bars_hold_every_input_and_add_up_to_the_ece(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    confidence, accuracy, inputs = metrics.reliability(probs, labels)
    assert inputs.sum() == len(labels)
    assert torch.equal(accuracy.isnan(), inputs == 0)
    assert torch.equal(confidence.isnan(), inputs == 0)
    middle = (torch.arange(15) + 0.5) / 15
    held = inputs > 0
    assert bool(((confidence - middle)[held].abs() <= 0.5 / 15 + 1e-6).all())
    total = ((confidence - accuracy).abs() * inputs)[held].sum() / len(labels)
    assert float(total) == close(float(metrics.ece(probs, labels)), **TOLERANCE)


@pytest.mark.slow
@given(cases(ties=False, fewest=2))
def test_aurc_equals_torch_uncertainty(oracle: Oracle, case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    assume(untied(probs))
    theirs = oracle("torch_uncertainty.metrics.classification").AURC()
    theirs.update(probs, labels)
    assert float(metrics.aurc(probs, labels)) == close(float(theirs.compute()), **TOLERANCE)


def test_aurc_of_ties_is_the_mean_over_their_orders_and_of_one_input_its_error() -> None:
    confidence = torch.tensor([0.9, 0.7, 0.7, 0.7, 0.6])
    probs, labels = torch.stack([confidence, 1 - confidence], -1), torch.tensor([1, 0, 1, 0, 1])
    areas = []
    for order in itertools.permutations([1, 2, 3]):
        wrong = labels[[0, *order, 4]].numpy()
        areas.append(np.trapezoid(np.cumsum(wrong) / np.arange(1, 6), np.arange(1, 6) / 5) / (1 - 1 / 5))
    assert float(metrics.aurc(probs, labels)) == close(np.mean(areas), **TOLERANCE)
    assert metrics.aurc(probs[:1], labels[:1]) == 1
    assert metrics.aurc(probs[1:2], labels[1:2]) == 0


@pytest.mark.slow
@given(detections())
def test_detection_equals_the_oracles(oracle: Oracle, case: tuple[Tensor, Tensor]) -> None:
    scores, is_ood = case
    kinds, ranks = is_ood.long(), scores.double() + 1
    assert float(metrics.auroc(scores, is_ood)) == close(float(torchmetrics.binary_auroc(ranks, kinds)), **TOLERANCE)
    assert float(metrics.auroc(scores, is_ood)) == close(sklearn.metrics.roc_auc_score(kinds, scores), **TOLERANCE)
    theirs = torchmetrics.binary_average_precision(ranks, kinds)
    assert float(metrics.aupr(scores, is_ood)) == close(float(theirs), **TOLERANCE)
    theirs = sklearn.metrics.average_precision_score(kinds, scores)
    assert float(metrics.aupr(scores, is_ood)) == close(theirs, **TOLERANCE)
    fpr95 = oracle("torch_uncertainty.metrics.classification").FPR95(pos_label=1)
    fpr95.update(scores, kinds)
    assert float(metrics.fpr95(scores, is_ood)) == close(float(fpr95.compute()), **TOLERANCE)


@pytest.mark.parametrize("positive", [1, 19, 20, 21, 40, 1000])
def test_fpr95_has_the_least_recall_of_at_least_95_percent(positive: int) -> None:
    scores = torch.arange(2 * positive).float() - 2 * positive
    is_ood = torch.arange(2 * positive) % 2 == 1
    best = min(
        float((scores[~is_ood] >= t).double().mean())
        for t in scores
        if 20 * int((scores[is_ood] >= t).sum()) >= 19 * positive
    )
    assert float(metrics.fpr95(scores, is_ood)) == close(best, **TOLERANCE)


def test_detection_tells_neighbouring_floats_apart() -> None:
    """A sigmoid, or a shift by one, would make these equal, and the area one half."""
    scores = -0.25 + torch.arange(8) * 2.0**-26
    assert len(scores.unique()) == 8
    assert len(torch.sigmoid(scores).unique()) < 8
    assert len((scores + 1).unique()) < 8
    for i in range(7):
        pair, is_ood = scores[i : i + 2], torch.tensor([False, True])
        assert metrics.auroc(pair, is_ood) == metrics.aupr(pair, is_ood) == 1
        assert metrics.fpr95(pair, is_ood) == 0


@given(cases())
def test_entropy_and_ood_score_equal_scipy_and_numpy(case: tuple[Tensor, Tensor]) -> None:
    probs, _ = case
    torch.testing.assert_close(
        metrics.entropy(probs).double(),
        torch.from_numpy(scipy.stats.entropy(probs.double().numpy(), axis=-1)),
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(metrics.ood_score(probs).numpy(), 1 - probs.double().numpy().max(-1), atol=2e-3)


@given(members())
def test_mutual_information_equals_torch_uncertainty(oracle: Oracle, probs: Tensor) -> None:
    theirs = oracle("torch_uncertainty.metrics.classification").MutualInformation(reduction="none")
    theirs.update(probs.transpose(0, 1))
    ours = metrics.mutual_information(probs)
    torch.testing.assert_close(ours, theirs.compute().reshape(-1), rtol=1e-5, atol=1e-5)
    assert bool((ours >= 0).all())
    if len(probs) == 1:
        assert bool((ours == 0).all())


@pytest.mark.slow
@given(members(fewest=2))
def test_disagreement_equals_torch_uncertainty_and_a_loop_over_pairs(oracle: Oracle, probs: Tensor) -> None:
    theirs = oracle("torch_uncertainty.metrics.classification").Disagreement()
    theirs.update(probs.transpose(0, 1))
    ours = float(metrics.disagreement(probs))
    assert ours == close(float(theirs.compute()), **TOLERANCE)
    top = probs.argmax(-1)
    pairs = [float((a != b).double().mean()) for a, b in itertools.combinations(top, 2)]
    assert ours == close(np.mean(pairs), **TOLERANCE)


def test_disagreement_of_one_member_is_nan() -> None:
    assert metrics.disagreement(torch.tensor([[[0.5, 0.5]]])).isnan()


@pytest.mark.slow
@given(cases(), st.integers(0, 2**31 - 1))
def test_no_figure_depends_on_the_order_of_the_inputs(case: tuple[Tensor, Tensor], seed: int) -> None:
    probs, labels = case
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    for figure in FIGURES:
        shuffled = float(figure(probs[order], labels[order]))
        assert shuffled == close(float(figure(probs, labels)), **TOLERANCE), figure


@pytest.mark.slow
@given(cases())
def test_unchecked_figures_are_the_same(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    for figure in FIGURES:
        assert torch.equal(figure(probs, labels), figure(probs, labels, check=False))


def test_no_figure_waits_for_torchmetrics() -> None:
    """Its import alone takes longer than most evaluations: it is an oracle of these tests."""
    rooms = Path(metrics.__file__).parents[1].rglob("*.py")
    found = [path for path in rooms if re.search(r"^\s*(from|import) torchmetrics", path.read_text(), re.MULTILINE)]
    assert found == []
