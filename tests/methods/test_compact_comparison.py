"""The table of HMC, an ensemble and VI: against NumPy and loops over modules, on draws made of the shipped members."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, compact
from tests.support import scenarios
from tests.support.few_digits import some

TEST = some("test", 100)
SAMPLES, SEED = 2, 5
Draws = dict[str, zoo.Collection]


def around(members: zoo.Collection, each: int, spread: float, seed: int) -> dict[str, Tensor]:
    """Some draws around each member, one member after another: its weights and noise."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.repeat_interleave(each, 0) + spread * torch.randn(len(t) * each, *t.shape[1:], generator=generator))
        for name, t in members.stack().items()
    }


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> Draws:
    """Three chains of three, two fits of three, four members."""
    out = tmp_path_factory.mktemp("draws")
    members = zoo.load("convnet-digits", n=9)
    found = {"ensemble": members[:4]}
    for name, some_members, spread in (("hmc", members[4:7], 0.1), ("vi", members[7:9], 0.03)):
        found[name] = zoo.from_samples(
            around(some_members, 3, spread, len(name)), "convnet", method=name, out=out, like="convnet-digits",
            name=f"convnet-digits-{name}-multi", run=[run for run in range(len(some_members)) for _ in range(3)],
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def found(draws: Draws) -> CompactComparison:
    return compact(draws["ensemble"], TEST, against=draws["hmc"], vi=draws["vi"], samples=SAMPLES, seed=SEED)


def probs_of(stacked: dict[str, Tensor]) -> np.ndarray:
    """Probabilities (network, input, class) of stacked networks, by modules one at a time and NumPy."""
    preprocess = zoo.load("convnet-digits", n=1).preprocess
    with torch.no_grad():
        logits = np.stack(
            [
                scenarios.by_hand("convnet", {n: t[i] for n, t in stacked.items()}).eval()(preprocess(TEST.images))
                .double().numpy()
                for i in range(len(next(iter(stacked.values()))))
            ]
        )  # fmt: skip
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    result: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return result


def right(probs: np.ndarray) -> np.ndarray:
    assert TEST.labels is not None
    result: np.ndarray = (probs.argmax(-1) == TEST.labels.numpy()).mean(-1)
    return result


def near(p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    return float(np.mean(p.argmax(-1) == q.argmax(-1))), float(0.5 * np.abs(p - q).sum(-1).mean())


def check(x: CompactComparison, method: str, column: str, expected: tuple[float, float, float, float | None]) -> None:
    """Check a column: one input of a hundred may be classed otherwise where two classes are as probable."""
    names = ("agreement", "total_variation", "sample_accuracy", "mean_accuracy")
    for name, value, slack in zip(names, expected, (0.011, 2e-4, 0.011, 0.011), strict=True):
        if value is not None:
            assert x[method, column, name].value == pytest.approx(value, abs=slack), (method, column, name)
        else:
            assert name not in x.table[method][column]


@pytest.mark.slow
def test_samples_are_a_loop_over_modules(found: CompactComparison, draws: Draws) -> None:
    probs = {name: probs_of(members.stack()) for name, members in draws.items()}
    hmc = probs["hmc"].mean(0)
    check(found, "hmc", "sample", (1, 0, right(probs["hmc"]).mean(), None))
    check(found, "ensemble", "sample", (*near(probs["ensemble"].mean(0), hmc), right(probs["ensemble"]).mean(), None))
    fits = [probs["vi"][:3], probs["vi"][3:]]
    apart = np.mean([near(fit.mean(0), hmc) for fit in fits], axis=0)
    means = {n: t.view(2, 3, *t.shape[1:]).mean(1) for n, t in draws["vi"].stack().items()}
    check(found, "vi", "q", (apart[0], apart[1], right(probs["vi"]).mean(), right(probs_of(means)).mean()))


@pytest.mark.parametrize("method", ["hmc", "ensemble"])
@pytest.mark.parametrize("column", ["q_d", "q_r"])
def test_gaussians_are_numpys(found: CompactComparison, draws: Draws, method: str, column: str) -> None:
    members, hmc = draws[method], probs_of(draws["hmc"].stack()).mean(0)
    weights = (members if column == "q_d" else members.align(to=members.ids[0])).stack()
    generator = torch.Generator().manual_seed(SEED)
    mean = {n: t.double().mean(0) for n, t in weights.items()}
    std = {n: torch.from_numpy(t.double().numpy().std(0, ddof=1)) for n, t in weights.items()}
    drawn = [
        {n: m + std[n] * torch.randn(m.shape, generator=generator) for n, m in mean.items()} for _ in range(SAMPLES)
    ]
    probs = probs_of({n: torch.stack([d[n] for d in drawn]).float() for n in mean})
    center = probs_of({n: m[None].float() for n, m in mean.items()})
    check(found, method, column, (*near(probs.mean(0), hmc), right(probs).mean(), right(center)[0]))


def test_intervals_are_jackknifes_by_hand(found: CompactComparison, draws: Draws) -> None:
    hmc, ensemble, vi = (probs_of(draws[name].stack()) for name in ("hmc", "ensemble", "vi"))
    chains = [hmc[3 * i : 3 * i + 3] for i in range(3)]
    pairs = [np.concatenate([chains[i], chains[j]]) for i, j in itertools.combinations(range(3), 2)]
    halves = [ensemble[list(some)] for some in itertools.combinations(range(4), 2)]

    def width(values: list[float], runs: int, left_out: int) -> float:
        return float(stats.t.ppf(0.975, runs - 1)) * math.sqrt((runs - left_out) / left_out) * float(np.std(values))

    whole, own = hmc.mean(0), ensemble.mean(0)
    half = math.hypot(
        width([near(own, p.mean(0))[1] for p in pairs], 3, 1), width([near(h.mean(0), whole)[1] for h in halves], 4, 2)
    )
    x = found["ensemble", "sample", "total_variation"]
    assert x.low is not None
    assert x.high is not None
    assert x.high - x.value == pytest.approx(half, rel=1e-3)
    assert x.value - x.low == pytest.approx(half, rel=1e-3)
    accuracy = found["hmc", "sample", "sample_accuracy"]
    assert accuracy.high is not None
    assert accuracy.high == pytest.approx(
        min(1, accuracy.value + width([float(right(p).mean()) for p in pairs], 3, 1)), abs=1e-9
    )
    # Two fits say nothing about others.
    assert found["vi", "q", "total_variation"].low is None
    assert len(vi) == 6
    held = [near(p.mean(0), c.mean(0)) for p, c in zip(pairs, chains[::-1], strict=True)]
    for at, name in enumerate(("agreement", "total_variation")):
        values = [h[at] for h in held]
        half_half = found.halves["sample"][name]
        assert half_half.value == pytest.approx(np.mean(values), abs=1e-4)
        assert (half_half.low, half_half.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])), abs=1e-4)


@pytest.mark.slow
def test_alignment_moves_the_mean_of_permuted_copies_back(draws: Draws, tmp_path: Path) -> None:
    """Draws of one basin, each permuted otherwise: q_r is that of the basin, q_d is not."""
    members, table = zoo.load("convnet-digits", n=1), zoo.symmetries("convnet-digits")
    generator = torch.Generator().manual_seed(1)
    plain = around(members, 6, 0.01, 3)
    states = [
        zoo.symmetry.permute(table, {n: t[i] for n, t in plain.items()},
                             zoo.symmetry.random_element(table, generator).permutations)
        for i in range(6)
    ]  # fmt: skip
    hmc = zoo.from_samples(
        states, "convnet", method="hmc", out=tmp_path, name="convnet-digits-hmc", like="convnet-digits",
        run=[0, 0, 1, 1, 2, 2],
    )  # fmt: skip
    x = compact(draws["ensemble"], TEST, against=hmc, samples=3)
    assert x["hmc", "q_r", "mean_accuracy"].value > 0.95
    assert x["hmc", "q_d", "mean_accuracy"].value < 0.5
    assert x["hmc", "q_r", "total_variation"].value < 0.02 < x["hmc", "q_d", "total_variation"].value
    assert x.halves["q_r"]["agreement"].value > 0.97
    assert "vi" not in x.table
    mean = compact(draws["ensemble"], TEST, against=hmc, samples=3, to="mean")
    assert (x.to, mean.to) == ("the first", "the mean")
    assert mean["hmc", "q_r", "mean_accuracy"].value > 0.95


@pytest.mark.slow
def test_all_draws_count_however_runs_are_numbered(draws: Draws, tmp_path: Path) -> None:
    stacked = draws["hmc"].stack()
    hmc = zoo.from_samples(
        stacked, "convnet", method="hmc", out=tmp_path, name="c-hmc-multi", like="convnet-digits",
        run=[5, 2, 2, 5, 5, 7, 5, 5, 5],
    )  # fmt: skip
    found = compact(draws["ensemble"], TEST, against=hmc, samples=1)
    assert (found.sources["hmc"].runs, found.sources["hmc"].draws) == (3, 9)
    check(found, "hmc", "sample", (1, 0, right(probs_of(stacked)).mean(), None))
    chains = [
        probs_of({n: t[some_draws] for n, t in stacked.items()}) for some_draws in ([1, 2], [0, 3, 4, 6, 7, 8], [5])
    ]
    held = [
        near(np.concatenate([chains[i], chains[j]]).mean(0), chains[3 - i - j].mean(0))[1]
        for i, j in itertools.combinations(range(3), 2)
    ]
    assert found.halves["sample"]["total_variation"].value == pytest.approx(np.mean(held), abs=1e-4)
    alone = compact(draws["ensemble"], TEST, against=hmc[1:3], samples=1)
    assert (alone.sources["hmc"].runs, alone.halves) == (1, {})
    assert alone["hmc", "sample", "sample_accuracy"].low is None


def test_frame_json_and_text(found: CompactComparison) -> None:
    frame = found.to_frame()
    assert list(frame.columns) == ["method", "column", "figure", "value", "low", "high", "held_out"]
    assert len(frame) == (3 + 4 + 4) * 2 + 4 + 6
    assert CompactComparison.from_json(found.to_json()) == found
    values = json.loads(found.to_json())
    assert values["table"]["vi"]["q"]["mean_accuracy"]["value"] == found["vi", "q", "mean_accuracy"].value
    assert (values["sources"]["hmc"]["runs"], values["sources"]["hmc"]["draws"]) == (3, 9)
    lines = found.to_text().splitlines()
    words = "HMC sample  HMC q_d  HMC q_r  ensemble sample  ensemble q_d  ensemble q_r  VI q"
    assert lines[0].split() == words.split()
    assert lines[1].startswith("agreement with HMC (0..1)")
    assert lines[4].split()[-1] == f"{100 * found['vi', 'q', 'mean_accuracy'].value:.4g}"
    assert "HMC: 9 draws of 3 chains; ensemble: 4 members; VI: 6 draws of 2 fits." in found.to_text()
    latex = found.to_latex()
    assert latex.count(r"\\") == 6
    assert all(line.count(" & ") == 7 for line in latex.splitlines() if line.endswith(r"\\") and "HMC}" not in line)
    assert r"\multicolumn{3}{c}{HMC} & \multicolumn{3}{c}{ensemble} & \multicolumn{1}{c}{VI}" in latex


def test_what_a_table_cannot_take(draws: Draws) -> None:
    hmc, ensemble, vi = (draws[name] for name in ("hmc", "ensemble", "vi"))
    with pytest.raises(
        UsageError, match="draws of ensemble: expected the tensors and classes of convnet-digits-hmc-mul"
    ):
        compact(zoo.load("resnet8-digits", n=2), against=hmc)
    with pytest.raises(UsageError, match=r"draws of vi: .* two or more of each run; found one of some\. Draw more"):
        compact(ensemble, against=hmc, vi=ensemble)
    with pytest.raises(UsageError, match="draws of hmc: expected two or more; found 1"):
        compact(ensemble, against=hmc[:1], vi=vi)
    with pytest.raises(UsageError, match="samples of a compact table: expected a whole number from 1; found 0"):
        compact(ensemble, against=hmc, vi=vi, samples=0)
    with pytest.raises(UsageError, match="what draws are aligned to: expected None or 'mean'; found 'first'"):
        compact(ensemble, against=hmc, vi=vi, to="first")
    with pytest.raises(UsageError, match="draws of vi: expected a Collection; found str"):
        compact(ensemble, against=hmc, vi="vi")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="vi: expected None without against=; found Collection"):
        compact(ensemble, vi=vi)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"levels: expected none with against=; found \[0\.5\]"):
        compact(ensemble, against=hmc, levels=[0.5])  # type: ignore[call-overload]
    for text in ("[]", "{}", '{"version": 1}', "no", "3"):
        with pytest.raises(FormatError, match="compact table: expected the JSON that `to_json` gives"):
            CompactComparison.from_json(text)
    with pytest.raises(FormatError, match="compact table: expected version 1; found 2"):
        CompactComparison.from_json('{"version": 2}')
