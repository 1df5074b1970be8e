"""A real Ray cluster of two nodes, one of which is killed while jobs run on it."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.executor import Job, RayCluster, cluster, engine
from tests import works
from tests.conftest import CI, import_oracle

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]  # Ray leaves files to its end

NODE = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
# A node that is gone is to be missed within a second.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}


@pytest.fixture
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """Give a cluster and its second node; this process is connected to it."""
    import_oracle("ray", required=CI)
    ray = cluster._import()
    from ray.cluster_utils import Cluster

    short = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets' paths may have 107 characters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": short, "_system_config": HEALTH})
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
    on = engine(ray="auto")
    with pytest.raises(MemberNotFound, match=r"member 1: expected another\.") as error:
        list(on.run(works.refused, jobs(3)))
    assert error.value.__notes__[0].startswith("in job job 1, on node ")
    assert sorted(x for _, x in on.run(works.Killed(tmp_path, (1,)), jobs(3))) == [0, 1, 2]
    assert (tmp_path / "1").read_text().count("started") == 2


def a_node_is_lost(nodes: Any, second: Any, tmp_path: Path) -> None:
    said: list[str] = []

    def kill() -> None:
        while not list(tmp_path.glob("*-doomed")):
            time.sleep(0.01)
        nodes.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    results = [
        (job.argument, value)
        for job, value in RayCluster(say=said.append).run(works.Doomed(second.node_id, tmp_path), jobs(8))
    ]
    killer.join()
    assert sorted(results) == [(x, bytes([x]) * 300_000) for x in range(8)]
    lost = [path.name.partition("-")[0] for path in tmp_path.glob("*-doomed")]
    assert len(lost) == 1
    assert len(said) == 1
    assert said[0].endswith(f" in job job {lost[0]}, start 1 of 3")
    assert sorted(x for _, (x, _, _) in RayCluster().run(works.squared, jobs(3))) == [0, 1, 4]  # by the one left


def a_job_that_no_node_can_run() -> None:
    with pytest.raises(UsageError, match=r"Ray cluster 'auto': expected 1 CPU and 1 GPU for a job; found \d+ CPU\."):
        list(engine(ray="auto", devices=["cuda"]).run(works.squared, jobs(1)))


def test_results_come_once_whatever_is_lost(two_nodes: tuple[Any, Any], tmp_path: Path) -> None:
    """One test, since a cluster takes seconds to start."""
    for folder in ("workers", "nodes"):
        (tmp_path / folder).mkdir()
    errors_and_lost_workers(tmp_path / "workers")
    a_job_that_no_node_can_run()
    a_node_is_lost(*two_nodes, tmp_path / "nodes")
