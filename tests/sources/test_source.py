"""Sources: folders that are pinned by what their manifests say, and never lead out of themselves."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import CollectionNotFound, DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.folder_source import EMBEDDED, FolderSource
from tests.formats.test_source_paths import ODD, OUT, UNTIDY
from tests.support.commands import run
from tests.support.scenarios import build, digest_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_in_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "a b")
    wanted = FolderSource(built.root, built.root.as_uri())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    forms = (built.root, str(built.root), "a b", "./a b/", "~/a b", built.root.as_uri(), f"{built.root}/")
    for source in forms:
        place = open_source(source, "tiny")
        assert (place.root.resolve(), place.label) == (wanted.root, wanted.label)
        assert place.collections() == ["tiny"]
    assert zoo.load("tiny", source="a b").citation == zoo.load("tiny", source=built.root).citation


def test_the_embedded_source_is_not_a_path() -> None:
    place = open_source(EMBEDDED, "convnet-digits")
    assert place.label == "embedded"
    assert place.root == ROOT / "checkpoints_zoo" / "embedded"


def test_commit_is_the_hash_of_what_the_source_says(tmp_path: Path) -> None:
    built = build(tmp_path)
    place = open_source(tmp_path, "tiny")
    both = [hashlib.sha256(p.read_bytes()).digest() for p in (built.manifest, built.json)]
    assert place.commit("tiny") == hashlib.sha256(b"".join(both)).hexdigest()[:40]
    before = place.commit("tiny")
    built.description["title"] = "Another"
    built.write()
    assert place.commit("tiny") != before


def test_reading_writes_nothing(tmp_path: Path) -> None:
    built = build(tmp_path)
    before = digest_of(tmp_path)
    members = zoo.load("tiny", source=tmp_path)
    assert len(members.ensemble()) == len(built.rows)
    assert list(members.batches(3))
    assert digest_of(tmp_path) == before


def same_stamp(path: Path, content: bytes) -> None:
    """Replace a file's bytes in place, its size and time of modification as before."""
    before = path.stat()
    assert len(content) == before.st_size
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_files_replaced_in_place_are_read_again(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert zoo.load("tiny", source=tmp_path).description.title == "Tiny"
    same_stamp(built.json, built.json.read_bytes().replace(b'"Tiny"', b'"Gone"'))
    assert zoo.load("tiny", source=tmp_path).description.title == "Gone"
    members = zoo.load("tiny", source=tmp_path)
    assert len(members.stack()["conv1.weight"]) == 4
    same_stamp(built.shard, built.shard.read_bytes().replace(b"000001/conv1.bias", b"000009/conv1.bias"))
    with pytest.raises(
        DamagedError, match=r"expected tensor '000001/conv1.bias', F32 \[8\] at .* found no such tensor"
    ):
        members.stack()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda p: None, "nothing there"),
        (lambda p: p.write_bytes(b""), "a file"),
        (lambda p: p.mkdir(), "a folder without manifests/"),
        (lambda p: (p / "shards").mkdir(parents=True), "a folder without manifests/"),
        (lambda p: (p.mkdir(), (p / "manifests").write_bytes(b"")), "a folder without manifests/"),
    ],
)
def test_a_source_that_is_none(tmp_path: Path, make: object, found: str) -> None:
    make(tmp_path / "x")  # type: ignore[operator]
    before = digest_of(tmp_path)
    with pytest.raises(SourceNotFound) as caught:
        zoo.load("tiny", source=tmp_path / "x")
    assert str(caught.value) == (
        f"source {tmp_path / 'x'}: expected a folder with manifests/NAME.parquet in it; found {found}."
        " Give the folder that holds manifests/ and shards/."
    )
    assert digest_of(tmp_path) == before


def test_a_folder_in_place_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    hint = "found no such name. out/ is a folder with tiny: zoo.load('tiny', source='out/'), or --source out/ tiny."
    with pytest.raises(CollectionNotFound) as caught:
        zoo.load("out/")
    assert str(caught.value).endswith(hint)
    assert hint in run("show", "out/").stderr
    with pytest.raises(CollectionNotFound, match="`zoo-cli list` shows the catalog"):
        zoo.load("empty")


def test_the_name_of_a_repo_in_place_of_its_address() -> None:
    with pytest.raises(SourceNotFound, match=r"and shards/, or for a repo of the Hub hf://datasets/me/no-such\.$"):
        zoo.load("tiny", source="me/no-such")


@pytest.mark.parametrize("source", ["~nobody-of-that-name/x", "x" * 5000, "\0", "file:///none", "file:///a\ud800", 5])
def test_sources_that_cannot_be(source: str) -> None:
    with pytest.raises(
        SourceNotFound, match=r"^source .*: expected a folder with manifests/NAME.parquet in it; found "
    ):
        zoo.load("tiny", source=source)


@pytest.mark.parametrize("source", ["file://folder", "s3://x"])
def test_addresses(source: str) -> None:
    with pytest.raises(SourceNotFound) as caught:
        zoo.load("tiny", source=source)
    places = "a folder, hf://datasets/ORG/NAME[@REVISION], https://HOST/PATH or gs://BUCKET/PATH"
    assert str(caught.value) == f"source {source}: expected {places}; found another address."


def test_a_collection_that_the_source_lacks(tmp_path: Path) -> None:
    build(tmp_path, members=[0])
    build(tmp_path, members=[0], name="other")
    for name, do in (("tinny", "Did you mean tiny?"), ("zzz", "`zoo-cli list` shows the catalog.")):
        with pytest.raises(CollectionNotFound) as caught:
            zoo.load(name, source=tmp_path)
        assert str(caught.value) == (
            f"collection {name!r}: expected a name in source {tmp_path.as_uri()} (other, tiny); found no such name."
            f" {do}"
        )
    (tmp_path / "empty" / "manifests").mkdir(parents=True)
    with pytest.raises(CollectionNotFound, match=r"\(which has none\); found no such name\."):
        zoo.load("tiny", source=tmp_path / "empty")


def test_a_description_that_is_missing(tmp_path: Path) -> None:
    built = build(tmp_path)
    built.json.unlink()
    with pytest.raises(SourceNotFound) as caught:
        zoo.load("tiny", source=tmp_path)
    assert str(caught.value) == (
        f"source {tmp_path.as_uri()}: expected manifests/tiny.json beside the manifest; found no such file."
    )


def test_a_manifest_under_another_name(tmp_path: Path) -> None:
    built = build(tmp_path)
    for path in (built.manifest, built.json):
        path.rename(path.with_stem("mine"))
    with pytest.raises(FormatError) as caught:
        zoo.load("mine", source=tmp_path)
    path = built.json.with_stem("mine")
    assert str(caught.value) == f"description {path}: expected the name 'mine', as in the file's name; found 'tiny'."


@pytest.mark.parametrize("inside", [*OUT, *ODD, *UNTIDY])
def test_a_file_never_lies_outside(tmp_path: Path, inside: str) -> None:
    with pytest.raises(
        DamagedError, match=r"^path .* in a manifest of LABEL: expected a file inside the source; found "
    ):
        FolderSource(tmp_path, "LABEL").local_path(inside)


def test_links(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "shards").mkdir(parents=True)
    (root / "real").write_bytes(b"x")
    for name, target in {
        "in": "../real",
        "out": "../../outside",
        "abs": "/etc/passwd",
        "circle": "circle",
        "gone": "nothing",
    }.items():
        (root / "shards" / name).symlink_to(target)
    (root / "up").symlink_to("..")
    source = FolderSource(root, "LABEL")
    assert source.local_path("shards/in").read_bytes() == b"x"
    for inside, target in {
        "shards/out": tmp_path / "outside",
        "shards/abs": "/etc/passwd",
        "up/outside": tmp_path / "outside",
    }.items():
        with pytest.raises(DamagedError) as caught:
            source.local_path(inside)
        assert str(caught.value) == (
            f"path {inside!r} in a manifest of LABEL: expected a file inside the source; found a link to {target}."
        )
    for inside in ("shards/circle", "shards/gone", "shards", "shards/none", "x" * 255, "real/x"):
        with pytest.raises(
            SourceNotFound,
            match=rf"^file {inside} of source LABEL: expected a file, since the manifest names it; found ",
        ):
            source.local_path(inside)


def test_a_source_that_is_reached_through_a_link(tmp_path: Path) -> None:
    build(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert len(zoo.load("tiny", source=tmp_path / "link").stack()["fc1.bias"]) == 4


IMPORT = "import checkpoints_zoo.sources.finding, sys; print(sorted({'torch', 'pandas'} & set(sys.modules)))"


@pytest.mark.slow
def test_importing_it_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_commit_in_the_hub_clients_cache_is_a_source_though_its_files_are_links(tmp_path: Path) -> None:
    built = build(tmp_path / "made")
    snapshot = tmp_path / "hub" / "datasets--me--zoo" / "snapshots" / ("0" * 40)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(p for p in sorted(built.root.rglob("*")) if p.is_file()):
        link = snapshot / path.relative_to(built.root)
        link.parent.mkdir(parents=True, exist_ok=True)
        (blobs / str(number)).write_bytes(path.read_bytes())
        link.symlink_to(blobs / str(number))
    members = zoo.load(built.name, source=snapshot)
    assert len(members.stack()) > 0
