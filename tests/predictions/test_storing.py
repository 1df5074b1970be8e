"""Predictions stored and read back: by safetensors' own reader, pyarrow, and a plain loop over modules."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import (
    LockedError,
    SourceNotFound,
    UsageError,
)
from checkpoints_zoo.predictions import Predictions, predict, predictions_of, storing
from checkpoints_zoo.predictions.prediction_sets import SetDescription, find_set_problems, logits_layout, weight_hashes
from tests.support.kills import Contract, OnFiles, forks
from tests.support.scenarios import Built, build, digest_of, hash_of, load, opened
from tests.support.stored_sets import INSIDE, by_loop, few, six


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Predictions]:
    """Nobody changes them."""
    return six(tmp_path_factory.mktemp("stored"))


def test_another_reader_finds_the_logits(stored: tuple[Built, Predictions]) -> None:
    built, found = stored
    (shard,) = (built.root / INSIDE).glob("*.safetensors")
    assert shard.name.startswith("00000-")
    tensors = opened(shard)
    assert {n for n in tensors if not n.endswith("/_pad")} == {f"{i:06d}/logits" for i in range(6)}
    rows = pq.read_table(built.root / INSIDE / "manifest.parquet").to_pylist()
    weights = {r["member"]: r["sha256"] for r in built.rows if r["final"]}
    for i in range(6):
        logits = tensors[f"{i:06d}/logits"]
        assert logits.dtype == torch.float16
        torch.testing.assert_close(logits.float(), by_loop(built, i, few()), rtol=2**-11, atol=1e-5)
        row = rows[i]
        assert (row["member"], row["epoch"], row["final"], row["status"], row["dtype"]) == (i, 40, True, "ok", "F16")
        assert row["weights_sha256"] == weights[i]
        assert row["sha256"] == hash_of({"logits": logits})
        assert row["path"] == f"{INSIDE}/{shard.name}"
        raw = shard.read_bytes()[row["offset"] : row["offset"] + row["nbytes"]]
        assert raw[: 2 * logits.numel()] == logits.numpy().tobytes()
        assert torch.equal(found.logits([i], torch.float16)[0], logits)


def test_facts_say_on_which_images(stored: tuple[Built, Predictions]) -> None:
    built, found = stored
    values = json.loads((built.root / INSIDE / "manifest.json").read_text())
    layout = values.pop("layouts")
    assert layout == {"logits": {"tensors": [["logits", "F16", [9, 10]]], "counters": [], "pad": 4}}
    assert values == {
        "format_version": 1, "collection": "tiny", "set": "few-test", "data": "few", "split": "test", "revision": "",
        "fingerprint": few().fingerprint, "inputs": 9, "classes": list("0123456789"),
        "preprocessing": built.description["preprocessing"], "computed": "float32", "view": "",
        "version": zoo.__version__, "citation": "", "labels": few().labels.tolist(),  # type: ignore[union-attr]
    }  # fmt: skip
    assert repr(found) == "Predictions('tiny/few-test', 6 members × 9 inputs × 10 classes, on few/test)"
    assert found.citation == load(built).citation
    assert found[2:4].citation == load(built)[2:4].citation
    assert found.data == f"few/test {few().fingerprint}"
    assert torch.equal(found.labels, few().labels)  # type: ignore[arg-type]


def test_parts_are_parts_of_the_whole(stored: tuple[Built, Predictions]) -> None:
    _, found = stored
    whole = found.logits()
    assert whole.shape == found.shape == (6, 9, 10)
    assert torch.equal(found.logits([4, 1]), whole[[4, 1]])
    assert torch.equal(found[1:6:2].logits(), whole[1::2])
    assert torch.equal(found.one(3), whole[3])
    for inputs in (1, 4, 9, 100):
        blocks = found.blocks(inputs)
        for _ in range(2):  # they can be walked again
            assert torch.equal(torch.cat(list(blocks), 1), whole)
        assert len(blocks) == len(list(blocks))
    assert len(found.blocks()) == 1
    batches = list(found.batches(4, torch.float64))
    assert [ids for ids, _ in batches] == [[0, 1, 2, 3], [4, 5]]
    assert torch.equal(torch.cat([logits for _, logits in batches]), whole.double())
    assert found.block(5, 5).shape == (6, 0, 10)


@given(begin=st.integers(0, 9), end=st.integers(0, 9))
def test_any_block(stored: tuple[Built, Predictions], begin: int, end: int) -> None:
    _, found = stored
    if begin <= end:
        assert torch.equal(found.block(begin, end), found.logits()[:, begin:end])
    else:
        with pytest.raises(UsageError):
            found.block(begin, end)


@given(st.integers(1, 20), st.integers(1, 12), st.booleans(), st.sampled_from(["F16", "F32"]), st.text(max_size=20))
@settings(max_examples=40)
def test_facts_round_trip(inputs: int, classes: int, labelled: bool, dtype: str, text: str) -> None:
    facts = SetDescription(
        collection="c", set="s", data=text, split=text, revision=text, fingerprint=text, inputs=inputs,
        classes=tuple(f"{text}{i}" for i in range(classes)), preprocessing={"mean": [0.5]}, computed="float32",
        view=text, version="1", citation=text, layouts={"logits": logits_layout(inputs, classes, dtype)},
        labels=tuple(i % classes for i in range(inputs)) if labelled else None,
    )  # fmt: skip
    assert SetDescription.from_json(json.loads(json.dumps(facts.to_json())), Path("x")) == facts


def test_stored_members_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, members=range(6))
    ran: list[int] = []
    logits_by_group = storing.logits_by_group

    def counted(*arguments: Any) -> Any:
        for ids, logits in logits_by_group(*arguments):
            ran.extend(ids)
            yield ids, logits

    monkeypatch.setattr(storing, "logits_by_group", counted)
    members = load(built)
    predict(members[1:3], few(), tmp_path)
    before = digest_of(tmp_path / "predictions")
    found = predict(load(built, members="5,2,0,1"), few(), tmp_path)
    assert ran == [1, 2, 5, 0]
    assert found.ids == [5, 2, 0, 1]
    for member, logits in zip(found.ids, found.logits(), strict=True):
        torch.testing.assert_close(logits, by_loop(built, member, few()), rtol=2**-11, atol=1e-5)
    after = digest_of(tmp_path / "predictions")
    shards = sorted(p for p in after if p.endswith(".safetensors"))
    assert [p.rpartition("/")[2][:5] for p in shards] == ["00000", "00001"]
    assert after[shards[0]] == before[shards[0]]  # it stays as it was
    predict(members[:3], few(), tmp_path)
    assert ran == [1, 2, 5, 0]
    assert digest_of(tmp_path / "predictions") == after
    assert find_set_problems(found.stored, weight_hashes(members.rows)) == []


def test_snapshots_and_views(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(2), snapshots=(20,))
    members = load(built, snapshots=True)
    found = predict(members, few(), tmp_path)
    assert [key[:2] for key in found.keys] == [(0, 20), (0, 40), (1, 20), (1, 40)]
    (shard,) = (tmp_path / INSIDE).glob("*.safetensors")
    assert {"000001@20/logits", "000001/logits"} <= opened(shard).keys()
    viewed = predict(members.canonicalize(scale="unit-norm", permute="first"), few(), tmp_path, name="viewed")
    assert viewed.facts.view == "canonical(scale=unit-norm, permute=first)"
    torch.testing.assert_close(viewed.logits(), found.logits(), rtol=2**-9, atol=1e-3)
    assert [row["weights_sha256"] for row in viewed.rows.to_pylist()] == [key[2] for key in found.keys]


def test_without_a_folder_they_go_beside_the_members(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(2))
    assert torch.equal(predict(load(built), few()).logits(), predictions_of(load(built), "few-test").logits())
    assert (tmp_path / INSIDE / "manifest.parquet").is_file()
    text = "expected `out`, a folder of yours; found none, and the members are in embedded"
    with pytest.raises(UsageError, match=text):
        predict(zoo.load("convnet-digits", n=2), few())


def test_images_of_other_classes_have_no_labels(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(2))
    found = predict(load(built), replace(few(), classes=tuple("abcdefghij")), tmp_path)
    assert found.labels is None
    with pytest.raises(UsageError, match="tiny/few-test: expected predictions on images with labels of the members'"):
        zoo.evaluate(found)


# ---- killed, and two at once ----
def predict_all(root: str) -> None:
    """What each child does."""
    predict(zoo.load("tiny", source=root), few(), root)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_continues(tmp_path: Path) -> None:
    built = build(tmp_path / "source", members=range(6))
    whole = predict(load(built), few(), tmp_path / "whole")
    place, there = built.root / INSIDE, dict[Path, int]()  # members laid aside, when the last run began

    def names(root: Path) -> list[str]:
        return [p.name for p in (root / INSIDE).glob("*.safetensors")]

    def done() -> None:
        found = predictions_of(load(built), "few-test")
        assert torch.equal(found.logits(), whole.logits())
        assert find_set_problems(found.stored, weight_hashes(load(built).rows)) == []
        assert names(built.root) == names(tmp_path / "whole")  # same members, same bytes

    def usable() -> None:
        if (place / "manifest.parquet").exists():
            done()
            return
        with pytest.raises(SourceNotFound):
            predictions_of(load(built), "few-test")
        now = {p: p.stat().st_ino for p in (place / ".parts").glob("0*.safetensors")}
        assert {p: now.get(p) for p in there} == there  # none was computed again
        there.update(now)

    def reset() -> None:
        shutil.rmtree(built.root / "predictions")
        there.clear()

    Contract(OnFiles(forks(), predict_all, (str(built.root),)), done, usable, reset).at_random(8)


@pytest.mark.slow
def test_a_finished_member_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, ran = build(tmp_path, members=range(6)), list[int]()
    keep = storing.FinishedMembers.write_logits

    def stopping(self: storing.FinishedMembers, key: tuple[int, int], weights: str, raw: bytes) -> None:
        if key[0] == 3:
            with pytest.raises(LockedError, match="expected no other process writing predictions into it; found a lo"):
                predict(load(built), few(), tmp_path)
            raise KeyboardInterrupt
        keep(self, key, weights, raw)

    def noted(self: storing.FinishedMembers, key: tuple[int, int], weights: str, raw: bytes) -> None:
        ran.append(key[0])
        keep(self, key, weights, raw)

    monkeypatch.setattr(storing.FinishedMembers, "write_logits", stopping)
    with pytest.raises(KeyboardInterrupt):
        predict(load(built), few(), tmp_path)
    monkeypatch.setattr(storing.FinishedMembers, "write_logits", noted)
    predict(load(built), few(), tmp_path)
    assert ran == [3, 4, 5]


def test_a_collection_s_own_methods(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=2)
    stored = members.predict("digits", tmp_path, batch=100)
    found = members.predictions("digits-test", source=tmp_path)
    assert torch.equal(found.logits(), stored.logits())
