"""A download killed at any moment: what lies in the cache under a final name is whole, and run again it goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hub import WRITER, Hub
from tests.support.kills import Contract, OnTheHub, forks
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import Built, load

KILLS = 12
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
    fetching._remote_files.clear()
    fetching.LARGEST_READ_GAP_NBYTES = -1  # a range a member, however small
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
    context = forks()
    built, home = published(hub), tmp_path / "home"
    there = 0  # when the last run began

    def done() -> None:
        assert len(hub.log.select("_cdn/.*/shards/")) == 6 - there  # what had arrived is not fetched again
        assert kept(home, built) == 6

    def usable() -> None:
        nonlocal there
        there = kept(home, built)

    def reset() -> None:
        nonlocal there
        shutil.rmtree(home)
        there = 0

    Contract(OnTheHub(context, hub, download, (str(home), MEMBERS)), done, usable, reset).at_random(KILLS)
