"""An engine that runs jobs on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from checkpoints_zoo.errors import NetworkError, UsageError
from checkpoints_zoo.workers.engine import Job, Work
from checkpoints_zoo.workers.jobs import LARGEST_TRY_COUNT, JobQueue, pickle_for_worker, run_job

A = TypeVar("A")
R = TypeVar("R")
OBJECT_STORE_BYTES = 2**29  # Size of the object store of a local Ray cluster; results pass through this store.
POLLING_SECONDS = 5.0  # Seconds between two queries of the cluster's free resources.


@dataclass(frozen=True)
class RayCluster:
    """Runs jobs on the nodes of a Ray cluster. Each node needs this package, and all modules that the work function
    imports.

    Args:
        address: the cluster: "auto", "local", or an address for `ray.init`; an existing connection of this process is
            used instead.
        workers: number of jobs that run at a time; None for as many as the cluster can run.
        cpus, gpus: numbers of CPU cores and GPUs that Ray reserves for one job.
        tries: the largest number of times that a job is started if its workers or nodes die.
        say: function that is called with a line of text about each job that is started again.
    """

    address: str = "auto"
    workers: int | None = None
    cpus: int = field(default=1, repr=False)
    gpus: int = field(default=0, repr=False)
    tries: int = field(default=LARGEST_TRY_COUNT, repr=False)
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    @property
    def device(self) -> str:
        return "cuda:0" if self.gpus else "cpu"

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs on the cluster; yield (job, result) of each as it finishes.

        The arguments and errors are those of `Engine.run`, and
            UsageError: Ray is not installed, or no node has the resources of a job.
            NetworkError: no Ray cluster answers at the address.
        """
        pickled_work = pickle_for_worker(work)
        ray = import_ray()
        with self._connect_to_cluster(ray):
            run_remotely = ray.remote(
                max_retries=0, num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy="SPREAD"
            )(_run_job_on_node)
            work_reference = ray.put(pickled_work)
            queue, running_jobs = JobQueue(jobs, self.tries), dict[Any, tuple[Job[A], int]]()
            try:
                while True:
                    while (
                        queue.accepts_jobs
                        and len(running_jobs) < self._largest_job_count(ray)
                        and (job_and_start_count := queue.next_job())
                    ):
                        pickled_argument = pickle_for_worker(job_and_start_count[0].argument)
                        running_jobs[run_remotely.remote(work_reference, pickled_argument, self.device, self.cpus)] = (
                            job_and_start_count
                        )
                    if not running_jobs:
                        break
                    finished_references, _ = ray.wait(list(running_jobs), num_returns=1, timeout=POLLING_SECONDS)
                    for reference in finished_references:
                        job, start_count = running_jobs.pop(reference)
                        try:
                            pickled_answer, node_name = ray.get(reference)
                        except ray.exceptions.RayTaskError:
                            raise  # The node could not start the job: the work function raised no error.
                        except ray.exceptions.RayError as error:
                            error_name = type(error).__name__
                            self.say(f"{error_name} in job {job.name}, start {start_count} of {self.tries}")
                            queue.record_death(job, start_count, error_name)
                        else:
                            yield from queue.read_answer(job, pickled_answer, node_name)
                queue.raise_failure()
            finally:
                for reference in running_jobs:
                    ray.cancel(reference, force=True)

    def _largest_job_count(self, ray: Any) -> int:
        """Return the number of jobs that the cluster's present nodes can run at a time.

        Raises:
            UsageError: the nodes lack the resources for a single job.
        """
        resources = ray.cluster_resources()
        job_count = int(resources.get("CPU", 0) // self.cpus)
        if self.gpus:
            job_count = min(job_count, int(resources.get("GPU", 0) // self.gpus))
        if not job_count:
            raise UsageError(
                f"Ray cluster {self.address!r}",
                expected=f"{self.cpus} CPU{f' and {self.gpus} GPU' if self.gpus else ''} for a job",
                found=", ".join(f"{n:g} {kind}" for kind, n in sorted(resources.items()) if kind in ("CPU", "GPU"))
                or "neither CPU nor GPU",
            )
        return min(job_count, self.workers or job_count)

    @contextmanager
    def _connect_to_cluster(self, ray: Any) -> Iterator[None]:
        """Connect to the cluster while the block runs, unless this process is connected already."""
        if ray.is_initialized():
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address == "local":
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": self.workers}
        try:
            ray.init(self.address, **options)
        except (ConnectionError, ValueError) as error:
            raise NetworkError(
                f"Ray cluster {self.address!r}",
                expected="a cluster that answers",
                found=str(error).split("\n")[0],
                do="Start one with `ray start --head`, or give `--ray local`",
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def import_ray() -> Any:
    """Import Ray; return the module.

    Raises:
        UsageError: Ray is not installed.
    """
    # Without this setting, every worker of a program that was started by `uv run` would build its own environment.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            "Ray",
            expected="the package ray",
            found=f"none installed ({error})",
            do="Install ray: `pip install 'ray>=2.40,<3'`",
        ) from error
    return ray


def _run_job_on_node(pickled_work: bytes, pickled_argument: bytes, device: str, thread_count: int) -> tuple[bytes, str]:
    """Run a job on a node; return the answer and the node's name."""
    return run_job(pickled_work, pickled_argument, device, thread_count), f"on node {platform.node()}"
