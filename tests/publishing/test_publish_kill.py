"""A publication killed at any moment: main is whole at every commit, and run again it goes on to the same end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.hub import WRITER, Hub
from tests.support.kills import Contract, OnTheHub, forks
from tests.support.publications import NEW, PICTURE, complete, consistent, two_shards

KILLS = 12


def publish_all(folder: str, home: str) -> None:
    """What each child does: publish a folder, a commit a shard."""
    from huggingface_hub import constants

    import checkpoints_zoo as zoo
    from checkpoints_zoo.publishing import card_pictures, publisher

    # The server that children are forked from may have been started by another test.
    os.environ["HF_TOKEN"] = WRITER
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_CACHE = False, True, home
    card_pictures.picture = lambda *_: PICTURE  # type: ignore[assignment]
    publisher.LARGEST_COMMIT_FILE_COUNT = 1
    zoo.publish(folder, NEW, sample=0, tag="v1.0")


@pytest.mark.slow
def test_killed_at_random_moments(hub: Hub, tmp_path: Path) -> None:
    context = forks()
    built, home = two_shards(tmp_path / "out"), str(tmp_path / "home")

    def done() -> None:
        assert complete(hub, built)
        assert hub.repo(NEW).refs["refs/tags/v1.0"] == hub.repo(NEW).at("main").id
        assert consistent(hub) == 4  # the first one, one a shard, and the last: none twice

    def usable() -> None:
        if ("datasets", NEW) in hub.repos:
            with hub.lock:
                consistent(hub)

    Contract(OnTheHub(context, hub, publish_all, (str(built.root), home)), done, usable, hub.wipe).at_random(KILLS)
