"""Architectures by name: functions that build a module from arguments that are plain JSON values."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from checkpoints_zoo.networks.architectures.convnet import convnet
from checkpoints_zoo.networks.architectures.mlp import mlp
from checkpoints_zoo.networks.architectures.optunet import optunet
from checkpoints_zoo.networks.architectures.resnet8 import resnet8
from checkpoints_zoo.networks.architectures.resnet18 import resnet18
from checkpoints_zoo.networks.architectures.resnet20 import resnet20_frn_silu

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "convnet": convnet,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20-frn-silu": resnet20_frn_silu,
    "optunet": optunet,
    "mlp": mlp,
}
