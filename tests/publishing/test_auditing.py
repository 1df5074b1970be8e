"""`zoo-cli audit`: what is wrong with a repo or a folder, by a few small reads, the same in both."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save

from checkpoints_zoo.publishing.auditing import Audit, audit
from tests.hub import READER, WRITER, Hub, noise
from tests.support.archives import head, local_tar, member, tar_header, virtual_tar
from tests.support.commands import process, run, values
from tests.support.refusals import HTML, PICKLE
from tests.support.remote import ADDRESS, REPO, published
from tests.support.scenarios import SCHEMA, Built, build, digest_of

Files = dict[str, bytes]
Place = Callable[[Files], str]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n"
GOOD = save({"a": torch.arange(300.0)})


@pytest.fixture(params=["folder", "hub"])
def place(request: pytest.FixtureRequest, hub: Hub, tmp_path: Path) -> Place:
    """Put files into a folder, or into a repo; return what it is called."""

    def put(files: Files) -> str:
        if request.param == "hub":
            hub.commit("alice/any", files)
            return "hf://datasets/alice/any"
        for path, content in files.items():
            (tmp_path / "any" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "any" / path).write_bytes(content)
        return str(tmp_path / "any")

    return put


def array(values: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, values, **options)
    return out.getvalue()


def found(about: Audit) -> list[tuple[str, str]]:
    return [(f.kind, f.path) for f in about.findings]


HEADER = struct.pack("<Q", 100) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}'.ljust(100) + bytes(9)
BAD: dict[str, tuple[bytes, str, str]] = {
    "a.pt": (PICKLE, "pickle", "a torch pickle in a zip archive, by its first bytes"),
    "b.safetensors": (PICKLE + b"\0", "pickle", "a torch pickle in a zip archive, by its first bytes"),
    "c.PKL": (pickle.dumps([1], 4), "pickle", "a Python pickle, by its first bytes"),
    "d/e.ckpt": (
        pickle.dumps([1], 0), "pickle",
        "a pickle, by its name; its first bytes are of no format that is known",
    ),
    "model.bin": (bytes(range(256)), "pickle", "a pickle, by its name; its first bytes are of no format that is known"),
    "e.npy": (array(np.array([{}], object)), "pickle", "a NumPy file of pickled objects, by its first bytes"),
    "f.safetensors": (HTML, "page", "a web page"),
    "g.pth": (POINTER, "pointer", "a Git LFS pointer, not the file it points to"),
    "data.json": (POINTER + b" ", "pointer", "a Git LFS pointer, not the file it points to"),
    "h.safetensors": (b"", "empty", "a file of 0 bytes"),
    "i.safetensors": (save({}), "empty", "a safetensors file without a tensor"),
    "j.safetensors": (
        GOOD[:40], "header", "expected a safetensors header within its 40 bytes; found a header length of 64"
    ),
    "k.safetensors": (
        HEADER, "header", "expected 8 bytes for F32 [2]; found offsets [0, 9]",
    ),
    "l.safetensors": (GOOD[:-1], "header", "expected offsets within the 1,199 bytes of tensors; found [0, 1200]"),
    "m.tgz": (b"no archive" * 100, "archive", "expected a tar, gzipped or not; found other bytes"),
    "n.tar": (
        local_tar([("../../x.safetensors", GOOD)]), "archive",
        "expected names that stay in its folder; found '../../x.safetensors'",
    ),
    "o.tar": (
        local_tar([("x/", b""), ("x/0.pt", PICKLE)]), "pickle",
        "its first file, 'x/0.pt', is a torch pickle in a zip archive, by its first bytes",
    ),
}  # fmt: skip
HARMLESS: Files = {
    "README.md": b"# Hello", "ok.safetensors": GOOD, "sub/ok.bin": save({"b": torch.ones(2)}), "index.html": HTML,
    "x.npy": array(np.ones(3)), "weights.gguf": b"GGUF" + bytes(40), "empty.txt": b"", "sub/empty.txt": b"",
    "z.zip": b"PK\x03\x04", "scripts/load.py": b"import torch\ntorch.load('a.pt')\n" * 5,
    ".gitattributes": b"*.pt filter=lfs\n" * 10,
}  # fmt: skip


def test_each_kind_is_found(place: Place) -> None:
    about = audit(place({path: content for path, (content, *_) in BAD.items()}))
    assert {f.path: (f.kind, f.text) for f in about.findings} == {p: (kind, text) for p, (_, kind, text) in BAD.items()}
    assert len(about.findings) == about.files == len(BAD)


def test_nothing_is_found_where_nothing_is_wrong(place: Place) -> None:
    about = audit(place(HARMLESS))
    assert (about.findings, about.notes) == ([], [])
    assert about.bytes == sum(map(len, HARMLESS.values()))


def test_one_content_under_several_names(place: Place) -> None:
    big = bytes(save({"w": torch.randn(50_000)}))
    near = big[:100_000] + b"\0" + big[100_001:]  # differs between two samples
    files = {"a/1.safetensors": big, "a/2.safetensors": big, "b.safetensors": near, "c.safetensors": GOOD}
    about = audit(place(files | {"x/LICENSE": b"Free", "y/LICENSE": b"Free"}))
    (one,) = [f for f in about.findings if f.kind == "duplicate" and f.path != "x/LICENSE"]
    assert (one.path, one.also) == ("a/1.safetensors", ("a/2.safetensors",))
    assert one.text == f"the same {len(big):,} bytes as a/2.safetensors"


def test_small_copies_in_git_are_a_note(hub: Hub) -> None:
    hub.commit("alice/any", {"x/config.json": b"{}", "y/config.json": b"{}"}, lfs=False)
    about = audit("hf://datasets/alice/any")
    assert about.findings == []
    assert [str(f) for f in about.notes] == ["x/config.json: duplicate: the same 2 bytes as y/config.json"]


def test_a_tar_called_tgz_is_a_note(place: Place) -> None:
    files = [("x/0.safetensors", GOOD)]
    archives = {"a.tgz": local_tar(files), "b.tar.gz": local_tar(files, mode="w:gz"), "c.tar": local_tar(files * 2)}
    about = audit(place(archives | {"d.tar": local_tar(files * 3, mode="w:gz"), "e.tar": tar_header("x", 0)}))
    assert about.findings == []
    assert [(f.kind, f.path, f.text) for f in about.notes] == [
        ("archive", "a.tgz", "a plain tar, not a gzipped one: members can be read one by one"),
        ("archive", "d.tar", "a gzipped tar: it can only be read as a whole"),
    ]


# ---- manifests ----
def put(built: Built, place: Place) -> str:
    return place({p.relative_to(built.root).as_posix(): p.read_bytes() for p in built.root.rglob("*.*") if p.is_file()})


def test_members_with_one_hash_but_for_draws_of_one_chain(place: Place, tmp_path: Path) -> None:
    built = build(tmp_path / "built", members=range(6))
    methods = [("hmc", 0), ("hmc", 0), ("hmc", 1), ("swag", 0), ("swag", 0), ("swag", 1)]
    for row, (method, run_of_it) in zip(built.rows, methods, strict=True):
        row |= {"method": method, "run": run_of_it, "sha256": built.rows[3 * (method == "swag")]["sha256"]}
    built.write(SCHEMA.append(pa.field("method", pa.string())).append(pa.field("run", pa.int32())))
    about = audit(put(built, place))
    assert [str(f) for f in about.findings] == [
        f"manifests/tiny.parquet: member: member {m}: expected weights of its own; found those of member {other}."
        for m, other in ((2, 0), (4, 3), (5, 3))
    ]


def test_rows_whose_bytes_are_not_there(place: Place, tmp_path: Path) -> None:
    built = build(tmp_path / "built", members=range(9), per_shard=3)
    shards = [str(built.rows[at]["path"]) for at in (0, 3, 6)]
    size, step = (built.root / shards[1]).stat().st_size, built.rows[0]["nbytes"]
    os.truncate(built.root / shards[1], size - 10)
    (built.root / shards[2]).unlink()
    built.rows[1]["offset"] -= 8
    built.rows[2]["sha256"] = None  # its place stands for it
    built.write()
    (built.root / "manifests" / "bad.parquet").write_bytes(b"PAR1")
    (built.root / "manifests" / "bad.json").write_text("{}")
    about = audit(put(built, place))
    first, second = built.rows[0]["offset"], built.rows[1]["offset"]
    texts = {(f.kind, f.path): f.text for f in about.findings}
    assert texts.pop(("manifest", "manifests/bad.parquet")).endswith("found {}.")
    assert texts.pop(("header", shards[1])).startswith("expected offsets within")
    assert texts == {
        ("missing", shards[2]): "no such file, named by the rows of "
        "member 6 of tiny, member 7 of tiny, member 8 of tiny",
        ("short", shards[1]): f"a file of {size - 10:,} bytes, too short for member 5 of tiny (to {size:,})",
        ("overlap", shards[0]): f"member 1 of tiny at {second:,} to {second + step:,} "
        f"and member 0 of tiny at {first:,} to {first + step:,}",
    }  # fmt: skip
    assert (about.collections, about.members) == (1, 9)


def test_a_pointer_where_a_manifest_should_be(place: Place, tmp_path: Path) -> None:
    built = build(tmp_path / "built")
    built.manifest.write_bytes(POINTER)
    about = audit(put(built, place))
    assert found(about) == [("manifest", "manifests/tiny.parquet"), ("pointer", "manifests/tiny.parquet")]


# ---- what it costs ----
@pytest.mark.slow
def test_a_sound_source_takes_two_requests_a_shard(hub: Hub) -> None:
    published(hub)
    about = values(run("audit", ADDRESS, "--format", "json"))
    assert (about["findings"], about["notes"], about["collections"], about["members"]) == ([], [], 1, 20)
    assert hub.log.requests("/shards/") == 2 * 2  # a HEAD and a range
    assert hub.log.bytes("/shards/") <= 2 * 2**16
    assert hub.log.leaks(WRITER) == []
    assert process("audit", ADDRESS).returncode == 0


@pytest.mark.slow
def test_an_upstream_like_repo(hub: Hub) -> None:
    files = [(f"x/version_{number}.safetensors", member(number)) for number in range(1024)]
    archive = virtual_tar(files)
    other = virtual_tar([(f"y/version_{number}.safetensors", member(number)) for number in range(1024, 2048)])
    folder = "models/cifar100-resnet18"
    hub.commit(REPO, {"README.md": b"# Checkpoints", "scripts/load.py": b"pass\n" * 30})
    hub.commit(
        REPO, {f"{folder}/a.tgz": archive, f"{folder}/b.tgz": other, f"{folder}/copy-of-a.tgz": archive}, lfs=True
    )
    result = run("audit", f"{ADDRESS}@main")
    assert result.exit_code == 1
    assert f"{folder}/a.tgz: duplicate: the same {archive.size:,} bytes as {folder}/copy-of-a.tgz" in result.stdout
    assert result.stdout.count("note: ") == 3
    assert hub.log.bytes() < 20_000
    assert len(head()[0]) < archive.size


def test_a_file_that_another_commit_removed_and_no_permission(hub: Hub) -> None:
    hub.commit("alice/any", {"a.safetensors": GOOD, "b.safetensors": GOOD * 2})
    hub.faults.add("resolve/.*/b.safetensors", status=404, code="EntryNotFound", times=9)
    assert [(f.kind, f.path) for f in audit("hf://datasets/alice/any").findings] == [("unreadable", "b.safetensors")]
    hub.create_repo("carol/secret", private=True)
    assert run("audit", "hf://datasets/carol/secret").exit_code == 3
    hub.faults.add("resolve/.*/a.safetensors", status=403, times=9)
    assert run("audit", "hf://datasets/alice/any").exit_code == 3
    assert READER not in run("audit", "hf://datasets/alice/any").output


# ---- the command, and odd places ----
def test_the_command(tmp_path: Path) -> None:
    for at in range(25):
        (tmp_path / f"{at:02d}.pt").write_bytes(PICKLE + bytes([at]))
    before = digest_of(tmp_path)
    result = run("audit", tmp_path)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "00.pt: pickle: a torch pickle in a zip archive, by its first bytes" in lines
    assert lines[-1] == "5 more: pickle (--format json lists all)"
    assert len(json.loads(run("audit", tmp_path, "--format", "json").stdout)["findings"]) == 25
    assert digest_of(tmp_path) == before
    assert run("audit", tmp_path / "none").exit_code == 3
    assert "expected a folder, or an address on the Hub; found nothing there" in run("audit", tmp_path / "none").stderr


def test_links_pipes_and_the_clients_cache(hub: Hub, tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "datasets--alice--zoo"  # as the client lays it out
    blobs, snapshot = cached / "blobs", cached / "snapshots" / "main"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "abc").write_bytes(GOOD)
    for name in ("a.safetensors", "b.safetensors"):
        (snapshot / name).symlink_to(blobs / "abc")
    (snapshot / "gone.safetensors").symlink_to(blobs / "none")
    (tmp_path / "secret.pt").write_bytes(PICKLE)
    (snapshot / "out.pt").symlink_to(tmp_path / "secret.pt")  # leads out: not read
    os.mkfifo(snapshot / "pipe.pt")
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "x.pt").write_bytes(PICKLE)
    assert found(audit(snapshot)) == [("duplicate", "a.safetensors"), ("empty", "gone.safetensors")]


def test_a_tar_that_is_cut_or_odd_raises_nothing(tmp_path: Path) -> None:
    whole = local_tar([("x" * 150 + ".safetensors", GOOD)], format=tarfile.GNU_FORMAT)
    for cut in (511, 512, 700, 1500, 2000):
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        for finding in audit(tmp_path).findings:
            assert finding.kind == "archive"
    for seed in range(20):
        content = noise(seed, 3000).read(0, 3000)
        for name in ("a.safetensors", "a.tar", "a.pt", "a"):
            (tmp_path / name).write_bytes(content)
        audit(tmp_path)
