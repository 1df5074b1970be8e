"""Stored predictions of other members, on other images, damaged or no predictions at all: each refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import (
    DamagedError,
    FormatError,
    MemberNotFound,
    SelectionError,
    SourceNotFound,
    UsageError,
    ZooError,
)
from checkpoints_zoo.predictions import Predictions, predict, predictions_of, storing
from checkpoints_zoo.predictions.prediction_sets import find_set_problems, weight_hashes
from checkpoints_zoo.publishing.verification import verify_predictions
from tests.support.commands import run, values
from tests.support.scenarios import Built, build, load
from tests.support.stored_sets import INSIDE, by_loop, few, six


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Predictions]:
    """Nobody changes them."""
    return six(tmp_path_factory.mktemp("stored"))


def refused(kind: type[ZooError], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


def test_other_images_are_refused(stored: tuple[Built, Predictions]) -> None:
    built, found = stored
    other = few(seed=1)
    for call in (
        lambda: predictions_of(load(built), "few-test", data=other),
        lambda: found.check_data(other),
        lambda: zoo.evaluate(found, other),
    ):
        refused(
            UsageError,
            f"predictions tiny/few-test: expected 9 inputs, fingerprint {other.fingerprint}, as images few/test have; "
            f"found 9 inputs, fingerprint {few().fingerprint}, of few/test. The set is on other images, or on these in "
            "another order; predict on these.",
            call,
        )
    assert predictions_of(load(built), "few-test", data=few()).ids == found.ids
    refused(
        UsageError,
        f"predictions tiny/few-test in {built.root}: expected none yet, or some with fingerprint "
        f"{other.fingerprint!r}; found some with fingerprint {few().fingerprint!r}. Give another name, or delete the "
        "set.",
        lambda: predict(load(built), other, built.root),
    )


def test_other_members_are_refused(stored: tuple[Built, Predictions], tmp_path: Path) -> None:
    built, _ = stored
    more = build(tmp_path / "more", members=range(8))
    refused(
        MemberNotFound,
        "predictions tiny/few-test: expected a row for each of the 8 selected members; found none for members 6-7. "
        "`zoo-cli predict` adds the missing ones; or select members that the set has.",
        lambda: predictions_of(load(more), "few-test", source=built.root),
    )
    changed = build(tmp_path / "changed", members=range(6), change=lambda i, state: state["fc2.bias"].add_(i == 3))
    hashes = {r["member"]: r["sha256"] for r in changed.rows}, {r["member"]: r["sha256"] for r in built.rows}
    for call in (
        lambda: predictions_of(load(changed), "few-test", source=built.root),
        lambda: predict(load(changed), few(), built.root),
    ):
        refused(
            UsageError,
            f"predictions tiny/few-test of member 3: expected made with weights of sha256 {hashes[0][3][:16]}…; found "
            f"made with {hashes[1][3][:16]}…. Predict again, under another name or after deleting the set.",
            call,
        )
    assert predictions_of(load(changed)[:3], "few-test", source=built.root).ids == [0, 1, 2]
    for row in changed.rows:
        row["sha256"] = None
    changed.write()
    with pytest.raises(UsageError, match="found null, so that the two can't be compared"):
        predictions_of(load(changed), "few-test", source=built.root)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "classes",
            list("1234567890"),
            "expected classes 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, in this order; found classes 0,",
        ),
        ("preprocessing", {"size": [8, 8], "channels": 1, "mean": [0.4], "std": [0.4]}, "inputs preprocessed as {'si"),
    ],
)
def test_other_classes_or_preprocessing_are_refused(
    stored: tuple[Built, Predictions], tmp_path: Path, key: str, value: object, text: str
) -> None:
    other = build(tmp_path, members=range(6))
    other.description[key] = value
    other.write()
    with pytest.raises(UsageError) as caught:
        predictions_of(load(other), "few-test", source=stored[0].root)
    assert text in str(caught.value)


def test_unknown_names_are_refused(stored: tuple[Built, Predictions], tmp_path: Path) -> None:
    built, found = stored
    refused(
        SourceNotFound,
        f"predictions 'many-test' of tiny: expected a set of source {built.root}, which has: few-test; found no such "
        "set. `zoo-cli predict tiny --data … --out …` makes one.",
        lambda: predictions_of(load(built), "many-test"),
    )
    with pytest.raises(SourceNotFound, match="expected a folder with predictions/COLLECTION/SET in it; found a folder"):
        predictions_of(load(built), "few-test", source=tmp_path)
    with pytest.raises(UsageError, match=r"name of a set of predictions '\.\./x'"):
        predict(load(built), few(), tmp_path, name="../x")
    for call in (lambda: found.logits([7]), lambda: found.logits([True])):
        with pytest.raises(MemberNotFound):
            call()
    with pytest.raises(UsageError, match="expected a slice; found 3"):
        found[3]
    with pytest.raises(SelectionError, match="expected one member or more; found none"):
        found[6:]
    for call in (lambda: found.blocks(0), lambda: list(found.batches(0))):
        with pytest.raises(UsageError, match="expected a whole number from 1; found 0"):
            call()


def copied(built: Built, folder: Path) -> Path:
    """Copy the predictions of a source; return the folder of the set there."""
    for path in (built.root / INSIDE).iterdir():
        target = folder / INSIDE / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder / INSIDE


def test_damaged_files_are_refused(stored: tuple[Built, Predictions], tmp_path: Path) -> None:
    built, _ = stored
    folder = copied(built, tmp_path)
    (shard,) = folder.glob("*.safetensors")
    members, raw = load(built), shard.read_bytes()
    weights = weight_hashes(members.source.read_collection("tiny")[1])

    def found() -> Predictions:
        return predictions_of(members, "few-test", source=tmp_path)

    def said() -> list[tuple[int | None, str]]:
        return [(p.member, p.kind) for p in find_set_problems(found().stored, weights)]

    assert said() == []
    shard.write_bytes(raw[:-1])
    with pytest.raises(DamagedError, match="expected offsets within the 1,103 bytes"):
        found().logits()
    assert said() == [(i, "bytes") for i in range(6)]
    first = found().rows.to_pylist()[0]["offset"]
    shard.write_bytes(raw[:first] + b"\x00\x7e" + raw[first + 2 :])  # NaN in float16
    refused(
        DamagedError,
        "predictions of member 0 in tiny/few-test: expected finite logits; found others. `zoo-cli verify` says "
        "whether their file was changed; get it again, or predict again.",
        lambda: found().logits(),
    )
    assert said() == [(0, "hash"), (0, "finite")]
    shard.write_bytes(raw[:first] + bytes([raw[first] ^ 1]) + raw[first + 1 :])
    assert said() == [(0, "hash")]
    shard.unlink()
    with pytest.raises(SourceNotFound, match="expected a file, since the manifest names it; found no such file"):
        found().logits()
    assert said() == [(None, "bytes")]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": [10] * 9}, "9 labels from 0 to 9; found 10"),
        ({"labels": [0] * 8}, "9 labels from 0 to 9; found 8"),
        ({"inputs": 8}, "'logits' (8, 10) of F16 or F32 in layout 'logits'; found F16 [('logits', (9, 10))]"),
        ({"inputs": True}, "'inputs' to be a int"),
        ({"classes": []}, "the names of the classes, and at least one input"),
        ({"format_version": 2}, "format version 1 or older; found version 2"),
        ({"set": "other"}, "the names 'tiny' and 'few-test', as its folder's; found 'tiny' and 'other'"),
    ],
)
def test_facts_that_break_the_format_are_refused(
    stored: tuple[Built, Predictions], tmp_path: Path, change: dict[str, object], text: str
) -> None:
    built, _ = stored
    path = copied(built, tmp_path) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError) as caught:
        predictions_of(load(built), "few-test", source=tmp_path)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "kind", "text"),
    [
        ("path", "shards/tiny/x.safetensors", FormatError, "a path below predictions/tiny/few-test/; found 'shards/"),
        ("path", "../x", DamagedError, "a path inside the source"),
        ("weights_sha256", "xyz", FormatError, "weights_sha256 of 64 lower-case hex digits; found 'xyz'"),
        ("offset", -8, DamagedError, "found offset -8"),
        ("layout", "other", FormatError, "a layout among logits; found 'other'"),
    ],
)
def test_rows_that_break_the_format_are_refused(
    stored: tuple[Built, Predictions], tmp_path: Path, column: str, value: object, kind: type[ZooError], text: str
) -> None:
    built, _ = stored
    path = copied(built, tmp_path) / "manifest.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[2][column] = value
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)
    with pytest.raises(kind) as caught:
        predictions_of(load(built), "few-test", source=tmp_path)
    assert text in str(caught.value)


def test_logits_that_float16_lacks_are_refused(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(3), change=lambda i, state: state["fc2.bias"].fill_(1e5 if i == 1 else 0))
    refused(
        DamagedError,
        "logits of member 1 on few/test: expected values that are finite as F16; found infinite ones or NaN. Leave "
        "the member out.",
        lambda: predict(load(built), few(), tmp_path),
    )
    assert predict(load(built, members=[0, 2]), few(), tmp_path).ids == [0, 2]


def test_weights_that_do_not_match_their_rows_are_refused(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(2))
    built.rows[1]["sha256"] = "0" * 64
    built.write()
    with pytest.raises(
        DamagedError, match="member 1 of tiny: expected weights of sha256 0000000000000000…, as its row"
    ):
        predict(load(built), few(), tmp_path)


def test_parts_of_other_facts_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, members=range(3))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storing.FinishedMembers, "write_set", fail)
        with pytest.raises(KeyboardInterrupt):
            predict(load(built), few(seed=1), tmp_path)
    laid = list((tmp_path / INSIDE / ".parts").glob("*.safetensors"))
    assert len(laid) == 3
    found = predict(load(built), few(), tmp_path)
    torch.testing.assert_close(found.logits()[2], by_loop(built, 2, few()), rtol=2**-11, atol=1e-5)
    assert not (tmp_path / INSIDE / ".parts").exists()


def test_verify_computes_some_logits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, members=range(4))
    logits_by_group = storing.logits_by_group

    def wrong(*arguments: Any) -> Any:
        for ids, logits in logits_by_group(*arguments):
            yield ids, logits + torch.tensor([0.0, 0.0, 1.0, 0.0])[:, None, None]

    monkeypatch.setattr(storing, "logits_by_group", wrong)
    predict(load(built), "digits", tmp_path)
    found = verify_predictions(load(built), "digits-test")
    assert [(p.collection, p.member, p.kind) for p in found] == [("tiny/digits-test", 2, "logits")]
    assert found[0].text.startswith("expected what the members give now, within 0.0078125 of the largest; found 0.")
    assert verify_predictions(load(built), "digits-test", sample=0) == []
    result = run("verify", tmp_path, "--format", "json", "--sample", "4")
    assert result.exit_code == 1
    assert ("tiny/digits-test", 2, "logits") in {
        (p["collection"], p["member"], p["kind"]) for p in values(result)["problems"]
    }
