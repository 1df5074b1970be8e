"""Several processes of this machine, each with a share of its cores and a device of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from checkpoints_zoo.executor.jobs import TRIES, A, Job, R, Work, answer, check_picklable, lost, opened

GRACE_S = 5.0  # between asking a worker to end and killing it


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
        crew = _Crew(self, check_picklable(work))
        coming, again = iter(jobs), deque[tuple[Job[A], int]]()
        failure: Exception | None = None

        def hand_out() -> None:
            while failure is None and crew.has_room():
                job, earlier = again.popleft() if again else (next(coming, None), 0)
                if job is None:
                    return
                crew.give(job, earlier + 1)

        try:
            hand_out()
            while crew.busy:
                finished: list[tuple[Job[A], R]] = []
                for worker in crew.ready():
                    job, tries, raw = worker.receive()
                    if raw is None:
                        how = crew.bury(worker)
                        self.say(f"{worker.name} was ended by {how} in job {job.name}, start {tries} of {self.tries}")
                        if tries < self.tries:
                            again.append((job, tries))
                        else:
                            failure = failure or lost(job, tries, how)
                        continue
                    done, value = opened(job, raw, worker.name)
                    if done:
                        finished.append((job, value))
                    else:
                        failure = failure or value
                hand_out()  # before the caller works on what finished
                yield from finished
            if failure is not None:
                raise failure
        finally:
            crew.stop()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A process, the connection to it, and the job it is at."""

    def __init__(self, engine: Processes, slot: int, work: bytes) -> None:
        context: Any = multiprocessing.get_context(engine.start)
        self.slot, self.device = slot, engine.devices[slot % len(engine.devices)]
        self.connection, theirs = context.Pipe()
        threads = max(1, cores() // engine.workers)
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


def _serve(connection: Connection[Any, Any], work: bytes, device: str, threads: int) -> None:
    """Be a worker: answer jobs until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = min(threads, int(wanted)) if wanted.isdigit() and int(wanted) else threads
    os.environ["OMP_NUM_THREADS"] = str(threads)
    while True:
        try:
            connection.send_bytes(answer(work, connection.recv_bytes(), device, threads))
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    """Wait until the process that started this one is gone, however it ended; then end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
