"""A Ray cluster: jobs on every node that has room, and again elsewhere when a node is lost."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from checkpoints_zoo.errors import NetworkError, UsageError
from checkpoints_zoo.executor.jobs import TRIES, A, Job, R, Work, answer, check_picklable, lost, opened

STORE_BYTES = 2**29  # of the object store of a cluster that is started here: results pass through it
POLL_S = 5.0  # after which the cluster is asked anew how much room it has


@dataclass(frozen=True)
class RayCluster:
    """Ray's nodes, each with this package installed, and whatever else the work imports.

    Args:
        address: "auto", "local", or one that `ray.init` takes; a connection that is there already is used as it is.
        workers: jobs at a time; None for as many as the cluster has room for.
        cpus, gpus: what one job takes.
        tries: how often a job is started whose workers or nodes die.
        say: told of each job that is started again.
    """

    address: str = "auto"
    workers: int | None = None
    cpus: int = field(default=1, repr=False)
    gpus: int = field(default=0, repr=False)
    tries: int = field(default=TRIES, repr=False)
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    @property
    def device(self) -> str:
        return "cuda:0" if self.gpus else "cpu"

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs on the cluster; yield each with its result as it finishes.

        Args, Raises: as of `Engine.run`; further
            UsageError: ray is not installed, or no node has what a job takes.
            NetworkError: no cluster at the address.
        """
        raw_work = check_picklable(work)
        ray = _import()
        with self._connected(ray):
            remote = ray.remote(max_retries=0, num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy="SPREAD")(
                _answer
            )
            shared = ray.put(raw_work)
            coming, again = iter(jobs), deque[tuple[Job[A], int]]()
            running: dict[Any, tuple[Job[A], int]] = {}
            failure: Exception | None = None
            try:
                while True:
                    while failure is None and len(running) < self._room(ray):
                        job, earlier = again.popleft() if again else (next(coming, None), 0)
                        if job is None:
                            break
                        argument = check_picklable(job.argument)
                        running[remote.remote(shared, argument, self.device, self.cpus)] = (job, earlier + 1)
                    if not running:
                        break
                    ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
                    for reference in ready:
                        job, tries = running.pop(reference)
                        try:
                            raw, where = ray.get(reference)
                        except ray.exceptions.RayTaskError:
                            raise  # not the work's own error: the node couldn't even begin
                        except ray.exceptions.RayError as error:
                            how = type(error).__name__
                            self.say(f"{how} in job {job.name}, start {tries} of {self.tries}")
                            if tries < self.tries:
                                again.append((job, tries))
                            else:
                                failure = failure or lost(job, tries, how)
                            continue
                        done, value = opened(job, raw, where)
                        if done:
                            yield job, value
                        else:
                            failure = failure or value
                if failure is not None:
                    raise failure
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)

    def _room(self, ray: Any) -> int:
        """Count the jobs that the cluster can run at a time, as it is now.

        Raises:
            UsageError: none, not even an idle cluster.
        """
        there = ray.cluster_resources()
        room = int(there.get("CPU", 0) // self.cpus)
        if self.gpus:
            room = min(room, int(there.get("GPU", 0) // self.gpus))
        if not room:
            raise UsageError(
                f"Ray cluster {self.address!r}",
                expected=f"{self.cpus} CPU{f' and {self.gpus} GPU' if self.gpus else ''} for a job",
                found=", ".join(f"{n:g} {kind}" for kind, n in sorted(there.items()) if kind in ("CPU", "GPU"))
                or "neither CPU nor GPU",
            )
        return min(room, self.workers or room)

    @contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        """Hold a connection to the cluster while the block runs, unless this process has one."""
        if ray.is_initialized():
            yield
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address == "local":
            options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES, "num_cpus": self.workers}
        try:
            ray.init(self.address, **options)
        except (ConnectionError, ValueError) as error:
            raise NetworkError(
                f"Ray cluster {self.address!r}",
                expected="one that answers",
                found=str(error).split("\n")[0],
                do="Start one with `ray start --head`, or give `--ray local`",
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def _import() -> Any:
    """Import ray; return it.

    Raises:
        UsageError: it is not installed.
    """
    # Else a run by `uv run` has every worker build an environment of its own.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            "Ray",
            expected="the package ray",
            found=f"that it is not installed ({error})",
            do="Install the extra: `pip install 'checkpoints-zoo[ray]'`",
        ) from error
    return ray


def _answer(work: bytes, argument: bytes, device: str, threads: int) -> tuple[bytes, str]:
    """Do the work on a node; return the answer, and where it was."""
    return answer(work, argument, device, threads), f"on node {platform.node()}"
