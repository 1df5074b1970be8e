"""An engine that runs jobs in worker processes on this machine.

The processes are not those of `concurrent.futures`: there, one dead worker breaks the pool, and the jobs of all other
workers are lost.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.workers.engine import InProcess, Job, Work
from checkpoints_zoo.workers.jobs import LARGEST_TRY_COUNT, JobQueue, pickle_for_worker, run_job
from checkpoints_zoo.workers.main_script import (
    MAIN_GUARD_ADVICE,
    hide_main,
    is_importing_main,
    main_file,
    main_import_arguments,
    needs_unguarded_main,
)

A = TypeVar("A")
R = TypeVar("R")
SECONDS_BEFORE_KILL = 5.0  # Number of seconds after which a worker that was asked to end is killed.
_READY_MESSAGE = b""  # First message of a worker, which says that it is ready.
_END_MESSAGE = b""  # Last message to an idle worker. A forked one would not see that its connection is closed.


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
        if is_importing_main():
            raise UsageError(
                "jobs in several processes", found="calls at the top of the main script", do=MAIN_GUARD_ADVICE
            )
        pool, queue = _WorkerPool(self, pickle_for_worker(work)), JobQueue(jobs, self.tries)
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

    def _start_jobs(self, pool: _WorkerPool, queue: JobQueue[A], work: Work[A, R]) -> Iterator[tuple[Job[A], R]]:
        """Send jobs to free workers. Jobs that need an unguarded main script run in this process: yield (job, result)
        of these jobs."""
        while pool.can_take_job() and (job_and_start_count := queue.next_job()):
            job, start_count = job_and_start_count
            pickled_argument = pickle_for_worker(job.argument)
            if not (pool.runs_in_this_process or (self.start != "fork" and needs_unguarded_main(pickled_argument))):
                pool.assign(job, start_count, pickled_argument)
                continue
            found = "no file that workers could import" if main_file() is None else "calls without this line"
            warning_text = f'main script: expected `if __name__ == "__main__":` around its calls; found {found}.'
            warnings.warn(
                f"{warning_text} Jobs that use its classes run one by one in this process. {MAIN_GUARD_ADVICE}",
                stacklevel=3,
            )
            try:
                yield from InProcess(self.device).run(work, [job])
            except Exception as error:  # noqa: BLE001 (raised after the running jobs)
                queue.failure = queue.failure or error


class _WorkerPool:
    """The worker processes of one call of `Processes.run`."""

    def __init__(self, engine: Processes, pickled_work: bytes) -> None:
        self.engine, self.pickled_work = engine, pickled_work
        self.runs_in_this_process = engine.start != "fork" and needs_unguarded_main(
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
        """Stop all workers: idle workers are told to end; busy workers are terminated, and killed if they do not
        end."""
        for worker in self.workers:
            if worker.job is None:
                with suppress(OSError):  # The worker is dead already.
                    worker.connection.send_bytes(_END_MESSAGE)
            else:
                worker.process.terminate()
            worker.connection.close()
        for worker in self.workers:
            if worker.job is None:
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
            args=(worker_end, {} if starts_by_fork else main_import_arguments(), self.device, thread_count),
            name=f"zoo-worker-{slot}",
            daemon=True,
        )
        with _block_interrupts(), nullcontext() if starts_by_fork else hide_main():
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


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve_jobs(
    connection: Connection[Any, Any], main_arguments: dict[str, Any], device: str, thread_count: int
) -> None:
    """Run jobs in a worker process until the parent process says to end, or the connection closes.

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
        while (pickled_argument := connection.recv_bytes()) != _END_MESSAGE:
            connection.send_bytes(run_job(pickled_work, pickled_argument, device, thread_count, main_arguments))


def _exit_when_parent_ends() -> None:
    """Wait until the parent process ends, for any reason; then end this process."""
    parent_process = multiprocessing.parent_process()
    if parent_process is not None:
        wait([parent_process.sentinel])
        os._exit(1)
