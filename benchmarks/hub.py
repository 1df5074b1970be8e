"""Read 1, 5 and 100 scattered members of 1,024 from a Hub: ours against HfFileSystem, whole files, and an archive.

Run: uv run python benchmarks/hub.py [--repeats 15]. The last line is one JSON object. The Hub is a process of its own
on the loopback interface that waits 0 or 50 ms before each answer; its files are made on request. The collection has
1,024 members of 9.9 MB (102 tensors: a ResNet-18 of width 30 in float32) in shards of up to 2 GB, as our writer lays
them out, and every hash in its manifest is true. Both sides have read commit and manifest and end with stacked tensors;
ours has also checked hashes and values by then, and keeps the members. Each repeat starts with empty caches.

bytes_ratio          bytes of shards that came / bytes of the members asked for; the worst case
extra_requests       all requests - files touched (manifest and description among them) - runs of members that lie
                     together; the worst case
speedup_hffs_50ms    5 members at 50 ms: time of HfFileSystem with default settings (opened at the commit, tensor by
                     tensor, offsets from the manifest) / ours, medians; _least: of the fastest repeats, since whatever
                     else runs on the machine can only make one slower
bytes_vs_archive     bytes of a tar of all members / all bytes that came for one, manifest included
n{N}_{D}ms           milliseconds of ours for N members at D ms a request, median; _least: of the fastest repeat
n{N}_{D}ms_hffs      the same of HfFileSystem
n{N}_whole_s         seconds to download the shards that the N members lie in: one is measured, without delay
archive_s            seconds to download and unpack the tar and load one member: measured with 24 members, and scaled
                     by bytes
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tarfile
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.shard_files import shard_header, tensor_prefix
from checkpoints_zoo.sources import fetching
from tests.hub import WRITER, Hub, Server, Virtual, answers, joined, noise
from tests.support.archives import virtual_tar

REPO, NAME, MEMBERS, WIDTH = "alice/zoo", "zoo", 1024, 30
COUNTS, DELAYS, GAP = (1, 5, 100), (0, 50), 256 * 2**10
LARGEST_SHARD, POOL, STEP = 2 * 10**9, 2**24, 2**14
SOME, SOME_ARCHIVE = 24, "some.tgz"
DTYPES = {"F16": torch.float16, "F32": torch.float32}


# ---- the Hub's process ----
def layout_of_resnet18() -> Layout:
    """Lay out a narrow ResNet-18; return the layout."""
    tensors: list[tuple[str, str, tuple[int, ...]]] = []

    def conv(name: str, norm: str, outputs: int, inputs: int, size: int) -> None:
        tensors.append((f"{name}.weight", "F32", (outputs, inputs, size, size)))
        tensors.extend((f"{norm}.{part}", "F32", (outputs,)) for part in ("weight", "bias"))
        tensors.extend((f"{norm}.{part}", "F32", (outputs,)) for part in ("running_mean", "running_var"))

    conv("conv1", "bn1", WIDTH, 3, 3)
    before = WIDTH
    for stage in range(4):
        after = WIDTH * 2**stage
        for block in range(2):
            at = f"layer{stage + 1}.{block}"
            conv(f"{at}.conv1", f"{at}.bn1", after, before, 3)
            conv(f"{at}.conv2", f"{at}.bn2", after, after, 3)
            if before != after:
                conv(f"{at}.downsample.0", f"{at}.downsample.1", after, before, 1)
            before = after
    tensors += [("fc.weight", "F32", (100, before)), ("fc.bias", "F32", (100,))]
    return Layout.of(tensors)


def commit(hub: Hub, folder: Path) -> tuple[int, int]:
    """Commit the collection, and an archive of some members; return the bytes of one of all members, and of that."""
    layout = layout_of_resnet18()
    block = noise(0, POOL, 0xBF).read(0, POOL)  # finite as float16 and as float32
    pool = memoryview(block + block)

    def member(number: int) -> Virtual:
        def read(offset: int, length: int) -> bytes:
            start = number * STEP % POOL
            return bytes(pool[start + offset : start + min(offset + length, layout.nbytes)])

        return Virtual(layout.nbytes, read, hashlib.sha256(b"member %d" % number).hexdigest())

    members = [member(i) for i in range(MEMBERS)]
    per_shard = min(LARGEST_SHARD // layout.nbytes, 32_000 // len(layout.tensors))
    files: dict[str, Any] = {}
    rows = []
    for first in range(0, MEMBERS, per_shard):
        ids = range(first, min(first + per_shard, MEMBERS))
        head = shard_header(layout, [tensor_prefix(i) for i in ids])
        inside = f"shards/{NAME}/{first // per_shard:05d}-{hashlib.sha256(head).hexdigest()[:8]}.safetensors"
        files[inside] = joined(head, *(members[i] for i in ids))
        rows += [
            {"member": i, "epoch": 1, "final": True, "status": "ok", "path": inside, "layout": "f32", "dtype": "F32",
             "offset": len(head) + (i - first) * layout.nbytes, "nbytes": layout.nbytes,
             "sha256": content_hash(layout, pool[i * STEP % POOL :][: layout.nbytes])} for i in ids
        ]  # fmt: skip
    preprocessing = {"size": [32, 32], "channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3}
    classes = tuple(map(str, range(100)))
    description = Description(
        NAME, "noise", "resnet18", {}, "none", classes, preprocessing, {"f32": layout}, "none", "none"
    )
    json_path, table_path = f"manifests/{NAME}.json", f"manifests/{NAME}.parquet"
    write_json(description.to_json(), folder / json_path)
    manifest.write_manifest(manifest.build_manifest(rows), folder / table_path)
    files |= {json_path: folder / json_path, table_path: folder / table_path}
    one = shard_header(layout, [""])
    all_, some = (
        virtual_tar((f"{NAME}/version_{i}.safetensors", joined(one, members[i])) for i in range(count))
        for count in (MEMBERS, SOME)
    )
    hub.commit(REPO, {**files, SOME_ARCHIVE: some})
    return all_.size, some.size


def serve(wire: Connection) -> None:
    """Run the Hub until None arrives: set the delay that is sent and empty the log, or send what is in it."""
    answers.PIECE = 2**21  # the fewer turns of its loop, the less of the machine it takes from either side
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder, "hub")) as hub:
        wire.send((hub.url, *commit(hub, Path(folder, "source"))))
        while (command := wire.recv()) is not None:
            wire.send([(row.path, row.bytes) for row in list(hub.log)])
            if command != "log":
                hub.latency = command
                hub.log.clear()


# ---- this process ----
@dataclass
class Bench:
    """The Hub's process, and where caches lie."""

    wire: Connection
    home: Path

    def tell(self, command: float | str) -> list[tuple[str, int]]:
        """Set the delay in seconds, or say "log"; return (path, bytes) of each answer since the last delay was set."""
        self.wire.send(command)
        answers: list[tuple[str, int]] = self.wire.recv()
        return answers

    def forget(self, delay: float) -> None:
        """Empty the caches on disk and in memory, and the Hub's log; set its delay in seconds."""
        from huggingface_hub import HfFileSystem  # it reads HF_ENDPOINT when it is imported: after the Hub has started

        shutil.rmtree(self.home, ignore_errors=True)
        fetching._remote_files.clear()
        HfFileSystem.clear_instance_cache()
        self.tell(delay)

    def ours(self, ids: list[int], delay: float) -> tuple[float, dict[str, Tensor]]:
        """Read members with this package; return the seconds from the manifest to stacked tensors, and these."""
        self.forget(delay)
        members = load(NAME, members=ids, source=f"hf://datasets/{REPO}")
        start = time.perf_counter()
        stacked = members.stack()
        return time.perf_counter() - start, stacked

    def hffs(self, members: Collection, delay: float) -> tuple[float, dict[str, Tensor]]:
        """Read members with HfFileSystem; return the seconds from the manifest to stacked tensors, and these."""
        from huggingface_hub import HfFileSystem

        self.forget(delay)
        system, root = HfFileSystem(), f"datasets/{REPO}@{members._commit}"
        system.cat_file(f"{root}/manifests/{NAME}.parquet")
        layout = members.description.layouts["f32"]
        start = time.perf_counter()
        files, found = {}, []
        for row in members.rows.to_pylist():
            if row["path"] not in files:
                files[row["path"]] = system.open(f"{root}/{row['path']}")
            file, tensors = files[row["path"]], {}
            for t in layout.tensors:
                file.seek(row["offset"] + t.offset)
                raw = bytearray(file.read(t.nbytes))
                tensors[t.name] = torch.frombuffer(raw, dtype=DTYPES[t.dtype]).reshape(t.shape)
            found.append(tensors)
        stacked = {t.name: torch.stack([tensors[t.name] for tensors in found]) for t in layout.tensors}
        return time.perf_counter() - start, stacked

    def whole(self, inside: str) -> float:
        """Download a file into the client's cache; return the seconds."""
        from huggingface_hub import hf_hub_download

        self.forget(0)
        start = time.perf_counter()
        hf_hub_download(REPO, inside, repo_type="dataset")
        return time.perf_counter() - start

    def archive(self, folder: Path) -> tuple[float, float]:
        """Download an archive, unpack it and load one member; return the seconds of all but the last, and of that."""
        from huggingface_hub import hf_hub_download

        self.forget(0)
        start = time.perf_counter()
        with tarfile.open(hf_hub_download(REPO, SOME_ARCHIVE, repo_type="dataset")) as tar:
            tar.extractall(folder, filter="data")
        unpacked = time.perf_counter()
        state = load_file(folder / NAME / "version_0.safetensors")
        for tensor in state.values():
            tensor.sum()
        return unpacked - start, time.perf_counter() - unpacked


def scattered(n: int) -> list[int]:
    """Draw members; return their ids in order."""
    return sorted(random.Random(n).sample(range(MEMBERS), n))


def runs_of(rows: list[dict[str, Any]]) -> int:
    """Count the runs of members that lie at most 256 KiB apart."""
    places = sorted((row["path"], row["offset"], row["offset"] + row["nbytes"]) for row in rows)
    return 1 + sum(bool(a[0] != b[0] or b[1] - a[2] > GAP) for a, b in pairwise(places))


def compare(bench: Bench, everything: Collection, n: int, delay: int, repeats: int) -> dict[str, float]:
    """Read n members both ways in turns; return the figures."""
    ids = scattered(n)
    chosen = load(NAME, members=ids, source=str(everything.source.display_name))
    rows = chosen.rows.to_pylist()
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(repeats):
        seconds, stacked = bench.ours(ids, delay / 1000)
        ours.append(seconds * 1000)
        log = bench.tell("log")
        if n < 100 or turn == 0:
            seconds, found = bench.hffs(chosen, delay / 1000)
            theirs.append(seconds * 1000)
        if turn == 0:
            assert all(torch.equal(stacked[name], tensor) for name, tensor in found.items())
    members = sum(size for path, size in log if "/shards/" in path)
    print(f"{n} members at {delay} ms: {min(ours):.0f} ms against {min(theirs):.0f} ms at best", flush=True)
    return {
        "bytes_ratio": round(members / sum(row["nbytes"] for row in rows), 4),
        "extra_requests": len(log) - 2 - len({row["path"] for row in rows}) - runs_of(rows),
        "bytes": sum(size for _, size in log),
        "ms": round(statistics.median(ours), 1),
        "ms_least": round(min(ours), 1),
        "ms_hffs": round(statistics.median(theirs), 1),
        "ms_hffs_least": round(min(theirs), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of each case; 3 at most of those with 100 members")
    repeats = parser.parse_args().repeats
    spawn, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url, archive_bytes, some_bytes = ours.recv()
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(
            HF_ENDPOINT=url, HF_HOME=f"{name}/hf", HF_TOKEN=WRITER, HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1,localhost",
        )  # fmt: skip
        bench = Bench(ours, Path(name, "hf"))
        everything = load(NAME, source=f"hf://datasets/{REPO}")
        cases = {
            (n, delay): compare(bench, everything, n, delay, repeats if n < 100 else min(repeats, 3))
            for n in COUNTS
            for delay in DELAYS
        }
        shards = {n: {everything.rows["path"][i].as_py() for i in scattered(n)} for n in COUNTS}
        seconds = bench.whole(min(shards[1]))
        unpacked, loaded = bench.archive(Path(name, "unpacked"))
    ours.send(None)
    process.join()
    figures: dict[str, float] = {
        "bytes_ratio": max(case["bytes_ratio"] for case in cases.values()),
        "extra_requests": max(case["extra_requests"] for case in cases.values()),
        "speedup_hffs_50ms": round(cases[5, 50]["ms_hffs"] / cases[5, 50]["ms"], 2),
        "speedup_hffs_50ms_least": round(cases[5, 50]["ms_hffs_least"] / cases[5, 50]["ms_least"], 2),
        "bytes_vs_archive": round(archive_bytes / max(cases[1, delay]["bytes"] for delay in DELAYS), 1),
        "archive_s": round(unpacked * archive_bytes / some_bytes + loaded, 1),
    }
    for (n, delay), case in cases.items():
        figures |= {f"n{n}_{delay}{key}": case[key] for key in ("ms", "ms_least", "ms_hffs", "ms_hffs_least")}
    figures |= {f"n{n}_whole_s": round(seconds * len(shards[n]), 1) for n in COUNTS}
    print(json.dumps(figures | {"repeats": repeats}))


if __name__ == "__main__":
    main()
