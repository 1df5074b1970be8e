"""`zoo-cli download` and `cache` against the loopback Hub: the members' bytes and no others, then offline."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.sources import cache
from tests.hub import Hub
from tests.support.commands import process, run, values
from tests.support.remote import ADDRESS, REPO, SHARDS, published
from tests.support.scenarios import Built


@pytest.fixture
def tiny(hub: Hub) -> Built:
    return published(hub)


def test_download_then_offline(hub: Hub, tiny: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    about = values(run("download", "tiny", "--members", "2,15", "--source", ADDRESS, "--dry-run", "--format", "json"))
    size = zoo.load("tiny", n=1, source=tiny.root).nbytes
    assert (about["members"], about["files"], about["bytes"], about["fetched"]) == (2, 2, 2 * size, False)
    assert hub.log.requests(SHARDS) == 0
    done = values(run("download", "tiny", "--members", "2,15", "--source", ADDRESS, "--format", "json"))
    assert done == {**about, "fetched": True, "members_fetched": 2}
    assert hub.log.bytes(SHARDS) <= 1.02 * 2 * size
    before = hub.log.requests(SHARDS)
    assert len(zoo.load(done["citation"]).stack()) > 0
    assert hub.log.requests(SHARDS) == before
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert zoo.load(done["citation"]).ids == [2, 15]
    refused = run("download", "tiny", "--members", "3", "--source", ADDRESS)
    assert refused.exit_code == 5
    assert "found no members 3 of hf://datasets/alice/zoo@" in refused.stderr


def test_a_folder_has_nothing_to_fetch(tiny: Built) -> None:
    about = values(run("download", "tiny", "-n", "3", "--source", tiny.root, "--format", "json"))
    assert about["citation"] == zoo.load("tiny", n=3, source=tiny.root).citation


def test_cache_lists_and_drops(hub: Hub, tiny: Built) -> None:
    assert values(run("cache", "--format", "json")) == []
    run("download", "tiny", "--members", "2,15", "--source", ADDRESS)
    (line,) = values(run("cache", "--format", "json"))
    assert (line["repo"], line["members"]) == (REPO, 2)
    assert values(run("cache", "--drop", REPO, "--dry-run", "--format", "json")) == [line]
    assert sum(kept.bytes for kept in cache.cached_repos()) == line["bytes"]
    missing = run("cache", "--drop", "no/body")
    assert missing.exit_code == 3
    assert "repo no/body: expected a repo with " in missing.stderr
    assert values(run("cache", "--drop", "all", "--format", "json")) == [line]
    assert cache.cached_repos() == []


@pytest.mark.slow
def test_neither_imports_torch_or_pandas(tiny: Built, tmp_path: Path) -> None:
    code = "import sys; from checkpoints_zoo.cli.main import main\ntry: main({})\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'pandas') if m in sys.modules])"
    import subprocess
    import sys as system

    for arguments in (["download", "tiny", "-n", "2", "--source", str(tiny.root)], ["cache"]):
        done = subprocess.run([system.executable, "-c", code.format(arguments)], capture_output=True, text=True)
        assert done.stdout.endswith("[]\n"), done.stderr
    assert process("download", "tiny", "--source", tmp_path).returncode == 3
