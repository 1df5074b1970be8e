"""Figures and intervals hold what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from sklearn.metrics import roc_auc_score

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.subsets import Population


def test_ece_and_the_reliability_diagram_have_the_same_bins() -> None:
    """Case 12: confidence 1 is in the last bin of both."""
    probs = torch.tensor([[1.0, 0.0], [0.95, 0.05]]).repeat_interleave(10, 0)
    labels = torch.tensor([1] * 10 + [0] * 10)
    confidence, accuracy, inputs = metrics.reliability(probs, labels)
    held = inputs > 0
    assert inputs.tolist() == [0] * 14 + [20]
    bars = float(((confidence - accuracy).abs() * inputs)[held].sum() / 20)
    assert bars == pytest.approx(0.475)
    assert float(metrics.ece(probs, labels)) == pytest.approx(bars)


@pytest.mark.parametrize("factor", [1.0, 10.0, 50.0])
@pytest.mark.parametrize("members", [1, 5])
def test_inputs_keep_their_order_where_probabilities_round_to_1(factor: float, members: int) -> None:
    """Case 12: AUROC and FPR by scores computed in float64 and in logs, as numpy, scipy and scikit-learn have them."""
    generator = torch.Generator().manual_seed(members)
    labels = torch.randint(4, (300,), generator=generator)
    inside = torch.randn(members, 300, 4, generator=generator) * 0.5 + 3 * torch.nn.functional.one_hot(labels, 4)
    outside = torch.randn(members, 200, 4, generator=generator) + 2 * torch.nn.functional.one_hot(
        torch.randint(4, (200,), generator=generator), 4
    )
    logits = [factor * inside, factor * outside]
    population = Population(logits[0], labels, logits[1])
    row = dict(zip(population.names, population.measure([torch.arange(members)])[0].tolist(), strict=True))

    scores = []
    for some in logits:
        values = some.numpy().astype(np.float64)
        log_probs = values - logsumexp(values, axis=-1, keepdims=True)
        means = logsumexp(log_probs, axis=0) - np.log(members)
        order = np.sort(means, axis=-1)
        scores.append(logsumexp(order[:, :-1], axis=-1))
    truth = np.repeat([0, 1], [300, 200])
    assert row["auroc"] == pytest.approx(roc_auc_score(truth, np.concatenate(scores)), abs=2e-5)
    threshold = np.sort(scores[1])[200 // 20]
    assert row["fpr95"] == pytest.approx(float((scores[0] >= threshold).mean()), abs=1 / 300 + 1e-9)
    means = torch.stack([x.double().softmax(-1).mean(0) for x in logits[:1]])[0]
    wrong = (means.argmax(-1) != labels).numpy()[np.argsort(scores[0], kind="stable")]
    risk = np.cumsum(wrong) / np.arange(1, 301)
    assert row["aurc"] == pytest.approx(float((risk.sum() - (risk[0] + risk[-1]) / 2) / 299), abs=2e-5)


def test_saturated_probabilities_have_scores_in_their_order() -> None:
    """Case 12: in float32 1 − 1e-9 is 1; the sum of the other probabilities tells two inputs apart."""
    probs = torch.tensor([[1.0, 1e-9, 0.0], [1.0, 1e-12, 0.0], [0.7, 0.2, 0.1]])
    assert metrics.ood_score(probs).tolist() == pytest.approx([1e-9, 1e-12, 0.3])
    assert float(metrics.auroc(metrics.ood_score(probs[:2]), torch.tensor([True, False]))) == 1


def test_logits_ten_times_as_large_keep_the_order_of_single_members() -> None:
    """Case 12: softmax of ten times the logits of one member has other confidences; AUROC need not be the same, but
    inputs that it tells apart must not become ties."""
    members = zoo.load("convnet-digits", n=1)
    inside, outside = (zoo.predictions.logits(members, zoo.images.load(n)) for n in ("digits", "photos"))
    labels = zoo.images.load("digits").labels
    assert labels is not None
    population = Population(10 * inside, labels, 10 * outside)
    uncertainty = population.test.uncertainty(torch.tensor([0]), (10 * inside[0]).softmax(-1).amax(-1))
    assert len(uncertainty.unique()) > 0.99 * len(labels)


SMOOTH = ("nll", "brier", "mi_id", "mi_ood", "disagreement")


def simulated(kind: str, members: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of random members on 40 inputs and on 40 out of distribution; of "mixed" ones a tenth is far worse."""
    fixed = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=fixed)
    signal = torch.nn.functional.one_hot(labels, 3) * 4 * torch.rand(40, 1, generator=fixed)
    means = signal + 0.7 * torch.randn(40, 3, generator=fixed), 0.7 * torch.randn(40, 3, generator=fixed)
    spread = {
        "plain": torch.ones(members),
        "mixed": torch.where(torch.rand(members, generator=generator) < 0.1, 4.0, 1.0),
        "skewed": torch.exp(0.6 * torch.randn(members, generator=generator)),
    }[kind][:, None, None]
    inside, outside = (mean + spread * torch.randn(members, 40, 3, generator=generator) for mean in means)
    return inside, outside


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "mixed", "skewed"])
@pytest.mark.parametrize("members", [16, 64])
def test_intervals_cover_the_figures_of_the_population(kind: str, members: int) -> None:
    """Case 13: 93 % or more, less two standard errors of 120 repetitions, or there is no interval and a line says why.

    The truth: means over 300 other ensembles of that size, over 3,000 members, and the ensemble of these.
    """
    from checkpoints_zoo.evaluation import evaluating
    from checkpoints_zoo.evaluation.metrics import band_plan, jackknife_plan

    fixed = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=fixed)
    generator = torch.Generator().manual_seed(members)
    large = Population(*(lambda inside, outside: (inside, labels, outside))(*simulated(kind, 3000, generator)))
    subsets = [torch.randperm(3000, generator=generator)[:members] for _ in range(300)]
    expected = dict(zip(large.names, large.measure(subsets).mean(0).tolist(), strict=True))
    limits = dict(zip(large.names, large.measure([torch.arange(3000)])[0].tolist(), strict=True))
    singles = large.measure([torch.tensor([i]) for i in range(3000)]).nanmean(0)
    means = dict(zip(large.names, singles.tolist(), strict=True))

    hits: dict[str, list[bool]] = {}
    for seed in range(120):
        inside, outside = simulated(kind, members, generator)
        sample = Population(inside, labels, outside)
        sizes = [2**i for i in range(7) if 2**i < members]
        plans = {k: band_plan(members, k, seed, 40) for k in sizes}
        plans[members] = jackknife_plan(members, seed, 40, skewness=True)
        chosen = [torch.tensor([i]) for i in range(members)] + [c for plan in plans.values() for c in plan.chosen]
        summary = evaluating._summarise(sample.names, sample.measure(chosen), plans, seed)
        found = {f"{n} of the ensemble": (summary["ensemble"][n], expected[n]) for n in SMOOTH}
        found |= {f"{n} of members": (x, means[n]) for n, x in summary["member"].items() if n in SMOOTH}
        found |= {f"limit of {n}": (x.limit, limits[n]) for n, x in summary["growth"].items() if n in SMOOTH}
        for name, (interval, truth) in found.items():
            if interval.low is not None and interval.high is not None:
                hits.setdefault(name, []).append(interval.low <= truth <= interval.high)
    if members < metrics.FEWEST_SKEWED:
        assert hits == {}
    else:
        coverage = {name: float(np.mean(inside)) for name, inside in hits.items()}
        assert min(coverage.values()) > 0.93 - 2 * (0.93 * 0.07 / 120) ** 0.5, coverage
        assert len(coverage) == 2 + 2 + 4 + 3


def test_a_report_says_which_intervals_it_leaves_out() -> None:
    """Case 13: and why; with 32 members there are all."""
    few, many = (zoo.evaluate(zoo.load("convnet-digits", n=n), "digits", sizes=[1], subsets=5) for n in (16, 32))
    assert few["nll"].low is few.limits["nll"].low is few.member["accuracy"].low is None
    assert few["accuracy"].low is not None
    assert few.remarks[0] == (
        "No intervals of limits, of means of members, and of the ensemble's NLL; Brier score; mutual information, ID; "
        "disagreement: they need 32 members or more. If a tenth of the population is far worse than the others, 19 % "
        "of samples of 16 members have none of these, and an interval would miss the truth."
    )
    assert many["nll"].low is not None
    assert many.limits["nll"].low is not None
    assert not any(line.startswith("No intervals") for line in many.remarks)
