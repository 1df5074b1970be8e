"""Symmetries that change the function, and networks with one function that have several canonical forms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SymmetryError, UsageError
from checkpoints_zoo.symmetry import (
    Element,
    Table,
    apply,
    approximate_changes,
    compose,
    inverse,
    random_element,
    symmetries,
)
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from checkpoints_zoo.symmetry.canonical.mass import minimal_mass
from checkpoints_zoo.symmetry.deriving.operations import FUNCTION_RULES, LAYER_RULES, METHOD_RULES
from tests.support.symmetry_nets import Shaped, randomised

# Case 14: operations that are not positively homogeneous.

Operation = Callable[[Tensor, Tensor], Any]
CASTS: dict[str, Operation] = {
    "to int": lambda x, y: (4 * x).to(torch.int64).to(x.dtype),
    "to int named": lambda x, y: (4 * x).to(dtype=torch.int8).to(x.dtype),
    "to bool": lambda x, y: x.relu().to(torch.bool).to(x.dtype),
    "type": lambda x, y: (4 * x).type(torch.int32).to(x.dtype),
    "type by name": lambda x, y: (4 * x).type("torch.LongTensor").to(x.dtype),
    "type_as": lambda x, y: (4 * x).type_as(torch.zeros(1, dtype=torch.int16)).to(x.dtype),
    "sum as int": lambda x, y: (4 * x).sum(-1, dtype=torch.int64).to(x.dtype),
    "mask": lambda x, y: x * y.relu().to(torch.bool),
    "mask of a sum": lambda x, y: x + x.relu().to(torch.uint8),
    "half": lambda x, y: x.half().to(x.dtype),
    "bfloat16": lambda x, y: x.bfloat16().to(x.dtype),
    "float": lambda x, y: x.float().to(x.dtype),
    "bits": lambda x, y: x.view(torch.int64).to(x.dtype),
    "alpha_dropout": lambda x, y: F.alpha_dropout(x, 1.0, training=True),
    "feature_alpha_dropout": lambda x, y: F.feature_alpha_dropout(x, 1.0, training=True),
}  # fmt: skip


def between(operation: Operation, *shape: int) -> nn.Module:
    """Return a net with an operation on the outputs of two layers, then a linear layer over each axis."""
    kernel = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d][len(shape)]
    options = (1,) if shape else ()
    one, other = (kernel(3, 6, *options) for _ in range(2))
    act = {"act": operation} if isinstance(operation, nn.Module) else {}

    def middle(net: Any, x: Tensor) -> Tensor:
        y = net.one(x).clone(), net.other(x).clone()
        result = net.act(y[0]) if act else operation(*y)
        return result.to(x.dtype)

    with torch.no_grad():
        example = Shaped(middle, one=one, other=other, **act).double().eval()(torch.randn(4, 3, *shape).double())
    heads = {f"head{i}": nn.Linear(example.shape[i], 2, bias=False) for i in range(1, example.ndim)}

    def forward(net: Any, x: Tensor) -> Tensor:
        x = middle(net, x)
        for i in range(1, example.ndim):  # each axis has a kernel, so that units may move along each of them
            x = getattr(net, f"head{i}")(x.transpose(i, -1)).transpose(i, -1)
        return x

    return Shaped(forward, one=one, other=other, **heads, **act)


def largest_change(net: nn.Module, table: Table, example: Tensor, seed: int) -> float:
    """Apply a random symmetry; return the largest change of the outputs, relative to the largest output."""
    generator = torch.Generator().manual_seed(seed)
    randomised(net, seed)
    with torch.no_grad():
        before = net(example)
        net.load_state_dict(apply(table, net.state_dict(), random_element(table, generator)), strict=True)
        after = net(example)
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("name", CASTS)
def test_casts_end_a_scale_group(name: str) -> None:
    """Case 14."""
    torch.manual_seed(0)
    net = between(CASTS[name], 4).double()
    example = torch.randn(4, 3, 4, dtype=torch.float64)
    try:
        table = symmetries(net, example)
    except SymmetryError:
        assert name == "bits"
        return
    opened = {writer for scale in table.scales.values() for writer in scale.writers}
    assert (("other.weight" if name == "mask" else "one.weight"), 0) not in opened
    assert all(largest_change(net, table, example, seed) < 1e-9 for seed in range(3))


def test_a_wider_float_keeps_the_scale() -> None:
    """Case 14: float64 holds all values of float32."""
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    assert symmetries(Shaped(lambda net, x: net.net(x).double(), net=net), torch.zeros(4, 3)).scaling_freedom == 6


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("as_layer", [True, False])
def test_a_table_of_limited_norm_ends_a_scale_group(as_layer: bool, norm_type: float) -> None:
    """Case 14: `max_norm` rescales long rows when they are read, in place."""
    table = nn.Embedding(5, 6, max_norm=0.5, norm_type=norm_type)

    def forward(net: Any, x: Tensor) -> Tensor:
        rows = net.table(x) if as_layer else F.embedding(x, net.table.weight, None, 0.5, norm_type)
        return net.last(rows.relu().mean(1))

    net = Shaped(forward, table=table, last=nn.Linear(6, 2))
    example = torch.tensor([[0, 1, 2], [2, 3, 4]])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    derived = symmetries(net, example)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert (derived.scaling_freedom, [group.size for group in derived.groups.values()]) == (0, [6])
    assert all(largest_change(net, derived, example, seed) < 1e-10 for seed in range(3))


# Every operation of the table, in every spelling: (function, outputs of two layers) -> result.

Use = Callable[[Any, Tensor, Tensor], Any]
USES: dict[str, list[Use]] = {
    "add sub subtract mul multiply iadd isub imul": [
        lambda f, x, y: f(x, y), lambda f, x, y: f(x, 2.5), lambda f, x, y: f(x, 0), lambda f, x, y: f(x, x.abs()),
    ],
    "div divide true_divide itruediv truediv": [
        lambda f, x, y: f(x, y),
        lambda f, x, y: f(x, 2.5),
        lambda f, x, y: f(x, x.abs()),
    ],
    "maximum minimum max min type_as view_as reshape_as expand_as": [lambda f, x, y: f(x, y)],
    "type": [
        lambda f, x, y: f(x, torch.int64), lambda f, x, y: f(x, "torch.HalfTensor"), lambda f, x, y: f(x, x.dtype),
    ],
    "to": [
        lambda f, x, y: f(x, torch.bool), lambda f, x, y: f(3 * x, dtype=torch.int8), lambda f, x, y: f(x, y),
        lambda f, x, y: f(x, torch.float16), lambda f, x, y: f(x, "cpu", torch.int32), lambda f, x, y: f(x, "cpu"),
        lambda f, x, y: f(x, torch.zeros(1, dtype=torch.int32)), lambda f, x, y: f(x, torch.complex64).abs(),
    ],
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout": [
        lambda f, x, y: f(x, 0.5, False), lambda f, x, y: f(x, 1.0, True),
    ],
    "clamp clip": [
        lambda f, x, y: f(x, 0), lambda f, x, y: f(x, None, 0.0), lambda f, x, y: f(x, 0, 1), lambda f, x, y: f(x, 0.1),
        lambda f, x, y: f(x, min=0, max=0),
    ],
    "clamp_min": [lambda f, x, y: f(x, 0), lambda f, x, y: f(x, 0.1)],
    "threshold": [lambda f, x, y: f(x, 0.0, 0.0), lambda f, x, y: f(x, 0.0, 0.1), lambda f, x, y: f(x, 0.1, 0.0)],
    "prelu": [lambda f, x, y: f(x, torch.full((1,), 0.25, dtype=torch.float64))],
    "pow": [
        lambda f, x, y: f(x, 2), lambda f, x, y: f(x.abs(), 0.5), lambda f, x, y: f(x.abs(), -1.5),
        lambda f, x, y: f(x, 0), lambda f, x, y: f(x.abs(), 0.3), lambda f, x, y: f(x, 3.0),
    ],
    "sqrt rsqrt log log1p": [lambda f, x, y: f(x.abs())],
    "mean sum": [
        lambda f, x, y: x * f(x), lambda f, x, y: f(x, 1), lambda f, x, y: f(x, (2, 3)), lambda f, x, y: f(x, -1, True),
    ],
    "amax amin": [lambda f, x, y: x * f(x), lambda f, x, y: f(x, 1), lambda f, x, y: f(x, (2, -1), True)],
    "softmax log_softmax softmin": [lambda f, x, y: f(x, 1), lambda f, x, y: f(x, -1)],
    "pad": [
        lambda f, x, y: f(x, (1, 1)), lambda f, x, y: f(x, (1, 1, 0, 1, 0, 0), "constant", 2.0),
        lambda f, x, y: f(x, (1, 1, 1, 1), "reflect"), lambda f, x, y: f(x, (0, 0, 0, 0, 1, 2)),
    ],
    "interpolate upsample": [
        lambda f, x, y: f(x, scale_factor=2), lambda f, x, y: f(x, (3, 5), None, "bilinear"),
        lambda f, x, y: f(x, (7, 5), None, "bicubic"),
    ],
    "max_pool{0}d avg_pool{0}d adaptive_avg_pool{0}d adaptive_max_pool{0}d": [lambda f, x, y: f(x, 2)],
    "reshape": [lambda f, x, y: f(x, (4, 6, 16))],
    "view": [
        lambda f, x, y: f(x, 4, 6, 16), lambda f, x, y: f(x, torch.int64), lambda f, x, y: f(x, torch.float32),
        lambda f, x, y: f(x, torch.complex128).abs(), lambda f, x, y: f(x, dtype=torch.int32),
    ],
    "flatten": [lambda f, x, y: f(x, 1), lambda f, x, y: f(x, 2, 3)],
    "unflatten": [lambda f, x, y: f(x, 2, (2, 2)), lambda f, x, y: f(x, 1, (2, 3))],
    "unsqueeze": [lambda f, x, y: f(x, 1)],
    "permute": [lambda f, x, y: f(x, (0, 2, 1, 3))],
    "transpose swapaxes swapdims": [lambda f, x, y: f(x, 1, 3)],
    "t": [lambda f, x, y: f(f(x[:, :, 0, 0]))],
    "expand broadcast_to": [lambda f, x, y: f(x[:, :, :1], (4, 6, 4, 4))],
    "cat concat concatenate": [lambda f, x, y: f([x, y], 1), lambda f, x, y: f((x, y), 2)],
    "stack": [lambda f, x, y: f([x, y], 2)],
    "chunk split tensor_split": [
        lambda f, x, y: torch.cat((f(x, 3, 1)[0], y, f(x, 3, 1)[1]), 1), lambda f, x, y: f(x, 2, -1)[1],
    ],
    "narrow": [lambda f, x, y: f(x, 1, 2, 3)],
    "linear": [lambda f, x, y: f(x, torch.ones(5, 4, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64))],
    "matmul": [lambda f, x, y: f(x, torch.ones(4, 3, dtype=torch.float64)), lambda f, x, y: f(x, y)],
    "mm dsmm spmm": [lambda f, x, y: f(x[:, :, 0, 0], torch.ones(6, 3, dtype=torch.float64))],
    "bmm": [lambda f, x, y: f(x[:, 0], torch.ones(4, 4, 3, dtype=torch.float64)), lambda f, x, y: f(x[:, 0], y[:, 1])],
    "batch_norm": [
        lambda f, x, y: f(x, *torch.ones(2, 6, dtype=torch.float64)), lambda f, x, y: f(x, None, None, training=True),
    ],
    "group_norm": [lambda f, x, y: f(x, 2)],
    "layer_norm": [lambda f, x, y: f(x, (4,)), lambda f, x, y: f(x, (4, 4), eps=0.1)],
    "getitem": [lambda f, x, y: f(x, (slice(None), slice(1, 4))), lambda f, x, y: f(x, (..., 0))],
}  # fmt: skip
ARGUMENTS = {name.format(d): uses for names, uses in USES.items() for name in names.split() for d in (1, 2, 3)}
ARGUMENTS |= {
    f"conv{d}d": [
        lambda f, x, y, d=d: f(x, torch.ones(5, 6, *[1] * d, dtype=torch.float64)),
        lambda f, x, y, d=d: f(x, torch.ones(6, 1, *[1] * d, dtype=torch.float64), groups=6),
    ]
    for d in (1, 2, 3)
}


def method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of tensors."""
    return lambda x, *arguments, **options: getattr(x, name)(*arguments, **options)


def spellings() -> dict[str, list[Any]]:
    """Return the functions of the table by name, less those in place: each has the rule and the values of another."""
    result: dict[str, list[Any]] = {}
    for place in (torch, F, operator):
        for name in dir(place):
            function = getattr(place, name)
            if name.startswith("_") or name.endswith("_") or function is torch.adaptive_max_pool1d:
                continue  # that one returns a tuple
            if callable(function) and function in FUNCTION_RULES:
                result.setdefault(name, []).append(function)
    for name in METHOD_RULES:
        if hasattr(Tensor, name) and not name.endswith("_") and name != "cuda":
            result.setdefault(name, []).append(method(name))
    return result


SPELLINGS = spellings()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*upsample.* is deprecated")
@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "embedding"])
def test_every_operation_that_passes_a_scale_is_positively_homogeneous(name: str) -> None:
    """Case 14, for all functions and methods of the table: what a symmetry scales, it does not change."""
    dimensions = int(name[-2]) if name[-2:] in ("1d", "2d", "3d") else 2
    shape, accepted = (4,) * dimensions, 0
    for function in SPELLINGS[name]:
        for use in ARGUMENTS.get(name, [lambda f, x, y: f(x)]):
            torch.manual_seed(0)
            net = between(lambda x, y, use=use, f=function: use(f, x, y), *shape).double()
            example = torch.randn(4, 3, *shape, dtype=torch.float64)
            try:
                table = symmetries(net, example)
            except SymmetryError:
                continue
            accepted += 1
            assert largest_change(net, table, example, seed=0) < 1e-9
    assert accepted


KERNELS: dict[str, tuple[Any, ...]] = {
    "Conv": (6, 5, 1),
    "ConvTranspose": (6, 5, 1),
    "BatchNorm": (6,),
    "InstanceNorm": (6,),
}
LAYER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **{f"{kind}{d}d": arguments for kind, arguments in KERNELS.items() for d in (1, 2, 3)},
    **{f"{kind}Pad{d}d": (1,) for kind in ("Zero", "Reflection", "Replication", "Circular") for d in (1, 2, 3)},
    **{f"ConstantPad{d}d": (1, 0.5) for d in (1, 2, 3)},
    **{f"{kind}Pool{d}d": (2,) for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg") for d in (1, 2, 3)},
    "SyncBatchNorm": (6,), "Threshold": (0.0, 0.1), "PReLU": (6,), "Linear": (4, 5), "GroupNorm": (2, 6),
    "LayerNorm": (4,), "RMSNorm": (4,), "Flatten": (), "Unflatten": (2, (2, 2)), "Upsample": (None, 2),
    "Softmax": (1,), "LogSoftmax": (1,), "Softmin": (1,),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LAYER_RULES if name.startswith("nn.") and name != "nn.Embedding"])
def test_every_layer_that_passes_a_scale_is_positively_homogeneous(name: str) -> None:
    """Case 14, for all layers of torch in the table."""
    kind = name.removeprefix("nn.")
    dimensions = int(kind[-2]) if kind[-2:] in ("1d", "2d", "3d") else 2
    torch.manual_seed(0)
    net = between(getattr(nn, kind)(*LAYER_ARGUMENTS.get(kind, ())), *(4,) * dimensions).double().eval()
    example = torch.randn(4, 3, *(4,) * dimensions, dtype=torch.float64)
    table = symmetries(net, example)
    assert all(largest_change(net, table, example, seed) < 1e-9 for seed in range(2))


# Case 15: ties between units that are duplicates, before and after scaling.


def orbit_gap(net: nn.Module, example: Tensor, state: dict[str, Tensor], seed: int, key: str, **options: Any) -> float:
    """Compare the canonical forms of a network and of a random element of its orbit; return the largest difference."""
    table = symmetries(net, example)
    element = random_element(table, torch.Generator().manual_seed(seed))
    if not options.get("streams", False):
        still = {name for name, group in table.groups.items() if group.stream}
        still |= {group.mover for group in table.groups.values() if group.name in still and group.mover}
        element = Element({n: p for n, p in element.permutations.items() if n not in still}, element.scales)
    forms = [
        canonicalize(table, params, scale="unit-norm", permute=key, **options)[0]
        for params in (state, apply(table, state, element))
    ]
    return max(
        float((forms[1][n] - t).abs().max() / t.abs().max().clamp(min=1)) for n, t in forms[0].items() if t.numel()
    )


def duplicate_units(state: dict[str, Tensor], table: Table, generator: torch.Generator) -> dict[str, Tensor]:
    """Make units copies of others in every tensor, some of them only up to a positive factor."""
    result = {name: tensor.clone() for name, tensor in state.items()}
    for group in table.groups.values():
        if group.blocks > 1 or group.mover or group.size < 3:
            continue
        a, b, c = torch.randperm(group.size, generator=generator)[:3].tolist()
        for name, axes in table.tensors.items():
            for move in axes.moves:
                if move.group == group.name:
                    span = move.span
                    part = result[name].movedim(move.axis, 0)
                    for copy in (b, c):
                        part[move.offset + copy * span : move.offset + (copy + 1) * span] = part[
                            move.offset + a * span : move.offset + (a + 1) * span
                        ].clone()
    return result


TIED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (3,)),
    "three hidden layers": (
        lambda: nn.Sequential(
            nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.ReLU(),
            nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 2),
        ), (3,),
    ),
    "convolutions": (
        lambda: nn.Sequential( nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(24, 2)
        ), (2, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("key", ["first", "max"])
@pytest.mark.parametrize("name", TIED)
def test_duplicates_have_one_canonical_form(name: str, key: str, dtype: torch.dtype) -> None:
    """Case 15."""
    build, shape = TIED[name]
    for seed in range(3):
        net = randomised(build(), seed)
        example = torch.zeros(2, *shape, dtype=torch.float64)
        table, generator = symmetries(net, example), torch.Generator().manual_seed(seed)
        # A row of zeros has no scale that unit-norm could fix.
        state = {n: torch.where(t == 0, 0.7, t) if t.is_floating_point() else t for n, t in net.state_dict().items()}
        state = duplicate_units(state, table, generator)
        state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
        assert orbit_gap(net, example, state, seed, key) < (1e-9 if dtype == torch.float64 else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(6,), (3, 3), (2, 4)])
def test_twins_that_feed_twins_have_one_canonical_form(sizes: tuple[int, ...]) -> None:
    """Case 15: units that differ only in their connections, as the units of cycles do."""
    count = sum(sizes)
    net = nn.Sequential(
        nn.Linear(1, count), nn.ReLU(), nn.Linear(count, count), nn.ReLU(), nn.Linear(count, 1)
    ).double()
    wires, start = torch.zeros(count, count, dtype=torch.float64), 0
    for size in sizes:
        for i in range(size):
            wires[start + i, start + (i + 1) % size] = wires[start + i, start + i] = 0.3
        start += size
    state = {n: torch.full_like(t, 0.7) for n, t in net.state_dict().items()} | {"2.weight": wires}
    for seed in range(4):
        assert orbit_gap(net, torch.zeros(2, 1, dtype=torch.float64), state, seed, "first") < 1e-9


# Case 9: signs that norms, odd activations and linear layers undo.


def odd_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Hardtanh(), nn.Linear(5, 4), nn.Linear(4, 6), nn.Softsign(),
        nn.Linear(6, 2),
    )  # fmt: skip


def normed_net() -> nn.Module:
    """Batch norms before a relu, a linear layer and a sum; a group norm, a norm of single channels, pooling."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.norm1(net.conv1(x)).relu()
        y = net.norm2(net.conv2(x))
        x = F.max_pool2d(y + net.norm3(net.conv3(x)), 2)
        x = F.avg_pool2d(net.norm4(net.conv4(net.norm5(net.conv5(x)))), 2)
        return net.last(net.norm6(net.conv6(x)).tanh().mean((2, 3)))

    return Shaped(
        forward, conv1=nn.Conv2d(2, 6, 1), norm1=nn.BatchNorm2d(6), conv2=nn.Conv2d(6, 5, 1, bias=False),
        norm2=nn.BatchNorm2d(5), conv3=nn.Conv2d(6, 5, 1), norm3=nn.BatchNorm2d(5, affine=False),
        conv5=nn.Conv2d(5, 6, 3, padding=1), norm5=nn.BatchNorm2d(6), conv4=nn.Conv2d(6, 4, 1),
        norm4=nn.GroupNorm(2, 4), conv6=nn.Conv2d(4, 6, 1), norm6=nn.InstanceNorm2d(6, affine=True, eps=1e-3),
        last=nn.Linear(6, 2),
    )  # fmt: skip


def grouped_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.BatchNorm2d(6),
        nn.Hardtanh(), nn.Conv2d(6, 4, 1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5),
        nn.Linear(5, 2),
    )  # fmt: skip


SIGNED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int | None]] = {
    "odd": (odd_net, (3,), 6 + 5 + 4 + 6),
    "normed": (normed_net, (2, 8, 8), None),
    "grouped": (grouped_net, (3, 2, 2), None),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)), (2, 4),
            6
    ),
    "batch norm alone": (lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), (3,), 12),
    "relu": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), (3,), 0),
    "abs": (lambda: nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 2)), (3,), 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNED)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_signs_keep_the_function_and_the_canonical_form(name: str, seed: int) -> None:
    """Case 9: f(g.x) = f(x), and canonical(g.x) = canonical(x)."""
    build, shape, count = SIGNED[name]
    net, generator = randomised(build(), seed), torch.Generator().manual_seed(seed)
    example = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    table = symmetries(net, example)
    if count is not None:
        assert sum(sign.size for sign in table.signs.values()) == count
    assert (len(table.signs) > 0) == (name not in ("relu", "abs"))
    state = {n: torch.where(t == 0, 0.7, t) if t.is_floating_point() else t for n, t in net.state_dict().items()}
    element = random_element(table, generator)
    moved = apply(table, state, element)
    back = apply(table, moved, inverse(table, element))
    twice = apply(table, moved, element)
    composed = apply(table, state, compose(table, element, element))
    outputs = []
    with torch.no_grad():
        for tensors in (state, moved):
            net.load_state_dict(tensors, strict=True)
            outputs.append(net(example))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9 * float(outputs[0].abs().max()))
    forms = [canonicalize(table, x, scale="unit-norm", permute="max", streams=True) for x in (state, moved)]
    for n, tensor in state.items():
        torch.testing.assert_close(back[n], tensor, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(twice[n], composed[n], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(forms[1][0][n], forms[0][0][n], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(apply(table, state, forms[0][1])[n], forms[0][0][n], rtol=1e-8, atol=1e-8)


def test_a_channel_of_a_batch_norm_has_one_canonical_form() -> None:
    """Case 9: the row, the running mean and the gain of channels are negated: outputs are equal bit for bit."""
    net = randomised(nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)), 0)
    example = torch.randn(3, 2, 2, 2, dtype=torch.float64)
    one = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    one["1.weight"][:] = torch.tensor([-1.5, 0.5, 0, 2])  # for 0, the largest entry of the row decides
    other = {name: tensor.clone() for name, tensor in one.items()}
    for name in ("0.weight", "0.bias", "1.running_mean", "1.weight"):
        other[name][[0, 2]] *= -1
    table, outputs, forms = symmetries(net, example), [], []
    for state in (one, other):
        net.load_state_dict(state)
        outputs.append(net(example))
        forms.append(canonicalize(table, state, scale="unit-norm", permute="max")[0])
    assert torch.equal(*outputs)
    assert all(torch.equal(forms[0][name], forms[1][name]) for name in one)
    assert bool((forms[0]["1.weight"] >= 0).all())
    zero = int((forms[0]["1.weight"] == 0).nonzero())
    row = forms[0]["0.weight"][zero].flatten()
    assert row[row.abs().argmax()] > 0


def test_the_signs_of_resnet18() -> None:
    """Case 9: one for each of the 4,800 channels of its batch norms."""
    table = symmetries("resnet18")
    norms = [name for name in table.tensors if name.endswith("running_mean")]
    assert (
        sum(sign.size for sign in table.signs.values()) == sum(table.tensors[name].shape[0] for name in norms) == 4800
    )
    assert round(table.log10_signs) == 1445
    assert "10^1444.9 choices of 4800 signs" in str(table)


@pytest.mark.slow
def test_files_of_symmetries_with_and_without_signs(tmp_path: Path) -> None:
    """Case 9: signs are stored; files without signs keep version 1, which older packages read."""
    members = zoo.load("resnet8-digits", n=2)
    view = members.canonicalize(scale="unit-norm", permute="max")
    again = members.transform(view.write_symmetries(tmp_path / "signs.parquet"))
    for name, tensor in view.stack().items():
        torch.testing.assert_close(again.stack()[name], tensor, rtol=1e-5, atol=1e-6)
    assert bool((view.stack()["bn1.weight"] > 0).all())
    unsigned = members.canonicalize(permute="max").write_symmetries(tmp_path / "permutations.parquet")
    versions = [pq.read_schema(path).metadata[b"checkpoints_zoo_symmetries"] for path in sorted(tmp_path.iterdir())]
    assert (unsigned.name, versions) == ("permutations.parquet", [b"1", b"2"])


@pytest.mark.parametrize("value", [0.5, 0.0, -2.0, float("nan")])
def test_a_sign_is_1_or_minus_1(value: float) -> None:
    """Case 9."""
    table = symmetries("resnet8")
    with pytest.raises(UsageError, match="sign 'conv1': expected 8 values 1 or -1, or"):
        apply(table, {}, Element(signs={"conv1": torch.full((8,), value)}))
    with pytest.raises(UsageError, match="sign 'conv9': expected one among conv1, layer1"):
        apply(table, {}, Element(signs={"conv9": torch.ones(8)}))


# Case 16: products of parameters, and masses at the ends of float64.


class LowRank(nn.Module):
    """A linear layer with an update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(5, 3)), nn.Linear(5, 2)
        self.a, self.b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.weight + self.b @ self.a).relu())


def test_a_product_of_parameters_has_no_unit_norm() -> None:
    """Case 16: the inner scales of W + B @ A have no row."""
    net, example = LowRank().double(), torch.randn(4, 3, dtype=torch.float64)
    table = symmetries(net, example)
    assert all(largest_change(net, table, example, seed) < 1e-10 for seed in range(3))
    text = r"scale: expected None: 'unit-norm' needs a row of weights .*; found scale 'b' of LowRank inside a product"
    with pytest.raises(UsageError, match=text):
        canonicalize(table, net.state_dict(), scale="unit-norm")
    assert canonicalize(table, net.state_dict(), permute="max")[0].keys() == net.state_dict().keys()


MASSES = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))


@pytest.mark.parametrize(("one", "other"), [(1e160, 1e160), (1e-160, 1e-160), (1e-170, 1.0), (1.0, 1e200)])
def test_squares_beyond_float64_are_refused(one: float, other: float) -> None:
    """Case 16."""
    weights = {"0.weight": torch.tensor([[[one]]], dtype=torch.float64)}
    weights["2.weight"] = torch.tensor([[[other]]], dtype=torch.float64)
    with pytest.raises(UsageError, match=r"weight': expected 0, or magnitudes from 1e-140 to 1e\+150"):
        minimal_mass(symmetries(MASSES, torch.zeros(1, 1)), weights)


@pytest.mark.parametrize(("one", "other"), [(1e140, 1e-140), (1e-130, 1e-130), (1e149, 1e149), (1e-139, 1e140)])
def test_squares_within_float64_have_their_minimum(one: float, other: float) -> None:
    """Case 16: of a s and b / s, the smallest sum of squares is 2 a b."""
    weights = {"0.weight": torch.tensor([[[one]]], dtype=torch.float64)}
    weights["2.weight"] = torch.tensor([[[other]]], dtype=torch.float64)
    mass = minimal_mass(symmetries(MASSES, torch.zeros(1, 1)), weights)
    assert bool(mass.converged)
    assert float(mass.after) == pytest.approx(2 * one * other, rel=1e-6)


def test_the_minimum_of_a_layer_of_zeros_is_not_attained() -> None:
    """Case 16: the other layer can shrink without limit, but never vanishes."""
    weights = {"0.weight": torch.zeros(2, 1, 1), "2.weight": torch.full((2, 1, 1), 3.0)}
    weights["0.weight"][1] = 2.0
    mass = minimal_mass(symmetries(MASSES, torch.zeros(1, 1)), weights)
    assert (mass.after.tolist(), mass.unbounded.tolist(), mass.attained.tolist()) == ([0, 12], [9, 0], [False, True])
    assert str(mass).endswith(
        "No scales reach the minimum of 1 member: the mass left out only comes arbitrarily close to 0"
    )


@pytest.mark.parametrize(("rows", "least", "most"), [(1.0, 1e-6, 1e-3), (1e-3, 0.04, 1.0)])
def test_the_change_by_approximate_scales_is_measured(rows: float, least: float, most: float) -> None:
    """Case 46: where rows are small against eps it is far larger than eps; against the norm by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).double()
    images = torch.randn(8, 1, 8, 8, dtype=torch.float64)
    weights = net.state_dict() | {name: rows * net.state_dict()[name] for name in ("0.weight", "0.bias")}
    table = symmetries(net, images)
    assert [scale.exact for scale in table.scales.values()] == [False, True]
    assert table.approximate_scaling_freedom == 4

    def outputs(factor: float) -> Tensor:
        maps = factor * F.conv2d(images, weights["0.weight"], weights["0.bias"])
        mean, variance = maps.mean((2, 3), keepdim=True), maps.var((2, 3), unbiased=False, keepdim=True)
        normalised = (maps - mean) / (variance + 1e-5).sqrt()
        return normalised.clamp(min=0).flatten(1) @ weights["4.weight"].T + weights["4.bias"]

    before = outputs(1.0)
    expected = max(float((outputs(s) - before).abs().max() / before.abs().max()) for s in (0.5, 2.0))
    changes = approximate_changes(table, weights, net, images)
    assert changes == pytest.approx({"0": expected}, rel=1e-9)
    assert least < expected < most
    with pytest.raises(UsageError, match="factor: expected a positive number; found 0"):
        approximate_changes(table, weights, net, images, factor=0.0)
