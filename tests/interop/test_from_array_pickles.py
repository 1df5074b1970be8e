"""Pickles of numpy arrays become a source as files of torch.save do, and none of them is run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints_zoo.errors import DamagedError, FormatError
from tests.interop.test_from_checkpoints import keep, mlps, same, source_of
from tests.support.refusals import Evil
from tests.support.scenarios import State


def save_arrays(state: State, path: Path, protocol: int = 4, **beside: Any) -> None:
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    path.write_bytes(pickle.dumps({"params": arrays, **beside} if beside else arrays, protocol))


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_by_name(protocol: int, tmp_path: Path) -> None:
    made = mlps(3)
    folder = keep(tmp_path / "runs", made, "seed-{}.pkl", lambda state, path: save_arrays(state, path, protocol))
    members = source_of(folder, tmp_path / "out")
    same(members, made)
    assert members.manifest["sha256"].tolist() == source_of(
        keep(tmp_path / "torch", made), tmp_path / "again"
    ).manifest["sha256"].tolist()  # fmt: skip


def test_arrays_under_a_key_beside_other_values(tmp_path: Path) -> None:
    made = mlps(2)
    other = {"mean": np.ones(3), "count": 3}

    def save(state: State, path: Path) -> None:
        save_arrays(state, path, step=7, seeds=[1, 2], statistics=other)

    folder = keep(tmp_path / "runs", made, "seed-{}.pickle", save)
    same(source_of(folder, tmp_path / "out", key="params"), made)
    same(source_of(folder, tmp_path / "found"), made)  # The key whose arrays fit the network.


def test_pickles_beside_checkpoints_are_not_opened(tmp_path: Path) -> None:
    made = mlps(2)
    folder = keep(tmp_path / "runs", made)
    (folder / "arguments.pkl").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    same(source_of(folder, tmp_path / "out"), made)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    folder = keep(tmp_path / "runs", mlps(2), "seed-{}.pkl", save_arrays)
    (folder / "seed-1.pkl").write_bytes(pickle.dumps({"w": Evil(tmp_path / "ran")}))
    with pytest.raises(FormatError, match=r"seed-1.pkl: expected a pickle of numpy arrays .* Nothing was run"):
        source_of(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_damaged_pickles_are_told(tmp_path: Path) -> None:
    folder = keep(tmp_path / "runs", mlps(3), "seed-{}.pkl", save_arrays)
    content = (folder / "seed-1.pkl").read_bytes()
    (folder / "seed-1.pkl").write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedError, match=r"found 1 that are not. file .*seed-1.pkl: expected .* of a pickle; found "):
        source_of(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "manifests").exists()


def test_big_endian_and_fortran_order(tmp_path: Path) -> None:
    made = mlps(1)

    def save(state: State, path: Path) -> None:
        arrays = {n: t.numpy().astype(">f4", order="F") for n, t in state.items()}
        path.write_bytes(pickle.dumps(arrays, 3))

    members = source_of(keep(tmp_path / "runs", made, "seed-{}.pkl", save), tmp_path / "out")
    assert all(torch.equal(t[0], made[0][n]) for n, t in members.stack().items())
