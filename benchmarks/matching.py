"""Match ResNet-18s by their weights, against a plain coordinate descent in the manner of git-re-basin.

Run: OMP_NUM_THREADS=1 uv run python benchmarks/matching.py. The last line is one JSON object: ratios (how many times
longer the plain descent takes) under short names, the medians and the shortest times in milliseconds beside them. All
on one thread; sides are taken in turns in one process, and have to find the same permutations.

independent   two nets drawn apart
planted       a net, and its own permutation with noise of half its weights' standard deviation
noisy         the same with noise of two standard deviations
many_to_one   four independent nets to one reference at once, against one plain run each

The plain descent visits groups in the same order, permutes all tensors of a group at each visit, hands the product to
scipy, and ends after a sweep without a gain. Weights are the architecture's initial ones, norm gains drawn around 1 and
biases around 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by numpy's BLAS once

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.symmetry import Table, permute, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_weights

Params = dict[str, Tensor]
MEMBERS = 4


def drawn(seed: int) -> Params:
    """Draw a ResNet-18; return its parameters."""
    torch.manual_seed(seed)
    state = build_architecture("resnet18").state_dict()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in state.items():
        if tensor.ndim == 1 and name != "fc.bias":
            tensor.copy_(("var" in name or "weight" in name) + 0.2 * torch.randn(tensor.shape, generator=generator))
    return state


def planted(table: Table, params: Params, noise: float, seed: int) -> Params:
    """Permute a net and add noise, in standard deviations of each tensor; return the result."""
    generator = torch.Generator().manual_seed(seed)
    moved = permute(table, params, random_element(table, generator).permutations)
    for name, tensor in moved.items():
        if tensor.is_floating_point():
            size = noise * float(tensor.std())
            moved[name] = tensor + size * torch.randn(tensor.shape, generator=generator)
    return moved


def plain(table: Table, reference: Params, params: Params, seed: int) -> tuple[dict[str, Tensor], int, int]:
    """Match as git-re-basin's ports do; return permutations, sweeps and visits."""
    tensors = {n: a for n, a in table.tensors.items() if a.moves and a.role not in ("mean", "variance")}
    axes = {g: [(n, m.axis) for n, a in tensors.items() for m in a.moves if m.group == g] for g in table.groups}
    perms = {name: torch.arange(group.size) for name, group in table.groups.items()}
    order, progress, sweeps, visits = np.random.default_rng(seed), True, 0, 0
    while progress:
        progress, sweeps = False, sweeps + 1
        for group in (list(perms)[i] for i in order.permutation(len(perms))):
            size, visits = table.groups[group].size, visits + 1
            products = torch.zeros(size, size)
            for name, axis in axes[group]:
                moved = params[name]
                for move in tensors[name].moves:
                    if move.axis != axis:
                        moved = moved.index_select(move.axis, perms[move.group])
                fixed = reference[name].movedim(axis, 0).reshape(size, -1)
                products += fixed @ moved.movedim(axis, 0).reshape(size, -1).T
            gains = products.numpy()
            best = linear_sum_assignment(gains, maximize=True)[1]
            before, after = (float(gains[np.arange(size), p].sum()) for p in (perms[group].numpy(), best))
            progress = progress or after > before + 1e-12
            perms[group] = torch.from_numpy(best)
    return perms, sweeps, visits


def compared(key: str, table: Table, reference: Params, members: Sequence[Params], repeats: int) -> dict[str, Any]:
    """Time both sides in turns, for several seeds; return the ratio of the medians, and what it is made of."""
    stacked = {name: torch.stack([member[name] for member in members]) for name in reference}
    times: tuple[list[float], list[float]] = ([], [])
    visits, same = [], True
    for seed in range(repeats):
        start = time.perf_counter()
        theirs = [plain(table, reference, member, seed) for member in members]
        between = time.perf_counter()
        ours = match_weights(table, stacked, reference, seed=seed)
        end = time.perf_counter()
        times[0].append((end - between) * 1000)
        times[1].append((between - start) * 1000)
        for i, (perms, _, _) in enumerate(theirs):
            same = same and all(torch.equal(p, ours.permutations[name][i]) for name, p in perms.items())
        visits.append([int(ours.visits.sum()), sum(v for _, _, v in theirs)])
    (a, b), least = (statistics.median(t) for t in times), [min(t) for t in times]
    print(f"{key}: {a:.0f} ms against {b:.0f} ms, visits {visits}, same {same}", flush=True)
    rounded = [round(value, 1) for value in (a, least[0], b, least[1])]
    names = (f"{key}_ms", f"{key}_min_ms", f"{key}_other_ms", f"{key}_other_min_ms")
    return {key: round(b / a, 2), **dict(zip(names, rounded, strict=True)), f"{key}_same": same}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[])
    told = parser.parse_args()
    torch.set_num_threads(1)
    table, reference = symmetries("resnet18"), drawn(0)
    cases: dict[str, Callable[[], list[Params]]] = {
        "independent": lambda: [drawn(1)],
        "planted": lambda: [planted(table, reference, 0.5, 1)],
        "noisy": lambda: [planted(table, reference, 2.0, 1)],
        "many_to_one": lambda: [drawn(1 + i) for i in range(MEMBERS)],
    }
    results: dict[str, Any] = {}
    for key, members in cases.items():
        if not told.only or key in told.only:
            results |= compared(key, table, reference, members(), told.repeats)
    print(json.dumps({**results, "members": MEMBERS, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
