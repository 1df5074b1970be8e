"""All pairs of members, against sums over one pair at a time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.populations.divergence import Pairs, compare_pairs, find_embedding
from checkpoints_zoo.populations.pairwise_information import Pairwise, pairwise, summarise_pairs

NATS = 1e-6


def drawn(members: int, inputs: int, classes: int, noise: float = 1.0, scale: float = 3.0, seed: int = 0) -> Tensor:
    """Logits whose members share a part."""
    generator = torch.Generator().manual_seed(seed)
    shared = scale * torch.randn(1, inputs, classes, generator=generator)
    return shared + noise * torch.randn(members, inputs, classes, generator=generator)


def informations(probs: Tensor) -> np.ndarray:
    """One pair after another, with scipy's entropies in float64."""
    p = probs.double().numpy()
    own = special.entr(p).sum(-1)
    found = np.zeros((len(p), len(p)))
    for i, j in itertools.permutations(range(len(p)), 2):
        found[i, j] = (special.entr((p[i] + p[j]) / 2).sum(-1) - (own[i] + own[j]) / 2).mean()
    return found


def assert_symmetric(pairs: Pairs) -> None:
    for matrix in (pairs.information, pairs.disagreement):
        assert matrix.dtype == torch.float64
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix.diagonal(), torch.zeros(len(matrix), dtype=torch.float64))
        assert bool((matrix >= 0).all())


@pytest.mark.parametrize(
    ("members", "inputs", "classes", "noise", "scale"),
    [
        (2, 1, 2, 1, 1),  # the smallest there is
        (12, 100, 10, 1, 3),
        (12, 60, 100, 1, 3),
        (5, 30, 100, 1, 30),  # sure of everything
        (5, 40, 1000, 0.3, 0),  # sure of nothing
        (5, 20, 1000, 3, 8),
        (3, 3000, 3, 1, 2),
        (90, 4, 300, 1, 3),  # more than one block of members
    ],
)
def test_informations_of_random_logits(members: int, inputs: int, classes: int, noise: float, scale: float) -> None:
    logits = drawn(members, inputs, classes, noise, scale)
    found = compare_pairs(logits)
    np.testing.assert_allclose(found.information, informations(logits.double().softmax(-1)), rtol=0, atol=NATS)
    assert_symmetric(found)
    assert found.inputs == inputs


@given(
    classes=st.sampled_from([2, 3, 7, 10, 40, 100]),
    alpha=st.sampled_from([1e-3, 0.01, 0.1, 1.0, 10.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_informations_of_any_probabilities(classes: int, alpha: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    probs = torch.tensor(random.dirichlet(np.full(classes, alpha), (4, 3)))
    probs[:, 1] = probs[:, 1].float().half().double()  # rounded, so that they don't sum to one
    probs[0, 0] = torch.eye(classes, dtype=torch.float64)[0]
    found = compare_pairs(probs, kind="probabilities")
    # Not the mean over many inputs, in which errors would cancel.
    np.testing.assert_allclose(found.information, informations(probs), rtol=0, atol=1.3 * NATS)


@pytest.mark.parametrize("classes", [2, 3, 10, 100, 1000, 10000])
def test_the_bound_of_an_embedding_holds_between_the_points_it_was_found_on(classes: int) -> None:
    found = find_embedding(classes)
    assert found.bound <= NATS
    points = torch.tensor([0.0, *np.logspace(-11.5, 0, 333), 0.5, 0.25], dtype=torch.float32)
    vectors, p = found(points).double().numpy(), points.double().numpy()
    norms = (vectors**2).sum(1)
    distances = norms[:, None] + norms - 2 * vectors @ vectors.T
    x, y = np.meshgrid(p, p)
    exact = special.entr((x + y) / 2) - (special.entr(x) + special.entr(y)) / 2
    # Of a class, as a share of what sums to 2 over the classes.
    assert (2 * abs(distances - exact) / ((x + y) / 2 + 1 / classes)).max() < 1.1 * NATS


def test_probabilities_of_0_and_1() -> None:
    probs = torch.eye(4)[torch.tensor([[0, 0], [1, 0], [1, 2], [0, 0]])]
    found = compare_pairs(probs, kind="probabilities")
    expected = math.log(2) * np.array([[0, 0.5, 1, 0], [0.5, 0, 0.5, 0.5], [1, 0.5, 0, 1], [0, 0.5, 1, 0]])
    np.testing.assert_allclose(found.information, expected, rtol=0, atol=NATS)
    np.testing.assert_array_equal(found.disagreement, expected / math.log(2))
    assert float(found.information[0, 3]) == 0  # equal members


def test_logits_of_minus_infinity_are_probabilities_of_0() -> None:
    logits = drawn(4, 9, 5)
    logits[:, :, 3] = -math.inf
    np.testing.assert_allclose(
        compare_pairs(logits).information, informations(logits.double().softmax(-1)), rtol=0, atol=NATS
    )


def test_logits_within_0_and_1_stay_logits() -> None:
    given = torch.rand(3, 20, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    as_logits, as_probs = compare_pairs(given), compare_pairs(given, kind="probabilities")
    np.testing.assert_allclose(as_logits.information, informations(given.double().softmax(-1)), rtol=0, atol=NATS)
    np.testing.assert_allclose(as_probs.information, informations(given), rtol=0, atol=NATS)
    assert float(as_probs.information[0, 1]) > 3 * float(as_logits.information[0, 1])


def test_equal_members_have_none_and_members_that_hardly_differ_have_it_in_full() -> None:
    logits = drawn(6, 100, 100, noise=1e-3).double()
    logits[4] = logits[1]
    found = compare_pairs(logits.softmax(-1), kind="probabilities")
    expected = informations(logits.softmax(-1))
    assert float(found.information[1, 4]) < 1e-12
    known = expected > 0
    assert expected[known].max() < 3e-7
    known[1, 4] = known[4, 1] = False
    np.testing.assert_allclose(found.information.numpy()[known], expected[known], rtol=3e-4, atol=0)


@pytest.mark.slow
def test_pairs_as_torch_uncertainty_has_them(oracle: Callable[[str], ModuleType]) -> None:
    tu = oracle("torch_uncertainty.metrics.classification")
    probs = drawn(6, 50, 10).softmax(-1)
    found = compare_pairs(probs, kind="probabilities")
    for i, j in itertools.combinations(range(6), 2):
        information, disagreement = tu.MutualInformation(), tu.Disagreement()
        for metric in (information, disagreement):
            metric.update(probs[[i, j]].transpose(0, 1))
        assert float(found.information[i, j]) == pytest.approx(float(information.compute()), abs=1e-5)
        assert float(found.disagreement[i, j]) == pytest.approx(float(disagreement.compute()), abs=1e-6)


def test_disagreement_counts_inputs_and_takes_the_first_of_equal_classes() -> None:
    logits = torch.randint(0, 3, (7, 400, 4), generator=torch.Generator().manual_seed(0)).float()
    top = logits.numpy().argmax(-1)
    expected = (top[:, None] != top[None]).mean(-1)
    np.testing.assert_allclose(compare_pairs(logits).disagreement, expected, rtol=0, atol=1e-12)


def test_pieces_give_what_the_whole_gives() -> None:
    logits = drawn(8, 70, 10)
    whole = compare_pairs(logits)
    others = [
        compare_pairs(logits, memory=1),
        compare_pairs(torch.split(logits, 9, dim=1)),
        compare_pairs(iter(torch.split(logits, 33, dim=1))),
    ]
    for found in others:
        np.testing.assert_allclose(found.information, whole.information, rtol=0, atol=1e-7)
        assert torch.equal(found.disagreement, whole.disagreement)
        assert found.inputs == 70
        assert_symmetric(found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_taken_as_the_values_they_are(dtype: torch.dtype) -> None:
    logits = drawn(5, 30, 10).to(dtype)
    expected = informations(logits.double().softmax(-1))
    np.testing.assert_allclose(compare_pairs(logits).information, expected, rtol=0, atol=NATS)


def test_what_the_caller_allows_elsewhere_changes_nothing() -> None:
    logits = drawn(5, 30, 10)
    expected = compare_pairs(logits).information
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compare_pairs(logits.requires_grad_()).information
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, expected)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            torch.zeros(1, 2, 3), "logits",
            "predictions: expected (member, input, class) floats, of two members and two classes or more;"
            " found float32 of shape (1, 2, 3).",
        ),
        (
            torch.zeros(3, 2), "logits",
            "predictions: expected (member, input, class) floats, of two members and two classes or more;"
            " found float32 of shape (3, 2).",
        ),
        (
            torch.zeros(3, 2, 2, dtype=torch.int64), "logits",
            "predictions: expected (member, input, class) floats, of two members and two classes or more;"
            " found int64 of shape (3, 2, 2).",
        ),
        (torch.zeros(3, 0, 2), "logits", "predictions: expected an input or more; found none."),
        ([], "logits", "predictions: expected an input or more; found none."),
        (
            [torch.zeros(3, 1, 2), torch.zeros(4, 1, 2)], "logits",
            "block of predictions: expected 3 members, 2 classes; found float32 of shape (4, 1, 2).",
        ),
        (torch.zeros(3, 1, 2), "probs", "kind of predictions: expected 'logits' or 'probabilities'; found 'probs'."),
        (
            torch.tensor([[[0.0, 0]], [[1, 2]], [[math.nan, 0]]]), "logits",
            "logits: expected finite logits, or −inf for a probability of 0;"
            " found others for the member at position 2.",
        ),
        (
            torch.tensor([[[0.5, 0.5]], [[1, 2]]]), "probabilities",
            "probabilities: expected no negative one, and a sum of 1 over the classes;"
            " found others for the member at position 1. Logits need kind='logits'.",
        ),
        (
            torch.tensor([[[1.5, -0.5]], [[1, 0]]]), "probabilities",
            "probabilities: expected no negative one, and a sum of 1 over the classes;"
            " found others for the member at position 0. Logits need kind='logits'.",
        ),
    ],
)  # fmt: skip
def test_what_is_no_predictions_is_refused(given: Any, kind: Any, text: str) -> None:
    with pytest.raises(UsageError) as error:
        compare_pairs(given, kind=kind)
    assert str(error.value) == text


def matrices(members: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two figures of pairs that correlate."""
    random = np.random.default_rng(seed)
    own = random.normal(size=(2, members))
    own[1] += own[0]
    each = random.normal(size=(2, members, members))
    pairs = np.exp(0.3 * (own[:, :, None] + own[:, None]) + 0.1 * (each + each.transpose(0, 2, 1)))
    return torch.tensor(pairs[0]).fill_diagonal_(0), torch.tensor(pairs[1]).fill_diagonal_(0)


def by_hand(x: Tensor, y: Tensor) -> tuple[Interval, Interval]:
    """The mean of x and the correlation over pairs, with every half of the members and each member left out once."""
    members = len(x)

    def figures(chosen: tuple[int, ...]) -> tuple[float, float]:
        pairs = list(itertools.combinations(chosen, 2))
        a, b = ([float(m[i, j]) for i, j in pairs] for m in (x, y))
        return float(np.mean(a)), math.atanh(stats.pearsonr(a, b).statistic)

    everyone = figures(tuple(range(members)))
    gone = members // 2
    some = np.array([figures(c) for c in itertools.combinations(range(members), members - gone)])
    errors = some.std(0) * math.sqrt((members - gone) / gone)
    # Hall's interval for skewed means (1992), where it is wider than Student's.
    t = stats.t.ppf(0.975, members - 1)
    single = np.array([figures(tuple(j for j in range(members) if j != i)) for i in range(members)])
    shape = stats.skew(everyone - single, axis=0) / math.sqrt(members)

    def transformed(u: float) -> Any:
        return 3 / shape * (np.cbrt(1 + shape * (u - shape / 6)) - 1)

    low = everyone - np.maximum(transformed(t), t) * errors
    high = everyone + np.maximum(-transformed(-t), t) * errors
    r = np.tanh([everyone[1], low[1], high[1]])
    return Interval(everyone[0], max(low[0], 0), high[0]), Interval(*r)


def assert_interval(found: Interval, expected: Interval) -> None:
    values = [(x.value, x.low, x.high) for x in (found, expected)]
    assert values[0] == pytest.approx(values[1], abs=1e-9)


@pytest.mark.parametrize("members", [6, 9])
def test_means_and_correlation_with_the_jackknife_over_members(members: int) -> None:
    x, y = matrices(members, seed=members)
    zero = torch.zeros_like(x)
    found = summarise_pairs(Pairs(x, zero, 5), Pairs(y, zero, 5))
    mean, r = by_hand(x, y)
    assert_interval(found["mi_id"], mean)
    assert_interval(found["correlation"], r)
    assert found["disagreement"] == Interval(0.0, 0.0, 0.0)


def test_figures_that_are_the_same_for_all_pairs_have_no_correlation() -> None:
    same = torch.full((5, 5), 0.1, dtype=torch.float64).fill_diagonal_(0)
    found = summarise_pairs(Pairs(same, same, 1), Pairs(matrices(5, 0)[0], same, 1))
    assert math.isnan(found["correlation"].value)
    assert found["correlation"].low is None
    assert found["mi_id"].value == pytest.approx(0.1, abs=1e-15)
    assert json.loads(found.to_json())["figures"][-1] == {
        "figure": "correlation", "value": None, "low": None, "high": None, "unit": "-1..1",
    }  # fmt: skip


def test_two_members_are_one_pair_without_intervals() -> None:
    found = summarise_pairs(compare_pairs(drawn(2, 30, 4)))
    assert list(found.figures) == ["mi_id", "disagreement"]
    assert (len(found), found["mi_id"].low, found["mi_id"].high) == (1, None, None)
    assert found["mi_id"].value == pytest.approx(informations(drawn(2, 30, 4).softmax(-1))[0, 1], abs=NATS)
    with pytest.raises(UsageError) as error:
        found["mi_ood"]
    assert str(error.value) == "figure 'mi_ood': expected one of mi_id, disagreement; found none such."


def test_matrices_of_other_members_are_refused() -> None:
    with pytest.raises(UsageError) as error:
        summarise_pairs(compare_pairs(drawn(2, 3, 4)), compare_pairs(drawn(3, 3, 4)))
    assert str(error.value) == "members: expected as many in each; found 2 and 3."


@pytest.fixture(scope="module")
def found() -> Pairwise:
    return pairwise(zoo.load("convnet-digits", n=6), "digits", ood="photos")


def test_members_of_a_collection(found: Pairwise) -> None:
    members = zoo.load("convnet-digits", n=6)
    images = [zoo.images.load(name) for name in ("digits", "photos")]
    with torch.inference_mode():
        logits = [members.ensemble()(members.preprocess(x.images)) for x in images]
    for pairs, of_images in zip((found.inside, found.outside), logits, strict=True):
        assert pairs is not None
        expected = informations(of_images.double().softmax(-1))
        np.testing.assert_allclose(pairs.information, expected, rtol=0, atol=2 * NATS)
    first, second = np.triu_indices(6, 1)
    frame = found.to_frame()
    assert list(frame.columns) == ["member_a", "member_b", "mi_id", "disagreement", "mi_ood", "disagreement_ood"]
    assert frame["member_a"].tolist() == first.tolist()
    assert frame["member_b"].tolist() == second.tolist()
    assert frame["mi_ood"].mean() == pytest.approx(found["mi_ood"].value)
    x, y = (found.inside.information, found.outside.information)  # type: ignore[union-attr]
    assert_interval(found["correlation"], by_hand(x, y)[1])
    facts = json.loads(found.to_json())
    assert facts["citation"] == members.citation
    assert (facts["members"], facts["pairs"], facts["inputs"], facts["ood_inputs"]) == (6, 15, 540, 2000)
    assert facts["data"].startswith("digits/test ")
    assert [row["figure"] for row in facts["figures"]] == [
        "mi_id", "disagreement", "mi_ood", "disagreement_ood", "correlation",
    ]  # fmt: skip


def test_stored_predictions_give_the_same(found: Pairwise, tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=6)
    stored = [predictions.predict(members, name, tmp_path) for name in ("digits", "photos")]
    again = pairwise(stored[0], ood=stored[1])
    for name, x in found.figures.items():  # stored in float16
        assert again[name].value == pytest.approx(x.value, abs=2e-4)
    assert (again.data, again.ood, again.ids) == (found.data, found.ood, found.ids)
    mixed = pairwise(members, ood=stored[1])
    assert mixed["mi_id"] == found["mi_id"]
    assert mixed["mi_ood"] == again["mi_ood"]
    with pytest.raises(UsageError) as error:
        pairwise(members[:3], ood=stored[1])
    assert str(error.value) == (
        "predictions convnet-digits/photos-test for convnet-digits: expected those of the same members with the same"
        " weights, in the same order; found members 0-5. Take both with `members.predictions(…)` from one selection of"
        " members."
    )
    with pytest.raises(UsageError) as error:
        pairwise(stored[0], "digits")
    assert str(error.value) == (
        "pairs of predictions convnet-digits/digits-test: expected no images; found some."
        " Give the collection, to run its members on images."
    )


def test_one_member_has_no_pair() -> None:
    with pytest.raises(UsageError) as error:
        pairwise(zoo.load("convnet-digits", n=1), "digits")
    assert str(error.value) == "pairs of convnet-digits: expected two members or more; found 1."


def test_no_interval_leaves_the_range_of_its_figure() -> None:
    generator = torch.Generator().manual_seed(3)
    votes = torch.stack([torch.randint(4, (6,), generator=generator) for _ in range(3)] + [torch.zeros(6).long()])
    figures = summarise_pairs(compare_pairs(8 * torch.nn.functional.one_hot(votes, 4).float())).figures
    low, high = figures["disagreement"].low, figures["disagreement"].high
    assert low is not None
    assert high is not None
    assert 0 <= low < figures["disagreement"].value < high <= 1
