"""A small ReLU convnet for 8x8 images, without normalisation: 3,658 parameters for digits."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two convolutions with pooling and one hidden linear layer; `forward` returns logits (batch, class)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 8, kernel_size=3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(64, 32)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool1(self.relu1(self.conv1(images)))
        features = self.pool2(self.relu2(self.conv2(features)))
        logits: Tensor = self.fc2(self.relu3(self.fc1(self.flatten(features))))
        return logits


def convnet(channels: int = 1, classes: int = 10) -> nn.Module:
    """Build a convnet for 8x8 images, and return it with its random initial parameters.

    Args:
        channels: number of channels of the images.
        classes: number of classes.

    >>> sum(p.numel() for p in convnet().parameters())
    3658
    """
    return ConvNet(channels, classes)
