"""Single operations: which keep the scale, which fix it, and which are refused, with the error's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.errors import CollectionNotFound, SymmetryError, UsageError
from checkpoints_zoo.symmetry import Table, symmetries
from tests.support.symmetry_nets import Shaped

Act = Callable[[Tensor], Any]


def table_with_activation(act: Act) -> Table:
    """Derive the table of a net with an operation between two layers; its hidden units are three."""
    parts = {"act": act} if isinstance(act, nn.Module) else {}

    def forward(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        return net.last(net.act(x) if parts else act(x))

    net = Shaped(forward, first=nn.Linear(2, 3), last=nn.Linear(3, 1), **parts)
    return symmetries(net, torch.zeros(2, 2))


def add_scalar(x: Tensor) -> Tensor:
    x += x.relu()
    return x


summed: Any = torch.sum  # with the names of another library's arguments


HOMOGENEOUS: dict[str, Act] = {
    "F.relu": F.relu, "nn.ReLU in place": nn.ReLU(inplace=True), "relu_": torch.relu_, "leaky_relu": F.leaky_relu,
    "clamp": lambda x: x.clamp(min=0), "clamp_min": lambda x: torch.clamp_min(x, 0), "nn.PReLU": nn.PReLU(),
    "threshold": lambda x: F.threshold(x, 0.0, 0.0), "abs": lambda x: x.abs() / 2, "minus": lambda x: -x,
    "dropout": nn.Dropout(), "square": lambda x: x.square().sqrt(), "max": lambda x: torch.maximum(x, 2 * x),
    "times": lambda x: x * 3 + 0, "cast": lambda x: x.float().to(x.dtype), "sub": lambda x: torch.sub(x, x, alpha=2),
    "quotient": lambda x: (x * x) / x, "iadd": add_scalar, "T": lambda x: x.relu().T.T,
    "unit axis": lambda x: x[:, None].relu().squeeze(1), "halves": lambda x: torch.cat([x[:, :1], x[:, 1:]], 1),
    "stack": lambda x: torch.stack([x, x.relu()], 2).sum(2), "rows": lambda x: torch.cat([x, x]).chunk(2)[1],
    "expand": lambda x: x.unsqueeze(2).expand(-1, -1, 4).mean(2), "ellipsis": lambda x: x[..., None, :].flatten(1),
    "batch": lambda x: x.narrow(0, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_homogeneous_operations_keep_the_scale(name: str) -> None:
    table = table_with_activation(HOMOGENEOUS[name])
    assert table.scaling_freedom == 3
    assert [g.size for g in table.groups.values()] == ([2] if name == "halves" else [3])


OTHERS: dict[str, Act] = {
    "silu": F.silu, "nn.GELU": nn.GELU(), "relu6": F.relu6, "nn.ReLU6": nn.ReLU6(), "sigmoid": torch.sigmoid,
    "tanh": lambda x: x.tanh(), "softplus": F.softplus, "nn.ELU": nn.ELU(), "plus": lambda x: x + 1,
    "from": lambda x: 1 - x,
    "clamp": lambda x: x.clamp(0, 6), "clamp above 0": lambda x: x.clamp(min=0.1), "exp": torch.exp,
    "swish": lambda x: x * torch.sigmoid(x), "softmax": lambda x: F.softmax(x, -1), "nn.Hardswish": nn.Hardswish(),
    "nn.Threshold": nn.Threshold(1.0, 1.0), "sum": lambda x: x + x.sum(1, keepdim=True), "power": lambda x: x**0,
    "in place": lambda x: x.sigmoid_(), "square": lambda x: x + x * x,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_fix_the_scale(name: str) -> None:
    table = table_with_activation(OTHERS[name])
    assert (table.scaling_freedom, [g.size for g in table.groups.values()]) == (0, [3])


def test_a_constant_fixes_the_units() -> None:
    table = table_with_activation(lambda x: torch.maximum(x, torch.tensor([1.0, 2.0, 3.0])))
    assert (table.scaling_freedom, dict(table.groups)) == (0, {})
    table = table_with_activation(lambda x: x * torch.tensor([1.0, 2.0, 3.0]))
    assert (table.scaling_freedom, dict(table.groups)) == (3, {})


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result if result.sum() > 0 else -result


KNOWN = "expected one whose effect on permutations and scales is known"
END = "Give a network without it; its symmetries can't be derived."
REFUSED: dict[str, tuple[Act, str]] = {
    "cumsum": (lambda x: x.cumsum(1), "operation Tensor.cumsum: {known}; found no rule for it. {end}"),
    "fft": (lambda x: torch.fft.rfft(x).real, "operation torch._C._fft.fft_rfft: {known}; found no rule for it. {end}"),
    "view": (
        lambda x: torch.cat([x, x.relu()], 1).view(-1, 2, 3).relu().sum(1),
        "operation Tensor.view: {known}; found a view that splits an axis whose units move. {end}",
    ),
    "flip": (lambda x: x[:, torch.tensor([2, 1, 0])],
             "operation getitem: {known}; found an index that is a tensor. {end}"),
    "step": (lambda x: x[:, ::2].repeat(1, 2)[:, :3],
             "operation getitem: {known}; found a slice of units that are not consecutive. {end}"),
    "item": (lambda x: x * x.max().item(),
             "operation Tensor.max: {known}; found a maximum over an axis. {end}"),
    "in place": (lambda x: x.mul_(x.relu()),
                 "operation Tensor.mul_: {known}; found a change in place of a tensor that other operations may read. "
                 "{end}"),
    "rounded": (lambda x: torch.div(x, 2 * x, rounding_mode="floor"),
                "operation torch.div: {known}; found a division that rounds. {end}"),
    "arguments": (lambda x: summed(x, axis=1, keepdims=True) * x,
                  "operation torch.sum: {known}; found unsupported arguments (got an unexpected keyword "
                  "argument 'axis'). {end}"),
    "layer": (nn.RNN(3, 3), "operation nn.RNN in layer 'act': {known}; found a layer without a rule. {end}"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_operations_are_named(name: str) -> None:
    act, text = REFUSED[name]
    with pytest.raises(SymmetryError) as caught:
        table_with_activation(act)
    assert str(caught.value).startswith(text.format(known=KNOWN, end=END))


def test_layers_that_cannot_be_derived() -> None:
    with pytest.raises(SymmetryError) as caught:
        symmetries(nn.Sequential(Branching()), torch.zeros(2, 2))
    assert str(caught.value) == (
        "tracing Sequential, layer '0': expected operations that are the same for all inputs; found symbolically "
        "traced variables cannot be used as inputs to control flow. Give a module that torch.fx can trace, "
        "without control flow that depends on the input."
    )


def test_layers_with_computed_weights() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(SymmetryError) as caught:
        symmetries(net, torch.zeros(2, 2))
    assert "layer '0'" in str(caught.value)
    assert "found a weight that is computed from other tensors" in str(caught.value)
    hooked = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    hooked[0].register_forward_hook(lambda layer, x, y: y + 1)
    with pytest.raises(SymmetryError, match="found a layer with hooks, which may change what it computes"):
        symmetries(hooked, torch.zeros(2, 2))


def test_wrong_examples_and_names() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(UsageError) as caught:
        symmetries(net)
    assert str(caught.value) == "example: expected a tensor, or a tuple of tensors; found None."
    with pytest.raises(UsageError) as caught:
        symmetries(net, torch.zeros(2, 5))
    assert str(caught.value).startswith("example: expected inputs that Sequential takes; found at nn.Linear: ")
    assert str(caught.value).endswith("Give one batch of inputs as `example`.")
    with pytest.raises(UsageError) as caught:
        symmetries("convnet", torch.zeros(1, 1, 8, 8))
    assert str(caught.value) == (
        "network: expected a name without an example, or a module with one; found 'convnet' with Tensor."
    )
    with pytest.raises(CollectionNotFound):
        symmetries("resnet8-digit")
