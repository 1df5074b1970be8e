"""The figures of a report page are those of the rooms it asks, or of sums by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.predictions import predict
from checkpoints_zoo.publishing.html_report import charts, detection, gather
from checkpoints_zoo.publishing.html_report.definitions import WORDS
from checkpoints_zoo.publishing.html_report.gather import Measured
from tests.support.few_digits import some
from tests.support.report_pages import digits_page, few, photos, plain, rows
from tests.support.scenarios import Built, build, load

Oracle = Callable[[str], ModuleType]


def test_figures_are_those_of_evaluate_and_pairwise() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    report = zoo.evaluate(members, some("test", 90), photos(), subsets=4)
    table = rows(page, "all-figures")
    assert table.header == ("", "unit", "mean of members", "ensemble of 4", "ensemble of 6")
    cells = {plain(row[0]).rstrip(" ↑↓"): [plain(c) for c in row[1:]] for row in table.rows if len(row) > 1}
    for name, known in report.ensemble.items():
        scale = 100 if name == "accuracy" else 1
        unit, mean, four, six = cells[WORDS[name][0]]
        assert (four, six) == (as_text(report.curve[4][name], scale), as_text(known, scale))
        assert mean == (as_text(report.member[name], scale) if name in report.member else "–")
        assert unit == ("%" if name == "accuracy" else FIGURES[name].unit.replace("..", "–"))
    assert len(cells) == len(report.ensemble) == 13

    pairs = zoo.pairwise(members, some("test", 90), photos())
    drawn = page.panels["pairs-scatter"].traces[0]
    np.testing.assert_array_equal(drawn["x"], pairs.to_frame()["mi_id"])
    np.testing.assert_array_equal(drawn["y"], pairs.to_frame()["mi_ood"])
    assert [plain(row[2]) for row in rows(page, "pairwise").rows] == [as_text(x) for x in pairs.figures.values()]
    matrix = np.array(page.panels["disagreement"].traces[0]["z"], np.float64)
    np.testing.assert_allclose(matrix[~np.eye(6, dtype=bool)], 100 * pairs.inside.disagreement[~torch.eye(6).bool()])
    for name, figure in (("pairs-id", "mi_id"), ("pairs-ood", "mi_ood")):
        assert sum(page.panels[name].traces[0]["y"]) == 15
        assert page.panels[name].traces[1]["x"] == [pairs[figure].value] * 2


def test_values_are_those_of_the_reports_it_asks(tmp_path: Path) -> None:
    members, asked = load(build(tmp_path, members=range(5))), {"within": {"brier": "5%"}, "temperature": True}
    values = zoo.report(members, few(), few(1, labels=False), subsets=3, **asked).values()  # type: ignore[arg-type]
    report = zoo.evaluate(members, few(), few(1, labels=False), subsets=3, **asked)  # type: ignore[arg-type]
    assert values["evaluation"] == json.loads(report.to_json())
    assert values["pairwise"] == json.loads(zoo.pairwise(members, few(), few(1, labels=False)).to_json())
    halves = zoo.ns(members)
    assert (values["mmd"], values["ns"]) == tuple(json.loads(x.to_json()) for x in (halves.mmd, halves.ns))
    json.dumps(values, allow_nan=False)
    alone = zoo.report(members[:1], few(), None, subsets=3).values()
    assert "evaluation" in alone
    assert {"pairwise", "mmd", "ns"}.isdisjoint(alone)


def test_weights_are_those_of_mmd_alignment_and_mass() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    both = zoo.ns(members)
    assert "3 and 3 members (all 6 members, those at even positions and those at odd ones)" in plain(page.html)
    for row, name in zip(rows(page, "halves").rows, ("conv1", "conv2", "fc1", "fc2", "all"), strict=True):
        found = [both.mmd[name], both.ns[name]]
        numbers = [(float(v.replace("−", "-")), float(p)) for v, p in (row[2:4], row[4:6])]
        assert row[0] == name
        assert numbers == [(pytest.approx(1000 * x.value, abs=6e-4), pytest.approx(x.p_value, abs=6e-4)) for x in found]
    aligned = zoo.alignment(members, to=0)
    dots = page.panels["alignment"].traces[1]
    assert (dots["x"], dots["y"]) == (aligned.before[1:].tolist(), aligned.after[1:].tolist())
    masses = zoo.minimal_mass(members)
    dots = page.panels["mass-minimum"].traces[1]
    assert (dots["x"], dots["y"]) == (masses.before.tolist(), masses.after.tolist())
    bars = page.panels["mass-excess"].traces[0]
    assert sum(bars["y"]) == 6
    edges = [bars["customdata"][0][0], *(b for _, b in bars["customdata"])]
    assert bars["y"] == np.histogram(masses.excess.numpy(), edges)[0].tolist()
    assert [row[:2] for row in rows(page, "groups").rows] == [("conv1", "8"), ("conv2", "16"), ("fc1", "32")]
    exact = [math.log10(math.factorial(n)) for n in (8, 16, 32)]
    assert [row[3] for row in rows(page, "groups").rows] == [f"{x:.1f}" for x in exact]
    assert f"<sup>{sum(exact):.1f}</sup>" in page.html


def test_single_predictions_pooled_and_each_members_nll() -> None:
    page, members = digits_page(), zoo.load("convnet-digits", n=6)
    inside = some("test", 90)
    assert inside.labels is not None
    with torch.no_grad():
        logits = torch.stack([m.model()(members.preprocess(inside.images)) for m in members]).double()
    probs, labels = logits.softmax(-1).numpy(), inside.labels.numpy()
    nll = -np.log(probs[:, np.arange(90), labels]).mean(1)
    bars = page.panels["member-nll"].traces[0]
    edges = [bars["customdata"][0][0], *(b for _, b in bars["customdata"])]
    edges[0], edges[-1] = edges[0] - 1e-6, edges[-1] + 1e-6
    assert bars["y"] == np.histogram(nll, edges)[0].tolist()
    right, top = (probs.argmax(-1) == labels).ravel(), probs.max(-1).ravel()
    which = np.minimum((top * 15).astype(int), 14)
    known = sorted(set(which))
    line = next(t for t in page.panels["reliability-diagram"].traces if t["name"] == "single members")
    np.testing.assert_allclose(line["x"], [top[which == b].mean() for b in known], atol=1e-6)
    np.testing.assert_allclose(line["y"], [right[which == b].mean() for b in known], atol=1e-6)
    counts = next(t for t in page.panels["confidences"].traces if t["name"] == "single members")["customdata"]
    assert counts == np.bincount(which, minlength=15).tolist()


def test_roc_and_precision_recall_curves(oracle: Oracle) -> None:
    metrics = oracle("sklearn.metrics")
    draw = np.random.default_rng(0)
    inside, outside = draw.normal(0, 1, 300).round(2), draw.normal(1, 1, 200).round(2)
    truth, scores = np.repeat([0, 1], [300, 200]), np.concatenate([inside, outside])
    ensemble = dict.fromkeys(("auroc", "aupr"), Interval(0.5, None, None))
    report = cast(Measured, SimpleNamespace(report=SimpleNamespace(ensemble=ensemble)))
    roc, pr = (panel.traces[1] for panel in detection._tradeoffs(report, inside, outside))
    # Every point by counting: flagged are all scores at or above a threshold, none at first.
    flagged = scores >= np.array([np.inf, *sorted(set(scores), reverse=True)])[:, None]
    right, wrong = flagged[:, truth == 1].sum(1), flagged[:, truth == 0].sum(1)
    points = set(zip((wrong / 300).round(12), (right / 200).round(12), strict=True))
    drawn = list(zip(np.round(roc["x"], 12), np.round(roc["y"], 12), strict=True))
    assert set(drawn) <= points
    assert (drawn[0], drawn[-1]) == ((0, 0), (1, 1))
    assert 100 < len(drawn) <= detection.POINTS
    assert np.trapezoid(roc["y"], roc["x"]) == pytest.approx(metrics.roc_auc_score(truth, scores), abs=2e-3)
    some = right > 0
    points = set(zip((right / 200)[some].round(12), (right / (right + wrong).clip(1))[some].round(12), strict=True))
    drawn = list(zip(np.round(pr["x"], 12), np.round(pr["y"], 12), strict=True))
    assert set(drawn) <= points
    assert drawn[-1] == (1, 0.4)
    assert 100 < len(drawn) <= detection.POINTS
    assert np.trapezoid(pr["y"], pr["x"]) == pytest.approx(metrics.average_precision_score(truth, scores), abs=2e-2)


def test_temperature_scaling_limits_and_members_needed(tmp_path: Path) -> None:
    members, inside = load(build(tmp_path, members=range(5))), few()
    asked: dict[str, float | str] = {"nll": 0.1, "brier": "5%"}
    page = zoo.report(members, inside, None, temperature=True, held_out=0.5, within=asked, subsets=3)
    report = zoo.evaluate(members, inside, temperature=True, held_out=0.5, within=asked, subsets=3)
    assert report.calibrated is not None
    after = [plain(row[3]) for row in rows(page, "scaled").rows]
    assert after == [as_text(x) for x in report.calibrated.ensemble.values()]
    assert "On digits/test" not in page.html
    assert "n = 12 inputs" in page.html
    assert sum(page.panels["confidences"].traces[0]["customdata"]) == 12
    assert sum(page.panels["confidences"].traces[1]["customdata"]) == 5 * 12
    assert page.panels["reliability-diagram"].traces[-1]["name"].startswith("scaled by T = ")
    limits = {plain(row[0]): plain(row[3]) for row in rows(page, "limits").rows}
    assert limits["NLL"] == as_text(report.limits["nll"])
    needed = [plain(row[-1]).split(" [")[0] for row in rows(page, "needed").rows]
    found = [x for _, x in report.answers()]
    assert needed == [f"{x.members}" if x.members is not None else f"≈ {x.extrapolated:,}" for x in found]

    other = zoo.report(members, inside, None, temperature=True, held_out=few(5), subsets=3)
    assert plain(rows(other, "scaled").rows[0][3]) == as_text(
        zoo.evaluate(members, inside, temperature=True, held_out=few(5), subsets=3).calibrated["temperature"]  # type: ignore[index]
    )
    with pytest.raises(UsageError, match="held out for the temperature: expected images that the members were neither"):
        zoo.report(members, inside, None, temperature=True, held_out="digits/train")


def test_what_is_drawn_of_many_is_bounded() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(2, 100_000)).tolist()
    (cells,) = charts.dots(x, y, [], "pairs", "#000000", "")
    assert sum(map(sum, cells["customdata"])) == 100_000
    assert np.array(cells["z"]).shape == (charts.CELLS, charts.CELLS)
    assert len(charts.edges_of(x)) == charts.BARS + 1
    assert sum(charts.counts(x, charts.edges_of(x))) == 100_000
    big = draw.random((1000, 1000))
    np.fill_diagonal(big, np.nan)
    drawn, block = charts.matrix(big, "", "")
    shown = np.array(drawn["z"], np.float64)
    assert (block, shown.shape) == (8, (125, 125))
    np.testing.assert_allclose(shown[3, 5], big[24:32, 40:48].mean())
    np.testing.assert_allclose(shown[3, 3], np.nanmean(big[24:32, 24:32]))
    assert drawn["x"][:2] == [3.5, 11.5]


@pytest.mark.parametrize("step", [0, 1 / 7])
def test_bars_hold_every_value(step: float) -> None:
    draw = np.random.default_rng(1)
    for count in (1, 2, 30, 500):
        found = draw.integers(0, 40, count) * (step or 0.37)
        edges = charts.edges_of(found.tolist(), 12, step)
        assert sum(charts.counts(found.tolist(), edges)) == count
        assert len(edges) <= 13 + 1
        np.testing.assert_allclose(np.diff(edges), edges[1] - edges[0])


def test_held_predictions_are_the_members_own(tmp_path: Path) -> None:
    built: Built = build(tmp_path, members=range(5))
    members = load(built)
    held = gather.run(members, few(), "cpu", labelled=True)
    assert held.citation == members.citation
    assert [key[:2] for key in held.keys] == members._keys
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
