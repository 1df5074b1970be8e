"""Bring members from a shard onto a GPU: gigabytes a second against a pinned copy; under four minutes.

Run where a GPU is at hand: uv run python benchmarks/gpu_load.py [--members 64]. The last line is one JSON object.
Members are ResNet-18-sized, float16, the page cache warm; gigabytes are those stored.
pinned         one pinned buffer copied to the device, GB/s; the others beside it as shares of that
to_stored      members.stack(device)
to_stacked     members.stack(device, float32): cast on the device
to_canonical   members.canonicalize(permute="first").stack(device, float32)
peak_mb        device memory beyond the stack while it is filled; null where it can't be told
overlap        reading plus computing, each alone, over an ensemble that streams (at most 2, 1 is no overlap)
`--device cpu --tiny` runs the same steps on small numbers, to see that they run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ensemble import timed

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.manifest import build_manifest, write_manifest
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.modules import build_architecture


def source(folder: Path, count: int, tiny: bool) -> Collection:
    """Write a source of random members; return them."""
    name, arguments = ("resnet8", {}) if tiny else ("resnet18", {"classes": 100})
    size = {"size": [8, 8], "channels": 1} if tiny else {"size": [32, 32], "channels": 3}
    first = build_architecture(name, **arguments).state_dict()
    layout = modules.layout_of(first, torch.float16)
    members = []
    for i in range(count):
        torch.manual_seed(i)
        state = {n: torch.randn(t.shape) * 0.05 if t.is_floating_point() else t for n, t in first.items()}
        state |= {n: t.abs() + 0.5 for n, t in state.items() if n.endswith("running_var")}
        members.append((shard_files.tensor_prefix(i), modules.pack_member(state, layout)))
    path = shard_files.write_shard(folder / "shards" / "nets", 0, layout, members)
    begin = shard_files.first_offset(layout, [key for key, _ in members])
    rows = [
        {"member": i, "epoch": 1, "final": True, "status": "ok", "path": f"shards/nets/{path.name}",
         "offset": begin + i * layout.nbytes, "nbytes": layout.nbytes, "layout": "f16", "dtype": "F16"}
        for i in range(count)
    ]  # fmt: skip
    classes = tuple(map(str, range(10 if tiny else 100)))
    preprocessing = {**size, "mean": [0.5] * size["channels"], "std": [0.25] * size["channels"]}  # type: ignore[operator]
    description = Description(
        "nets", "random nets", name, arguments, "none", classes, preprocessing, {"f16": layout}, "none", "none"
    )
    write_json(description.to_json(), folder / "manifests" / "nets.json")
    write_manifest(build_manifest(rows), folder / "manifests" / "nets.parquet")
    return load("nets", source=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the members are written; a temporary folder if not given")
    parser.add_argument("--tiny", action="store_true", help="small numbers")
    arguments = parser.parse_args()
    device, tiny = torch.device(arguments.device), arguments.tiny
    count, repeats, seconds = (8, 1, 0) if tiny else (arguments.members, arguments.repeats, 2)
    cuda = device.type == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize(device)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        members = source(Path(name), count, tiny)
        pinned = torch.zeros(members.nbytes, dtype=torch.uint8, pin_memory=cuda)
        target = torch.empty_like(pinned, device=device)
        canonical = members.canonicalize(permute="first")
        sides: dict[str, Any] = {
            "pinned": partial(target.copy_, pinned, non_blocking=True),
            "to_stored": lambda: members.stack(device),
            "to_stacked": lambda: members.stack(device, torch.float32),
            "to_canonical": lambda: canonical.stack(device, torch.float32),
        }
        times = dict(zip(sides, timed(list(sides.values()), repeats, wait, seconds), strict=True))
        rate = {key: members.nbytes / 1e6 / statistics.median(kept) for key, kept in times.items()}
        del pinned, target, sides["pinned"]

        on_cpu = members.stack("cpu", torch.float32)
        if not all(torch.equal(t.cpu(), on_cpu[n]) for n, t in members.stack(device, torch.float32).items()):
            raise RuntimeError("the device's weights are not those of the file")
        peak = None
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            stacked = members.stack(device, torch.float32)
            held = torch.cuda.memory_allocated(device) - before
            peak = round((torch.cuda.max_memory_allocated(device) - before - held) / 2**20, 1)
            del stacked

        preprocess = members.preprocess
        x = torch.randn(8 if tiny else arguments.batch, preprocess.channels, *preprocess.size).to(device)
        streamed, resident = members.ensemble(device, chunk=max(1, count // 8)), members.ensemble(device)
        chunks = max(1, count // 8)
        with torch.inference_mode():
            both, compute, read = timed(
                [
                    lambda: streamed(x),
                    lambda: resident(x),
                    lambda: [None for _ in members.batches(chunks, device, torch.float32)],
                ],
                repeats,
                wait,
                seconds,
            )
        medians = [statistics.median(kept) for kept in (both, compute, read)]
    results: dict[str, float | None] = {key: round(rate[key] / rate["pinned"], 3) for key in sides}
    results |= {"pinned": round(rate["pinned"], 2), **{f"{key}_gbs": round(value, 2) for key, value in rate.items()}}
    results |= {"peak_mb": peak, "overlap": round((medians[1] + medians[2]) / medians[0], 2)}
    results |= dict(zip(("streamed_ms", "computing_ms", "reading_ms"), (round(m, 1) for m in medians), strict=True))
    card = torch.cuda.get_device_name(device) if cuda else "cpu"
    print(json.dumps({**results, "members": count, "card": card, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
