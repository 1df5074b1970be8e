"""A real Ray cluster of two nodes, one of which is killed while jobs run on it."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.workers import Job, RayCluster, choose_engine, ray_cluster
from tests.conftest import CI, import_oracle
from tests.support import works
from tests.support.tiny import MEMBERS, TINY, contents

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Ray leaves files to its end

NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
# What nothing here asks for: its scaling, and what its workers print.
ALONE = {"no_monitor": True, "include_log_monitor": False}
# A node that is gone is to be missed within a second.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """Give a cluster and its second node; this process is connected to it."""
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # Ray looks at it when it is imported
    import_oracle("ray", required=CI)
    ray = ray_cluster.import_ray()
    from ray.cluster_utils import Cluster

    short = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets' paths may have 107 characters
    (short / "ray").mkdir()  # where Ray notes the address of its cluster, and makes no folder for it
    monkeypatch.setenv("RAY_TMPDIR", str(short))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Cluster(
            initialize_head=True,
            head_node_args={**NODE, **ALONE, "temp_dir": str(short / "ray"), "_system_config": HEALTH},
        )
        second = nodes.add_node(**NODE)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield nodes, second
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(short, ignore_errors=True)


def jobs(count: int) -> list[Job[int]]:
    return [Job(f"job {x}", x) for x in range(count)]


def errors_and_lost_workers(tmp_path: Path) -> None:
    on = choose_engine(ray="auto")
    with pytest.raises(MemberNotFound, match=r"member 1: expected another\.") as error:
        list(on.run(works.refused, jobs(3)))
    assert error.value.__notes__[0].startswith("in job job 1, on node ")
    assert sorted(x for _, x in on.run(works.Killed(tmp_path, (1,)), jobs(3))) == [0, 1, 2]
    assert (tmp_path / "1").read_text().count("started") == 2


@contextmanager
def lost_once_it_works(nodes: Any, second: Any, notes: Path) -> Iterator[None]:
    """Kill a node as soon as it has begun a job."""

    def kill() -> None:
        while not list(notes.glob("*-doomed")):
            time.sleep(0.01)
        nodes.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


@dataclass(frozen=True)
class Failing:
    """The cluster, one of whose nodes never ends what it begins."""

    node: str
    notes: Path
    say: Callable[[str], object]
    device: str = "cpu"

    def run(self, work: Any, jobs: Any) -> Generator[tuple[Any, Any], None, None]:
        yield from RayCluster(say=self.say).run(works.Doomed(self.node, self.notes, work), jobs)


def a_node_is_lost_that_trains(nodes: Any, second: Any, notes: Path, tmp_path: Path) -> None:
    """Nothing is lost, nothing is there twice: the source is that of one process, byte for byte."""
    said: list[str] = []
    with lost_once_it_works(nodes, second, notes):
        train_into(TINY, MEMBERS, tmp_path / "out", Failing(second.node_id, notes, said.append))
    assert len(said) == 1
    assert said[0].endswith(", start 1 of 3")
    train_into(TINY, MEMBERS, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    lines = (tmp_path / "out" / ".training" / "tiny" / "log.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["member"] for line in lines) == list(MEMBERS)
    results = RayCluster().run(works.many_bytes, jobs(3))  # by the one left
    assert sorted(value for _, value in results) == [works.many_bytes(x, "cpu") for x in range(3)]


def a_job_that_no_node_can_run() -> None:
    with pytest.raises(UsageError, match=r"Ray cluster 'auto': expected 1 CPU and 1 GPU for a job; found \d+ CPU\."):
        list(choose_engine(ray="auto", devices=["cuda"]).run(works.squared, jobs(1)))


def test_results_come_once_whatever_is_lost(two_nodes: tuple[Any, Any], tmp_path: Path) -> None:
    """One test, since a cluster takes seconds to start."""
    for folder in ("workers", "training"):
        (tmp_path / folder).mkdir()
    errors_and_lost_workers(tmp_path / "workers")
    a_job_that_no_node_can_run()
    a_node_is_lost_that_trains(*two_nodes, tmp_path / "training", tmp_path)
