"""Symmetries of public transformers: derived from configurations with random weights, and compared with Jacobians."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpoints_zoo.symmetry import apply, compose, inverse, random_element, symmetries
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from tests.support.attention_nets import LearnedScale

pytestmark = pytest.mark.slow
WORDS = torch.randint(2, 11, (2, 5), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16,
         "max_position_embeddings": 16, "vocab_size": 11}  # fmt: skip
GROUPED = SMALL | {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
TINY = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5,
        "max_position_embeddings": 4, "vocab_size": 11}  # fmt: skip
Network = tuple[nn.Module, tuple[Tensor, ...]]


def of_transformers(model: str, config: str, inputs: Tensor = WORDS, **arguments: Any) -> Network:
    import transformers

    network = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    if hasattr(network.config, "use_cache"):
        network.config.use_cache = False
    return network, (inputs,)


def of_timm(module: str, name: str, **arguments: Any) -> Network:
    import importlib

    network = getattr(importlib.import_module(f"timm.models.{module}"), name)(**arguments)
    return network, (torch.rand(2, 3, arguments["img_size"], arguments["img_size"]),)


class Encoder(nn.Module):
    """A linear layer, an encoder of torch, and a linear layer."""

    def __init__(self, width: int, heads: int, layers: int, norm_first: bool, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 16, activation="gelu", batch_first=True, norm_first=norm_first, **options
        )
        last = nn.LayerNorm(width, eps=options.get("layer_norm_eps", 1e-5)) if norm_first else None
        self.first, self.last = nn.Linear(width + 1, width), nn.Linear(width, 8)
        self.encoder = nn.TransformerEncoder(layer, layers, last, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.encoder(self.first(x)))
        return result


class Cross(nn.Module):
    """Attention of one input to another, or to itself."""

    def __init__(self, width: int = 12, heads: int = 3, other: int | None = 7) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, kdim=other, vdim=other)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        result: Tensor = self.attention(x, y, y, need_weights=False)[0]
        return result


class Convolutions(nn.Module):
    """A residual network of convolutions, or a network with gated convolutions, whose activations are smooth."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.third, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        x = functional.silu(first) * self.second(x) if self.gated else first.tanh() + self.second(first.tanh()).tanh()
        result: Tensor = self.head(functional.gelu(self.third(x)).mean((2, 3)))
        return result


IMAGES = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
# Name -> (function that builds the network, kinds of matrices of its table).
TWENTY: dict[str, tuple[Callable[[], Network], set[str]]] = {
    "BERT": (partial(of_transformers, "BertForSequenceClassification", "BertConfig", **SMALL), {"invertible"}),
    "RoBERTa": (partial(of_transformers, "RobertaForSequenceClassification", "RobertaConfig", **SMALL), {"invertible"}),
    "GPT-2": (
        partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", vocab_size=11, n_embd=12, n_layer=2, n_head=3),
        {"invertible"},
    ),
    "GPT-NeoX": (
        partial(of_transformers, "GPTNeoXForCausalLM", "GPTNeoXConfig", **SMALL | {"hidden_size": 24}),
        {"invertible", "complex", "centred orthogonal"},
    ),
    "Llama": (
        partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", **GROUPED),
        {"invertible", "complex", "orthogonal"},
    ),
    "Mistral": (
        partial(of_transformers, "MistralForCausalLM", "MistralConfig", **GROUPED),
        {"invertible", "complex", "orthogonal"},
    ),
    "Qwen3": (partial(of_transformers, "Qwen3ForCausalLM", "Qwen3Config", **GROUPED), {"invertible", "orthogonal"}),
    "Gemma": (partial(of_transformers, "GemmaForCausalLM", "GemmaConfig", **GROUPED), {"invertible", "complex"}),
    "T5 encoder": (
        partial(of_transformers, "T5EncoderModel", "T5Config", vocab_size=11, d_model=12, d_kv=4, d_ff=16,
                num_layers=2, num_heads=3),
        {"invertible"},
    ),
    "Bloom": (
        partial(of_transformers, "BloomForCausalLM", "BloomConfig", vocab_size=11, hidden_size=12, n_layer=2, n_head=3),
        {"invertible"},
    ),
    "ViT": (
        partial(of_transformers, "ViTForImageClassification", "ViTConfig", torch.rand(2, 3, 8, 8), hidden_size=12,
                num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, image_size=8, patch_size=4),
        {"invertible", "centred orthogonal"},
    ),
    "timm ViT": (
        partial(of_timm, "vision_transformer", "VisionTransformer", **IMAGES), {"invertible", "centred orthogonal"}
    ),
    "timm DeiT": (
        partial(of_timm, "deit", "VisionTransformerDistilled", **IMAGES), {"invertible", "centred orthogonal"}
    ),
    "timm Swin": (
        partial(of_timm, "swin_transformer", "SwinTransformer", img_size=16, patch_size=2, embed_dim=12, depths=(2, 2),
                num_heads=(3, 6), window_size=4, num_classes=5),
        {"invertible"},
    ),
    "timm CaiT": (
        partial(of_timm, "cait", "Cait", **IMAGES, depth_token_only=1), {"invertible", "centred orthogonal"}
    ),
    "timm BEiT": (partial(of_timm, "beit", "Beit", **IMAGES), {"invertible", "centred orthogonal"}),
    "encoder, norms after": (lambda: (Encoder(12, 3, 2, False), (torch.rand(2, 5, 13),)), {"invertible"}),
    "encoder, norms before": (
        lambda: (Encoder(12, 3, 2, True), (torch.rand(2, 5, 13),)), {"invertible", "centred orthogonal"}
    ),
    "MultiheadAttention": (lambda: (Cross(other=None), (torch.rand(2, 5, 12),)), {"invertible"}),
    "cross attention": (lambda: (Cross(), (torch.rand(2, 5, 12), torch.rand(2, 6, 7))), {"invertible"}),
}  # fmt: skip


def in_double(network: nn.Module, inputs: tuple[Tensor, ...]) -> Network:
    """Return a network and its inputs in float64, in eval mode."""
    return network.double().eval(), tuple(x.double() if x.is_floating_point() else x for x in inputs)


def drawn(network: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    """Return random weights of a network, in float64, of a size that lets all of them matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_table = any(word in name for word in ("emb", "wte", "wpe", "shared"))
        if parameter.ndim > 1:
            weights[name] = 1.2 * noise / (1 if is_table else parameter[0].numel() ** 0.5)
        else:
            weights[name] = 1 + 0.4 * noise if name.endswith("weight") or "gamma" in name else 0.5 * noise
    return weights


def output(network: nn.Module, weights: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """Run a network; the norms of transformers, which compute in float32, compute in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        result = functional_call(network, weights, inputs, strict=False)
    if not isinstance(result, Tensor):
        result = result[0] if isinstance(result, tuple) or "logits" not in result else result.logits
    assert result.dtype is torch.float64
    return result


@pytest.mark.parametrize("name", TWENTY)
def test_random_elements_keep_the_function(name: str) -> None:
    build, kinds = TWENTY[name]
    torch.manual_seed(0)
    network, inputs = in_double(*build())
    table = symmetries(network, inputs)
    assert {matrix.kind for matrix in table.matrices.values()} == kinds
    hidden = [group.size for group in table.groups.values() if group.size in (16, 48, 96)]
    assert len(hidden) >= 2 or name in ("MultiheadAttention", "cross attention")  # Two blocks with an MLP each.
    generator, weights = torch.Generator().manual_seed(1), drawn(network)
    element = random_element(table, generator)
    with torch.no_grad():
        before = output(network, weights, inputs)
        assert not all(torch.equal(row, before[0]) for row in before)
        moved = apply(table, weights, element)
        after = output(network, moved, inputs)
        assert float((after - before).abs().max()) <= 1e-10 * float(before.abs().max())
    assert sum(not torch.equal(moved[n], weights[n]) for n in weights) > len(weights) // 4
    second = random_element(table, generator)
    at_once = apply(table, weights, compose(table, element, second))
    one_by_one = apply(table, moved, second)
    back = apply(table, moved, inverse(table, element))
    options: dict[str, Any] = {"heads": "balanced", "scale": "unit-norm", "permute": "first", "streams": True}
    canonical, of_moved = (canonicalize(table, w, **options)[0] for w in (weights, moved))
    for tensor in weights:
        assert float((of_moved[tensor] - canonical[tensor]).abs().max()) < 1e-8
        torch.testing.assert_close(at_once[tensor], one_by_one[tensor], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(back[tensor], weights[tensor], rtol=1e-9, atol=1e-11)


EPS, IDS = {"layer_norm_eps": 0.1}, WORDS[:, :4]
VIT = {"img_size": 4, "patch_size": 2, "embed_dim": 6, "depth": 2, "num_heads": 2, "num_classes": 5, "mlp_ratio": 1,
       "norm_layer": partial(nn.LayerNorm, eps=0.1)}  # fmt: skip
GPT2 = {"vocab_size": 11, "n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 4, "n_inner": 5,
        "layer_norm_epsilon": 0.1}  # fmt: skip
# Networks with smooth activations whose weights, tokens and positions all matter.
SMOOTH: dict[str, Callable[[], Network]] = {
    "BERT": partial(of_transformers, "BertForSequenceClassification", "BertConfig", IDS, **TINY, **EPS,
                    type_vocab_size=1),
    "GPT-2": partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", IDS, **GPT2, tie_word_embeddings=False),
    "GPT-2 tied": partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", IDS, **GPT2),
    "GPT-NeoX": partial(of_transformers, "GPTNeoXForCausalLM", "GPTNeoXConfig", IDS,
                        **TINY | {"hidden_size": 8, "vocab_size": 29}, **EPS, rotary_pct=0.5),
    "Llama": partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", IDS,
                     **TINY | {"hidden_size": 8, "num_attention_heads": 4}, num_key_value_heads=2, head_dim=4,
                     rms_norm_eps=0.1),
    "Qwen3": partial(of_transformers, "Qwen3ForCausalLM", "Qwen3Config", IDS,
                     **TINY | {"hidden_size": 8}, num_key_value_heads=1, head_dim=4, rms_norm_eps=0.1),
    "timm ViT": partial(of_timm, "vision_transformer", "VisionTransformer", **VIT),
    "timm ViT with LayerScale": partial(of_timm, "vision_transformer", "VisionTransformer", **VIT, init_values=1.0),
    "encoder, norms before": lambda: (Encoder(6, 2, 1, True, layer_norm_eps=0.1), (torch.rand(2, 4, 7),)),
    "MultiheadAttention": lambda: (Cross(6, 2, None), (torch.rand(2, 4, 6),)),
    "learned scales of scores": lambda: (LearnedScale(), (torch.rand(2, 4, 8),)),
    "gated convolutions": lambda: (Convolutions(True), (torch.rand(2, 3, 5, 5),)),
    "residual convolutions": lambda: (Convolutions(False), (torch.rand(2, 3, 5, 5),)),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_the_dimension_is_the_nullity_of_the_jacobian(name: str) -> None:
    torch.manual_seed(0)
    network, inputs = in_double(*SMOOTH[name]())
    weights, generator = drawn(network), torch.Generator().manual_seed(4)
    names, sizes = list(weights), [weights[n].numel() for n in weights]
    flat = torch.cat([weights[n].flatten() for n in names])

    def outputs(vector: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        parts = {n: part.view_as(weights[n]) for n, part in zip(names, vector.split(sizes), strict=True)}
        return output(network, parts, batch).flatten()

    rows: list[Tensor] = []
    words = getattr(getattr(network, "config", None), "vocab_size", 11)
    while sum(len(row) for row in rows) < 2.2 * len(flat):
        batch = tuple(
            1.5 * torch.randn(16, *x.shape[1:], generator=generator, dtype=torch.float64)
            if x.is_floating_point()
            else torch.randperm(16 * x.shape[1], generator=generator).reshape(16, -1) % words  # each word occurs
            for x in inputs
        )
        with sdpa_kernel(SDPBackend.MATH):  # The fused attention has no batched backward pass.
            rows.append(jacrev(outputs)(flat, batch).detach())
    jacobian = torch.cat(rows)
    lengths = jacobian.norm(dim=0)
    jacobian = jacobian / torch.where(lengths > 1e-10 * lengths.max(), lengths, 1.0)
    values = torch.linalg.svdvals(jacobian).flip(0)
    values = values / values[-1]
    dimension = symmetries(network, inputs).dimension
    nullity = int((values < 1e-11).sum())
    assert nullity == dimension, most_of(jacobian, names, sizes, nullity)
    assert float(values[dimension]) > 1e-6  # The next direction changes the function.


def most_of(jacobian: Tensor, names: list[str], sizes: list[int], nullity: int) -> str:
    """Say which tensors the directions lie in that change no output."""
    directions = torch.linalg.svd(jacobian, full_matrices=False).Vh[-nullity:] if nullity else jacobian[:0]
    shares = {n: float(part.square().sum()) for n, part in zip(names, directions.split(sizes, 1), strict=True)}
    return ", ".join(f"{n} {share:.2f}" for n, share in sorted(shares.items(), key=lambda item: -item[1]))
