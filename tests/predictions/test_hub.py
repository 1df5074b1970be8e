"""Predictions on the loopback Hub: published with their members, and read back by ranges of the members asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, NetworkError, SourceNotFound
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.predictions import Predictions, predict, predictions_of
from checkpoints_zoo.publishing.auditing import audit
from checkpoints_zoo.publishing.publisher import Plan
from checkpoints_zoo.sources import fetching
from tests.hub import Hub
from tests.support.commands import run, values
from tests.support.publications import ADDRESS, NEW, publish, quick, refused_both
from tests.support.scenarios import Built, build, load, opened

SHARDS = "/predictions/.*safetensors"
INSIDE = "predictions/tiny/many-test"


def many() -> ImageData:
    """Images enough that a member's logits are larger than the gap between two that one request bridges."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (600, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (600,), generator=generator)
    return ImageData("many", "test", pixels, labels, tuple("0123456789"))


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    fetching._remote_files.clear()
    built = build(tmp_path / "out", members=range(16))
    predict(load(built), many(), built.root)
    return built


def remote(built: Built, **options: object) -> zoo.Collection:
    return zoo.load(built.name, source=ADDRESS, **options)  # type: ignore[arg-type]


def local(built: Built) -> Predictions:
    return predictions_of(load(built), "many-test")


@pytest.mark.slow
def test_three_of_sixteen_members_by_ranges(hub: Hub, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(built.root, tag="v1")
    assert 'names `many-test`: `members.predictions("many-test")` reads them' in hub.read(NEW, "README.md").decode()
    monkeypatch.setattr(fetching, "LARGEST_READ_GAP_NBYTES", 0)
    members = remote(built, members="3,7,12")
    hub.log.clear()
    found = predictions_of(members, "many-test", data=many())
    assert hub.log.select(SHARDS) == []  # nothing of the logits yet
    logits = found.logits()
    (shard,) = (built.root / INSIDE).glob("*.safetensors")
    tensors = opened(shard)
    for row, member in zip(logits, (3, 7, 12), strict=True):
        assert torch.equal(row.half(), tensors[f"{member:06d}/logits"])
    assert hub.log.bytes(SHARDS) == 3 * 600 * 10 * 2
    assert len([row for row in hub.log.select(SHARDS) if row.range]) == 3
    assert hub.log.select("/shards/") == []  # and no weights
    hub.log.clear()
    assert torch.equal(predictions_of(members, "many-test").logits([7]), logits[1:2])  # kept
    assert hub.log.bytes(SHARDS) == 0
    every = predictions_of(remote(built), "many-test")
    assert torch.equal(torch.cat(list(every.blocks(70)), 1), local(built).logits())
    assert every.citation == remote(built).citation
    assert every.citation.startswith(f"{ADDRESS}@")


@pytest.mark.slow
def test_a_report_from_the_hub_reads_no_weights(hub: Hub, built: Built) -> None:
    publish(built.root)
    hub.log.clear()
    found = zoo.evaluate(predictions_of(remote(built), "many-test"), sizes=[4], subsets=4)
    assert hub.log.select("/shards/") == []
    assert found["nll"] == zoo.evaluate(local(built), sizes=[4], subsets=4)["nll"]


def test_predictions_made_of_members_on_the_hub_say_so(hub: Hub, built: Built, tmp_path: Path) -> None:
    publish(built.root)
    members = remote(built, n=5)
    predict(members, many(), tmp_path / "elsewhere", name="again")
    found = predictions_of(members, "again", source=tmp_path / "elsewhere")
    assert torch.equal(found.logits(), local(built)[:5].logits())
    facts = json.loads((tmp_path / "elsewhere/predictions/tiny/again/manifest.json").read_text())
    assert facts["citation"] == members.citation == found.citation


def test_offline_and_unknown(hub: Hub, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(built.root)
    with pytest.raises(SourceNotFound, match="which has: many-test; found no such set"):
        predictions_of(remote(built), "other")
    some = predictions_of(remote(built, n=2), "many-test")
    some.logits()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert predictions_of(remote(built, n=2), "many-test").logits().shape == (2, 600, 10)
    with pytest.raises(NetworkError) as caught:
        predictions_of(remote(built, members="5,6"), "many-test").logits()
    assert "2 of 2 members of tiny/many-test: expected members in the cache" in str(caught.value)
    assert str(caught.value).endswith("Read them once online: they are kept.")


def test_wrong_bytes_are_not_kept(hub: Hub, built: Built) -> None:
    (shard,) = (built.root / INSIDE).glob("*.safetensors")
    row = pq.read_table(built.root / INSIDE / "manifest.parquet").to_pylist()[4]
    raw = bytearray(shard.read_bytes())
    raw[row["offset"]] ^= 1
    files = {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()}
    files |= {f"{INSIDE}/{shard.name}": bytes(raw)}  # type: ignore[dict-item]
    hub.commit(NEW, files)
    assert predictions_of(remote(built, members="3"), "many-test").logits().shape[0] == 1
    with pytest.raises(DamagedError, match=r"member 4 in file predictions/tiny/many-test/.*, twice"):
        predictions_of(remote(built, members="4"), "many-test").logits()


# ---- what is not published ----
def test_damaged_predictions_are_not_published(hub: Hub, built: Built) -> None:
    (shard,) = (built.root / INSIDE).glob("*.safetensors")
    row = pq.read_table(built.root / INSIDE / "manifest.parquet").to_pylist()[4]
    raw = bytearray(shard.read_bytes())
    raw[row["offset"]] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DamagedError, match="tiny/many-test: hash: expected sha256"):
        publish(built.root)
    shard.write_bytes(raw[:-1])
    with pytest.raises(DamagedError, match="tiny/many-test: bytes:"):
        publish(built.root)
    shard.unlink()
    with pytest.raises(DamagedError, match="expected a file, since the manifest names it"):
        publish(built.root)


def test_predictions_of_other_weights_are_not_published(hub: Hub, built: Built, tmp_path: Path) -> None:
    other = build(tmp_path / "more", members=range(16), change=lambda i, state: state["fc2.bias"].add_(i == 3))
    (built.root / "predictions").rename(other.root / "predictions")
    made, known = (next(r["sha256"] for r in x.rows if r["member"] == 3) for x in (built, other))
    refused_both(
        hub,
        DamagedError,
        "members of source ROOT: expected what their manifest says; found member 3 of tiny/many-test: weights: "
        f"expected predictions of weights with sha256 {known[:16]}…; found them made from {made[:16]}…. Nothing was "
        "published. `zoo-cli verify ROOT` lists them all.",
        other.root,
    )


def test_a_set_that_breaks_the_format_is_not_published(hub: Hub, built: Built) -> None:
    (built.root / INSIDE / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match="a JSON object with a format_version"):
        publish(built.root)


@pytest.mark.slow
def test_plan_verify_and_audit(hub: Hub, built: Built) -> None:
    planned = zoo.publish(built.root, NEW, dry_run=True)
    assert isinstance(planned, Plan)
    assert {p for p in planned.to_json()["upload"] if p.startswith("predictions/")} == {
        f"{INSIDE}/{name}"
        for name in ("manifest.json", "manifest.parquet", next((built.root / INSIDE).glob("0*")).name)
    }
    result = run("verify", built.root, "--format", "json", "--sample", "0")
    assert [row["collection"] for row in values(result)["checked"]] == ["tiny", "tiny/many-test"]
    assert result.exit_code == 0
    assert audit(built.root).findings == []
    publish(built.root)
    assert run("verify", ADDRESS, "--sample", "0").exit_code == 0
    (shard,) = (built.root / INSIDE).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-2])
    result = run("verify", built.root, "--format", "json", "--sample", "0")
    assert result.exit_code == 1
    assert {(p["collection"], p["kind"]) for p in values(result)["problems"]} == {("tiny/many-test", "bytes")}
