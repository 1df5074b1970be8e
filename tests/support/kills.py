"""Operations killed at moments that a seed gives, and the one contract that all of them keep.

An operation runs in a child, and has steps: the files that it opens to write, renames and removes and the folders that
it makes, or the requests that it sends to the loopback Hub. It is killed at a step or some milliseconds after it. So a
seed gives the same moments on every machine, fast or slow.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

import pytest

from checkpoints_zoo.workers import Processes, engine_choice
from tests.hub import WRITER, Hub
from tests.hub.log import Exchange

# What children import, which would take most of their time, and the modules of the functions that are killed.
PRELOADED = [
    "torch",
    "torch._dynamo",  # torch.vmap imports it on first use
    "sklearn.datasets",
    "checkpoints_zoo.training.merge",
    "tests.sources.test_copying",
    "tests.sources.test_download_kill",
    "tests.interop.test_ingest_resume",
    "tests.training.test_kill",
    "tests.predictions.test_storing",
    "tests.publishing.test_publish_kill",
    "pandas",  # pyarrow imports it on first use
]
ROOT = Path(__file__).parents[2]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
STEPS = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


@cache
def forks() -> Any:
    """Return what starts children, forked from a server that has imported all they need and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # of another test: it has imported less
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))  # where it finds the tests
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers that `workers=2` asks for from the server of `forks`; started anew, each imports for seconds."""
    forks()
    monkeypatch.setattr(engine_choice, "Processes", partial(Processes, start="forkserver"))


@dataclass(frozen=True)
class Moment:
    """A step, from 1, and for how many seconds it goes on from there."""

    step: int
    later: float = 0.0


class Operation(Protocol):
    """What can be killed. `steps` is of the last run."""

    steps: int

    def run(self, moment: Moment | None = None) -> bool:
        """Run it, killed at a moment or never; say whether it came to its end."""


def ended(child: Any) -> bool:
    """Wait for a child; say whether it came to its end, and fail where it neither did nor was killed."""
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL, -signal.SIGALRM), child.exitcode
    return bool(child.exitcode == 0)


@dataclass
class OnFiles:
    """An operation whose steps are those on files, of its own process and not of its workers.

    Args:
        context: starts children.
        target, args: what a child does.
    """

    context: Any
    target: Callable[..., None]
    args: tuple[Any, ...]
    steps: int = 0

    def run(self, moment: Moment | None = None) -> bool:
        """Run it; see `Operation`."""
        steps, (ours, theirs) = self.context.RawValue("i", 0), self.context.Pipe(duplex=False)
        child = self.context.Process(target=_counted, args=(self.target, self.args, moment, steps, theirs))
        child.start()
        theirs.close()
        through = ended(child)
        ours.poll(None)  # until the last of its workers has ended too: forked, they hold its locks
        ours.close()
        self.steps = steps.value
        return through


def _counted(target: Callable[..., None], args: tuple[Any, ...], moment: Moment | None, steps: Any, held: Any) -> None:
    """What a child does, and counts in `steps`; `held` is open until it and its workers have ended."""
    own = os.getpid()

    def count(event: str, found: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(found[2], int) and found[2] & WRITING
        if not (opened or event in STEPS) or os.getpid() != own:
            return
        steps.value += 1
        if moment is not None and steps.value == moment.step:
            if not moment.later:
                os.kill(own, signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, moment.later)  # SIGALRM ends the process as SIGKILL does

    sys.dont_write_bytecode = True  # only the first child would
    sys.addaudithook(count)
    target(*args)


@dataclass
class OnTheHub:
    """An operation whose steps are the requests that the loopback Hub sees.

    Args:
        context: starts children.
        hub: the Hub; its log has the requests of the last run.
        target, args: what a child does.
    """

    context: Any
    hub: Hub
    target: Callable[..., None]
    args: tuple[Any, ...]
    steps: int = 0

    def run(self, moment: Moment | None = None) -> bool:
        """Run it; see `Operation`."""
        reached = threading.Event()

        def count(exchange: Exchange) -> None:
            if moment is not None and len(self.hub.log) == moment.step:
                reached.set()

        self.hub.log.clear()
        self.hub.on_request = count
        child = self.context.Process(target=self.target, args=self.args)
        child.start()
        while moment is not None and child.is_alive() and not reached.wait(0.01):
            pass
        if moment is not None:
            child.join(moment.later)
            child.kill()  # nothing, where it is through
        through = ended(child)
        self.hub.on_request = None
        assert self.hub.log.leaks(WRITER) == []
        self.steps = len(self.hub.log)
        return through


@dataclass
class Contract:
    """Killed at any moment, an operation leaves what can be used; run again, it ends as if it had never been killed.

    Args:
        operation: the operation.
        done: checks all of what it left, once it came to its end.
        usable: checks what it left when it was killed.
        reset: takes what it left away.
        kills: the moments so far since the start; an error notes them.
    """

    operation: Operation
    done: Callable[[], None]
    usable: Callable[[], None]
    reset: Callable[[], None]
    kills: list[Moment] = field(default_factory=list)

    def at_random(self, kills: int, seed: int = 0) -> None:
        """Check it at moments of a seed, one kill upon another or each followed by a whole run, by chance.

        The steps are cut into as many parts as there are kills, and one kill falls into each part.
        """
        steps, rng = self._whole(), random.Random(seed)
        parts = rng.sample(range(kills), kills)
        killed = 0
        while killed < kills:
            step = 1 + int((parts[killed] + rng.random()) / kills * steps)
            moment = Moment(step, rng.choice([0, rng.uniform(0, 0.02)]))
            killed += self._killed(moment, go_on=rng.random() < 0.3)
        self._to_the_end()

    def at_each_step(self) -> None:
        """Check it at each of its steps, each kill followed by a whole run."""
        self._whole()
        step = 1
        while self._killed(Moment(step), go_on=True):
            step += 1

    def _whole(self) -> int:
        assert self.operation.run()
        self.done()
        steps = self.operation.steps
        self.reset()
        return steps

    def _killed(self, moment: Moment, *, go_on: bool) -> bool:
        self.kills.append(moment)
        try:
            through = self.operation.run(moment)
            if through:  # before the kill
                self.done()
            else:
                self.usable()
        except BaseException as error:
            error.add_note(f"killed at {self.kills}")
            raise
        if go_on and not through:
            self._to_the_end()
        if go_on or through:
            self.kills.clear()
            self.reset()
        return not through

    def _to_the_end(self) -> None:
        try:
            assert self.operation.run()
            self.done()
        except BaseException as error:
            error.add_note(f"killed at {self.kills}")
            raise
