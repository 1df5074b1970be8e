"""What a GPU does with the package, in parts that can't take each other down; `gpu.sh` runs them all.

Run where a GPU is at hand: uv run python benchmarks/gpu.py PART [--seconds 60]. A part is a process of its own. Each
measurement is caught, and is one line of JSON on the standard output, and in $OUT/gpu.jsonl at once; one that failed
says so in `failed`. The last line is one JSON object with the part's figures.

facts    the card; time of a large product and of a large copy
engine   ensembles of ResNets against a loop over modules in eager mode: r18_n32_b128_bf16_vs_eager,
         r20_n1024_b1_vs_eager, r20_n1024_b8_vs_eager (times as fast; float32 follows torch's flags, so convolutions
         may use TF32), r18_b1024_share_of_peak (of the chip's dense bfloat16 peak)
load     load_share_of_pinned_copy: ResNet-18s in float16 from a shard onto the card, as a share of the bytes a second
         of a pinned copy; beside it with a cast, sorted into canonical form, and in batches
step     training by the loop that users run: r18_hours_9216, r20_hours_1024 (hours of a whole collection on the card by
         the best of the measured ways), images a second of each way
exact    exact_bits_equal: whether a member that is trained twice is the same to the last bit, in other stacks too
conv     candidates for convolutions of members side by side, milliseconds: memory formats, joined groups, products
`--device cpu --tiny` takes the same steps on small numbers, to see that they run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from synthetic import Side, data_of, random_members, short, timed
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.program import join_groups
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.recipes import recipe_by_name
from checkpoints_zoo.workers import Engine, InProcess, Job, Processes

# Dense bfloat16 with tensor cores, FLOP/s, from NVIDIA's data sheets; a name's words, the longer ones first.
PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
F32, BF16 = torch.float32, torch.bfloat16
NETS = {"r18": "resnet18", "r20": "resnet20-frn-silu"}
R18, R20 = "resnet18-cifar10", "resnet20-frn-silu-cifar10"
CELLS = [
    ("r18", 32, 128, BF16), ("r20", 1024, 1, F32), ("r18", 8, 1024, BF16), ("r20", 1024, 8, F32),
    ("r20", 1024, 1, BF16), ("r20", 1024, 8, BF16), ("r18", 32, 128, F32), ("r18", 32, 1, BF16), ("r20", 64, 128, BF16),
    ("r18", 32, 8, F32), ("r20", 8, 32, F32), ("r20", 1, 1, F32), ("r18", 1, 1, F32),
]  # fmt: skip
KEYS = {
    ("r18", 32, 128, BF16): "r18_n32_b128_bf16_vs_eager", ("r20", 1024, 1, F32): "r20_n1024_b1_vs_eager",
    ("r20", 1024, 8, F32): "r20_n1024_b8_vs_eager",
}  # fmt: skip
# Ways to train: recipe, changes, processes. The first of a recipe is its own.
WAYS: list[tuple[str, tuple[str, ...], int]] = [
    (R18, (), 1), (R20, (), 1), (R18, ("compile=true",), 1), (R20, ("compile=true",), 1), (R18, (), 2),
    (R20, ("compile=true",), 2), (R20, ("compile=true", "stack_width=64"), 1), (R18, (), 3),
    (R20, ("stack_width=1",), 1),
]  # fmt: skip
TINY_WAYS = [(R18, (), 1), (R20, (), 1), (R18, (), 2)]
SMALL = ("batch_size=2", "precision=float32", "architecture=resnet8", "arguments.widths=[8,8,8]", "warmup_epochs=0")
# Convolutions: name, members, batch, channels, height. The first are those of ResNet-20's stages.
SHAPES = [("r20", n, b, c, s) for n, b in ((1024, 1), (256, 8), (16, 128)) for c, s in ((16, 32), (32, 16), (64, 8))]


class Part:
    """One part's measurements.

    Args:
        name: name of the part.
        device: a GPU, or the CPU for small numbers.
        seconds: no measurement is begun after so many seconds.
        tiny: whether the numbers are small.
    """

    def __init__(self, name: str, device: torch.device, seconds: float, tiny: bool) -> None:
        self.name, self.device, self.seconds, self.tiny = name, device, seconds, tiny
        self.begun = time.perf_counter()
        self.is_cuda = device.type == "cuda"
        self.card = torch.cuda.get_device_name(device) if self.is_cuda else "cpu"
        self.peak = next((peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", self.card)), None)
        self.figures: dict[str, Any] = {}

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def say(self, what: str, **row: Any) -> None:
        """Write a line."""
        line = json.dumps({"part": self.name, "at": round(time.perf_counter() - self.begun, 1), "what": what, **row})
        print(line, flush=True)
        if "OUT" in os.environ:
            folder = Path(os.environ["OUT"])
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "gpu.jsonl").open("a") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def milliseconds(self, what: str, make: Callable[[], Callable[[], Any]], most_s: float = 3.0) -> float | None:
        """Time the function that `make` returns; say and return the median, None if it failed or no time is left."""
        if self.left < 2 and not self.tiny:
            return None
        try:
            function = make()
            function()
            self.wait()
            times: list[float] = []
            while len(times) < 3 or (sum(times) < 1000 * min(most_s, self.left) and len(times) < 20):
                start = time.perf_counter()
                function()
                self.wait()
                times.append(1000 * (time.perf_counter() - start))
                if self.tiny or times[0] > 1000 * most_s:
                    break
        except Exception as error:  # noqa: BLE001 - one failure must not end the others
            self.failed(what, error)
            return None
        self.say(what, ms=round(statistics.median(times), 4), best=round(min(times), 4), runs=len(times))
        return statistics.median(times)

    def failed(self, what: str, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        self.say(what, failed=reason, place=f"{Path(place.filename).name}:{place.lineno}")
        if self.is_cuda:
            torch.cuda.empty_cache()

    def facts(self) -> None:
        self.figures |= {"card": self.card, "torch": str(torch.__version__)}
        if self.is_cuda:
            self.figures |= {
                "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
                "tf32": torch.backends.cudnn.allow_tf32,
            }
        n, size = (64, 2**10) if self.tiny else (8192, 2**30)
        a = torch.randn(n, n, device=self.device, dtype=BF16)
        if ms := self.milliseconds(f"product of {n} x {n} in bfloat16", lambda: lambda: a @ a):
            self.figures["product_tflops"] = round(2 * n**3 / ms / 1e9, 1)
        b, c = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        if ms := self.milliseconds(f"copy of {size} bytes on the card", lambda: lambda: b.copy_(c)):
            self.figures["copy_gbs"] = round(2 * size / ms / 1e6, 1)

    def engine(self) -> None:
        cells: list[tuple[str, int, int, torch.dtype]] = [("r20", 2, 2, BF16), ("r18", 1, 1, F32)]
        for cell in cells if self.tiny else CELLS:
            try:
                self.ensemble_cell(*cell)
            except Exception as error:  # noqa: BLE001 - one failure must not end the others
                self.failed(f"cell {cell}", error)

    def ensemble_cell(self, net: str, member_count: int, batch: int, dtype: torch.dtype) -> None:
        label = f"{net} {member_count} members, batch {batch}, {str(dtype).removeprefix('torch.')}"
        if self.left < 5 and not self.tiny:
            return
        modules, stacked = networks(net, member_count, self.device, dtype)
        size = 8 if self.tiny else 32
        x = torch.randn(batch, 3, size, size, device=self.device, dtype=dtype)
        skeleton = build_architecture(NETS[net], channels=3, classes=10).eval().to("meta")
        loop = partial(in_inference_mode, lambda: torch.stack([m(x) for m in modules]))
        ensemble = Ensemble(skeleton, stacked, range(member_count))
        ours = partial(in_inference_mode, lambda: ensemble(x))
        expected, logits = loop().float(), ours().float()
        error = float((logits - expected).abs().max() / expected.abs().max())
        if not error <= (1e-2 if dtype == F32 else 0.1):  # Convolutions in float32 may use TF32.
            raise RuntimeError(f"{label}: logits differ by {error:.1e}")
        eager_ms = self.milliseconds(f"{label}: loop", lambda: loop)
        ms = self.milliseconds(f"{label}: ensemble", lambda: ours)
        assert ensemble._runner is not None
        choice = ensemble._runner.choose(x)[0]
        if ms is None or eager_ms is None:
            return
        flops = flops_per_input(net) * member_count * batch / (ms / 1000)
        share = None if self.peak is None else round(flops / self.peak, 4)
        ratio = round(eager_ms / ms, 2)
        self.say(f"{label}: ratio", ratio=ratio, choice=str(choice), error=error, tflops=round(flops / 1e12, 2),
                 share_of_peak=share)  # fmt: skip
        if key := KEYS.get((net, member_count, batch, dtype)):
            self.figures[key] = ratio
        if (net, batch, dtype) == ("r18", 1024, BF16):
            self.figures["r18_b1024_share_of_peak"] = share

    def load(self) -> None:
        member_count = 8 if self.tiny else 64
        with tempfile.TemporaryDirectory() as folder:
            members = random_members(Path(folder), member_count, self.tiny)
            pinned = torch.zeros(members.nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)
            target = torch.empty_like(pinned, device=self.device)
            canonical = members.canonicalize(permute="first")
            chunk = max(1, member_count // 8)
            sides: dict[str, Callable[[], Any]] = {
                "pinned copy": partial(target.copy_, pinned, non_blocking=True),
                "stack": lambda: members.stack(self.device),
                "stack in float32": lambda: members.stack(self.device, F32),
                "canonical stack in float32": lambda: canonical.stack(self.device, F32),
                "batches": lambda: [None for _ in members.batches(chunk, self.device, F32)],
            }
            gbs = {}
            for name, side in sides.items():
                if ms := self.milliseconds(name, lambda side=side: side):  # type: ignore[misc]
                    gbs[name] = members.nbytes / ms / 1e6
                    self.say(f"{name}: rate", gbs=round(gbs[name], 2))
            if "stack" in gbs and "pinned copy" in gbs:
                self.figures["load_share_of_pinned_copy"] = round(gbs["stack"] / gbs["pinned copy"], 3)
            on_cpu = members.stack("cpu", F32)
            is_equal = all(torch.equal(t.cpu(), on_cpu[n]) for n, t in members.stack(self.device, F32).items())
            self.figures["loaded_bits_equal"] = is_equal

    def step(self) -> None:
        rates: dict[str, list[float]] = {R18: [], R20: []}
        for name, changes, process_count in TINY_WAYS if self.tiny else WAYS:
            if self.left < 10 and not self.tiny:
                break
            label = f"{name} {' '.join(changes)} {process_count} processes"
            changes = (*changes, *(SMALL if self.tiny else ()))
            try:
                recipe = short(name, changes)
                if process_count == 1:
                    data = data_of(recipe, 1 if self.tiny else 40, self.device)
                    results = [timed(recipe, data, self.device, 0.0 if self.tiny else 2.0)]
                else:
                    results = self.together(name, changes, process_count)
            except Exception as error:  # noqa: BLE001 - one failure must not end the others
                self.failed(label, error)
                continue
            rate = sum(r.images / r.seconds for r in results)
            rates[name].append(rate)
            ms = 1000 * recipe.batch_size * recipe.stack_width * process_count / rate
            self.say(label, images_s=round(rate), step_ms=round(ms, 3), first_epoch_s=round(results[0].first_s, 1))
        for key, name, member_count in (("r18_hours_9216", R18, 9216), ("r20_hours_1024", R20, 1024)):
            if rates[name]:
                images = 50_000 * recipe_by_name(name).epochs * member_count
                self.figures[key] = round(images / max(rates[name]) / 3600, 1)
                self.figures[key.replace("hours", "recipe_hours")] = round(images / rates[name][0] / 3600, 1)

    def together(self, name: str, changes: tuple[str, ...], process_count: int) -> list[Any]:
        """Time several processes on the device at once."""
        engine: Engine = InProcess(str(self.device)) if self.tiny else Processes(process_count, (str(self.device),))
        with tempfile.TemporaryDirectory() as ready:
            # Small numbers are timed one after another, in this process.
            steps, seconds, together = (1, 0.0, 1) if self.tiny else (40, 4.0, process_count)
            side = Side(name, changes, steps, seconds, Path(ready), together)
            return [rate for _, rate in engine.run(side, [Job(f"side {i}", i) for i in range(process_count)])]

    def exact(self) -> None:
        are_equal = []
        for name, width in ((R18, 1), (R20, 4)):
            changes = (f"stack_width={width}", *(SMALL if self.tiny else ()))
            recipe = dataclasses.replace(short(name, changes), epochs=2)
            data = data_of(recipe, 2 if self.tiny else 10, self.device)
            ids = [[5, *others][:width] for others in ([1, 2, 3], [4, 7, 8])]
            states = []
            for members in ids:
                state = initial_state(recipe, members).to(self.device)
                for _ in train_epochs(recipe, members, state, data):
                    pass
                states.append({n: t[0].cpu() for n, t in {**state.params, **state.buffers}.items()})
            are_equal.append(all(torch.equal(t, states[1][n]) for n, t in states[0].items()))
            self.say(f"{name} in stacks of {width}, trained twice", equal=are_equal[-1])
        self.figures["exact_bits_equal"] = all(are_equal)

    def conv(self) -> None:
        for name, member_count, batch, channels, size in [("r20", 2, 2, 4, 4)] if self.tiny else SHAPES:
            for dtype in (BF16, F32):
                x = torch.randn(batch, member_count * channels, size, size, device=self.device, dtype=dtype)
                kernel = torch.randn(member_count * channels, channels, 3, 3, device=self.device, dtype=dtype) / 12
                for way, run in convolution_ways(x, kernel, member_count):
                    label = f"{name} {member_count} members, batch {batch}, {channels} channels, {dtype}: {way}"
                    self.milliseconds(label, lambda run=run: partial(in_inference_mode, run), 0.3)  # type: ignore[misc]


def in_inference_mode(function: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return function()


def networks(
    net: str, member_count: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """Return modules of random members, and their stacked tensors; more than 32 members repeat the first 32."""
    torch.manual_seed(0)
    few = []
    for _ in range(min(member_count, 32)):
        module = build_architecture(NETS[net], channels=3, classes=10)
        for name, tensor in module.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
        few.append(module.eval().requires_grad_(False).to(device, dtype))
    states = [module.state_dict() for module in few]
    positions = torch.arange(member_count, device=device) % len(few)
    stacked = {
        n: torch.stack([s[n] for s in states])[positions] for n in states[0] if not n.endswith("num_batches_tracked")
    }
    return [few[i % len(few)] for i in range(member_count)], stacked


def flops_per_input(net: str) -> float:
    """Count the floating-point operations of one input, two a multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        build_architecture(NETS[net], channels=3, classes=10).eval()(torch.zeros(1, 3, 32, 32))
    return float(counter.get_total_flops())


def convolution_ways(x: Tensor, kernel: Tensor, member_count: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield ways to convolve members side by side."""
    last = torch.channels_last
    x_last = x.contiguous(memory_format=last)
    yield "grouped", partial(F.conv2d, x, kernel, padding=1, groups=member_count)
    for channels in (0, 32, 64, 128):
        joined = join_groups(kernel, member_count, channels).contiguous(memory_format=last)
        groups = x.shape[1] // joined.shape[1]
        yield f"channels_last, joined to {channels}", partial(F.conv2d, x_last, joined, padding=1, groups=groups)
    batch, _, height, width = x.shape
    images = x.view(batch * member_count, -1, height, width)
    matrices = kernel.view(1, member_count, kernel.shape[0] // member_count, -1)
    yield (
        "unfold and products",
        lambda: torch.matmul(matrices, F.unfold(images, 3, padding=1).view(batch, member_count, -1, height * width)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("facts", "engine", "load", "step", "exact", "conv")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60, help="no measurement is begun after so many")
    parser.add_argument("--tiny", action="store_true", help="small numbers")
    arguments = parser.parse_args()
    part = Part(arguments.part, torch.device(arguments.device), arguments.seconds, arguments.tiny)
    try:
        getattr(part, arguments.part)()
    except Exception as error:  # noqa: BLE001 - one failure must not end the others
        part.failed(arguments.part, error)
    part.say("figures", **part.figures)


if __name__ == "__main__":
    main()
