"""Read and use 1,024 ResNet-20 members in float16, in three shards: against torch on the same bytes, and against 256.

Run: uv run python benchmarks/thousand.py [--members 1024] [--images 500] [--only ns]. The last line is one JSON object.
Members are random; they are written with our writer into a temporary folder (560 MB). Sides are taken in turns in one
process.

stack_r20_1024   time to stack all members in float32 / of `torch.empty` and one conversion of the same bytes, medians
stack_view       the same for the stored dtype
stack_scattered  the same as stack_r20_1024 for every third member in shuffled order
ensemble_ready   time until a plain loop that builds, loads and runs modules has the logits of one image / until our
                 ensemble has; the loop runs an eighth of the members, and its time counts eight times
linear           largest ratio of the times at all members to a quarter of them, of the ratios beside it:
linear_canonicalize (sorted weights of all members), linear_dataset (all weight vectors), linear_evaluate (on labelled
images), linear_ns (of one half against the other, in subsets of 256 members, without which time grows with the square)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.formats.manifest import build_manifest, write_manifest
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.architectures.resnet20 import resnet20_frn_silu

NAME, SHARDS, LOOP_SHARE = "r20", 3, 8


def write_members(folder: Path, count: int) -> None:
    """Write random members in three shards, a manifest and a description; and an eighth of the members as torch
    files."""
    torch.manual_seed(0)
    state = {name: tensor.half() for name, tensor in resnet20_frn_silu().state_dict().items()}
    layout, rows = modules.layout_of(state, torch.float16), list[dict[str, Any]]()
    for shard, ids in enumerate(np.array_split(np.arange(count), SHARDS)):
        members = []
        for member in ids.tolist():
            drawn = {name: (t + 0.05 * torch.randn(t.shape)).half() for name, t in state.items()}
            members.append((shard_files.tensor_prefix(member), modules.pack_member(drawn, layout)))
            if member % LOOP_SHARE == 0:
                torch.save(drawn, folder / f"{member}.pt")
        path = shard_files.write_shard(folder / "shards" / NAME, shard, layout, members)
        first = shard_files.first_offset(layout, [prefix for prefix, _ in members])
        rows += [
            {"member": member, "epoch": 1, "final": True, "status": "ok", "path": f"shards/{NAME}/{path.name}",
             "offset": first + i * layout.nbytes, "nbytes": layout.nbytes, "layout": "f16", "dtype": "F16",
             "sha256": content_hash(layout, raw), "test_accuracy": member / count}
            for i, (member, (_, raw)) in enumerate(zip(ids.tolist(), members, strict=True))
        ]  # fmt: skip
    description = Description(
        NAME, "random ResNet-20", "resnet20-frn-silu", {"channels": 3, "classes": 10, "conv_bias": False}, "none",
        tuple("0123456789"), {"size": [32, 32], "channels": 3, "mean": [0.5] * 3, "std": [0.25] * 3}, {"f16": layout},
        "none", "none",
    )  # fmt: skip
    write_json(description.to_json(), folder / "manifests" / f"{NAME}.json")
    write_manifest(build_manifest(rows), folder / "manifests" / f"{NAME}.parquet")


def seconds(function: Callable[[], object]) -> float:
    """Call a function; return the time of the call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 5) -> float:
    """Call two functions in turns; return the ratio of their median times."""
    for function in (ours, theirs):
        function()
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return round(statistics.median(t for t, _ in times) / statistics.median(t for _, t in times), 2)


def compare_stacks(members: Collection) -> dict[str, float]:
    """Stack members and convert as many bytes in one step, in turns; return the figures."""
    size = sum(tensor[0].numel() for tensor in members.stack().values())
    order = np.random.default_rng(0).permutation(np.arange(0, len(members), 3)).tolist()
    scattered = zoo.load(NAME, source=members.source.root, members=[members.ids[i] for i in order])

    def convert(count: int) -> Callable[[], object]:
        stored = torch.zeros(count, size, dtype=torch.float16)
        return lambda: torch.empty(count, size).copy_(stored)

    return {
        "stack_r20_1024": ratio(lambda: members.stack(dtype=torch.float32), convert(len(members))),
        "stack_view": ratio(lambda: members.stack(), convert(len(members))),
        "stack_scattered": ratio(lambda: scattered.stack(dtype=torch.float32), convert(len(scattered))),
    }


def compare_ensembles(folder: Path, members: Collection) -> dict[str, float]:
    """Run all members on one image by our ensemble, and an eighth of them by a loop; return the figures."""
    image = torch.randn(1, 3, 32, 32)

    @torch.no_grad()
    def run_modules() -> None:
        for path in sorted(folder.glob("*.pt")):
            net = resnet20_frn_silu().eval()
            net.load_state_dict(torch.load(path))
            net(image)

    @torch.no_grad()
    def run_ensemble() -> None:
        zoo.load(NAME, source=folder).ensemble()(image)

    first_s = seconds(run_ensemble)
    ours, loop = seconds(run_ensemble), LOOP_SHARE * seconds(run_modules)
    return {
        "ensemble_ready": round(loop / ours, 2), "ensemble_first_s": round(first_s, 2), "ensemble_s": round(ours, 2),
        "loop_s": round(loop, 1),
    }  # fmt: skip


def compare_sizes(folder: Path, count: int, images: int, only: str | None) -> dict[str, float]:
    """Time four calls, or only one, on all members and on a quarter of them; return the ratios."""
    random = np.random.default_rng(0)
    pixels = torch.from_numpy(random.integers(0, 256, (images, 3, 32, 32), dtype=np.uint8))
    data = zoo.images.of((pixels, torch.arange(images) % 10), classes=list("0123456789"), name="random")

    def halves(members: Collection) -> tuple[Collection, Collection]:
        middle = len(members) // 2
        return members[:middle], members[middle:]

    def read_dataset(members: Collection) -> None:
        weights = members.dataset()
        for i in range(len(weights)):
            weights[i]

    calls: dict[str, Callable[[Collection], object]] = {
        "canonicalize": lambda members: [None for _ in members.canonicalize(permute="norm").batches(64)],
        "dataset": read_dataset,
        "ns": lambda members: zoo.ns(*halves(members), subset_size=256),
        "evaluate": lambda members: zoo.evaluate(members, data),
    }
    calls = calls if only is None else {only: calls[only]}
    figures: dict[str, float] = {}
    quarter, whole = (zoo.load(NAME, source=folder, n=n) for n in (count // 4, count))
    for name, call in calls.items():
        call(zoo.load(NAME, source=folder, n=2 * SHARDS))  # Import and trace once.
        times = [seconds(partial(call, members)) for members in (quarter, whole)]
        figures |= {f"linear_{name}": round(times[1] / times[0], 2), f"{name}_s": round(times[1], 2)}
        print(json.dumps(figures), flush=True)
    return {"linear": max(figures[f"linear_{name}"] for name in calls), **figures}


def measure(count: int, images: int, only: str | None = None) -> dict[str, float]:
    """Write members, and read and use them; return the figures, or those of one call."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_members(folder, count)
        if only is not None:
            return compare_sizes(folder, count, images, only)
        figures = compare_stacks(zoo.load(NAME, source=folder))
        print(json.dumps(figures), flush=True)
        figures |= compare_ensembles(folder, zoo.load(NAME, source=folder))
        print(json.dumps(figures), flush=True)
        return figures | compare_sizes(folder, count, images, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1024)
    parser.add_argument("--images", type=int, default=500, help="to evaluate on")
    calls = ["canonicalize", "dataset", "ns", "evaluate"]
    parser.add_argument("--only", choices=calls, help="measure the growth of one call alone")
    options = parser.parse_args()
    print(json.dumps(measure(options.members, options.images, options.only)))


if __name__ == "__main__":
    main()
