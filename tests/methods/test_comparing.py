"""Posteriors against a population: every figure against double sums, the library's other functions, and scipy."""

# ruff: noqa: F811 (fixtures are imported, and asked for by name)

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.draw_ensembles import group_draws
from checkpoints_zoo.methods.comparing.study import prepare_comparison
from tests.support.few_draws import DRAWS, PERMUTATIONS, RUNS, asked, draws, members  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def found(members: zoo.Collection, asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return zoo.compare(members[:16], out=tmp_path_factory.mktemp("compared"), **asked)


def flat(members: zoo.Collection, layer: str = "") -> np.ndarray:
    stacked = members.stack()
    names = [n for n in stacked if n.startswith(layer)]
    return np.concatenate([stacked[n].flatten(1).double().numpy() for n in names], axis=1)


def by_double_sum(draws: np.ndarray, reference: np.ndarray) -> float:
    """MMD² as it is written down, the mean over kernels whose bandwidths come from the reference's own pairs."""
    total = []
    kernels: list[tuple[Any, Callable[[np.ndarray, float], np.ndarray]]]
    kernels = [
        ("euclidean", lambda d, w: np.exp(-((d / w) ** 2))),
        ("cityblock", lambda d, w: np.exp(-d / w)),
    ]
    for metric, of in kernels:
        own = cdist(reference, reference, metric)
        distances = cdist(draws, draws, metric), own, cdist(draws, reference, metric)
        pairs = own[np.triu_indices(len(reference), 1)]
        assert pairs.min() > 0.1
        for width in np.geomspace(pairs.min() / 2, pairs.max() * 2, 10):
            k = [of(d, width) for d in distances]
            m, n = len(draws), len(reference)
            within = [(x.sum() - np.trace(x)) / (len(x) * (len(x) - 1)) for x in k[:2]]
            total.append(sum(within) - 2 * k[2].sum() / (m * n))
    return float(np.mean(total))


def run_of(draws: zoo.Collection, run: int) -> zoo.Collection:
    return draws[run * DRAWS : (run + 1) * DRAWS]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["swag", "vi"])
def test_one_mode_is_the_mean_of_double_sums_over_runs(
    method: str, found: Comparison, members: zoo.Collection, draws: dict[str, zoo.Collection]
) -> None:
    row, reference = found[method, "one"], members[:16]
    assert (row.runs, row.draws) == (RUNS, DRAWS)
    for group, layer in (("", ""), ("conv1", "conv1."), ("fc2", "fc2.")):
        values = [by_double_sum(flat(run_of(draws[method], r), layer), flat(reference, layer)) for r in range(RUNS)]
        cell = row["mmd"] if not group else row.layers["mmd"][group]
        assert cell.runs == pytest.approx(values, abs=1e-6)
        assert cell.value == pytest.approx(np.mean(values), abs=1e-6)
        low, high = stats.t.interval(0.95, RUNS - 1, np.mean(values), stats.sem(values))
        assert (cell.low, cell.high) == pytest.approx((low, high), abs=1e-6)
    # The draws of one run are one unit: one unit can't be exchanged with others.
    p_values = [zoo.mmd(run_of(draws[method], r), reference, permutations=PERMUTATIONS).p_value for r in range(RUNS)]
    assert [row["mmd"].p, *p_values] == [None] * (RUNS + 1)
    canonical = [c.canonicalize(scale="unit-norm", permute="first") for c in (run_of(draws[method], 2), reference)]
    assert row["ns"].runs[2] == pytest.approx(by_double_sum(*map(flat, canonical)), abs=1e-6)
    assert row["ns"].runs[2] == pytest.approx(zoo.mmd(*canonical, grid="second", permutations=9).value, abs=1e-12)


def test_multi_mode_takes_every_fourth_draw_of_four_runs(
    found: Comparison, members: zoo.Collection, draws: dict[str, zoo.Collection]
) -> None:
    row, reference = found["vi", "multi"], flat(members[:16])
    taken = [run * DRAWS + draw for run in range(RUNS) for draw in (0, 4)]
    assert (row.runs, row.draws) == (RUNS, len(taken))
    vectors = flat(draws["vi"])
    value = by_double_sum(vectors[taken], reference)
    halves = [
        by_double_sum(vectors[[at for at in taken if at // DRAWS in half]], reference)
        for half in itertools.combinations(range(RUNS), 2)
    ]
    # All halves of 4 runs: d = 2, so that the jackknife's factor is 1.
    width = stats.t.ppf(0.975, RUNS - 1) * np.std(halves)
    assert row["mmd"].value == pytest.approx(value, abs=1e-6)
    assert (row["mmd"].low, row["mmd"].high) == pytest.approx((value - width, value + width), abs=1e-6)


@pytest.mark.slow
def test_uncertainty_is_that_of_evaluate(
    found: Comparison, asked: dict[str, Any], members: zoo.Collection, draws: dict[str, zoo.Collection]
) -> None:
    on = (asked["data"], asked["ood"])
    alone = [zoo.evaluate(run_of(draws["swag"], r), *on, sizes=[DRAWS]) for r in range(RUNS)]
    several = zoo.evaluate(draws["swag"].take([r * DRAWS + d for r in range(RUNS) for d in (0, 4)]), *on, sizes=[8])
    fresh, own = (zoo.evaluate(c, *on) for c in (members[20:40], members[:16]))
    for name in fresh.ensemble:
        values = [report[name].value for report in alone]
        cell = found["swag", "one"][name]
        assert cell.runs == pytest.approx(values, abs=1e-12)
        assert cell.value == pytest.approx(np.mean(values), abs=1e-12)
        assert found["swag", "multi"][name].value == pytest.approx(several[name].value, abs=1e-12)
        for row, report in ((found["fresh", "members"], fresh), (found["reference", "members"], own)):
            expected = report[name]
            assert row[name].value == pytest.approx(expected.value, abs=1e-12)
            # Bounds near 1 are found on another scale, where roundings grow.
            assert (row[name].low, row[name].high) == pytest.approx((expected.low, expected.high), abs=1e-7)
    assert re.fullmatch(r"[0-9a-f]{40}/convnet-digits-swag-multi#0-23~[0-9a-f]{8}", found.methods["swag"]["draws"])
    assert found.reference == members[:16].citation
    for name, placed in found["reference", "members"].worth.items():
        assert placed.limit == pytest.approx(own.limits[name].value, abs=1e-12)
    assert found["reference", "members"].worth["brier"].members == pytest.approx(16, rel=1e-6)


def test_fresh_members_are_within_the_null_and_noise_is_not(found: Comparison) -> None:
    fresh, halves = found["fresh", "members"], found["reference", "members"]
    assert (fresh.runs, fresh.draws, halves.draws) == (20, 20, 16)
    for row in (fresh, halves):
        for name in ("mmd", "ns"):
            p = row[name].p
            assert p is not None
            assert p > 0.01
    low, high = fresh["mmd"].low, fresh["mmd"].high
    assert low is not None
    assert high is not None
    assert low < 0.005
    for method in ("swag", "vi"):
        for mode in ("one", "multi"):
            assert found[method, mode]["mmd"].value > 0.05
        assert found[method, "one"]["mmd"].p is None  # a run is one unit
        assert found[method, "multi"]["mmd"].p is not None
    assert found["reference", "members"]["mmd"].low is None


def test_the_corollary_is_the_librarys(found: Comparison, members: zoo.Collection) -> None:
    for method, mode, of in (
        ("fresh", "members", members[20:40]), ("reference", "members", members[:16]),
    ):  # fmt: skip
        expected = zoo.corollary(of)
        assert found[method, mode].corollary == expected.p
        assert found[method, mode].corollary_layers == {layer.name: layer.p for layer in expected.layers}
    assert found["swag", "one"].corollary is None
    assert found["swag", "multi"].corollary is not None


def test_one_point_far_away_is_as_far_as_can_be(members: zoo.Collection, tmp_path: Path) -> None:
    reference = members[:8]
    point = {n: torch.full_like(t[0], 1000.0) for n, t in reference.stack().items()}
    far = zoo.from_samples(
        [point] * 4, "convnet", arguments=reference.description.arguments, method="hmc", out=tmp_path, name="far-hmc",
        like="convnet-digits",
    )  # fmt: skip
    mode = group_draws("hmc", far)[0]
    work = prepare_comparison(reference, (), ood="none", out=tmp_path, draws={"hmc": far}, permutations=9).cell_measurer
    value = work.closeness.measure(mode.run(0), None)["mmd"]["all"].value
    test_images = []
    for metric, power in (("euclidean", 2), ("cityblock", 1)):
        pairs = cdist(flat(reference), flat(reference), metric)[np.triu_indices(8, 1)]
        test_images += [
            np.exp(-((pairs / w) ** power)).mean() for w in np.geomspace(pairs.min() / 2, pairs.max() * 2, 10)
        ]
    assert value == pytest.approx(1 + np.mean(test_images), abs=1e-6)
    assert 1 < value < 2


@pytest.mark.slow
def test_one_run_has_no_interval_and_no_multi_mode(
    members: zoo.Collection, draws: dict[str, zoo.Collection], asked: dict[str, Any], tmp_path: Path
) -> None:
    one = {"mine": run_of(draws["swag"], 1)}
    result = zoo.compare(members[:8], out=tmp_path, **(asked | {"draws": one, "ood": "none"}))
    assert [(row.method, row.mode, row.runs) for row in result.rows] == [
        ("mine", "one", 1), ("reference", "members", 8),
    ]  # fmt: skip
    row = result.rows[0]
    assert all(x.low is None and x.high is None for x in row.figures.values())
    assert "auroc" not in row.figures
    assert row["mmd"].p == zoo.mmd(one["mine"], members[:8], permutations=PERMUTATIONS).p_value
    assert result.ood == ""
    assert "no OOD images" in result.to_text()


def test_runs_of_one_draw_are_multi_mode_alone(members: zoo.Collection, draws: dict[str, zoo.Collection]) -> None:
    singles = draws["swag"].take([0, DRAWS, 2 * DRAWS])
    assert [(m.name, m.draws, m.runs) for m in group_draws("x", singles)] == [("multi", 3, ((0,), (1,), (2,)))]
    [everyone] = group_draws("x", members[:5])
    assert (everyone.name, everyone.draws) == ("members", 5)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "mode"), [("swag", "multi"), ("vi", "multi"), ("fresh", "members")])
def test_agreement_and_total_variation_are_direct_sums(
    method: str, mode: str, found: Comparison, members: zoo.Collection, draws: dict[str, zoo.Collection],
    asked: dict[str, Any],
) -> None:  # fmt: skip
    images = asked["data"]
    ensemble = {e.name: e for e in group_draws(method, draws[method])}[mode]

    def mean(of: zoo.Collection) -> np.ndarray:
        logits = of.ensemble()(of.preprocess(images.images)).detach().double().numpy()
        exp = np.exp(logits - logits.max(-1, keepdims=True))
        return (exp / exp.sum(-1, keepdims=True)).mean(0)

    mine, reference = mean(ensemble.members), mean(members[:16])
    row = found[method, mode]
    agreement = sum(int(p.argmax() == q.argmax()) for p, q in zip(mine, reference, strict=True)) / len(mine)
    variation = sum(abs(p - q).sum() for p, q in zip(mine, reference, strict=True)) / len(mine) / 2
    assert row["agreement"].value == pytest.approx(agreement, abs=1e-12)
    assert row["total_variation"].value == pytest.approx(variation, abs=1e-6)  # Logits are float32.
    for figure in ("agreement", "total_variation"):
        x = row[figure]
        assert x.low is not None
        assert x.high is not None
        assert 0 <= x.low <= x.value <= x.high <= 1
    halves = zoo.compare_predictives(members[0:16:2], members[1:16:2], images)
    assert found["reference", "members"]["total_variation"].value == pytest.approx(
        halves["total_variation"].value, abs=1e-6
    )
    assert "Agr" in found.to_text()
    assert "TV" in found.to_latex()
