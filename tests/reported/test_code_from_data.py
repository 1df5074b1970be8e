"""No string of a source is run: a file runs because a person typed its path."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound, UsageError
from checkpoints_zoo.training.retrain import retrain
from tests.fuzz import ARCHIVE, make_archive
from tests.hub import Hub
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import build

HOSTILE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise SystemExit("the file of a manifest ran")
"""


@pytest.mark.parametrize("form", ["{name}.py", "./{name}.py", "{path}", "{path}:recipe", "{name}", "{name} lr=0.1"])
def test_the_recipe_of_a_row_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    built = build(tmp_path / "source")
    for row in built.rows:
        row["recipe"] = form.format(name="hostile", path=tmp_path / "hostile.py")
    built.write()
    with pytest.raises(UsageError, match="expected one of the package's in its rows"):
        retrain(zoo.load("tiny", source=tmp_path / "source"), count=1)
    assert not (tmp_path / "ran").exists()
    assert "hostile" not in sys.modules


@pytest.mark.parametrize("part", ["manifests/tiny.json", "shards/"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ETag", '"../../../x/pwn"'), ("X-Linked-ETag", '"../../../x/pwn"'), ("ETag", 'W/"/tmp/pwn"'), ("ETag", '".."'),
        ("ETag", '"' + "e" * 300 + '"'), ("ETag", '"a\\\\b"'), ("X-Repo-Commit", "../../../../pwn"),
        ("X-Repo-Commit", "x" * 300),
    ],
)  # fmt: skip
def test_headers_that_become_names(hub: Hub, tmp_path: Path, part: str, name: str, value: str) -> None:
    """Case 2: the client locks, stores and links files under an answer's ETag and commit."""
    published(hub)
    hub.faults.add(part, headers={name: value}, times=math.inf)
    with pytest.raises(DamagedError, match=rf"^answer from .*: expected {name} with .*; found "):
        zoo.load("tiny", members="0-19", source=ADDRESS).stack()
    names = [path.name for path in tmp_path.rglob("*")]
    assert not [x for x in names if "pwn" in x or "e" * 100 in x or "x" * 100 in x]


@pytest.mark.parametrize("revision", ["%2e%2e", "..", "a/../../b", "%2e%2e%2fx", "x" * 300, "a%00b"])
def test_revisions_that_lead_out_of_the_cache(hub: Hub, tmp_path: Path, revision: str) -> None:
    """Case 3: refused before a request is made."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises(SourceNotFound, match=r"^source hf://datasets/"):
        zoo.load("tiny", source=f"{ADDRESS}@{revision}")
    assert set(tmp_path.rglob("*")) == before
    assert not hub.log


@pytest.mark.parametrize("path", ["a/" + "x" * 300, "../x", "a/" * 2_000 + "x", "é" * 128 + ".safetensors"])
def test_paths_that_a_file_system_does_not_take(tmp_path: Path, path: str) -> None:
    """Case 2: components of 300 characters were a raw OSError; so were long paths."""
    built = build(tmp_path, members=range(2))
    for row in built.rows:
        row["path"] = path
    built.write()
    with pytest.raises(
        (DamagedError, FormatError), match=r"which (is longer than a file system takes|leads out of it)"
    ):
        zoo.load(built.name, source=built.root).stack()


def test_an_archive_that_is_a_link_out_of_the_source(tmp_path: Path) -> None:
    """Case 3: as shards that are such links."""
    archive = make_archive(tmp_path / "elsewhere")
    folder = tmp_path / "source" / "models" / archive.parent.name
    folder.mkdir(parents=True)
    (folder / archive.name).symlink_to(archive)
    with pytest.raises(DamagedError, match="expected a file inside the source; found a link to"):
        zoo.load(ARCHIVE, source=tmp_path / "source", n=1)
