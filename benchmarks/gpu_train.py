"""Train ResNet-18s and ResNet-20-FRN-SiLUs on a GPU: alone, in stacks, in several processes; under eight minutes.

Run where a GPU is at hand: uv run python benchmarks/gpu_train.py [--seconds 360]. The last line is one JSON object.
It trains by training's own loop, on images made on the device in CIFAR's shape.
grid     a row a cell: recipe, what was set of it, processes, images a second of all members together (`images_s`),
         milliseconds a step, TFLOP/s and share of the chip's dense bfloat16 peak (null for a chip that isn't known),
         memory at its highest (of one process, GB), seconds of the first epoch (with compilation). `failed` where it
         could not run; too little memory ends a recipe's wider stacks.
hours    for each whole collection: as its recipe says, and by the best cell of its network; members' overhead included
gain     the best of the network's cells over one member alone, as its recipe says but for the width
exact    images a second of cuDNN kept deterministic, over those of cuDNN left free
member   one ResNet-18 trained by `training.export.run` and measured by its stored bytes: `accuracy`, `wanted`, the
         seconds, and `overhead_s` of them that are not training; `same` when it is trained again to the same bytes
Cells come with the most telling first; those that no time is left for are missing.
`--device cpu --tiny` runs the same steps on small numbers, to see that they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from synthetic import Side, data_of, made, short, timed
from torch.utils.flop_counter import FlopCounterMode

import checkpoints_zoo as zoo
from checkpoints_zoo.training import loop
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import recipe_by_name
from checkpoints_zoo.workers import Engine, InProcess, Job, Processes

# Dense bfloat16 with tensor cores, FLOP/s, from NVIDIA's data sheets; a name's words, the longer ones first.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
R18, R20 = "resnet18-cifar10", "resnet20-frn-silu-cifar10"
COLLECTIONS = {R20: R20, R18: R18, "resnet18-cifar100": R18, "resnet18-tiny-imagenet": R18}  # -> its network's grid
TRAINING_SET = {"resnet18-tiny-imagenet": 100_000}
WIDTHS = (2, 4, 8, 16, 32)
WANTED = 0.98

Cell = tuple[str, tuple[str, ...], int]  # recipe, what is set, processes


def stack(name: str, width: int, *more: str) -> Cell:
    """Return the cell of a stack."""
    flat = ("channels_last=false",) if name != R20 else ()
    return name, (f"stack_width={width}", *(flat if width > 1 else ()), *more), 1


CELLS: list[Cell] = [
    (R18, (), 1), (R20, (), 1), stack(R20, 1), stack(R18, 8), stack(R20, 4), stack(R20, 32),
    ("resnet18-cifar100", (), 1), ("resnet18-tiny-imagenet", (), 1),
    (R18, (), 2), (R18, (), 4), (R20, (), 2), (R18, ("compile=true",), 1), (R20, ("compile=true",), 1),
    (R18, ("channels_last=false",), 1), stack(R20, 1, "channels_last=true"),
    *(stack(R18, w) for w in WIDTHS if w != 8), stack(R20, 2), stack(R20, 8), stack(R20, 1, "compile=true"),
]  # fmt: skip
SMALL = ("batch_size=2", "precision=float32", "architecture=resnet8", "arguments.widths=[2,2,2]", "warmup_epochs=0")
TINY: list[Cell] = [(R18, (), 1), (R20, (), 1), stack(R20, 1), stack(R18, 2), (R18, (), 2)]


def peak_of(card: str) -> float | None:
    """Return a chip's peak by its name, None where it isn't known."""
    return next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", card)), None)


def flops(recipe: Recipe) -> float:
    """Count the floating-point operations of training on one image, two a multiply-add: forward and backward."""
    module, batch = recipe.skeleton(), 2
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(batch, recipe.preprocess.channels, *recipe.preprocess.size)).sum().backward()
    return float(counter.get_total_flops()) / batch


class Bench:
    """Cells timed on one device.

    Args:
        device: a GPU, or the CPU for small numbers.
        tiny: whether the numbers are small.
    """

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.steps, self.seconds = (1, 0.0) if tiny else (40, 2.0)
        self.base = SMALL if tiny else ()
        self.card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self.peak = peak_of(self.card)
        self.flops: dict[str, float] = {}

    def cell(self, name: str, changes: tuple[str, ...], processes: int = 1) -> dict[str, Any]:
        """Time one cell; return its row."""
        recipe = short(name, (*self.base, *changes))
        row = {"recipe": name, "set": " ".join(changes), "width": recipe.stack_width, "processes": processes}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            if processes == 1:
                rates = [timed(recipe, data_of(recipe, self.steps, self.device), self.device, self.seconds)]
            else:
                rates = self._together(name, (*self.base, *changes), processes)
        except RuntimeError as error:
            return row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        images_s = sum(rate.images / rate.seconds for rate in rates)
        if name not in self.flops:
            self.flops[name] = flops(recipe)
        done = images_s * self.flops[name]
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else None
        return row | {
            "images_s": round(images_s, 1),
            "step_ms": round(1000 * recipe.batch_size * recipe.stack_width * processes / images_s, 3),
            "tflops": round(done / 1e12, 3),
            "of_bf16_peak": None if self.peak is None else round(done / self.peak, 4),
            "memory_gb": None if memory is None or processes > 1 else round(memory, 2),
            "first_s": round(max(rate.first_s for rate in rates), 2),
        }

    def _together(self, name: str, changes: tuple[str, ...], processes: int) -> list[Any]:
        """Time several processes on the device, all at once; for small numbers one after another, in this one."""
        engine: Engine = (
            InProcess(str(self.device)) if self.tiny else Processes(processes, (str(self.device),), tries=1)
        )
        with tempfile.TemporaryDirectory() as ready:
            count = 1 if self.tiny else processes
            side = Side(name, changes, self.steps, 2 * self.seconds, Path(ready), count)
            return [rate for _, rate in engine.run(side, [Job(f"side {i}", i) for i in range(processes)])]

    def member(self) -> dict[str, Any]:
        """Train a member as users do, twice, and measure it by its stored bytes; return what came of it."""
        train, test, size = (64, 32, 8) if self.tiny else (50_000, 10_000, 32)
        sets = made(train, 10, size, self.device), made(test, 10, size, self.device, seed=1)
        recipe = dataclasses.replace(
            recipe_by_name(R18),
            name="synthetic", dataset="synthetic", split_rule="drawn", images=lambda: sets, epochs=4,
            schedule="one-cycle", schedule_unit="step", milestones=(), save_every=4, eval_every=0,
            preprocess=zoo.images.Preprocess((size, size), 3, (0.5,) * 3, (0.25,) * 3),
        )  # fmt: skip
        if self.tiny:
            small: dict[str, Any] = {
                "architecture": "resnet8",
                "arguments": {"channels": 3, "widths": (2, 2, 2)},
                "epochs": 2,
                "batch_size": 32,
                "precision": "float32",
            }
            recipe = dataclasses.replace(recipe, **small)
        hashes, seconds = [], 0.0
        recipe.split("train").fingerprint, recipe.hash  # once a run, not once a member
        with tempfile.TemporaryDirectory() as out:
            for part in ("one", "other"):
                begun = time.perf_counter()
                train_into(recipe, [0], Path(out, part), InProcess(str(self.device)))
                seconds = time.perf_counter() - begun
                members = zoo.load("synthetic", source=Path(out, part))
                (row,) = members.rows.to_pylist()
                hashes.append(row["sha256"])
            report = zoo.evaluate(members, recipe.split("test"), device=self.device, sizes=[1])
        return {
            "accuracy": row["test_accuracy"], "wanted": WANTED, "evaluated": report["accuracy"].value,
            "epochs": recipe.epochs, "seconds": round(seconds, 2), "overhead_s": round(seconds - row["wall_time_s"], 2),
            "same": hashes[0] == hashes[1],
        }  # fmt: skip


def projected(grid: list[dict[str, Any]], overhead_s: float) -> tuple[dict[str, Any], dict[str, float]]:
    """Project hours for whole collections on this device; return them, and each network's gain."""
    known = [row for row in grid if "images_s" in row]
    own = {row["recipe"]: row["images_s"] for row in reversed(known) if not row["set"] and row["processes"] == 1}
    best = {name: max((r["images_s"] for r in known if r["recipe"] == name), default=None) for name in (R18, R20)}
    plain = {R18: "", R20: "stack_width=1"}
    alone = {r["recipe"]: r["images_s"] for r in known if r["set"] == plain.get(r["recipe"]) and r["processes"] == 1}
    gain = {name: round(best[name] / alone[name], 2) for name in alone if best.get(name)}
    hours: dict[str, Any] = {}
    for name, network in COLLECTIONS.items():
        recipe = recipe_by_name(name)
        images = TRAINING_SET.get(name, 50_000) // recipe.batch_size * recipe.batch_size * recipe.epochs
        rates = {"recipe": own.get(name)}
        rates["best"] = own[name] * best[network] / own[network] if name in own and network in own else None
        hours[name] = {"members": recipe.members} | {
            key: round(recipe.members * (images / rate + overhead_s) / 3600, 1) if rate else None
            for key, rate in rates.items()
        }
    return hours, gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=360, help="no cell is begun after so many")
    parser.add_argument("--tiny", action="store_true", help="small numbers")
    arguments = parser.parse_args()
    begun, bench = time.perf_counter(), Bench(torch.device(arguments.device), arguments.tiny)
    member = bench.member()
    print(json.dumps(member), flush=True)
    cells, grid = TINY if arguments.tiny else CELLS, list[dict[str, Any]]()
    full: dict[str, int] = {}  # recipe -> the width that was too much for the memory
    for name, changes, processes in cells:
        if time.perf_counter() - begun > arguments.seconds:
            break
        if short(name, changes).stack_width >= full.get(name, 2**31):
            continue
        grid.append(bench.cell(name, changes, processes))
        if "OutOfMemory" in grid[-1].get("failed", ""):
            full[name] = grid[-1]["width"]
        print(json.dumps(grid[-1]), flush=True)
    with mock.patch.object(loop, "deterministic", return_value=nullcontext()):
        free = bench.cell(*cells[0])
    exact = round(grid[0]["images_s"] / free["images_s"], 3) if "images_s" in grid[0] and "images_s" in free else None
    hours, gain = projected(grid, member["overhead_s"])
    card = {"card": bench.card, "peak": bench.peak, "torch": str(torch.__version__)}
    gflops = {name: round(count / 1e9, 3) for name, count in bench.flops.items()}
    print(json.dumps({**card, "hours": hours, "gain": gain, "exact": exact, "member": member,
                      "gflops_an_image": gflops, "grid": grid}))  # fmt: skip


if __name__ == "__main__":
    main()
