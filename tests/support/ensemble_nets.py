"""Nets for the tests of ensembles, made of what can run side by side and of what can't, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble import EXECUTIONS, Ensemble
from checkpoints_zoo.networks.modules import build_architecture

HERE = [e for e in EXECUTIONS if e != "graph"]  # what a CPU has


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """Give a module random weights, gains of both signs and statistics; return it in eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    for name, tensor in module.state_dict().items():
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 2 + 0.5)
        elif tensor.is_floating_point():
            wide = tensor.dim() > 1 and tensor[0].numel() > 1
            tensor.copy_(normal(tensor) * (tensor[0].numel() ** -0.5 if wide else 0.5))
            if not wide and not name.endswith(("bias", "mean")):
                tensor.add_(1)
    return module.eval()


def looped(build: Callable[[], nn.Module], x: Tensor, members: int = 5) -> tuple[list[nn.Module], Tensor]:
    """Build members; return them, and their logits one after another."""
    made = [randomised(build(), seed).to(x.dtype) for seed in range(members)]
    with torch.no_grad():
        return made, torch.stack([m(x) for m in made])


def stacked(made: list[nn.Module]) -> dict[str, Tensor]:
    states = [m.state_dict() for m in made]
    return {n: torch.stack([s[n] for s in states]) for n in states[0] if not n.endswith("num_batches_tracked")}


def ensemble(build: Callable[[], nn.Module], made: list[nn.Module], execution: str | None = None) -> Ensemble:
    with torch.device("meta"):
        skeleton = build().eval().requires_grad_(False)
    return Ensemble(skeleton, stacked(made), range(len(made)), execution=execution)


def assert_close(found: Tensor, wanted: Tensor, bound: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


# Nets that can run side by side


class Block(nn.Module):
    """What residual nets are made of: groups, a shortcut, in-place sums, squeeze-and-excitation, views by size."""

    def __init__(self, act: Any = F.relu) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2, bias=False)
        self.norm2 = nn.BatchNorm2d(12, affine=False)
        self.shortcut = nn.Sequential(nn.Conv2d(8, 12, 1, stride=2, bias=False), nn.BatchNorm2d(12))
        self.gate = nn.Conv2d(12, 12, 1)
        self.inplace = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.group = nn.GroupNorm(3, 12)
        self.gain = nn.Parameter(torch.ones(12))
        self.offset = nn.Parameter(torch.ones(1, 12, 1, 1))
        self.factor = nn.Parameter(torch.ones(()))
        self.linear = nn.Linear(12 * 4, 6, bias=False)
        self.norm3 = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm1(self.first(x)))
        y = self.norm2(self.conv(x))
        y += self.shortcut(x)
        y = self.inplace(y)
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = self.group(self.drop(y))
        y = torch.max(self.gain.view(1, -1, 1, 1) * y + self.offset, 0.1 * y) * self.factor
        y = F.avg_pool2d(y, 2)
        y = y.view(y.size(0), -1)
        logits: Tensor = self.out(self.norm3(self.linear(y)).tanh())
        return logits


class Frn(nn.Module):
    """A norm written out, as torch-uncertainty's and timm's filter response norms are; channels joined."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 6, 3), nn.Conv2d(2, 4, 3, bias=False)
        self.gamma, self.tau = nn.Parameter(torch.ones(1, 10, 1, 1)), nn.Parameter(torch.ones(10))
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.one(x), self.two(x)], dim=1)
        kind = x.dtype
        rms = x.square().float().mean(dim=[-2, -1], keepdim=True).add(1e-6).rsqrt().to(x.dtype)
        x = x * rms.expand(x.shape) * self.gamma
        x = torch.maximum(x, self.tau.reshape((1, -1, 1, 1)).to(dtype=kind))
        logits: Tensor = self.out(torch.flatten(F.silu(x).amax((2, 3)), 1))
        return logits


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * 64, 9), nn.BatchNorm1d(9), nn.SiLU(True), nn.Linear(9, 3))


class AcrossChannels(nn.Module):
    """Convolutions between operations across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second((x - x.mean(1, keepdim=True)).softmax(1)).relu()
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """What transformers are made of: heads by views and parts, fused attention, a gate, a mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(8, 12), nn.Parameter(torch.ones(16, 12))
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12, elementwise_affine=False)
        self.qkv, self.proj, self.gate = nn.Linear(12, 36, bias=False), nn.Linear(12, 12), nn.Linear(12, 24)
        self.gain = nn.Parameter(torch.ones(12))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1, 2)) + self.position
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, 2, 6).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.gain * self.proj(y)
        one, two = self.gate(self.norm2(x)).chunk(2, dim=-1)
        x += F.silu(one) * two
        one, two = torch.split(x, 6, dim=-1)
        x = torch.cat([two[:, 1:], F.softmax(one[:, :-1], dim=-1)], dim=-1)
        return self.out(x.mean(1))  # type: ignore[no-any-return]


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "block": Block, "frn": Frn, "mlp": mlp, "across channels": AcrossChannels, "tokens": Tokens,
    "resnet8": lambda: build_architecture("resnet8", channels=2), "vit": lambda: build_architecture("vit", channels=2),
}  # fmt: skip


def images(batch: int = 5, dtype: torch.dtype = torch.float32, channels: int = 2, size: int = 8) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


# Nets that can't run side by side: through their own code


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def end(self, x: Tensor) -> Tensor:
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


class ByValue(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.end(self.norm(x) if x.sum() > 0 else x)


class Counting(Base):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.end(self.norm(self.conv(x)))


class Cumulative(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x)).cumsum(1))
