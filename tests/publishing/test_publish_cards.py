"""Accuracies measured again, weights in another repo, and which README a repo gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import (
    DamagedError,
    FormatError,
    UsageError,
    ZooError,
)
from checkpoints_zoo.publishing.publisher import Published
from tests.hub import Hub
from tests.support.publications import (
    ADDRESS,
    NEW,
    commits,
    consistent,
    publish,
    quick,
    refused,
    refused_both,
    two_shards,
)
from tests.support.scenarios import Built, build

EMBEDDED = Path(zoo.__file__).parent / "embedded"


@pytest.fixture
def tiny(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Built:
    quick(monkeypatch, waits)
    return two_shards(tmp_path / "out")


# ---- claimed accuracy ----
@pytest.fixture
def trained(tmp_path: Path, tiny: Built) -> Path:
    """The trained networks that ship with the package, in a folder of their own."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "trained"))


def claim(root: Path, accuracy: float) -> None:
    path = root / "manifests" / "convnet-digits.parquet"
    rows = pq.read_table(path)
    at = rows.schema.get_field_index("test_accuracy")
    rows = rows.set_column(at, rows.schema.field(at), [[accuracy] * rows.num_rows])
    pq.write_table(rows, path)


@pytest.mark.slow
def test_accuracies_are_measured_again(hub: Hub, trained: Path) -> None:
    claim(trained, 0.5)
    lines: list[str] = []
    refused(
        hub, DamagedError, "members of source ROOT: expected what their manifest says; found member 0 of "
        "convnet-digits: accuracy: expected test accuracy 0.5000 on digits/test; found 0.9…", trained, sample=2,
        say=lines.append,
    )  # fmt: skip
    assert "convnet-digits: measuring the accuracy of at most 2 of 64 members …" in lines
    publish(trained, sample=0)
    assert consistent(hub) == 3


@pytest.mark.slow
def test_the_package_publishes_its_own(hub: Hub, trained: Path) -> None:
    done = publish(trained, sample=2, tag="v0.1")
    assert isinstance(done, Published)
    assert (done.commits, done.tag) == (2, "v0.1")
    assert consistent(hub) == 3
    members = zoo.load("resnet8-digits", n=2, source=f"{ADDRESS}@v0.1")
    assert zoo.verify(members) == []


def test_a_net_that_the_package_lacks(hub: Hub, tmp_path: Path, tiny: Built) -> None:
    lines: list[str] = []
    publish(build(tmp_path / "mine", "mlp", members=range(3), name="mine").root, sample=2, say=lines.append)
    assert "mine: accuracies are not measured again, since the package can't build 'my-mlp'" in lines
    assert consistent(hub) == 3


# ---- weights in another repo ----
@pytest.fixture
def overlay(hub: Hub, tiny: Built, tmp_path: Path) -> Built:
    """A folder with the rows of a collection whose weights lie in zoo/base, at a commit."""
    shards = {r["path"]: tiny.root / r["path"] for r in tiny.rows}
    commit = hub.commit("zoo/base", shards)
    tiny.description["base"] = f"hf://datasets/zoo/base@{commit}"
    tiny.write()
    shutil.rmtree(tiny.root / "shards")
    return tiny


def test_an_overlay(hub: Hub, overlay: Built) -> None:
    lines: list[str] = []
    done = publish(overlay.root, sample=2, say=lines.append)
    assert isinstance(done, Published)
    assert (done.commits, done.files) == (1, 4)
    assert set(hub.files(NEW)) == {"README.md", "cards/tiny.png", "manifests/tiny.json", "manifests/tiny.parquet"}
    assert "tiny: fetching and checking 2 of 6 members …" in lines
    assert publish(overlay.root).commits == 0
    members = zoo.load("tiny", members="1,4", source=ADDRESS)
    assert torch.equal(members.stack()["conv1.weight"][1], overlay.states[4, 40]["conv1.weight"])


def test_an_overlay_of_what_is_not_there(hub: Hub, overlay: Built) -> None:
    base = overlay.description["base"]
    path, end = overlay.rows[5]["path"], overlay.rows[5]["offset"] + overlay.rows[5]["nbytes"]
    for row in overlay.rows:
        if row["path"] == path:
            row["path"] = "shards/tiny/gone.safetensors"
    overlay.write()
    refused_both(
        hub, DamagedError, f"member 5 of tiny: expected its bytes up to {end:,} in file shards/tiny/gone.safetensors "
        f"of {base}; found no such file. …", overlay.root,
    )  # fmt: skip


def test_an_overlay_of_other_weights(hub: Hub, overlay: Built) -> None:
    overlay.rows[0]["sha256"] = "0" * 64
    overlay.write()
    refused(hub, DamagedError, "members of source ROOT: expected what their manifest says; found member 0 of tiny: …",
            overlay.root, sample=1)  # fmt: skip


# ---- the card ----
BY_HAND = "---\nlicense: mit\nconfigs:\n- config_name: tiny\n  data_files: manifests/tiny.parquet\n---\n# Mine\n"


def test_a_readme_written_by_hand_is_kept(hub: Hub, tiny: Built) -> None:
    (tiny.root / "README.md").write_text(BY_HAND + "![all](cards/mine.png)\n")
    (tiny.root / "cards").mkdir()
    for name in ("mine.png", "another.png"):
        (tiny.root / "cards" / name).write_bytes(b"\x89PNG")
    publish(tiny.root)
    assert hub.read(NEW, "README.md").decode() == BY_HAND + "![all](cards/mine.png)\n"
    assert [p for p in hub.files(NEW) if p.startswith("cards/")] == ["cards/mine.png"]
    assert publish(tiny.root).commits == 0
    (tiny.root / "README.md").unlink()
    refused(
        hub, UsageError, f"README.md of {ADDRESS}: expected none, or one that an earlier publication wrote; found one "
        "written by hand. To keep it, put it into ROOT (`hf download alice/new README.md --repo-type dataset "
        "--local-dir ROOT`); to have one made, delete it in the repo.", tiny.root,
    )  # fmt: skip
    hub.commit(NEW, {"README.md": None})
    publish(tiny.root)
    assert "checkpoints_zoo" in hub.read(NEW, "README.md").decode()


@pytest.mark.parametrize(
    "text",
    [
        "# Mine", "---\nlicense: mit\n---\n# Mine", BY_HAND.replace("tiny.parquet", "other.parquet"), "---\n: [\n---\n",
        BY_HAND.replace("config_name: tiny", "config_name: other"), "---\nconfigs: 5\n---\n# Mine", "---\n5\n---\n# M",
        "---\nconfigs:\n- tiny\n---\n# Mine",
    ],
)  # fmt: skip
def test_a_readme_written_by_hand_that_lacks_the_manifest(hub: Hub, tiny: Built, text: str) -> None:
    (tiny.root / "README.md").write_text(text)
    refused_both(
        hub, UsageError, "ROOT/README.md: expected YAML at its top whose `configs` name every manifest, since it was "
        "written by hand; found none for tiny…", tiny.root,
    )  # fmt: skip


@pytest.mark.parametrize(
    "files",
    ["manifests/tiny.parquet", ["manifests/tiny.parquet"], [{"split": "train", "path": "manifests/tiny.parquet"}]],
)
def test_the_forms_of_data_files(hub: Hub, tiny: Built, files: Any) -> None:
    configs = json.dumps({"configs": [{"config_name": "tiny", "data_files": files}]})
    (tiny.root / "README.md").write_text(f"---\n{configs}\n---\n# Mine\n")
    publish(tiny.root)
    assert consistent(hub) == 3


def test_a_readme_of_an_earlier_publication_is_made_anew(hub: Hub, tiny: Built) -> None:
    publish(tiny.root)
    (tiny.root / "README.md").write_bytes(hub.read(NEW, "README.md"))  # as after a download
    assert publish(tiny.root).commits == 0
    build(tiny.root, members=range(7), per_shard=3)
    assert publish(tiny.root).commits == 2
    assert "7 trained networks" in hub.read(NEW, "README.md").decode()


def test_a_readme_with_nothing_but_yaml_is_replaced(hub: Hub, tiny: Built) -> None:
    """As the Hub's page makes one with a new repo."""
    hub.commit(NEW, {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    publish(tiny.root)
    assert "checkpoints_zoo" in hub.read(NEW, "README.md").decode()


def test_a_readme_that_the_hub_refuses(hub: Hub, tiny: Built) -> None:
    hub.faults.append({"path": "/validate-yaml", "status": 400})
    with pytest.raises(
        (FormatError, UsageError, ZooError), match=r"README\.md for hf://.*: expected YAML that the Hub takes"
    ):
        publish(tiny.root)
    assert [c.title for c in commits(hub)] == ["Publish tiny: weights", "initial commit"]
    assert publish(tiny.root).commits == 1
