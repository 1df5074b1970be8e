"""A download killed at any moment: what lies in the cache under a final name is whole, and run again it goes on."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hub import WRITER, Hub
from tests.support.kills import forks, run_child
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import Built, load

KILLS = 25
MEMBERS = "1,3,5,12,14,16"  # of two shards, none next to another


def download(home: str, members: str) -> None:
    """What each child does: bring members here, and read them."""
    from huggingface_hub import constants

    import checkpoints_zoo as zoo
    from checkpoints_zoo.sources import fetching

    # The server that children are forked from may have been started by another test.
    os.environ["HF_TOKEN"] = WRITER
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True
    constants.HF_HUB_CACHE, constants.HF_ASSETS_CACHE = f"{home}/hub", f"{home}/assets"
    fetching._asked.clear()
    fetching.GAP = -1  # a range a member, however small
    zoo.load("tiny", members=members, source=ADDRESS).download().stack()


def kept(home: Path, built: Built) -> int:
    """Compare every file of the member cache that has a final name with the folder; return how many there are."""
    wanted = {i: load(built, members=str(i)).stack() for i in map(int, MEMBERS.split(","))}
    files = [p for p in home.glob("assets/**/members/*") if not p.name.startswith(".")]
    for path in files:
        found = load_file(path)
        found.pop("_pad", None)
        same = [i for i, state in wanted.items() if all(torch.equal(found[n], t[0]) for n, t in state.items())]
        assert len(same) == 1, path
    assert len({p.name for p in files}) == len(files)
    return len(files)


@pytest.mark.slow
def test_killed_at_random_moments(hub: Hub, tmp_path: Path) -> None:
    context = forks("checkpoints_zoo.collection.collection", __name__)
    built, home = published(hub), tmp_path / "home"

    def run(request: int | None = None, later: float = 0) -> int:
        return run_child(context, hub, download, (str(home), MEMBERS), request, later)

    assert run() == 0
    requests, ranges = len(hub.log), len(hub.log.select("_cdn/.*/shards/"))
    assert ranges == 6
    assert kept(home, built) == 6
    shutil.rmtree(home)
    rng = random.Random()  # a new seed each time: any moment must do
    killed = 0
    while killed < KILLS:
        if run(rng.randint(1, requests), rng.choice([0, rng.uniform(0, 0.02)])) == 0:  # through before the kill
            assert kept(home, built) == 6
            shutil.rmtree(home)
            continue
        killed += 1
        there = kept(home, built)
        if there == 6 or rng.random() < 0.3:
            assert run() == 0
            assert len(hub.log.select("_cdn/.*/shards/")) == 6 - there  # what had arrived is not fetched again
            shutil.rmtree(home)
    assert run() == 0
    assert kept(home, built) == 6
