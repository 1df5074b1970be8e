"""What comes from a source is data: nothing of it is run, leaves its folder, or is believed before memory is spent."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, FormatError, SelectionError, UsageError, ZooError
from checkpoints_zoo.formats import limits, manifest
from checkpoints_zoo.sources import archive_source, fetching
from checkpoints_zoo.sources.archives import indexing
from tests.hub import WRITER, Hub, filled
from tests.support.archives import local_tar
from tests.support.commands import ROOT, process, run
from tests.support.logs import logged
from tests.support.remote import ADDRESS, REPO, published
from tests.support.scenarios import SCHEMA, Built, build, digest_of


@pytest.fixture(autouse=True)
def as_a_new_process() -> None:
    for known in (indexing._indexes, archive_source._archived_collections, fetching._remote_files):
        known.clear()


# ---- nothing is unpickled, nothing is run ----
class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def bombs(mark: Path) -> dict[str, bytes]:
    """Pickles in all the forms that a reader of weights might open."""
    plain, out, array = pickle.dumps(Bomb(mark)), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/data.pkl", plain)
        file.writestr("archive/version", "3")
    np.save(array, np.array([Bomb(mark)], object), allow_pickle=True)
    return {"plain": plain, "torch": out.getvalue(), "numpy": array.getvalue(), "text": pickle.dumps(Bomb(mark), 0)}


def test_the_bombs_go_off(tmp_path: Path) -> None:
    pickle.loads(bombs(tmp_path / "mark")["plain"])  # noqa: S301 - a bomb of our own
    assert (tmp_path / "mark").exists()


def attacked(root: Path, content: bytes) -> None:
    """Write a source with a pickle in place of each of its files, and one under every name that readers look for."""
    for name, where in (("shard", "shard"), ("table", "manifest"), ("words", "json")):
        built = build(root, name=name, members=range(2))
        getattr(built, where).write_bytes(content)
    folder = root / "models" / "mnist-optunet"
    folder.mkdir(parents=True)
    (folder / "mnist-optunet-0-8191.tgz").write_bytes(local_tar([("x/version_0.safetensors", content)]))
    for inside in ("a.pt", "b.pth", "c.ckpt", "pytorch_model.bin", "d.pkl", "e.safetensors", "x/data.npy"):
        (root / inside).parent.mkdir(exist_ok=True)
        (root / inside).write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "torch", "numpy", "text"])
def test_a_source_full_of_pickles(kind: str, hub: Hub, tmp_path: Path) -> None:
    root, mark = tmp_path / "source", tmp_path / "mark"
    attacked(root, bombs(mark)[kind])
    hub.commit(REPO, {p.relative_to(root).as_posix(): p for p in root.rglob("*.*") if p.is_file()})
    for source in (str(root), ADDRESS):
        assert run("audit", source).exit_code == 1
        assert run("verify", source).exit_code == 1
        run("list", "--source", source)
        for name in ("shard", "table", "words", "optunet-mnist"):
            for command in (["show"], ["download"], ["download", "--dest", str(tmp_path / "copy")], ["verify"]):
                result = run(command[0], name, "--source", source, *command[1:])
                fine = (command[0], name) == ("show", "shard") or (command == ["download"] and name == "shard")
                assert result.exit_code in ((0, 4) if fine else (1, 3, 4)), (command, name, result.output)
            for use in (lambda members: members.stack(), lambda members: members.ensemble(), lambda m: m[0].model()):
                with pytest.raises(ZooError):
                    use(zoo.load(name, source=source))
    assert not mark.exists()


FORBIDDEN = {"cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "subprocess", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"read_pickle", "extractall", "extract", "unpack_archive", "system", "popen", "unsafe_load"}
WORKERS = ROOT / "checkpoints_zoo" / "workers"
PACKAGE = [p for folder in ("checkpoints_zoo", "training") for p in sorted((ROOT / folder).rglob("*.py"))]


def breaches(tree: ast.AST) -> Iterator[str]:
    """Yield what a file does that could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {n}" for n in names if n.partition(".")[0] in FORBIDDEN)
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                yield "imports from pickle"
        used = node.value if isinstance(node, ast.Attribute) else None
        # The one name of it that is no danger is what torch raises when it refuses to run a pickle.
        if isinstance(used, ast.Name) and used.id == "pickle" and getattr(node, "attr", "") != "UnpicklingError":
            yield f"uses pickle.{getattr(node, 'attr', '')}"
        if not isinstance(node, ast.Call):
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        module = owner.id if isinstance(owner, ast.Name) else ""
        options = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if called in (BUILTINS if owner is None else METHODS):
            yield f"calls {called}"
        if (module, called) == ("torch", "load") and options.get("weights_only") is not True:
            yield "calls torch.load without weights_only=True"
        if options.get("allow_pickle") or options.get("trust_remote_code"):
            yield f"calls {called} with allow_pickle or trust_remote_code"
        if (module, called) == ("yaml", "load"):
            yield "calls yaml.load"


@pytest.mark.slow
def test_no_code_of_ours_runs_what_it_reads() -> None:
    found = [(p, b) for p in PACKAGE for b in breaches(ast.parse(p.read_text(encoding="utf-8")))]
    # Jobs and results go between a process and the workers that it started, through pipes and Ray; no file is read.
    assert [(p.name, b) for p, b in found if not (p.parent == WORKERS and b.startswith("uses pickle."))] == []
    assert len(PACKAGE) > 50


def test_what_engines_unpickle_is_no_file() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in WORKERS.glob("*.py")]
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)]
    assert len(calls) > 50
    # The main script is parsed, to see whether a worker can import it.
    parsed = {id(argument) for n in calls if ast.unparse(n.func) == "ast.parse" for argument in n.args}
    called = {n.func.attr for n in calls if isinstance(n.func, ast.Attribute) and id(n) not in parsed}
    assert not called & {"load", "open", "read", "read_bytes", "read_text", "Unpickler", "Listener", "Client"}


@pytest.mark.parametrize(
    "code",
    ["import pickle\npickle.load(f)", "from pickle import loads", "from torch import x\nimport dill.y",
     "torch.load(p)", "torch.load(p, weights_only=False)",
     "np.load(p, allow_pickle=True)", "eval(text)", "tar.extractall(p)", "yaml.load(x)", "pd.read_pickle(p)"],
)  # fmt: skip
def test_that_check_can_fail(code: str) -> None:
    assert list(breaches(ast.parse(code)))


@pytest.mark.parametrize("name", ["os.system", "__import__('os')", "../convnet", "torch.hub"])
def test_an_architecture_is_a_name_and_no_code(name: str, tmp_path: Path) -> None:
    built = build(tmp_path)
    built.description["architecture"] = name
    built.write()
    with pytest.raises(UsageError, match="architecture"):
        zoo.load("tiny", source=tmp_path)[0].model()
    built.description |= {"architecture": "convnet", "arguments": {"classes": 10, "__class__": "x"}}
    built.write()
    with pytest.raises(ZooError):
        zoo.load("tiny", source=tmp_path)[0].model()


# ---- where, citations and descriptions are data ----
@pytest.mark.parametrize(
    "where",
    ["member IN (SELECT 1)", "read_text('/etc/passwd') = 'x'", "member = 1; ATTACH 'x'", "getenv('HF_TOKEN') = 'x'",
     "current_setting('x') = 'y'", "member = (COPY x TO 'y')", "1 = 1 UNION SELECT * FROM glob('*')"],
)  # fmt: skip
def test_a_condition_is_no_program(where: str, tmp_path: Path) -> None:
    build(tmp_path / "source")
    before = digest_of(tmp_path)
    with pytest.raises(SelectionError):
        zoo.load("tiny", source=tmp_path / "source", where=where)
    assert digest_of(tmp_path) == before


@pytest.mark.parametrize("name", ["../tiny", "/etc/passwd", "a/../../b", "tiny\0", "..", "tiny/../tiny", "~root"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(UsageError, match="expected lower-case letters, digits"):
        zoo.load(name, source=tmp_path)


def test_text_of_a_source_is_printed_as_it_is(tmp_path: Path) -> None:
    built = build(tmp_path)
    text = "{0.__class__} %s $(touch x) \x1b]0;title\x07 \x1b[2J"
    built.description |= {"title": text, "citation": text, "licence": text}
    built.write()
    result = run("show", "tiny", "--source", tmp_path)
    assert result.exit_code == 0
    assert "{0.__class__} %s $(touch x) \\x1b]0;title\\x07 \\x1b[2J" in result.stdout
    assert "\x1b" not in result.output + run("list", "--source", tmp_path).output


# ---- nothing leaves its folder ----
OUTSIDE = [
    "../secret",
    "shards/../../secret",
    "/etc/passwd",
    "shards\\..\\secret",
    "C:/secret",
    "... /secret",
    "shards/./x",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_of_a_manifest_stays_inside(path: str, hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    (tmp_path / "secret").write_bytes(built.shard.read_bytes())
    for row in built.rows:
        row["path"] = path
    built.write()
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()})
    for source in (str(built.root), ADDRESS):
        hub.log.clear()
        with pytest.raises(DamagedError, match="expected a path inside the source"):
            zoo.load("tiny", source=source)
        for command in (["verify", "tiny"], ["download", "tiny", "--dest", str(tmp_path / "copy")]):
            assert run(*command, "--source", source).exit_code in (1, 4)
        assert run("audit", source).exit_code == 1
        assert not hub.log.requests("secret|passwd")
    assert not (tmp_path / "copy").exists()


def test_a_link_in_a_folder_stays_inside(tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    (tmp_path / "secret").write_bytes(built.shard.read_bytes())
    built.shard.unlink()
    built.shard.symlink_to(tmp_path / "secret")
    members = zoo.load("tiny", source=built.root)
    for use in (members.stack, lambda: members.download(tmp_path / "copy")):
        with pytest.raises(DamagedError, match="expected a file inside the source; found a link to"):
            use()


def evil_tar(victim: Path) -> bytes:
    """Write an archive whose names and links lead out of any folder it might be unpacked in."""

    def change(made: tarfile.TarInfo) -> None:
        if made.name.startswith("link"):
            made.type, made.linkname = tarfile.SYMTYPE, str(victim)

    content = (ROOT / "checkpoints_zoo" / "embedded" / "manifests" / "convnet-digits.json").read_bytes()
    names = ["../../evil", str(victim), "link", "link/evil", "x/../../../evil", "version_0.safetensors"]
    return local_tar([(name, b"" if name == "link" else content) for name in names], change=change)


def test_names_in_an_archive_are_no_paths(hub: Hub, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    inside = "models/mnist-optunet/mnist-optunet-0-8191.tgz"
    path = tmp_path / "source" / inside
    path.parent.mkdir(parents=True)
    path.write_bytes(evil_tar(victim))
    hub.commit("alice/evil", {inside: path}, lfs=True)
    before = {p for p in tmp_path.rglob("*") if "hf-home" not in p.parts}
    for source in (str(tmp_path / "source"), "hf://datasets/alice/evil"):
        assert run("audit", source).exit_code == 1
        for command in (["show"], ["verify"], ["download", "--dest", str(tmp_path / "source" / "copy")]):
            assert run(command[0], "optunet-mnist", "--source", source, *command[1:]).exit_code in (1, 3, 4)
    assert victim.read_text() == "untouched"
    assert {p for p in tmp_path.rglob("*") if "hf-home" not in p.parts} == before
    assert not list((tmp_path / "hf-home").rglob("*evil*.safetensors"))


# ---- the token ----
@pytest.mark.slow
def test_a_token_is_never_logged_and_goes_to_the_hub_alone(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    published(hub)
    hub.faults.add("/_cdn/", status=503, times=1)
    with logged(logging.DEBUG) as records:
        copying = ["download", "tiny", "-n", "3", "--source", ADDRESS, "--dest", str(tmp_path / "copy")]
        for command in (["audit", ADDRESS], ["verify", ADDRESS, "--sample", "0"], copying):
            result = run(*command)
            assert result.exit_code == 0, result.output
            assert WRITER not in result.output
        for fault in ({"status": 403}, {"status": 401}, {"status": 404}, {"body": b"<html>"}):
            hub.faults.clear()
            hub.faults.append({"path": "/revision/", "times": math.inf, **fault})
            assert WRITER not in run("download", "tiny", "--source", ADDRESS).output
        hub.faults.clear()
        hub.faults.add("/resolve/.*README", redirect=True, times=9)
        run("audit", ADDRESS)
    assert hub.log.with_token(WRITER)
    assert hub.log.leaks(WRITER) == []
    assert records
    assert not any(WRITER in record.getMessage() for record in records)
    assert WRITER not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_process_that_says_all_it_can_says_no_token(hub: Hub, tmp_path: Path) -> None:
    published(hub)
    verbose = {"HF_DEBUG": "1", "HF_HUB_VERBOSITY": "debug", "HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    arguments = ["download", "tiny", "-n", "3", "--source", ADDRESS, "--dest", tmp_path]
    done = process(*arguments, environment={**verbose, "HF_ENDPOINT": hub.url})
    assert done.returncode == 0, done.stderr
    assert WRITER not in done.stdout + done.stderr
    assert hub.log.leaks(WRITER) == []


# ---- sizes are checked before they are believed ----
def peak_of(use: Any, error: type[Exception], text: str | None = None) -> int:
    """Check that something is refused; return the most memory that Python held meanwhile."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=text):
            use()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("suffix", "most"), [(".json", 64 * 2**20), (".parquet", 2**30)])
def test_a_huge_file_is_refused_unread(suffix: str, most: int, tmp_path: Path) -> None:
    built = build(tmp_path)
    os.truncate(built.manifest.with_suffix(suffix), most + 1)  # takes no disk
    text = rf"tiny{suffix}: expected at most {most:,} bytes; found {most + 1:,}. No collection needs that much"
    assert peak_of(lambda: zoo.load("tiny", source=tmp_path), FormatError, text) < 2**20


@pytest.mark.parametrize(("suffix", "most"), [(".json", 64 * 2**20), (".parquet", 2**30)])
def test_a_huge_file_is_not_fetched(suffix: str, most: int, hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()})
    hub.commit(REPO, {f"manifests/tiny{suffix}": filled(most + 1)})
    text = rf"file manifests/tiny{suffix} of {ADDRESS}: expected at most {most:,} bytes; found {most + 1:,}\."
    peak_of(lambda: zoo.load("tiny", source=ADDRESS), FormatError, text)
    assert hub.log.bytes(f"tiny{suffix}") < 20 * 2**20  # what the server had in flight
    assert not list((tmp_path / "hf-home").rglob("*.incomplete"))
    assert run("list", "--source", ADDRESS).exit_code == 4


def test_a_file_that_turns_out_larger_than_announced(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "source")
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()})
    monkeypatch.setitem(limits.LARGEST_FILE_NBYTES, ".json", 4000)
    hub.faults.add("tiny.json", method="GET", body=b" " * 10**6, times=9, headers={"content-length": None})
    with pytest.raises(FormatError, match="expected at most 4,000 bytes"):
        zoo.load("tiny", source=ADDRESS)


def test_a_huge_file_is_not_fetched_from_xet(hub_xet: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    built = build(tmp_path / "source")
    api = HfApi(endpoint=hub_xet.url, token=WRITER)
    api.create_repo(REPO, repo_type="dataset")
    api.upload_folder(repo_id=REPO, repo_type="dataset", folder_path=built.root)
    assert hub_xet.files(REPO)["manifests/tiny.parquet"].xet
    monkeypatch.setitem(limits.LARGEST_FILE_NBYTES, ".parquet", 1000)
    with pytest.raises(FormatError, match=r"file manifests/tiny.parquet of .*: expected at most 1,000 bytes"):
        zoo.load("tiny", source=ADDRESS)


def test_more_rows_than_any_manifest_has(tmp_path: Path) -> None:
    built = build(tmp_path)
    column = pa.nulls(2**24 + 1, pa.int32())
    with built.manifest.open("wb") as file:
        pq.write_table(pa.table({"member": column}).replace_schema_metadata({"schema_version": b"1"}), file)
    assert built.manifest.stat().st_size < 50_000
    text = r"tiny.parquet: expected at most 16,777,216 rows; found 16,777,217\."
    assert peak_of(lambda: manifest.read_manifest(built.manifest), FormatError, text) < 2**20


def test_columns_that_unpack_to_more_than_any_manifest_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path)
    text = "x" * 2**20
    for row in built.rows:
        row["reason"] = text
    built.write()
    monkeypatch.setattr(manifest, "LARGEST_UNPACKED_NBYTES", 10**6)
    with pytest.raises(
        FormatError, match=r"expected columns of at most 1,000,000 bytes, unpacked; found 1,.*its footer"
    ):
        manifest.read_manifest(built.manifest)


def test_one_text_that_fills_all_rows(tmp_path: Path) -> None:
    """A dictionary holds a text of a megabyte once, and eight thousand rows that are it: eight gigabytes."""
    built = build(tmp_path)
    first = {**built.rows[0], "reason": "x" * 2**20}
    count = 2**13
    columns = {}
    for f in SCHEMA:
        if f.name == "reason":
            indices = pa.array(np.zeros(count, np.int32))
            columns[f.name] = pa.DictionaryArray.from_arrays(indices, pa.array([first["reason"]]))
        else:
            columns[f.name] = pa.array([first.get(f.name)] * count, f.type)
    with built.manifest.open("wb") as file:
        pq.write_table(pa.table(columns).replace_schema_metadata({"schema_version": b"1"}), file, compression="zstd")
    assert built.manifest.stat().st_size < 200_000
    before = pa.total_allocated_bytes()
    with pytest.raises(FormatError, match=r"expected columns of at most 4,294,967,296 bytes, unpacked; found 8,589"):
        manifest.read_manifest(built.manifest)
    assert pa.default_memory_pool().max_memory() - before < 2**30


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"title": "x" * (2**20 + 1)}, "at most 1,048,576 characters; found 1,048,577"),
        ({"classes": [0] * (2**20 + 1)}, "at most 1,048,576 values in a list; found 1,048,577"),
        ({"extra": {"deep": [["y" * 2**21]]}}, "at most 1,048,576 characters; found 2,097,152"),
        ({"k" * 2**21: 1}, "at most 1,048,576 characters; found 2,097,152"),
    ],
)
def test_texts_and_lists_of_absurd_length(values: dict[str, Any], found: str, tmp_path: Path) -> None:
    built = build(tmp_path)
    built.description |= values
    built.write()
    with pytest.raises(FormatError, match=f"description .*tiny.json: expected {found}"):
        zoo.load("tiny", source=tmp_path)


@pytest.mark.parametrize("field", ["nbytes", "offset"])
def test_a_member_larger_than_its_file_takes_no_memory(field: str, hub: Hub, tmp_path: Path) -> None:
    built = build(tmp_path / "source")
    if field == "nbytes":
        built.description["layouts"]["only"] = {"tensors": [["w", "F32", [2**40]]], "counters": [], "pad": 0}
    for row in built.rows:
        row[field] = 2**42
    built.write()
    hub.commit(REPO, {p.relative_to(built.root).as_posix(): p for p in built.root.rglob("*.*") if p.is_file()})
    for source in (str(built.root), ADDRESS):
        for use in (
            lambda s: zoo.load("tiny", source=s).stack(),
            lambda s: zoo.load("tiny", source=s).download(tmp_path / "x"),
        ):
            assert peak_of(lambda use=use, source=source: use(source), ZooError) < 2**24
        assert run("verify", "tiny", "--source", source, "--sample", "0").exit_code == 1
        assert run("audit", source).exit_code == 1
    assert not list((tmp_path / "x").rglob("*.safetensors"))


def test_a_header_longer_than_its_file_takes_no_memory(tmp_path: Path) -> None:
    built = build(tmp_path)
    content = built.shard.read_bytes()
    built.shard.write_bytes(struct.pack("<Q", 90_000_000) + content[8:])
    text = "expected a safetensors header within its [0-9,]+ bytes; found a header length of 90,000,000"
    assert peak_of(lambda: zoo.load("tiny", source=tmp_path).stack(), DamagedError, text) < 2**24


def test_ordinary_manifests_are_far_from_all_of_it(tmp_path: Path) -> None:
    built: Built = build(tmp_path, members=range(3))
    built.rows = [{**built.rows[0], "member": m} for m in range(20_000)]
    built.write()
    assert manifest.read_manifest(built.manifest).num_rows == 20_000
    assert json.loads(built.json.read_bytes())["name"] == "tiny"
