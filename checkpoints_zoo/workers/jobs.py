"""Jobs on their way to workers: the queue of jobs, and their pickles, which a worker runs."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Generic, TypeVar

from checkpoints_zoo.errors import UsageError, WorkerError
from checkpoints_zoo.workers.engine import Job, Work
from checkpoints_zoo.workers.main_script import import_main, refers_to_main

A = TypeVar("A")
R = TypeVar("R")
LARGEST_TRY_COUNT = 3


class JobQueue(Generic[A]):
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
            pickled_answer: the pickled answer, as `run_job` returns it.
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


def run_job(
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
        if main_arguments and any(refers_to_main(pickled) for pickled in (pickled_work, pickled_argument)):
            import_main(main_arguments)
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
