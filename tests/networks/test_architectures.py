"""Architectures: names, shapes, and the errors for arguments that come from a file."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.networks.modules import build_architecture

# Parameters, and channels and side of the images, with every argument left out.
NETS = {
    "convnet": (3658, 1, 8),
    "resnet8": (19810, 1, 8),
    "resnet18": (11_173_962, 3, 32),
    "resnet20-frn-silu": (273_258, 3, 32),
    "resnet20-frn-swish": (274_042, 3, 32),
    "optunet": (392, 1, 28),
    "mlp": (3466, 1, 8),
    "vit": (18218, 1, 8),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes(name: str) -> None:
    parameters, channels, side = NETS[name]
    module = build_architecture(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    assert module(torch.zeros(2, channels, side, side)).shape == (2, 10)
    assert build_architecture(name, channels=2, classes=7)(torch.zeros(2, 2, side, side)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, {}) for name in ARCHITECTURES),
        ("resnet20-frn-silu", {"conv_bias": True}),
        ("optunet", {"hidden": 3}),
        ("mlp", {"widths": (5,)}),
    ],
)
def test_builds_on_meta_and_traces(name: str, arguments: dict[str, Any]) -> None:
    with torch.device("meta"):
        module = build_architecture(name, **arguments)
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    module = build_architecture(name, **arguments).eval()
    _, channels, side = NETS[name]
    images = torch.rand(3, channels, side, side)
    torch.testing.assert_close(torch.fx.symbolic_trace(module)(images), module(images), rtol=0, atol=0)


def test_convnet_names() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in build_architecture("convnet").state_dict().items()}
    assert shapes == {
        "conv1.weight": (8, 1, 3, 3),
        "conv1.bias": (8,),
        "conv2.weight": (16, 8, 3, 3),
        "conv2.bias": (16,),
        "fc1.weight": (32, 64),
        "fc1.bias": (32,),
        "fc2.weight": (10, 32),
        "fc2.bias": (10,),
    }


def test_resnet8_names_are_timms() -> None:
    from timm.models.resnet import BasicBlock, ResNet

    timms = ResNet(BasicBlock, layers=(1, 1, 1, 1), channels=(8, 16, 32, 64), in_chans=1, num_classes=10)
    # timm's stem has 64 channels, hence a shortcut in layer1 that ours has no need of.
    names = [name for name in timms.state_dict() if not name.startswith(("layer4", "layer1.0.downsample"))]
    ours = build_architecture("resnet8").state_dict()
    assert list(ours) == names
    assert ours["layer2.0.downsample.0.weight"].shape == (16, 8, 1, 1)
    assert ours["layer3.0.conv1.weight"].shape == (32, 16, 3, 3)


def test_mlp_is_its_layers_by_hand() -> None:
    module = build_architecture("mlp", widths=[4, 5, 6], size=3, channels=2)
    state = module.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items() if name.endswith("weight")} == {
        "fc1.weight": (4, 18), "fc2.weight": (5, 4), "fc3.weight": (6, 5), "fc4.weight": (10, 6),
    }  # fmt: skip
    images = torch.rand(3, 2, 3, 3)
    values = images.reshape(3, 18).double().numpy()
    for at in (1, 2, 3, 4):
        values = values @ state[f"fc{at}.weight"].double().numpy().T + state[f"fc{at}.bias"].double().numpy()
        values = values if at == 4 else values.clip(min=0)
    np.testing.assert_allclose(module(images).detach().numpy(), values, atol=1e-6)


def test_vit_is_timms() -> None:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"patch": 2, "width": 24, "depth": 3, "heads": 6, "hidden": 48, "channels": 3, "classes": 7}
    ours = build_architecture("vit", size=6, **sizes).double()
    timms = VisionTransformer(
        img_size=6, patch_size=2, in_chans=3, num_classes=7, embed_dim=24, depth=3, num_heads=6, mlp_ratio=2
    ).double()  # fmt: skip
    assert list(ours.state_dict()) == list(timms.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    timms.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(images), timms.eval()(images), rtol=0, atol=1e-12)


def test_lists_stand_for_tuples() -> None:
    assert build_architecture("resnet8", widths=[4, 6, 10]).state_dict()["fc.weight"].shape == (10, 10)


@pytest.mark.slow
def test_convnet_needs_no_timm() -> None:
    code = """import sys
from checkpoints_zoo.networks.modules import build_architecture
build_architecture('convnet')
sys.exit('timm' in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        (
            "resnet",
            {},
            f"architecture 'resnet': expected one of {', '.join(NETS)}; found 'resnet'."
            " Use the nearest name, 'resnet8'.",
        ),
        (
            "convnet",
            {"widths": [8]},
            "architecture 'convnet': expected arguments among channels, classes; found 'widths'.",
        ),
        (
            "convnet",
            {"classes": "10"},
            "argument 'classes' of architecture 'convnet': expected a whole number in 1-65536; found '10'.",
        ),
        (
            "convnet",
            {"classes": True},
            "argument 'classes' of architecture 'convnet': expected a whole number in 1-65536; found True.",
        ),
        (
            "optunet",
            {"hidden": 0},
            "argument 'hidden' of architecture 'optunet': expected a whole number in 1-65536, or none; found 0.",
        ),
        (
            "optunet",
            {"hidden": False},
            "argument 'hidden' of architecture 'optunet': expected a whole number in 1-65536, or none; found False.",
        ),
        (
            "resnet20-frn-silu",
            {"conv_bias": 1},
            "argument 'conv_bias' of architecture 'resnet20-frn-silu': expected true or false; found 1.",
        ),
        (
            "resnet18",
            {"classes": None},
            "argument 'classes' of architecture 'resnet18': expected a whole number in 1-65536; found None.",
        ),
        (
            "resnet8",
            {"widths": [8, 16, 0]},
            "argument 'widths' of architecture 'resnet8': expected a list of at most 1,024 whole numbers in 1-65536;"
            " found [8, 16, 0].",
        ),
        ("mlp", {"widths": []}, "argument 'widths' of architecture 'mlp': expected a width or more; found ()."),
        (
            "resnet8",
            {"widths": [8, 16]},
            "argument 'widths' of architecture 'resnet8': expected three widths; found (8, 16).",
        ),
        ("vit", {"patch": 3}, "argument 'patch' of architecture 'vit': expected a divisor of size = 8; found 3."),
        ("vit", {"heads": 5}, "argument 'heads' of architecture 'vit': expected a divisor of width = 32; found 5."),
    ],
)
def test_arguments_are_checked(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        build_architecture(name, **arguments)
    assert str(error.value) == text
