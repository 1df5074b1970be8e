"""Bad input, kind by kind: an error of ours that names thing, expected, found and do; the source stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, MemberNotFound, SelectionError, ZooError
from tests.support.refusals import HTML, PICKLE, POINTER, refused
from tests.support.scenarios import SCHEMA, Built, build, load


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A source of four members that a test may damage."""
    return build(tmp_path, weights=torch.float16)


# What is asked for


def test_an_unknown_collection(built: Built) -> None:
    text = "collection 'tinee': expected a name in source file://ROOT (tiny); found no such name. Did you mean tiny?"
    error = refused(built, lambda: zoo.load("tinee", source=built.root), text)
    assert isinstance(error, CollectionNotFound)
    text = "collection name '../tiny': expected lower-case letters, digits, '.', '_' and '-', at most 96 of them."
    refused(built, lambda: zoo.load("../tiny", source=built.root), text)


@pytest.mark.parametrize(
    ("members", "kind", "text"),
    [
        ([4], MemberNotFound, "member 4 of tiny: expected an id among 0-3; found 4."),
        ("2-5", MemberNotFound, "member 4 of tiny: expected an id among 0-3; found 4."),
        ([-1], MemberNotFound, "member -1 of tiny: expected an id among 0-3; found -1."),
        ([2**70], MemberNotFound, f"member {2**70} of tiny: expected an id among 0-3; found {2**70}."),
        ("0@3", MemberNotFound, "member 0 of tiny: expected an epoch among 40; found 3."),
        ([1, 2, 1], SelectionError, "selection of tiny: expected each member once; found member 1 twice."),
        ("1,1@40", SelectionError, "selection of tiny: expected each member once; found member 1@40 twice."),
        ([], SelectionError, "members: expected one id or more; found none."),
        ([True], SelectionError, "members: expected whole numbers; found True."),
        (["1"], SelectionError, "members: expected whole numbers; found '1'."),
        ([0.0], SelectionError, "members: expected whole numbers; found 0.0."),
        (3, SelectionError, "members: expected ids in a list, or their text; found 3."),
    ],
)
def test_members_that_are_not_there(built: Built, members: Any, kind: type[ZooError], text: str) -> None:
    error = refused(built, lambda: load(built, members=members), text)
    assert type(error) is kind


@pytest.mark.parametrize("n", [0, -1, 5, 10**30, True, False, "3", 2.0, [1]])
@pytest.mark.parametrize("extra", [{}, {"sample": 0}, {"members": [3, 1, 2, 0]}])
def test_impossible_n(built: Built, n: Any, extra: dict[str, Any]) -> None:
    text = f"number of members of tiny: expected n from 1 to 4, as many as there are; found n={n!r}."
    refused(built, lambda: load(built, n=n, **extra), text)


@pytest.mark.parametrize(
    ("selection", "text"),
    [
        ({"sample": 0}, "number of members of tiny: expected n from 1 to 4, as many as there are; found no n beside"
                        " `sample`."),
        ({"n": 2, "sample": "a"}, "sample of tiny: expected a whole number as seed; found 'a'."),
        ({"n": 2, "sample": True}, "sample of tiny: expected a whole number as seed; found True."),
        ({"n": 3, "where": "member > 1"}, "number of members of tiny: expected n from 1 to 2, as many as there are"
                                          " with member > 1; found n=3."),
        ({"members": [1], "sample": 1, "n": 1}, "selection of tiny: expected `members` alone or with `n`; found"
            " `where`, `sample` or `snapshots`."),
        ({"members": [1], "where": "seed = 8"}, "selection of tiny: expected `members` alone or with `n`; found"
            " `where`, `sample` or `snapshots`."),
        ({"where": "test_accuracy >"}, "where 'test_accuracy >': expected an SQL condition such as…"),
        ({"where": "accuracy > 0.9"}, "where 'accuracy > 0.9': expected names of columns; found 'accuracy'. Did you"
                                      " mean test_accuracy?…"),
        ({"where": "random() < 0.5"}, "where 'random() < 0.5': expected columns, values, = < > + - * / %, AND, OR,"
                                      " NOT, IN, …"),
        ({"where": "test_accuracy > 1"}, "where 'test_accuracy > 1': expected a row that meets it; found none of 4."
                                         " test_accuracy runs from 0.9 to 0.903."),
        ({"where": "test_nll < 1"}, "column test_nll is null in every row of this source. `zoo-cli import SOURCE"
                                    " --evaluate DATA` fills it."),
        ({"where": 3}, 'where: expected an SQL condition such as "test_accuracy > 0.76 AND seed < 10"; found int.'),
        ({"where": ""}, "where '': expected an SQL condition such as…"),
    ],
)  # fmt: skip
def test_selections_that_cannot_be_met(built: Built, selection: dict[str, Any], text: str) -> None:
    refused(built, lambda: load(built, **selection), text)


def test_no_member_is_ok(built: Built) -> None:
    for row in built.rows:
        row["status"] = "failed"
    built.rows[0]["reason"] = "diverged"
    built.rows[1] |= dict.fromkeys(("path", "offset", "nbytes", "layout", "dtype"))
    built.write()
    refused(
        built, lambda: load(built), "selection of tiny: expected rows that are final with status ok; found none of 4."
    )
    text = (
        "member 0 of tiny: expected status ok; found failed (diverged)."
        " `where=\"member = 0 and status = 'failed'\"` selects it nevertheless."
    )
    refused(built, lambda: load(built, members=[0]), text)
    chosen = load(built, where="member = 1 and status = 'failed'")
    assert chosen.ids == [1]
    text = (
        "member 1 of tiny: expected weights; found a row without weights (its status is not ok). Select with"
        " where=\"status = 'ok'\"."
    )
    for use in (chosen.stack, chosen.ensemble, chosen[0].model, chosen[0].state_dict, chosen.dataset, chosen._skeleton):
        refused(built, use, text)


# Manifest and description


@pytest.mark.parametrize("content", [b"", b"PAR1", HTML, POINTER, PICKLE, bytes(1000), b"PAR1" + bytes(100) + b"PAR1"])
def test_a_manifest_that_is_none(built: Built, content: bytes) -> None:
    built.manifest.write_bytes(content)
    text = "manifest ROOT/manifests/tiny.parquet: expected a Parquet file with the manifest's columns; found …"
    refused(built, lambda: load(built), text)


def test_a_manifest_cut_anywhere(built: Built) -> None:
    content = built.manifest.read_bytes()
    for size in range(0, len(content), 97):
        built.manifest.write_bytes(content[:size])
        with pytest.raises(
            ZooError, match=r"^manifest .*tiny.parquet: expected a Parquet file with the manifest's columns"
        ):
            load(built)


UPGRADE = "Install a newer checkpoints-zoo."


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (b"3", f"expected schema version 2 or older; found version 3. {UPGRADE}"),
        (b"999999999", f"expected schema version 2 or older; found version 999999999. {UPGRADE}"),
        (None, "expected a schema_version in the Parquet metadata; found ''. A program that rewrites the table…"),
        (b"one", "expected a schema_version in the Parquet metadata; found 'one'."),
        (b"-1", "expected a schema_version in the Parquet metadata; found '-1'."),
        ("²".encode(), "expected a schema_version in the Parquet metadata; found '²'."),
        (b"1" * 5000, f"expected a schema_version in the Parquet metadata; found '{'1' * 40}'."),
    ],
)  # fmt: skip
def test_a_manifest_of_another_version(built: Built, version: bytes | None, text: str) -> None:
    built.write(version=version)
    refused(built, lambda: load(built), f"manifest ROOT/manifests/tiny.parquet: {text}")


MARKS, OUT = ", which is empty or has a NUL, a backslash or a colon", ", which leads out of it"
UNTIDY = ", which is no plain path"
WHOLE_ROW = "row 2 (member 2) of manifest ROOT/manifests/tiny.parquet: expected "
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"member": 1}, "row 2 (member 1) of manifest ROOT/manifests/tiny.parquet: expected each (member, epoch) once"
                    " and one final row a member; found a second one."),
    ({"member": 1, "epoch": 10}, "row 2 (member 1) of manifest ROOT/manifests/tiny.parquet: expected each (member,"
                                 " epoch) once and one final…"),
    ({"member": -1}, "row 2 (member -1) of manifest ROOT/manifests/tiny.parquet: expected member and epoch not"
                     " negative; found member -1, epoch 40."),
    ({"epoch": -5}, WHOLE_ROW + "member and epoch not negative; found member 2, epoch -5."),
    ({"member": None}, "row 2 (member None) of manifest ROOT/manifests/tiny.parquet: expected a value for member;"
                       " found null."),
    *(({name: None}, WHOLE_ROW + f"a value for {name}; found null.")
      for name in ("epoch", "final", "status", "path", "offset", "nbytes", "layout", "dtype")),
    ({"status": "fine"}, WHOLE_ROW + "status ok, failed or excluded; found 'fine'."),
    ({"layout": "other"}, WHOLE_ROW + "a layout among only; found 'other'."),
    ({"nbytes": 7}, WHOLE_ROW + "an offset from 0, 7,320 bytes of F16 for layout 'only'; found offset 18736, 7 bytes"
                                " of F16."),
    ({"nbytes": 2**62}, WHOLE_ROW + "an offset from 0, 7,320 bytes of F16 for layout 'only'; found offset 18736,"
                                    " 4,611,686,018,427,387,904 bytes of F16."),
    ({"offset": -8}, WHOLE_ROW + "an offset from 0, 7,320 bytes of F16 for layout 'only'; found offset -8, 7,320"
                                 " bytes of F16."),
    ({"dtype": "F32"}, WHOLE_ROW + "an offset from 0, 7,320 bytes of F16 for layout 'only'; found offset 18736,"
                                   " 7,320 bytes of F32."),
    *(({"sha256": s}, WHOLE_ROW + f"sha256 of 64 lower-case hex digits; found {s!r}.")
      for s in ("", "0" * 63, "g" * 64, "A" * 64)),
    *(({"path": p}, WHOLE_ROW + f"a path inside the source; found {p!r}{why}.") for p, why in {
        "../x": OUT, "/etc/passwd": OUT, "shards/../../x": OUT, "shards/.. /x": OUT, "..\\x": MARKS, "C:/x": MARKS,
        "a\0b": MARKS, "": MARKS, "shards//x": UNTIDY, "./x": UNTIDY,
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), ROWS, ids=lambda v: str(v)[:50])
def test_a_row_that_cannot_be(built: Built, change: dict[str, Any], text: str) -> None:
    built.rows[2] |= change
    built.write()
    refused(built, lambda: load(built), text)


def test_columns_that_cannot_be(built: Built) -> None:
    text = "manifest ROOT/manifests/tiny.parquet: expected a Parquet file with the manifest's columns; found …"
    whole = built.rows
    for name, kind, value in (("member", pa.int64(), 2**31), ("seed", pa.float64(), 1.5), ("offset", pa.string(), "x"),
                              ("reason", pa.binary(), b"\xff"), ("final", pa.list_(pa.int8()), [1])):  # fmt: skip
        built.rows = [r | {name: value} for r in whole]
        built.write(pa.schema([pa.field(f.name, kind if f.name == name else f.type) for f in SCHEMA]))
        refused(built, lambda: load(built), text)
    built.rows = whole
    built.write()
    no_text = pa.Array.from_buffers(pa.string(), 4, pa.array([b"\xff", b"a", b"b", b"c"]).buffers())
    table = pq.ParquetFile(built.manifest).read().select([f.name for f in SCHEMA if f.name != "reason"])
    pq.write_table(table.append_column("reason", no_text), built.manifest)
    refused(built, lambda: load(built), text)
    for name in ("member", "epoch", "final", "status"):
        built.write(pa.schema([f for f in SCHEMA if f.name != name]))
        text = f"manifest ROOT/manifests/tiny.parquet: expected a column {name!r}; found none."
        refused(built, lambda: load(built), text)
    built.write(pa.schema([f for f in SCHEMA if f.name != "path"]))
    refused(built, lambda: load(built), WHOLE_ROW.replace("2", "0") + "a value for path; found null.")
    built.write(pa.schema([*SCHEMA, pa.field("member", pa.int32())]))
    refused(
        built,
        lambda: load(built),
        "manifest ROOT/manifests/tiny.parquet: expected each column once; found 'member' twice.",
    )
    built.rows.clear()
    built.write()
    with pytest.raises(
        SelectionError, match=r"^selection of tiny: expected rows that are final with status ok; found none of 0\.$"
    ):
        load(built)
