"""Agreement and total variation against loops and torchmetrics; AURC of ties against the mean over their orders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import torchmetrics.functional.classification as torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cityblock
from scipy.stats import wasserstein_distance
from torch import Tensor

from checkpoints_zoo.evaluation import metrics
from tests.evaluation.test_metrics import cases

TOLERANCE = {"rel": 1e-5, "abs": 1e-5}


def tied_risks(confidence: np.ndarray, wrong: np.ndarray) -> float:
    """AURC, each of the inputs of equal confidence as wrong as all of them: the mean over their orders."""
    shared = np.array([wrong[confidence == c].mean() for c in confidence])[np.argsort(-confidence, kind="stable")]
    count = len(wrong)
    risks = np.cumsum(shared) / np.arange(1, count + 1)
    if count == 1:
        return float(risks[0])
    return float(np.trapezoid(risks, np.arange(1, count + 1) / count) / (1 - 1 / count))


def test_the_mean_over_orders_by_all_orders() -> None:
    """The loop above itself, on few enough inputs to try every order of the ties."""
    confidence, wrong = np.array([0.9, 0.7, 0.7, 0.7, 0.5, 0.5]), np.array([0.0, 1, 0, 1, 1, 0])
    areas = []
    for first, last in itertools.product(itertools.permutations([1, 2, 3]), itertools.permutations([4, 5])):
        risks = np.cumsum(wrong[[0, *first, *last]]) / np.arange(1, 7)
        areas.append(np.trapezoid(risks, np.arange(1, 7) / 6) / (1 - 1 / 6))
    assert tied_risks(confidence, wrong) == pytest.approx(np.mean(areas), abs=1e-12)


@given(cases())
@settings(max_examples=60)
def test_aurc_with_ties_equals_the_loop(case: tuple[Tensor, Tensor]) -> None:
    probs, labels = case
    confidence, top = (x.numpy() for x in probs.max(-1))
    assert float(metrics.aurc(probs, labels)) == pytest.approx(
        tied_risks(confidence, top != labels.numpy()), **TOLERANCE
    )


@given(cases(), st.integers(0, 2**31 - 1))
@settings(max_examples=60)
def test_agreement_and_total_variation_equal_loops_and_torchmetrics(case: tuple[Tensor, Tensor], seed: int) -> None:
    probs, _ = case
    inputs, classes = probs.shape
    others = probs[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    agreement = float(metrics.agreement(probs, others))
    first = [[row.index(max(row)) for row in side.tolist()] for side in (probs, others)]
    assert agreement == pytest.approx(np.mean([a == b for a, b in zip(*first, strict=True)]), **TOLERANCE)
    theirs = torchmetrics.multiclass_accuracy(probs, others.argmax(-1), classes, average="micro")
    assert agreement == pytest.approx(float(theirs), **TOLERANCE)
    assert agreement == metrics.accuracy(probs, others.argmax(-1)) == metrics.agreement(others, probs)
    apart = [cityblock(p, q) / 2 for p, q in zip(probs.double().numpy(), others.double().numpy(), strict=True)]
    assert float(metrics.total_variation(probs, others)) == pytest.approx(np.mean(apart), **TOLERANCE)
    assert metrics.total_variation(probs, probs) == 0
    assert metrics.agreement(probs, probs) == 1
    assert metrics.agreement(probs, others).dtype == metrics.total_variation(probs, others).dtype == probs.dtype


def test_predictives_without_any_agreement() -> None:
    sure = torch.eye(3)[torch.tensor([0, 1, 2, 0])]
    assert metrics.total_variation(sure, sure.roll(1, -1)) == 1
    assert metrics.agreement(sure, sure.roll(1, -1)) == 0
    flat = torch.full_like(sure, 1 / 3)  # level: the first class counts
    assert float(metrics.agreement(flat, sure)) == 0.5
    assert float(metrics.total_variation(flat, sure)) == pytest.approx(2 / 3, abs=1e-6)


@pytest.mark.parametrize("figure", [metrics.agreement, metrics.total_variation])
def test_predictives_of_other_shapes_are_refused(figure: object) -> None:
    halves = torch.full((2, 2), 0.5)
    for others, text in (
        (halves[:1], "others: expected shape (2, 2), as probs; found shape (1, 2). Give both on the same inputs and"),
        (halves * 3, "probs: expected a sum of 1 over the classes; found 3. Give all classes, normalised."),
    ):
        with pytest.raises(ValueError, match="expected") as error:
            figure(halves, others)  # type: ignore[operator]
        assert str(error.value).startswith(text)


def test_wasserstein_is_scipys() -> None:
    """Of order 1 as the organisers' of the competition, which they call W2; of order 2 by hand, and by a Gaussian."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(7, 50)), rng.normal(0.3, 2.0, (7, 50))
    tensors = torch.from_numpy(first), torch.from_numpy(second)
    theirs = np.mean([wasserstein_distance(p, q) for p, q in zip(first, second, strict=True)])
    assert float(metrics.wasserstein(*tensors, order=1)) == pytest.approx(theirs, abs=1e-12)
    by_hand = [math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(sorted(p), sorted(q), strict=True)) / 50)
               for p, q in zip(first, second, strict=True)]  # fmt: skip
    assert float(metrics.wasserstein(*tensors)) == pytest.approx(np.mean(by_hand), abs=1e-12)
    shifted = metrics.wasserstein(tensors[0], tensors[0].flip(-1) + 3)
    assert float(shifted) == pytest.approx(3, abs=1e-12)
    for samples, others, order, text in (
        (tensors[0], tensors[1][:, :4], 2, "others: expected shape"), (tensors[0][0], tensors[1], 2, "samples"),
        (tensors[0], tensors[1] * math.nan, 2, "others"), (*tensors, 0, "order: expected 1 or more; found 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            metrics.wasserstein(samples, others, order)
