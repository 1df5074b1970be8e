"""Small sources published on the loopback Hub."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from checkpoints_zoo.sources import fetching, ranges
from checkpoints_zoo.sources import hub as hub_room
from tests.hub import Hub
from tests.support.scenarios import Built, build

REPO = "alice/zoo"
ADDRESS = f"hf://datasets/{REPO}"
SHARDS = "/shards/"


@cache
def _built() -> Built:
    folder = tempfile.mkdtemp(prefix="zoo-source-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(Path(folder), members=range(20), per_shard=10)


def retry_at_once(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """Let the package's own retries follow at once; the seconds they would have waited are added to `waits`."""

    class Clock:
        sleep = staticmethod(waits.append)

    for module in (ranges, hub_room):
        monkeypatch.setattr(module, "time", Clock)


def published(hub: Hub, lfs: bool = True) -> Built:
    """Commit a source of twenty small members in two shards; return what was committed, not to be changed."""
    fetching._remote_files.clear()  # a Hub of another test gave those links
    built = _built()
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()}, lfs=lfs)
    return built
