"""Engines: every result once, whatever dies; errors with the job's name; no process is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_zoo.errors import MemberNotFound, NetworkError, UsageError, WorkerError
from checkpoints_zoo.workers import Engine, InProcess, Job, Processes, RayCluster, choose_engine, processes, ray_cluster
from tests.support import works

ROOT = Path(__file__).parents[2]
ENGINES = [InProcess(), Processes(2)]


def jobs(values: Iterable[int]) -> list[Job[int]]:
    return [Job(f"job {x}", x) for x in values]


def alive(process: int) -> bool:
    """Say whether a process still runs; one that has ended and waits to be collected doesn't."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(process: int) -> None:
    """Wait until a process is gone."""
    for _ in range(1000):
        if not alive(process):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} is still there")


@pytest.mark.parametrize("on", ENGINES)
def test_every_job_gives_its_result_once(on: Engine) -> None:
    found = [(job.argument, value[0]) for job, value in on.run(works.squared, jobs(range(7)))]
    assert sorted(found) == [(x, x * x) for x in range(7)]
    assert list(on.run(works.squared, [])) == []


def test_here_is_this_process_and_in_order() -> None:
    found = [(job.name, value) for job, value in InProcess("cuda:7").run(works.squared, jobs([3, 1, 2]))]
    assert found == [(f"job {x}", (x * x, os.getpid(), "cuda:7")) for x in (3, 1, 2)]


@pytest.mark.slow
def test_processes_have_devices_in_turn_and_end_with_the_run(tmp_path: Path) -> None:
    on = Processes(2, ("cuda:0", "cuda:1"))
    results = [value for _, value in on.run(works.squared, jobs(range(6)))]
    workers = {process for _, process, _ in results}
    assert os.getpid() not in workers
    for worker in workers:
        gone(worker)
    together = {value for _, value in on.run(works.Together(tmp_path, 2), jobs(range(2)))}
    assert len({process for process, _ in together}) == 2
    assert {device for _, device in together} == {"cuda:0", "cuda:1"}


def test_jobs_are_taken_as_workers_become_free() -> None:
    taken = []

    def coming() -> Iterable[Job[int]]:
        for job in jobs(range(9)):
            taken.append(job.argument)
            yield job

    with closing(Processes(2).run(works.squared, coming())) as results:
        next(results)
        assert len(taken) <= 4  # two that ran first, and those that took their places
        assert len(list(results)) == 8


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    on = Processes(2, say=said.append)
    results = [value for _, value in on.run(works.Killed(tmp_path, (2, 5)), jobs(range(8)))]
    assert sorted(results) == list(range(8))
    starts = {int(p.name): p.read_text().count("started") for p in tmp_path.iterdir()}
    assert starts == {x: 2 if x in (2, 5) else 1 for x in range(8)}
    assert len(said) == 2
    assert all("was ended by signal 9 in job job " in line and line.endswith("start 1 of 3") for line in said)


def test_a_job_that_kills_its_worker_again_and_again_is_an_error(tmp_path: Path) -> None:
    results: list[int] = []
    with pytest.raises(WorkerError) as error:
        results.extend(x for _, x in Processes(2).run(works.Killed(tmp_path, (1,), always=True), jobs(range(4))))
    assert str(error.value) == (
        "job job 1: expected a result; found 3 workers that died, the last one by signal 9."
        " The usual cause is too little memory: use fewer workers. The workers may have printed more above."
    )
    assert (tmp_path / "1").read_text().count("started") == 3
    assert 0 in results  # what finished was handed over
    assert len(set(results)) == len(results)


def test_a_worker_that_goes_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS_BEFORE_KILL", 0.1)
    before = multiprocessing.active_children()
    with pytest.raises(WorkerError, match=r"1 workers that died, the last one by signal 9\."):
        list(Processes(2, tries=1).run(works.silent, jobs([1])))
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize("what", ["work", "argument"])
def test_what_can_not_be_read_in_a_worker_is_its_own_error(what: str, tmp_path: Path) -> None:
    unreadable = works.Unreadable(tmp_path)
    work, argument = (unreadable, 1) if what == "work" else (works.squared, unreadable)
    with pytest.raises(UsageError) as error:
        list(Processes(2).run(work, [Job("one", argument)]))
    assert str(error.value) == "a file: expected the same one; found another."
    assert error.value.__notes__[0].startswith("in job one, worker 0 (process ")
    assert len(list(tmp_path.iterdir())) == 1  # started once


@pytest.mark.parametrize("on", ENGINES)
def test_an_error_comes_as_it_is_with_the_jobs_name(on: Engine, tmp_path: Path) -> None:
    results: list[int] = []
    with pytest.raises(MemberNotFound) as error:
        results.extend(x for _, x in on.run(works.Refused(tmp_path), jobs(range(30))))
    assert str(error.value) == "member 1: expected another."
    assert error.value.member == 1
    assert error.value.__notes__[0].startswith("in job job 1")
    assert 0 in results
    assert len(results) < 29  # nothing further was started


def test_an_error_that_can_not_be_sent_keeps_its_words() -> None:
    with pytest.raises(WorkerError, match=r"a worker: expected a result; found Odd: what was\.") as error:
        list(Processes(2).run(works.odd, jobs([1])))
    assert 'raise Odd("what was", "wrong")' in error.value.__notes__[0]


@pytest.mark.slow
def test_big_results_come_whole() -> None:
    found = {job.argument: value for job, value in Processes(2).run(works.big, jobs(range(4)))}
    assert found == {x: bytes([x]) * 20_000_000 for x in range(4)}


def test_work_that_can_not_be_sent_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"work for several processes: expected objects that can be pickled; found .*lambda"
    ):
        list(Processes(2).run(lambda x, device: x, jobs([1])))


def test_closing_stops_the_workers(tmp_path: Path) -> None:
    results = Processes(2).run(works.Together(tmp_path, 2), jobs(range(50)))
    next(results)
    results.close()
    for path in tmp_path.iterdir():
        gone(int(path.name))


PARENT = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from checkpoints_zoo.workers import Job, Processes
from tests.support.works import Slow
if __name__ == "__main__":
    list(Processes(2).run(Slow(Path(sys.argv[1])), [Job("a", 1), Job("b", 2)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group, and SIGKILL to the parent alone."""
    notes, script = tmp_path / "notes", tmp_path / "parent.py"
    notes.mkdir()
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script), str(notes)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as parent:  # fmt: skip
        while len(list(notes.iterdir())) < 2:
            assert parent.poll() is None
            time.sleep(0.01)
        workers = [int(path.name) for path in notes.iterdir()]
        if how is signal.SIGINT:
            os.killpg(parent.pid, how)
        else:
            parent.kill()
        said = parent.communicate(timeout=120)[1]
    assert parent.returncode == -how
    assert said.count("Traceback") == (how is signal.SIGINT)  # the parent's own, none of a worker
    for worker in workers:
        gone(worker)


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "threads"), [("", 3), ("1", 1)])
def test_cores_are_divided(wanted: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    monkeypatch.setattr(processes, "usable_cores", lambda: 6)
    assert [value for _, value in Processes(2).run(works.Threads(torch.float32), jobs([1]))] == [threads]


def test_workers_import_what_the_work_needs_alone() -> None:
    assert [value for _, value in Processes(2).run(works.modules, jobs([1]))] == [[]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, InProcess()),
        ({"workers": 1, "devices": ["cuda:1"]}, InProcess("cuda:1")),
        ({"devices": ["cuda:0", "cuda:1"]}, Processes(2, ("cuda:0", "cuda:1"))),
        ({"workers": 4}, Processes(4)),
        ({"ray": "local", "workers": 3}, RayCluster("local", 3)),
        ({"ray": "auto", "devices": ["cuda"]}, RayCluster("auto", gpus=1)),
    ],
)
def test_engine_is_chosen(arguments: dict[str, Any], expected: Engine) -> None:
    assert repr(choose_engine(**arguments)) == repr(expected)
    assert choose_engine(**arguments).device == expected.device


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"devices": []}, "devices: expected one or more; found none."),
        ({"workers": 0}, "workers: expected a whole number from 1; found 0."),
    ],
)
def test_engines_that_can_not_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_engine(**arguments)
    assert str(error.value) == text


def test_no_cluster_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        """Ray where there is no cluster."""

        def is_initialized(self) -> bool:
            return False

        def init(self, address: str, **options: object) -> None:
            raise ConnectionError(f"Could not find any running Ray instance at {address}.\nMore.")

    monkeypatch.setattr(ray_cluster, "import_ray", Absent)
    with pytest.raises(NetworkError) as error:
        list(RayCluster("10.0.0.1:6379").run(works.squared, jobs([1])))
    assert str(error.value) == (
        "Ray cluster '10.0.0.1:6379': expected a cluster that answers; found Could not find any running Ray instance at"
        " 10.0.0.1:6379. Start one with `ray start --head`, or give `--ray local`."
    )


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as error:
        list(RayCluster().run(works.squared, jobs([1])))
    assert str(error.value).startswith("Ray: expected the package ray; found none installed (")
    assert str(error.value).endswith("Install ray: `pip install 'ray>=2.40,<3'`.")
