"""Views: members changed by symmetries as they are read, in every way that weights are read."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.collection import views
from checkpoints_zoo.errors import (
    DamagedError,
    FormatError,
    MemberNotFound,
    SelectionError,
    SourceNotFound,
    StorageError,
    UsageError,
)
from checkpoints_zoo.symmetry import Element, apply, inverse, random_element

NAMES = ["convnet-digits", "resnet8-digits"]


def rows_by_norm(weights: Tensor) -> np.ndarray:
    """Sort the rows of one kernel by their norm, descending, with NumPy alone."""
    rows = weights.double().numpy().reshape(len(weights), -1)
    return rows[np.argsort(-np.linalg.norm(rows, axis=1), kind="stable")]


@pytest.mark.parametrize("name", NAMES)
def test_a_canonical_view_changes_the_weights_and_not_the_function(name: str) -> None:
    members = zoo.load(name, n=3)
    inputs = members.preprocess(zoo.images.load("digits").images[:20]).double()
    plain = members.ensemble(dtype=torch.float64)(inputs)
    for arguments in ({"permute": "first"}, {"permute": "max", "streams": True}, {"scale": "unit-norm"}):
        viewed = members.canonicalize(**arguments)
        changed = viewed.ensemble(dtype=torch.float64)(inputs)
        exact = viewed.stack(dtype=torch.float64)
        torch.testing.assert_close(plain, changed, rtol=1e-4, atol=1e-4)  # scales are rounded to float32 and back
        if "scale" not in arguments:
            torch.testing.assert_close(plain, changed, rtol=1e-12, atol=1e-12)
        assert any(not torch.equal(exact[n], t.double()) for n, t in members.stack().items())


def test_rows_are_sorted_by_norm() -> None:
    members = zoo.load("convnet-digits", n=3)
    viewed = members.canonicalize(permute="norm").stack()
    first = next(n for n, t in viewed.items() if t.ndim == 5)
    for own, other in zip(members.stack()[first], viewed[first], strict=True):
        assert np.array_equal(rows_by_norm(own), other.double().numpy().reshape(len(other), -1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", [{"permute": "max", "streams": True}, {"scale": "unit-norm", "permute": "max"}])
def test_every_way_to_read_gives_the_same(
    name: str, arguments: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed = zoo.load(name, n=5).canonicalize(**arguments)  # type: ignore[arg-type]
    stacked = viewed.stack()
    monkeypatch.setattr(views, "_BYTES_AT_ONCE", 1)  # one member at a time
    again = viewed.stack()
    assert all(torch.equal(stacked[n], again[n]) for n in stacked)
    for i, member in enumerate(viewed):
        state = member.state_dict()
        assert all(torch.equal(stacked[n][i], state[n]) for n in stacked)
    for ids, batch in viewed.batches(2):
        rows = [viewed.ids.index(m) for m in ids]
        assert all(torch.equal(stacked[n][rows], batch[n]) for n in stacked)
    part = viewed[1:3].stack(names=list(stacked)[:2])
    assert list(part) == list(stacked)[:2]
    assert all(torch.equal(stacked[n][1:3], part[n]) for n in part)
    model = viewed.member(3).model(dtype=None).state_dict()
    assert all(torch.equal(stacked[n][3].to(model[n].dtype), model[n]) for n in stacked)
    dataset = viewed.dataset(dtype=torch.float64)
    vectors = dataset.__getitems__([4, 0])
    flat = torch.cat([stacked[n].double().flatten(1) for n in dataset.spans], 1)
    assert torch.equal(vectors[0][0], flat[4])
    assert torch.equal(vectors[1][0], flat[0])


def test_the_table_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return derive(*arguments)

    derive = zoo.symmetries
    monkeypatch.setattr("checkpoints_zoo.collection.collection.symmetries", counted)
    viewed = zoo.load("convnet-digits", n=6).canonicalize(permute="max").align(to=0)
    for _ in viewed.batches(1):
        pass
    viewed[2].state_dict()
    viewed.symmetry(1)
    assert len(calls) == 1


def test_dtypes_of_a_view() -> None:
    members = zoo.load("resnet8-digits", n=2)
    stored = members.stack()
    weight = next(n for n, t in stored.items() if t.dtype == torch.float16)
    assert members.canonicalize(permute="first").stack()[weight].dtype == torch.float16
    assert members.align(to=0).stack()[weight].dtype == torch.float16
    scaled = members.canonicalize(scale="unit-norm")
    assert scaled.stack()[weight].dtype == torch.float32
    half = scaled.stack(dtype=torch.float16)
    assert {n: t.dtype for n, t in half.items()} == {n: t.dtype for n, t in stored.items()}
    assert {t.dtype for t in scaled.stack(dtype=torch.float64).values()} == {torch.float64}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_symmetry_of_a_member_can_be_undone(name: str) -> None:
    members = zoo.load(name, n=3)
    table = members.symmetry_table
    for viewed, exact in (
        (members.canonicalize(permute="max", streams=True), True),
        (members.align(to=1), True),
        (members.align(to="mean"), True),
        (members.canonicalize(scale="unit-norm", permute="max").align(to=0), False),
    ):
        for i in range(3):
            element = viewed.symmetry(i)
            back = apply(table, viewed[i].state_dict(), inverse(table, element))
            stored = members[i].state_dict()
            for n, tensor in stored.items():
                if exact:
                    assert torch.equal(tensor, back[n])
                else:
                    torch.testing.assert_close(tensor.float(), back[n].float(), rtol=1e-5, atol=1e-6)
            there = apply(table, {n: t.double() for n, t in stored.items()}, element)
            for n, tensor in viewed[i].state_dict(dtype=torch.float64).items():
                if tensor.is_floating_point():
                    torch.testing.assert_close(there[n], tensor, rtol=1e-5, atol=1e-6)


def test_without_a_view_the_symmetry_is_the_identity() -> None:
    members = zoo.load("convnet-digits", n=2)
    assert members.symmetry(0) == Element({}, {})
    with pytest.raises(UsageError, match=r"symmetries of convnet-digits: expected a view; found weights as they are"):
        members.write_symmetries("nowhere.parquet")


@pytest.mark.slow
def test_alignment_finds_a_known_permutation() -> None:
    members = zoo.load("resnet8-digits", n=1)
    table, generator = members.symmetry_table, torch.Generator().manual_seed(0)
    drawn = Element(random_element(table, generator, members=1).permutations)
    shuffled = members.transform(drawn)
    assert not torch.equal(shuffled.stack()["conv1.weight"], members.stack()["conv1.weight"])
    found = shuffled.align(to=members[0])
    assert all(torch.equal(found.stack()[n], t) for n, t in members.stack().items())
    canonical = [m.canonicalize(permute="max", streams=True).stack() for m in (members, shuffled)]
    assert all(torch.equal(canonical[0][n], canonical[1][n]) for n in canonical[0])


def test_alignment_brings_members_nearer_and_keeps_the_reference() -> None:
    members = zoo.load("convnet-digits", n=6)
    aligned, plain = members.align(to=2).stack(), members.stack()
    assert all(torch.equal(aligned[n][2], t[2]) for n, t in plain.items())

    def distance(stacked: dict[str, Tensor]) -> Tensor:
        return torch.stack([(t - t[2]).flatten(1).double().square().sum(1) for t in stacked.values()]).sum(0)

    nearer = distance(aligned) < distance(plain)
    assert nearer.tolist() == [True, True, False, True, True, True]
    mean = members.align(to="mean").stack()
    spread = [sum(float(t.double().var(0).sum()) for t in s.values()) for s in (plain, aligned, mean)]
    assert spread[2] < spread[1] < spread[0]


def test_a_member_s_alignment_does_not_depend_on_the_other_members() -> None:
    members = zoo.load("convnet-digits", n=8)
    whole = members.align(to=0).stack()
    alone = members.align(to=0)
    for i in (5, 1, 7):
        state = alone[i].state_dict()
        assert all(torch.equal(whole[n][i], state[n]) for n in whole)
    part = zoo.load("convnet-digits", members="0,5").align(to=0)
    assert all(torch.equal(whole[n][5], part.stack()[n][1]) for n in whole)


def test_views_on_views_and_their_texts() -> None:
    members = zoo.load("convnet-digits", n=2)
    viewed = members.canonicalize(scale="unit-norm", permute="max", streams=True).align(to=0)
    assert repr(viewed) == (
        "Collection('convnet-digits', 2 members, convnet on digits, from embedded,"
        " canonical(scale=unit-norm, permute=max, streams), aligned to member 0)"
    )
    assert "aligned to the mean" in repr(members.align(to="mean")[:1])
    assert members._view.steps == ()


@pytest.mark.parametrize("make", ["canonical", "aligned", "mean", "given"])
def test_a_dataset_of_a_view_can_be_sent_to_another_process(make: str) -> None:
    members = zoo.load("convnet-digits", n=3)
    drawn = random_element(members.symmetry_table, torch.Generator().manual_seed(0), members=3)
    viewed = {
        "canonical": lambda: members.canonicalize(permute="norm"),
        "aligned": lambda: members.align(to=0),
        "mean": lambda: members.align(to="mean"),
        "given": lambda: members.transform(drawn),
    }[make]()
    dataset = viewed.dataset()
    sent = pickle.loads(pickle.dumps(dataset))  # noqa: S301 - our own
    assert torch.equal(sent[2][0], copy.copy(dataset)[2][0])


def test_symmetries_as_a_file(tmp_path: Path) -> None:
    members = zoo.load("resnet8-digits", n=4)
    viewed = members.canonicalize(scale="unit-norm").align(to=3)
    path = viewed.write_symmetries(tmp_path / "symmetries" / "resnet8-digits.parquet")
    table = pq.read_table(path)
    assert table.column("member").to_pylist() == [0, 1, 2, 3]
    assert table.column("sha256").to_pylist() == members.manifest["sha256"].tolist()
    group = next(n for n in table.schema.names if n.startswith("permutation "))
    assert sorted(table.column(group)[1].as_py()) == list(range(len(table.column(group)[1])))
    assert table.column(group)[3].as_py() == list(range(len(table.column(group)[3])))
    again = members.transform(path)
    direct, read = viewed.stack(), again.stack()
    for n, tensor in direct.items():
        torch.testing.assert_close(tensor, read[n], rtol=1e-5, atol=1e-6)
    # Rows are found by member, whatever the selection's order.
    some = zoo.load("resnet8-digits", members="3,1").transform(str(path))
    torch.testing.assert_close(some.stack()["conv1.weight"][0], direct["conv1.weight"][some.ids[0]])
    assert "symmetries of resnet8-digits.parquet" in repr(some)
    first = path.read_bytes()
    assert viewed.write_symmetries(path).read_bytes() == first


def test_symmetries_that_can_t_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    viewed = zoo.load("convnet-digits", n=2).canonicalize(permute="max")
    with pytest.raises(StorageError, match="that can be written to"):
        viewed.write_symmetries(tmp_path / "file" / "s.parquet")


def _for_other_weights(path: Path, to: Path) -> Path:
    table = pq.read_table(path)
    others = pa.array(["0" * 64] * len(table))
    pq.write_table(table.set_column(2, "sha256", others), to)
    return to


def test_files_that_are_no_symmetries_of_these_members(tmp_path: Path) -> None:
    members = zoo.load("resnet8-digits", n=2)
    path = members.align(to=0).write_symmetries(tmp_path / "s.parquet")
    with pytest.raises(SourceNotFound, match=r"symmetries .*none\.parquet: expected a file; found none"):
        members.transform(tmp_path / "none.parquet")
    with pytest.raises(UsageError, match=r"permutation '.*': expected a group among"):
        zoo.load("convnet-digits", members="7").transform(path)
    with pytest.raises(DamagedError, match=r"expected symmetries of member 0 with weights .*; found symmetries of"):
        members.transform(_for_other_weights(path, tmp_path / "else.parquet"))
    with pytest.raises(MemberNotFound, match=r"member 2 at epoch 20: expected one of the 2 members of s\.parquet"):
        zoo.load("resnet8-digits", n=3).transform(path).stack()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedError, match="expected a Parquet file"):
        members.transform(cut)
    pq.write_table(members.rows, tmp_path / "other.parquet")
    with pytest.raises(
        FormatError, match="expected a file that write_symmetries wrote, version 3 or older; found another"
    ):
        members.transform(tmp_path / "other.parquet")


def test_refusals() -> None:
    members = zoo.load("convnet-digits", n=3)
    with pytest.raises(UsageError, match=r"expected .*first.*max.*norm"):
        members.canonicalize(permute="last")
    with pytest.raises(UsageError, match="unit-norm"):
        members.canonicalize(scale="unit-var")
    with pytest.raises(
        UsageError, match=r"permute: expected 'first' or 'max': the rows of conv1\.weight all have norm 1"
    ):
        members.canonicalize(scale="unit-norm", permute="norm")
    with pytest.raises(MemberNotFound):
        members.align(to=9)
    with pytest.raises(UsageError, match=r"align: expected a member's id, a member or 'mean'; found 'median'\."):
        members.align(to="median")
    table = members.symmetry_table
    two = random_element(table, torch.Generator().manual_seed(0), members=2)
    with pytest.raises(UsageError, match="expected as many rows as members"):
        members.transform(two)
    with pytest.raises(SelectionError):
        members[5:].canonicalize(permute="first")


def test_a_reference_of_another_architecture_is_refused() -> None:
    other = zoo.load("resnet8-digits", n=1)[0]
    with pytest.raises((UsageError, zoo.ZooError), match="tensor"):
        zoo.load("convnet-digits", n=2).align(to=other).stack()
