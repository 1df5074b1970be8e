"""A publication killed at any moment: main is whole at every commit, and run again it goes on to the same end."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.hub import WRITER, Hub
from tests.support.kills import forks, run_child
from tests.support.publications import NEW, PICTURE, complete, consistent, two_shards

KILLS = 25


def publish_all(folder: str, home: str) -> None:
    """What each child does: publish a folder, a commit a shard."""
    from huggingface_hub import constants

    import checkpoints_zoo as zoo
    from checkpoints_zoo.publishing import cards, publisher

    # The server that children are forked from may have been started by another test.
    os.environ["HF_TOKEN"] = WRITER
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_CACHE = False, True, home
    cards.picture = lambda *_: PICTURE  # type: ignore[assignment]
    publisher.COMMIT_FILES = 1
    zoo.publish(folder, NEW, sample=0, tag="v1.0")


@pytest.mark.slow
def test_killed_at_random_moments(hub: Hub, tmp_path: Path) -> None:
    context = forks("checkpoints_zoo.publishing.publisher", __name__)
    built, home = two_shards(tmp_path / "out"), str(tmp_path / "home")

    def run(request: int | None = None, later: float = 0) -> int:
        return run_child(context, hub, publish_all, (str(built.root), home), request, later)

    def check_done() -> None:
        assert complete(hub, built), moments
        assert hub.repo(NEW).refs["refs/tags/v1.0"] == hub.repo(NEW).at("main").id, moments
        assert consistent(hub) == 4, moments  # the first one, one a shard, and the last: none twice

    moments: list[tuple[int, float]] = []
    assert run() == 0
    requests = len(hub.log)
    hub.wipe()
    rng = random.Random()  # a new seed each time: any moment must do
    killed = 0
    while killed < KILLS:
        moments.append((rng.randint(1, requests), rng.choice([0, rng.uniform(0, 0.02)])))
        if run(*moments[-1]) == 0:  # through before the kill: start over
            check_done()
            hub.wipe()
        else:
            killed += 1
            if ("datasets", NEW) in hub.repos:
                with hub.lock:
                    consistent(hub)
    assert run() == 0
    check_done()
