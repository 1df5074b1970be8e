"""Work with populations of transformers, against plain code.

Run: OMP_NUM_THREADS=1 uv run python benchmarks/attention.py [--repeats 15] [--only FIGURE …]. The last line is one JSON
object: ratios (how many times longer the plain code takes) under short names, the medians and the shortest times in
milliseconds beside them. All on one thread; sides are taken in turns in one process, and have to give the same result.

canonical_vs_products   balanced heads of one attention of ViT-B's shape (width 768, 12 heads), in float64, against the
               singular values of each head's products: the faster of torch.linalg.svd and torch.svd_lowrank
align_vs_loop  31 members of vit-digits aligned to the first one, at once against one by one
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
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.symmetry import apply, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from checkpoints_zoo.symmetry.canonical.head_balancing import balance_matrices
from checkpoints_zoo.symmetry.canonical.shifts import remove_shifts


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


def canonical_vs_products(repeats: int) -> dict[str, Any]:
    """Time balanced heads and singular value decompositions of the products of queries and keys, and so on."""
    width, heads = 768, 12
    units = width // heads
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(width, heads, batch_first=True).double()
    table = symmetries(SelfAttention(layer), torch.zeros(1, 2, width, dtype=torch.float64))
    weights = {name: tensor.detach()[None] for name, tensor in SelfAttention(layer).state_dict().items()}
    weights = apply(table, weights, random_element(table, torch.Generator().manual_seed(1), members=1))
    weights, _ = remove_shifts(table, weights)
    q, k, v = weights["layer.in_proj_weight"].reshape(3, heads, units, width)  # (head, unit, input)
    q_bias = weights["layer.in_proj_bias"].reshape(3, heads, units)[0]
    o = weights["layer.out_proj.weight"].reshape(width, heads, units).permute(1, 2, 0)  # (head, unit, output)
    q = torch.cat([q, q_bias[..., None]], -1)

    def ours() -> dict[str, Tensor]:
        return balance_matrices(table, weights).tensors

    def by_products(decompose: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        factors = []
        for written, read in ((q, k), (v, o)):
            for head in range(heads):
                u, values, w = decompose(written[head].T @ read[head])
                root = values[:units].sqrt()
                factors.append((root[:, None] * u[:, :units].T, root[:, None] * w[:, :units].T))
        return factors

    def whole(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, values, w = torch.linalg.svd(product, full_matrices=False)
        return u, values, w.mT

    def low_rank(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.svd_lowrank(product, q=units, niter=2)

    expected = by_products(whole)
    balanced = ours()["layer.in_proj_weight"].reshape(3, heads, units, width)
    for part, offset in ((0, 0), (2, heads)):
        for head in range(heads):
            other = expected[offset + head][0][:, :width]
            grams = [rows.T @ rows for rows in (balanced[part, head], other)]
            error = float((grams[0] - grams[1]).abs().max() / grams[1].abs().max())
            if error > 1e-9:
                raise RuntimeError(f"canonical_vs_products: head {head} differs by {error:.1e} of the largest")
    sides = timed([ours, lambda: by_products(whole), lambda: by_products(low_rank)], max(1, repeats // 5))
    return figures("canonical_vs_products", sides[0], min(sides[1:], key=statistics.median))


class SelfAttention(nn.Module):
    """Attention of all tokens to all tokens."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return result


def align_vs_loop(repeats: int) -> dict[str, Any]:
    """Time members that are aligned at once, and one by one."""
    members = zoo.load("vit-digits")
    table, stacked = members.symmetry_table, members.stack(dtype=torch.float64)
    reference, others = {n: t[0] for n, t in stacked.items()}, {n: t[1:] for n, t in stacked.items()}

    def at_once() -> Tensor:
        return match_weights(table, others, reference).objective

    def one_by_one() -> Tensor:
        singles = ({n: t[i : i + 1] for n, t in others.items()} for i in range(len(members) - 1))
        return torch.cat([match_weights(table, single, reference).objective for single in singles])

    error = float((at_once() / one_by_one() - 1).abs().max())
    if error > 1e-6:
        raise RuntimeError(f"align_vs_loop: objectives differ by {error:.1e}")
    return figures("align_vs_loop", *timed([at_once, one_by_one], max(1, repeats // 5)))


FIGURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "canonical_vs_products": canonical_vs_products, "align_vs_loop": align_vs_loop, "ensemble_vit": ensemble_vit,
}  # fmt: skip


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
