"""ResNet-20 with filter response normalisation (Singh & Krishnan 2020) and SiLU, from timm's parts; its variant with
JAX's padding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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


def resnet20_frn_swish(channels: int = 3, classes: int = 10) -> nn.Module:
    """Build the ResNet-20-FRN-Swish of Izmailov et al. 2021, whose HMC draws are public, and return it with its random
    initial parameters.

    It differs from `resnet20_frn_silu` in the padding of the two convolutions of stride 2, which is JAX's "SAME" for
    images of even height and width: no row and column of zeros before the image, one after. Every convolution has a
    bias.

    Args:
        channels: number of channels of the images, whose height and width must be multiples of 4.
        classes: number of classes.

    >>> sum(p.numel() for p in resnet20_frn_swish().parameters())
    274042
    """
    net = resnet20_frn_silu(channels, classes, conv_bias=True)
    for name in ("layer2.0", "layer3.0"):
        net.set_submodule(name, _DownsamplingBlock(net.get_submodule(name)))
    return net


class _DownsamplingBlock(nn.Module):
    """A basic block of stride 2 with the layers of a block of timm, padded as JAX's "SAME" pads.

    Axes: images (batch, channel, height, width).
    """

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.conv1, self.bn1, self.act1 = block.conv1, block.bn1, block.act1
        self.conv2, self.bn2, self.act2 = block.conv2, block.bn2, block.act2
        self.downsample = block.downsample
        self.conv1.padding = (0, 0)

    def forward(self, images: Tensor) -> Tensor:
        features = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(self.pad(images))))))
        result: Tensor = self.act2(features + self.downsample(images))
        return result


def _add_biases(net: nn.Module) -> None:
    """Give every convolution a bias, in place, since timm has no option for it. The values of the biases are set later
    by `reset_weights`."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.bias = nn.Parameter(layer.weight.new_empty(layer.out_channels))
