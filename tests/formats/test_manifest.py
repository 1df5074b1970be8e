"""The manifest: read by pandas and datasets, the same rows the same bytes, other people's columns, and the catalog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, FormatError, UsageError
from checkpoints_zoo.formats import arrow_tables, catalog, columns, manifest
from checkpoints_zoo.formats.catalog import Description, check_name
from docs.make import columns as dictionary
from tests.support.scenarios import SCHEMA, build

ROOT = Path(__file__).resolve().parents[2]
ROW: dict[str, Any] = {
    "member": 0, "epoch": 40, "final": True, "status": "ok", "seed": 2**31 - 1, "test_accuracy": 0.97,
    "created": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "sha256": "0" * 64, "path": "shards/x/00000-0.safetensors",
    "offset": 2**62 + 1, "nbytes": 8, "layout": "only", "dtype": "F32",
}  # fmt: skip
ROWS = [ROW, {**ROW, "member": 2, "seed": None}, {**ROW, "member": 1, "test_accuracy": None, "offset": 0}]
FAILED = {
    "member": 3, "epoch": 40, "final": True, "status": "failed", "reason": "diverged", "path": None,
}  # fmt: skip


def written(rows: list[dict[str, Any]], path: Path) -> Path:
    manifest.write_manifest(manifest.build_manifest(rows), path)
    return path


def test_pandas_reads_it(tmp_path: Path) -> None:
    frame = pd.read_parquet(written([*ROWS, FAILED], tmp_path / "m.parquet"), dtype_backend="pyarrow")
    assert list(frame.columns) == [c.name for c in columns.COLUMNS]
    assert frame["member"].tolist() == [0, 1, 2, 3]
    assert frame["offset"].tolist()[:3] == [2**62 + 1, 0, 2**62 + 1]
    assert frame["seed"].dtype == pd.ArrowDtype(pa.int32())
    assert frame["seed"][0] == 2**31 - 1
    assert pd.isna(frame["seed"][2])
    assert frame["created"][0] == pd.Timestamp("2026-01-02 03:04:05", tz="UTC")
    assert pd.isna(frame["path"][3])


def test_datasets_reads_it(tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    path = written([*ROWS, FAILED], tmp_path / "m.parquet")
    table = oracle("datasets").load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert table.column_names == [c.name for c in columns.COLUMNS]
    assert table["member"][:] == [0, 1, 2, 3]
    assert table["offset"][:] == [2**62 + 1, 0, 2**62 + 1, None]
    assert table["seed"][:] == [2**31 - 1, 2**31 - 1, None, None]
    assert table["reason"][:] == [None, None, None, "diverged"]


def test_same_rows_same_bytes(tmp_path: Path) -> None:
    many = [{**ROW, "member": m, "sha256": f"{m:064x}"} for m in range(9000)]
    one = written(many, tmp_path / "1").read_bytes()
    assert written(many[::-1], tmp_path / "2").read_bytes() == one
    whole = manifest.build_manifest(many)
    pieces = pa.concat_tables([whole.slice(0, 17), whole.slice(17, 5000), whole.slice(5017)])
    manifest.write_manifest(pieces, tmp_path / "3")
    assert (tmp_path / "3").read_bytes() == one
    # Read and written again, with another source of metadata.
    manifest.write_manifest(
        manifest.read_manifest(tmp_path / "1").replace_schema_metadata({"other": "x"}), tmp_path / "4"
    )
    assert (tmp_path / "4").read_bytes() == one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3", "4"]


def test_format(tmp_path: Path) -> None:
    with pq.ParquetFile(written([{**ROW, "member": m} for m in range(9000)], tmp_path / "m")) as file:
        assert file.schema_arrow.metadata[b"schema_version"] == b"1"
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4096, 4096, 808]
        assert file.metadata.row_group(0).column(0).has_column_index
        assert file.schema_arrow.field("member").type == pa.int32()
        assert not file.schema_arrow.field("member").nullable


def test_rows_are_written_by_member_and_epoch(tmp_path: Path) -> None:
    many = [{**ROW, "member": m, "epoch": e, "final": e == 2} for m in range(30) for e in (1, 2)]
    table = manifest.build_manifest(many)
    shuffled = arrow_tables.take_rows(table, [7 * i % 60 for i in range(60)])
    assert shuffled.column("member").to_pylist() != table.column("member").to_pylist()
    manifest.write_manifest(shuffled, tmp_path / "shuffled")
    with pq.ParquetFile(tmp_path / "shuffled") as file:
        assert file.read(["member", "epoch"]).to_pylist() == [{k: r[k] for k in ("member", "epoch")} for r in many]


def test_missing_columns_are_null_and_unknown_ones_left_out(tmp_path: Path) -> None:
    names = ["member", "epoch", "final", "status", "path", "offset", "nbytes", "layout", "dtype"]
    table = manifest.build_manifest(ROWS).select(names).append_column("colour", pa.array(["red", "green", "blue"]))
    pq.write_table(table.select([*names[::-1], "colour"]), tmp_path / "m")
    rows = manifest.read_manifest(tmp_path / "m")
    assert rows.schema == columns.SCHEMA
    assert rows.column("offset").to_pylist() == [2**62 + 1, 0, 2**62 + 1]
    assert {n for n in rows.column_names if arrow_tables.is_null(rows, n)} == set(columns.SCHEMA.names) - set(names)


def test_other_types_of_the_same_values_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame([{**r, "seed": 5} for r in ROWS])  # int64, no Arrow strings, nanoseconds
    frame["status"] = frame["status"].astype("category")
    pq.write_table(pa.Table.from_pandas(frame).replace_schema_metadata({"schema_version": "1"}), tmp_path / "m")
    rows = manifest.read_manifest(tmp_path / "m")
    assert rows.schema == columns.SCHEMA
    assert rows.column("status").to_pylist() == ["ok"] * 3
    assert rows.column("created").to_pylist() == [ROW["created"]] * 3


def test_integers_with_nulls_stay_integers(tmp_path: Path) -> None:
    built = build(tmp_path)
    built.rows[1]["seed"] = None
    built.write(pa.schema([*SCHEMA, pa.field("run", pa.int32())]))
    frame = zoo.load("tiny", source=tmp_path).manifest
    assert frame["seed"].tolist()[0] == 7
    assert str(frame["seed"].dtype) == "int64[pyarrow]"
    assert str(frame["run"].dtype) == "int32[pyarrow]"
    assert str(frame["offset"].dtype) == "int64[pyarrow]"
    assert len(frame.columns) == len(columns.COLUMNS)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"colour": "red", "age": 3}, "manifest row: expected columns of the schema; found age, colour."),
        ({"member": None}, "manifest row: expected whole numbers as member and epoch; found None and 40."),
        ({"member": 1.0}, "manifest row: expected whole numbers as member and epoch; found 1.0 and 40."),
        ({"epoch": True}, "manifest row: expected whole numbers as member and epoch; found 0 and True."),
        ({"member": 2**31}, "manifest row: expected values of the schema's types; found Value 2147483648 too large"),
        ({"offset": 2**70}, "manifest row: expected values of the schema's types; found "),
        ({"lr": "x"}, "manifest row: expected values of the schema's types; found "),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be(row: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatError) as caught:
        manifest.build_manifest([ROW | row])
    assert str(caught.value).startswith(text)


def test_a_manifest_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(ROWS, tmp_path / "m.parquet")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: written(ROWS[:1], path), lambda: catalog.write_json({}, tmp_path / "m.json")):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_flipped_bit_in_a_page_is_noticed(tmp_path: Path) -> None:
    path = written([{**ROW, "member": m, "test_accuracy": m / 700} for m in range(700)], tmp_path / "m")
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    rows, silent = manifest.read_manifest(path), []
    for at in range(4, footer, 59):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            if manifest.read_manifest(path) != rows:
                silent.append(at)
        except FormatError:
            pass
    assert silent == []


def test_column_dictionary_is_the_readme() -> None:
    assert (ROOT / "manifests" / "README.md").read_text(encoding="utf-8") == dictionary.page()
    assert dictionary.page().count("\n| `") == len(columns.COLUMNS)
    assert len(set(columns.SCHEMA.names)) == len(columns.COLUMNS)


LIGHT = """
import json, sys
from pathlib import Path
from checkpoints_zoo.formats import selection
from checkpoints_zoo.sources import finding
place = finding.open_source(sys.argv[1], "tiny")
description, rows = place.read_collection("tiny")
chosen = selection.select_rows(rows, "tiny", where="test_accuracy > 0.9 AND seed IN (8, 9, 10)", n=2, sample=3)
print(json.dumps([chosen.num_rows, selection.cite(place.label, place.commit("tiny"), "tiny", chosen),
                  sorted({"torch", "pandas"} & set(sys.modules))]))
"""


@pytest.mark.slow
def test_reading_and_selecting_import_neither_torch_nor_pandas(tmp_path: Path) -> None:
    build(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    count, citation, loaded = json.loads(done.stdout)
    assert (count, loaded) == (2, [])
    assert zoo.load(citation).ids == zoo.load(
        "tiny", source=tmp_path, where="test_accuracy > 0.9 AND seed IN (8, 9, 10)", n=2, sample=3
    ).ids  # fmt: skip


# The catalog and descriptions


def test_description_survives_json(tmp_path: Path) -> None:
    built = build(tmp_path, "resnet8")
    description = Description.from_json(built.description, built.json)
    assert description.to_json() == built.description
    assert description.classes == tuple("0123456789")
    catalog.write_json(description.to_json(), tmp_path / "again.json")
    assert catalog.read_json(tmp_path / "again.json") == built.description
    # A key that we do not know is left for a newer version.
    assert Description.from_json({**built.description, "colour": "red"}, built.json) == description


@pytest.mark.parametrize("name", ["a", "resnet18-cifar100", "a.b_c-1", "0", "a" * 96])
def test_names_that_can_be(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", ".a", "-a", "a b", "a\n", "ä", "a" * 97, "a#b", "a@b", None])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert str(caught.value) == (
        f"collection name {name!r}: expected lower-case letters, digits, '.', '_' and '-', at most 96 of them."
    )


def test_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {"format_version": 1, "name": "tiny", "title": "Tiny", "architecture": "convnet", "dataset": "digits",
               "members": 4, "bytes": 58528, "licence": "Apache-2.0", "sources": [str(tmp_path)]}  # fmt: skip
    monkeypatch.setattr(catalog, "CATALOG_FOLDER", tmp_path / "catalog")
    catalog.write_json(listing, tmp_path / "catalog" / "tiny.json")
    build(tmp_path)
    assert zoo.load("tiny").ids == [0, 1, 2, 3]
    frame = zoo.collections()
    assert frame.to_dict("records") == [
        {n: listing[n] for n in ("name", "title", "architecture", "dataset", "members", "bytes", "licence")}
        | {"source": str(tmp_path)}
    ]
    catalog.write_json(listing | {"bytes": 0}, tmp_path / "catalog" / "tiny.json")
    assert zoo.collections().bytes.isna().all()  # Nobody counted them.
    with pytest.raises(CollectionNotFound) as caught:
        zoo.load("tinny")
    assert str(caught.value) == (
        "collection 'tinny': expected a name in the catalog (tiny); found no such name. Did you mean tiny?"
    )
    with pytest.raises(CollectionNotFound) as caught:
        zoo.load("zzz")
    assert str(caught.value) == (
        "collection 'zzz': expected a name in the catalog (tiny); found no such name. `zoo-cli list` shows the catalog."
    )
