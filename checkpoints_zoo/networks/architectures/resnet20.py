"""ResNet-20 with filter response normalisation (Singh & Krishnan 2020) and SiLU, from timm's parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from checkpoints_zoo.networks.architectures.resnet18 import reset_weights, small_resnet


def resnet20_frn_silu(channels: int = 3, classes: int = 10, conv_bias: bool = False) -> nn.Module:
    """Build a ResNet-20 that keeps no running statistics, and return it with its random initial parameters.

    The norm also has its own threshold (TLU), so that SiLU and the additions act on thresholded values.

    Args:
        channels: number of channels of the images.
        classes: number of classes.
        conv_bias: whether every convolution has a bias.

    >>> sum(p.numel() for p in resnet20_frn_silu().parameters())
    273258
    """
    # timm is imported here, because importing it takes seconds and the rest of the package doesn't need it.
    with torch.device("cpu"):  # as in `small_resnet`
        from timm.layers.filter_response_norm import FilterResponseNormTlu2d
        from timm.models.resnet import BasicBlock

    norm: Any = partial(FilterResponseNormTlu2d, eps=1e-6)  # The eps of torch-uncertainty; timm's default is 1e-5.
    stem = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
    net = small_resnet((3, 3, 3), stem, classes, channels=(16, 32, 64), act_layer=nn.SiLU, norm_layer=norm)
    # timm always has 64 channels before the first stage, and a fourth stage.
    net.set_submodule("bn1", norm(16))
    net.set_submodule("layer1.0", BasicBlock(16, 16, act_layer=nn.SiLU, norm_layer=norm))
    net.add_module("layer4", nn.Identity())
    if conv_bias:
        _add_biases(net)
    reset_weights(net)
    return net


def _add_biases(net: nn.Module) -> None:
    """Give every convolution a bias, in place, since timm has no option for it. The values of the biases are set later
    by `reset_weights`."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.bias = nn.Parameter(layer.weight.new_empty(layer.out_channels))
