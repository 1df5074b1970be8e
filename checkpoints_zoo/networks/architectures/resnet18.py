"""ResNet-18 for small images (He et al. 2016): timm's, with the stem that CIFAR nets have."""

from __future__ import annotations

from typing import Any

from torch import nn


def resnet18(channels: int = 3, classes: int = 10) -> nn.Module:
    """Build a ResNet-18 whose stem keeps the images' size, and return it with its random initial parameters.

    Args:
        channels: channels of the images.
        classes: number of classes.

    >>> sum(p.numel() for p in resnet18(classes=100).parameters())
    11220132
    """
    net = small_resnet((2, 2, 2, 2), nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False), classes)
    reset_weights(net)
    return net


def small_resnet(blocks: tuple[int, ...], stem: nn.Conv2d, classes: int, **options: Any) -> nn.Module:
    """Build timm's residual network of basic blocks with another stem and no pooling behind it; return it.

    Args:
        blocks: in each stage.
        stem: takes the place of timm's 7x7 convolution.
        classes: number of classes.
        options: of timm's `ResNet`.
    """
    # timm takes seconds to import and the rest of the package doesn't need it.
    from timm.models.resnet import BasicBlock, ResNet

    kind: Any = BasicBlock  # timm's annotation asks for an instance
    net = ResNet(kind, blocks, in_chans=stem.in_channels, num_classes=classes, zero_init_last=False, **options)
    net.set_submodule("conv1", stem)
    net.set_submodule("maxpool", nn.Identity())
    return net


def reset_weights(net: nn.Module) -> None:
    """Draw all weights again, in place, from the layers' own distributions.

    timm draws convolutions from another one (He, fan-out) than torch-uncertainty, which trained the members
    that lie on the Hub: with this, ours start where those did.
    """
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.reset_parameters()
