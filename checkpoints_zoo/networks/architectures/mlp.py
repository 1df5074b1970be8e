"""A multilayer perceptron with ReLU: 3,466 parameters for digits, few enough for full-batch HMC."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from checkpoints_zoo.errors import UsageError


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened images; `forward` returns logits.

    Axes: images (batch, channel, height, width), logits (batch, class).
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        for at, (width_in, width) in enumerate(pairwise((inputs, *widths)), start=1):
            self.add_module(f"fc{at}", nn.Linear(width_in, width))
            self.add_module(f"relu{at}", nn.ReLU())
        self.add_module(f"fc{len(widths) + 1}", nn.Linear(widths[-1], classes))

    def forward(self, images: Tensor) -> Tensor:
        features = images
        for layer in self.children():
            features = layer(features)
        return features


def mlp(channels: int = 1, size: int = 8, widths: tuple[int, ...] = (32, 32), classes: int = 10) -> nn.Module:
    """Build a multilayer perceptron for square images, and return it with its random initial parameters.

    Args:
        channels: number of channels of the images.
        size: height and width of the images in pixels.
        widths: number of units of each hidden layer.
        classes: number of classes.

    Raises:
        UsageError: `widths` is empty, so that there is no hidden layer.

    >>> sum(p.numel() for p in mlp().parameters())
    3466
    """
    if not widths:
        raise UsageError("argument 'widths' of architecture 'mlp'", expected="a width or more", found=repr(widths))
    return MLP(channels * size * size, widths, classes)
