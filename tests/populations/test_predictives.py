"""Two predictives against each other: sums by hand, intervals by their formula and on simulated populations."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.populations import predictives
from checkpoints_zoo.populations.predictives import compare_logits, compare_predictives


def drawn(members: int, inputs: int, classes: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(members, inputs, classes, generator=generator)


def by_hand(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Agreement and total variation, an input after the other, in numpy's float64."""
    p, q = (special.softmax(side.double().numpy(), -1).mean(0) for side in (first, second))
    same = [float(list(a).index(max(a)) == list(b).index(max(b))) for a, b in zip(p, q, strict=True)]
    apart = [0.5 * sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in zip(p, q, strict=True)]
    return float(np.mean(same)), float(np.mean(apart))


def assert_by_hand(first: Tensor, second: Tensor) -> None:
    found = compare_logits(first, second, subsets=4)
    assert (found["agreement"].value, found["total_variation"].value) == pytest.approx(by_hand(first, second), abs=1e-6)


SURE = 1e4 * torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 0], [1, 1, 2, 0]]), 3)  # probabilities of 0 and 1
NEVER = drawn(3, 6, 4).index_fill_(2, torch.tensor([1]), -math.inf)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (drawn(7, 50, 10), drawn(4, 50, 10, seed=1)),
        (drawn(1, 50, 3), drawn(1, 50, 3, seed=1)),
        (drawn(3, 1, 2), drawn(5, 1, 2, seed=1)),
        (SURE, SURE.flip(1)),
        (SURE, SURE),
        (torch.zeros(2, 5, 3), torch.ones(3, 5, 3)),  # ties: the first class counts
        (torch.zeros(2, 4, 3), SURE[:1]),
        (torch.rand(3, 40, 4, generator=torch.Generator().manual_seed(0)), drawn(2, 40, 4, scale=0.1)),  # in [0, 1]
        (NEVER, drawn(2, 6, 4, seed=1)),
        (drawn(3, 9, 1), drawn(2, 9, 1)),  # one class
        (drawn(4, 30, 5).half(), drawn(3, 30, 5, seed=1).double()),
    ],
    ids=["random", "one", "smallest", "sure", "same", "ties", "half", "unit", "never", "class", "dtypes"],
)
def test_figures_are_the_sums(first: Tensor, second: Tensor) -> None:
    assert_by_hand(first, second)
    assert_by_hand(second, first)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = drawn(5, 40, 3), drawn(6, 40, 3, seed=1)
    whole = compare_logits(*sides, subsets=8)
    monkeypatch.setattr(predictives, "BLOCK_BYTES", 7 * 4 * 3 * (9 + 9 + 5 + 6))  # 7 inputs
    for name, x in compare_logits(*sides, subsets=8).items():
        assert (x.value, x.low, x.high) == pytest.approx((whole[name].value, whole[name].low, whole[name].high))


def test_intervals_are_both_jackknives_in_squares() -> None:
    first, second = drawn(5, 30, 3), drawn(4, 30, 3, seed=1)
    squares = np.zeros(2)
    for side, figure in (
        (first, lambda some: by_hand(some, second)),
        (second, lambda some: by_hand(first, some)),
    ):
        count = len(side)
        kept = count - count // 2
        values = np.array([figure(side[list(c)]) for c in itertools.combinations(range(count), kept)])
        widths = stats.t.ppf(0.975, count - 1) * values.std(0) * math.sqrt(kept / (count - kept))
        squares += widths**2
    for value, half, x in zip(
        by_hand(first, second), np.sqrt(squares), compare_logits(first, second).values(), strict=True
    ):
        expected = (value, max(0.0, value - half), min(1.0, value + half))
        assert (x.value, x.low, x.high) == pytest.approx(expected, abs=1e-6)


def test_intervals_cover_what_fresh_ensembles_give_on_average() -> None:
    """150 pairs of populations of 12 and 9 members: 0.055 is three standard errors of a share."""
    generator = torch.Generator().manual_seed(0)
    centres = 1.5 * torch.randn(2, 40, 3, generator=generator)
    centres[1] = 0.7 * centres[0] + 0.3 * centres[1]

    def train(which: int, members: int) -> Tensor:
        noise = torch.randn(members, 40, 3, generator=generator) + 0.3 * torch.randn(members, 1, 3, generator=generator)
        return centres[which] + noise

    fresh = [by_mean(train(0, 12), train(1, 9)) for _ in range(400)]
    expected = np.mean(fresh, 0)
    covered = np.zeros(2)
    for _ in range(150):
        found = compare_logits(train(0, 12), train(1, 9), subsets=40)
        bounds = [(x.low, x.high) for x in found.values() if x.low is not None and x.high is not None]
        covered += [low <= x <= high for (low, high), x in zip(bounds, expected, strict=True)]
    assert covered / 150 == pytest.approx([0.95, 0.95], abs=0.055)


def by_mean(first: Tensor, second: Tensor) -> tuple[float, float]:
    p, q = (side.softmax(-1).mean(0) for side in (first, second))
    return float((p.argmax(-1) == q.argmax(-1)).double().mean()), float((p - q).abs().sum(-1).mean() / 2)


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("convnet-digits", n=8)


def test_collections_and_stored_predictions(members: zoo.Collection, tmp_path: Path) -> None:
    digits = zoo.images.load("digits")
    found = compare_predictives(members[:5], members[5:], subsets=6)
    logits = predictions.logits(members, digits)
    direct = by_hand(logits[:5], logits[5:])
    assert (found["agreement"].value, found["total_variation"].value) == pytest.approx(direct, abs=1e-6)
    assert found.figures == compare_logits(logits[:5], logits[5:], subsets=6)
    assert (found.members, found.inputs) == ((5, 3), 540)
    assert found.data == f"digits/test {digits.fingerprint}"
    facts = json.loads(found.to_json())
    assert (facts["first"], facts["second"]) == (members[:5].citation, members[5:].citation)
    assert [row["figure"] for row in facts["figures"]] == list(found.to_frame().figure) == list(found.figures)
    stored = predictions.predict(members, "digits", tmp_path)
    for sides in ((stored[:5], stored[5:]), (members[:5], stored[5:]), (stored[:5], members[5:])):
        again = compare_predictives(*sides, subsets=6)
        assert again.data == found.data
        for name, x in found.figures.items():  # stored in float16
            assert again[name].value == pytest.approx(x.value, abs=2e-4)


def test_members_in_both_or_too_few_have_no_intervals(members: zoo.Collection, tmp_path: Path) -> None:
    few = zoo.images.load("digits")
    some = ImageData("few", "test", few.images[:40], few.labels[:40], few.classes)  # type: ignore[index]
    stored = predictions.predict(members[3:7], some, tmp_path)
    for sides in ((members[:4], members), (members[:4], stored), (members[:2], members[2:])):
        found = compare_predictives(*sides, some)
        assert all(x == Interval(x.value, None, None) for x in found.figures.values())
    assert compare_predictives(members[:3], stored, some)["agreement"].low is not None


def test_what_can_not_be_compared(members: zoo.Collection, tmp_path: Path) -> None:
    few = zoo.images.load("digits")
    some = ImageData("few", "test", few.images[:40], few.labels[:40], few.classes)  # type: ignore[index]
    stored = predictions.predict(members[:2], some, tmp_path)
    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: compare_logits(drawn(2, 3, 4), drawn(2, 3, 5)),
            "two predictives: expected logits (member, input, class) on the same inputs and classes;"
            " found shapes (2, 3, 4) and (2, 3, 5).",
        ),
        (
            lambda: compare_logits(drawn(2, 0, 4), drawn(2, 0, 4)),
            "two predictives: expected logits (member, input, class) on the same inputs and classes;"
            " found shapes (2, 0, 4) and (2, 0, 4).",
        ),
        (
            lambda: compare_predictives(members, stored),
            f"images of two predictives: expected predictions on images digits/test {few.fingerprint};"
            f" found predictions on images few/test {some.fingerprint}.",
        ),
        (
            lambda: compare_predictives(members, stored, "digits"),
            f"predictions convnet-digits/few-test: expected 540 inputs, fingerprint {few.fingerprint}, as images"
            f" digits/test have; found 40 inputs, fingerprint {some.fingerprint}, of few/test. The set is on other"
            " images, or on these in another order; predict on these.",
        ),
        (
            lambda: compare_predictives(members[:1], members[1:2])["brier"],
            "figure 'brier': expected one of agreement, total_variation; found none such.",
        ),
    ]
    for call, text in refused:
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value) == text


def test_other_classes_are_refused(members: zoo.Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo.Collection, "classes", property(lambda c: ("a", "b") if len(c) == 2 else ("b", "a")))
    with pytest.raises(UsageError) as error:
        compare_predictives(members[:2], members[2:])
    assert str(error.value) == "classes of two predictives: expected a, b, in this order; found b, a."
