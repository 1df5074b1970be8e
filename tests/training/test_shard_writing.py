"""Members on their way into shards, at the moments when the only other copy of them goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.training.export import Export, train_into
from checkpoints_zoo.training.shards import Staging
from checkpoints_zoo.training.state import training_lock
from tests.support.tiny import TINY, add_finished, finished, no_waiting_for_the_disk, two_a_shard  # noqa: F401 (fixtures)

pytestmark = pytest.mark.usefixtures("two_a_shard", "no_waiting_for_the_disk")


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_killed_at_a_shard_the_log_has_every_member_once(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = Staging.drop

    def killed(self: Staging, keys: Any) -> None:
        if after:
            drop(self, keys)
        raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "drop", killed)
    with pytest.raises(KeyboardInterrupt):
        train_into(TINY, [0, 1, 2], tmp_path)
    monkeypatch.setattr(Staging, "drop", drop)
    assert zoo.load("tiny", source=tmp_path).ids == [0, 1]
    train_into(TINY, [0, 1, 2], tmp_path)
    lines = (tmp_path / ".training" / "tiny" / "log.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["member"] for line in lines) == [0, 1, 2]


def test_names_are_on_the_disk_before_another_copy_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of shards before a manifest says them, and all before what was laid aside is removed."""
    replace, unlink, mkdir = Path.replace, Path.unlink, Path.mkdir
    waiting, seen = set[Path](), set[str]()  # folders with a name that a power cut could take

    def replaced(self: Path, target: Path) -> Path:
        if target.suffix == ".parquet":
            seen.add("manifest")
            assert not {tmp_path / "shards", tmp_path / "shards" / "tiny"} & waiting
        waiting.add(target.parent)
        return replace(self, target)

    def unlinked(self: Path, missing_ok: bool = False) -> None:
        if self.match("finished/*.json"):
            seen.add("laid aside")
            assert not {path for path in waiting if ".training" not in path.parts}
        unlink(self, missing_ok)

    def made(self: Path, *arguments: Any, **options: Any) -> None:
        waiting.update(set() if self.exists() else {self.parent})
        mkdir(self, *arguments, **options)

    members = finished([0, 1, 2])
    with training_lock(tmp_path):
        exporting = Export(TINY, tmp_path)
        monkeypatch.setattr(Path, "replace", replaced)
        monkeypatch.setattr(Path, "unlink", unlinked)
        monkeypatch.setattr(Path, "mkdir", made)
        monkeypatch.setattr(os, "fsync", lambda number: waiting.discard(Path(f"/proc/self/fd/{number}").readlink()))
        add_finished(exporting, members)
        exporting.finish()
    assert seen == {"manifest", "laid aside"}
