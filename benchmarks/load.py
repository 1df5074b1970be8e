"""Load 32 ResNet-18-sized float16 members: ours against torch.load, safetensors and building a module.

Run: uv run python benchmarks/load.py [--members 32] [--repeats 5]. The last line is one JSON object: ratios (how many
times longer the other way takes) under short names, the medians in milliseconds beside them.

Sides of each ratio, taken in turns in one process:
warm_open            every member stacked by tensor, one value touched a 4 KiB page; against torch.load × 32 + stack
warm_read            the same, every byte summed
warm_vs_safetensors  as warm_open, against safetensors.load_file × 32 + stack
cold                 as warm_open, page cache dropped before each side (posix_fadvise)
module               one module ready for use in the stored dtype, .model(dtype=None); against building it (float32)
                     + torch.load + load_state_dict. Ours builds its skeleton once a collection: `module_first_ms`
module_float32       the same, ours converted to float32 as well, .model()
peak_mb              anonymous memory that opening and reading all members takes beyond what was there before
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.formats.manifest import build_manifest, write_manifest
from checkpoints_zoo.networks import modules


def resnet18() -> nn.Module:
    """Build ResNet-18 with the stem for 32 x 32 images and 100 classes; return it."""
    model = timm.create_model("resnet18", num_classes=100)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def prepare(folder: Path, count: int) -> Collection:
    """Write the same random members three ways: torch files, safetensors files, and a source of ours."""
    states = []
    for i in range(count):
        torch.manual_seed(i)
        states.append({n: t.half() if t.is_floating_point() and "running" not in n else t
                       for n, t in resnet18().state_dict().items()})  # fmt: skip
        torch.save(states[-1], folder / f"{i}.pt")
        safetensors.torch.save_file(states[-1], folder / f"{i}.safetensors")
    layout = modules.layout_of(states[0], torch.float16)
    members = [(shard_files.tensor_prefix(i), modules.pack_member(state, layout)) for i, state in enumerate(states)]
    path = shard_files.write_shard(folder / "shards" / "r18", 0, layout, members)
    first = shard_files.first_offset(layout, [key for key, _ in members])
    rows = [
        {"member": i, "epoch": 1, "final": True, "status": "ok", "path": f"shards/r18/{path.name}",
         "offset": first + i * layout.nbytes, "nbytes": layout.nbytes, "layout": "f16", "dtype": "F16",
         "sha256": content_hash(layout, raw)}
        for i, (_, raw) in enumerate(members)
    ]  # fmt: skip
    description = Description(
        "r18", "random ResNet-18", "resnet18", {}, "none", tuple(map(str, range(100))),
        {"size": [32, 32], "channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3}, {"f16": layout}, "none", "none",
    )  # fmt: skip
    write_json(description.to_json(), folder / "manifests" / "r18.json")
    write_manifest(build_manifest(rows), folder / "manifests" / "r18.parquet")
    return load("r18", source=folder, architecture=resnet18)


def stacked_by(read: Callable[[int], dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Read members one by one and stack them by tensor; return name -> (member, …)."""
    states = [read(i) for i in range(count)]
    return {n: torch.stack([s[n] for s in states]) for n in states[0] if not n.endswith("num_batches_tracked")}


def touch(stacked: dict[str, Tensor]) -> float:
    """Read one value a page of every member's tensors; return their sum."""
    return sum(float(t.flatten(1)[:, :: 4096 // t.element_size()].sum(dtype=torch.float32)) for t in stacked.values())


def total(stacked: dict[str, Tensor]) -> float:
    """Read every value; return their sum."""
    return sum(float(t.sum(dtype=torch.float32)) for t in stacked.values())


def drop_page_cache(folder: Path) -> None:
    """Write back and drop the page cache of the folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous_mb() -> float:
    """Return this process's anonymous memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def compare(
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    repeats: int,
    before: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Time two sides in turns; return their medians in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, kept in zip((ours, theirs), times, strict=True):
            before()
            start = time.perf_counter()
            result = side()
            kept.append((time.perf_counter() - start) * 1000)
            del result
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, count, repeats = Path(name), arguments.members, arguments.repeats
        members = prepare(folder, count)

        def torch_load() -> dict[str, Tensor]:
            return stacked_by(lambda i: torch.load(folder / f"{i}.pt", weights_only=True), count)

        def safetensors_load() -> dict[str, Tensor]:
            return stacked_by(lambda i: safetensors.torch.load_file(folder / f"{i}.safetensors"), count)

        def open_ours() -> dict[str, Tensor]:
            # A fresh process reads manifest and headers too: load anew each time.
            return load("r18", source=folder, architecture=resnet18).stack()

        for name_, tensor in torch_load().items():
            assert torch.equal(tensor, members.stack()[name_]), name_

        def module_theirs() -> nn.Module:
            module = resnet18()
            module.load_state_dict(torch.load(folder / "3.pt", weights_only=True))
            return module.eval()

        start = time.perf_counter()
        module = members[3].model(dtype=None)
        (time.perf_counter() - start) * 1000
        for name_, tensor in module.state_dict().items():
            assert torch.equal(tensor, module_theirs().state_dict()[name_].to(tensor.dtype)), name_
        before = anonymous_mb()
        kept = members.stack()
        total(kept)
        peak = anonymous_mb() - before
        del kept
        cases = {
            "warm_open": (lambda: touch(open_ours()), lambda: touch(torch_load()), repeats, lambda: None),
            "warm_read": (lambda: total(open_ours()), lambda: total(torch_load()), repeats, lambda: None),
            "warm_vs_safetensors": (
                lambda: touch(open_ours()), lambda: touch(safetensors_load()), repeats, lambda: None
            ),
            "cold": (
                lambda: touch(open_ours()), lambda: touch(torch_load()), max(5, repeats),
                lambda: drop_page_cache(folder),
            ),
            "module": (lambda: members[3].model(dtype=None), module_theirs, 4 * repeats, lambda: None),
            "module_float32": (lambda: members[3].model(), module_theirs, 4 * repeats, lambda: None),
        }  # fmt: skip
        figures: dict[str, float] = {}
        for key, case in cases.items():
            ours, theirs = compare(*case)
            figures |= {
                key: round(theirs / ours, 2),
                f"{key}_ms": round(ours, 2),
                f"{key}_other_ms": round(theirs, 1),
            }
            print(f"{key}: {ours:.1f} ms against {theirs:.1f} ms", flush=True)
    figures |= {
        "peak_mb": round(peak, 1),
        "members": count,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
