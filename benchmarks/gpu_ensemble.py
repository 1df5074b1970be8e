"""Run ensembles of upstream's nets on a GPU: every execution, against a loop over modules; under four minutes.

Run where a GPU is at hand: uv run python benchmarks/gpu_ensemble.py [--seconds 200]. The last line is one JSON object.
`grid` has a row a cell (net, members, batch, dtype): milliseconds of the loop and of each execution, what the table
chooses, its ratio to the loop, TFLOP/s and the share of the chip's dense bfloat16 peak (989 TFLOP/s, H100 SXM).
Cells come with the most telling first; those that no time is left for are missing. `worst` is the lowest ratio.
`--device cpu --tiny` runs the same steps on small numbers, to see that they run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ensemble import build, drawn, ensemble, timed
from torch.utils.flop_counter import FlopCounterMode

PEAK = 989e12
F32, BF16 = torch.float32, torch.bfloat16
CELLS = [
    ("r18", 32, 128, BF16), ("r20", 256, 1, F32), ("r20", 64, 128, BF16), ("r18", 32, 1, F32), ("r20", 256, 8, F32),
    ("r18", 8, 1024, BF16), ("r20", 64, 128, F32), ("r18", 32, 8, BF16), ("r18", 32, 128, F32), ("r20", 8, 1024, BF16),
    ("r20", 1, 1, F32), ("r20", 8, 32, F32), ("r18", 1, 1, F32), ("r20", 256, 32, BF16),
]  # fmt: skip
TINY = [("r20", 2, 2, BF16), ("r18", 1, 1, F32)]


def flops(net: str) -> float:
    """Count the floating-point operations of one input, two a multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        build(net)(torch.zeros(1, 3, 32, 32))
    return float(counter.get_total_flops())


def cell(
    net: str, members: int, batch: int, dtype: torch.dtype, device: torch.device, repeats: int, seconds: float
) -> dict[str, Any]:
    """Time one cell."""
    made = [m.to(device, dtype) for m in drawn(net, members)]
    x = torch.randn(batch, 3, 32, 32).to(device, dtype)
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else int
    names = ["loop", "grouped", "vmap", *(["graph"] if device.type == "cuda" else [])]
    if (net == "r20" and batch * members > 2**16) or (net == "r18" and batch * members > 2**11):
        names = [n for n in names if n not in ("grouped", "vmap")]
    ours = {name: ensemble(net, made, execution=name).to(device, dtype) for name in (None, *names)}
    sides: dict[str, Callable[[], Any]] = {"modules": lambda: torch.stack([m(x) for m in made])}
    refused = {}
    with torch.inference_mode():
        wanted = sides["modules"]().float()
        for name, ens in ours.items():
            try:
                error = float((ens(x).float() - wanted).abs().max() / wanted.abs().max())
            except ValueError as why:  # vmap takes no norm whose statistics are wider than its inputs
                refused[str(name)] = str(why).partition(":")[0]
                continue
            if not error <= (1e-3 if dtype == F32 else 0.1):  # float32 convolutions may use TF32
                raise RuntimeError(f"{net}, {members} members, batch {batch}, {name}: differs by {error:.1e}")
            sides[str(name)] = partial(ens, x)
        times = dict(zip(sides, timed(list(sides.values()), repeats, wait, seconds), strict=True))
    runner = ours[None]._runner
    assert runner is not None
    ms = {name: statistics.median(kept) for name, kept in times.items()}
    rate = flops(net) * members * batch / (ms["None"] / 1000)
    return {
        "net": net, "members": members, "batch": batch, "dtype": str(dtype).removeprefix("torch."),
        "chosen": runner.choose(x)[0].execution, "ratio": round(ms["modules"] / ms["None"], 2),
        "ms": {name: round(value, 3) for name, value in ms.items()}, "refused": refused,
        "tflops": round(rate / 1e12, 2), "of_bf16_peak": round(rate / PEAK, 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200, help="no cell is begun after so many")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small numbers")
    arguments = parser.parse_args()
    device, begun, grid = torch.device(arguments.device), time.perf_counter(), []
    for case in TINY if arguments.tiny else CELLS:
        if time.perf_counter() - begun > arguments.seconds:
            break
        grid.append(cell(*case, device, *((1, 0) if arguments.tiny else (arguments.repeats, 2))))
        print(json.dumps(grid[-1]), flush=True)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    worst = min(grid, key=lambda row: row["ratio"])
    print(json.dumps({"card": card, "torch": torch.__version__, "worst": worst["ratio"], "grid": grid}))


if __name__ == "__main__":
    main()
