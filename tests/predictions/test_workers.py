"""Predictions by several processes: the same bytes as by one, and what was done when one of them failed stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.predictions import predict
from checkpoints_zoo.predictions.storing import PredictionRun, _describe_set, _weight_hashes
from tests.support.kills import forked_workers  # noqa: F401 (a fixture)


def files(out: Path) -> dict[str, bytes]:
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_several_processes_store_the_same_bytes(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=7)
    predict(members, "digits", tmp_path / "one")
    predict(members[2:4], "digits", tmp_path / "two")  # gone on with
    members.predict("digits", tmp_path / "two", workers=2)
    one, two = (members.predictions("digits-test", source=tmp_path / out) for out in ("one", "two"))
    assert torch.equal(one.logits(), two.logits())
    members.predict("digits", tmp_path / "three", devices=["cpu", "cpu"])
    assert files(tmp_path / "three") == files(tmp_path / "one")


def running(n: int) -> PredictionRun:
    members = zoo.load("convnet-digits", n=n)
    inside = images.load("digits")
    facts = _describe_set(members, inside, "digits-test", torch.float32)
    return PredictionRun(members, inside, facts, _weight_hashes(members), torch.float32, 512)


def test_members_are_divided_into_jobs() -> None:
    work = running(64)
    jobs = work.divide_into_jobs([range(3, 8), range(20, 64)], "cpu")
    assert [at for job in jobs for at in job.argument] == [*range(3, 8), *range(20, 64)]
    assert {len(job.argument) for job in jobs} <= {4, 1}
    assert [job.name for job in jobs[:2]] == ["members 3 to 6", "member 7"]
    # On a GPU, the groups of one process.
    assert [job.argument for job in work.divide_into_jobs([range(64)], "cuda:0")] == [range(64)]


def test_a_job_gives_what_one_process_stores() -> None:
    work = running(4)
    whole = list(work.packed_logits(range(4), "cpu"))
    assert [at for at, _ in whole] == [0, 1, 2, 3]
    assert work(range(1, 3), "cpu") == whole[1:3]


def test_bad_numbers_of_workers_are_refused(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=2)
    with pytest.raises(UsageError, match="workers: expected a whole number from 1; found 0"):
        members.predict("digits", tmp_path, workers=0)
    with pytest.raises(UsageError, match="device 'nowhere'"):
        members.predict("digits", tmp_path, devices=["cpu", "nowhere"])
    assert not list(tmp_path.iterdir())
