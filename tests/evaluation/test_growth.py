"""How many members come near the limit: the Brier score's law by a double sum, and populations of known limits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation import report as reports
from checkpoints_zoo.evaluation.evaluating import Report
from checkpoints_zoo.evaluation.growth import Growth, estimate_growth
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.report import draw_curves, draw_report
from checkpoints_zoo.evaluation.subsets import Population
from tests.support.commands import run, values

MEMBERS = 12


@pytest.fixture(scope="module")
def report() -> Report:
    members = zoo.load("convnet-digits", n=MEMBERS)
    within: dict[str, float | str] = {"nll": 0.01, "brier": "10%", "accuracy": 0.001}
    return zoo.evaluate(members, ood="photos", subsets=20, within=within)


@pytest.fixture(scope="module")
def brier(report: Report) -> tuple[float, float]:
    """The limit of the Brier score, and how far single members are from it, by a sum over pairs."""
    members = zoo.load("convnet-digits", n=MEMBERS)
    digits = zoo.images.load("digits")
    assert digits.labels is not None
    with torch.no_grad():
        inputs = members.preprocess(digits.images)
        errors = np.stack([m.model()(inputs).double().softmax(-1).numpy() for m in members])
    errors = errors - np.eye(10)[digits.labels.numpy()]
    products = [(a * b).sum(-1).mean() for i, a in enumerate(errors) for b in errors[i + 1 :]]
    single = np.mean([(a * a).sum(-1).mean() for a in errors])
    return float(np.mean(products)), float(single - np.mean(products))


@pytest.mark.slow
def test_the_brier_score_is_exact(report: Report, brier: tuple[float, float]) -> None:
    limit, gain = brier
    assert report.limits["brier"].value == pytest.approx(limit, abs=1e-7)
    for within in (0.5 * gain, 0.21 * gain, gain / 12, gain / 12.5, gain / 1000, 2 * gain):
        found = report.needed("brier", within * (1 + 1e-5))
        wanted = max(1, math.ceil(gain / within - 1e-3))
        assert found.extrapolated == wanted
        assert found.members == (wanted if wanted <= MEMBERS else None)
    for size, distance in zip(report.growth["brier"].sizes, report.growth["brier"].distances, strict=True):
        assert distance == pytest.approx(gain / size, abs=1e-7)
    assert report.needed("brier", "10%").within == pytest.approx(limit / 10, rel=1e-6)


@pytest.mark.slow
def test_limit_of_gaussian_logits_of_two_classes() -> None:
    """p = sigmoid(shift + noise): the limit by quadrature, the mean of size k by many draws."""
    generator = torch.Generator().manual_seed(3)
    inputs, members, spread = 150, 48, 1.5
    shift = 1.5 * torch.randn(inputs, generator=generator, dtype=torch.float64) + 1
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    of_label = (1 / (1 + np.exp(-(shift.numpy()[:, None] + spread * points)))) @ (weights / weights.sum())
    limit = float(-np.log(of_label).mean())
    brier = float(2 * ((1 - of_label) ** 2).mean())

    def drawn(*shape: int) -> torch.Tensor:
        return shift + spread * torch.randn(*shape, inputs, generator=generator, dtype=torch.float64)

    # Of r = mean p / its expectation, whose mean is 1: -log r and r - 1 - log r have the same mean.
    ratios = {k: drawn(400, k).sigmoid().mean(1) / torch.from_numpy(of_label) for k in (6, 24)}
    distance = {k: float((r - 1 - r.log()).mean()) for k, r in ratios.items()}
    labels = torch.ones(inputs, dtype=torch.int64)
    covered, right = [], []
    for seed in range(6):
        of_one = drawn(members)
        logits = torch.stack([torch.zeros_like(of_one), of_one], -1)
        plans = {k: metrics.band_plan(members, k, seed, 30) for k in (2, 4, 8, 16, 32)}
        plans[members] = metrics.jackknife_plan(members, seed, 30)
        population = Population(logits, labels, None)
        population.names = ["nll", "brier"]
        singles = population.measure([torch.tensor([i]) for i in range(members)])
        measured = {k: (plan, population.measure(plan.chosen)) for k, plan in plans.items()}
        for name, true in (("nll", limit), ("brier", brier)):
            at = population.names.index(name)
            found = estimate_growth(name, singles[:, at], {k: (plan, x[:, at]) for k, (plan, x) in measured.items()})
            assert found.limit.low is not None
            assert found.limit.high is not None
            covered.append(found.limit.low <= true <= found.limit.high)
            if name == "nll":
                for k, within in distance.items():
                    needed = found.needed(name, within)
                    assert needed.members == pytest.approx(k, rel=0.35)
                    assert needed.low is not None
                    right.append(needed.low <= k <= (needed.high or math.inf))
    assert sum(covered) >= 10  # of 12 intervals of 95 %
    assert sum(right) >= 10


def smooth(*distances: float, spread: float | None = None, noise: float = 0.0) -> Growth:
    sizes = [2**i for i in range(len(distances))]
    return Growth(sizes, distances, Interval(1.0, None, None), spread, [noise] * len(sizes))


def test_between_sizes_the_distance_is_straight_in_1_over_k() -> None:
    law = smooth(*(0.6 / 2**i for i in range(6)))  # to 32
    for size in range(1, 200):
        assert law.needed("nll", 0.6 / size).extrapolated == size
        assert law.needed("nll", 0.6 / size).members == (size if size <= 32 else None)
        assert law.needed("nll", 0.6 / (size + 0.01)).extrapolated == size + 1
    other = smooth(1.0, 0.4, 0.3)  # between 2 and 4: 0.3 + 0.1 * (1/k - 1/4) * 4
    assert other.needed("nll", 0.3 + 0.1 * (1 / 3 - 1 / 4) * 4).extrapolated == 3


def test_a_size_counts_if_no_larger_size_is_farther_away() -> None:
    crossing = smooth(-0.5, 0.01, 0.2, 0.02)
    assert crossing.needed("ece", 0.1).members == 6  # not 2: four members are 0.2 off
    assert smooth(0.0, 0.0, 0.0).needed("nll", 1e-9).members == 1


def test_intervals_of_the_number() -> None:
    found = smooth(*(1 / 2**i for i in range(5)), spread=0.5).needed("nll", 0.1)
    assert (found.low, found.members, found.high) == (5, 10, 15)
    assert str(found) == "10 [5, 15]"
    far = smooth(*(1 / 2**i for i in range(5)), spread=0.5).needed("nll", 0.01)
    assert (far.low, far.members, far.high, far.extrapolated) == (50, None, 150, 100)
    assert str(far) == "more than 16, about 100 by 1/k [50, 150]"
    noisy = smooth(1.0, 0.5, 0.25, spread=0.1, noise=0.3).needed("accuracy", 0.25)
    assert (noisy.members, noisy.high) == (4, None)
    assert str(noisy) == f"4 [{noisy.low}, …]"
    assert smooth(1.0, 0.5, spread=2.0).needed("nll", 0.6).low == 1
    assert str(smooth(1.0, 0.5).needed("nll", 0.5)) == "2"


@pytest.mark.parametrize("count", [2, 3])
def test_few_members(count: int) -> None:
    report = zoo.evaluate(zoo.load("convnet-digits", n=count), subsets=5)
    found = report.needed("brier", 1e-3)
    assert found.members is None
    assert found.extrapolated > count
    assert found.low is None
    assert report.needed("nll", 100).members == 1


def test_one_member_has_no_limit() -> None:
    report = zoo.evaluate(zoo.load("convnet-digits", n=1))
    assert report.limits == {}
    with pytest.raises(UsageError, match="limits of figures: expected two members or more; found one"):
        report.needed("nll", 0.1)


def test_the_measured_sizes_do_not_change_the_answer_for_the_brier_score(report: Report) -> None:
    other = zoo.evaluate(zoo.load("convnet-digits", n=MEMBERS), sizes=[5], subsets=20)
    assert other.needed("brier", 0.002) == report.needed("brier", 0.002)
    assert other.growth["nll"].sizes == (1, 5, 6, 12)
    assert other.limits["nll"].value == pytest.approx(report.limits["nll"].value, abs=2e-3)


@pytest.mark.parametrize(
    ("figure", "within", "text"),
    [
        ("nlll", 0.1, "limit of figure 'nlll': expected one of accuracy, nll, "),
        ("disagreement", 0.1, "found a mean over pairs, the same for every size."),
        (
            "nll",
            0,
            'distance of nll from its limit: expected a number above 0, or a percentage of the limit such as "5%"',
        ),
        ("nll", "-5%", "found '-5%'."),
        ("nll", "five", "found 'five'."),
        ("nll", math.inf, "found inf."),
        ("nll", None, "found None."),
    ],
)
def test_bad_distances_are_refused(report: Report, figure: str, within: float, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        report.needed(figure, within)
    assert text in str(caught.value)
    with pytest.raises(UsageError) as caught:  # before anything is run
        zoo.evaluate(zoo.load("convnet-digits", n=2), within={figure: within})
    assert text.partition("one of")[0] in str(caught.value)


def test_the_report_shows_the_members_needed(report: Report) -> None:
    facts = json.loads(report.to_json())
    assert [x["figure"] for x in facts["needed"]] == ["nll", "brier", "accuracy"]
    assert facts["needed"][1]["extrapolated"] == report.needed("brier", "10%").extrapolated
    limits = {x["figure"]: x["value"] for x in facts["limits"]}
    assert limits == {name: x.value for name, x in report.limits.items()}
    assert set(limits) == set(report.ensemble) - {"disagreement"}


def lines_at(axes: Any, style: str) -> list[float]:
    return [float(line.get_xdata()[0]) for line in axes.lines if line.get_linestyle() == style]


@pytest.mark.slow
def test_the_pictures_mark_the_members_needed(report: Report, tmp_path: Path) -> None:
    found = report.needed("nll", 0.01)
    panels: dict[str, Any] = {str(axes.get_label()): axes for axes in draw_report(report).axes}
    assert lines_at(panels["nll"], ":") == [found.members]
    assert [t.get_text() for t in panels["nll"].get_legend().get_texts()] == [f"within 0.01: {found}"]
    dashed = [line.get_ydata()[0] for line in panels["nll"].lines if line.get_linestyle() == "--"]
    assert dashed == [report.limits["nll"].value]
    assert f"NLL within 0.01: {found}; Brier within" in str(draw_report(report).get_supxlabel()).replace("\n", " ")
    every: dict[str, Any] = {str(axes.get_label()): axes for axes in draw_curves(report).axes}
    assert list(every) == list(report.ensemble)
    for name, axes in every.items():
        scale = 100 if name == "accuracy" else 1
        known = [report.curve[size][name].value * scale for size in report.curve]
        assert list(axes.lines[0].get_ydata()) == pytest.approx(known, nan_ok=True)
    assert [axes.get_label() for axes in draw_curves(report, ["auroc", "ece"]).axes] == ["auroc", "ece"]
    assert report.plot_curves(tmp_path / "c.png", ["brier"]).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="figure 'temperature': expected one of accuracy, "):
        report.plot_curves(tmp_path / "d.png", ["temperature"])
    with pytest.raises(UsageError, match="figures of a picture: expected one or more; found none"):
        report.plot_curves(tmp_path / "d.png", [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["brier"], ["brier", "auroc"], ["ace", "mi_ood", "nll"], ["accuracy", "nll", "ece", "ace", "aupr", "mi_id"]],
)
def test_pictures_of_curves_hold_their_text_and_speak_of_their_figures(
    report: Report, names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(
        reports, "draw_curves", lambda report, names: figures.append(draw_curves(report, names)) or figures[0]
    )
    report.plot_curves(tmp_path / "c.png", names)
    figure = figures[0]
    notes = figure.get_supxlabel()
    texts = [*figure.texts, *figure.legends[0].get_texts(), *(axes.yaxis.label for axes in figure.axes)]
    assert {id(text) for text in texts} >= {id(figure._supxlabel), id(figure._suptitle)}
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert box.y1 <= figure.bbox.y1, text
    for axes in figure.axes:
        assert axes.yaxis.label.get_window_extent().height < axes.get_window_extent().height
        assert axes.get_window_extent().y1 < figure.legends[0].get_window_extent().y0
    # A bar of all members is drawn for figures that have an interval for 12 members.
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    has_bar = any(report[name].low is not None for name in names)
    assert entries == ["mean of that size", "a new ensemble", *(["all members"] if has_bar else [])]
    words = {
        "accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": " ECE", "ace": "ACE", "auroc": "AUROC",
        "aupr": "AUPR", "adaptive_ece": "adaptive ECE", "mi_id": "mutual information, ID",
        "mi_ood": "mutual information, OOD", "disagreement": "disagreement", "fpr95": "FPR95", "aurc": "AURC",
    }  # fmt: skip
    # "accuracy" is also a word of the sentence on calibration.
    absent = [words[name] for name in report.ensemble if name not in (*names, "accuracy")]
    assert not [word for word in absent if word in notes.replace("\n", " ")]


@pytest.mark.slow
def test_the_command_line_prints_the_members_needed(tmp_path: Path) -> None:
    asked = ("convnet-digits", "-n", "4", "--sizes", "2")
    result = run("evaluate", *asked, "--within", "brier=0.002", "--within", "accuracy=0.05")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("members needed")]
    assert lines[0].startswith("members needed for Brier within 0.002 of its limit 0.0")
    few = zoo.evaluate(zoo.load("convnet-digits", n=4), sizes=[2])
    assert lines[0].endswith(f": {few.needed('brier', 0.002)}")
    assert lines[1].startswith("members needed for accuracy within 5 % of its limit 98.")
    wrong = run("evaluate", *asked, "--within", "brier")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "'brier' is no FIGURE=DISTANCE such as nll=0.01." in wrong.stderr
    drawn = run("plot", *asked, "--figures", "brier,ece", "--within", "brier=0.01", "-o", tmp_path / "c.png")
    assert drawn.stdout == f"{tmp_path}/c.png\n"
    assert values(run("plot", *asked, "--figures", "all", "-o", tmp_path / "d.png", "--format", "json"))
    refused = run("plot", *asked, "--figures", "beauty", "-o", tmp_path / "e.png")
    assert refused.exit_code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.png", "d.png"]


@pytest.mark.parametrize("spread", [1e7, 1e299, math.inf, math.nan])
def test_no_bounds_if_halves_are_no_better_than_members(spread: float) -> None:
    found = Growth((1, 4), (0.8, 0.2), Interval(0.1, None, None), spread, (0.0, 0.0)).needed("nll", 0.1)
    assert (found.low, found.high, found.extrapolated) == (1, None, 8)
