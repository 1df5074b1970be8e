"""A thousand planted elements over five architectures: alignment undoes each of them."""

from __future__ import annotations

import pytest
import torch

from checkpoints_zoo.symmetry import apply, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from tests.symmetry.test_transformers import TWENTY, drawn, in_double

pytestmark = pytest.mark.slow
ELEMENTS = 200


@pytest.mark.parametrize("name", ["BERT", "GPT-NeoX", "Llama", "Qwen3", "timm ViT"])
def test_alignment_undoes_planted_elements(name: str) -> None:
    """Norms after and before sums, rotary positions whole and in part, shared keys, norms of queries; condition 10."""
    torch.manual_seed(0)
    network, inputs = in_double(*TWENTY[name][0]())
    table, weights = symmetries(network, inputs), drawn(network)
    elements = random_element(table, torch.Generator().manual_seed(5), members=ELEMENTS, condition=10.0)
    stacked = {tensor: weight.expand(ELEMENTS, *weight.shape) for tensor, weight in weights.items()}
    moved = apply(table, stacked, elements)
    assert all(float((moved[tensor] - weights[tensor]).abs().max()) > 1e-3 for tensor in moved if "weight" in tensor)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):
        stored = {tensor: weight.to(dtype) for tensor, weight in moved.items()}
        element = match_weights(table, stored, weights).element
        back = apply(table, {tensor: weight.double() for tensor, weight in stored.items()}, element)
        apart = torch.stack([(back[t] - weights[t]).flatten(1).norm(dim=1) / weights[t].norm() for t in weights])
        assert float(apart.max()) < tolerance, f"{int((apart.amax(0) >= tolerance).sum())} of {ELEMENTS}"
