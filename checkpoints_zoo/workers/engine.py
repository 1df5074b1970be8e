"""Engines run jobs and yield each result when its job ends; the simplest one runs them in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

A = TypeVar("A")
R = TypeVar("R")
A_in = TypeVar("A_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)


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
