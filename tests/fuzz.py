"""Mutated files and hostile strings against the package: `python -m tests.fuzz --files 1000 --strings 1000` reports.

A case is one damaged file, or one string in a place where a source or a user may put one. It passes if the package
raises one of its own errors or gives a right result, if it writes, runs and connects to nothing outside the case's
folder, and if memory stays below twice the input plus 256 MB. A seed makes the same cases again.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub import constants
from PIL import Image

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import ZooError
from tests.support.archives import head, local_tar
from tests.support.scenarios import SCHEMA, Built, build, load, random_state

MEMORY = 256 << 20  # bytes beside twice the input
ARCHIVE = "optunet-mnist"  # a collection of the catalog that lies in archives


# ---- what a case may touch ----
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree"}
RUNS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen"}
ASKS_THE_NETWORK = {"socket.getaddrinfo", "socket.gethostbyname"}


class Watch:
    """Notes what a case does outside its folder, by an audit hook of Python.

    Attributes:
        inside: folders that a case may write to.
        broken: what was done elsewhere, since the last `clear`.
        events: names of Python's audit events that no case may cause.
    """

    def __init__(self, *inside: Path, events: set[str] = RUNS) -> None:
        self.inside = [str(folder.resolve()) for folder in inside]
        self.events = events
        self.broken: list[str] = []
        sys.addaudithook(self._see)

    def clear(self) -> None:
        self.broken = []

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.events:
            self.broken.append(f"{event} {arguments!r}"[:300])
        elif event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
            paths = [os.fsdecode(x) for x in arguments if isinstance(x, str | bytes | os.PathLike)]
            if event == "os.symlink":  # a relative target counts from the folder of the link
                paths[0] = str(Path(paths[1]).parent / paths[0])
            folders = [x for x in arguments[1:] if isinstance(x, int)] if event in {"os.remove", "os.rmdir"} else []
            if folders and folders[0] >= 0:  # the name is one in an open folder
                paths = [str(Path(f"/proc/self/fd/{folders[0]}").resolve() / path) for path in paths]
            outside = [path for path in paths if not self._is_inside(path)]
            self.broken += [f"{event} {path}"[:300] for path in outside if event != "open" or path == paths[0]]

    def _is_inside(self, path: str) -> bool:
        whole = os.path.abspath(path)  # noqa: PTH100 - no link is followed
        return path == os.devnull or any(whole.startswith(folder + os.sep) or whole == folder for folder in self.inside)


# ---- mutations of bytes ----
def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Return a file's bytes with one to four changes; most of them hit its first 4,096 bytes or its end."""
    out = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        if not out:
            return bytes(rng.randbytes(rng.randint(0, 64)))
        near = rng.choice((min(len(out), 64), min(len(out), 4096), len(out)))
        at = rng.randrange(near) if rng.random() < 0.8 else len(out) - 1 - rng.randrange(near)
        length = rng.choice((1, 1, 2, 4, 8, rng.randint(1, 256)))
        change = rng.randrange(8)
        if change == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            out[at : at + length] = rng.randbytes(len(out[at : at + length]))
        elif change == 2:
            del out[at : at + length]
        elif change == 3:
            out[at:at] = rng.randbytes(length)
        elif change == 4:
            out[at:at] = out[at : at + length]
        elif change == 5:
            del out[at:]
        elif change == 6:
            value = rng.choice((0, 1, 0x7F, 0xFF))
            out[at : at + length] = bytes([value]) * len(out[at : at + length])
        else:
            number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, len(out)))
            out[at : at + 8] = struct.pack("<Q", number)[: len(out[at : at + 8])]
    return bytes(out)


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1e400, -0.0, float("nan"), 1e-320, "", "0", "a" * 5000, [],
    [[]], {}, {"": None}, [0] * 300, [1e9], ["x"] * 50,
)  # fmt: skip


def mutate_json(values: Any, rng: random.Random) -> Any:
    """Return JSON values with one to three of them replaced, dropped, doubled or moved."""
    for _ in range(rng.randint(1, 3)):
        places = list(_places(values))
        if not places:
            return copy.deepcopy(rng.choice(ODD))
        holder, key = rng.choice(places)
        change = rng.randrange(4)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.insert(rng.randint(0, len(holder)), holder[key])
        elif change == 2:
            other, of = rng.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = json.loads(json.dumps(other[of]))
        else:
            holder[key] = copy.deepcopy(rng.choice((*ODD, hostile(rng))))
    return values


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each (list or object, key) of JSON values."""
    keys = list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
    for key in keys:
        yield values, key
        yield from _places(values[key])


# ---- hostile strings ----
SEEDS = (
    "", " ", ".", "..", "../x", "../../../../tmp/x", "/etc/passwd", "~root", "$HOME", "%2e%2e/x", "a/../../b",
    "C:\\x", "\\\\host\\x", "file:///etc/passwd", "http://127.0.0.1:1/x", "hf://datasets/a/b",
    "hf://datasets/../..@x", "hf://", "con", "x" * 300, "x" * 100_000, "\0", "a\0b", "\n", "a\nb: c", "\r\n",
    "\x1b[2J\x1b]0;x\x07", "\u202e", "\ud800", "\ufeff", "e\u0301", "\u00e9", "\u0130", "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>", "](javascript:x)", "| a | b |", "---", "`x`", "$\\frac$", "{{7*7}}",
    "{0.__class__}", "%s%n", "'; DROP TABLE x; --", "1=1", "member = 0 OR 1", "read_csv('/etc/passwd')",
    "COPY (SELECT 1) TO '/tmp/x'", "__import__('os').system('id')", "os:system", "x.py", "./x.py", "x.py:build",
    "torch.load", "!!python/object:os.system", "&a [*a]", "nan", "inf", "-1", "1e999", "0x10",
    "99999999999999999999", "0-", "-0", "0-99999999", "7@", "@", "#", "embedded@0/x#0", "\U0001f4a9" * 50,
)  # fmt: skip


def hostile(rng: random.Random) -> str:
    """Return a string that a careless reader takes for a path, an address, a command, a format or a mark."""
    text = rng.choice(SEEDS)
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice(SEEDS)[:500]
        at = rng.randint(0, len(text))
        text = rng.choice(
            (text + other, other + text, text[:at] + other + text[at:], text.swapcase(), f"{other}/{text}")
        )
    return text


# ---- targets: a folder that is sound, a change to it, and its use ----
def read_members(built: Built) -> None:
    """Read all members; each is refused, or has tensors of the names and shapes that were written."""
    members = load(built)
    keys = zip(members.manifest["member"], members.manifest["epoch"], strict=True)
    for key, state in zip(keys, (m.state_dict() for m in members), strict=True):
        written = built.states.get(key)
        if written is not None:
            assert {n: t.shape for n, t in state.items() if n in written} == {n: t.shape for n, t in written.items()}


@dataclass
class Target:
    """One kind of input.

    Attributes:
        make: writes a sound input into a folder; returns what `damage` and `use` take.
        damage: changes it, by random numbers; returns the bytes that the input has then.
        use: reads it as a user does.
        kept: what `make` returned.
        saved: bytes of each file as `make` wrote them.
    """

    make: Callable[[Path], Any]
    damage: Callable[[Any, random.Random], int]
    use: Callable[[Any], object]
    kept: Any = None
    saved: dict[Path, bytes] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        """Make the sound input, and use it: it is right before it is damaged."""
        self.kept = self.make(folder)
        self.use(self.kept)
        self.saved = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore(self) -> None:
        """Write the files that a case changed as they were."""
        for path, raw in self.saved.items():
            if not path.is_file() or path.read_bytes() != raw:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)


def damage_file(path: Callable[[Any], Path]) -> Callable[[Any, random.Random], int]:
    """Return a damage that mutates one file's bytes."""

    def damage(kept: Any, rng: random.Random) -> int:
        raw = mutate(path(kept).read_bytes(), rng)
        path(kept).write_bytes(raw)
        return len(raw)

    return damage


def damage_header(built: Built, rng: random.Random) -> int:
    """Mutate a shard's header as JSON, its length set right."""
    raw = built.shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = json.dumps(mutate_json(json.loads(raw[8 : 8 + length]), rng)).encode()
    text += b" " * (max(0, length - len(text)) if rng.random() < 0.7 else 0)
    raw = struct.pack("<Q", len(text)) + text + raw[8 + length :]
    built.shard.write_bytes(raw)
    return len(raw)


def damage_description(built: Built, rng: random.Random) -> int:
    """Mutate the description as JSON."""
    built.json.write_text(json.dumps(mutate_json(json.loads(built.json.read_text()), rng)), errors="surrogatepass")
    return built.json.stat().st_size


def damage_rows(built: Built, rng: random.Random) -> int:
    """Replace values, columns and rows of the manifest; it stays a Parquet file."""
    columns = {name: [row.get(name) for row in built.rows] for name in SCHEMA.names}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(columns))
        change = rng.randrange(4)
        if change == 0:
            del columns[name]
        elif change == 1:
            columns = {n: [*values, rng.choice(values)] for n, values in columns.items()}
        elif change == 2:
            columns[name] = [rng.choice((*ODD[:12], hostile(rng)))] * len(columns[name])
        else:
            columns[name][rng.randrange(len(columns[name]))] = rng.choice((*ODD[:6], hostile(rng)))
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, SCHEMA.field(name).type if rng.random() < 0.7 else None)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):
            arrays[name] = pa.array([None] * len(values), rng.choice((pa.null(), pa.string(), pa.list_(pa.int8()))))
    table = pa.table(arrays).replace_schema_metadata({"schema_version": rng.choice(("1", "1", "1", "2", "x", ""))})
    with built.manifest.open("wb") as file:
        pq.write_table(table, file)
    return built.manifest.stat().st_size


def make_archive(folder: Path) -> Path:
    """Write an archive of a collection of the catalog, two members in it."""
    raw, payload = head("optunet", "F32", classes=10, hidden=16)
    files = [(f"x/version_{i}/model.safetensors", raw + bytes(payload)) for i in range(2)]
    path = folder / "models" / "mnist-optunet" / "mnist-optunet-0-8191.tgz"
    path.parent.mkdir(parents=True)
    path.write_bytes(local_tar(files))
    return path


def damage_tar(path: Path, rng: random.Random) -> int:
    """Mutate an archive's bytes; in half of the cases the checksum of a block is set right."""
    raw = bytearray(mutate(path.read_bytes(), rng))
    if rng.random() < 0.5:
        for at in range(0, min(len(raw) - 511, 4096), 512):
            block = raw[at : at + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                raw[at + 148 : at + 156] = b"%06o\0 " % (sum(block) & 0o777777)
    path.write_bytes(raw)
    return len(raw)


def read_archive(path: Path) -> None:
    for member in zoo.load(ARCHIVE, source=path.parents[2], n=2):
        member.state_dict()


def png(rng: np.random.Generator) -> bytes:
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def make_pictures(folder: Path) -> Path:
    """Write a folder of images, a folder a class."""
    rng = np.random.default_rng(0)
    for label in "ab":
        (folder / "pictures" / label).mkdir(parents=True)
        for i in range(2):
            (folder / "pictures" / label / f"{i}.png").write_bytes(png(rng))
    return folder / "pictures"


def damage_picture(folder: Path, rng: random.Random) -> int:
    """Mutate a PNG; in half of the cases the checksums of its chunks are set right."""
    path = rng.choice(sorted(folder.rglob("*.png")))
    raw = bytearray(mutate(path.read_bytes(), rng))
    at = 8
    while rng.random() < 0.9 and at + 12 <= len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        if at + 12 + length > len(raw):
            break
        raw[at + 8 + length : at + 12 + length] = struct.pack(">I", zlib.crc32(raw[at + 4 : at + 8 + length]))
        at += 12 + length
    path.write_bytes(raw)
    return len(raw)


def make_image_table(folder: Path) -> Path:
    """Write images as `datasets` does: a Parquet file of encoded images with labels, and what its columns are."""
    rng = np.random.default_rng(0)
    features = {"image": {"_type": "Image"}, "label": {"names": ["a", "b"], "_type": "ClassLabel"}}
    images = [{"bytes": png(rng), "path": None} for _ in range(4)]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(images, kind), "label": pa.array([0, 1, 0, 1], pa.int64())})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, folder / "images.parquet")
    return folder / "images.parquet"


def damage_features(path: Path, rng: random.Random) -> int:
    """Mutate the JSON that says what the columns of images are."""
    table = pq.read_table(path)
    said = mutate_json(json.loads(table.schema.metadata[b"huggingface"]), rng)
    with path.open("wb") as file:
        text = json.dumps(said).encode(errors="surrogatepass")
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), file)
    return path.stat().st_size


def read_images(place: Path) -> None:
    data = zoo.images.of(place)
    assert data.labels is None or len(data.images) == len(data.labels)


def make_checkpoints(folder: Path) -> Path:
    """Write two checkpoints with torch.save."""
    (folder / "runs").mkdir()
    for i in range(2):
        torch.save({"state_dict": random_state("convnet", i), "epoch": 3, "lr": 0.1}, folder / "runs" / f"{i}.pt")
    return folder / "runs"


def damage_checkpoint(folder: Path, rng: random.Random) -> int:
    """Mutate the pickle inside a checkpoint, or the file around it, or put a plain pickle in its place."""
    path = folder / f"{rng.randrange(2)}.pt"
    change = rng.randrange(3)
    if change == 0:
        raw = mutate(path.read_bytes(), rng)
    elif change == 1:
        raw = _rewrite_zip(path.read_bytes(), rng)
    else:
        values = rng.choice(({"a": 1}, [np.zeros(3)], object, mutate_json({"a": [1, {"b": 2.0}]}, rng), bytearray(9)))
        raw = mutate(pickle.dumps(values, rng.randrange(6)), rng)
    path.write_bytes(raw)
    return len(raw)


def _rewrite_zip(raw: bytes, rng: random.Random) -> bytes:
    """Return a zip file with the first `.pkl` of its files mutated, its checksum right."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, mutate(content, rng) if name.endswith(".pkl") else content)
    return out.getvalue()


def read_checkpoints(folder: Path) -> None:
    out = folder.parent / "imported"
    shutil.rmtree(out, ignore_errors=True)
    members = zoo.from_checkpoints(
        folder, "convnet", out=out, name="runs", dataset="digits", classes=[str(c) for c in range(10)],
        preprocessing={"size": [8, 8], "channels": 1, "mean": [0.3], "std": [0.4]}, licence="none", citation="none",
    )  # fmt: skip
    for member in members:
        member.state_dict()


def make_source(folder: Path) -> Built:
    return build(folder, members=range(2))


FILES: dict[str, Target] = {
    "shard": Target(make_source, damage_file(lambda built: built.shard), read_members),
    "header": Target(make_source, damage_header, read_members),
    "manifest": Target(make_source, damage_file(lambda built: built.manifest), read_members),
    "rows": Target(make_source, damage_rows, read_members),
    "description": Target(make_source, damage_description, read_members),
    "description bytes": Target(make_source, damage_file(lambda built: built.json), read_members),
    "tar": Target(make_archive, damage_tar, read_archive),
    "pictures": Target(make_pictures, damage_picture, read_images),
    "image table": Target(make_image_table, damage_file(lambda path: path), read_images),
    "image features": Target(make_image_table, damage_features, read_images),
    "checkpoints": Target(make_checkpoints, damage_checkpoint, read_checkpoints),
}


# ---- strings that a user or a source gives ----
def put(change: Callable[[Built, str], None]) -> Callable[[Built, str], None]:
    """Return a use of a string that a source holds: change the source, write it, read its members."""

    def use(built: Built, text: str) -> None:
        change(built, text)
        built.write()
        read_members(built)

    return use


def _in_column(built: Built, text: str) -> None:
    name = random.Random(repr(text)).choice([f.name for f in SCHEMA if pa.types.is_string(f.type)])
    built.rows[0][name] = text.encode(errors="replace").decode()  # Parquet holds no lone surrogates


def _in_description(built: Built, text: str) -> None:
    rng = random.Random(repr(text))
    texts = [(holder, key) for holder, key in _places(built.description) if isinstance(holder[key], str)]
    holder, key = rng.choice(texts)
    holder[key] = text


STRINGS: dict[str, Callable[[Built, str], object]] = {
    "name": lambda built, text: zoo.load(text, source=built.root),
    "source": lambda built, text: zoo.load(built.name, source=text),
    "where": lambda built, text: load(built, where=text),
    "members": lambda built, text: load(built, members=text),
    "citation": lambda built, text: zoo.load(f"{built.root.as_uri()}/{built.name}#{text}"),
    "architecture": lambda built, text: zoo.symmetries(text),
    "images": lambda built, text: zoo.images.load(text),
    "a column": put(_in_column),
    "the description": put(_in_description),
}


# ---- running cases ----
@dataclass
class Report:
    """What came of the cases.

    Attributes:
        outcomes: (target, class of the error, or "read") -> cases.
        failures: cases that break a rule, in words.
        slowest: seconds of the slowest case, and which it was.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def print(self) -> int:
        """Print a table of outcomes, each failure, and a line of JSON; return 1 if there was a failure."""
        for (kind, outcome), cases in sorted(self.outcomes.items()):
            print(f"{kind:24} {outcome:22} {cases:7,}")
        print(f"slowest: {self.slowest[0]:.1f} s, {self.slowest[1]}")
        for failure in self.failures[:50]:
            print(f"\n{failure}")
        cases, slowest_s = sum(self.outcomes.values()), round(self.slowest[0], 1)
        print(json.dumps({"cases": cases, "failures": len(self.failures), "slowest_s": slowest_s}))
        return 1 if self.failures else 0


def peak_memory() -> int:
    """Return the most bytes that this process has held since the last `forget_peak`; 0 where Linux does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run_case(report: Report, watch: Watch, label: str, kind: str, use: Callable[[], object], size: int) -> None:
    """Run one case, and note in the report what came of it."""
    forget_peak()
    before, started = peak_memory(), time.monotonic()
    watch.clear()
    problem = ""
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            result = use()
        outcome = result if isinstance(result, str) else "read"
    except ZooError as error:
        outcome = type(error).__name__
        if len(str(error)) > 4000:
            problem = f"an error text of {len(str(error)):,} characters"
    except Exception as error:  # noqa: BLE001 - any other is what the fuzzer looks for
        outcome = f"raw {type(error).__name__}"
        problem = "".join(traceback.format_exception(error)[-6:])
    seconds, grown = time.monotonic() - started, peak_memory() - before
    broken = list(watch.broken)
    watch.clear()
    report.outcomes[kind, outcome] += 1
    report.slowest = max(report.slowest, (seconds, label))
    if broken:
        problem += f"\ntouched: {broken[:5]}"
    if grown > 2 * size + MEMORY:
        problem += f"\nheld {grown:,} bytes for an input of {size:,}"
    if problem:
        report.failures.append(f"{label}: {outcome}: {problem}")


@contextlib.contextmanager
def case_folders() -> Iterator[tuple[Path, Path]]:
    """Make an empty folder for cases, and choose one for the caches of the Hub; yield both."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True  # a module that a case is the first to import would be written outside its folder
    with tempfile.TemporaryDirectory(prefix="zoo-fuzz-") as temporary:
        folder = Path(temporary).resolve()
        home = Path(os.environ.get("HF_HOME", folder / "home"))
        # huggingface_hub has read its settings: copies of members must not get into the user's own cache.
        constants.HF_ASSETS_CACHE, constants.HF_HUB_CACHE = str(home / "assets"), str(home / "hub")
        yield folder, home


def fuzz_files(report: Report, folder: Path, watch: Watch, count: int, seed: int, only: list[str]) -> None:
    """Run `count` cases of damaged files, target by target in turn."""
    targets = {name: target for name, target in FILES.items() if not only or name in only}
    for name, target in targets.items():
        (folder / name).mkdir()
        target.prepare(folder / name)
    for case in range(count):
        name = list(targets)[case % len(targets)]
        target = targets[name]
        size = target.damage(target.kept, random.Random(f"{seed}/{case}"))
        run_case(report, watch, f"file case {case} ({name})", name, lambda t=target: t.use(t.kept), size)  # type: ignore[misc]
        target.restore()


def fuzz_strings(report: Report, folder: Path, watch: Watch, count: int, seed: int) -> None:
    """Run `count` cases of hostile strings, place by place in turn."""
    built = make_source(folder / "strings")
    sound = json.dumps(built.rows), json.dumps(built.description)
    for case in range(count):
        place = list(STRINGS)[case % len(STRINGS)]
        text = hostile(random.Random(f"{seed}/text/{case}"))
        label = f"string case {case} ({place}, {text[:60]!r})"
        try:
            run_case(report, watch, label, place, lambda: STRINGS[place](built, text), len(text))  # noqa: B023
        finally:
            built.rows, built.description = (json.loads(x) for x in sound)
            if place.startswith(("a ", "the ")):
                built.write()


def main() -> int:
    """Run cases, and print what came of them; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--strings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], choices=FILES, help="kinds of files; all by default")
    options = parser.parse_args()
    report = Report()
    with case_folders() as (folder, home):
        watch = Watch(folder, home)
        fuzz_files(report, folder, watch, options.files, options.seed, options.only)
        fuzz_strings(report, folder, watch, options.strings, options.seed)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
