"""Upstream's nets: names, shapes and logits against torch-uncertainty's own modules, and telling them apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.formats.layout import Layout, content_hash, is_counter, tensors_not_finite
from checkpoints_zoo.formats.shard_files import parse_header
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, recognise, tensor_shapes

Oracle = Callable[[str], ModuleType]
Rule = Callable[[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]

# Parameters and keys by hand or from torch-uncertainty: facts of the nets, not of this code.
RESNETS: list[tuple[str, dict[str, Any], int, int]] = [
    ("resnet18", {"classes": 10}, 11_173_962, 122),
    ("resnet18", {"classes": 100}, 11_220_132, 122),
    ("resnet18", {"classes": 200}, 11_271_432, 122),
    ("resnet20-frn-silu", {"classes": 10, "conv_bias": False}, 273_258, 86),
    ("resnet20-frn-silu", {"classes": 10, "conv_bias": True}, 274_042, 107),
]
OPTUNETS: list[tuple[str, dict[str, Any], int, int]] = [
    ("optunet", {"classes": 10, "hidden": None}, 392, 4),
    ("optunet", {"classes": 10, "hidden": 3}, 355, 6),
]
resnets = pytest.mark.parametrize(("name", "arguments", "parameters", "keys"), RESNETS)
nets = pytest.mark.parametrize(("name", "arguments", "parameters", "keys"), [*RESNETS, *OPTUNETS])


def theirs(oracle: Oracle, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build torch-uncertainty's module in eval mode, with random norms; return it."""
    options: dict[str, Any] = {"arch": 18, "conv_bias": False}
    if name == "resnet20-frn-silu":
        frn = oracle("torch_uncertainty.layers.filter_response_norm").FilterResponseNorm2d
        options = {"arch": 20, "conv_bias": arguments["conv_bias"], "activation_fn": F.silu}
        options["normalization_layer"] = frn
    resnet = oracle("torch_uncertainty.models.classification.resnet").resnet
    torch.manual_seed(0)
    module: nn.Module = resnet(in_channels=3, num_classes=arguments["classes"], style="cifar", **options)
    with torch.no_grad():
        for key, tensor in module.state_dict().items():
            if is_counter(key):
                tensor.fill_(29_325)
            elif key.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.dim() == 1 or key.endswith(("gamma", "beta", "tau")):
                tensor.add_(torch.randn(tensor.shape), alpha=0.3)
    return module.eval()


def renamed(rule: Rule, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply one direction of a key map to a state dict; return the new one."""
    named = ((rule(key, tuple(tensor.shape)), tensor) for key, tensor in state.items())
    return {key: tensor.reshape(shape) for (key, shape), tensor in named}


@pytest.mark.slow
@resnets
def test_logits_are_torch_uncertaintys_bit_for_bit(
    oracle: Oracle, name: str, arguments: dict[str, Any], parameters: int, keys: int
) -> None:
    upstream = theirs(oracle, name, arguments)
    state = upstream.state_dict()
    assert (sum(p.numel() for p in upstream.parameters()), len(state)) == (parameters, keys)

    module = build_architecture(name, **arguments).eval()
    module.load_state_dict(renamed(KEY_MAPS[name].translate_to_ours, state), strict=True)
    images = torch.randn(3, 3, 32, 32)
    images[1] *= 1e-3  # so small that a norm's eps counts
    with torch.no_grad():
        logits = module(images)
        assert torch.equal(logits, upstream(images))
    assert logits.shape == (3, arguments["classes"])
    assert (logits.std(0) > 0).all()
    assert logits.isfinite().all()

    back = renamed(KEY_MAPS[name].translate_to_stored, module.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())
    upstream.load_state_dict(back, strict=True)


@nets
def test_counts_and_shapes(name: str, arguments: dict[str, Any], parameters: int, keys: int) -> None:
    with torch.device("meta"):
        module = build_architecture(name, **arguments)
    assert (sum(p.numel() for p in module.parameters()), len(module.state_dict())) == (parameters, keys)
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert list(tensor_shapes(name, **arguments).items()) == list(shapes.items())


@pytest.mark.parametrize("hidden", [None, 3])
def test_optunet_is_its_description(hidden: int | None) -> None:
    module = build_architecture("optunet", hidden=hidden)
    s = module.state_dict()
    images = torch.randn(5, 1, 28, 28)
    maps = F.max_pool2d(F.conv2d(images, s["conv1.weight"]).relu(), 3, stride=3)
    features = F.conv2d(maps, s["conv2.weight"], groups=2).relu().mean((2, 3))
    if hidden is None:
        logits = features @ s["fc.weight"].T + s["fc.bias"]
    else:
        units = (features @ s["fc1.weight"].T + s["fc1.bias"]).relu()
        logits = units @ s["fc2.weight"].T + s["fc2.bias"]
    torch.testing.assert_close(module(images), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet18", "resnet20-frn-silu"])
def test_weights_start_as_torch_uncertaintys_do(oracle: Oracle, name: str) -> None:
    torch.manual_seed(1)
    arguments = {} if name == "resnet18" else {"conv_bias": True}
    module = build_architecture(name, **arguments)
    for key, tensor in module.state_dict().items():
        if tensor.dim() == 4:  # uniform within 1 / sqrt(fan-in): its deviation is the bound over sqrt(3)
            bound = 1 / math.sqrt(tensor[0].numel())
            assert tensor.abs().max() <= bound
            assert tensor.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        elif "bn" in key or "downsample.1" in key:
            one = key.endswith(("weight", "running_var"))
            assert (tensor == (1 if one else 0)).all()
        else:
            assert tensor.isfinite().all()
            assert tensor.std() > 0


@pytest.mark.slow
def test_members_of_a_norm_without_statistics_stack() -> None:
    torch.manual_seed(2)
    modules = [build_architecture("resnet20-frn-silu", conv_bias=True).eval() for _ in range(2)]
    stacked = {key: torch.stack([m.state_dict()[key] for m in modules]) for key in modules[0].state_dict()}
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        logits = Ensemble(build_architecture("resnet20-frn-silu", conv_bias=True).eval(), stacked, [0, 1])(images)
        looped = torch.stack([m(images) for m in modules])
    torch.testing.assert_close(logits, looped, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_float16_file_with_infinite_counters_becomes_a_module(oracle: Oracle) -> None:
    upstream = theirs(oracle, "resnet18", {"classes": 200})
    halves = {key: tensor.half() for key, tensor in upstream.state_dict().items()}
    for key, tensor in halves.items():
        if is_counter(key):
            tensor.fill_(math.inf)  # 78,200 steps, past float16's 65,504
    file = safetensors.torch.save(halves)

    header = parse_header(file, len(file), "version_0.safetensors")
    told = recognise({key: (dtype, shape) for key, (dtype, shape, _, _) in header.tensors.items()})
    assert (told.architecture, told.arguments) == ("resnet18", {"classes": 200})
    layout = Layout.of((key, dtype, shape) for key, (dtype, shape) in told.tensors.items())
    member = file[header.data_start :]
    assert (layout.payload_nbytes, len(member)) == (22_562_104, 22_562_104)
    assert tensors_not_finite(layout, member) == []

    module = build_architecture(told.architecture, **told.arguments).eval()
    state = renamed(KEY_MAPS["resnet18"].translate_to_ours, halves)
    for t in layout.tensors:
        stored = torch.frombuffer(bytearray(member[t.offset : t.offset + t.nbytes]), dtype=torch.float16)
        assert torch.equal(stored.reshape(t.shape), state[t.name])
    counted = {key: torch.zeros_like(tensor) if is_counter(key) else tensor for key, tensor in state.items()}
    module.load_state_dict(counted, strict=True)
    upstream.load_state_dict({k: torch.zeros(()) if is_counter(k) else t for k, t in halves.items()})
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(module(images), upstream(images))

    fewer = Layout.of((k, d, s) for k, (d, s) in told.tensors.items() if not is_counter(k))
    rest = b"".join(member[t.offset : t.offset + t.nbytes] for t in layout.tensors if not is_counter(t.name))
    assert content_hash(layout, member) == content_hash(fewer, rest)
