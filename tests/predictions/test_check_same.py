"""Predictions that belong to other members, or to other weights of theirs, are never measured beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.predictions import Predictions, check_same_members, predict, predictions_of
from tests.support.report_pages import few
from tests.support.scenarios import build, load
from tests.support.stored_sets import given

OTHERS = "expected those of the same members with the same weights, in the same order; found "


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> zoo.Collection:
    return load(build(tmp_path_factory.mktemp("a"), members=range(3), snapshots=(20,)))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> zoo.Collection:
    """Members of the same name, ids and epochs, one of them with other weights."""
    root = tmp_path_factory.mktemp("b")
    return load(build(root, members=range(3), change=lambda i, state: state["fc2.bias"].add_(i == 1)))


@pytest.fixture(scope="module")
def sets(members: zoo.Collection, changed: zoo.Collection) -> dict[str, Predictions]:
    far = few(1, labels=False)
    return {
        "in": predict(members, few()),
        "out": predict(members, far),
        "in, changed": predict(changed, few()),
        "out, changed": predict(changed, far),
    }


def calls(members: zoo.Collection, sets: dict[str, Predictions]) -> Iterator[Callable[[], object]]:
    inside, outside, own = sets["in"], sets["out, changed"], sets["in, changed"]
    for of in (members, inside):
        yield lambda of=of: zoo.evaluate(of, few() if of is members else None, ood=outside)
        yield lambda of=of: zoo.evaluate(of, own)
        yield lambda of=of: zoo.pairwise(of, inside, ood=outside)
        yield lambda of=of: zoo.pairwise(of, own)
        yield lambda of=of: zoo.report_page(of, own, None)
        yield lambda of=of: zoo.report_page(of, inside, outside)
    yield lambda: zoo.evaluate(inside, temperature=True, held_out=own)


def test_predictions_of_other_weights_are_refused(members: zoo.Collection, sets: dict[str, Predictions]) -> None:
    for call in calls(members, sets):
        with pytest.raises(UsageError) as error:
            call()
        assert OTHERS + "other weights of member 1. Take both with `members.predictions(…)`" in str(error.value)


def test_the_error_says_which_members(members: zoo.Collection, sets: dict[str, Predictions]) -> None:
    early = zoo.load("tiny", source=members.source.root, where="epoch = 20", snapshots=True)
    assert len(early) == 3
    for others, of, found in (
        (sets["out"][1:], members[:2], "members 1-2"),
        (sets["out"][::-1], members, "members 2,1,0"),
        (sets["out"], sets["in"][:1], "members 0-2"),
        (sets["out"], early, "snapshots 0-2@40"),
    ):
        with pytest.raises(UsageError) as error:
            check_same_members(others, of)
        name = "tiny/few-test" if isinstance(of, Predictions) else "tiny"
        assert str(error.value) == (
            f"predictions tiny/far-test for {name}: {OTHERS}{found}. Take both with `members.predictions(…)` from one "
            "selection of members."
        )
    assert check_same_members(sets["out"], members) is sets["out"]


def test_members_without_hashes_are_compared_by_collection(tmp_path: Path, sets: dict[str, Predictions]) -> None:
    for name, same in (("tiny", True), ("other", False)):
        built = build(tmp_path / name, members=range(3), name=name)
        for row in built.rows:
            row["sha256"] = None
        built.write()
        unhashed = zoo.load(name, source=built.root)
        if same:
            check_same_members(sets["out"], unhashed)
        else:
            with pytest.raises(UsageError, match="found other weights of member 0"):
                check_same_members(sets["out"], unhashed)


def test_stored_predictions_take_the_place_of_the_images(members: zoo.Collection, sets: dict[str, Predictions]) -> None:
    stored = zoo.evaluate(sets["in"], ood=sets["out"])
    assert zoo.evaluate(members, sets["in"], sets["out"]).to_json() == stored.to_json()
    mixed = zoo.evaluate(members, sets["in"], few(1, labels=False))  # these are run
    assert mixed["nll"] == stored["nll"]
    assert mixed["auroc"].value == pytest.approx(stored["auroc"].value, abs=0.01)


def test_a_set_that_is_deleted_while_it_is_read(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(3))
    found = predict(load(built), few())
    walk = iter(found.blocks(10))
    next(walk)
    shard = tmp_path / found.rows.column("path")[0].as_py()
    shard.unlink()
    for call in (lambda: next(walk), lambda: zoo.evaluate(found), lambda: zoo.pairwise(found)):
        with pytest.raises(zoo.errors.SourceNotFound) as error:
            call()
        assert str(error.value) == (
            f"file {shard} of predictions tiny/few-test: expected a file, since the set's manifest names it; found none"
            " any more. Get the set again, or predict again."
        )
    with pytest.raises(zoo.errors.SourceNotFound, match="since the manifest names it; found no such file"):
        zoo.evaluate(predictions_of(load(built), "few-test"))


@pytest.mark.parametrize("members", [1, 5])
def test_equal_inputs_in_and_out_of_distribution_stay_equal_after_scaling(tmp_path: Path, members: int) -> None:
    """A detector can't tell them apart, whatever the temperature: the AUROC is 1/2 to the last bit."""
    generator = torch.Generator().manual_seed(0)
    logits, held = (3 * torch.randn(members, n, 4, generator=generator) for n in (61, 40))
    labels = [torch.randint(4, (n,), generator=generator) for n in (61, 40)]
    inside, outside = given(tmp_path, "in", logits, labels[0]), given(tmp_path, "out", logits)
    fitted = given(tmp_path, "held", held, labels[1])
    fitted.stored = replace(fitted.stored, facts=replace(fitted.facts, fingerprint="1" * 16))
    report = zoo.evaluate(inside, ood=outside, temperature=True, held_out=fitted)
    assert report.calibrated is not None
    assert report.calibrated.temperature.value > 1.5
    for curve in (report.curve, report.calibrated.curve):
        assert {of["auroc"].value for of in curve.values()} == {0.5}


def test_predictions_without_labels_are_out_of_distribution(
    members: zoo.Collection, sets: dict[str, Predictions]
) -> None:
    with pytest.raises(UsageError, match="expected predictions on images with labels of the members' classes"):
        zoo.evaluate(members, sets["out"])
