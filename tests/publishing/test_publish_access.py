"""Who may publish where: logins, private repos, tags and pull requests."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import (
    AccessError,
    NetworkError,
    SourceNotFound,
    UsageError,
)
from checkpoints_zoo.publishing.publisher import Plan
from tests.hub import READER, Hub
from tests.support.commands import run
from tests.support.publications import (
    ADDRESS,
    NEW,
    complete,
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


# ---- tags ----
def test_tags(hub: Hub, tiny: Built) -> None:
    first = publish(tiny.root, tag="v1.0")
    assert hub.repo(NEW).refs["refs/tags/v1.0"] == first.commit
    hub.log.clear()
    assert publish(tiny.root, tag="v1.0").commit == first.commit
    assert publish(tiny.root, tag="also/v1").tag == "also/v1"
    assert [row.path for row in hub.log if row.method == "POST"] == [f"/api/datasets/{NEW}/tag/{first.commit}"]
    build(tiny.root, members=range(7), per_shard=3)
    hub.log.clear()
    refused(
        hub, UsageError, f"tag v1.0 of {ADDRESS}: expected none yet, or one on the commit to be made, since there is "
        f"something to upload; found the tag on commit {first.commit[:12]}. "
        "Take another name: readers who cite a tag rely on its commit.", tiny.root, tag="v1.0",
    )  # fmt: skip
    second = publish(tiny.root, tag="v2.0")
    refused(
        hub, UsageError,
        f"tag v1.0 of {ADDRESS}: expected none yet, or one on the newest one, {second.commit[:12]}; found "
        f"the tag on commit {first.commit[:12]}. Take another name: readers who cite a tag rely on its commit.",
        tiny.root, tag="v1.0",
    )  # fmt: skip
    hub.branch(NEW, "dev")
    text = f"tag dev of {ADDRESS}: expected a name of its own; found a branch of that name."
    refused(hub, UsageError, text, tiny.root, tag="dev")


@pytest.mark.parametrize("tag", ["", "-x", "a b", "a..b", "x.lock", "x/", "main", "a~1", "deadbeef", "é"])
def test_tags_that_are_none(hub: Hub, tiny: Built, tag: str) -> None:
    refused(
        hub,
        UsageError,
        f"tag: expected a name like v1.0, that git takes and is no commit; found {tag!r}.",
        tiny.root,
        tag=tag,
    )
    assert hub.log == []


# ---- pull requests ----
def test_a_pull_request(hub: Hub, tiny: Built) -> None:
    start = hub.commit(NEW, {"notes.txt": b"mine"})
    done = publish(tiny.root, create_pr=True)
    assert hub.repo(NEW).refs["refs/heads/main"] == start
    assert (done.url, done.commits) == (f"{hub.url}/datasets/{NEW}/discussions/1", 2)
    assert hub.repo(NEW).refs["refs/pr/1"] == done.commit
    assert expected(tiny).items() <= {p: f.sha for p, f in hub.files(NEW, "refs/pr/1").items()}.items()
    assert consistent(hub) == 4
    again = publish(tiny.root, create_pr=True)
    assert (again.commit, again.commits, again.url) == (done.commit, 0, done.url)
    assert hub.repo(NEW).pulls == ["Publish tiny"]
    newer = build(tiny.root, members=range(7), per_shard=3)
    assert publish(newer.root, create_pr=True).url == done.url  # still open: it goes on there
    hub.repo(NEW).pull_status[1] = "closed"
    assert publish(newer.root, create_pr=True).url.endswith("/discussions/2")
    assert hub.repo(NEW).refs["refs/heads/main"] == start


def test_a_pull_request_for_what_main_has(hub: Hub, tiny: Built) -> None:
    done = publish(tiny.root)
    again = publish(tiny.root, create_pr=True)
    assert (again.commit, again.commits, hub.repo(NEW).pulls) == (done.commit, 0, [])


def test_a_pull_request_to_a_repo_of_others(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(NEW, {"notes.txt": b"mine"})
    monkeypatch.setenv("HF_TOKEN", READER)
    refused(
        hub, AccessError, f"publishing to {ADDRESS}: expected permission to write; found 403 Forbidden. "
        "Log in with `hf auth login` or set HF_TOKEN.", tiny.root,
    )  # fmt: skip
    assert writes(hub) == []
    assert publish(tiny.root, create_pr=True).url.endswith("/discussions/1")
    assert hub.repo(NEW).pull_authors == ["bob"]
    assert hub.log.leaks(READER) == []


def test_a_pull_request_takes_a_repo_and_no_tag(hub: Hub, tiny: Built) -> None:
    refused(
        hub, SourceNotFound,
        f"pull request to {ADDRESS}: expected a data set repo; found none that this login may see. "
        "Publish without a pull request: that makes the repo.", tiny.root, create_pr=True,
    )  # fmt: skip
    refused(
        hub, UsageError, "publication: expected a tag, or a pull request; found both. Tag the commit that merges it.",
        tiny.root, create_pr=True, tag="v1.0",
    )  # fmt: skip
    assert writes(hub) == []


# ---- who may ----
def test_private(hub: Hub, tiny: Built) -> None:
    publish(tiny.root, private=True)
    assert hub.repo(NEW).private
    assert publish(tiny.root, private=True).commits == 0
    assert publish(tiny.root).commits == 0  # it only matters when the repo is made
    hub.repo(NEW).private = False
    refused(hub, UsageError, f"repo {ADDRESS}: expected a private one; found a public one. "
        "Make it private on its settings page, or publish without --private.", tiny.root, private=True,
    )  # fmt: skip


def test_nobody_is_logged_in(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    refused(
        hub, AccessError, f"publishing to {ADDRESS}: expected a login that may write; found none. "
        "Log in with `hf auth login` or set HF_TOKEN.", tiny.root,
    )  # fmt: skip
    assert hub.log == []


def test_a_dry_run_of_a_pull_request_asks_who_you_are(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create_repo(NEW)
    monkeypatch.setenv("HF_TOKEN", READER)
    planned = zoo.publish(tiny.root, NEW, create_pr=True, dry_run=True)
    assert isinstance(planned, Plan)
    assert planned.to_json()["branch"] == "a new pull request"
    assert writes(hub) == []
    monkeypatch.delenv("HF_TOKEN")
    refused(hub, AccessError, f"publishing to {ADDRESS}: expected a login…", tiny.root, create_pr=True, dry_run=True)


def test_a_wrong_token(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongtoken")
    error = refused(
        hub,
        AccessError,
        f"revision 'main' of {ADDRESS}: expected a login that the Hub takes; found 401 Unauth…",
        tiny.root,
    )
    assert "hf_wrongtoken" not in str(error)


def test_a_namespace_of_others(hub: Hub, tiny: Built) -> None:
    refused(
        hub, AccessError,
        "publishing to hf://datasets/bob/new: expected one of the places that this login may write to: "
        "alice, zoo; found bob. Check the repo's name, or log in as another user.", tiny.root, "bob/new",
    )  # fmt: skip
    hub.create_repo("bob/secret", private=True)
    refused(
        hub,
        AccessError,
        "publishing to hf://datasets/bob/secret: expected one of the places …",
        tiny.root,
        "bob/secret",
    )
    assert writes(hub) == []


def test_an_organisation(hub: Hub, tiny: Built) -> None:
    zoo.publish(tiny.root, "zoo/new", sample=0)
    assert complete(hub, tiny, "zoo/new")


def test_offline(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    host = hub.url.removeprefix("http://")
    text = f"publishing to {ADDRESS}: expected a way to {host}; found HF_HUB_OFFLINE set. Unset it."
    refused(hub, NetworkError, text, tiny.root)
    refused(hub, NetworkError, text, tiny.root, dry_run=True)
    assert hub.log == []


def test_a_dry_run_without_a_network_checks_the_folder_first(
    hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = run("publish", tiny.root, "--repo", NEW, "--dry-run")
    *said, error = result.stderr.splitlines()
    assert said[-2:] == [
        f"{tiny.root}: the checks of a dry run found no problem",
        f"no plan, since the Hub can't be asked which files {ADDRESS} has",
    ]
    assert error.startswith(
        f"zoo-cli: error: revision 'main' of {ADDRESS}: expected an answer from 127.0.0.1:9; found ConnectionError: "
    )
    assert error.endswith(". Try again.")
    assert result.exit_code == 5
    shard = next((tiny.root / "shards").rglob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    damaged = run("publish", tiny.root, "--repo", NEW, "--dry-run")
    assert damaged.exit_code != 5
    assert "no plan" not in damaged.stderr


@pytest.mark.parametrize("repo", ["new", "a/b/c", "hf://models/alice/new", "alice/new@main", "", "alice/", "../x"])
def test_repos_that_are_none(hub: Hub, tiny: Built, repo: str) -> None:
    refused(hub, UsageError, "repo: expected ORG/NAME of a data set repo; found …", tiny.root, repo)
    assert hub.log == []


def test_an_address_is_a_repo_too(hub: Hub, tiny: Built) -> None:
    zoo.publish(tiny.root, ADDRESS, sample=0)
    assert complete(hub, tiny)


def test_a_model_repo_of_that_name_is_another(hub: Hub, tiny: Built) -> None:
    hub.commit(NEW, {"model.bin": b"x"}, kind="models")
    publish(tiny.root)
    assert complete(hub, tiny)
    assert list(hub.files(NEW, kind="models")) == ["model.bin"]
