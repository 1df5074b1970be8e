"""ResNet-18 for small images (He et al. 2016): timm's network with the first convolution that is usual for CIFAR."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def resnet18(channels: int = 3, classes: int = 10) -> nn.Module:
    """Build a ResNet-18 whose first convolution keeps the images' size, and return it with its random initial
    parameters.

    Args:
        channels: number of channels of the images.
        classes: number of classes.

    >>> sum(p.numel() for p in resnet18(classes=100).parameters())
    11220132
    """
    net = small_resnet((2, 2, 2, 2), nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False), classes)
    reset_weights(net)
    return net


def small_resnet(blocks: tuple[int, ...], stem: nn.Conv2d, classes: int, **options: Any) -> nn.Module:
    """Build timm's residual network of basic blocks, with another first convolution that no pooling follows; return the
    network.

    Args:
        blocks: number of blocks in each stage.
        stem: first convolution of the network, which replaces timm's 7x7 convolution.
        classes: number of classes.
        options: further arguments of timm's class `ResNet`.
    """
    # timm is imported here, because importing it takes seconds and the rest of the package doesn't need it.
    # On the CPU: with torch 2.6 the import calculates with tensors, which fails on the meta device.
    with torch.device("cpu"):
        from timm.models.resnet import BasicBlock, ResNet

    kind: Any = BasicBlock  # The variable avoids timm's wrong annotation, which asks for an instance.
    net = ResNet(kind, blocks, in_chans=stem.in_channels, num_classes=classes, zero_init_last=False, **options)
    net.set_submodule("conv1", stem)
    net.set_submodule("maxpool", nn.Identity())
    return net


def reset_weights(net: nn.Module) -> None:
    """Initialise all weights again, in place, by the layers' own methods `reset_parameters`.

    timm initialises convolutions by another distribution (He, fan-out) than torch-uncertainty, which trained the
    archived members on the Hub. After this function, initial weights have the same distribution as torch-uncertainty's.
    """
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.reset_parameters()
