"""The compact posterior: against NumPy and loops over modules, and on members that are permuted copies of one net."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.evaluation import drawing, metrics
from checkpoints_zoo.populations import compact_posterior
from checkpoints_zoo.populations.compact_posterior import Compact, fit_compact_posterior
from checkpoints_zoo.populations.gaussian import Gaussian, fit_gaussian, fit_subsets
from checkpoints_zoo.populations.loss_barrier import barrier
from checkpoints_zoo.populations.untrained_networks import make_evaluator
from checkpoints_zoo.symmetry import permute, random_element, symmetries
from docs.make import compact as compact_numbers
from tests.support import scenarios
from tests.support.few_digits import some

TEST, TRAIN = some("test", 100), some("train", 100)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The Gaussian.


@pytest.mark.slow
@given(members=st.integers(2, 9), width=st.integers(1, 5), far=st.floats(0, 1e4), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_mean_and_variance_are_numpys(members: int, width: int, far: float, seed: int) -> None:
    values = normals(members, 2, width, seed=seed) + far
    found = fit_gaussian({"w": values, "bn.running_mean": normals(members, width)})
    exact = values.double().numpy()
    np.testing.assert_allclose(found.mean["w"], exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.std["w"], exact.std(0, ddof=1), rtol=1e-6, atol=1e-12)
    assert list(found.mean) == list(found.std) == ["w"]
    assert list(found.fixed) == ["bn.running_mean"]


def test_subsets_in_batches_are_fits_of_their_own() -> None:
    whole = {"a": normals(7, 3), "b": normals(7, 2, 2, seed=1), "n": torch.ones(7, 2, dtype=torch.int64)}
    subsets = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    parts = [{n: t[at : at + 3] for n, t in whole.items()} for at in range(0, 7, 3)]
    for subset, found in zip(subsets, fit_subsets(parts, subsets), strict=True):
        for name in ("a", "b"):
            exact = whole[name][subset].double().numpy()
            np.testing.assert_allclose(found.mean[name], exact.mean(0), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(found.std[name], exact.std(0, ddof=1), rtol=1e-6)
        assert found.fixed["n"].tolist() == [1, 1]
    left = fit_subsets(parts, subsets, excluded_names={"b"})[0]
    assert list(left.mean) == ["a"]
    assert list(left.fixed) == ["n"]


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(
        UsageError, match="members to fit a Gaussian to: expected two or more: one has no variance; foun"
    ):
        fit_gaussian({"w": torch.ones(1, 2)})
    with pytest.raises(UsageError, match="tensor 'n': expected the same integers in all members; found others"):
        fit_gaussian({"w": torch.ones(2, 2), "n": torch.tensor([[1], [2]])})


def test_samples_are_normal_and_do_not_depend_on_their_company() -> None:
    q = Gaussian(
        {"a": torch.full((50,), 3.0), "b": torch.zeros(4)}, {"a": torch.full((50,), 0.5), "b": torch.zeros(4)}, {}
    )
    drawn = q.sample(40, torch.Generator().manual_seed(1))
    standard = ((drawn["a"] - 3.0) / 0.5).flatten().double().numpy()
    assert stats.kstest(standard, "norm").pvalue > 0.01
    assert torch.equal(drawn["b"], torch.zeros(40, 4))
    generator = torch.Generator().manual_seed(1)
    apart = [q.sample(n, generator)["a"] for n in (1, 30, 9)]
    assert torch.equal(torch.cat(apart), drawn["a"])


@pytest.mark.parametrize("rule", ["sigma", "snr"])
def test_pruning_keeps_what_numpy_ranks_first(rule: str) -> None:
    q = fit_gaussian({"a": normals(5, 6, 3), "b": normals(5, 7, seed=2)})
    mean, std = (np.concatenate([t.numpy().ravel() for t in p.values()]) for p in (q.mean, q.std))
    keys = std if rule == "sigma" else -np.abs(mean) / std
    levels = [0.0, 0.2, 0.5, 0.9, 1.0]
    pruned = q.pruned(levels, rule)
    for i, level in enumerate(levels):
        expected = np.zeros(25)
        kept = np.argsort(keys, kind="stable")[: 25 - round(25 * level)]
        expected[kept] = mean[kept]
        np.testing.assert_array_equal(np.concatenate([t[i].numpy().ravel() for t in pruned.values()]), expected)


def test_pruning_of_weights_without_spread() -> None:
    q = Gaussian({"w": torch.tensor([1.0, 0.0, 2.0])}, {"w": torch.tensor([0.0, 0.0, 1.0])}, {})
    assert q.pruned([1 / 3, 2 / 3], "snr")["w"].tolist() == [[1.0, 0.0, 2.0], [1.0, 0.0, 0.0]]
    assert q.pruned([1 / 3])["w"].tolist() == [[1.0, 0.0, 0.0]]
    with pytest.raises(UsageError, match=r"pruning level: expected a share from 0 to 1; found 1\.5\."):
        q.pruned([1.5])
    with pytest.raises(UsageError, match=r"rule of pruning: expected one of sigma, snr; found 'size'\."):
        q.pruned([0.5], "size")


# Agreement and total variation.


def test_agreement_and_total_variation_are_numpys() -> None:
    probs, others = (normals(200, 5, seed=s).softmax(-1) for s in (0, 1))
    a, b = probs.double().numpy(), others.double().numpy()
    assert float(metrics.agreement(probs, others)) == pytest.approx(np.mean(a.argmax(1) == b.argmax(1)), abs=1e-7)
    # The largest difference of probability over all events, which are few enough to try.
    events = [[c for c in range(5) if bits >> c & 1] for bits in range(32)]
    largest = np.max([np.abs(a[:, e].sum(1) - b[:, e].sum(1)) for e in events], axis=0)
    assert float(metrics.total_variation(probs, others)) == pytest.approx(largest.mean(), rel=1e-5)
    assert float(metrics.total_variation(probs, probs)) == 0
    assert float(metrics.agreement(probs, probs)) == 1
    for figure in (metrics.agreement, metrics.total_variation):
        with pytest.raises(ValueError, match=r"others: expected shape \(200, 5\), as probs; found shape \(199, 5\)\."):
            figure(probs, others[1:])
        with pytest.raises(ValueError, match="probs: expected no negative value"):
            figure(normals(3, 5), others[:3])


# The table.


def modules_of(members: zoo.Collection, stacked: Mapping[str, Tensor], anew: bool = True) -> list[nn.Module]:
    """Modules with these tensors by a strict load, their statistics estimated by torch's own function."""
    found = []
    for i in range(len(next(iter(stacked.values())))):
        state = {n: t[i].float() for n, t in stacked.items()}
        module = scenarios.by_hand(members.description.architecture, state)
        if anew:
            update_bn([members.preprocess(TRAIN.images)], module)
        found.append(module.eval())
    return found


def probs_of(members: zoo.Collection, networks: list[nn.Module]) -> np.ndarray:
    """Probabilities (network, input, class), with NumPy."""
    with torch.no_grad():
        logits = np.stack([m(members.preprocess(TEST.images)).double().numpy() for m in networks])
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    result: np.ndarray = powers / powers.sum(-1, keepdims=True)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_the_table_is_a_loop_over_modules(name: str) -> None:
    members = zoo.load(name, n=3)
    found = fit_compact_posterior(members, TEST, samples=2, splits=3, seed=5, levels=[0.0, 0.3], statistics=TRAIN)
    assert TEST.labels is not None
    labels, plain = TEST.labels.numpy(), [m.model() for m in members]
    singles = probs_of(members, plain)
    ensemble = singles.mean(0)
    own = found.table["members"]
    assert (own["agreement"].value, own["total_variation"].value) == (1, 0)
    assert own["sample_accuracy"].value == pytest.approx(np.mean(singles.argmax(-1) == labels))
    assert found.ensemble_accuracy.value == pytest.approx(np.mean(ensemble.argmax(-1) == labels))
    means = {}
    for column, q, view in (("q_d", found.q_d, members), ("q_r", found.q_r, members.align(to=0))):
        weights = {n: t.double().numpy() for n, t in view.stack().items() if "running" not in n}
        for n, values in weights.items():
            np.testing.assert_allclose(q.mean[n], values.mean(0), rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(q.std[n], values.std(0, ddof=1), rtol=1e-5, atol=1e-7)
        drawn = probs_of(members, modules_of(members, q.sample(2, torch.Generator().manual_seed(5))))
        average, figures = drawn.mean(0), found.table[column]
        assert figures["agreement"].value == pytest.approx(
            np.mean(average.argmax(-1) == ensemble.argmax(-1)), abs=0.011
        )
        distance = 0.5 * np.abs(average - ensemble).sum(-1).mean()
        assert figures["total_variation"].value == pytest.approx(distance, abs=2e-4)
        assert figures["sample_accuracy"].value == pytest.approx(np.mean(drawn.argmax(-1) == labels), abs=0.011)
        center = probs_of(members, modules_of(members, q.center))[0]
        means[column] = figures["mean_accuracy"].value
        assert means[column] == pytest.approx(np.mean(center.argmax(-1) == labels), abs=0.011)
        for rule in ("sigma", "snr"):
            accuracies = found.pruning[rule][column]
            assert accuracies[0] == means[column]
            cut = probs_of(members, modules_of(members, q.pruned([0.3], rule)))[0]
            assert accuracies[1] == pytest.approx(np.mean(cut.argmax(-1) == labels), abs=0.011)
    assert found.gain.value == pytest.approx(means["q_r"] - means["q_d"])
    halves = [([0, 1], [2]), ([0, 2], [1]), ([1, 2], [0])]
    held = [np.mean(singles[a].mean(0).argmax(-1) == singles[b].mean(0).argmax(-1)) for a, b in halves]
    assert found.held_out["members"]["agreement"].value == pytest.approx(np.mean(held))
    assert found.splits == 3
    assert found.statistics_images == (100 if name == "resnet8-digits" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["convnet", "resnet8"])
def test_permuted_copies_of_one_net_become_that_net(tmp_path: Path, net: str) -> None:
    table = symmetries(net)
    one = zoo.load(f"{net}-digits", n=1)
    base = {n: t[0] for n, t in one.stack(dtype=torch.float32).items()}

    def copied(member: int, state: dict[str, Tensor]) -> None:
        element = random_element(table, torch.Generator().manual_seed(member))
        state.update(permute(table, base, element.permutations) if member else base)

    built = scenarios.build(tmp_path, net, range(4), change=copied)
    members = scenarios.load(built)
    found = fit_compact_posterior(members, TEST, samples=2, splits=2, levels=[0.0], statistics=TRAIN)
    assert float(found.q_r.sigmas.max()) == 0
    assert all(torch.equal(mean, base[n]) for n, mean in found.q_r.mean.items())
    assert float(found.q_d.sigmas.median()) > 0.01
    own = found.table["q_r"]
    # Copies sum in another order; the statistics of resnet8 are other images' than the stored ones.
    assert own["agreement"].value >= 0.97
    assert own["total_variation"].value < (1e-5 if net == "convnet" else 0.05)
    assert own["sample_accuracy"].value == own["mean_accuracy"].value > 0.93
    assert found.table["q_d"]["mean_accuracy"].value < 0.7
    assert found.gain.value > 0.25


@pytest.fixture(scope="module")
def digits() -> Compact:
    return fit_compact_posterior(zoo.load("convnet-digits"), samples=1, splits=10)


@pytest.mark.slow
def test_alignment_raises_the_accuracy_of_the_mean_by_ten_points(digits: Compact) -> None:
    assert digits.gain.low is not None
    assert digits.gain.value > digits.gain.low > 0.10
    assert (digits.members, digits.inputs, digits.splits) == (64, 540, 10)
    assert float(digits.q_r.sigmas.mean()) < float(digits.q_d.sigmas.mean())


@pytest.mark.slow
def test_intervals_hold_their_figures(digits: Compact) -> None:
    for figures in (*digits.table.values(), *digits.held_out.values()):
        for x in figures.values():
            assert x.low is not None
            assert x.high is not None
            assert 0 <= x.low <= x.value <= x.high <= 1 + 1e-12
    assert set(digits.held_out["q_r"]) == {"agreement", "total_variation"}
    held = digits.held_out["members"]["agreement"].value
    assert digits.table["q_r"]["agreement"].value < held < 1


def test_two_members_have_no_intervals() -> None:
    found = fit_compact_posterior(zoo.load("convnet-digits", n=2), TEST, samples=1, levels=[0.0])
    assert found.gain.low is None
    assert found.held_out == {}
    assert found.splits == 0
    values = json.loads(found.to_json())
    assert values["gain"] == {"value": found.gain.value, "low": None, "high": None, "level": 0.95}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_in_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("convnet-digits", n=5)
    options: dict[str, Any] = {"samples": 3, "splits": 2, "levels": [0.0, 0.5]}
    first = fit_compact_posterior(members, TEST, seed=1, **options)
    monkeypatch.setattr("checkpoints_zoo.populations.compact_posterior.STACK_BYTES", 20_000)
    monkeypatch.setattr("checkpoints_zoo.populations.compact_posterior.STACK_BYTES", 30_000)
    again = fit_compact_posterior(members, TEST, seed=1, **options).to_frame()
    np.testing.assert_allclose(again["value"], first.to_frame()["value"], rtol=1e-5)
    other = fit_compact_posterior(members, TEST, seed=2, **options)
    assert other.table["q_r"]["total_variation"].value != first.table["q_r"]["total_variation"].value
    assert other.table["q_r"]["mean_accuracy"].value == first.table["q_r"]["mean_accuracy"].value


def test_other_references() -> None:
    members = zoo.load("convnet-digits", members="1,2,5")
    assert fit_compact_posterior(members, TEST, samples=1, levels=[]).to == "member 1"
    found = fit_compact_posterior(members, TEST, to="mean", samples=1, levels=[])
    assert found.to == "the mean"
    scaled = fit_compact_posterior(members.canonicalize(scale="unit-norm"), TEST, to=5, samples=1, levels=[])
    assert scaled.to == "member 5"
    rows = scaled.q_r.mean["conv1.weight"]
    assert float(rows.flatten(1).norm(dim=1).max()) <= 1 + 1e-5


def test_results_as_frame_and_json(digits: Compact) -> None:
    frame = digits.to_frame()
    assert list(frame.columns) == ["of", "figure", "value", "low", "high", "held_out"]
    assert len(frame) == 3 + 4 + 4 + 6
    values = json.loads(digits.to_json())
    assert values["table"]["q_r"]["mean_accuracy"]["value"] == digits.table["q_r"]["mean_accuracy"].value
    assert values["weights"] == 3658
    assert values["sigma"]["q_r"]["0.5"] == pytest.approx(float(digits.q_r.sigmas.double().quantile(0.5)), rel=1e-2)
    assert values["pruning"]["sigma"]["q_r"][0] == digits.table["q_r"]["mean_accuracy"].value
    assert len(values["pruning"]["levels"]) == len(values["pruning"]["snr"]["q_d"]) == 20


def test_what_a_compact_posterior_cannot_take() -> None:
    members = zoo.load("convnet-digits", n=3)
    with pytest.raises(UsageError) as one:
        fit_compact_posterior(members[:1], TEST)
    assert str(one.value) == (
        "members of a compact posterior: expected two or more: one has no variance; found 1 of convnet-digits."
        " Select more members."
    )
    with pytest.raises(UsageError, match="samples of a compact posterior: expected a whole number from 1; found 0"):
        fit_compact_posterior(members, TEST, samples=0)
    with pytest.raises(UsageError, match="splits of a compact posterior: expected a whole number from 2; found 1"):
        fit_compact_posterior(members, TEST, splits=1)
    with pytest.raises(UsageError, match="pruning level: expected a share from 0 to 1; found -1"):
        fit_compact_posterior(members, TEST, samples=1, splits=2, levels=[-1])
    with pytest.raises(MemberNotFound, match="member 77"):
        fit_compact_posterior(members, TEST, to=77)
    with pytest.raises(UsageError, match="expected labels of the classes"):
        fit_compact_posterior(members, "photos")


# The picture and the page.


@pytest.mark.slow
def test_the_picture_shows_the_numbers(digits: Compact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "DPI", 40)
    figure: Figure = compact_posterior.draw_compact(digits)
    panels = {axes.get_label(): axes for axes in figure.axes}
    assert set(panels) == {"sigma", "accuracy", "pruning"}
    lines = {str(line.get_label()): np.asarray(line.get_ydata()) for line in panels["pruning"].lines}
    np.testing.assert_allclose(lines["mean of $q_r$, largest |μ|/σ kept"], 100 * np.array(digits.pruning["snr"]["q_r"]))
    counts = sum(sum(p.get_height() for p in c) for c in panels["sigma"].containers if hasattr(c, "patches"))
    assert math.isfinite(counts)
    path = digits.plot(tmp_path / "new" / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"expected a name that ends in \.png or \.pdf or \.svg"):
        digits.plot(tmp_path / "c.jpg")


def numbers() -> Any:
    return json.loads(compact_numbers.NUMBERS.read_text(encoding="utf-8"))


def test_the_page_has_the_numbers() -> None:
    page = (compact_numbers.DOCS / "compact.md").read_text(encoding="utf-8")
    assert page == compact_numbers.page(), "run `python -m docs.make`"
    for name in compact_numbers.NAMES:
        assert f"### {name}" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", compact_numbers.NAMES)
def test_the_numbers_are_what_is_measured_now(name: str) -> None:
    # Sums in another order can change the class of a few inputs where a net is about to collapse: hence 0.03.
    members = zoo.load(name)
    written = numbers()[name]
    before, after = compact_numbers.center_accuracies(members, members.ids[0])
    assert before == pytest.approx(written["compact"]["table"]["q_d"]["mean_accuracy"]["value"], abs=0.03)
    assert after == pytest.approx(written["compact"]["table"]["q_r"]["mean_accuracy"]["value"], abs=0.03)
    for when, view in (("before", members[:2]), ("after", members[:2].align(to=members.ids[0]))):
        found = barrier(view, points=3)  # of 25 points, every twelfth
        known = written["barrier"][when]["first_losses"][::12]
        np.testing.assert_allclose(found.losses[0], known, rtol=0.02, atol=1e-3)
    judge = make_evaluator(members, None, None, "cpu", 512)
    singles = judge.accuracies(judge.log_probs(members.stack(), reestimated=False))
    assert float(singles.mean()) == pytest.approx(written["compact"]["table"]["members"]["sample_accuracy"]["value"])


def test_the_numbers_meet_what_was_promised() -> None:
    for values in numbers().values():
        assert values["compact"]["gain"]["low"] > 0.10
        assert values["barrier"]["fall"]["low"] > 0
