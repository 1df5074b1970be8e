"""`zoo-cli audit` on stored predictions: rows without bytes, or made from other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoints_zoo.publishing.auditing import Audit, audit
from tests.support.scenarios import build
from tests.support.stored_sets import INSIDE, six


@pytest.fixture
def root(tmp_path: Path) -> Path:
    built, _ = six(tmp_path / "out")
    return built.root


def found(about: Audit) -> list[tuple[str, str]]:
    return [(f.kind, f.path) for f in about.findings]


def test_sets_are_counted_and_nothing_is_wrong_with_them(root: Path, tmp_path: Path) -> None:
    about = audit(root)
    assert (about.predictions, about.collections, about.findings) == (1, 1, [])
    assert about.notes == []
    assert audit(build(tmp_path / "other", members=range(2)).root).predictions == 0
    (root / "manifests" / "tiny.parquet").unlink()
    assert [(n.kind, n.text) for n in audit(root).notes] == [
        ("member", "weights not compared: no manifest of tiny that can be read")
    ]


def test_a_cut_shard_and_a_missing_one_are_named_with_their_members(root: Path) -> None:
    shard = next((root / INSIDE).glob("*.safetensors"))
    name, content = shard.relative_to(root).as_posix(), shard.read_bytes()
    shard.write_bytes(content[:-8])
    about = audit(root)
    assert ("short", name) in found(about)
    text = next(f.text for f in about.findings if f.kind == "short")
    assert "member 5 of predictions tiny/few-test" in text
    shard.unlink()
    assert found(audit(root)) == [("missing", name)]


def test_predictions_of_other_weights_are_named(root: Path) -> None:
    table = root / INSIDE / "manifest.parquet"
    rows = pq.read_table(table)
    hashes = rows.column("weights_sha256").to_pylist()
    changed = pa.array(["0" * 64, *hashes[1:]], rows.schema.field("weights_sha256").type)
    at = rows.schema.get_field_index("weights_sha256")
    pq.write_table(rows.set_column(at, rows.schema.field(at), changed), table)
    about = audit(root)
    assert found(about) == [("member", f"{INSIDE}/manifest.parquet")]
    assert about.findings[0].text.startswith("member 0: expected predictions of weights with sha256 ")


@pytest.mark.parametrize("lost", ["manifest.parquet", "manifest.json"])
def test_half_a_set_is_a_finding(root: Path, lost: str) -> None:
    (root / INSIDE / lost).unlink()
    about = audit(root)
    assert about.predictions == 0
    assert [kind for kind, _ in found(about)] == ["manifest"]


def test_facts_that_break_the_format_are_a_finding(root: Path) -> None:
    path = root / INSIDE / "manifest.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"inputs": 3}))
    about = audit(root)
    assert [kind for kind, _ in found(about)] == ["manifest"]
    assert "labels" in about.findings[0].text or "logits" in about.findings[0].text
