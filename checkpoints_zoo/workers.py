"""Many jobs over this process, several processes, or a Ray cluster: results as they finish, to one caller.

The same work gives the same results on every engine. The caller is the one who writes; workers only compute.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar

from checkpoints_zoo.errors import NetworkError, UsageError, WorkerError

A = TypeVar("A")
R = TypeVar("R")
A_in = TypeVar("A_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)
TRIES = 3
GRACE_S = 5.0  # between asking a worker to end and killing it
STORE_BYTES = 2**29  # of the object store of a cluster that is started here: results pass through it
POLL_S = 5.0  # after which the cluster is asked anew how much room it has


class Work(Protocol[A_in, R_out]):
    """What is done for every job: a function of its argument and of the device to compute on."""

    def __call__(self, argument: A_in, device: str, /) -> R_out: ...


@dataclass(frozen=True)
class Job(Generic[A]):
    """One call of the work: what to call it in errors, and its argument."""

    name: str
    argument: A


class Engine(Protocol):
    """Runs jobs.

    A job whose worker died (killed, out of memory, a node lost) is started again elsewhere, a few times. A job that
    raised is not: no further job is started then, those that run are waited for and handed over, and the error reaches
    the caller with the job's name as a note. Closing the iterator stops what runs.
    """

    @property
    def device(self) -> str:
        """What jobs compute on; of several devices the first."""

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs, no more at a time than there are workers; yield each with its result as it finishes.

        Args:
            work: what is done for each; workers elsewhere get a copy of it.
            jobs: taken one by one as workers become free.

        Raises:
            WorkerError: a job whose worker died again and again.
            UsageError: work that can't be sent to another process.
        """


def choose_engine(
    workers: int | None = None,
    devices: Sequence[str] = ("cpu",),
    ray: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Engine:
    """Choose an engine; return it, with nothing started yet.

    Args:
        workers: jobs at a time; None for one a device, or with Ray as many as the cluster has room for.
        devices: what workers compute on, in turn; with Ray "cuda" asks for one GPU a job.
        ray: "auto" for the cluster that this machine belongs to, "local" for one of this machine alone, or an address;
            None for no Ray.
        say: told of workers that died, a line each.

    Raises:
        UsageError: no devices, or fewer than one worker.

    >>> choose_engine(), choose_engine(workers=4)
    (InProcess(device='cpu'), Processes(workers=4, devices=('cpu',)))
    """
    if not devices:
        raise UsageError("devices", expected="one or more", found="none")
    if workers is not None and workers < 1:
        raise UsageError("workers", expected="a whole number from 1", found=str(workers))
    if ray is not None:
        return RayCluster(ray, workers, gpus=int(devices[0].startswith("cuda")), say=say)
    wanted = len(devices) if workers is None else workers
    return InProcess(devices[0]) if wanted == 1 else Processes(wanted, tuple(devices), say=say)


@dataclass(frozen=True)
class InProcess:
    """This process, one job after the other.

    >>> [result for _, result in InProcess().run(lambda x, device: x * x, [Job("two", 2), Job("three", 3)])]
    [4, 9]
    """

    device: str = "cpu"

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs in their order; yield each with its result.

        Args:
            work: what is done for each.
            jobs: taken one by one.
        """
        for job in jobs:
            try:
                result = work(job.argument, self.device)
            except Exception as error:
                error.add_note(f"in job {job.name}")
                raise
            yield job, result


@dataclass(frozen=True)
class Processes:
    """Worker processes: they are started as jobs come, kept for further ones, and stopped at the end.

    A script that uses it needs `if __name__ == "__main__":` around its own calls, as all of Python's processes do.

    Args:
        workers: processes at a time.
        devices: what they compute on: process i on device i, in turn.
        tries: how often a job is started whose workers die.
        start: "spawn", "forkserver" or "fork", as in multiprocessing; after torch has run, "fork" is unsafe, and what
            is forked holds this process's locks on files until it ends itself.
        say: told of each worker that died.
    """

    workers: int
    devices: tuple[str, ...] = ("cpu",)
    tries: int = field(default=TRIES, repr=False)
    start: str = field(default="spawn", repr=False)
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    @property
    def device(self) -> str:
        return self.devices[0]

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs in worker processes; yield each with its result as it finishes.

        Args, Raises: as of `Engine.run`.
        """
        crew, queue = _Crew(self, check_picklable(work)), _Queue(jobs, self.tries)

        def hand_out() -> None:
            while crew.has_room() and (start := queue.next()):
                crew.give(*start)

        try:
            hand_out()
            while crew.busy:
                finished: list[tuple[Job[A], R]] = []
                for worker in crew.ready():
                    job, tries, raw = worker.receive()
                    if raw is None:
                        how = crew.bury(worker)
                        self.say(f"{worker.name} was ended by {how} in job {job.name}, start {tries} of {self.tries}")
                        queue.died(job, tries, how)
                    else:
                        finished += queue.answered(job, raw, worker.name)
                hand_out()  # before the caller works on what finished
                yield from finished
            queue.check()
        finally:
            crew.stop()


class _Queue(Generic[A]):
    """Jobs that are still to be started in workers: again after their workers died, or anew; none after a failure.

    Args:
        jobs: taken one by one.
        tries: how often a job is started whose workers die.
    """

    def __init__(self, jobs: Iterable[Job[A]], tries: int) -> None:
        self.coming, self.again, self.tries = iter(jobs), deque[tuple[Job[A], int]](), tries
        self.failure: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether further jobs are started."""
        return self.failure is None

    def next(self) -> tuple[Job[A], int] | None:
        """Return a job and which start of it this is; None where none is to be started."""
        if not self.open:
            return None
        job, earlier = self.again.popleft() if self.again else (next(self.coming, None), 0)
        return None if job is None else (job, earlier + 1)

    def died(self, job: Job[A], tries: int, how: str) -> None:
        """Note that the worker of a job died: the job is started again, or is the failure."""
        if tries < self.tries:
            self.again.append((job, tries))
            return
        self.failure = self.failure or WorkerError(
            f"job {job.name}",
            expected="a result",
            found=f"that its worker died {tries} times, the last time by {how}",
            do="Too little memory is the usual cause: use fewer workers. Workers may have said more above",
        )

    def answered(self, job: Job[A], raw: bytes, where: str) -> Iterator[tuple[Job[A], Any]]:
        """Read an answer; yield the job with its result, or note its error as the failure.

        Args:
            job: that the answer is of.
            raw: what `_answer` gave.
            where: the worker, in words.
        """
        done, value = pickle.loads(raw)  # noqa: S301 (from a worker of ours)
        if done:
            yield job, value
            return
        error, text = value
        error.add_note(f"in job {job.name}, {where}:\n{text}")
        self.failure = self.failure or error

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure


class _Crew:
    """The workers of a run."""

    def __init__(self, engine: Processes, work: bytes) -> None:
        self.engine, self.work = engine, work
        self.workers: list[_Worker] = []

    @property
    def busy(self) -> list[_Worker]:
        return [w for w in self.workers if w.job is not None]

    def has_room(self) -> bool:
        return len(self.busy) < self.engine.workers

    def give(self, job: Job[Any], tries: int) -> None:
        """Give a job to an idle worker, or to a new one."""
        worker = next((w for w in self.workers if w.job is None), None)
        if worker is None:
            taken = {w.slot for w in self.workers}
            slot = next(s for s in range(self.engine.workers) if s not in taken)
            worker = _Worker(self.engine, slot, self.work)
            self.workers.append(worker)
        worker.give(job, tries)

    def ready(self) -> list[_Worker]:
        """Wait until a worker has answered or died; return those that have."""
        waited: dict[Any, _Worker] = {}
        for worker in self.busy:
            waited[worker.connection] = waited[worker.process.sentinel] = worker
        return list(dict.fromkeys(waited[x] for x in wait(list(waited))))

    def bury(self, worker: _Worker) -> str:
        """Let go of a worker that died; return how it did."""
        worker.process.join(GRACE_S)
        if worker.process.is_alive():  # its connection alone has ended
            worker.process.kill()
            worker.process.join()
        code = worker.process.exitcode
        self.workers.remove(worker)
        worker.connection.close()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Stop all workers: idle ones end, others are asked to, and killed where they don't."""
        for worker in self.workers:
            worker.connection.close()
            if worker.job is not None:
                worker.process.terminate()
        for worker in self.workers:
            if worker.job is None:  # it sees that, and ends by itself, as what it has imported may want it to
                worker.process.join(GRACE_S)
                worker.process.terminate()
            worker.process.join(GRACE_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self.workers.clear()


class _Worker:
    """A process, the connection to it, and the job it is at."""

    def __init__(self, engine: Processes, slot: int, work: bytes) -> None:
        context: Any = multiprocessing.get_context(engine.start)
        self.slot, self.device = slot, engine.devices[slot % len(engine.devices)]
        self.connection, theirs = context.Pipe()
        threads = max(1, usable_cores() // engine.workers)
        self.process = context.Process(
            target=_serve, args=(theirs, work, self.device, threads), name=f"zoo-worker-{slot}", daemon=True
        )
        with _interrupts_held():
            self.process.start()
        theirs.close()  # so that its end is seen here
        self.job: Job[Any] | None = None
        self.tries = 0

    @property
    def name(self) -> str:
        return f"worker {self.slot} (process {self.process.pid})"

    def give(self, job: Job[Any], tries: int) -> None:
        raw = check_picklable(job.argument)
        self.job, self.tries = job, tries
        with suppress(OSError):  # it has died meanwhile, which `receive` finds
            self.connection.send_bytes(raw)

    def receive(self) -> tuple[Job[Any], int, bytes | None]:
        """Read the answer; return the job, which start of it this was, and the answer, None where the worker died."""
        if self.job is None:
            raise RuntimeError(f"{self.name} is at no job")
        job, self.job, raw = self.job, None, None
        with suppress(EOFError, OSError):
            raw = self.connection.recv_bytes() if self.connection.poll() else None
        return job, self.tries, raw


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while a process is started: a child that inherits that never sees it, the parent stops it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(connection: Connection[Any, Any], work: bytes, device: str, threads: int) -> None:
    """Be a worker: answer jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(threads, int(wanted)) if wanted.isdigit() and int(wanted) else threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    while True:
        try:
            connection.send_bytes(_answer(work, connection.recv_bytes(), device, threads))
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    """Wait until the process that started this one is gone, however it ended; then end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


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
                _answer_on_node
            )
            shared = ray.put(raw_work)
            queue, running = _Queue(jobs, self.tries), dict[Any, tuple[Job[A], int]]()
            try:
                while True:
                    while queue.open and len(running) < self._room(ray) and (start := queue.next()):
                        argument = check_picklable(start[0].argument)
                        running[remote.remote(shared, argument, self.device, self.cpus)] = start
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
                            queue.died(job, tries, how)
                        else:
                            yield from queue.answered(job, raw, where)
                queue.check()
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


def _answer_on_node(work: bytes, argument: bytes, device: str, threads: int) -> tuple[bytes, str]:
    """Do the work on a node; return the answer, and where it was."""
    return _answer(work, argument, device, threads), f"on node {platform.node()}"


def check_picklable(work: object) -> bytes:
    """Pickle what goes to other processes; return the bytes.

    Raises:
        UsageError: it holds something that can't be sent, such as a function defined inside another.
    """
    try:
        return pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "work for several processes",
            expected="what can be pickled",
            found=str(error),
            do="Define functions and classes at the top of a module, or use one process",
        ) from error


def _answer(work: bytes, argument: bytes, device: str, threads: int) -> bytes:
    """Do the work in a worker; return its result or its error, pickled by value.

    Args:
        work, argument: as `check_picklable` gave them; reading them may raise, as the work itself.
        device: to compute on.
        threads: torch's.
    """
    try:
        do = _loaded(work)
        if "torch" in sys.modules:  # the work may have brought it
            sys.modules["torch"].set_num_threads(threads)
        given = pickle.loads(argument)  # noqa: S301 (as in `_loaded`)
        # Plain pickle: torch's own way for processes shares memory, which goes with the worker that made it.
        return pickle.dumps((True, do(given, device)))
    except Exception as error:  # noqa: BLE001 (it is raised again in the caller)
        return _failure(error)


@lru_cache(1)
def _loaded(work: bytes) -> Work[Any, Any]:
    """Read pickled work, once for all jobs of a worker; return it."""
    loaded: Work[Any, Any] = pickle.loads(work)  # noqa: S301 (from the process that asked for it)
    return loaded


def _failure(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    error.__cause__ = error.__context__ = None
    try:
        raw = pickle.dumps((False, (error, text)))
        pickle.loads(raw)  # noqa: S301 (our own: some errors can be pickled and not be read back)
    except Exception:  # noqa: BLE001 (whatever its class does when it is copied)
        said = f"{type(error).__name__}: {error}"
        raw = pickle.dumps((False, (WorkerError("a worker", expected="a result", found=said), text)))
    return raw
