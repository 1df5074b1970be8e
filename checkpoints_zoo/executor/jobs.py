"""What all engines share: jobs, what is done for each, and the answer that comes back from a worker."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from checkpoints_zoo.errors import UsageError, WorkerError

A = TypeVar("A")
R = TypeVar("R")
A_in = TypeVar("A_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)

TRIES = 3


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


@dataclass(frozen=True)
class Here:
    """This process, one job after the other.

    >>> [result for _, result in Here().run(lambda x, device: x * x, [Job("two", 2), Job("three", 3)])]
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


def answer(work: bytes, argument: bytes, device: str, threads: int) -> bytes:
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


def opened(job: Job[A], raw: bytes, where: str) -> tuple[bool, Any]:
    """Read an answer; return whether it is a result, and that or the error with the job's name.

    Args:
        job: that it is of.
        raw: what `answer` gave.
        where: the worker, in words.
    """
    done, value = pickle.loads(raw)  # noqa: S301 (from a worker of ours)
    if done:
        return True, value
    error, text = value
    error.add_note(f"in job {job.name}, {where}:\n{text}")
    return False, error


def lost(job: Job[Any], tries: int, how: str) -> WorkerError:
    """Return the error for a job whose worker died again and again."""
    return WorkerError(
        f"job {job.name}",
        expected="a result",
        found=f"that its worker died {tries} times, the last time by {how}",
        do="Too little memory is the usual cause: use fewer workers. Workers may have said more above",
    )
