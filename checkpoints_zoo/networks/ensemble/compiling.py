"""From a module to the steps of its network, where all its operations are known to treat members apart.

A module that does anything else has no program, and runs through its own code instead: control flow that depends on
values, hooks, operations across channels, random numbers, layers that keep something between calls.
"""

from __future__ import annotations

import builtins
import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble import program
from checkpoints_zoo.networks.ensemble.program import Compute, Norm, Parameter, Program, Step
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer, last_names

PLAIN = (bool, int, float, str, type(None), torch.dtype)
_SPACES: tuple[Any, ...] = (torch, F, operator, builtins)
_COMPARING = (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
_ASSIGNING = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Unknown(Exception):
    """An operation that has no step."""


def derive_program(module: nn.Module, rank: int) -> Program | None:
    """Derive the program of a module in eval mode; return None where it has none.

    Args:
        module: it is neither run nor changed.
        rank: of its inputs, the batch axis included.
    """
    layers = list(module.modules())
    if any(m.training or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS) for m in layers):
        return None
    try:
        twin, untouched = copy.deepcopy(module), copy.deepcopy(module)
        graph = Tracer().record(twin)
    except TRACE_ERRORS:
        return None
    pairs = zip(twin.modules(), untouched.modules(), strict=True)
    if not all(_same(vars(a), vars(b)) for a, b in pairs):
        return None  # it keeps something between calls: one trace says nothing about the next call
    try:
        return Builder(twin, rank).build(graph)
    except Unknown:
        return None


def _same(a: Any, b: Any) -> bool:
    """Say whether two copies of what a module keeps are the same, as far as they can be compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | int | float | str | set | frozenset | torch.dtype | None):
        return bool(a == b)
    return True


@dataclass(eq=False)
class Value:
    """What is known of a value.

    Args:
        kind: "own" (each member's), "shared" (the inputs, or made of them alone), "parameter"; or "shape", "extent",
            "dtype" of another value.
        rank: of an activation; of a parameter, without the member axis.
        place: where it lies while the program runs.
        shares: the value whose memory it may share.
        fresh: whether its memory is the program's own.
        spread: whether elements may lie in one place.
        of: the value whose shape, extent or dtype it is.
        dim: of an extent.
        name: of a parameter.
        bring: what makes a parameter of the stack of it.
        cast: the activation whose dtype a parameter is to have.
    """

    kind: str
    rank: int = 0
    place: int = -1
    shares: Value | None = None
    fresh: bool = False
    spread: bool = False
    of: Value | None = None
    dim: int = 0
    name: str = ""
    bring: Callable[[Tensor], Tensor] = lambda stack: stack
    cast: Value | None = None

    @property
    def root(self) -> Value:
        """The value whose memory this one shares."""
        return self if self.shares is None else self.shares.root

    @property
    def active(self) -> bool:
        return self.kind in ("own", "shared")


class Builder:
    """Follow a graph and write its steps.

    Args:
        module: whose graph it is.
        rank: of the inputs.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.layers: dict[str, Any] = dict(module.named_modules())
        last = last_names(module)
        self.names = {id(t): last[name] for name, t in module.state_dict(keep_vars=True).items()}
        self.tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(module.named_buffers(remove_duplicate=False))
        self.parameters: list[Parameter | None] = []
        self.steps: list[tuple[Compute, tuple[Value, ...], Value, bool, Value | None]] = []
        self.known: dict[fx.Node, Any] = {}
        self.inputs = Value("shared", rank)
        self.convolutions: dict[fx.Node, tuple[tuple[str, str], int, int]] = {}
        self.norms: list[Norm] = []

    def build(self, graph: fx.Graph) -> Program:
        """Write the program of a graph; return it.

        Raises:
            Unknown: an operation that has no step.
        """
        result = None
        for node in graph.nodes:
            if node.op == "placeholder":
                require(not self.known or node.args)  # further inputs have defaults
                self.known[node] = node.args[0] if self.known else self.inputs
            elif node.op == "get_attr":
                self.known[node] = self.parameter(str(node.target))
            elif node.op == "call_module":
                self.known[node] = self.layer(node, self.layers[str(node.target)])
            elif node.op == "output":
                result = self.value(node.args[0])
            else:
                self.known[node] = call(self, node)
        if not isinstance(result, Value) or result.kind != "own" or result.rank < 2:
            raise Unknown
        return self.finished(result)

    def value(self, argument: Any) -> Any:
        """Return what is known of an argument: values for nodes, all else as it is."""
        if isinstance(argument, fx.Node):
            return self.known[argument]
        if isinstance(argument, list | tuple):
            return type(argument)([self.value(a) for a in argument])
        require(isinstance(argument, PLAIN))
        return argument

    def add(
        self,
        compute: Compute,
        operands: tuple[Value, ...],
        rank: int,
        *,
        kind: str = "",
        shares: Value | None = None,
        over: bool = False,
        writes: Value | None = None,
    ) -> Value:
        """Write a step; return its result.

        Args:
            compute: what it does.
            operands: activations and parameters.
            rank: of the result.
            kind: of the result; "" for that of the operands.
            shares: the operand whose memory the result may share.
            over: whether it can overwrite an operand.
            writes: the operand that the network itself overwrites here.
        """
        kind = kind or ("own" if any(v.kind == "own" for v in operands) else "shared")
        value = Value(kind, rank, shares=shares, fresh=shares is None, spread=shares is not None and shares.spread)
        self.steps.append((compute, operands, value, over, writes))
        return value

    def parameter(self, name: str) -> Value:
        require(id(self.tensors[name]) in self.names)  # those outside the state dict have no stack
        return Value("parameter", self.tensors[name].dim(), name=self.names[id(self.tensors[name])])

    def placed(self, tensor: Tensor | None, bring: Callable[[Tensor], Tensor], kernel: bool = False) -> Value:
        """Give a layer's parameter a place; that of one which isn't there stays empty."""
        require(tensor is None or id(tensor) in self.names)
        value = Value("parameter", place=len(self.parameters))
        self.parameters.append(None if tensor is None else Parameter(self.names[id(tensor)], bring, kernel))
        return value

    def own(self, value: Value) -> Value:
        """Return what each member has of its own, of shared inputs copies."""
        if value.kind == "own":
            return value
        return self.add(program.repeat, (value,), value.rank, kind="own", shares=value)

    def layer(self, node: fx.Node, layer: Any) -> Value:
        x = self.value(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(x, Value) or not x.active:
            raise Unknown
        kind = type(layer)
        if kind in program.CONVOLUTIONS:
            return self.convolution(node, layer, x)
        if kind in program.BATCH_NORMS:
            return self.batch_norm(node, layer, x)
        if kind is nn.Linear:
            require(x.rank == 2)
            operands = self.placed(layer.weight, lambda t: t), self.placed(layer.bias, lambda t: t)
            return self.add(program.linear(x.kind == "shared"), (x, *operands), 2, kind="own")
        if kind is nn.GroupNorm:
            require(x.rank > 2)
            affine = [self.placed(t, side_by_side) for t in (layer.weight, layer.bias)]
            return self.add(program.group_norm(layer.num_groups, layer.eps), (self.own(x), *affine), x.rank)
        if kind in program.SAME:
            return self.add(program.same, (x,), x.rank, shares=x)
        if kind is nn.Flatten:
            require(x.rank > 1 and layer.start_dim == 1 and layer.end_dim in (-1, x.rank - 1))
            return self.add(program.flatten, (x,), 2, shares=x)
        if kind in program.IN_PLACE:
            twins = copy.copy(layer), copy.copy(layer)
            twins[0].inplace, twins[1].inplace = False, True
            writes = x if layer.inplace else None
            return self.add(program.switched(twins), (x,), x.rank, over=True, writes=writes)
        require(program.LAYERS.get(kind, -1) in (None, x.rank) and not getattr(layer, "return_indices", False))
        return self.add(program.layer(layer), (x,), x.rank)

    def convolution(self, node: fx.Node, layer: Any, x: Value) -> Value:
        require(layer.padding_mode == "zeros" and x.rank == layer.weight.dim())
        shared = x.kind == "shared" and layer.groups == 1
        x = x if shared else self.own(x)
        weight = self.placed(layer.weight, side_by_side, kernel=True)
        bias = self.placed(layer.bias, side_by_side)
        names = self.name_of(layer.weight), self.name_of(layer.bias)
        self.convolutions[node] = names, weight.place, bias.place
        return self.add(program.convolution(layer, shared), (x, weight, bias), x.rank, kind="own")

    def batch_norm(self, node: fx.Node, layer: Any, x: Value) -> Value:
        ranks = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}[type(layer)]
        require(layer.running_mean is not None and layer.running_var is not None and x.rank in ranks)
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        operands = [self.placed(t, side_by_side) for t in tensors]
        (before,) = node.all_input_nodes
        if before in self.convolutions and len(before.users) == 1:
            names, kernel, bias = self.convolutions[before]
            mean, var, gamma, beta = (v.place for v in operands)
            own = tuple(self.name_of(t) for t in tensors)
            self.norms.append(Norm(kernel, bias, names, (mean, var, gamma, beta), own, layer.eps))  # type: ignore[arg-type]
        return self.add(program.batch_norm(layer.eps), (self.own(x), *operands), x.rank)

    def name_of(self, tensor: Tensor | None) -> str:
        return "" if tensor is None else self.names[id(tensor)]

    def finished(self, result: Value) -> Program:
        """Give values places, and say when each is read last; return the program."""
        start = len(self.parameters)
        values = [self.inputs, *[value for _, _, value, _, _ in self.steps]]
        for i, value in enumerate(values):
            value.place = start + i
        last: dict[Value, int] = {}
        for i, (_, operands, _, _, _) in enumerate(self.steps):
            last.update({v.root: i for v in operands})
        last[result.root] = len(self.steps)
        written = []
        for i, (compute, operands, value, over, writes) in enumerate(self.steps):
            require(writes is None or (writes.root.fresh and last[writes.root] == i))
            free = [v.active and v.root.fresh and not v.spread and last[v.root] == i for v in operands]
            roots = [v.root for v in operands]
            free = [ok and roots.count(root) == 1 for ok, root in zip(free, roots, strict=True)]
            gone = tuple(v.place for v in values[: i + 1] if last.get(v.root) == i)
            reads = tuple(v.place for v in operands)
            written.append(Step(compute, reads, value.place, free.index(True) if over and any(free) else -1, gone))
        return Program(tuple(self.parameters), tuple(written), start + len(values), result.place, tuple(self.norms))


def side_by_side(stack: Tensor) -> Tensor:
    """Lay members' tensors next to each other: (member·first axis, …)."""
    return stack.flatten(0, 1)


def require(condition: object) -> None:
    """Raise Unknown unless a condition holds."""
    if not condition:
        raise Unknown


def flat(arguments: Any) -> Iterator[Any]:
    """Yield what stands in nested lists and tuples."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from flat(argument)
        else:
            yield argument


def plain(arguments: Any) -> bool:
    return all(isinstance(a, PLAIN) for a in flat(arguments))


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
    if base in program.OVERWRITING and options.pop("inplace", False):
        writes = first
    if base in program.BINARY and len(args) == 2 and not options:
        return _binary(build, base, args, writes)
    if name in ("cat", "concat") and isinstance(first, list | tuple):
        require((args[1:], options) in (((1,), {}), ((), {"dim": 1})))
        parts = tuple(build.own(_active(v)) for v in first)
        require(len({v.rank for v in parts}) == 1 and parts[0].rank > 1)
        return build.add(program.joined, parts, parts[0].rank)
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
    if any(node.target is pool for pool in program.POOLS):
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
    if name in program.POINTWISE and simple:
        over = name in program.OVERWRITING
        require(not over or not any(isinstance(a, bool) for a in args))  # that might be `inplace`
        shares = x if name in program.SHARING else None
        return build.add(program.pointwise(name, args, options), (x,), x.rank, shares=shares, over=over, writes=writes)
    require(writes is None)
    if name in program.REDUCTIONS and simple:
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
        value = build.add(program.expanded, (x, like), x.rank, shares=x)
        value.spread = True
        return value
    if name == "dropout":
        require(simple and (args[1] if len(args) > 1 else options.get("training", True)) is False)
        return build.add(program.same, (x,), x.rank, shares=x)
    require(name == "pool" and simple and program.POOLS[node.target] == x.rank)  # type: ignore[index]
    require(not options.get("return_indices", False) and len(args) < 6)
    return build.add(program.called(node.target, args, options), (x,), x.rank)  # type: ignore[arg-type]


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
    return build.add(program.binary(name, number), tuple(operands), rank, over=True, writes=writes)


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
    return placed if value.cast is None else build.add(program.cast, (placed, value.cast), rank, kind="parameter")


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
    return build.add(program.spatial(name, axes, keep), (x,), x.rank if keep else x.rank - len(axes))


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
    return build.add(program.flatten_to(width) if width else program.flatten, (x,), 2, shares=x)


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
        return build.add(program.called(Tensor.to, (kind,), {}), (x,), x.rank, shares=x)
    require(isinstance(kind, Value) and kind.kind == "dtype")
    return build.add(program.cast, (x, _active(kind.of)), x.rank, shares=x)
