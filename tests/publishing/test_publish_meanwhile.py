"""What else is in the repo, and what changes there or here while a folder is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo.errors import DamagedError, NetworkError, UsageError, ZooError
from checkpoints_zoo.publishing import publisher
from tests.hub import Hub
from tests.support.publications import (
    ADDRESS,
    NEW,
    PICTURE,
    commits,
    consistent,
    expected,
    publish,
    quick,
    refused,
    two_shards,
    writes,
)
from tests.support.scenarios import Built, build


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    return two_shards(tmp_path / "out")


# ---- what else is in the repo ----
def test_files_of_others_stay(hub: Hub, tiny: Built) -> None:
    hub.commit(NEW, {".gitattributes": b"* text", "data/a.csv": b"1,2", "tiny.parquet": b"no manifest"})
    publish(tiny.root)
    assert {".gitattributes", "data/a.csv", "tiny.parquet"} <= hub.files(NEW).keys()


def test_collections_that_only_the_repo_has_stay_in_the_card(hub: Hub, tiny: Built, tmp_path: Path) -> None:
    other = build(tmp_path / "other", members=range(50, 52), name="other")
    publish(other.root)
    publish(tiny.root)
    card = hub.read(NEW, "README.md").decode()
    assert "config_name: other" in card
    assert "config_name: tiny" in card
    assert consistent(hub) == 5
    assert publish(other.root).commits == publish(tiny.root).commits == 0


def test_a_shard_of_that_name_with_other_bytes(hub: Hub, tiny: Built) -> None:
    shard = next(p for p in expected(tiny) if p.startswith("shards/"))
    hub.commit(NEW, {shard: b"others"})
    refused(
        hub, UsageError,
        f"file {shard}: expected a name of its own, since readers of the repo go by it; found other bytes "
        f"under that name in {ADDRESS}. Rename it here and in the manifest; shards that this package writes have "
        "their hash in the name.", tiny.root,
    )  # fmt: skip
    assert writes(hub) == []


def test_regular_files_are_compared_as_git_does(hub: Hub, tiny: Built) -> None:
    """A repo whose .gitattributes keeps nothing outside git."""
    publish(tiny.root)
    files = {p: hub.read(NEW, p) for p in hub.files(NEW)}
    hub.commit(NEW, files, lfs=False)
    assert publish(tiny.root).commits == 0


def test_another_matplotlib_is_nothing_new(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tiny.root)
    monkeypatch.setattr("checkpoints_zoo.publishing.card_pictures.picture", lambda *_: PICTURE + b" in other colours")
    assert publish(tiny.root).commits == 0
    hub.commit(NEW, {"cards/tiny.png": None})
    assert publish(tiny.root).files == 1
    monkeypatch.setattr("checkpoints_zoo.publishing.card_pictures.picture", lambda *_: PICTURE)
    build(tiny.root, members=range(7), per_shard=3)
    assert publish(tiny.root).files == 4  # a shard, the manifest, the card, and now its picture with it
    assert hub.read(NEW, "cards/tiny.png") == PICTURE


# ---- someone else, at the same time ----
@pytest.mark.parametrize("which", [1, 2])
def test_someone_else_commits_meanwhile(hub: Hub, tiny: Built, which: int) -> None:
    seen = 0

    def meddle(exchange: Any) -> None:
        nonlocal seen
        if "/commit/" in exchange.path:
            seen += 1
            if seen == which:
                hub.commit(NEW, {"notes.txt": b"mine"}, "theirs")

    hub.on_request = meddle
    with pytest.raises(NetworkError) as caught:
        publish(tiny.root)
    assert str(caught.value) == (
        f"publishing to {ADDRESS}: expected the repo as it was when the plan was made; found a commit of "
        "somebody else. Run again: what was uploaded is kept."
    )
    assert "README.md" not in hub.files(NEW)
    assert consistent(hub)
    hub.on_request = None
    done = publish(tiny.root)
    assert expected(tiny).items() <= {p: f.sha for p, f in hub.files(NEW).items()}.items()
    assert done.commits == 3 - which
    assert "notes.txt" in hub.files(NEW)


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_commit_whose_answer_was_an_error(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch, create_pr: bool
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    hub.commit(NEW, {"notes.txt": b"mine"})
    real, late = HfApi.create_commit, [True, True]

    def slow(self: HfApi, *args: Any, **options: Any) -> Any:
        made = real(self, *args, **options)
        if late and late.pop():
            for addition in args[1]:
                addition._is_committed = False  # the client would not know
            request = httpx.Request("POST", hub.url)
            raise HfHubHTTPError("504", response=httpx.Response(504, request=request))
        return made

    monkeypatch.setattr(HfApi, "create_commit", slow)
    done = publish(tiny.root, create_pr=create_pr)
    assert (done.commits, late) == (2, [])
    assert consistent(hub) == 4
    assert hub.repo(NEW).pulls == (["Publish tiny"] if create_pr else [])


def test_the_folder_changes_meanwhile(hub: Hub, tiny: Built) -> None:
    shard = next(p for p in (tiny.root / "shards" / "tiny").iterdir())

    def meddle(exchange: Any) -> None:
        if "/preupload/" in exchange.path:
            shard.write_bytes(shard.read_bytes() + b" ")

    hub.on_request = meddle
    with pytest.raises(ZooError):
        publish(tiny.root)
    assert all(not c.tree for c in commits(hub))


def test_a_file_that_the_repo_ignores(hub: Hub, tiny: Built) -> None:
    shards = sorted(p for p in expected(tiny) if p.startswith("shards/"))
    rows = [{"path": p, "uploadMode": "lfs", "shouldIgnore": p == shards[1], "oid": None} for p in shards]
    hub.faults.append({"path": "/preupload/", "body": json.dumps({"files": rows}).encode()})
    with pytest.raises(
        DamagedError, match=r"expected file shards/.* as it was sent; found no such file\. A \.gitignore"
    ):
        publish(tiny.root)
    assert publish(tiny.root).commits == 2


def test_the_rows_are_checked_before_the_manifest_goes_up(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that vanish between the commit that has them and the one that names them."""
    real = publisher._commit

    def losing(*args: Any) -> Any:
        branch = real(*args)
        tree = {p: f for p, f in branch.tree.items() if "00001" not in p}
        return publisher.replace(branch, tree=tree)

    monkeypatch.setattr(publisher, "_commit", losing)
    with pytest.raises(DamagedError, match=r"^member 5 of tiny: expected its bytes up to .* found no such file\."):
        publish(tiny.root)
    assert "README.md" not in hub.files(NEW)
