"""What a repo must be like at every commit, checked by pyarrow and hashlib on what the loopback Hub holds."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.publishing import card_pictures
from checkpoints_zoo.publishing.publisher import Published
from tests.hub import Hub
from tests.hub.repos import Commit
from tests.support.remote import retry_at_once
from tests.support.scenarios import Built, build

NEW = "alice/new"
ADDRESS = f"hf://datasets/{NEW}"
PICTURE = b"\x89PNG\r\n\x1a\n a picture"


def two_shards(root: Path) -> Built:
    """Write six small members in two shards."""
    return build(root, members=range(6), per_shard=3)


def quick(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    """Draw no pictures, and let retries follow at once."""
    retry_at_once(monkeypatch, waits)
    monkeypatch.setattr(card_pictures, "picture", lambda *_: PICTURE)


def commits(hub: Hub, id: str = NEW, revision: str = "main") -> list[Commit]:
    """The commits behind a revision, the newest first."""
    repo = hub.repo(id)
    found: list[Commit] = []
    commit: Commit | None = repo.at(revision)
    while commit is not None:
        found.append(commit)
        commit = repo.commits.get(commit.parent or "")
    return found


def consistent(hub: Hub, id: str = NEW) -> int:
    """Check that at every commit of every branch each row's bytes are there; return how many commits it was."""
    known = list(hub.repo(id).commits.values())
    for commit in known:
        for path, file in commit.tree.items():
            if not path.endswith(".parquet"):
                continue
            assert path.replace(".parquet", ".json") in commit.tree, (commit.title, path)
            content = hub.blobs.read(hub.content(file.sha))
            for row in pq.read_table(io.BytesIO(content)).to_pylist():
                where = (commit.title, row["member"], row["path"])
                assert row["path"] in commit.tree, where
                shard = commit.tree[row["path"]]
                assert shard.size >= row["offset"] + row["nbytes"], where
                assert shard.sha[:8] in row["path"], where  # the name has the start of the content's hash
    return len(known)


def expected(built: Built) -> dict[str, str]:
    """The sha256 of each file that a published source has, but for the card."""
    files = [p for folder in ("manifests", "shards") for p in (built.root / folder).rglob("*.*")]
    return {p.relative_to(built.root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def complete(hub: Hub, built: Built, id: str = NEW, revision: str = "main") -> bool:
    """Say whether a revision has every file of a source as it is, a card with its picture, and nothing else."""
    found = {path: file.sha for path, file in hub.files(id, revision).items()}
    card = {"README.md", f"cards/{built.name}.png"}
    return card <= found.keys() and {p: sha for p, sha in found.items() if p not in card} == expected(built)


def publish(root: Path, **options: Any) -> Published:
    """Publish a folder, no accuracy measured again unless told; return what was done."""
    done = zoo.publish(root, NEW, **{"sample": 0, **options})
    assert isinstance(done, Published)
    return done


def writes(hub: Hub) -> list[str]:
    """Requests that change something."""
    changing = [row for row in hub.log if row.method in ("POST", "PUT", "DELETE") and "/paths-info/" not in row.path]
    return [f"{row.method} {row.path}" for row in changing]


def refused(hub: Hub, kind: type[ZooError], text: str, root: Path, repo: str = NEW, **options: Any) -> ZooError:
    """Check that a folder is refused with this text, up to "…" if it ends so, before anything is sent; return why."""
    hub.log.clear()
    with pytest.raises(kind) as caught:
        zoo.publish(root, repo, **{"sample": 0, **options})
    found = str(caught.value).replace(str(root), "ROOT")
    assert found == text or (text.endswith("…") and found.startswith(text[:-1])), found
    assert writes(hub) == []
    return caught.value


def refused_both(hub: Hub, kind: type[ZooError], text: str, root: Path) -> None:
    """Check that a folder is refused by a dry run as well."""
    refused(hub, kind, text, root, dry_run=True)
    refused(hub, kind, text, root)
