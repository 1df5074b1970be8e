"""Work with populations of transformers, against plain code.

Run: OMP_NUM_THREADS=1 uv run python benchmarks/attention.py [--repeats 15] [--only FIGURE …]. The last line is one JSON
object: ratios (how many times longer the plain code takes) under short names, the medians and the shortest times in
milliseconds beside them. All on one thread; sides are taken in turns in one process, and have to give the same result.

ensemble_vit   the logits of 64 vision transformers (two copies of each member of vit-digits) on a batch of 8 images, by
               the ensemble, against a loop over the modules
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

import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.ensemble import Ensemble


def ensemble_vit(repeats: int) -> dict[str, Any]:
    """Time an ensemble of 64 vision transformers and a loop over their modules."""
    members = zoo.load("vit-digits")
    modules = [member.model() for member in members for _ in range(2)]
    stacked = {name: tensor.repeat_interleave(2, 0) for name, tensor in members.stack(dtype=torch.float32).items()}
    ensemble = Ensemble(modules[0], stacked, range(len(modules)))
    images = members.preprocess(zoo.images.load("digits").images)

    def loop(inputs: Tensor) -> Tensor:
        return torch.stack([module(inputs) for module in modules])

    with torch.inference_mode():
        # All images, then a batch of the size that is timed. From the first on, malloc keeps what both sides free.
        for inputs in (images, images[:8]):
            expected = loop(inputs)
            error = float((ensemble(inputs) - expected).abs().max() / expected.abs().max())
            if error > 1e-5:
                raise RuntimeError(f"ensemble_vit: logits differ by {error:.1e} of the largest")
        return figures("ensemble_vit", *timed([lambda: ensemble(inputs), lambda: loop(inputs)], repeats))


FIGURES: dict[str, Callable[[int], dict[str, Any]]] = {"ensemble_vit": ensemble_vit}


def timed(sides: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Run sides in turns, once before it counts; return each one's times in milliseconds."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(repeats + 1):
        for side, kept in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            kept.extend([(time.perf_counter() - start) * 1000] * (turn > 0))
    return times


def figures(key: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the medians, medians and shortest times, in milliseconds."""
    (a, b), least = (statistics.median(t) for t in (ours, theirs)), (min(ours), min(theirs))
    print(f"{key}: {a:.2f} ms against {b:.2f} ms", flush=True)
    rounded = [round(value, 2) for value in (a, least[0], b, least[1])]
    names = (f"{key}_ms", f"{key}_min_ms", f"{key}_other_ms", f"{key}_other_min_ms")
    return {key: round(b / a, 2), **dict(zip(names, rounded, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=FIGURES, default=list(FIGURES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in arguments.only:
        results |= FIGURES[name](arguments.repeats)
    print(json.dumps({**results, "repeats": arguments.repeats, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
