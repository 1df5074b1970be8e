"""Tables of networks of other packages: the function stays, and the counts are those of their published shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from checkpoints_zoo.symmetry import Table, apply, random_element, symmetries
from tests.support.symmetry_nets import randomised, without_eps

pytestmark = pytest.mark.slow
Oracle = Callable[[str], ModuleType]


def check_function_stays(net: nn.Module, size: int = 32, approximate: bool = False) -> Table:
    """Check that a random symmetry keeps a net's outputs to 1e-10 (float64); return the net's table."""
    table = symmetries(net, torch.zeros(1, 3, size, size))
    generator = torch.Generator().manual_seed(0)
    randomised(net, 0)
    x = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
    element = random_element(table, generator, spread=0.2, approximate=approximate)
    with torch.no_grad():
        before = net(x)
        net.load_state_dict(apply(table, net.state_dict(), element), strict=True)
        after = net(x)
    assert (after - before).abs().max() < 1e-10 * before.abs().max()
    return table


def log10_factorials(*sizes: int) -> float:
    return sum(math.lgamma(n + 1) for n in sizes) / math.log(10)


def test_torchvision_vgg11() -> None:
    from torchvision.models import vgg11

    with torch.device("meta"):
        table = symmetries(vgg11(num_classes=10), torch.zeros(1, 3, 32, 32))
    widths = (64, 128, 256, 256, 512, 512, 512, 512, 4096, 4096)
    assert table.log10_permutations() == pytest.approx(log10_factorials(*widths), rel=1e-12)
    assert table.scaling_freedom == sum(widths)
    assert [m.span for m in table.tensors["classifier.0.weight"].moves if m.axis == 1] == [7 * 7]
    small = vgg11(num_classes=10, init_weights=False)
    small.classifier = nn.Sequential(nn.Linear(512 * 7 * 7, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 10))
    check_function_stays(small)


def test_timm_resnet50() -> None:
    import timm

    table = check_function_stays(timm.create_model("resnet50", num_classes=10))
    inner = [n for n, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)) for _ in range(2 * blocks)]
    assert table.log10_permutations(streams=False) == pytest.approx(log10_factorials(64, *inner), rel=1e-12)
    streams = log10_factorials(256, 512, 1024, 2048)
    assert table.log10_permutations() == pytest.approx(log10_factorials(64, *inner) + streams, rel=1e-12)


def test_timm_mobilenet_v2() -> None:
    import timm

    table = check_function_stays(timm.create_model("mobilenetv2_100", num_classes=10))
    assert [w[0] for w in table.groups["blocks.1.0.conv_pw"].writers] == [
        "blocks.1.0.conv_pw.weight", "blocks.1.0.conv_dw.weight"
    ]  # fmt: skip
    assert not table.groups["blocks.1.0.conv_pw"].stream
    # ReLU6 fixes the scale behind every norm but those that end a block.
    assert all(scale.norms or name.endswith((".bn3", ".0.0.bn2")) for name, scale in table.scales.items())


@pytest.mark.parametrize("name", ["seresnet18", "resnext26ts", "regnety_002", "densenet121", "convnext_atto"])
def test_other_timm_nets(name: str) -> None:
    import timm

    check_function_stays(timm.create_model(name, num_classes=10), size=64)


def test_torch_uncertainty_resnets(oracle: Oracle) -> None:
    resnet = oracle("torch_uncertainty.models.classification.resnet").resnet
    frn = oracle("torch_uncertainty.layers.filter_response_norm").FilterResponseNorm2d
    options: dict[str, Any] = {"in_channels": 3, "num_classes": 10, "style": "cifar"}
    table = check_function_stays(resnet(arch=18, conv_bias=False, **options))
    ours = symmetries("resnet18")
    assert [g.size for g in table.groups.values()] == [g.size for g in ours.groups.values()]
    assert (table.log10_permutations(), table.scaling_freedom) == (ours.log10_permutations(), ours.scaling_freedom)
    options |= {"activation_fn": F.silu, "normalization_layer": frn, "conv_bias": True}
    table = check_function_stays(without_eps(resnet(arch=20, **options)), approximate=True)
    ours = symmetries("resnet20-frn-silu")
    assert table.log10_permutations() == ours.log10_permutations()
    assert (table.scaling_freedom, table.approximate_scaling_freedom) == (0, ours.approximate_scaling_freedom)
