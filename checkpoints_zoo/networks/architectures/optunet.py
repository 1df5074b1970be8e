"""OptuNet: a network of a few hundred parameters for MNIST, so small that its whole posterior can be studied."""

from __future__ import annotations

from torch import Tensor, nn


class OptuNet(nn.Module):
    """Two convolutions without bias, the second in two groups, then linear layers; `forward` returns logits.

    Axes: images (batch, channel, height, width), logits (batch, class).
    """

    def __init__(self, channels: int, classes: int, hidden: int | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 2, kernel_size=4, bias=False)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(3)
        self.conv2 = nn.Conv2d(2, 10, kernel_size=5, groups=2, bias=False)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.hidden = hidden
        if hidden is None:
            self.fc = nn.Linear(10, classes)
        else:
            self.fc1 = nn.Linear(10, hidden)
            self.relu3 = nn.ReLU()
            self.fc2 = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool1(self.relu1(self.conv1(images)))
        features = self.flatten(self.pool2(self.relu2(self.conv2(features))))
        logits: Tensor = self.fc(features) if self.hidden is None else self.fc2(self.relu3(self.fc1(features)))
        return logits


def optunet(channels: int = 1, classes: int = 10, hidden: int | None = None) -> nn.Module:
    """Build an OptuNet for images of 28x28, and return it with its random initial parameters.

    Args:
        channels: number of channels of the images.
        classes: number of classes.
        hidden: number of units of the hidden linear layer (3 in OptuMNIST-v1); None for no hidden layer.

    >>> [sum(p.numel() for p in optunet(hidden=hidden).parameters()) for hidden in (None, 3)]
    [392, 355]
    """
    return OptuNet(channels, classes, hidden)
