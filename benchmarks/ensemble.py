"""Run ensembles of upstream's nets, against a loop over modules.

Run: uv run python benchmarks/ensemble.py [--repeats 5] [--threads N]; with --errors, how far dtypes, executions and
torch.compile are from the modules' float32 logits, on the collections that ship; with --alone, the same members by
torch.func.vmap and torch.compile alone. The last line is one JSON object: ratios (how many times longer the loop takes)
under short names, the medians in milliseconds beside them.

Nets are torch-uncertainty's own, random with random norms; inputs 3 x 32 x 32. Sides are taken in turns in one process.
r20_n64_b1     64 ResNet-20 (FRN, SiLU), one image
r20_n8_b128    8 of them, 128 images, float32
r18_b8_bf16    4 ResNet-18, 8 images, bfloat16 against the float32 loop; null without bfloat16 matrix units
worst          the lowest ratio of a grid members x batch of both nets, and where; `band` is the lowest ratio that the
               loop has against itself, taken in the same turns
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch_uncertainty.layers.filter_response_norm import FilterResponseNorm2d
from torch_uncertainty.models.classification.resnet import resnet

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.ensemble import Ensemble

GRID = {"r20": [(1, 1), (1, 128), (8, 1), (8, 8), (8, 32), (64, 4)], "r18": [(1, 1), (4, 1), (4, 8), (1, 64)]}
UNITS = ("amx_bf16", "avx512_bf16")


def build(net: str) -> nn.Module:
    """Build one of upstream's nets; return it in eval mode."""
    options: dict[str, Any] = {"arch": 18}
    if net == "r20":
        options = {"arch": 20, "activation_fn": F.silu, "normalization_layer": FilterResponseNorm2d}
    module: nn.Module = resnet(in_channels=3, num_classes=10, style="cifar", conv_bias=False, **options)
    return module.eval().requires_grad_(False)


def drawn(net: str, members: int) -> list[nn.Module]:
    """Draw members with random norms; return them."""
    torch.manual_seed(0)
    made = [build(net) for _ in range(members)]
    for name, tensor in (pair for m in made for pair in m.state_dict().items()):
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point() and (tensor.dim() == 1 or name.endswith(("gamma", "beta", "tau"))):
            tensor.add_(torch.randn(tensor.shape), alpha=0.3)
    return made


def ensemble(net: str, made: Sequence[nn.Module], **options: Any) -> Ensemble:
    states = [m.state_dict() for m in made]
    stacked = {n: torch.stack([s[n] for s in states]) for n in states[0] if not n.endswith("num_batches_tracked")}
    return Ensemble(build(net).to("meta"), stacked, range(len(made)), **options)


def timed(
    sides: Sequence[Callable[[], Any]], repeats: int, wait: Callable[[], Any] = int, seconds: float = 2
) -> list[list[float]]:
    """Run sides in turns, once before it counts, quick ones more often; return each one's times in milliseconds.

    Args:
        sides: what to time.
        repeats: turns, at least.
        wait: returns when all that was started is done.
        seconds: that more turns than `repeats` may take.
    """
    times: list[list[float]] = [[] for _ in sides]
    for i in range(20 * repeats + 1):
        if i > repeats and sum(map(sum, times)) > 1000 * seconds:
            break
        for side, kept in zip(sides, times, strict=True):
            wait()
            start = time.perf_counter()
            side()
            wait()
            kept.extend([(time.perf_counter() - start) * 1000] * (i > 0))
    return times


def compared(net: str, members: int, batch: int, repeats: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Time an ensemble against the loop, and the loop against itself."""
    made, x = drawn(net, members), torch.randn(batch, 3, 32, 32)
    ours, own = ensemble(net, made).to(dtype), x.to(dtype)

    def loop() -> Tensor:
        return torch.stack([m(x) for m in made])

    with torch.inference_mode():
        wanted = loop()
        error = float((ours(own) - wanted).abs().max() / wanted.abs().max())
        if error > (1e-5 if dtype == torch.float32 else 0.1):
            raise RuntimeError(f"{net}, {members} members, batch {batch}: logits differ by {error:.1e} of the largest")
        first, theirs, again = timed([loop, lambda: ours(own), loop], repeats, seconds=1)
    assert ours._runner is not None
    both, mine = statistics.median(first + again), statistics.median(theirs)
    halves = statistics.median(first), statistics.median(again)
    print(
        f"{net} n{members} b{batch} {dtype}: {mine:.1f} ms against {both:.1f} ms, {ours._runner.choose(own)[0]}",
        flush=True,
    )
    return {"ratio": both / mine, "ms": mine, "other_ms": both, "band": min(halves) / max(halves), "error": error}


def named(key: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: round(found["ratio"], 2),
        f"{key}_ms": round(found["ms"], 1),
        f"{key}_other_ms": round(found["other_ms"], 1),
        f"{key}_error": float(f"{found['error']:.1e}"),
    }


def matrix_units() -> bool:
    """Say whether this CPU multiplies bfloat16 matrices."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(unit in flags.read_text() for unit in UNITS)


def errors(compiled: bool) -> dict[str, Any]:
    """Measure how far logits are from the float32 modules', in units of the largest, and how many arg-maxes differ."""
    found: dict[str, Any] = {}
    for name in ("convnet-digits", "resnet8-digits"):
        members = zoo.load(name)
        x = members.preprocess(zoo.images.load("digits").images)
        with torch.inference_mode():
            wanted = torch.stack([m.model()(x) for m in members])
            kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
                **{e: (torch.float32, {"execution": e}) for e in ("loop", "grouped", "vmap")},
                "bfloat16": (torch.bfloat16, {}),
                "float16": (torch.float16, {}),
                **({"compile": (torch.float32, {"compile": True})} if compiled else {}),
            }
            for kind, (dtype, options) in kinds.items():
                logits = members.ensemble(dtype=dtype, **options)(x.to(dtype)).float()
                error = float((logits - wanted).abs().max() / wanted.abs().max())
                differ = float((logits.argmax(-1) != wanted.argmax(-1)).double().mean())
                print(f"{name} {kind}: {error:.1e} of the largest logit, {differ:.2%} of arg-maxes differ", flush=True)
                found[f"{name} {kind}"] = [float(f"{error:.1e}"), round(differ, 5)]
    return found


def alone(repeats: int) -> dict[str, Any]:
    """Time the shipped collections by torch.func.vmap and torch.compile alone; return how many times longer they take.

    "vmap" is torch.func.vmap over functional_call, "compiled" torch.compile of that, "loop" functional_call member by
    member, "compiled loop" torch.compile of one member's call.
    """
    ratios: dict[str, Any] = {}
    for name in ("convnet-digits", "resnet8-digits"):
        members, digits = zoo.load(name), zoo.images.load("digits")
        module, stacked = members[0].model().float(), members.stack(dtype=torch.float32)
        inputs = members.preprocess(digits.images)

        def member(state: Mapping[str, Tensor], x: Tensor, module: nn.Module = module) -> Tensor:
            logits: Tensor = functional_call(module, dict(state), (x,))
            return logits

        together, compiled_member = vmap(member, in_dims=(0, None)), torch.compile(member)
        compiled_together = torch.compile(together)
        states = [{n: t[i] for n, t in stacked.items()} for i in range(len(members))]
        for batch in (1, 32, 540):
            x = inputs[:batch]

            def one_by_one(run: Callable[..., Tensor], x: Tensor, states: Sequence[Mapping[str, Tensor]]) -> Tensor:
                return torch.stack([run(state, x) for state in states])

            sides: dict[str, Callable[[], Tensor]] = {
                "ours": partial(members.ensemble(), x),
                "vmap": partial(together, stacked, x),
                "compiled": partial(compiled_together, stacked, x),
                "loop": partial(one_by_one, member, x, states),
                "compiled loop": partial(one_by_one, compiled_member, x, states),
            }
            with torch.inference_mode():
                expected = sides["loop"]()
                first_s = {}
                for side, run in sides.items():
                    start = time.perf_counter()
                    run()
                    first_s[side] = round(time.perf_counter() - start, 1)
                    error = float((run() - expected).abs().max() / expected.abs().max())
                    if error > 1e-5:
                        raise RuntimeError(f"{name}, {side}: logits differ by {error:.1e} of the largest")
                times = [statistics.median(each) for each in timed(list(sides.values()), repeats)]
            slower = {side: round(ms / times[0], 2) for side, ms in zip(sides, times, strict=True) if side != "ours"}
            print(f"{name} n{len(members)} b{batch}: ours {times[0]:.1f} ms; times longer: {slower}", flush=True)
            print(f"  seconds of the first call: {first_s}", flush=True)
            ratios[f"{name} b{batch}"] = {"ours_ms": round(times[0], 2), **slower, "compile_s": first_s["compiled"]}
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--errors", action="store_true", help="measure errors instead of times")
    parser.add_argument("--compile", action="store_true", help="with --errors: torch.compile too")
    parser.add_argument("--alone", action="store_true", help="time torch.func and torch.compile alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.errors:
        print(json.dumps(errors(arguments.compile)))
        return
    repeats = arguments.repeats
    if arguments.alone:
        print(json.dumps({**alone(repeats), "repeats": repeats, "threads": torch.get_num_threads()}))
        return
    results = named("r20_n64_b1", compared("r20", 64, 1, repeats))
    results |= named("r20_n8_b128", compared("r20", 8, 128, repeats))
    if matrix_units():
        results |= named("r18_b8_bf16", compared("r18", 4, 8, repeats, torch.bfloat16))
    else:
        results |= {"r18_b8_bf16": None, "r18_b8_bf16_why": f"this CPU has none of {', '.join(UNITS)}"}
    grid = {f"{net}_n{n}_b{b}": compared(net, n, b, repeats) for net, cells in GRID.items() for n, b in cells}
    worst = min(grid, key=lambda cell: grid[cell]["ratio"])
    results |= {
        "worst": round(grid[worst]["ratio"], 2),
        "worst_at": worst,
        "band": round(min(cell["band"] for cell in grid.values()), 2),
        "grid": {cell: round(found["ratio"], 2) for cell, found in grid.items()},
    }
    print(json.dumps({**results, "repeats": repeats, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
