"""A source with its card on the Hub: the Hub takes it, `datasets` finds the manifests, the examples on it run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import HfApi

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.publishing import cards
from checkpoints_zoo.sources import fetching
from tests.hub import Hub
from tests.support.commands import run, two_collections, values
from tests.support.remote import REPO
from tests.support.scenarios import build

EMBEDDED = Path(zoo.__file__).parent / "embedded"


def publish(hub: Hub, root: Path, revision: str | None = None) -> str:
    """Commit a folder with its card; return the card."""
    fetching._remote_files.clear()  # a Hub of another test gave those links
    collections = {}
    for path in root.glob("manifests/*.json"):
        description = Description.from_json(json.loads(path.read_text()), path)
        collections[path.stem] = description, manifest.read_manifest(path.with_suffix(".parquet"))
    written = cards.card_files(collections, REPO, revision)
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*.*") if p.is_file()}
    hub.commit(REPO, {**files, **written})
    return written["README.md"].decode()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def same(table: datasets.Dataset, path: Path) -> None:
    """Compare what `datasets` gave with the Parquet file."""
    wanted = pq.read_table(path)
    assert table.column_names == wanted.column_names
    assert table.to_list() == wanted.to_pylist()


@pytest.mark.slow
def test_datasets_gives_every_manifest(hub: Hub, tmp_path: Path) -> None:
    two_collections(tmp_path)
    publish(hub, tmp_path)
    assert datasets.get_dataset_config_names(REPO) == ["tiny", "wide"]
    assert datasets.get_dataset_default_config_name(REPO) == "tiny"
    for name, members in (("tiny", 5), ("wide", 23)):
        found = datasets.load_dataset(REPO, name)
        assert {split: part.num_rows for split, part in found.items()} == {"train": members}
        same(found["train"], tmp_path / "manifests" / f"{name}.parquet")
    assert datasets.load_dataset(REPO, split="train").num_rows == 5


@pytest.mark.slow
def test_datasets_gives_the_only_manifest(hub: Hub, tmp_path: Path) -> None:
    build(tmp_path, "convnet", range(3))
    publish(hub, tmp_path)
    assert datasets.get_dataset_config_names(REPO) == ["tiny"]
    same(datasets.load_dataset(REPO, split="train"), tmp_path / "manifests" / "tiny.parquet")


def test_the_hub_takes_the_front_matter(hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path, "convnet", range(3))
    built.description |= {"title": 'a: "b"\n---\n- [c', "licence": "- {x: |"}
    built.write()
    text = publish(hub, tmp_path)
    hub.commit(REPO, {"README.md": b"# Before"})
    api = HfApi()
    api.upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=REPO, repo_type="dataset")
    assert {x.status for x in hub.log.select("/api/validate-yaml")} == {200}
    about = api.dataset_info(REPO).card_data
    assert about is not None
    assert about["pretty_name"] == 'a: "b" --- - [c'
    assert (about["license"], about["license_name"]) == ("other", "x")
    with pytest.raises(ValueError, match="Invalid metadata"):
        api.upload_file(
            path_or_fileobj=text.replace("pretty_name: ", "pretty_name: [", 1).encode(), path_in_repo="README.md",
            repo_id=REPO, repo_type="dataset",
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_the_examples_run(hub: Hub, revision: str | None) -> None:
    text = publish(hub, EMBEDDED, revision)
    if revision:
        hub.tag(REPO, revision)
        hub.commit(REPO, dict.fromkeys(hub.files(REPO)), "empty the newest")
    scope: dict[str, Any] = {}
    examples = blocks(text, "python")
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, "README.md", "exec"), scope)
    assert scope["members"].ids == [0, 1, 2, 3, 4]
    assert scope["report"]["accuracy"].value > 0.97
    same(scope["manifest"], EMBEDDED / "manifests" / "convnet-digits.parquet")
    assert scope["state"].keys() == scope["weights"].keys()
    for name, tensor in scope["state"].items():
        assert torch.equal(tensor, scope["weights"][name][0])
    commands = [shlex.split(line)[1:] for block in blocks(text, "bash") for line in block.splitlines()]
    assert commands.pop(0) == ["install", "./checkpoints_zoo[torch]"]
    (command,) = commands
    assert values(run(*command, "--format", "json"))["members"] == 5


def test_a_state_dict_without_the_package_leaves_the_pad_out(hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path, "mlp", [3, 4], weights=torch.float16)
    assert built.description["layouts"]["only"]["pad"]
    scope: dict[str, Any] = {}
    exec(compile(blocks(publish(hub, tmp_path), "python")[-1], "README.md", "exec"), scope)
    assert scope["state"].keys() == built.states[3, 40].keys()
    assert all(torch.equal(tensor, built.states[3, 40][name]) for name, tensor in scope["state"].items())
