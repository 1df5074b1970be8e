"""Evaluate stored predictions of a thousand members: the whole table and the curves, in bounded memory.

Run: uv run python benchmarks/predictions.py. Two sets of 1,000 members × 10,000 inputs × 100 classes in float16 (2 GB
each, synthetic: a signal that all members share, and noise of their own) are written into a temporary folder; a fresh
process evaluates them, one as the test set, one as out of distribution. The last line is one JSON object:

peak_mb     largest resident memory of that process, MB of 10^6 bytes, torch and all else included
seconds     of `zoo.evaluate`
start_mb    resident memory before it, torch imported
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.formats import catalog, manifest, shard_files
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.shard_files import tensor_prefix
from checkpoints_zoo.predictions import Predictions, prediction_sets
from checkpoints_zoo.predictions.prediction_sets import LOGITS_TENSOR, SCHEMA, SetDescription
from checkpoints_zoo.sources.folder_source import FolderSource

NAME, INSIDE, OUTSIDE = "synthetic", "inside", "outside"


def drawn(members: int, labels: torch.Tensor, classes: int, signal: float, seed: int) -> Iterator[torch.Tensor]:
    """Draw members' logits (input, class) in float16 around what all of them share; yield them one by one."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(len(labels), classes, generator=generator)
    shared[torch.arange(len(labels)), labels] += signal
    for _ in range(members):
        yield (shared + torch.randn(shared.shape, generator=generator)).half()


def write(root: Path, name: str, members: int, inputs: int, classes: int, signal: float, seed: int) -> None:
    """Write a set of stored predictions."""
    folder, layout = root / prediction_sets.folder_of_set(NAME, name), prediction_sets.logits_layout(inputs, classes)
    labels = torch.randint(classes, (inputs,), generator=torch.Generator().manual_seed(seed))
    rows: list[dict[str, Any]] = []
    size, logits = shard_files.members_per_shard(layout), drawn(members, labels, classes, signal, seed)
    for number, at in enumerate(range(0, members, size)):
        rows += _shard(folder, number, layout, range(at, min(members, at + size)), logits)
    facts = SetDescription(
        collection=NAME, set=name, data=name, split="test", revision="", fingerprint=f"{seed:016x}", inputs=inputs,
        classes=tuple(f"class{i}" for i in range(classes)), preprocessing={}, computed="float32", view="", version="",
        citation="", layouts={LOGITS_TENSOR: layout}, labels=tuple(labels.tolist()) if name == INSIDE else None,
    )  # fmt: skip
    catalog.write_json(facts.to_json(), folder / prediction_sets.DESCRIPTION_FILE)
    manifest.write_manifest(manifest.build_manifest(rows, SCHEMA), folder / prediction_sets.MANIFEST_FILE, SCHEMA)


def _shard(
    folder: Path, number: int, layout: Layout, ids: range, logits: Iterator[torch.Tensor]
) -> Iterator[dict[str, Any]]:
    prefixes, hashes = [tensor_prefix(i) for i in ids], []

    def raw() -> Iterator[bytes]:
        for _ in ids:
            member = next(logits).numpy().tobytes() + bytes(layout.pad)
            hashes.append(content_hash(layout, member))
            yield member

    path = shard_files.stream_shard(folder, number, layout, prefixes, raw())
    first = shard_files.first_offset(layout, prefixes)
    for i, id in enumerate(ids):
        yield {
            "member": id, "epoch": 1, "final": True, "status": "ok", "sha256": hashes[i],
            "weights_sha256": hashlib.sha256(str(id).encode()).hexdigest(), "path": "/".join(path.parts[-4:]),
            "offset": first + i * layout.nbytes, "nbytes": layout.nbytes, "layout": LOGITS_TENSOR,
            "dtype": layout.dtype,
        }  # fmt: skip


def opened(root: Path, name: str) -> Predictions:
    """Open a set that `write` wrote."""
    stored = prediction_sets.read_set(FolderSource(root, root.as_uri()), NAME, name)
    return Predictions(stored, stored.rows, (root.as_uri(), "0" * 40))


def peak_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(root: Path) -> dict[str, float]:
    """Evaluate the two sets in this process; return what it took."""
    import checkpoints_zoo as zoo

    inside, outside = opened(root, INSIDE), opened(root, OUTSIDE)
    before, start = peak_mb(), time.perf_counter()
    report = zoo.evaluate(inside, ood=outside)
    took = time.perf_counter() - start
    print(report.to_frame().query("of == 'ensemble' and members == members.max()").to_string(), file=sys.stderr)
    return {"peak_mb": round(peak_mb(), 1), "seconds": round(took, 1), "start_mb": round(before, 1)}


def run(members: int, inputs: int, classes: int) -> dict[str, float]:
    """Write two sets and evaluate them in a fresh process; return what that took."""
    with tempfile.TemporaryDirectory(prefix="zoo-predictions-") as folder:
        write(Path(folder), INSIDE, members, inputs, classes, 3.0, 1)
        write(Path(folder), OUTSIDE, members, inputs, classes, 0.0, 2)
        command = [sys.executable, __file__, "--measure", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--measure", type=Path, help="evaluate what lies in this folder, in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
    else:
        print(json.dumps(run(options.members, options.inputs, options.classes)))


if __name__ == "__main__":
    main()
