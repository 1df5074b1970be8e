"""Sort the units of 256 ResNet-20 (upstream's net: filter response norm with thresholds, SiLU), against two loops.

Run: OMP_NUM_THREADS=1 uv run python benchmarks/canonical.py. The last line is one JSON object: ratios (how many times
longer a loop takes), the medians and the shortest times in milliseconds beside them. All on one thread; sides are
taken in turns in one process.

vs_deepcopy     the worst case of a loop that copies a module and sorts its layers
vs_state_dicts  the worst case of a loop that clones a state dict and sorts its tensors by indexing, `weight[order]`
vs_selects      the same with `weight.index_select`, which is faster

Cases, each with float16 and float32 weights:

norm            keys are row norms in float64; inner channels and the residual streams are sorted
first           keys are first weights, as in the authors' code; inner channels alone are sorted

The loops have their layers written out, compute the same keys, sort stably and leave ties by index. Ours breaks ties
by the rest of the unit, so that the result doesn't depend on the order before: the time for that is in it. Where no
keys are tied the results are compared bit for bit: `_compared` says on how many members.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_uncertainty.layers.filter_response_norm import FilterResponseNorm2d
from torch_uncertainty.models.classification.resnet import resnet

from checkpoints_zoo.symmetry import Table, symmetries
from checkpoints_zoo.symmetry.canonical.maps import canonicalize

MEMBERS = 256
REPEATS = 7
HEADLINES = ("vs_deepcopy", "vs_state_dicts", "vs_selects")
State = dict[str, Tensor]
Take = Callable[[Tensor, int, Tensor], Tensor]
Group = tuple[str, list[tuple[str, int]]]  # the tensor that gives the keys; tensors with the axes that move


def build() -> nn.Module:
    options: dict[str, Any] = {"activation_fn": F.silu, "normalization_layer": FilterResponseNorm2d}
    module: nn.Module = resnet(in_channels=3, num_classes=10, arch=20, style="cifar", conv_bias=False, **options)
    return module.eval()


def norm(name: str) -> list[tuple[str, int]]:
    return [(f"{name}.{part}", 1) for part in ("gamma", "beta", "tau")]


def groups(streams: bool) -> list[Group]:
    """Write out what moves with what: inner channels of each block, and the streams if asked for."""
    found: list[Group] = []
    for stage in (1, 2, 3):
        blocks = [f"layer{stage}.{i}" for i in range(3)]
        opened, own = ("conv1", "bn1") if stage == 1 else (f"{blocks[0]}.shortcut.0", f"{blocks[0]}.shortcut.1")
        stream = [(f"{opened}.weight", 0), *norm(own)]
        for block in blocks:
            stream += [(f"{block}.conv2.weight", 0), *norm(f"{block}.bn2")]
        readers = blocks if stage == 1 else blocks[1:]
        stream += [(f"{block}.conv1.weight", 1) for block in readers]
        stream += [("linear.weight", 1)] if stage == 3 else []
        stream += [(f"layer{stage + 1}.0.{part}.weight", 1) for part in ("conv1", "shortcut.0") if stage < 3]
        inner = [
            (f"{b}.conv1.weight", [(f"{b}.conv1.weight", 0), *norm(f"{b}.bn1"), (f"{b}.conv2.weight", 1)])
            for b in blocks
        ]
        if not streams:
            found += inner
        elif stage == 1:
            found += [(f"{opened}.weight", stream), *inner]
        else:
            # In topological order: the first block's inner channels, then what it writes.
            found += [inner[0], (f"{blocks[0]}.conv2.weight", stream), *inner[1:]]
    return found


def keys_of(weight: Tensor, key: str) -> Tensor:
    rows = weight.flatten(1)
    return rows[:, 0] if key == "first" else rows.double().square().sum(1)


def indexed(tensor: Tensor, axis: int, order: Tensor) -> Tensor:
    return tensor[order] if axis == 0 else tensor[:, order]


def by_state_dict(state: State, layers: Sequence[Group], key: str, take: Take) -> State:
    """Clone a state dict and sort its tensors."""
    result = {name: tensor.clone() for name, tensor in state.items()}
    for writer, moved in layers:
        order = keys_of(result[writer], key).argsort(descending=True, stable=True)
        for name, axis in moved:
            result[name] = take(result[name], axis, order)
    return result


def by_module(module: nn.Module, layers: Sequence[Group], key: str) -> nn.Module:
    """Copy a module and sort its layers, as the authors' code does."""
    result = copy.deepcopy(module)
    for writer, moved in layers:
        order = keys_of(result.get_parameter(writer).data, key).argsort(descending=True, stable=True)
        for name, axis in moved:
            parameter = result.get_parameter(name)
            parameter.data = indexed(parameter.data, axis, order)
    return result


def tied(state: State, layers: Sequence[Group], key: str) -> bool:
    """Say whether any two keys of a sorted member are equal."""
    every = (keys_of(state[writer], key) for writer, _ in layers)
    return any(bool((keys[1:] == keys[:-1]).any()) for keys in every)


def compared(sorted_: State, loop: Sequence[State], layers: Sequence[Group], key: str) -> int:
    """Compare members without tied keys bit for bit; return how many there are."""
    clear = [i for i, state in enumerate(loop) if not tied(state, layers, key)]
    for i in clear:
        for name, tensor in loop[i].items():
            if not torch.equal(sorted_[name][i], tensor):
                raise RuntimeError(f"{name} of member {i} differs")
    return len(clear)


def timed(sides: Sequence[Callable[[], Any]]) -> list[list[float]]:
    """Run sides in turns, once before it counts; return each one's times in milliseconds."""
    times: list[list[float]] = [[] for _ in sides]
    for i in range(REPEATS + 1):
        for side, kept in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            kept.extend([(time.perf_counter() - start) * 1000] * (i > 0))
    return times


def case(stacked: State, modules: Sequence[nn.Module], table: Table, key: str, streams: bool) -> dict[str, float]:
    """Time one case; return its ratios and times, without the case's name."""
    layers = groups(streams)
    states = [{name: tensor[i] for name, tensor in stacked.items()} for i in range(MEMBERS)]

    def ours() -> State:
        return canonicalize(table, stacked, permute=key, streams=streams)[0]

    def loop(take: Take = indexed) -> list[State]:
        return [by_state_dict(state, layers, key, take) for state in states]

    def selects() -> list[State]:
        return loop(torch.index_select)

    def copies() -> list[nn.Module]:
        return [by_module(module, layers, key) for module in modules]

    sorted_ = ours()
    count = compared(sorted_, loop(), layers, key)
    if compared(sorted_, [module.state_dict() for module in copies()], layers, key) != count:
        raise RuntimeError("the loops differ")
    sides: dict[str, Callable[[], Any]] = {"ours": ours, "state_dicts": loop, "selects": selects, "deepcopy": copies}
    times = dict(zip(sides, timed(list(sides.values())), strict=True))
    middle = {side: statistics.median(own) for side, own in times.items()}
    return {
        **{f"vs_{side}": round(middle[side] / middle["ours"], 2) for side in sides if side != "ours"},
        "compared": count,
        **{f"{side}_ms": round(value, 1) for side, value in middle.items()},
        **{f"{side}_min_ms": round(min(own), 1) for side, own in times.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build()
    table = symmetries(module, torch.zeros(1, 3, 32, 32))
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    drawn = {name: torch.randn(MEMBERS, *shape) / max(1, shape[1:].numel()) ** 0.5 for name, shape in shapes.items()}
    results: dict[str, float] = {}
    for dtype in (torch.float16, torch.float32):
        stacked = {name: tensor.to(dtype) for name, tensor in drawn.items()}
        modules = [copy.deepcopy(module).to(dtype) for _ in range(MEMBERS)]
        for i, own in enumerate(modules):
            own.load_state_dict({name: tensor[i] for name, tensor in stacked.items()})
        for key, streams in (("norm", True), ("first", False)):
            with torch.no_grad():
                found = case(stacked, modules, table, key, streams)
            name = f"{key}_{str(dtype).removeprefix('torch.')}"
            print(name, found, flush=True)
            results |= {f"{name}_{figure}": value for figure, value in found.items()}
    worst = {key: min(v for n, v in results.items() if n.endswith(key)) for key in HEADLINES}
    print(json.dumps({**worst, **results, "members": MEMBERS, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
