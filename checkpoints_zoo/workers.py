"""Engines that run jobs in this process, in several processes, or on a Ray cluster, and yield each result when its job
ends.

The same jobs give the same results on every engine. Workers only compute; the caller writes the files.

The processes are not those of `concurrent.futures`: there, one dead worker breaks the pool, and the jobs of all other
workers are lost.

This is one file, because all engines take the same jobs, which processes and nodes get pickled alike.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from checkpoints_zoo.errors import NetworkError, UsageError, WorkerError

A = TypeVar("A")
R = TypeVar("R")
A_in = TypeVar("A_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)
LARGEST_TRY_COUNT = 3
SECONDS_BEFORE_KILL = 5.0  # Number of seconds after which a worker that was asked to end is killed.
OBJECT_STORE_BYTES = 2**29  # Size of the object store of a local Ray cluster; results pass through this store.
_READY_MESSAGE = b""  # First message of a worker, which says that it is ready.
_MAIN_GUARD_ADVICE = (
    'Put `if __name__ == "__main__":` around the calls of a script, or its classes and functions into a module'
)
_importing_main = False  # True in a worker while it imports the main script.
POLLING_SECONDS = 5.0  # Seconds between two queries of the cluster's free resources.


class Work(Protocol[A_in, R_out]):
    """The function that every job calls with its argument and the device to compute on."""

    def __call__(self, argument: A_in, device: str, /) -> R_out: ...


@dataclass(frozen=True)
class Job(Generic[A]):
    """One call of the work function: the job's name for error texts, and the argument of the call."""

    name: str
    argument: A


class Engine(Protocol):
    """Runs jobs.

    If a worker dies (killed, out of memory, a lost node), another worker starts the job again, a few times. If a job
    raises an error, no further job is started. The results of the running jobs are yielded; then the error is raised,
    with the job's name as a note. Closing the iterator stops the running jobs.
    """

    @property
    def device(self) -> str:
        """The device on which jobs compute; the first device if there are several."""

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run as many jobs at a time as there are workers; yield (job, result) when a job ends.

        Args:
            work: the function that every job calls; other processes get a pickled copy of it.
            jobs: the jobs to run; the next job is taken when a worker becomes free.

        Raises:
            WorkerError: the workers of one job died repeatedly.
            UsageError: the work function can't be sent to another process.
        """


def choose_engine(
    workers: int | None = None,
    devices: Sequence[str] = ("cpu",),
    ray: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Engine:
    """Choose an engine by the number of workers, the devices and Ray; return the engine. The engine starts its workers
    only when it runs jobs.

    Args:
        workers: number of jobs that run at a time; None for one job on each device, or with Ray as many jobs as the
            cluster can run.
        devices: devices that the workers get in turn; with Ray, "cuda" reserves one GPU for each job.
        ray: the Ray cluster: "auto" for the running cluster of this machine, "local" for a new cluster, or an address;
            None to run without Ray.
        say: function that is called with a line of text about each worker that died.

    Raises:
        UsageError: the list of devices is empty, or fewer than one worker is requested.

    >>> choose_engine(), choose_engine(workers=4)
    (InProcess(device='cpu'), Processes(workers=4, devices=('cpu',)))
    """
    if not devices:
        raise UsageError("devices", expected="one or more", found="none")
    if workers is not None and workers < 1:
        raise UsageError("workers", expected="a whole number from 1", found=str(workers))
    if ray is not None:
        return RayCluster(ray, workers, gpus=int(devices[0].startswith("cuda")), say=say)
    worker_count = len(devices) if workers is None else workers
    return InProcess(devices[0]) if worker_count == 1 else Processes(worker_count, tuple(devices), say=say)


@dataclass(frozen=True)
class InProcess:
    """Runs jobs in this process, one after the other.

    >>> [result for _, result in InProcess().run(lambda x, device: x * x, [Job("two", 2), Job("three", 3)])]
    [4, 9]
    """

    device: str = "cpu"

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs in their order; yield (job, result) of each.

        Args:
            work: the function that every job calls.
            jobs: the jobs to run; a job is taken from the iterable just before it starts.
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
    """Runs jobs in worker processes. The processes start as jobs arrive, take further jobs, and stop after the last
    job.

    Workers import the main script only if it defines the work function or the class of a job's argument. An imported
    main script needs `if __name__ == "__main__":` around its calls. Without this line, and for code from standard input
    or a notebook, the jobs run in this process, and there is a warning.

    Args:
        workers: number of worker processes that run at a time.
        devices: devices that the worker processes get in turn.
        tries: the largest number of times that a job is started if its workers die.
        start: method by which `multiprocessing` starts processes: "spawn", "forkserver" or "fork". "fork" is unsafe
            after torch has run, and forked processes hold the file locks of this process until they end.
        say: function that is called with a line of text about each worker that died.
    """

    workers: int
    devices: tuple[str, ...] = ("cpu",)
    tries: int = field(default=LARGEST_TRY_COUNT, repr=False)
    start: str = field(default="spawn", repr=False)
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    @property
    def device(self) -> str:
        return self.devices[0]

    def run(self, work: Work[A, R], jobs: Iterable[Job[A]]) -> Generator[tuple[Job[A], R], None, None]:
        """Run jobs in worker processes; yield (job, result) of each as it finishes.

        The arguments and errors are those of `Engine.run`.
        """
        if _importing_main:
            raise UsageError(
                "jobs in several processes", found="calls at the top of the main script", do=_MAIN_GUARD_ADVICE
            )
        pool, queue = _WorkerPool(self, pickle_for_worker(work)), _JobQueue(jobs, self.tries)
        try:
            yield from self._start_jobs(pool, queue, work)
            while pool.busy_workers:
                finished_jobs: list[tuple[Job[A], R]] = []
                for worker in pool.wait_for_answers():
                    pickled_answer = worker.receive()
                    if pickled_answer == _READY_MESSAGE:
                        worker.send_job(pool.pickled_work)
                        continue
                    job, worker.job = worker.job, None
                    if pickled_answer is None:
                        cause_of_death = pool.remove_dead(worker)
                        start_text = f"start {worker.start_count} of {self.tries}"
                        self.say(f"{worker.name} was ended by {cause_of_death} in job {job.name}, {start_text}")
                        queue.record_death(job, worker.start_count, cause_of_death, worker.started)
                    else:
                        finished_jobs += queue.read_answer(job, pickled_answer, worker.name)
                yield from chain(self._start_jobs(pool, queue, work), finished_jobs)
            queue.raise_failure()
        finally:
            pool.stop_all()

    def _start_jobs(self, pool: _WorkerPool, queue: _JobQueue[A], work: Work[A, R]) -> Iterator[tuple[Job[A], R]]:
        """Send jobs to free workers. Jobs that need an unsafe main script are run in this process: yield (job, result)
        of these jobs."""
        while pool.can_take_job() and (job_and_start_count := queue.next_job()):
            job, start_count = job_and_start_count
            pickled_argument = pickle_for_worker(job.argument)
            if not (pool.runs_in_this_process or (self.start != "fork" and _needs_unsafe_main(pickled_argument))):
                pool.assign(job, start_count, pickled_argument)
                continue
            found = "no file that workers could import" if _main_file() is None else "calls without this line"
            warning_text = f'main script: expected `if __name__ == "__main__":` around its calls; found {found}.'
            warnings.warn(
                f"{warning_text} Jobs that use its classes run one by one in this process. {_MAIN_GUARD_ADVICE}",
                stacklevel=3,
            )
            try:
                yield from InProcess(self.device).run(work, [job])
            except Exception as error:  # noqa: BLE001 (raised after the running jobs)
                queue.failure = queue.failure or error


class _JobQueue(Generic[A]):
    """Queue of jobs that are still to be started: new jobs, and jobs whose workers died. After the first failure of a
    job, no further job is started.

    Args:
        jobs: the jobs to run; a job is taken from the iterable just before it starts.
        largest_start_count: the largest number of times that a job is started if its workers die.
    """

    def __init__(self, jobs: Iterable[Job[A]], largest_start_count: int) -> None:
        self.new_jobs, self.repeated_jobs, self.largest_start_count = (
            iter(jobs),
            deque[tuple[Job[A], int]](),
            largest_start_count,
        )
        self.failure: Exception | None = None

    @property
    def accepts_jobs(self) -> bool:
        """Whether the queue may still start jobs."""
        return self.failure is None

    def next_job(self) -> tuple[Job[A], int] | None:
        """Return the next job, and the number of times that it has been started with this start; None if no job is to
        be started."""
        if not self.accepts_jobs:
            return None
        job, earlier_starts = self.repeated_jobs.popleft() if self.repeated_jobs else (next(self.new_jobs, None), 0)
        return None if job is None else (job, earlier_starts + 1)

    def record_death(self, job: Job[A], start_count: int, cause_of_death: str, worker_was_ready: bool = True) -> None:
        """Put the job of a dead worker back into the queue; after its last try, record the failure.

        Args:
            job: the job that the dead worker was running.
            start_count: number of times that the job was started so far.
            cause_of_death: phrase that says why the worker died.
            worker_was_ready: whether the worker had become ready for jobs; if a worker dies before, another one would
                die too, so the job is not tried again.
        """
        if not worker_was_ready and not cause_of_death.startswith("signal"):
            self.failure = self.failure or WorkerError(
                "a worker process",
                expected="one that starts",
                found=f"{cause_of_death} before its first job",
                do="It may have printed an error above. Use one worker to run the jobs in this process",
            )
        elif start_count < self.largest_start_count:
            self.repeated_jobs.append((job, start_count))
            return
        self.failure = self.failure or WorkerError(
            f"job {job.name}",
            expected="a result",
            found=f"{start_count} workers that died, the last one by {cause_of_death}",
            do="The usual cause is too little memory: use fewer workers. The workers may have printed more above",
        )

    def read_answer(self, job: Job[A], pickled_answer: bytes, worker_name: str) -> Iterator[tuple[Job[A], Any]]:
        """Read a worker's answer; yield (job, result), or record the job's error, which `raise_failure` raises.

        Args:
            job: the job to which the answer belongs.
            pickled_answer: the pickled answer, as `_run_job` returns it.
            worker_name: the worker's name, for the note of an error.
        """
        succeeded, result_or_error = pickle.loads(pickled_answer)  # noqa: S301 (from our own worker)
        if succeeded:
            yield job, result_or_error
            return
        error, traceback_text = result_or_error
        error.add_note(f"in job {job.name}, {worker_name}:\n{traceback_text}")
        self.failure = self.failure or error

    def raise_failure(self) -> None:
        """Raise the recorded failure of a job, if there is one."""
        if self.failure is not None:
            raise self.failure


class _WorkerPool:
    """The worker processes of one call of `Processes.run`."""

    def __init__(self, engine: Processes, pickled_work: bytes) -> None:
        self.engine, self.pickled_work = engine, pickled_work
        self.runs_in_this_process = engine.start != "fork" and _needs_unsafe_main(
            pickled_work
        )  # If true, all jobs run in this process.
        self.workers: list[_Worker] = []

    @property
    def busy_workers(self) -> list[_Worker]:
        return [w for w in self.workers if w.job is not None]

    def can_take_job(self) -> bool:
        return len(self.busy_workers) < self.engine.workers

    def assign(self, job: Job[Any], start_count: int, pickled_argument: bytes) -> None:
        """Give a job to an idle worker, or to a new worker.

        Args:
            job: the job to run.
            start_count: number of times that the job has been started, with this start.
            pickled_argument: the job's argument, pickled.
        """
        worker = next((w for w in self.workers if w.job is None), None)
        if worker is None:
            used_slots = {w.slot for w in self.workers}
            slot = next(s for s in range(self.engine.workers) if s not in used_slots)
            worker = _Worker(self.engine, slot)
            self.workers.append(worker)
        worker.job, worker.start_count, worker.pickled_argument = job, start_count, pickled_argument
        if worker.started:
            worker.send_job(self.pickled_work)

    def wait_for_answers(self) -> list[_Worker]:
        """Wait until a worker answers or dies; return the workers that answered or died."""
        worker_of_handle: dict[Any, _Worker] = {}
        for worker in self.busy_workers:
            worker_of_handle[worker.connection] = worker_of_handle[worker.process.sentinel] = worker
        return list(dict.fromkeys(worker_of_handle[x] for x in wait(list(worker_of_handle))))

    def remove_dead(self, worker: _Worker) -> str:
        """Remove a dead worker; return a phrase that says why it died."""
        worker.process.join(SECONDS_BEFORE_KILL)
        if worker.process.is_alive():  # The process still runs, but has closed its connection.
            worker.process.kill()
            worker.process.join()
        exit_code = worker.process.exitcode
        self.workers.remove(worker)
        worker.connection.close()
        return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"

    def stop_all(self) -> None:
        """Stop all workers: idle workers end by themselves; busy workers are terminated, and killed if they do not
        end."""
        for worker in self.workers:
            worker.connection.close()
            if worker.job is not None:
                worker.process.terminate()
        for worker in self.workers:
            if worker.job is None:  # An idle worker sees the closed connection and exits normally.
                worker.process.join(SECONDS_BEFORE_KILL)
                worker.process.terminate()
            worker.process.join(SECONDS_BEFORE_KILL)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self.workers.clear()


class _Worker:
    """A worker process, the connection to it, and its current job.

    The work function and the first job are sent only after the worker's first message. A process that dies at its start
    reads nothing, so sending more bytes than a pipe holds would block for ever.
    """

    def __init__(self, engine: Processes, slot: int) -> None:
        process_context: Any = multiprocessing.get_context(engine.start)
        starts_by_fork = engine.start == "fork"
        self.slot, self.device = slot, engine.devices[slot % len(engine.devices)]
        self.connection, worker_end = process_context.Pipe()
        thread_count = max(1, usable_cores() // engine.workers)
        self.process = process_context.Process(
            target=_serve_jobs,
            args=(worker_end, {} if starts_by_fork else _main_import_arguments(), self.device, thread_count),
            name=f"zoo-worker-{slot}",
            daemon=True,
        )
        with _block_interrupts(), nullcontext() if starts_by_fork else _hide_main():
            self.process.start()
        worker_end.close()  # Close this end, so that the connection ends when the worker ends.
        self.job: Any = None
        self.start_count, self.pickled_argument, self.started = 0, b"", False

    @property
    def name(self) -> str:
        return f"worker {self.slot} (process {self.process.pid})"

    def send_job(self, pickled_work: bytes) -> None:
        """Send a job to the worker; before the first job, send the work function."""
        with suppress(OSError):  # If the worker has died meanwhile, `receive` notices it.
            if not self.started:
                self.connection.send_bytes(pickled_work)
            self.connection.send_bytes(self.pickled_argument)
        self.started, self.pickled_argument = True, b""

    def receive(self) -> bytes | None:
        """Read the worker's next answer; return the answer, or None if the worker died."""
        with suppress(EOFError, OSError):
            return self.connection.recv_bytes() if self.connection.poll() else None
        return None


@contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block Ctrl-C while a process starts. The child process inherits the block, so that only the parent handles
    Ctrl-C, and then stops the child."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)


def _main_file() -> Path | None:
    """Return the path of the main script; None if there is no script: code from standard input, `-c`, a notebook or an
    interpreter."""
    file_name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file_name) if isinstance(file_name, str) and Path(file_name).is_file() else None


def _refers_to_main(pickled: bytes) -> bool:
    """Say whether a pickle refers to classes or functions of the main script."""
    return b"__main__" in pickled or b"__mp_main__" in pickled


def _needs_unsafe_main(pickled: bytes) -> bool:
    """Say whether a pickle refers to a main script that other processes can't import without running its calls."""
    if not _refers_to_main(pickled):
        return False
    main_file = _main_file()
    if main_file is None:
        return True
    try:
        statements = ast.parse(main_file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # The main program is not Python code, for example a frozen program.
        return True
    if_conditions = [ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If)]
    return not any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for condition_nodes in if_conditions
        for node in condition_nodes
    )


def _main_import_arguments() -> dict[str, Any]:
    """Return the arguments by which `multiprocessing.spawn.prepare` imports the main script in a worker."""
    if _main_file() is None:
        return {}
    preparation_data = spawn.get_preparation_data("zoo-worker")
    return {key: value for key, value in preparation_data.items() if key.startswith("init_main_from")}


@contextmanager
def _hide_main() -> Iterator[None]:
    """Hide the main script while a process starts, so that the process does not import it before its first job."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def _import_main(main_arguments: dict[str, Any]) -> None:
    """Import the main script in a worker.

    Raises:
        UsageError: the main script ends the process, or runs jobs, while it is imported.
    """
    global _importing_main
    _importing_main = True
    try:
        spawn.prepare(main_arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(
            "main script", expected="a script that workers can import", found=found, do=_MAIN_GUARD_ADVICE
        ) from error
    finally:
        _importing_main = False
    main_arguments.clear()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve_jobs(
    connection: Connection[Any, Any], main_arguments: dict[str, Any], device: str, thread_count: int
) -> None:
    """Run jobs in a worker process until the connection closes.

    Args:
        connection: connection to the parent process.
        main_arguments: arguments by which the main script is imported, if a pickle refers to it.
        device: name of the device to compute on.
        thread_count: number of threads that torch uses, unless OMP_NUM_THREADS is smaller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_when_parent_ends, daemon=True).start()
    requested_threads = os.environ.get("OMP_NUM_THREADS", "")
    thread_count = (
        min(thread_count, int(requested_threads))
        if requested_threads.isdigit() and int(requested_threads)
        else thread_count
    )
    os.environ["OMP_NUM_THREADS"] = str(thread_count)
    with suppress(EOFError, OSError):
        connection.send_bytes(_READY_MESSAGE)
        pickled_work = connection.recv_bytes()
        while True:
            connection.send_bytes(_run_job(pickled_work, connection.recv_bytes(), device, thread_count, main_arguments))


def _exit_when_parent_ends() -> None:
    """Wait until the parent process ends, for any reason; then end this process."""
    parent_process = multiprocessing.parent_process()
    if parent_process is not None:
        wait([parent_process.sentinel])
        os._exit(1)


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
        ray = _import_ray()
        with self._connect_to_cluster(ray):
            run_remotely = ray.remote(
                max_retries=0, num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy="SPREAD"
            )(_run_job_on_node)
            work_reference = ray.put(pickled_work)
            queue, running_jobs = _JobQueue(jobs, self.tries), dict[Any, tuple[Job[A], int]]()
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


def _import_ray() -> Any:
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
    return _run_job(pickled_work, pickled_argument, device, thread_count), f"on node {platform.node()}"


def pickle_for_worker(object_to_send: object) -> bytes:
    """Pickle an object for another process; return the bytes.

    Raises:
        UsageError: the object can't be pickled, for example because it contains a function defined inside another.
    """
    try:
        return pickle.dumps(object_to_send)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "work for several processes",
            expected="objects that can be pickled",
            found=str(error),
            do="Define functions and classes at the top of a module, or use one process",
        ) from error


def _run_job(
    pickled_work: bytes,
    pickled_argument: bytes,
    device: str,
    thread_count: int,
    main_arguments: dict[str, Any] | None = None,
) -> bytes:
    """Run a job in a worker; return the pickled result, or the pickled error.

    Args:
        pickled_work, pickled_argument: pickled work function and argument, from `pickle_for_worker`; unpickling may
            raise an error, as the work may.
        device: name of the device to compute on.
        thread_count: number of threads that torch uses.
        main_arguments: arguments by which the main script is imported, as in `_serve_jobs`.
    """
    try:
        if main_arguments and any(_refers_to_main(pickled) for pickled in (pickled_work, pickled_argument)):
            _import_main(main_arguments)
        work_function = _load_work(pickled_work)
        if "torch" in sys.modules:  # True only if the work function has imported torch.
            sys.modules["torch"].set_num_threads(thread_count)
        argument = pickle.loads(pickled_argument)  # noqa: S301 (as in `_load_work`)
        # Use the standard pickle module: torch's own pickling would share memory, which is lost when the worker ends.
        return pickle.dumps((True, work_function(argument, device)))
    except Exception as error:  # noqa: BLE001 (raised again in the caller)
        return _pickle_error(error)


@lru_cache(1)
def _load_work(pickled_work: bytes) -> Work[Any, Any]:
    """Unpickle the work function, once for all jobs of a worker; return it."""
    work_function: Work[Any, Any] = pickle.loads(pickled_work)  # noqa: S301 (from our own caller)
    return work_function


def _pickle_error(error: Exception) -> bytes:
    traceback_text = "".join(traceback.format_exception(error))
    error.__cause__ = error.__context__ = None
    try:
        pickled_error = pickle.dumps((False, (error, traceback_text)))
        pickle.loads(pickled_error)  # noqa: S301 (our own; some errors can be pickled, but not unpickled)
    except Exception:  # noqa: BLE001 (its class may raise anything when it is pickled)
        message = f"{type(error).__name__}: {error}"
        pickled_error = pickle.dumps(
            (False, (WorkerError("a worker", expected="a result", found=message), traceback_text))
        )
    return pickled_error
