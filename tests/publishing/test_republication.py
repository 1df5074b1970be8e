"""Readers of a repo that is published again and again: each load is one commit, and all of it fits together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.sources import fetching
from tests.hub import Hub
from tests.support.remote import ADDRESS, REPO
from tests.support.scenarios import Built, build, load


def files_of(built: Built) -> dict[str, Path | bytes | None]:
    return {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()}


@pytest.mark.slow
def test_readers_see_one_commit_each(hub: Hub, tmp_path: Path) -> None:
    fetching._remote_files.clear()
    versions = [build(tmp_path / str(count), members=range(count), per_shard=4) for count in (8, 9, 10)]
    wanted = {len(v.rows): load(v).stack() for v in versions}
    trees = [files_of(v) for v in versions]
    commits = {hub.commit(REPO, trees[0], lfs=True): 8}
    stop = threading.Event()

    def publish() -> None:
        at = 0
        while not stop.is_set():
            before, at = trees[at % 3], at + 1
            new = trees[at % 3]
            # As zoo-cli publish does, but old shards go at once: a reader's commit has them all the same.
            hub.commit(REPO, {p: c for p, c in new.items() if "shards/" in p}, lfs=True)
            gone = {p: None for p in before if p not in new}
            commits[hub.commit(REPO, {**new, **gone}, lfs=True)] = len(versions[at % 3].rows)
            stop.wait(0.01)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        seen = []
        for _ in range(15):
            members = zoo.load("tiny", source=ADDRESS)
            stacked = members.stack()
            seen.append((members._commit, len(members)))
            for name, tensor in wanted[len(members)].items():
                assert torch.equal(stacked[name], tensor)
    finally:
        stop.set()
        publisher.join()
    assert len({commit for commit, _ in seen}) > 3
    # A commit of shards alone still has the manifest of the one before it.
    assert all(commits.get(commit, count) == count for commit, count in seen)
    assert hub.log.leaks("hf_writer") == []
