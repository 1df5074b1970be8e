"""A small residual network for 8x8 images, made of timm's blocks; its parameters have the names of timm's resnets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import UsageError


class ResNet8(nn.Module):
    """A first convolution, then three stages of one basic block each (He et al. 2016); `forward` returns logits.

    Axes: images (batch, channel, height, width), logits (batch, class).
    """

    def __init__(self, widths: tuple[int, ...], channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.act1 = nn.ReLU()
        self.layer1 = _stage(widths[0], widths[0], stride=1)
        self.layer2 = _stage(widths[0], widths[1], stride=2)
        self.layer3 = _stage(widths[1], widths[2], stride=2)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[2], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.act1(self.bn1(self.conv1(images)))
        features = self.layer3(self.layer2(self.layer1(features)))
        logits: Tensor = self.fc(self.flatten(self.global_pool(features)))
        return logits


def _stage(width_in: int, width: int, stride: int) -> nn.Sequential:
    """Build a stage of one basic block, with a 1x1 convolution as shortcut where the shape changes."""
    # timm is imported here, because importing it takes seconds and the rest of the package doesn't need it.
    with torch.device("cpu"):  # as in `small_resnet`
        from timm.models.resnet import BasicBlock, downsample_conv

    shortcut = None
    if stride != 1 or width_in != width:
        shortcut = downsample_conv(width_in, width, kernel_size=1, stride=stride)
    return nn.Sequential(BasicBlock(width_in, width, stride=stride, downsample=shortcut))


def resnet8(widths: tuple[int, ...] = (8, 16, 32), channels: int = 1, classes: int = 10) -> nn.Module:
    """Build a residual network with batch norm, and return it with its random initial parameters.

    Args:
        widths: number of channels of each of the three stages.
        channels: number of channels of the images.
        classes: number of classes.

    Raises:
        UsageError: `widths` has not three entries.

    >>> sum(p.numel() for p in resnet8().parameters())
    19810
    """
    if len(widths) != 3:
        raise UsageError("argument 'widths' of architecture 'resnet8'", expected="three widths", found=repr(widths))
    return ResNet8(widths, channels, classes)
