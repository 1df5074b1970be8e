"""Pacing of requests: no more in five minutes than the Hub allows, over all processes that share our cache.

The times of the last requests stand in a file of the cache, so that a process that is killed and started again, or two
processes at once, stay inside the Hub's window too.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints_zoo.formats import disk
from checkpoints_zoo.sources import hub_addresses, hub_cache, hub_token

WINDOW_SECONDS = 300.0
# Kind of requests -> how many the Hub answers in a window, without and with a login (its documentation, August 2026).
REQUESTS_IN_WINDOW = {"api": (500, 1000), "resolvers": (3000, 5000)}
USED_SHARE = 0.9  # Share of the window that we use: other programs of the user ask the Hub too.


def requests_in_window(kind: str) -> int:
    """Return how many requests of a kind ("api" or "resolvers") we make in a window."""
    return int(USED_SHARE * REQUESTS_IN_WINDOW[kind][hub_token.has_token()])


def expected_seconds(request_count: int, kind: str) -> float:
    """Return how long requests of a kind have to wait for the Hub's windows, if no others were made before."""
    return WINDOW_SECONDS * ((request_count - 1) // requests_in_window(kind)) if request_count else 0.0


@dataclass
class Pace:
    """The pace of one kind of requests.

    Args:
        kind: "api" (listings) or "resolvers" (files).
        clock, sleep: functions that return the time in seconds, and wait for some seconds.
    """

    kind: str
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], object] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def _path(self) -> Path:
        return hub_cache.cache_root() / "requests" / f"{hub_addresses.host().replace(':', '-')}-{self.kind}"

    def wait(self) -> None:
        """Wait until the window has room for one more request, and count it."""
        limit = requests_in_window(self.kind)
        with self._lock, suppress(OSError), disk.hold_lock(self._path.with_suffix(".lock")):
            content = self._path.read_bytes()[-8 * limit :] if self._path.is_file() else b""
            times = list(struct.unpack(f"<{len(content) // 8}d", content[: len(content) // 8 * 8]))
            if len(times) == limit:
                # A clock that was set back may leave times of the future: nobody waits longer than a window.
                self.sleep(max(0.0, min(times[0] + WINDOW_SECONDS - self.clock(), WINDOW_SECONDS)))
            times = [*times[-(limit - 1) :], self.clock()]
            with disk.replace_file(self._path, "wb") as file:
                file.write(struct.pack(f"<{len(times)}d", *times))
