"""Work for engines, found by name in other processes; nothing heavy is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import MemberNotFound, UsageError


def squared(x: int, device: str) -> tuple[int, int, str]:
    """Give the square, the process and the device."""
    return x * x, os.getpid(), device


def many_bytes(x: int, device: str) -> bytes:
    """Give so many bytes that Ray's object store holds them."""
    return bytes([x]) * 300_000


@dataclass(frozen=True)
class Killed:
    """Notes each start of a job in a file, and kills its own process at the first start of some jobs.

    Args:
        folder: of the notes.
        jobs: that are killed.
        always: whether they are killed at every start.
    """

    folder: Path
    jobs: tuple[int, ...]
    always: bool = False

    def __call__(self, x: int, device: str) -> int:
        notes = self.folder / f"{x}"
        first = not notes.exists()
        with notes.open("a") as file:
            file.write("started\n")
        if x in self.jobs and (first or self.always):
            os.kill(os.getpid(), signal.SIGKILL)
        return x


@dataclass(frozen=True)
class Together:
    """Waits until so many jobs run at the same time, each in a process of its own."""

    folder: Path
    count: int

    def __call__(self, x: int, device: str) -> tuple[int, str]:
        (self.folder / f"{os.getpid()}").touch()
        while len(list(self.folder.iterdir())) < self.count:
            time.sleep(0.005)
        return os.getpid(), device


def refused(x: int, device: str) -> int:
    """Raise an error of ours on 1; give others back."""
    if x == 1:
        raise MemberNotFound("member 1", expected="another", member=1)
    return x


@dataclass(frozen=True)
class Refused:
    """The same; those after it wait until it has begun, and then long enough for its error to be heard."""

    folder: Path

    def __call__(self, x: int, device: str) -> int:
        if x == 1:
            (self.folder / "begun").touch()
        while x > 1 and not (self.folder / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.2 if x > 1 else 0)  # all of them together: seconds
        return refused(x, device)


@dataclass(frozen=True)
class Unreadable:
    """Work or an argument that can be sent, but not be read where it comes; each that tries leaves a note."""

    folder: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return _unreadable, (self.folder,)

    def __call__(self, x: int, device: str) -> int:
        return x


def _unreadable(folder: Path) -> None:
    (folder / f"{os.getpid()}").touch()
    raise UsageError("a file", expected="the same one", found="another")


def silent(x: int, device: str) -> None:
    """Close the connection to the caller, and stay."""
    for each in gc.get_objects():
        if isinstance(each, Connection):
            each.close()
    time.sleep(600)


class Odd(Exception):
    """An error that can be pickled, but not read back."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def odd(x: int, device: str) -> int:
    raise Odd("what was", "wrong")


def big(x: int, device: str) -> bytes:
    """Give many bytes, more than a pipe holds."""
    return bytes([x]) * 20_000_000


@dataclass(frozen=True)
class Slow:
    """Says by a file that it has begun, and then takes long."""

    folder: Path

    def __call__(self, x: int, device: str) -> int:
        (self.folder / f"{os.getpid()}").touch()
        time.sleep(600)
        return x


@dataclass(frozen=True)
class Doomed:
    """Never ends on one node of a Ray cluster; on others, does some work once that one has begun a job.

    Args:
        node: its id.
        folder: where each start of a job is noted.
        work: what is done.
    """

    node: str
    folder: Path
    work: Any

    def __call__(self, x: Any, device: str) -> Any:
        import ray

        here = ray.get_runtime_context().get_node_id()
        (self.folder / f"{x}-{'doomed' if here == self.node else os.getpid()}").touch()
        while here == self.node or not list(self.folder.glob("*-doomed")):
            time.sleep(0.01)
        return self.work(x, device)


@dataclass(frozen=True)
class Threads:
    """Gives torch's threads, where torch comes with the work."""

    needed: Any

    def __call__(self, x: int, device: str) -> int:
        return int(sys.modules["torch"].get_num_threads())


def modules(x: int, device: str) -> list[str]:
    return sorted({"torch", "pandas", "ray"} & set(sys.modules))


def measured(x: object, device: str) -> int:
    """Give a length."""
    return len(getattr(x, "padding", x))  # type: ignore[arg-type]
