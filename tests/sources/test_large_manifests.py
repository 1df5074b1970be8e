"""Manifests of so many rows that only the row groups of selected members are read; expected rows come from lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, MemberNotFound, SelectionError
from tests.support.scenarios import SCHEMA, Built, build

COUNT, GROUP = 20_000, 1_000
Row = dict[str, Any]


def write_large(
    folder: Path,
    change: Callable[[list[Row]], list[Row]] = lambda rows: rows,
    schema: pa.Schema = SCHEMA,
    **options: Any,
) -> Built:
    """Write a source with 20,000 rows, which share the bytes of three members: each third member has a snapshot."""
    built = build(folder, members=range(3))
    random = np.random.default_rng(5)
    seeds, accuracies, splits = random.integers(1000, size=COUNT), random.random(COUNT), random.integers(2, size=COUNT)
    built.rows = change(
        [
            {**built.rows[i % 3], "member": i - i % 3 // 2, "epoch": 10 if i % 3 == 1 else 40, "final": i % 3 != 1,
             "status": "failed" if i % 50 == 7 else "ok", "reason": "diverged" if i % 50 == 7 else None,
             "seed": None if i < 5_000 else seed, "test_accuracy": accuracy, "split": ("train", "test")[split]}
            for i, (seed, accuracy, split) in enumerate(
                zip(seeds.tolist(), accuracies.tolist(), splits.tolist(), strict=True)
            )
        ]
    )  # fmt: skip
    built.write(schema, **{"row_group_size": GROUP, "use_dictionary": ["split"]} | options)
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return write_large(tmp_path_factory.mktemp("large"))


def usable(built: Built, condition: Callable[[Row], bool] = lambda r: True) -> list[Row]:
    return [r for r in built.rows if r["final"] and r["status"] == "ok" and condition(r)]


def pairs(rows: list[Row]) -> list[tuple[int, int]]:
    return [(r["member"], r["epoch"]) for r in rows]


def selected(built: Built, **selection: Any) -> list[tuple[int, int]]:
    return pairs(zoo.load("tiny", source=built.root, **selection).rows.to_pylist())


LAYOUTS: dict[str, dict[str, Any]] = {
    "groups": {}, "no statistics": {"write_statistics": False}, "one group": {"row_group_size": COUNT},
    "small pages": {"data_page_size": 512, "write_page_index": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_selections_are_the_same_as_from_a_list(tmp_path: Path, options: dict[str, Any]) -> None:
    built = write_large(tmp_path, **options)
    accurate = usable(built, lambda r: r["test_accuracy"] > 0.9)
    assert selected(built, where="test_accuracy > 0.9") == pairs(accurate)
    assert selected(built, where="test_accuracy > 0.9", n=50) == pairs(accurate[:50])
    assert selected(built, n=1) == pairs(usable(built)[:1])
    middle = usable(built, lambda r: 9_000 < r["member"] <= 9_100 and r["split"] == "test")
    assert selected(built, where="member > 9000 AND member <= 9100 AND split = 'test'") == pairs(middle)
    assert selected(built, where="9100 >= member AND member IN (9030, 3, 19998)") == [(3, 40), (9030, 40)]
    assert selected(built, where="member BETWEEN 9000 AND 9002", snapshots=True) == [
        (r["member"], r["epoch"]) for r in built.rows if 9_000 <= r["member"] <= 9_002 and r["status"] == "ok"
    ]
    assert selected(built, where="NOT member < 19998") == pairs(usable(built, lambda r: r["member"] >= 19_998))
    assert selected(built, where="seed < 3 OR member < 5") == pairs(
        usable(built, lambda r: r["member"] < 5 or (r["seed"] is not None and r["seed"] < 3))
    )
    assert selected(built, where="status = 'failed'", n=3) == pairs(
        [r for r in built.rows if r["final"] and r["status"] == "failed"][:3]
    )
    assert selected(built, members=[19_998, 4, 3_000], n=2) == selected(built, members="19998,4") == [
        (19_998, 40), (4, 40)
    ]  # fmt: skip
    assert selected(built, members="12001@10,12000-12001") == [(12_001, 10), (12_000, 40), (12_001, 40)]


def test_rows_are_whole_and_cited_as_ever(source: Built) -> None:
    members = zoo.load("tiny", source=source.root, where="test_accuracy > 0.5 AND member > 7000", n=4)
    rows = usable(source, lambda r: r["test_accuracy"] > 0.5 and r["member"] > 7_000)[:4]
    assert members.rows.select(SCHEMA.names).to_pylist() == rows
    files = b"".join(hashlib.sha256(p.read_bytes()).digest() for p in (source.manifest, source.json))
    check = hashlib.sha256("".join(f"{r['member']}|{r['epoch']}|{r['sha256']}\n" for r in rows).encode()).hexdigest()
    commit, ids = hashlib.sha256(files).hexdigest()[:40], [r["member"] for r in rows]
    start = f"{source.root.as_uri()}@{commit}/tiny#"
    assert members.citation.startswith(start)
    assert members.citation.endswith(f"~{check[:8]}")
    assert zoo.load(members.citation).ids == ids


@pytest.mark.parametrize("seed", [0, 77])
def test_a_sample_follows_its_rule(source: Built, seed: int) -> None:
    rank = {key: hashlib.sha256(b"sample|%d|%d|%d" % (seed, *key)).digest() for key in pairs(usable(source))}
    assert selected(source, n=9, sample=seed) == sorted(sorted(rank, key=rank.__getitem__)[:9])


@pytest.mark.slow
def test_rows_that_are_not_in_order_keep_theirs(tmp_path: Path) -> None:
    built = write_large(tmp_path, lambda rows: [rows[i] for i in np.random.default_rng(0).permutation(COUNT)])
    assert selected(built, n=30) == pairs(usable(built)[:30])
    assert selected(built, where="member < 40") == pairs(usable(built, lambda r: r["member"] < 40))
    assert selected(built, members="6,4,19998") == [(6, 40), (4, 40), (19_998, 40)]


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"members": [4, 30_000]}, MemberNotFound, "member 30000 of tiny: expected an id among 0"),
    ({"members": [4, 2**70]}, MemberNotFound, "expected an id among 0"),
    ({"members": "4@11"}, MemberNotFound, "member 4 of tiny: expected an epoch among 10, 40; found 11."),
    ({"members": [6, 4, 9, 4, 6]}, SelectionError, "expected each member once; found member 4 twice."),
    ({"members": [6, 57]}, SelectionError, "member 57 of tiny: expected status ok; found failed (diverged)."),
    ({"where": "test_accuracy > 2"}, SelectionError, "expected a row that meets it; found none of 13,"),
    ({"where": "run > 2"}, SelectionError, "column run is null in every row of this source."),
    ({"where": "nothing > 2"}, SelectionError, "expected names of columns; found 'nothing'."),
    ({"where": "member < 5", "n": 6}, SelectionError, "number of members of tiny: expected n from 1 to 4, as many"),
    ({"where": "split > 5"}, SelectionError, "expected values that fit the columns; found "),
    ({"n": 0}, SelectionError, "number of members of tiny: expected n from 1 to 13,"),
]  # fmt: skip


@pytest.mark.parametrize(("selection", "kind", "text"), ERRORS, ids=[str(x) for x, *_ in ERRORS])
def test_errors(source: Built, selection: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        zoo.load("tiny", source=source.root, **selection)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


def change_row(position: int, **values: Any) -> Callable[[list[Row]], list[Row]]:
    def change(rows: list[Row]) -> list[Row]:
        rows[position] = {**rows[position], **values}
        return rows

    return change


ROW_FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "path": ({"path": "../x"}, DamagedError, r"row 15501 \(member 15501\).*a path inside the source"),
    "layout": ({"layout": "none"}, FormatError, r"row 15501 \(member 15501\).*expected a layout among"),
    "offset": ({"offset": -4}, DamagedError, r"row 15501 \(member 15501\).*expected an offset from 0"),
    "null": ({"nbytes": None}, FormatError, r"row 15501 \(member 15501\).*expected a value for nbytes; found null"),
    "hash": ({"sha256": "5"}, FormatError, r"row 15501 \(member 15501\).*sha256 of 64 lower-case hex digits"),
    "second": ({"member": 15_502}, FormatError, r"row 1550\d \(member 15502\).*one final row a member; found a second"),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_fault_in_a_row_is_found_when_the_row_is_selected_or_verified(tmp_path: Path, fault: str) -> None:
    values, kind, text = ROW_FAULTS[fault]
    built = write_large(tmp_path, change_row(15_501, **values))
    members = zoo.load("tiny", source=tmp_path, where="test_accuracy > 0.5", n=3)
    assert members.ids == [r["member"] for r in usable(built, lambda r: r["test_accuracy"] > 0.5)[:3]]
    assert zoo.load("tiny", source=tmp_path, members=[19_998, 15_504]).ids == [19_998, 15_504]
    with pytest.raises(kind, match=text):
        zoo.load("tiny", source=tmp_path, members=[3, values.get("member", 15_501)])
    with pytest.raises(kind, match=text):
        zoo.verify(members, sample=0)


@pytest.mark.parametrize("column", ["sha256", "member", "status"])
def test_a_damaged_page_is_found_when_it_is_read_or_verified(tmp_path: Path, column: str) -> None:
    built = write_large(tmp_path, use_dictionary=False, compression="none", write_page_checksum=True)
    chunk = pq.read_metadata(built.manifest).row_group(15).column(SCHEMA.names.index(column))
    content = bytearray(built.manifest.read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size - 3
    content[middle] ^= 0xFF
    built.manifest.write_bytes(content)
    members = zoo.load("tiny", source=tmp_path, where="test_accuracy > 0.5", n=3)
    assert members.ids == [r["member"] for r in usable(built, lambda r: r["test_accuracy"] > 0.5)[:3]]
    assert zoo.load("tiny", source=tmp_path, members="19998,42").ids == [19_998, 42]
    for use in (
        lambda: zoo.load("tiny", source=tmp_path, members=[15_501]),
        lambda: zoo.load("tiny", source=tmp_path, where="member = 15501"),
        lambda: zoo.verify(members, sample=0),
    ):
        with pytest.raises(FormatError, match=r"tiny\.parquet: expected a Parquet file with the manifest's columns"):
            use()


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    built = write_large(tmp_path)
    before = zoo.load("tiny", source=tmp_path, n=3)
    write_large(tmp_path, lambda rows: rows[3:])
    after = zoo.load("tiny", source=tmp_path, n=3)
    assert before.ids == [r["member"] for r in usable(built)[:3]]
    assert after.ids == [r["member"] for r in usable(built)[2:5]]
    assert before.citation != after.citation
