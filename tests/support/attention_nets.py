"""Small networks with attention, whose symmetries tests count by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS, WORDS = 8, 2, 4, 7


class Attention(nn.Module):
    """Self-attention with two heads; options break assumptions that a larger group needs."""

    slopes: Tensor | None

    def __init__(self, rotary: bool = False, normed: bool = False, slopes: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotary = rotary
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH // HEADS, eps=0.1) for _ in range(2 * normed))
        self.register_buffer("slopes", torch.tensor(slopes) if slopes else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotary:
            q, k = turned(q), turned(k)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.slopes is not None:
            scores = scores + self.slopes[:, None, None].to(x.dtype) * torch.arange(x.shape[1], dtype=x.dtype)
        result: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return result


def turned(x: Tensor) -> Tensor:
    """Turn pairs (u, u + half) by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=x.dtype)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Decoder(nn.Module):
    """Words, positions, one block with norms before attention and MLP, a last norm, and logits."""

    def __init__(self, tied: bool = False, **options: bool | tuple[float, ...]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=0.1) for _ in range(3))
        self.attention = Attention(**options)  # type: ignore[arg-type]
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.words(indices) + self.places
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        result: Tensor = self.head(self.norms[2](x))
        return result


INDICES = torch.randint(WORDS, (6, TOKENS), generator=torch.Generator().manual_seed(3))


def drawn(network: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Return random weights of a network, in float64."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        weights[name] = 1 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.6 * noise
    return weights


class LearnedScale(nn.Module):
    """Attention whose scores are multiplied by learned numbers, of a shape that broadcasts to the scores."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(shape or (HEADS, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = ((q @ k.transpose(-1, -2)) * self.scale).softmax(-1)
        result: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return result
