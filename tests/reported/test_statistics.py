"""Figures and intervals hold what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist
from scipy.special import logsumexp
from sklearn.metrics import roc_auc_score
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.subsets import Population
from checkpoints_zoo.populations.independent_units import Exchange, draw_one_member_per_unit, unit_numbers
from checkpoints_zoo.populations.kernels import Distances


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


SMOOTH_FIGURES = ("nll", "brier", "mi_id", "mi_ood", "disagreement")


class Smooth(Population):
    """A population of which the smooth figures alone are measured."""

    def __init__(self, *arguments: Tensor) -> None:
        super().__init__(*arguments)
        self.names = [name for name in self.names if name in SMOOTH_FIGURES]
        for logits in (self.test, self.ood):
            logits.uncertainty = lambda members, largest: largest  # no smooth figure needs it


def simulated(kind: str, members: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of random members on 40 inputs and on 40 out of distribution; of "mixed" ones a tenth is far worse."""
    fixed = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=fixed)
    signal = torch.nn.functional.one_hot(labels, 3) * 4 * torch.rand(40, 1, generator=fixed)
    means = signal + 0.7 * torch.randn(40, 3, generator=fixed), 0.7 * torch.randn(40, 3, generator=fixed)
    spread = {
        "mixed": torch.where(torch.rand(members, generator=generator) < 0.1, 4.0, 1.0),
        "skewed": torch.exp(0.6 * torch.randn(members, generator=generator)),
    }[kind][:, None, None]
    inside, outside = (mean + spread * torch.randn(members, 40, 3, generator=generator) for mean in means)
    return inside, outside


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "members"), [("skewed", 32), ("mixed", 64)])
def test_intervals_cover_the_figures_of_the_population(kind: str, members: int) -> None:
    """Case 13: 93 % or more, less two standard errors of the repetitions.

    The truth: means over 200 other ensembles of that size, over 1,500 members, and the ensemble of these. Of 32 mixed
    members, which have intervals too, 3 % of samples have none of the far worse tenth and can't cover the truth.
    """
    from checkpoints_zoo.evaluation import evaluating
    from checkpoints_zoo.evaluation.metrics import band_plan, jackknife_plan

    repetitions, population = 40, 1500
    fixed = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (40,), generator=fixed)
    generator = torch.Generator().manual_seed(members)
    inside, outside = simulated(kind, population, generator)
    large = Smooth(inside, labels, outside)
    subsets = [torch.randperm(population, generator=generator)[:members] for _ in range(200)]
    expected = dict(zip(large.names, large.measure(subsets).mean(0).tolist(), strict=True))
    limits = dict(zip(large.names, large.measure([torch.arange(population)])[0].tolist(), strict=True))
    singles = large.measure([torch.tensor([i]) for i in range(population)]).nanmean(0)
    means = dict(zip(large.names, singles.tolist(), strict=True))

    hits: dict[str, list[bool]] = {}
    for seed in range(repetitions):
        inside, outside = simulated(kind, members, generator)
        sample = Smooth(inside, labels, outside)
        sizes = [2**i for i in range(7) if 2**i < members]
        plans = {k: band_plan(members, k, seed, 12) for k in sizes}
        plans[members] = jackknife_plan(members, seed, 40, skewness=True)
        chosen = [torch.tensor([i]) for i in range(members)] + [c for plan in plans.values() for c in plan.chosen]
        summary = evaluating._summarise_figures(sample.names, sample.measure(chosen), plans, seed)
        found = {f"{n} of the ensemble": (summary["ensemble"][n], expected[n]) for n in SMOOTH_FIGURES}
        found |= {f"{n} of members": (x, means[n]) for n, x in summary["member"].items() if n in SMOOTH_FIGURES}
        found |= {f"limit of {n}": (x.limit, limits[n]) for n, x in summary["growth"].items() if n in SMOOTH_FIGURES}
        for name, (interval, truth) in found.items():
            if interval.low is not None and interval.high is not None:
                hits.setdefault(name, []).append(interval.low <= truth <= interval.high)
    coverage = {name: float(np.mean(inside)) for name, inside in hits.items()}
    assert min(coverage.values()) > 0.93 - 2 * (0.93 * 0.07 / repetitions) ** 0.5, coverage
    assert len(coverage) == 2 + 2 + 4 + 3


@pytest.mark.slow
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


# Case 11: dependent draws.


def near_copies(members: zoo.Collection, copies: int, out: Path, name: str = "copies") -> zoo.Collection:
    """Draws of a method with one run for each member: the member and noise of a thousandth of its weights."""
    generator = torch.Generator().manual_seed(0)
    stacked = {
        n: t.repeat_interleave(copies, 0) * (1 + 1e-3 * torch.randn(len(t) * copies, *t.shape[1:], generator=generator))
        for n, t in members.stack().items()
    }
    return zoo.from_samples(
        stacked, "convnet", method="swag", out=out, like="convnet-digits", name=f"{name}-swag-multi",
        run=[run for run in range(len(members)) for _ in range(copies)],
    )  # fmt: skip


def test_copies_of_members_are_not_more_evidence_than_the_members(tmp_path: Path) -> None:
    """Case 11: ten members, each ten times, against 54 others had p <= 0.01; they differ as little as the ten."""
    members = zoo.load("convnet-digits")
    copies = near_copies(members[:10], 10, tmp_path)
    result = zoo.ns(copies, members[10:], permutations=199)
    for found in (result.mmd, result.ns):
        assert {name: p for name, x in found.groups.items() if (p := x.p_value) is None or p <= 0.01} == {}
    # The estimate is that of all draws; the test is one of ten draws, one of each run.
    assert result.mmd.members == (100, 54)
    test = zoo.corollary(copies)
    assert [member // 10 for member in test.ids] == list(range(10))
    assert test.p > 0.01


@pytest.mark.slow
def test_p_values_of_one_run_and_of_shared_runs_do_not_exist(tmp_path: Path) -> None:
    """Case 11: draws of one run are one unit; a unit in both sets makes the sets depend on each other."""
    members = zoo.load("convnet-digits", n=8)
    copies = near_copies(members[:3], 4, tmp_path)
    for first, second in ((copies[:4], members[4:]), (copies[:6], copies[6:]), (members[:4], members[3:])):
        result = zoo.mmd(first, second, permutations=9)
        assert result.p_value is None
        assert {x.p_value for x in result.groups.values()} == {None}
        assert [row["p_value"] for row in result.rows()] == [None] * len(result.groups)
        assert json.loads(result.to_json())["groups"][0]["p_value"] is None
        assert result.plot(tmp_path / "mmd.png").is_file()
    with pytest.raises(UsageError) as error:
        zoo.corollary(copies[:4])
    assert str(error.value) == (
        "draws of copies-swag-multi: expected two runs or more; found 4 of 1 run."
        " Select draws of several runs: draws of one run share its start."
    )
    # Without a second set, runs are halved and not the draws of each run.
    assert zoo.mmd(copies, permutations=9).members == (8, 4)


@pytest.mark.slow
def test_a_comparison_has_p_values_of_runs_alone(tmp_path: Path) -> None:
    """Case 11: one mode has none, multi mode those of one draw a run, and the tables say so."""
    members = zoo.load("convnet-digits", n=18)
    comparison = zoo.compare(
        members[6:], (), ood="none", draws={"copies": near_copies(members[:6], 6, tmp_path)}, out=tmp_path / "out",
        permutations=99, workers=1,
    )  # fmt: skip
    one, multi = (comparison["copies", mode] for mode in ("one", "multi"))
    assert (one["mmd"].p, one["ns"].p, one.corollary, one.corollary_layers) == (None, None, None, {})
    for name in ("mmd", "ns"):
        assert multi[name].p is not None
        assert multi[name].p > 0.01
        assert {x.p for x in one.layers[name].values()} == {None}
    assert multi.corollary is not None
    assert multi.corollary > 0.01
    assert "One mode is a single run, and has no p-value." in comparison.to_text()
    lines = [line.split() for line in comparison.to_text().split("p-values:\n")[1].splitlines()]
    assert lines[1] == ["copies", "one", "mode", "-", "-", "-"]


def distances(x: np.ndarray) -> Distances:
    l2, l1 = (torch.from_numpy(cdist(x, x, kind)) for kind in ("sqeuclidean", "cityblock"))
    return Distances(x.shape[1], l2, l1)


@pytest.mark.parametrize(
    ("first", "second"),
    [([5] * 6, [1] * 20), ([4] * 5, [4] * 7), ([1, 2, 3, 9], [1] * 9), ([30, 1, 1], [2, 2, 2, 2])],
    ids=["runs against members", "runs against runs", "uneven runs", "one long run"],
)
def test_p_values_of_dependent_draws_are_uniform_where_runs_are_alike(first: list[int], second: list[int]) -> None:
    """Case 11: simulation of the null. Draws of a run lie within a hundredth of the distance between runs."""
    random = np.random.default_rng(0)
    p_values = []
    for repetition in range(300):
        runs = first + second
        centres = np.repeat(random.normal(size=(len(runs), 3)), runs, axis=0)
        x = centres + 0.01 * random.normal(size=centres.shape)
        numbers = [unit for unit, size in enumerate(runs) for _ in range(size)]
        exchange = Exchange.of_units(numbers[: sum(first)], numbers[sum(first) :], repetition)
        assert exchange is not None
        p_values.append(exchange.test(distances(x), "pooled", {"gaussian": [1.0], "laplace": [3.0]}, 39, repetition))
    # p takes the values 1/40, ..., 40/40 with the same probability; ties may only make it larger.
    counts = [sum(p <= level for p in p_values) for level in (0.05, 0.1, 0.25, 0.5)]
    for count, level in zip(counts, (0.05, 0.1, 0.25, 0.5), strict=True):
        assert stats.binomtest(count, len(p_values), level).pvalue > 1e-3, (level, count)


def test_whole_runs_are_exchanged_where_all_are_as_long() -> None:
    """Case 11: against an enumeration of all exchanges of three runs of two draws with three others."""
    random = np.random.default_rng(3)
    x = np.repeat(random.normal(size=(6, 4)), 2, axis=0) + 0.1 * random.normal(size=(12, 4))
    exchange = Exchange.of_units([0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], seed=0)
    assert exchange is not None
    assert exchange.positions.tolist() == list(range(12))
    kernel = np.exp(-cdist(x, x, "sqeuclidean"))

    def mmd2(runs: tuple[int, ...]) -> float:
        first = [2 * run + i for run in runs for i in (0, 1)]
        second = [i for i in range(12) if i not in first]
        within = [(kernel[np.ix_(s, s)].sum() - 6) / 30 for s in (first, second)]
        return float(sum(within) - 2 * kernel[np.ix_(first, second)].mean())

    every = [mmd2(runs) for runs in itertools.combinations(range(6), 3)]
    share = np.mean([value >= every[0] - 1e-12 for value in every])
    p = exchange.test(distances(x), "pooled", {"gaussian": [1.0]}, 4999, 1)
    assert p == pytest.approx(share, abs=4 * np.sqrt(0.25 / 5000))


def test_units_are_runs_members_and_equal_contents(tmp_path: Path) -> None:
    """Case 11: what counts as one unit."""
    members = zoo.load("convnet-digits", n=4)
    copies = near_copies(members[:2], 3, tmp_path)
    assert unit_numbers(members, copies) == [[0, 1, 2, 3], [4, 4, 4, 5, 5, 5]]
    same = zoo.from_samples(
        {n: t[torch.tensor([0, 1, 0])] for n, t in members.stack().items()}, "convnet", method="hmc", out=tmp_path,
        like="convnet-digits", name="same-hmc-multi", run=[0, 1, 2],
    )  # fmt: skip
    assert unit_numbers(same, members) == [[0, 1, 0], [0, 1, 2, 3]]  # the same weights are one unit
    unnamed = zoo.from_samples(
        list(near(members).values()), "convnet", method="swag", out=tmp_path, like="convnet-digits", name="no-swag"
    )
    assert unit_numbers(unnamed) == [[0, 0, 0]]
    chosen = draw_one_member_per_unit([0, 0, 0, 1, 2, 2], seed=1)
    assert [int(position > 2) + int(position > 3) for position in chosen] == [0, 1, 2]


def near(members: zoo.Collection) -> dict[int, dict[str, Tensor]]:
    """Three draws about the first member."""
    state = members[0].state_dict()
    return {i: {n: t * (1 + i / 1000) for n, t in state.items()} for i in range(3)}
