"""Members and laplace-torch: batch norms folded, and a Laplace approximation whose mean is the member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from tests.support import scenarios
from tests.support.neighbours_page import THEIR_OWN, run_section

folded = zoo.interop.laplace.folded
Oracle = Callable[[str], ModuleType]
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give a module random weights and statistics."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
            elif tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    return module.eval()


def off(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_logits_stay(name: str) -> None:
    members = zoo.load(name, n=3)
    inputs = members.preprocess(zoo.images.load("digits").images)
    ensemble = members.ensemble()
    for i, member in enumerate(members):
        wanted = member.model()(inputs)
        for net in (folded(member), folded(ensemble[i])):
            assert not any(isinstance(m, BATCH_NORMS) for m in net.modules())
            assert off(net(inputs), wanted) < 1e-5
            assert all(p.requires_grad for p in net.parameters())
    assert torch.equal(ensemble(inputs)[0], members.ensemble()(inputs)[0])  # the ensemble's memory is as it was


class Norms(nn.Module):
    """A net with a norm after each kind of layer, a skip, a norm without affine weights, and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect", bias=False)
        self.bn1 = nn.BatchNorm2d(8, affine=False)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.bn2 = nn.BatchNorm2d(8, eps=0.1)
        self.fc1 = nn.Linear(8, 6)
        self.bn3 = nn.BatchNorm1d(6)
        self.fc2 = nn.Linear(6, 4)
        self.conv2.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.bn1(self.conv1(x)))
        x = relu(self.bn2(self.conv2(x)) + x)
        logits: Tensor = self.fc2(self.bn3(self.fc1(x.mean((2, 3)))).relu())
        return logits


def test_kinds_of_layers() -> None:
    module, inputs = drawn(Norms()), torch.randn(7, 3, 6, 6)
    net = folded(module, inputs)
    assert off(net(inputs), module(inputs)) < 1e-5
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["conv2.weight", "conv2.bias"]
    assert isinstance(module.bn1, BATCH_NORMS)  # the module given is as it was
    assert off(folded(module.train())(inputs), module.eval()(inputs)) < 1e-5


@pytest.mark.slow
def test_a_net_of_timms_with_norms_that_are_activations_too() -> None:
    import timm

    module = drawn(timm.create_model("mobilenetv3_small_050", num_classes=5), 1)
    inputs = torch.randn(2, 3, 64, 64)
    net = folded(module, inputs)
    assert not any(isinstance(m, BATCH_NORMS) for m in net.modules())
    assert off(net(inputs), module(inputs)) < 1e-5


def test_a_member_with_a_norm_after_a_linear_layer(tmp_path: Path) -> None:
    scenarios.build(tmp_path, "mlp", members=(0,))
    member = zoo.load("tiny", source=tmp_path, architecture=scenarios.Mlp)[0]
    inputs = torch.randn(5, 1, 8, 8)
    assert off(folded(member)(inputs), member.model()(inputs)) < 1e-5


class Wrong(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=kind != "statistics")

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "first":
            x = self.norm(x)
        elif self.kind == "sum":
            x = self.norm(self.conv(x) + x)
        elif self.kind == "read twice":
            y = self.conv(x)
            x = self.norm(y) + y
        elif self.kind == "used twice":
            x = self.norm(self.conv(self.conv(x)))
        elif self.kind == "norm twice":
            x = self.norm(self.conv(x)) + self.norm(x)
        elif self.kind == "values" and x.sum() > 0:
            x = self.norm(x)
        else:
            x = self.norm(self.conv(x))
        return x.mean((2, 3))


@pytest.mark.parametrize("kind", ["first", "sum", "read twice", "used twice", "norm twice", "statistics"])
def test_norms_that_cant_be_folded(kind: str) -> None:
    with pytest.raises(UsageError) as refused:
        folded(Wrong(kind))
    assert str(refused.value) == (
        "batch norm 'norm' of Wrong: expected running statistics, and a linear layer or convolution before it that "
        "only this norm reads; found a norm without them. Use laplace's subset_of_weights='last_layer' with the "
        "member's own module."
    )


def test_a_norm_that_shares_weights() -> None:
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    module[2].weight = module[0].weight
    with pytest.raises(UsageError, match="batch norm '1' of Sequential"):
        folded(module)


def test_a_net_that_cant_be_traced() -> None:
    with pytest.raises(
        UsageError, match=r"module Wrong: expected a module that torch\.fx can trace, .*; found symbolically"
    ):
        folded(Wrong("values"))


class Channels(nn.Module):
    """A norm whose channels are another axis than the linear layer's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(5, width), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.fc(x)).mean(1)
        return logits


def test_an_example_shows_what_the_rules_dont() -> None:
    module, inputs = drawn(Channels(4)), torch.randn(3, 4, 5)
    with pytest.raises(
        UsageError, match=r"batch norms of Channels: expected equal logits after folding; found a difference of"
    ):
        folded(module, inputs)
    with pytest.raises(UsageError, match="batch norm 'norm' of Channels"):
        folded(Channels(6))


@pytest.fixture(scope="module")
def laplace(oracle: Oracle) -> Any:
    return oracle("laplace")


THEIRS = [pytest.mark.slow, *(pytest.mark.filterwarnings(w) for w in THEIR_OWN)]


def marked(test: Any) -> Any:
    for mark in THEIRS:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_the_map_is_the_member(laplace: Any, name: str, subset: str) -> None:
    members = zoo.load(name, n=1)
    inputs = members.preprocess(zoo.images.load("digits").images[: 4 if subset == "all" else 100])
    wanted = members[0].model()(inputs).detach()
    train = zoo.images.load("digits", "train")
    some = replace(train, images=train.images[:200], labels=train.labels[:200])  # type: ignore[index]
    net = folded(members[0])
    found = laplace.Laplace(net, "classification", subset_of_weights=subset, hessian_structure="kron")
    found.fit(zoo.interop.loader(members, some, batch=100))
    mean = torch.cat([p.detach().flatten() for p in (net if subset == "all" else last_layer(net)).parameters()])
    assert torch.equal(found.mean, mean)
    state = members[0].state_dict(dtype=torch.float32)
    last = "fc2" if name == "convnet-digits" else "fc"
    own = torch.cat([state[f"{last}.weight"].flatten(), state[f"{last}.bias"]])
    assert torch.equal(found.mean[-len(own) :], own)  # the last layer has no norm after it
    assert off(found.model(inputs), wanted) < 1e-5
    wide = found(inputs)
    found.prior_precision = 1e8
    sharp = found(inputs)
    assert torch.allclose(sharp, wanted.softmax(-1), rtol=0, atol=1e-5)
    entropy = [-(p * p.clamp_min(1e-30).log()).sum(-1).mean() for p in (wide, sharp)]
    assert entropy[0] > entropy[1] + 1e-3  # a posterior that is wider is less sure


def last_layer(net: nn.Module) -> nn.Module:
    return [m for m in net.modules() if isinstance(m, nn.Linear)][-1]


@marked
def test_laplace_refuses_the_norms_themselves(laplace: Any) -> None:
    """Why they are folded; once this fails, they need not be."""
    members = zoo.load("resnet8-digits", n=1)
    found = laplace.Laplace(members[0].model(), "classification", subset_of_weights="all", hessian_structure="kron")
    with pytest.raises(NotImplementedError):
        found.fit(zoo.interop.loader(members, "digits", "train"))


@marked
def test_the_page(laplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_section("laplace-torch")
