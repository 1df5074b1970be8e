"""Children that talk to the loopback Hub, killed a moment after one of their requests."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.hub import WRITER, Hub
from tests.hub.log import Exchange


def forks(*preloaded: str) -> Any:
    """Return what starts children, forked from a server that has imported torch and these modules and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "huggingface_hub.hf_api", *preloaded])
    return context


def run_child(
    context: Any, hub: Hub, target: Callable[..., None], args: tuple[str, ...], request: int | None, later: float
) -> int:
    """Run a child and kill it so many seconds after one of its requests, None for never; return its exit code."""
    reached = threading.Event()

    def count(exchange: Exchange) -> None:
        if len(hub.log) == request:
            reached.set()

    hub.log.clear()
    hub.on_request = count
    child = context.Process(target=target, args=args)
    child.start()
    while request and child.is_alive() and not reached.wait(0.01):
        pass
    child.join(later if request else None)
    if child.is_alive():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    hub.on_request = None
    assert child.exitcode in (0, -signal.SIGKILL)
    assert hub.log.leaks(WRITER) == []
    return int(child.exitcode)
