"""Schema 2: rows whose bytes are ranges of files of other repos, in manifests that pyarrow alone has written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import catalog, columns, manifest, row_checks, selection
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.member_parts import Part, parse_repo_file, parts_of_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = f"hf://org/net-seed1@{COMMIT}/model.safetensors"
LAYOUT = Layout.of([("w", "F32", (6,))])
DESCRIPTION = Description("net", "", "own", {}, "", (), {}, {"main": LAYOUT}, "", "", epoch_unit="step")
PARTS = [
    {"path": FILE, "offset": 4096, "nbytes": 16, "etag": "a" * 64},
    {"path": FILE.replace("model", "model-2"), "offset": 8, "nbytes": 8, "etag": None},
]
ROW: dict[str, Any] = {
    "member": 1, "epoch": 1000, "final": True, "status": "ok", "path": FILE, "offset": 4096, "nbytes": 24,
    "layout": "main", "dtype": "F32", "parts": PARTS,
}  # fmt: skip
PLAIN = {**ROW, "member": 0, "path": "shards/a", "offset": 8, "parts": None}
TYPES: dict[str, Any] = {
    "member": pa.int32(), "epoch": pa.int32(), "final": pa.bool_(), "status": pa.string(), "sha256": pa.string(),
    "path": pa.string(), "offset": pa.int64(), "nbytes": pa.int64(), "layout": pa.string(), "dtype": pa.string(),
    "parts": pa.list_(
        pa.struct({"path": pa.string(), "offset": pa.int64(), "nbytes": pa.int64(), "etag": pa.string()})
    ),
}  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]], version: str = "2", **types: Any) -> Path:
    """Write rows with pyarrow's own defaults."""
    table = pa.Table.from_pylist(rows, schema=pa.schema(TYPES | types, metadata={"schema_version": version}))
    pq.write_table(table, path)
    return path


def checked(path: Path) -> pa.Table:
    rows = manifest.read_manifest(path)
    row_checks.check_rows(rows, DESCRIPTION, path)
    return rows


def test_parts_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = checked(write(tmp_path / "m", [PLAIN, ROW]))
    assert rows.schema == columns.SCHEMA_WITH_PARTS
    assert rows.column("parts").to_pylist() == [None, PARTS]
    assert parts_of_rows(rows) == [(Part("shards/a", 8, 24),), tuple(Part(**part) for part in PARTS)]
    sliced = checked(write(tmp_path / "s", [PLAIN, ROW, {**ROW, "member": 2}])).slice(1)
    row_checks.check_rows(sliced, DESCRIPTION, tmp_path)
    assert sliced.column("parts").to_pylist() == [PARTS, PARTS]


def test_schema_2_is_written_only_where_a_row_has_parts(tmp_path: Path) -> None:
    manifest.write_manifest(manifest.build_manifest([PLAIN, ROW]), tmp_path / "2")
    with_parts = pq.read_table(tmp_path / "2")
    assert with_parts.schema.metadata[b"schema_version"] == b"2"
    assert with_parts.column("parts").to_pylist() == [None, PARTS]
    manifest.write_manifest(manifest.read_manifest(tmp_path / "2"), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "2").read_bytes()
    manifest.write_manifest(manifest.build_manifest([PLAIN]), tmp_path / "1")
    manifest.write_manifest(manifest.read_manifest(tmp_path / "2").slice(0, 1), tmp_path / "sliced")
    assert (tmp_path / "sliced").read_bytes() == (tmp_path / "1").read_bytes()
    assert pq.read_schema(tmp_path / "1").metadata[b"schema_version"] == b"1"
    assert manifest.read_manifest(tmp_path / "1").schema == columns.SCHEMA


def test_an_older_reader_refuses_the_version(tmp_path: Path) -> None:
    """A reader that knows schema 1 alone is the reader of any table with another schema."""
    path = write(tmp_path / "m", [ROW])
    own = columns.SCHEMA.with_metadata({"schema_version": "1"})
    with pytest.raises(FormatError, match=r"expected schema version 1 or older; found version 2\. Install a newer"):
        manifest.read_manifest(path, own)
    with pytest.raises(FormatError, match="expected schema version 2 or older; found version 3"):
        manifest.read_manifest(write(tmp_path / "3", [ROW], "3"))


def test_the_citation_hashes_every_part(tmp_path: Path) -> None:
    rows = checked(write(tmp_path / "m", [ROW]))
    text = f"1|1000|{FILE}|4096|16|{'a' * 64}+{FILE.replace('model', 'model-2')}|8|8\n"
    assert selection.check_digits(rows) == hashlib.sha256(text.encode()).hexdigest()[:8]
    moved = [PARTS[0], {**PARTS[1], "offset": 16}]
    assert selection.check_digits(checked(write(tmp_path / "n", [{**ROW, "parts": moved}]))) != (
        selection.check_digits(rows)
    )
    known = checked(write(tmp_path / "k", [{**ROW, "sha256": "b" * 64}]))
    assert selection.check_digits(known) == hashlib.sha256(f"1|1000|{'b' * 64}\n".encode()).hexdigest()[:8]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "expected one part or more; found none"),
        ([{**PARTS[0], "nbytes": 24, "path": None}], "a path, an offset and nbytes in each part; found null"),
        ([None], "a path, an offset and nbytes in each part; found null"),
        ([{**PARTS[0], "nbytes": None}], "a path, an offset and nbytes in each part; found null"),
        ([{**PARTS[0], "offset": -1}, PARTS[1]], "not negative; found offset -1, 16 bytes"),
        ([{**PARTS[0], "nbytes": 17}, PARTS[1]], "path, offset and nbytes of its parts"),
        ([PARTS[1], PARTS[0]], "path, offset and nbytes of its parts"),
        ([{**PARTS[0], "path": "shards/a"}, PARTS[1]], r"parts at hf://\[datasets/\]ORG/NAME@COMMIT/FILE; found 'sh"),
        ([{**PARTS[0], "path": FILE.replace(COMMIT, "main")}, PARTS[1]], "parts at hf://"),
        ([{**PARTS[0], "path": FILE.replace("hf://", "https://127.0.0.1/")}, PARTS[1]], "parts at hf://"),
        ([{**PARTS[0], "path": FILE.replace("org/net-seed1", "../net")}, PARTS[1]], "parts at hf://"),
        ([{**PARTS[0], "path": FILE.replace("model", "../../model")}, PARTS[1]], "which leads out of it"),
        ([{**PARTS[0], "etag": "../../x"}, PARTS[1]], r"an etag of letters and digits; found '\.\./\.\./x'"),
        ([{**PARTS[0], "etag": ".."}, PARTS[1]], "an etag of letters and digits"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be(tmp_path: Path, parts: list[Any], text: str) -> None:
    with pytest.raises(DamagedError, match=rf"^row 1 \(member 1\) of manifest .*{text}"):
        checked(write(tmp_path / "m", [PLAIN, {**ROW, "parts": parts}]))


def test_a_row_without_parts_names_no_other_repo(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="a path inside the source"):
        checked(write(tmp_path / "m", [ROW, {**ROW, "member": 2, "parts": None}]))


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.list_(pa.string()), pa.list_(pa.struct({"path": pa.string()})), pa.map_(pa.string(), pa.int64())],
)
def test_a_column_of_another_type(tmp_path: Path, kind: pa.DataType) -> None:
    path = write(tmp_path / "m", [{**PLAIN, "parts": None}], parts=kind)
    with pytest.raises(FormatError, match="expected a column 'parts' of list<"):
        manifest.read_manifest(path)


def test_long_texts_repeated_in_parts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m", [{**ROW, "member": m, "epoch": 0} for m in range(500)])
    checked(path)
    monkeypatch.setattr(manifest, "LARGEST_UNPACKED_NBYTES", 60_000)
    with pytest.raises(FormatError, match="unpacked"):
        manifest.read_manifest(path)


def test_a_large_file_is_read_by_row_groups(tmp_path: Path) -> None:
    rows = [
        {**ROW, "member": m, "epoch": 0, "offset": m, "parts": [{**PARTS[0], "offset": m, "nbytes": 24}]}
        for m in range(90)
    ]
    table = pa.Table.from_pylist(rows, schema=pa.schema(TYPES, metadata={"schema_version": "2"}))
    pq.write_table(table, tmp_path / "m", row_group_size=32)
    fetched: list[tuple[int, int]] = []

    class Everything:
        size = (tmp_path / "m").stat().st_size

        def fetch(self, ranges: Any) -> None:
            fetched.extend(ranges)

        def drop(self) -> None: ...

    path = tmp_path / "m"
    file = manifest.ManifestFile(lambda: path.open("rb"), path, description=DESCRIPTION, sparse_file=Everything())
    taken = file.take(np.array([70, 3]))
    assert [part[0].offset for part in parts_of_rows(taken)] == [70, 3]
    metadata = pq.read_metadata(tmp_path / "m")
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaf = metadata.row_group(2).column(names.index("parts.list.element.etag"))
    start = min(x for x in (leaf.dictionary_page_offset, leaf.data_page_offset) if x)
    assert (start, start + leaf.total_compressed_size) in fetched
    assert (0, Everything.size) not in fetched


def test_the_unit_of_epochs_is_written_only_where_it_is_another(tmp_path: Path) -> None:
    assert DESCRIPTION.to_json()["epoch_unit"] == "step"
    assert Description.from_json(DESCRIPTION.to_json(), tmp_path) == DESCRIPTION
    plain = Description("net", "", "own", {}, "", (), {}, {"main": LAYOUT}, "", "")
    assert "epoch_unit" not in plain.to_json()
    assert Description.from_json(plain.to_json(), tmp_path).epoch_unit == "epoch"
    with pytest.raises(FormatError, match="'epoch_unit' to be epoch or step; found 'minute'"):
        Description.from_json(plain.to_json() | {"epoch_unit": "minute"}, tmp_path)
    assert catalog.FORMAT_VERSION == 1


def test_addresses_of_files() -> None:
    assert parse_repo_file(FILE) == ("model", "org/net-seed1", COMMIT, "model.safetensors")
    assert parse_repo_file(f"hf://datasets/me/zoo@{COMMIT}/a/b") == ("dataset", "me/zoo", COMMIT, "a/b")
    for wrong in ("model.safetensors", f"hf://org@{COMMIT}/f", f"hf://spaces/org/net@{COMMIT}/f", f"hf://a/b@{COMMIT}",
                  f"hf://datasets/zoo@{COMMIT}/f", f"hf://org/net@{COMMIT[:39]}/f", f"hf://org/.net@{COMMIT}/f",
                  f"hf://org/net@{COMMIT}/{'f' * 1024}"):  # fmt: skip
        assert parse_repo_file(wrong) is None
