"""Random networks: straight-line programs of layers and operations on maps of 4x4, some of them odd."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTS: list[Callable[[Tensor], Tensor]] = [
    F.relu, F.relu, F.relu, lambda x: F.leaky_relu(x, 0.3), F.silu, F.relu6, torch.abs, torch.square
]  # fmt: skip
LAYERS = ("conv", "conv", "grouped", "batch", "group", "layer", "instance", "gain", "offset", "again", "twice")
OTHERS = ("act", "act", "add", "add", "multiply", "max", "cat", "product", "slice", "pad", "pool")


def halves(parts: Any) -> Tensor:
    """Multiply the first two of several tensors."""
    result: Tensor = parts[0] * parts[1]
    return result


class Program(nn.Module):
    """A program drawn from a seed: each step reads one or two of the last values, and adds one.

    Args:
        seed: of the draw; parameters come from torch's own generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.gains = nn.ParameterList()
        self._steps: list[tuple[int, Callable[[Tensor, list[Tensor]], Tensor]]] = []
        self._widths = [3]
        self._random = random.Random(seed)
        for _ in range(self._random.randint(4, 14)):
            self._draw()
        self._flat = self._random.random() < 0.5
        width = self._widths[-1] * (16 if self._flat else 1)
        self.norm = nn.BatchNorm1d(width) if self._random.random() < 0.5 else nn.Identity()
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for source, step in self._steps:
            values.append(step(values[source], values))
        y = values[-1].flatten(1) if self._flat else values[-1].mean((2, 3))
        result: Tensor = self.last(F.relu(self.norm(y)))
        return result

    def _draw(self) -> None:
        draw, count = self._random, len(self._widths)
        source = draw.choice(range(max(0, count - 3), count))
        width = self._widths[source]
        found = self._layer(width) if draw.random() < 0.5 else self._other(source, width)
        if found is not None:
            step, wide = found
            self._steps.append((source, step))
            self._widths.append(wide)

    def _layer(self, width: int) -> tuple[Callable[[Tensor, list[Tensor]], Tensor], int] | None:
        draw, kind = self._random, self._random.choice(LAYERS)
        groups = draw.choice([g for g in (1, 2, 3, 4, 6, 8, 12) if width % g == 0])
        wide, at = width, len(self.layers)
        if kind == "again":
            at = next((i for i, m in enumerate(self.layers) if getattr(m, "in_channels", 0) == width), -1)
            if at < 0:
                return None
            known = self.layers[at]
            wide = known.out_channels if isinstance(known, nn.Conv2d) else width
        elif kind in ("gain", "offset"):
            self.gains.append(nn.Parameter(torch.ones(draw.choice([(width, 1, 1), (1, width, 1, 1)]))))
            i, gain = len(self.gains) - 1, kind == "gain"
            return (lambda x, _: x * self.gains[i] if gain else x + self.gains[i]), width
        else:
            wide = {"conv": draw.choice([2, 4, 6, 8, 12]), "grouped": groups * draw.randint(1, 3)}.get(kind, width)
            self.layers.append(
                nn.Conv2d(width, wide, draw.choice([1, 3]), padding="same", bias=draw.random() < 0.6) if kind == "conv"
                else nn.Conv2d(width, wide, 3, padding=1, groups=groups, bias=draw.random() < 0.6) if kind == "grouped"
                else nn.BatchNorm2d(width, affine=draw.random() < 0.8) if kind == "batch"
                else nn.GroupNorm(groups, width, affine=draw.random() < 0.8) if kind == "group"
                else nn.LayerNorm(width) if kind == "layer"
                else nn.InstanceNorm2d(width, affine=True) if kind == "instance"
                else nn.Conv2d(width, width, 1)
            )  # fmt: skip
        if kind == "layer":
            return (lambda x, _: self.layers[at](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)), wide
        if kind == "twice":
            return (lambda x, _: self.layers[at](F.relu(self.layers[at](x)))), wide
        return (lambda x, _: self.layers[at](x)), wide

    def _other(self, source: int, width: int) -> tuple[Callable[[Tensor, list[Tensor]], Tensor], int] | None:
        draw, kind = self._random, self._random.choice(OTHERS)
        alike = draw.choice([i for i, w in enumerate(self._widths) if w == width])
        other, act = draw.choice(range(len(self._widths))), draw.choice(ACTS)
        first = draw.randint(0, max(0, width - 2))
        last = draw.randint(first + 1, width)
        sides = draw.randint(0, 2), draw.randint(0, 2)
        if kind == "product":
            return ((lambda x, _: halves(x.chunk(2, 1))), width // 2) if width % 2 == 0 else None
        if kind == "cat":
            return (lambda x, values: torch.cat([x, values[other]], 1)), width + self._widths[other]
        if kind == "slice":
            return (lambda x, _: x[:, first:last]), last - first
        if kind == "pad":
            return (lambda x, _: F.pad(x, (0, 0, 0, 0, *sides))), width + sum(sides)
        steps: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
            "act": lambda x, _: act(x), "add": lambda x, values: x + values[alike],
            "multiply": lambda x, values: x * values[alike], "max": lambda x, values: torch.maximum(x, values[alike]),
            "pool": lambda x, _: F.max_pool2d(x, 3, 1, 1),
        }  # fmt: skip
        return steps[kind], width
