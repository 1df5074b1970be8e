"""Publishing to the loopback Hub with the real client: what goes up, in which order, and the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.predictions import predict
from checkpoints_zoo.publishing import publisher
from checkpoints_zoo.publishing.publisher import Plan, Published
from tests.hub import WRITER, Hub
from tests.support.commands import run, two_collections, values
from tests.support.publications import (
    ADDRESS,
    NEW,
    commits,
    complete,
    consistent,
    expected,
    publish,
    quick,
    two_shards,
    writes,
)
from tests.support.scenarios import Built, build, digest_of, load


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    return two_shards(tmp_path / "out")


# ---- what goes up ----
def test_publish_and_load(hub: Hub, tiny: Built) -> None:
    before = digest_of(tiny.root)
    done = publish(tiny.root)
    assert digest_of(tiny.root) == before
    assert complete(hub, tiny)
    assert consistent(hub) == 3
    assert [c.title for c in commits(hub)] == ["Publish tiny", "Publish tiny: weights", "initial commit"]
    assert (done.repo, done.commit, done.commits, done.files, done.there) == (ADDRESS, commits(hub)[0].id, 2, 6, 0)
    assert done.bytes == sum(f.size for f in hub.files(NEW).values())
    assert done.url == f"{hub.url}/datasets/{NEW}"
    assert hub.log.leaks(WRITER) == []
    loaded, there = zoo.load("tiny", source=ADDRESS), zoo.load("tiny", source=tiny.root)
    assert all(torch.equal(loaded.stack()[n], t) for n, t in there.stack().items())


def test_a_second_time_does_nothing(hub: Hub, tiny: Built) -> None:
    first = publish(tiny.root)
    hub.log.clear()
    lines: list[str] = []
    again = publish(tiny.root, say=lines.append)
    assert writes(hub) == []
    assert (again.commit, again.commits, again.files, again.bytes, again.there) == (first.commit, 0, 0, 0, 6)
    assert lines[-1] == f"{ADDRESS}: nothing to upload, all 6 files are there"


def test_weights_go_before_the_rows_that_name_them(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LARGEST_COMMIT_FILE_COUNT", 1)
    assert publish(tiny.root).commits == 3
    shards = [sorted(p for p in c.tree if p.startswith("shards/")) for c in reversed(commits(hub))]
    assert [len(s) for s in shards] == [0, 1, 2, 2]
    assert [len(c.tree) for c in reversed(commits(hub))] == [0, 1, 2, 6]
    assert consistent(hub) == 4


def test_only_what_is_missing_goes_up(hub: Hub, tiny: Built) -> None:
    shards = sorted(p for p in expected(tiny) if p.startswith("shards/"))
    hub.commit(NEW, {shards[0]: tiny.root / shards[0]})
    done = publish(tiny.root)
    sent = {row.path.split("/")[2] for row in hub.log.select("/_lfs/", method="PUT")}
    assert expected(tiny)[shards[0]] not in sent
    assert expected(tiny)[shards[1]] in sent
    assert (done.files, done.there, done.commits) == (5, 1, 2)
    assert complete(hub, tiny)


def test_a_new_version_leaves_the_old_one_whole(hub: Hub, tiny: Built) -> None:
    first = publish(tiny.root, tag="v1.0")
    tag = zoo.load("tiny", source=f"{ADDRESS}@v1.0")
    newer = build(tiny.root, members=range(3, 9), per_shard=3)
    planned = zoo.publish(tiny.root, NEW, dry_run=True)
    assert isinstance(planned, Plan)
    gone = sorted(p for p in hub.files(NEW) if p.startswith("shards/") and p not in {r["path"] for r in newer.rows})
    assert list(planned.unnamed) == gone != []
    assert [p for p in planned.ignored if p.endswith("safetensors")] == gone
    second = publish(newer.root, tag="v2.0")
    assert (second.commits, second.tag) == (2, "v2.0")
    assert gone[0] in hub.files(NEW)
    assert consistent(hub) == 5
    assert f"@{first.commit}/" in tag.citation
    assert tag.stack()["conv1.weight"].shape[0] == 6
    assert zoo.load("tiny", source=ADDRESS).ids == [3, 4, 5, 6, 7, 8]


def test_snapshots_and_predictions(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    built = build(tmp_path / "more", members=range(2), snapshots=(1, 20))
    predict(load(built), "digits", built.root)
    folder = built.root / "predictions" / "tiny" / "digits-test"
    for name in ("00009-00000000.safetensors", "notes.txt", ".hidden.json"):
        (folder / name).write_bytes(b"logits")
    (shard,) = (p.name for p in folder.glob("00000-*"))
    publish(built.root)
    inside = "predictions/tiny/digits-test"
    titles = {p: c.title for c in commits(hub) for p in c.tree if p.startswith(inside)}  # the oldest that has it
    assert titles == {
        f"{inside}/{shard}": "Publish tiny: weights",
        f"{inside}/manifest.parquet": "Publish tiny",
        f"{inside}/manifest.json": "Publish tiny",
    }
    assert consistent(hub) == 3
    card = hub.read(NEW, "README.md")
    (built.root / "predictions").rename(tmp_path / "away")  # the repo has them still
    (built.root / "README.md").unlink(missing_ok=True)
    publish(built.root)
    assert hub.read(NEW, "README.md") == card
    assert b"names `digits-test`: " in card


def test_nothing_foreign_goes_up(hub: Hub, tiny: Built) -> None:
    wanted = {*expected(tiny)}
    for name in (".training/state.pt", "shards/tiny/old.safetensors", "manifests/README.md", "a/b/c.txt", ".env"):
        (tiny.root / name).parent.mkdir(parents=True, exist_ok=True)
        (tiny.root / name).write_text("secret")
    planned = zoo.publish(tiny.root, NEW, dry_run=True)
    assert isinstance(planned, Plan)
    assert planned.ignored == (".env", ".training/", "a/", "manifests/README.md", "shards/tiny/old.safetensors")
    publish(tiny.root)
    assert {*hub.files(NEW)} == wanted | {"README.md", "cards/tiny.png"}


def test_large_files_go_up_in_parts(hub: Hub, tiny: Built) -> None:
    hub.part_size = 10_000
    publish(tiny.root)
    assert complete(hub, tiny)
    assert len(hub.log.select("/_lfs/[0-9a-f]+/[0-9]+$", method="PUT")) >= 2 * 5
    assert hub.log.leaks(WRITER) == []


@pytest.mark.slow
def test_two_collections_by_others_means(hub: Hub, tmp_path: Path) -> None:
    """Without stubs: the card makes `datasets` give each manifest, and a download of all is a source."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    built = two_collections(tmp_path / "out")
    for row in build(tmp_path / "out", members=range(100, 105), name="tiny").rows:  # else both have members 0 to 4
        assert row["member"] >= 100
    zoo.publish(built.root, NEW)
    assert consistent(hub) == 3
    for name, count in (("tiny", 5), ("wide", 23)):
        table = load_dataset(NEW, name, split="train")
        local = pq.read_table(built.root / "manifests" / f"{name}.parquet")
        assert table["member"][:] == local.column("member").to_pylist()
        assert len(table) == count
    folder = snapshot_download(NEW, repo_type="dataset", local_dir=tmp_path / "copy")
    for name in ("tiny", "wide"):
        assert zoo.load(name, source=folder).stack().keys()
        assert zoo.verify(zoo.load(name, source=folder)) == []
    hub.log.clear()
    again = zoo.publish(folder, NEW)  # what was downloaded is what is there
    assert isinstance(again, Published)
    assert (again.commits, writes(hub)) == (0, [])


def test_xet(hub_xet: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    quick(monkeypatch, waits)
    built = two_shards(tmp_path / "out")
    publish(built.root, tag="v1.0")
    assert complete(hub_xet, built)
    assert consistent(hub_xet) == 3
    assert hub_xet.log.requests("/_lfs/") == 0
    assert publish(built.root, tag="v1.0").commits == 0
    assert hub_xet.log.leaks(WRITER) == []
    assert zoo.load("tiny", members="1,4", source=ADDRESS).stack().keys()


# ---- planning ----
def test_a_dry_run_changes_nothing(hub: Hub, tiny: Built) -> None:
    planned = zoo.publish(tiny.root, NEW, dry_run=True, tag="v1.0", private=True)
    assert isinstance(planned, Plan)
    assert writes(hub) == []
    assert (NEW, "datasets") not in hub.repos
    values = planned.to_json()
    assert values == {
        "repo": ADDRESS, "new": True, "private": True, "branch": "main", "head": None, "files": 6,
        "bytes": planned.bytes, "commits": 2, "tag": "v1.0",
        "upload": [*sorted(p for p in expected(tiny) if "shards" in p), "README.md", "cards/tiny.png",
                   "manifests/tiny.parquet", "manifests/tiny.json"],
        "there": [], "there_bytes": 0, "unnamed": [], "ignored": [],
        "to_come": ["finite values of 6 members' weights",
                    "test accuracy of at most 8 members a collection, measured again"],
    }  # fmt: skip
    done = publish(tiny.root, private=True)
    assert (done.files, done.bytes, done.commits) == (planned.files.__len__(), planned.bytes, planned.commits)


@pytest.mark.slow
def test_a_dry_run_needs_neither_torch_nor_a_login(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tiny.root)
    monkeypatch.delenv("HF_TOKEN")
    code = (
        "import sys\nfrom checkpoints_zoo.cli.main import main\n"
        "try: main({})\nexcept SystemExit as stop: print(stop.code)\n"
        "print(sorted({{'torch', 'pandas', 'timm'}} & set(sys.modules)), file=sys.stderr)"
    )
    arguments = ["publish", str(tiny.root), "--repo", NEW, "--dry-run", "--format", "json"]
    done = subprocess.run([sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, check=True)
    printed, status = done.stdout.rstrip().rsplit("\n", 1)
    assert (json.loads(printed)["files"], status) == (0, "None")  # the picture differs
    assert done.stderr.rstrip().endswith("[]")


# ---- the command ----
def test_the_command(hub: Hub, tiny: Built) -> None:
    planned = run("publish", tiny.root, "--repo", NEW, "--dry-run", "--tag", "v1.0", "--private")
    assert planned.exit_code == 0
    assert planned.stdout.startswith(f"repo     {ADDRESS}\nnew      yes\nprivate  yes\nbranch   main\n")
    assert "to upload:\n  shards/tiny/00000-" in planned.stdout
    assert "checks that a dry run leaves out:\n  finite values of 6 members' weights" in planned.stdout
    done = run("publish", tiny.root, "--repo", NEW, "--sample", "0", "--tag", "v1.0", "--format", "json")
    about = values(done)
    assert (about["files"], about["commits"], about["tag"]) == (6, 2, "v1.0")
    assert "commit 2 of 2: 4 files" in done.stderr
    assert "commits  0" in run("publish", tiny.root, "--repo", NEW).stdout
    assert run("publish", tiny.root, "--repo", NEW, "--tag", "v1.0", "--create-pr").exit_code == 2
    assert run("publish", tiny.root, "--repo", "bob/new").exit_code == 3
    assert run("publish", tiny.root).exit_code == 2
    assert run("publish", tiny.root / "no", "--repo", NEW).exit_code == 3
    hub.faults.append({"status": 500, "times": 1000})
    assert run("publish", tiny.root, "--repo", NEW).exit_code == 5
