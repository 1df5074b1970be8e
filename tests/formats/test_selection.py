"""Selections: counts, conditions, ids and draws by a named rule; citations both ways."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError
from checkpoints_zoo.formats.selection import Citation, format_ids, member_not_found, parse_citation, parse_ids
from checkpoints_zoo.formats.text import whole_number
from tests.support.scenarios import Built, build

KEYS = st.tuples(st.integers(0, 2**31 - 1), st.none() | st.integers(0, 2**31 - 1))
CLOSE = st.tuples(st.integers(0, 12), st.none() | st.integers(0, 3))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Twenty members, each with snapshots after 10 and 20 epochs and the final one after 40; 3 and 4 are not ok."""
    built = build(tmp_path_factory.mktemp("source"), members=range(20), snapshots=(10, 20), per_shard=8)
    for row in built.rows:
        row["status"] = {3: "failed", 4: "excluded"}.get(row["member"], "ok")
        row["reason"] = "diverged" if row["member"] == 3 else None
    built.write()
    return built


def ids(source: Built, **selection: Any) -> list[int]:
    return zoo.load("tiny", source=source.root, **selection).ids


@pytest.mark.parametrize(
    ("member_ids", "text"),
    [
        ([7, 0, 1, 1, 2, 9, 8, 8], "0-2,7-9"),
        ([4, 4], "4"),
        ([0, 2], "0,2"),
        ([], "none"),
        ([2**31 - 1, 0], "0,2147483647"),
    ],
)
def test_ids_of_snapshots_in_any_order_are_named_as_ranges(member_ids: list[int], text: str) -> None:
    rows = pa.table({"member": pa.array(member_ids, pa.int32()), "epoch": pa.array([1] * len(member_ids), pa.int32())})
    assert str(member_not_found(rows, "tiny", 5)) == f"member 5 of tiny: expected an id among {text}; found 5."


def pairs(source: Built, **selection: Any) -> list[tuple[int, int]]:
    frame = zoo.load("tiny", source=source.root, **selection).manifest
    return list(zip(frame["member"].tolist(), frame["epoch"].tolist(), strict=True))


OK = [m for m in range(20) if m not in (3, 4)]


def test_what_is_meant(source: Built) -> None:
    assert pairs(source) == [(m, 40) for m in OK]
    assert pairs(source, snapshots=True) == [(m, e) for m in OK for e in (10, 20, 40)]
    assert pairs(source, where="epoch = 20") == [(m, 20) for m in OK]
    assert pairs(source, where="NOT final AND member < 2") == [(0, 10), (0, 20), (1, 10), (1, 20)]
    assert pairs(source, where="status = 'failed'") == [(3, 40)]
    assert pairs(source, where="status <> 'ok'", snapshots=True, n=4) == [(3, 10), (3, 20), (3, 40), (4, 10)]
    assert pairs(source, where="member > 16") == [(m, 40) for m in (17, 18, 19)]
    assert pairs(source, where="member > 4", n=2) == [(5, 40), (6, 40)]
    assert pairs(source, members="7@10,0-2,7,5-6@20") == [(7, 10), (0, 40), (1, 40), (2, 40), (7, 40), (5, 20), (6, 20)]
    assert pairs(source, members=[9, 2, 5], n=2) == [(9, 40), (2, 40)]


@pytest.mark.parametrize(
    "members", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8), torch.tensor([1, 2]),
                iter([1, 2]), "1,2", "1-2", " 1 , 2 ", {1: "a", 2: "b"}],
)  # fmt: skip
def test_ids_in_any_container(source: Built, members: Any) -> None:
    assert ids(source, members=members) == [1, 2]


def test_counts_of_numpys_and_torchs(source: Built) -> None:
    assert ids(source, n=np.int64(2)) == ids(source, n=torch.tensor(2)) == [0, 1]
    assert ids(source, n=3, sample=np.uint8(7)) == ids(source, n=3, sample=7)


@pytest.mark.parametrize("sample", [0, 1, -1, 2**70])
@pytest.mark.parametrize("n", [1, 5, 18])
def test_the_named_rule_of_a_sample(source: Built, n: int, sample: int) -> None:
    rank = {m: hashlib.sha256(b"sample|%d|%d|40" % (sample, m)).hexdigest() for m in OK}
    assert ids(source, n=n, sample=sample) == sorted(sorted(OK, key=rank.__getitem__)[:n])


@pytest.mark.slow
def test_draws_are_nested_and_differ(source: Built) -> None:
    draws = [set(ids(source, n=n, sample=0)) for n in range(1, 19)]
    assert all(a < b for a, b in itertools.pairwise(draws))
    assert len({tuple(ids(source, n=5, sample=s)) for s in range(20)}) > 15
    # Each member is drawn about equally often: 200 draws of 6 of 18, standard deviation 6.7.
    counts = np.zeros(20)
    for s in range(200):
        counts[ids(source, n=6, sample=s)] += 1
    assert counts[OK].min() > 200 / 3 - 5 * 6.7
    assert counts[OK].max() < 200 / 3 + 5 * 6.7


def test_a_draw_does_not_depend_on_what_else_is_there(source: Built) -> None:
    narrow = set(ids(source, where="member >= 10", n=10, sample=5))
    assert narrow == set(range(10, 20))
    few = ids(source, where="member >= 10", n=4, sample=5)
    assert set(ids(source, n=18, sample=5)) >= set(few)
    wide = [m for m in ids(source, n=12, sample=5) if m >= 10]
    assert set(wide) <= set(few) or set(few) <= set(wide)


@given(st.lists(KEYS | CLOSE, min_size=1, max_size=20))
def test_ids_survive_their_text(keys: list[tuple[int, int | None]]) -> None:
    text = format_ids(keys)
    assert parse_ids(text) == keys
    assert format_ids(parse_ids(text)) == text
    found = parse_citation(f"x@{'0' * 40}/tiny#{text}~01234567")
    assert found is not None
    assert found.ids == text


def test_ids_are_short() -> None:
    assert format_ids([(m, None) for m in range(1000)]) == "0-999"
    assert format_ids([(m, 40) for m in range(10)] + [(10, None), (9, None)]) == "0-9@40,10,9"


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ("", "''"), (",", "''"), ("1,,2", "''"), ("1\n\n2", "'1\\n\\n2'"),
        *((text, repr(text)) for text in ("a", "-1", "3-1", "1-", "1.5", "1 2", "1@", "@1", "1@2@3", "1@2-3", "0x1",
                                          "0-1000000", "99999999999", "\u0663")),
    ],
)  # fmt: skip
def test_text_that_is_no_ids(members: str, found: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse_ids(members)
    assert str(caught.value) == f"members {members!r}: expected ids such as '0-99,205,7@40'; found {found}."


@pytest.mark.parametrize(
    "value", [True, False, 1.0, "1", None, [1], np.array([1, 2]), torch.tensor([1, 2]), np.float64(1), 1j]
)
def test_not_whole(value: object) -> None:
    assert whole_number(value) is None


# Citations


@pytest.mark.parametrize(
    "folder",
    [
        "plain",
        "with space",
        "a@b",
        "a#b",
        "a~b",
        "ünï©ode 字",
        "100%",
        "a@" + "0" * 40,
        "a?b=c&d",
        "[x]",
        "a\\b",
        "-",
        "%41",
        "a\nb",
    ],
)
def test_citations_name_any_folder(tmp_path: Path, folder: str) -> None:
    built = build(tmp_path / folder, snapshots=(10,))
    members = zoo.load("tiny", source=built.root, members="2,0@10,1")
    citation = members.citation
    assert "\n" not in citation
    assert citation.isascii()
    again = zoo.load(citation)
    assert (again.ids, again.citation) == ([2, 0, 1], citation)
    assert again.manifest.equals(members.manifest)
    cited = parse_citation(citation)
    assert cited == Citation(built.root.as_uri(), members._commit, "tiny", "2,0@10,1", citation[-8:])
    state = built.states[0, 10]
    assert torch.equal(again[1].state_dict()["fc1.weight"], state["fc1.weight"])
    one = zoo.load(again[1].citation)
    assert (one.ids, one[0].epoch) == ([0], 10)


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(str(tmp_path) + "/caf\udce9")  # a name in Latin-1
    built = build(folder)
    assert zoo.load(zoo.load("tiny", source=built.root).citation).ids == [0, 1, 2, 3]


def test_a_citation_by_hand(tmp_path: Path) -> None:
    built = build(tmp_path)
    built.rows[2]["sha256"] = None
    built.write()
    files = b"".join(hashlib.sha256(p.read_bytes()).digest() for p in (built.manifest, built.json))
    commit = hashlib.sha256(files).hexdigest()[:40]
    r = built.rows
    lines = f"3|40|{r[3]['sha256']}\n2|40|{r[2]['path']}|{r[2]['offset']}|{r[2]['nbytes']}\n"
    check = hashlib.sha256(lines.encode()).hexdigest()[:8]
    cited = zoo.load("tiny", source=tmp_path, members=[3, 2]).citation
    assert cited == f"{tmp_path.as_uri()}@{commit}/tiny#3,2~{check}"


def test_a_citation_is_refused_once_its_source_has_changed(tmp_path: Path) -> None:
    built = build(tmp_path / "a")
    citation = zoo.load("tiny", source=built.root, members=[0, 2]).citation
    text = (
        rf"^citation of tiny: expected {built.root.as_uri()} at [0-9a-f]{{12}} with check {citation[-8:]}; found it at "
    )
    old = dict(built.rows[1])
    built.rows[1]["test_accuracy"] = 0.1
    built.write()
    with pytest.raises(DamagedError, match=text + r".*, so it has changed: .* these ids now name the same weights\."):
        zoo.load(citation)
    built.rows[1] = old
    built.rows[2]["sha256"] = "0" * 64
    built.write()
    with pytest.raises(
        DamagedError,
        match=text + r".*, these ids now name other weights\. Load it anew with source= and members='0,2'\.",
    ):
        zoo.load(citation)
    del built.rows[2]
    built.write()
    with pytest.raises(
        DamagedError, match=text + r".*, so it has changed: member 2 of tiny: expected an id among 0-1,3; found 2\."
    ):
        zoo.load(citation)
    build(tmp_path / "b")
    assert zoo.load("tiny", source=tmp_path / "b").ids == [0, 1, 2, 3]


def test_a_citation_is_good_elsewhere_with_a_source(tmp_path: Path) -> None:
    built = build(tmp_path / "a")
    citation = zoo.load("tiny", source=built.root, n=2).citation
    shutil.copytree(built.root, tmp_path / "b")
    shutil.rmtree(built.root)
    assert zoo.load(citation, source=tmp_path / "b").ids == [0, 1]
    wrong = citation.removesuffix(citation[-8:]) + "00000000"
    with pytest.raises(DamagedError, match=r"found with check [0-9a-f]{8}, these ids now name other weights\."):
        zoo.load(wrong, source=tmp_path / "b")


X = "x@" + "0" * 40


@pytest.mark.parametrize(
    "text",
    ["a@b", "tiny#0", f"{X[:-1]}/tiny#0~01234567", f"{X}/tiny#0", f"{X}/tiny#~01234567", f"{X}/tiny#0~0123456G"],
)
def test_damaged_citations(text: str) -> None:
    with pytest.raises(SelectionError) as caught:
        zoo.load(text)
    assert str(caught.value) == (
        f"citation {text!r}: expected SOURCE@COMMIT/NAME#IDS~CHECK; found another form."
        " Copy the whole citation, up to the eight digits after `~`."
    )


def test_a_citation_stands_alone(source: Built) -> None:
    citation = zoo.load("tiny", source=source.root, n=2).citation
    for selection in ({"n": 1}, {"where": "seed > 0"}, {"members": "0"}, {"sample": 1}, {"snapshots": True}):
        with pytest.raises(SelectionError, match=r"^selection: expected a citation alone; found a citation with anoth"):
            zoo.load(citation, **selection)  # type: ignore[arg-type]


def test_snapshots_by_id(source: Built) -> None:
    members = zoo.load("tiny", source=source.root, members="0-1@10,1")
    assert [(m.id, m.epoch) for m in members] == [(0, 10), (1, 10), (1, 40)]
    assert members.member(1).epoch == 40  # its last selected snapshot
    for member in members:
        wanted = source.states[member.id, member.epoch]["conv1.weight"]
        assert torch.equal(member.state_dict()["conv1.weight"], wanted)
    with pytest.raises(MemberNotFound) as caught:
        zoo.load("tiny", source=source.root, members="1@11")
    assert str(caught.value) == "member 1 of tiny: expected an epoch among 10, 20, 40; found 11."
