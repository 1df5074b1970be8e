"""Programs whose members lie along the batch axis: where the axis goes, and operations that would mix inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble.batch_layout import SPLITS, rank_and_batch_axis
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.modules import build_architecture
from tests.support.ensemble_nets import assert_close, ensemble, images, looped

SHAPE = (4, 3, 4, 6)
MOVES: list[tuple[str, dict[str, Any]]] = [
    ("transpose", {"dim0": 0, "dim1": -1}),
    ("transpose", {"dim0": 3, "dim1": 1}),
    ("permute", {"dims": (2, -1, 0, 1)}),
    ("flatten", {"start_dim": 2}),
    ("flatten", {"start_dim": 0, "end_dim": 1}),
    ("unflatten", {"dim": -1, "sizes": (2, 1, 3)}),
    ("unflatten", {"dim": 0, "sizes": (2, 2)}),
    ("select", {"dim": 0, "index": 1}),
    ("select", {"dim": -2, "index": 1}),
    ("unbind", {}),
    ("unbind", {"dim": 3}),
    ("chunk", {"chunks": 2, "dim": -1}),
    ("split", {"split_size": 2, "dim": 0}),
    ("split", {"split_size": [1, 5], "dim": 3}),
]


@pytest.mark.parametrize("batch_axis", range(4))
@pytest.mark.parametrize(("name", "arguments"), MOVES, ids=str)
def test_the_batch_axis_is_where_the_inputs_lie(name: str, arguments: dict[str, Any], batch_axis: int) -> None:
    """Each input is one number everywhere, so the inputs lie along the axis along which the result counts up."""
    count = SHAPE[batch_axis]

    def numbers(rank: int, axis: int) -> Tensor:
        return torch.arange(count).reshape([-1 if i == axis else 1 for i in range(rank)])

    result = getattr(numbers(4, batch_axis).expand(SHAPE), name)(**arguments)
    result = result[0] if name in SPLITS else result
    counting = [
        (result.dim(), axis)
        for axis in range(result.dim())
        if result.shape[axis] == count and torch.equal(result, numbers(result.dim(), axis).expand(result.shape))
    ]
    try:
        found = [rank_and_batch_axis(name, arguments, 4, batch_axis)]
    except ValueError:
        found = []
    assert found == counting


class Net(nn.Module):
    """An operation between two linear layers of tokens.

    Args:
        operation: function of tokens (batch, token, unit).
    """

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self.norm(self.first(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.softmax(0),
        lambda x: x.flatten(0, 1),
        lambda x: x.transpose(0, 1),
        lambda x: x[0],
        lambda x: x[:, [1, 0]],
        lambda x: x.unbind(0)[0],
        lambda x: x.mean(0),
        lambda x: x.transpose(0, 1) @ x.transpose(0, 1).mT @ x,
        lambda x: x.reshape(x.shape[1], x.shape[0], 6),
        lambda x: torch.cat([x, x]),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        lambda x: F.softmax(x, dim=-1, dtype=torch.float64).float(),
    ],
)
def test_operations_that_may_mix_inputs_have_no_program(operation: Callable[[Tensor], Tensor]) -> None:
    assert derive_program(Net(operation).eval(), 3) is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1),
        lambda x: x.reshape(-1, 3, 2).flatten(1).reshape(x.shape[0], -1, 6),
        lambda x: x[..., 1:, :],
        lambda x: 2 * x.permute(1, 0, 2).permute(1, 0, 2),
        lambda x: torch.cat([x, x.relu()], 1).mean(1, keepdim=True),
        lambda x: (x + x.mean(1, keepdim=True)).tanh()[:, -1],
        lambda x: (x @ x.mT).softmax(-1).transpose(1, 2)[:, 2],
        lambda x: F.scaled_dot_product_attention(x, x.relu(), x)[:, 3] + x[:, 3],
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 3],
        lambda x: x[:, 1] * x[:, 2],
        lambda x: x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(2)[:, 1].unflatten(-1, (3, 6)),
    ],
)
def test_operations_that_keep_inputs_apart_have_one(operation: Callable[[Tensor], Tensor]) -> None:
    net = Net(operation).eval()
    program = derive_program(net, 3)
    assert program is not None
    x = torch.randn(5, 6, 6)
    others = [Net(operation).eval() for _ in range(3)]
    stacked = {name: torch.stack([net.state_dict()[name] for net in others]) for name in net.state_dict()}
    with torch.no_grad():
        logits = program.run(program.prepare(stacked), x, 3, can_overwrite=True)
        torch.testing.assert_close(logits, torch.stack([net(x) for net in others]), rtol=0, atol=1e-6)


class Token(nn.Module):
    """A learned token before those of the input."""

    def __init__(self, expand: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.token, self.last, self.expand = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 3), expand

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.expand(self.token, x), x], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(Net, operation)
            for operation in (
                lambda x: x[()],
                lambda x: x[...],
                lambda x: x[:, None],
                lambda x: x[:, 0, ...],
                lambda x: x.view(size=(5, 6, 6)),
                lambda x: x.view(x.size(0), 6, -1),
                lambda x: x.view(x.shape[1], -1),
                lambda x: x.reshape(shape=(x.size(0), -1)).unflatten(1, (6, 6)),
                lambda x: x.flatten().view(-1, 6),
                lambda x: x.transpose(dim0=1, dim1=2).transpose(1, 2),
                lambda x: x.permute(dims=(0, 2, 1)),
                lambda x: x.mean(),
                lambda x: x.mean(dim=(1, 2), keepdim=True) + x,
                lambda x: x.max(),
                lambda x: x.sum(1, True) + x,
                lambda x: x.split(3)[0],
                lambda x: x.chunk(2, dim=-1)[-1] @ torch.ones(3, 6),
                lambda x: torch.relu(input=x),
                lambda x: torch.add(input=x, other=x),
                lambda x: torch.add(x, x, alpha=2),
                lambda x: torch.cat(tensors=[x, x], dim=1),
                lambda x: torch.cat((x,), -2),
                lambda x: F.softmax(input=x, dim=-1),
                lambda x: F.layer_norm(input=x, normalized_shape=(6,)),
                lambda x: F.layer_norm(x, [6]),
                lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
                lambda x: x.to(torch.float64).to(dtype=torch.float32),
                lambda x: x.to("cpu"),
                lambda x: x.size(dim=1) * x,
                lambda x: x.matmul(x.mT),
            )
        ),
        partial(Token, lambda token, x: token.expand(size=(len(x), -1, -1))),
        partial(Token, lambda token, x: token.expand(x.shape[0], -1, -1)),
        partial(Token, lambda token, x: token.expand((x.size(0), 1, 6))),
        partial(Token, lambda token, x: token.repeat(x.shape[0], 1, 1)),
        partial(Token, lambda token, x: token.expand_as(x[:, :1])),
        partial(Token, lambda token, x: token + torch.zeros_like(x[:, :1])),
    ],
)
def test_any_form_of_a_call_has_a_right_program_or_none(make: Callable[[], nn.Module]) -> None:
    net = make().eval()
    program = derive_program(net, 3)
    if program is not None:
        x = torch.randn(5, 6, 6)
        with torch.no_grad():
            logits = program.run(program.prepare({n: t[None] for n, t in net.state_dict().items()}), x, 1, True)
            torch.testing.assert_close(logits[0], net(x), rtol=1e-5, atol=1e-5)
            two = {n: torch.stack([t, t]) for n, t in net.state_dict().items()}
            logits = program.run(program.prepare(two), x, 2, can_overwrite=True)
            torch.testing.assert_close(logits, net(x).expand(2, *logits.shape[1:]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_vision_transformer_of_timm_runs_side_by_side() -> None:
    from timm.models.vision_transformer import VisionTransformer

    def build() -> nn.Module:
        return VisionTransformer(
            img_size=8, patch_size=2, in_chans=2, num_classes=3, embed_dim=12, depth=2, num_heads=3, init_values=0.1
        )

    made, expected = looped(build, images(4, torch.float64), 3)
    members = ensemble(build, made, "grouped")
    assert_close(members(images(4, torch.float64)), expected, 1e-12)
    with pytest.raises(AssertionError, match=r"Input height \(6\) doesn't match model \(8\)"):
        members(images(4, torch.float64, size=6))


def test_tokens_that_nobody_reads_are_not_computed() -> None:
    """A vision transformer reads the class token alone: of its last block, the other tokens give keys and values."""
    elements: dict[int, list[int]] = {}
    for depth in (1, 2):
        net = build_architecture("vit", depth=depth).eval()
        program = derive_program(net, 4)
        assert program is not None
        prepared = program.prepare({name: tensor[None] for name, tensor in net.state_dict().items()})
        elements[depth] = []
        with torch.no_grad():
            program.run(prepared, torch.zeros(1, 1, 8, 8), 1, True, elements[depth])
    hidden = 17 * 64
    assert elements[1].count(hidden) == 0
    assert elements[2].count(hidden) == 2  # fc1 and GELU of the first block
