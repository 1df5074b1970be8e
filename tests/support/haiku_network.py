"""The ResNet-20-FRN-Swish of Izmailov et al. 2021 in plain numpy, written as its JAX code: NHWC images, HWIO kernels.

Nothing here is the package's: names of layers are numbered as haiku numbers them, in the order of the calls.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Parameters = dict[str, dict[str, Array]]


class Network:
    """One forward pass. Without parameters, it draws them as it goes.

    Args:
        parameters: haiku's module -> parameter -> array; {} to draw all of them.
        seed: seed of the drawn parameters.
        symmetric: whether convolutions of stride 2 pad on both sides, as torch does.
    """

    def __init__(self, parameters: Parameters, seed: int = 0, symmetric: bool = False) -> None:
        self.parameters, self.symmetric = parameters, symmetric
        self.rng = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()

    def __call__(self, images: Array) -> Array:
        """Return logits (input, class) of images (input, height, width, channel)."""
        width = 16
        x = swish(self.layer(images, width))
        for stack in range(3):
            for block in range(3):
                first = stack > 0 and block == 0
                y = swish(self.layer(x, width, stride=2 if first else 1))
                y = self.layer(y, width)
                if first:
                    x = self.layer(x, width, kernel=1, stride=2)
                x = swish(x + y)
            width *= 2
        assert x.shape[1:] == (8, 8, 64)
        own = self.module("linear", {"w": (64, 10), "b": (10,)})
        logits: Array = x.mean((1, 2)) @ own["w"] + own["b"]
        return logits

    def layer(self, x: Array, width: int, kernel: int = 3, stride: int = 1) -> Array:
        """A convolution with a bias, then filter response normalisation with its threshold."""
        own = self.module("conv2_d", {"w": (kernel, kernel, x.shape[-1], width), "b": (width,)})
        x = self.convolve(x, own["w"], stride) + own["b"]
        own = self.module("frn", dict.fromkeys(("gamma", "beta", "tau"), (1, 1, 1, width)))
        x = x / np.sqrt((x**2).mean((1, 2), keepdims=True) + 1e-6)
        result: Array = np.maximum(own["gamma"] * x + own["beta"], own["tau"])
        return result

    def convolve(self, x: Array, kernel: Array, stride: int) -> Array:
        """The padding is XLA's "SAME": what is odd comes after the image."""
        size, side = len(kernel), x.shape[1]
        side_out = -(-side // stride)
        total = max((side_out - 1) * stride + size - side, 0)
        pad = (size // 2, size // 2) if self.symmetric else (total // 2, total - total // 2)
        x = np.pad(x, ((0, 0), pad, pad, (0, 0)))
        result: Array = sum(
            x[:, i : i + stride * (side_out - 1) + 1 : stride, j : j + stride * (side_out - 1) + 1 : stride]
            @ kernel[i, j]
            for i in range(size)
            for j in range(size)
        )
        return result

    def module(self, kind: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        name = kind + (f"_{self.counts[kind]}" if self.counts[kind] else "")
        self.counts[kind] += 1
        if name not in self.parameters:
            scale = 0.5 if kind == "frn" else np.sqrt(2 / np.prod(shapes["w"][:-1]))
            drawn = {n: self.rng.standard_normal(shape) * scale for n, shape in shapes.items()}
            self.parameters[name] = {n: x + (n == "gamma") for n, x in drawn.items()}
        return {n: self.parameters[name][n].astype(x.dtype) for n, x in self.parameters[name].items()}


def swish(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


def drawn_parameters(seed: int) -> Parameters:
    """Draw the parameters of one network in float64; return them under haiku's names."""
    parameters: Parameters = {}
    Network(parameters, seed)(np.zeros((1, 32, 32, 3)))
    return parameters
