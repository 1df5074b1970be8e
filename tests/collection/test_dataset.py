"""Weights as a torch Dataset: flat vectors against concatenated tensors, labels, splits, and the way back."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import DamagedError, SelectionError, UsageError
from tests.support.scenarios import NETS, Built, State, build, five, load, raw


@pytest.fixture(scope="module", params=list(NETS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return five(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def members(built: Built) -> Collection:
    return load(built)


def flat(state: State, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([t.to(dtype).reshape(-1) for t in state.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_and_labels(members: Collection, built: Built, dtype: torch.dtype) -> None:
    dataset = members.dataset(labels=("test_accuracy", "seed", "final"), dtype=dtype)
    assert len(dataset) == 5
    assert dataset.label_names == ("test_accuracy", "seed", "final")
    assert dataset.width == sum(t.numel() for t in built.states[0, 40].values())
    for i in (*range(5), -1):
        vector, labels = dataset[i]
        assert torch.equal(vector, flat(built.states[i % 5, 40], dtype))
        assert labels.dtype == torch.float64
        assert labels.tolist() == [0.9 + i % 5 / 1000, 7 + i % 5, 1.0]
    assert [int(labels[1]) for _, labels in dataset] == [7, 8, 9, 10, 11]
    for position in (5, -6):
        with pytest.raises(IndexError, match=rf"^position {position}: expected one of 5 members\.$"):
            dataset[position]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_loader(members: Collection, built: Built, workers: int) -> None:
    context = "fork" if workers else None
    loader = DataLoader(members.dataset("seed"), batch_size=2, num_workers=workers, multiprocessing_context=context)
    seen = []
    for vectors, labels in loader:
        for vector, label in zip(vectors, labels[:, 0], strict=True):
            seen.append(int(label) - 7)
            assert torch.equal(vector, flat(built.states[seen[-1], 40]))
    assert seen == [0, 1, 2, 3, 4]


def test_unflatten_restores_the_tensors(members: Collection, built: Built) -> None:
    dataset = members.dataset(dtype=torch.float64)
    one = dataset.unflatten(dataset[3][0])
    wanted = {n: t.double() for n, t in built.states[3, 40].items()}
    assert list(one) == list(wanted)
    assert all(torch.equal(one[n], t) and one[n].shape == t.shape for n, t in wanted.items())
    many = dataset.unflatten(torch.stack([dataset[i][0] for i in range(5)]).view(5, 1, -1))
    stacked = members.stack()
    for n, t in many.items():
        assert t.shape == (5, 1, *built.states[0, 40][n].shape)
        assert torch.equal(t[:, 0].to(stacked[n].dtype), stacked[n])
    with pytest.raises(UsageError) as caught:
        dataset.unflatten(torch.zeros(3, 7))
    assert str(caught.value) == f"weight vectors: expected {dataset.width:,} weights; found 7."


def test_a_dataset_can_be_sent_to_other_processes(members: Collection) -> None:
    dataset = members.dataset()
    again = pickle.loads(pickle.dumps(dataset))  # noqa: S301
    assert raw(again[2][0]) == raw(dataset[2][0])


def test_splits_do_not_leak(tmp_path: Path) -> None:
    members = load(build(tmp_path, members=range(9), snapshots=(10, 20)), snapshots=True)
    names = ("train", "validation", "test")
    parts = [{x.member for x in members.dataset(split=s).locations} for s in names]
    assert parts == [{0, 3, 6}, {1, 4, 7}, {2, 5, 8}]  # every snapshot of a run is in the split of the run
    assert sum(len(members.dataset(split=s)) for s in names) == len(members) == 27
    with pytest.raises(SelectionError) as caught:
        members[:1].dataset(split="test")
    assert str(caught.value) == "split of tiny: expected members in 'test'; found only train."


def test_bad_labels_are_refused(tmp_path: Path) -> None:
    built = build(tmp_path)
    built.rows[2]["test_accuracy"] = None
    built.write()
    members = load(built)
    assert members.dataset(labels=())[0][1].shape == (0,)
    for label in ("status", "nonsense"):
        with pytest.raises(
            UsageError,
            match=rf"^label '{label}': expected a numeric column \(member, epoch, final, run, .*\); found none such\.$",
        ):
            members.dataset(labels=[label])
    with pytest.raises(UsageError) as caught:
        members.dataset()
    assert str(caught.value) == (
        "label 'test_accuracy' of tiny: expected a value for each member; found null for member 2."
        ' Select with where="test_accuracy is not null".'
    )
    assert len(load(built, where="test_accuracy is not null").dataset()) == 3


def test_a_statistic_too_large_for_the_vectors_dtype(tmp_path: Path) -> None:
    built = build(tmp_path, "resnet8", [0, 1], change=lambda m, s: s["bn1.running_var"].fill_(1e6 if m else 1.0))
    dataset = load(built).dataset(dtype=torch.float16)
    assert dataset[0][0].dtype == torch.float16
    with pytest.raises(
        DamagedError,
        match=r"^tensor 'bn1.running_var' of member 1: expected finite weights; found 8 that are not, as torch.fl",
    ):
        dataset[1]
