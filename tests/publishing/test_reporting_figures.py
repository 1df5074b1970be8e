"""The figures of a report page are those of the rooms it asks, or of sums by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.predictions import predict
from checkpoints_zoo.publishing.html_report import detection, measurements
from checkpoints_zoo.publishing.html_report.definitions import TERMS
from tests.support.few_digits import some
from tests.support.report_pages import column, digits_page, draw_only, few, photos, plain, table
from tests.support.scenarios import Built, build, load

Oracle = Callable[[str], ModuleType]


def test_figures_are_those_of_evaluate_and_pairwise() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    report = zoo.evaluate(members, some("test", 90), photos(), subsets=4)
    figures = table(page, "all-figures")
    assert figures.header == ("", "unit", "mean of members", "ensemble of 4", "ensemble of 6")
    cells = {plain(row[0]).rstrip(" ↑↓"): [plain(c) for c in row[1:]] for row in figures.rows if len(row) > 1}
    for name, known in report.ensemble.items():
        scale = 100 if name == "accuracy" else 1
        unit, mean, four, six = cells[TERMS[name][0]]
        assert (four, six) == (as_text(report.curve[4][name], scale), as_text(known, scale))
        assert mean == (as_text(report.member[name], scale) if name in report.member else "–")
        assert unit == ("%" if name == "accuracy" else FIGURES[name].unit.replace("..", "–"))
    assert len(cells) == len(report.ensemble) == len(FIGURES)

    pairs = zoo.pairwise(members, some("test", 90), photos())
    frame = pairs.to_frame()
    for title, name, scale in (
        ("information, ID (nats)", "mi_id", 1), ("disagreement, ID (%)", "disagreement", 100),
        ("information, OOD (nats)", "mi_ood", 1),
    ):  # fmt: skip
        np.testing.assert_allclose(column(page, "pairs-numbers", title), scale * frame[name], rtol=1e-3)
    assert [plain(row[2]) for row in table(page, "pairwise").rows] == [as_text(x) for x in pairs.figures.values()]


@pytest.mark.slow
def test_values_are_those_of_the_reports_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    members, asked = load(build(tmp_path, members=range(5))), {"within": {"brier": "5%"}, "temperature": True}
    values = zoo.report_page(members, few(), few(1, labels=False), subsets=3, **asked).values()  # type: ignore[arg-type]
    report = zoo.evaluate(members, few(), few(1, labels=False), subsets=3, **asked)  # type: ignore[arg-type]
    assert values["evaluation"] == json.loads(report.to_json())
    assert values["pairwise"] == json.loads(zoo.pairwise(members, few(), few(1, labels=False)).to_json())
    halves = zoo.ns(members)
    assert (values["mmd"], values["ns"]) == tuple(json.loads(x.to_json()) for x in (halves.mmd, halves.ns))
    json.dumps(values, allow_nan=False)
    alone = zoo.report_page(members[:1], few(), None, subsets=3).values()
    assert "evaluation" in alone
    assert {"pairwise", "mmd", "ns"}.isdisjoint(alone)


def test_weights_are_those_of_mmd_alignment_and_mass() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    both = zoo.ns(members)
    assert "3 and 3 members (all 6 members, at even and at odd positions)" in plain(page.html)
    for row, name in zip(table(page, "halves").rows, ("conv1", "conv2", "fc1", "fc2", "all"), strict=True):
        found = [both.mmd[name], both.ns[name]]
        numbers = [(float(v.replace("−", "-")), float(p)) for v, p in (row[2:4], row[4:6])]
        assert row[0] == name
        assert numbers == [(pytest.approx(1000 * x.value, abs=6e-4), pytest.approx(x.p_value, abs=6e-4)) for x in found]
    aligned = zoo.alignment(members, to=0)
    for title, values in (("distance as stored", aligned.before), ("distance aligned", aligned.after)):
        np.testing.assert_allclose(column(page, "alignment-numbers", title), values, rtol=1e-5)
    masses = zoo.minimal_mass(members)
    for title, values in (("mass", masses.before), ("minimum", masses.after), ("excess (%)", masses.excess)):
        np.testing.assert_allclose(column(page, "mass-numbers", title), values, rtol=1e-5)
    assert [row[:2] for row in table(page, "groups").rows] == [("conv1", "8"), ("conv2", "16"), ("fc1", "32")]
    exact = [math.log10(math.factorial(n)) for n in (8, 16, 32)]
    assert [row[3] for row in table(page, "groups").rows] == [f"{x:.1f}" for x in exact]
    assert f"<sup>{sum(exact):.1f}</sup>" in page.html


def test_single_predictions_pooled_and_each_members_nll() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    inside = some("test", 90)
    assert inside.labels is not None
    with torch.no_grad():
        logits = torch.stack([m.model()(members.preprocess(inside.images)) for m in members]).double()
    probs, labels = logits.softmax(-1).numpy(), inside.labels.numpy()
    nll = -np.log(probs[:, np.arange(90), labels]).mean(1)
    np.testing.assert_allclose(column(page, "members-numbers", "NLL (nats)"), nll, atol=6e-5)
    right, top = (probs.argmax(-1) == labels).ravel(), probs.max(-1).ravel()
    which = np.minimum((top * 15).astype(int), 14)
    filled = np.isin(range(15), which)
    for title, values in (("pooled confidence", top), ("pooled accuracy", right)):
        drawn = [plain(row[table(page, "bins").header.index(title)]) for row in table(page, "bins").rows]
        means = [f"{values[which == b].mean():.3f}" if filled[b] else "–" for b in range(15)]
        assert [x for x, y in zip(drawn, means, strict=True) if x != y and abs(float(x) - float(y)) > 1.1e-3] == []
    assert column(page, "bins", "pooled inputs") == np.bincount(which, minlength=15).tolist()


def test_roc_and_precision_recall_curves(oracle: Oracle) -> None:
    metrics = oracle("sklearn.metrics")
    draw = np.random.default_rng(0)
    inside, outside = draw.normal(0, 1, 300).round(2), draw.normal(1, 1, 200).round(2)
    truth, scores = np.repeat([0, 1], [300, 200]), np.concatenate([inside, outside])
    roc, pr = detection.roc_points(inside, outside), detection.precision_points(inside, outside)
    # Every point by counting: flagged are all scores at or above a threshold, none at first.
    flagged = scores >= np.array([np.inf, *sorted(set(scores), reverse=True)])[:, None]
    right, wrong = flagged[:, truth == 1].sum(1), flagged[:, truth == 0].sum(1)
    points = set(zip((wrong / 300).round(12), (right / 200).round(12), strict=True))
    drawn = list(zip(np.round(roc[0], 12), np.round(roc[1], 12), strict=True))
    assert set(drawn) <= points
    assert (drawn[0], drawn[-1]) == ((0, 0), (1, 1))
    assert 100 < len(drawn) <= detection.LARGEST_POINT_COUNT
    assert np.trapezoid(roc[1], roc[0]) == pytest.approx(metrics.roc_auc_score(truth, scores), abs=2e-3)
    some = right > 0
    points = set(zip((right / 200)[some].round(12), (right / (right + wrong).clip(1))[some].round(12), strict=True))
    drawn = list(zip(np.round(pr[0], 12), np.round(pr[1], 12), strict=True))
    assert set(drawn) <= points
    assert drawn[-1] == (1, 0.4)
    assert 100 < len(drawn) <= detection.LARGEST_POINT_COUNT
    assert np.trapezoid(pr[1], pr[0]) == pytest.approx(metrics.average_precision_score(truth, scores), abs=2e-2)


@pytest.mark.slow
def test_temperature_scaling_limits_and_members_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch, "reliability-diagram")
    members, inside = load(build(tmp_path, members=range(5))), few()
    asked: dict[str, float | str] = {"nll": 0.1, "brier": "5%"}
    page = zoo.report_page(members, inside, None, temperature=True, held_out=0.5, within=asked, subsets=3)
    report = zoo.evaluate(members, inside, temperature=True, held_out=0.5, within=asked, subsets=3)
    assert report.calibrated is not None
    after = [plain(row[3]) for row in table(page, "scaled").rows]
    assert after == [as_text(x) for x in report.calibrated.ensemble.values()]
    assert "On digits/test" not in page.html
    assert "n = 12 inputs" in page.html
    assert sum(column(page, "bins", "inputs")) == 12
    assert sum(column(page, "bins", "pooled inputs")) == 5 * 12
    assert ">scaled by T = " in page.panels["reliability-diagram"].svg
    limits = {plain(row[0]): plain(row[3]) for row in table(page, "limits").rows}
    assert limits["NLL"] == as_text(report.limits["nll"])
    needed = [plain(row[-1]).split(" [")[0] for row in table(page, "needed").rows]
    found = [x for _, x in report.answers()]
    assert needed == [f"{x.members}" if x.members is not None else f"≈ {x.extrapolated:,}" for x in found]

    other = zoo.report_page(members, inside, None, temperature=True, held_out=few(5), subsets=3)
    assert plain(table(other, "scaled").rows[0][3]) == as_text(
        zoo.evaluate(members, inside, temperature=True, held_out=few(5), subsets=3).calibrated["temperature"]  # type: ignore[index]
    )
    with pytest.raises(UsageError, match="held out for the temperature: expected images that the members were neither"):
        zoo.report_page(members, inside, None, temperature=True, held_out="digits/train")


def test_held_predictions_are_the_members_own(tmp_path: Path) -> None:
    built: Built = build(tmp_path, members=range(5))
    members = load(built)
    held = measurements.compute_predictions(members, few(), "cpu", labelled=True)
    assert held.citation == members.citation
    assert [key[:2] for key in held.keys] == members._snapshot_keys
    again = predict(members, few(), tmp_path / "said")
    assert held.keys == again.keys
    assert held.data == again.data
    torch.testing.assert_close(held.logits(), again.logits(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(held[1:3].logits(), held.logits()[1:3], rtol=0, atol=0)
    torch.testing.assert_close(held.logits([3]), held.logits()[3:4], rtol=0, atol=0)
    assert held[1:3].ids == [1, 2]
    for part, at in ((slice(None, None, 2), [0, 2, 4]), (slice(None, None, -1), [4, 3, 2, 1, 0]), (slice(3, 4), [3])):
        torch.testing.assert_close(held[part].logits(), held.logits()[at], rtol=0, atol=0)
        assert held[part].ids == at
        assert held[part].keys == [held.keys[i] for i in at]
        assert torch.equal(held[part].one(0), held.one(at[0]))
        assert held[part].citation == members[part].citation
    torch.testing.assert_close(held.logits([4, 0, 2]), held.logits()[[4, 0, 2]], rtol=0, atol=0)
    with pytest.raises(SelectionError):
        held[5:]
