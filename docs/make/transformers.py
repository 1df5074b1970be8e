"""The numbers on the page on transformers: counts of public architectures, and the barriers of `vit-digits`.

`python -m docs.make --measure transformers docs/transformers.md` measures them anew, which takes an hour.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.symmetry import Table, symmetries
from docs.make.marks import fill

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "transformers.md"
MEASURED = ROOT / "docs" / "studies" / "transformers.json"
COLLECTION = "vit-digits"
LEVELS = {
    None: "as trained",
    "units": "permutations of hidden units",
    "heads": "and of heads",
    "matrices": "and matrices inside heads, scales, shifts",
    "streams": "and rotations of the residual stream",
}
RESAMPLES = 10_000
POINTS = 11  # on a line


def page() -> str:
    """Return the page with its numbers filled in."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    parts = {"counts": _count_rows(measured["counts"]), "barriers": _barrier_rows(measured["barriers"])}
    return fill(PAGE.read_text(encoding="utf-8"), parts)


def measure() -> None:
    """Count the symmetries of the public architectures, and measure all lines of the collection; write the file."""
    counts = {name: count(*build()) for name, build in ARCHITECTURES.items()}
    values = {"counts": counts, "barriers": {using or "stored": all_barriers(using) for using in LEVELS}}
    MEASURED.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


# Public architectures, as their configurations define them, with random weights.


def _of_transformers(model: str, config: str, **arguments: Any) -> tuple[nn.Module, Tensor]:
    """Return a model without memory for its parameters. Buffers, such as the frequencies of rotary positions, are those
    of a model of one layer."""
    import transformers

    build, configure = getattr(transformers, model), getattr(transformers, config)
    with torch.device("meta"):
        network: nn.Module = build(configure(**arguments))
    for name, buffer in build(configure(**arguments | {"num_hidden_layers": 1})).named_buffers():
        parent, _, last = name.rpartition(".")
        network.get_submodule(parent)._buffers[last] = buffer
    return network, torch.zeros(1, 4, dtype=torch.int64)


def _vit() -> tuple[nn.Module, Tensor]:
    from timm.models.vision_transformer import vit_base_patch16_224

    return vit_base_patch16_224(), torch.zeros(1, 3, 224, 224)


ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "BERT base": lambda: _of_transformers("BertForSequenceClassification", "BertConfig"),
    "GPT-2 (124M)": lambda: _of_transformers("GPT2LMHeadModel", "GPT2Config"),
    "Pythia 70M": lambda: _of_transformers(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=50304, hidden_size=512, num_hidden_layers=6,
        num_attention_heads=8, intermediate_size=2048, rotary_pct=0.25, tie_word_embeddings=False,
    ),
    "TinyLlama 1.1B": lambda: _of_transformers(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=32000, hidden_size=2048, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632, tie_word_embeddings=False,
    ),
    "Qwen3 0.6B": lambda: _of_transformers(
        "Qwen3ForCausalLM", "Qwen3Config", vocab_size=151936, hidden_size=1024, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, tie_word_embeddings=True,
    ),
    "ViT-B/16": _vit,
}  # fmt: skip


def count(network: nn.Module, example: Tensor) -> dict[str, float]:
    """Count the symmetries of a network; return the counts."""
    return counts_of(symmetries(network, example), sum(p.numel() for p in network.parameters()))


def counts_of(table: Table, parameters: int) -> dict[str, float]:
    """Return the counts of a symmetry table, by name."""
    streams = [matrix for matrix in table.matrices.values() if "orthogonal" in matrix.kind and matrix.count == 1]
    return {
        "parameters": parameters,
        "log10_permutations": table.log10_permutations(),
        "inside heads": sum(m.dimension for m in table.matrices.values() if m not in streams),
        "streams": sum(matrix.dimension for matrix in streams),
        "scales": table.scaling_freedom,
        "shifts": sum(shift.dimension for shift in table.shifts.values()),
    }


def _count_rows(counts: dict[str, dict[str, float]]) -> str:
    names = ("inside heads", "streams", "scales", "shifts")
    lines = [
        "| network | parameters | permutations | inside heads | streams | scales | shifts | share |",
        "|---" * 8 + "|",
    ]
    for name, of_network in counts.items():
        share = sum(of_network[part] for part in names) / of_network["parameters"]
        cells = [f"{of_network['parameters']:,.0f}", f"10^{of_network['log10_permutations']:,.0f}"]
        cells += [f"{of_network[part]:,.0f}" for part in names]
        lines.append(f"| {name} | {' | '.join(cells)} | {100 * share:.2f} % |")
    return "\n".join(lines)


# Barriers of all pairs of members.


def all_barriers(using: str | None) -> dict[str, Any]:
    """Measure the barrier of all pairs of members, the second aligned to the first by some symmetries.

    Args:
        using: as in `Collection.align`; None: no alignment.

    Returns:
        The mean with an interval that resamples members, and the barriers (nats) of the pairs, in order.
    """
    members = zoo.load(COLLECTION)
    square = torch.zeros(len(members), len(members), dtype=torch.float64)
    for first in range(len(members) - 1):
        view = members if using is None else members.align(to=first, using=using)
        square[first, first + 1 :] = zoo.barrier(view[first:], to=first, points=POINTS).barriers
    low, high = interval_over_members(square)
    pairs = square[*torch.triu_indices(len(members), len(members), 1)]
    return {"mean": float(pairs.mean()), "low": low, "high": high, "barriers": [round(b, 4) for b in pairs.tolist()]}


def interval_over_members(square: Tensor) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the mean over pairs; members are resampled, since pairs share them.

    Args:
        square: value of each pair, (member, member); only the entries above the diagonal count.
    """
    count = len(square)
    full = square.triu(1) + square.triu(1).T
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (RESAMPLES, count), generator=generator)
    weights = torch.zeros(RESAMPLES, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape).double()
    )
    sums = torch.einsum("ri,ij,rj->r", weights, full, weights)
    means = sums / (count**2 - weights.square().sum(1))
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _barrier_rows(barriers: dict[str, dict[str, Any]]) -> str:
    naive = barriers["stored"]["mean"]
    lines = ["| symmetries in use | mean barrier (nats) | share of the barrier as trained |", "|---|---|---|"]
    for using, label in LEVELS.items():
        found = barriers[using or "stored"]
        interval = f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
        lines.append(f"| {label} | {interval} | {100 * found['mean'] / naive:.0f} % |")
    units, streams = (torch.tensor(barriers[name]["barriers"]) for name in ("units", "streams"))
    lower = int((streams < units).sum())
    lines += [
        "",
        f"All symmetries give a lower barrier than permutations of hidden units for {lower} of {len(units)} pairs.",
    ]
    return "\n".join(lines)
