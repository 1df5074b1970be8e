"""Compare all pairs of 1,000 members on 2,000 inputs of 100 classes, against loops over the pairs.

Run: uv run python benchmarks/pairwise.py. The last line is one JSON object: ratios under short names, medians in
milliseconds a pair of 2,000 inputs beside them. Sides are taken in turns in one process, on all cores.

speedup    a loop over pairs with the members' entropies computed once: the entropy of the mean of two is left. The
           better of eager and torch.compile (None where that finds no C++ compiler)
vs_direct  a loop with three entropies a pair
peak_mb    memory that ours needs beside the logits (float16, 400 MB)

A run over all 499,500 pairs would take the loops hours: they are timed on a sample of pairs at all 2,000 inputs, ours
on all pairs at PART of the inputs, times 2,000 / PART: it takes inputs in pieces, whose time does not depend on how
many there are. `error` is the largest difference of the sample from float64 entropies, in nats.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from checkpoints_zoo.populations.divergence import compare_pairs

MEMBERS, INPUTS, CLASSES = 1000, 2000, 100
PART = 102  # inputs: six pieces
ROUNDS = 7
SAMPLE = 24  # members of the loops' pairs


def drawn() -> Tensor:
    """Draw logits of members that agree as trained ones do, about 0.13 nats a pair."""
    generator = torch.Generator().manual_seed(0)
    shared = 3 * torch.randn(INPUTS, CLASSES, generator=generator)
    logits = torch.empty(MEMBERS, INPUTS, CLASSES, dtype=torch.float16)
    for member in logits:
        member.copy_(shared + torch.randn(INPUTS, CLASSES, generator=generator))
    return logits


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum() / INPUTS


def cached(p: Tensor, q: Tensor, own_p: Tensor, own_q: Tensor) -> Tensor:
    return entropy((p + q) / 2) - (own_p + own_q) / 2


def direct(p: Tensor, q: Tensor) -> Tensor:
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def compiled(given: tuple[Tensor, Tensor, Tensor, Tensor]) -> Callable[..., Tensor] | None:
    """Compile the loop's step; return it, None where there is no compiler."""
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    step = torch.compile(cached)
    try:
        step(*given)
    except (InductorError, InvalidCxxCompiler) as error:
        print(f"no compiled loop: {str(error).splitlines()[0]}", flush=True)
        return None
    return step


def main() -> None:
    logits = drawn()
    part = logits[:, :PART]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = compare_pairs(part)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    some = logits[:: MEMBERS // SAMPLE][:SAMPLE]
    at = list(range(0, MEMBERS, MEMBERS // SAMPLE))[:SAMPLE]
    exact = some[:, :PART].double().softmax(-1)
    own = [float(torch.special.entr(p).sum()) for p in exact]
    error = 0.0
    for i, j in itertools.combinations(range(SAMPLE), 2):
        wanted = (float(torch.special.entr((exact[i] + exact[j]) / 2).sum()) - (own[i] + own[j]) / 2) / PART
        error = max(error, abs(float(found.information[at[i], at[j]]) - wanted))

    probs = list(some.float().softmax(-1))
    entropies = [entropy(p) for p in probs]
    pairs = list(itertools.combinations(range(SAMPLE), 2))
    step = compiled((probs[0], probs[1], entropies[0], entropies[1]))
    loops: dict[str, Callable[[int, int], Tensor]] = {
        "cached": lambda i, j: cached(probs[i], probs[j], entropies[i], entropies[j]),
        "direct": lambda i, j: direct(probs[i], probs[j]),
    }
    if step is not None:
        loops["compiled"] = lambda i, j: step(probs[i], probs[j], entropies[i], entropies[j])
    times: dict[str, list[float]] = {name: [] for name in ("ours", *loops)}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        compare_pairs(part)
        whole = (time.perf_counter() - start) * INPUTS / PART
        times["ours"].append(whole * 1000 / (MEMBERS * (MEMBERS - 1) / 2))
        for name, loop in loops.items():
            start = time.perf_counter()
            for i, j in pairs:
                loop(i, j)
            times[name].append((time.perf_counter() - start) * 1000 / len(pairs))
        print({name: round(values[-1], 4) for name, values in times.items()}, flush=True)

    ms = {name: statistics.median(values) for name, values in times.items()}
    least = min(ms["cached"], ms.get("compiled", ms["cached"]))
    result = {
        "speedup": round(least / ms["ours"], 2),
        "vs_direct": round(ms["direct"] / ms["ours"], 2),
        "peak_mb": round(peak),
        "error": error,
        **{f"{name}_ms": round(value, 4) for name, value in ms.items()},
        "compiled_ms": round(ms["compiled"], 4) if step is not None else None,
        "all_pairs_s": round(ms["ours"] * MEMBERS * (MEMBERS - 1) / 2000, 1),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
