"""Functions and methods that a network calls between its layers: one rule each, all others are unknown."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble import steps
from checkpoints_zoo.networks.ensemble.values import Unknown, Value, flat, plain, require

if TYPE_CHECKING:
    from checkpoints_zoo.networks.ensemble.building import Builder

_SPACES: tuple[Any, ...] = (torch, F, operator, builtins)
_COMPARING = (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
_ASSIGNING = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


def call(build: Builder, node: fx.Node) -> Any:
    """Write the steps of a function or method; return what is known of its result.

    Raises:
        Unknown: it has none.
    """
    name = _name_of(node)
    args, options = build.value(node.args), {k: build.value(v) for k, v in node.kwargs.items()}
    first = args[0] if args else None
    if not any(isinstance(a, Value) for a in flat((args, *options.values()))):
        return _constant(node, name, args)
    base = _ASSIGNING.get(name, name.removesuffix("_"))
    writes = first if base != name else None
    if base in steps.OVERWRITING and options.pop("inplace", False):
        writes = first
    if base in steps.BINARY and len(args) == 2 and not options:
        return _binary(build, base, args, writes)
    if name in ("cat", "concat") and isinstance(first, list | tuple):
        require((args[1:], options) in (((1,), {}), ((), {"dim": 1})))
        parts = tuple(build.own(_active(v)) for v in first)
        require(len({v.rank for v in parts}) == 1 and parts[0].rank > 1)
        return build.add(steps.joined, parts, parts[0].rank)
    if not isinstance(first, Value):
        raise Unknown
    if first.kind == "shape" and name == "getitem":
        require(type(args[1]) is int)
        return Value("extent", of=first.of, dim=args[1])
    if first.kind == "parameter":
        return _parameter(name, first, args[1:], options)
    return _activation(build, node, base, _active(first), args[1:], options, writes)


def _name_of(node: fx.Node) -> str:
    """Return what a function or method is called by, if it is torch's or Python's own."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if any(node.target is pool for pool in steps.POOLS):
        return "pool"
    require(any(getattr(space, name, None) is node.target for space in _SPACES))
    return str(name)


def _active(value: Any) -> Value:
    if not isinstance(value, Value) or not value.active:
        raise Unknown
    return value


def _constant(node: fx.Node, name: str, args: tuple[Any, ...]) -> Any:
    """Compute what depends on no tensor: checks of a rank."""
    if node.target in _COMPARING and plain(args):
        return node.target(*args)
    require(name == "_assert" and args[0] is True)
    return None


def _activation(
    build: Builder,
    node: fx.Node,
    name: str,
    x: Value,
    args: tuple[Any, ...],
    options: dict[str, Any],
    writes: Value | None,
) -> Any:
    simple = plain((args, *options.values()))
    if name in steps.POINTWISE and simple:
        over = name in steps.OVERWRITING
        require(not over or not any(isinstance(a, bool) for a in args))  # that might be `inplace`
        shares = x if name in steps.SHARING else None
        return build.add(steps.pointwise(name, args, options), (x,), x.rank, shares=shares, over=over, writes=writes)
    require(writes is None)
    if name in steps.REDUCTIONS and simple:
        return _reduced(build, name, x, args, options)
    if name in ("flatten", "view", "reshape"):
        return _flattened(build, name, x, args, options)
    if name in ("getattr", "size", "dim", "ndimension"):
        require(not options)
        return _described(name, x, args)
    if name == "to":
        return _cast(build, x, args, options)
    if name == "expand":
        require(len(args) == 1 and isinstance(args[0], Value) and args[0].kind == "shape" and not options)
        like = _active(args[0].of)
        require(like.rank == x.rank and like.kind == x.kind)
        value = build.add(steps.expanded, (x, like), x.rank, shares=x)
        value.spread = True
        return value
    if name == "dropout":
        require(simple and (args[1] if len(args) > 1 else options.get("training", True)) is False)
        return build.add(steps.same, (x,), x.rank, shares=x)
    require(name == "pool" and simple and steps.POOLS[node.target] == x.rank)  # type: ignore[index]
    require(not options.get("return_indices", False) and len(args) < 6)
    return build.add(steps.called(node.target, args, options), (x,), x.rank)  # type: ignore[arg-type]


def _binary(build: Builder, name: str, pair: Sequence[Any], writes: Value | None) -> Value:
    values = [v for v in pair if isinstance(v, Value)]
    active = [v for v in values if v.active]
    require(active and all(v.active or v.kind == "parameter" for v in values))
    require(all(isinstance(v, Value) or type(v) in (int, float) for v in pair))
    require(name not in ("max", "min", "maximum", "minimum") or len(values) == 2)  # else they reduce
    if not isinstance(pair[0], Value):
        require(name in ("add", "mul"))
        pair = pair[::-1]
    rank = active[0].rank
    require(all(v.rank == rank for v in active) and rank > 1)
    alone = len({v.kind for v in values}) == 1  # of inputs alone, all members' are the same
    operands = [
        v if alone else build.own(v) if v.active else _aligned(build, v, rank) for v in pair if isinstance(v, Value)
    ]
    number = None if isinstance(pair[1], Value) else pair[1]
    return build.add(steps.binary(name, number), tuple(operands), rank, over=True, writes=writes)


def _aligned(build: Builder, value: Value, rank: int) -> Value:
    """Place a parameter beside activations: (1, member·channel, …)."""
    inner = value.bring

    def bring(stack: Tensor) -> Tensor:
        tensor = inner(stack)
        tensor = tensor.reshape(len(tensor), *[1] * (rank - tensor.dim() + 1), *tensor.shape[1:])
        return tensor.transpose(0, 1).flatten(1, 2)

    tensor = next(t for n, t in build.tensors.items() if build.names.get(id(t)) == value.name)
    try:
        tried = bring(tensor.new_empty((2, *tensor.shape), device="meta"))
    except RuntimeError as error:  # a view that can't be
        raise Unknown from error
    require(value.rank <= rank and tried.dim() == rank and tried.shape[0] == 1)
    placed = build.placed(tensor, bring)
    return placed if value.cast is None else build.add(steps.cast, (placed, value.cast), rank, kind="parameter")


def _parameter(name: str, value: Value, args: tuple[Any, ...], options: dict[str, Any]) -> Value:
    """Give a parameter another shape, or an activation's dtype."""
    inner = value.bring
    if name == "to":
        (kind,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
        require(isinstance(kind, Value) and kind.kind == "dtype" and set(options) <= {"dtype"})
        return Value("parameter", value.rank, name=value.name, bring=inner, cast=kind.of)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    require(name in ("view", "reshape") and not options and all(type(n) is int for n in sizes))
    return Value(
        "parameter",
        len(sizes),
        name=value.name,
        bring=lambda stack: inner(stack).reshape(len(stack), *sizes),
        cast=value.cast,
    )


def _named(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return arguments by name, which were given in order; there may be fewer of them."""
    require(len(args) <= len(names))
    return dict(zip(names[: len(args)], args, strict=True))


def _reduced(build: Builder, name: str, x: Value, args: tuple[Any, ...], options: dict[str, Any]) -> Value:
    given = _named(("dim", "keepdim"), args) | options
    require(set(given) <= {"dim", "keepdim"} and given.get("dim") is not None)
    dims = given["dim"] if isinstance(given["dim"], list | tuple) else (given["dim"],)
    axes = tuple(sorted(d % x.rank for d in dims))
    require(axes and axes[0] > 1)
    keep = bool(given.get("keepdim", False))
    return build.add(steps.spatial(name, axes, keep), (x,), x.rank if keep else x.rank - len(axes))


def _flattened(build: Builder, name: str, x: Value, args: tuple[Any, ...], options: dict[str, Any]) -> Value:
    """Flatten all behind the batch axis; views are taken if they say that: (batch, -1), or (-1, a number)."""
    width = 0
    require(x.rank > 1)
    if name == "flatten":
        given = _named(("start_dim", "end_dim"), args) | options
        require(given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1}))
    else:
        sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        require(len(sizes) == 2 and not options)
        if isinstance(sizes[0], Value):
            require(sizes[0].kind == "extent" and sizes[0].dim == 0 and sizes[1] == -1)
        else:
            require(sizes[0] == -1 and type(sizes[1]) is int and sizes[1] > 0)
            width = sizes[1]
    return build.add(steps.flatten_to(width) if width else steps.flatten, (x,), 2, shares=x)


def _described(name: str, x: Value, args: tuple[Any, ...]) -> Any:
    if name == "size" and args:
        require(type(args[0]) is int)
        return Value("extent", of=x, dim=args[0])
    if name in ("dim", "ndimension") or args == ("ndim",):
        return x.rank
    require(name == "size" or args in (("shape",), ("dtype",)))
    return Value("dtype" if args == ("dtype",) else "shape", of=x)


def _cast(build: Builder, x: Value, args: tuple[Any, ...], options: dict[str, Any]) -> Value:
    (kind,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
    require(set(options) <= {"dtype"})
    if isinstance(kind, torch.dtype):
        return build.add(steps.called(Tensor.to, (kind,), {}), (x,), x.rank, shares=x)
    require(isinstance(kind, Value) and kind.kind == "dtype")
    return build.add(steps.cast, (x, _active(kind.of)), x.rank, shares=x)
