"""Every figure of `zoo.evaluate` on degenerate predictions, against other packages and loops in float64, to 1e-5.

One member, one input, one class present, ties, probabilities of 0 and 1, logits inside [0, 1]: stored, read in blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics
import torch
import torchmetrics.functional.classification as torchmetrics
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation import metrics, subsets
from checkpoints_zoo.evaluation.figures import FIGURES
from checkpoints_zoo.predictions import Predictions
from tests.evaluation.test_metrics import equal_mass_by_hand
from tests.evaluation.test_metrics_comparing import tied_risks
from tests.support.stored_sets import given

Case = tuple[Tensor, Tensor, Tensor]  # logits (member, input, class), labels (input,), logits out of distribution


def drawn(members: int, inputs: int, classes: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(members, inputs, classes, generator=generator)).half().float()


def labels(inputs: int, classes: int) -> Tensor:
    return torch.randint(classes, (inputs,), generator=torch.Generator().manual_seed(9))


def sure(logits: Tensor) -> Tensor:
    """Probabilities of 0 and 1."""
    return 30000.0 * torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])


def constant(logits: Tensor) -> Tensor:
    """Members that say the same of all inputs."""
    return logits[:, :1].expand_as(logits)


def repeated(logits: Tensor) -> Tensor:
    """Each input five times or so, and the last two classes always level."""
    found = logits[:, torch.arange(logits.shape[1]) % 12].clone()
    found[..., -1] = found[..., -2]
    return found


def cases() -> Iterator[tuple[str, Case]]:
    inside, outside, known = drawn(6, 61, 4, 0), drawn(6, 45, 4, 1, 0.7), labels(61, 4)
    yield "random", (inside, known, outside)
    yield "one member", (inside[:1], known, outside[:1])
    yield "two members", (inside[:2], known, outside[:2])
    yield "one input", (inside[:, :1], known[:1], outside[:, :1])
    yield "two classes", (drawn(5, 33, 2, 2), labels(33, 2), drawn(5, 20, 2, 3))
    yield "one class present", (inside, torch.full_like(known, 2), outside)
    yield "probabilities of 0 and 1", (sure(inside), known, sure(outside))
    yield "flat", (torch.zeros_like(inside), known, torch.zeros_like(outside))
    yield "the same for all inputs", (constant(inside), known, constant(outside))
    yield "repeated inputs, level classes", (repeated(inside), known, repeated(outside))
    yield "the same in and out", (inside, known, inside)
    yield "the same members", (inside[:1].expand_as(inside), known, outside[:1].expand_as(outside))
    unit = [torch.rand(x.shape, generator=torch.Generator().manual_seed(5)).half().float() for x in (inside, outside)]
    yield "logits within 0 and 1", (unit[0], known, unit[1])
    yield "many members", (constant(drawn(13, 333, 7, 6)), labels(333, 7), constant(drawn(13, 50, 7, 6)))


CASES = dict(cases())


def uncertainty(logs: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """log(1 − largest mean probability): in logs where that rounds, else in the precision of the mean."""
    means = np.sort(scipy.special.logsumexp(logs, 0) - np.log(len(logs)), -1)
    exact = scipy.special.logsumexp(means[:, :-1], -1)
    with np.errstate(divide="ignore"):
        plain = np.log1p(-mean.max(1).astype(np.float64).clip(max=1))
    return np.where(mean.max(1) > 1 - 0.5 / len(logs), exact, plain).astype(np.float32)


def by_others(logits: Tensor, known: Tensor, outside: Tensor) -> dict[str, list[float]]:
    """All figures of an ensemble; of the ECE several, as the last bit decides in which bin an edge lies."""
    logs, ood_logs = (scipy.special.log_softmax(x.double().numpy(), -1) for x in (logits, outside))
    (p, q), (members, ood) = ([np.exp(x).mean(0) for x in (logs, ood_logs)], [np.exp(x) for x in (logs, ood_logs)])
    y, count, classes = known.numpy(), len(known), p.shape[1]
    # In the precision that predictions have: equal ones are equal there.
    p, q = p.astype(np.float32), q.astype(np.float32)
    confidence, right = p.max(1), p.argmax(1) == y
    label_logs = scipy.special.logsumexp(logs[:, np.arange(count), y], 0) - np.log(len(logs))
    near = [np.clip(p + by, 0, 1) for by in (0, -2e-7, 2e-7)]
    unsure = [uncertainty(x, y) for x, y in ((logs, p), (ood_logs, q))]
    scores, positive = np.concatenate(unsure), np.r_[np.zeros(count), np.ones(len(q))]
    votes = logs.argmax(-1)
    enough = [t for t in scores if (scores[positive == 1] >= t).mean() >= 0.95]
    columns = [equal_mass_by_hand(p[:, c].tolist(), (y == c).astype(float).tolist(), 15) for c in range(classes)]
    found = {
        "accuracy": sklearn.metrics.accuracy_score(y, p.argmax(1)),
        "nll": -label_logs.mean(),
        "brier": ((p.astype(float) - np.eye(classes)[y]) ** 2).sum(1).mean(),
        "adaptive_ece": equal_mass_by_hand(confidence.tolist(), right.astype(float).tolist(), 15),
        "ace": np.mean(columns),
        "aurc": tied_risks(-unsure[0], ~right),
        "disagreement": np.mean([(a != b).mean() for a, b in itertools.combinations(votes, 2)] or [np.nan]),
        "auroc": sklearn.metrics.roc_auc_score(positive, scores),
        "aupr": sklearn.metrics.average_precision_score(positive, scores),
        "fpr95": min((scores[positive == 0] >= t).mean() for t in enough),
    }
    for name, x in (("mi_id", members), ("mi_ood", ood)):
        found[name] = (scipy.stats.entropy(x.mean(0), axis=-1) - scipy.stats.entropy(x, axis=-1).mean(0)).mean()
    ece = [
        float(torchmetrics.multiclass_calibration_error(torch.from_numpy(x), known, classes, 15, "l1")) for x in near
    ]
    return {"ece": ece} | {name: [float(value)] for name, value in found.items()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Predictions, Predictions]]:
    root = tmp_path_factory.mktemp("stored")
    return {
        name: (given(root, f"in-{i}", inside, known), given(root, f"out-{i}", outside))
        for i, (name, (inside, known, outside)) in enumerate(CASES.items())
    }


Stored = dict[str, tuple[Predictions, Predictions]]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_figure_of_the_ensemble_and_of_each_member(name: str, stored: Stored) -> None:
    inside, known, outside = CASES[name]
    report = zoo.evaluate(stored[name][0], ood=stored[name][1], subsets=5)
    wanted = by_others(inside, known, outside)
    assert set(report.ensemble) == set(wanted) == set(FIGURES)
    for figure, x in report.ensemble.items():
        near = [v for v in wanted[figure] if x.value == pytest.approx(v, abs=1e-5, rel=1e-5, nan_ok=True)]
        assert near, (figure, x.value, wanted[figure])
    each = [by_others(inside[i : i + 1], known, outside[i : i + 1]) for i in range(len(inside))]
    for figure, x in report.member.items():
        if figure != "ece":
            assert x.value == pytest.approx(np.mean([y[figure][0] for y in each]), abs=1e-5), figure
    for figures in (report.ensemble, report.member, report.limits, *report.curve.values()):
        for figure, x in figures.items():
            assert math.isnan(x.value) or 0 <= x.value <= FIGURES[figure].highest_value, figure
            if x.low is not None and x.high is not None:
                assert 0 <= x.low <= x.value <= x.high <= FIGURES[figure].highest_value, figure


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "one member", "repeated inputs, level classes", "many members"])
def test_blocks_change_nothing(name: str, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = stored[name]
    members, _, classes = inside.shape
    sizes = [min(2, members)]
    whole = zoo.evaluate(inside, ood=outside, subsets=5, sizes=sizes)
    monkeypatch.setattr(subsets, "BLOCK_BYTES", 7 * 4 * members * classes)  # 7 inputs
    monkeypatch.setattr(subsets, "MOST_READ_BYTES", 14 * 2 * members * classes)  # two blocks
    monkeypatch.setattr(subsets, "MOST_MEAN_BYTES", 1)  # one subset
    monkeypatch.setattr(subsets, "SUBSETS_PER_PASS", 4)
    again = zoo.evaluate(inside, ood=outside, subsets=5, sizes=sizes)
    for size, figures in whole.curve.items():
        for figure, x in figures.items():
            y = again.curve[size][figure]
            for a, b in ((x.value, y.value), (x.low, y.low), (x.high, y.high)):
                assert a == b or a == pytest.approx(b, abs=1e-6, nan_ok=True), figure


@pytest.mark.slow
def test_ensembles_of_some_members(stored: Stored) -> None:
    for name in ("random", "probabilities of 0 and 1", "repeated inputs, level classes"):
        inside, known, outside = CASES[name]
        report = zoo.evaluate(stored[name][0], ood=stored[name][1], subsets=5, sizes=[4], seed=3)
        chosen = metrics.band_plan(6, 4, 3, 5).chosen
        each = [by_others(inside[c], known, outside[c]) for c in chosen]
        for figure, x in report.curve[4].items():
            if figure != "ece":
                assert x.value == pytest.approx(np.mean([e[figure][0] for e in each]), abs=1e-5), figure
