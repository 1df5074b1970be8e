"""Derive a program (a list of steps) from a module, if all its operations are known to keep members separate.

A module has no program, and is run by its own code, if it has control flow that depends on values, hooks, operations
across channels, random numbers, or layers that keep state between calls.
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
from checkpoints_zoo.networks.ensemble.program import Compute, FoldableNorm, Program, Step, StepParameter
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer, last_names

CONSTANT_TYPES = (bool, int, float, str, type(None), torch.dtype)
_NAMESPACES: tuple[Any, ...] = (torch, F, operator, builtins)
_COMPARING = (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
_ASSIGNING = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnknownOperation(Exception):
    """Raised for an operation that has no known step."""


def derive_program(module: nn.Module, rank: int) -> Program | None:
    """Derive the program of a module in eval mode; return it, None if it has none.

    Args:
        module: the module, which is neither run nor changed.
        rank: number of axes of the inputs, including the batch axis.
    """
    layers = list(module.modules())
    if any(m.training or "forward" in vars(m) or any(getattr(m, hooks) for hooks in _HOOKS) for m in layers):
        return None
    try:
        twin, reference_module = copy.deepcopy(module), copy.deepcopy(module)
        graph = Tracer().record(twin)
    except TRACE_ERRORS:
        return None
    pairs = zip(twin.modules(), reference_module.modules(), strict=True)
    if not all(_is_unchanged(vars(a), vars(b)) for a, b in pairs):
        return None  # The module keeps state between calls, so that one trace does not describe the next call.
    try:
        return ProgramBuilder(twin, rank).build(graph)
    except UnknownOperation:
        return None


def _is_unchanged(a: Any, b: Any) -> bool:
    """Say whether an attribute of a module is unchanged, given a copy from before and its present value; values that
    can't be compared count as changed."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_unchanged(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_is_unchanged(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, bool | int | float | str | set | frozenset | torch.dtype | None):
        return bool(a == b)
    return True


@dataclass(eq=False)
class TracedValue:
    """A value of the traced graph, with the facts that are known about it.

    Args:
        kind: kind of the value: "member" (differs between members), "shared" (the inputs, or computed from them alone),
            "parameter"; or "shape", "extent", "dtype" of another value.
        rank: number of axes of an activation; of a parameter, without the member axis.
        place: position of the value in the program's list of values.
        shares: the value with which this value may share memory.
        owns_memory: whether the program itself allocated the value's memory.
        spread: whether several elements may share one memory address, as after `expand`.
        of: the value that has this shape, extent or dtype (for these three kinds).
        dim: the axis whose length this value is (for the kind "extent").
        name: name of the tensor in the state dict (for the kind "parameter").
        arrange: function that brings the stacked parameter into the shape that steps read.
        cast: the activation whose dtype the parameter is converted to.
    """

    kind: str
    rank: int = 0
    place: int = -1
    shares: TracedValue | None = None
    owns_memory: bool = False
    spread: bool = False
    of: TracedValue | None = None
    dim: int = 0
    name: str = ""
    arrange: Callable[[Tensor], Tensor] = lambda stack: stack
    cast: TracedValue | None = None

    @property
    def root(self) -> TracedValue:
        """The value that owns the memory of this value."""
        return self if self.shares is None else self.shares.root

    @property
    def is_activation(self) -> bool:
        return self.kind in ("member", "shared")


class ProgramBuilder:
    """Translates a traced graph into the steps of a program.

    Args:
        module: the traced module.
        rank: number of axes of the inputs.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.layers: dict[str, Any] = dict(module.named_modules())
        last = last_names(module)
        self.names = {id(t): last[name] for name, t in module.state_dict(keep_vars=True).items()}
        self.tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(module.named_buffers(remove_duplicate=False))
        self.parameters: list[StepParameter | None] = []
        self.steps: list[tuple[Compute, tuple[TracedValue, ...], TracedValue, bool, TracedValue | None]] = []
        self.known: dict[fx.Node, Any] = {}
        self.inputs = TracedValue("shared", rank)
        self.convolutions: dict[fx.Node, tuple[tuple[str, str], int, int]] = {}
        self.norms: list[FoldableNorm] = []

    def build(self, graph: fx.Graph) -> Program:
        """Translate a graph into a program; return the program.

        Raises:
            UnknownOperation: an operation has no known step.
        """
        result = None
        for node in graph.nodes:
            if node.op == "placeholder":
                require(not self.known or node.args)  # Only the first input of the network may lack a default.
                self.known[node] = node.args[0] if self.known else self.inputs
            elif node.op == "get_attr":
                self.known[node] = self.trace_parameter(str(node.target))
            elif node.op == "call_module":
                self.known[node] = self.add_layer(node, self.layers[str(node.target)])
            elif node.op == "output":
                result = self.value_of(node.args[0])
            else:
                self.known[node] = add_call(self, node)
        if not isinstance(result, TracedValue) or result.kind != "member" or result.rank < 2:
            raise UnknownOperation
        return self.finish(result)

    def value_of(self, argument: Any) -> Any:
        """Return an argument with each graph node replaced by its TracedValue."""
        if isinstance(argument, fx.Node):
            return self.known[argument]
        if isinstance(argument, list | tuple):
            return type(argument)([self.value_of(a) for a in argument])
        require(isinstance(argument, CONSTANT_TYPES))
        return argument

    def add_step(
        self,
        compute: Compute,
        operands: tuple[TracedValue, ...],
        rank: int,
        *,
        kind: str = "",
        shares: TracedValue | None = None,
        overwrite: bool = False,
        writes: TracedValue | None = None,
    ) -> TracedValue:
        """Add a step to the program; return the TracedValue of its result.

        Args:
            compute: function that the step calls.
            operands: activations and parameters that the step reads.
            rank: number of axes of the result.
            kind: kind of the result; "" to derive it from the operands.
            shares: the operand with which the result may share memory.
            overwrite: whether the function can write its result into an operand's memory.
            writes: the operand that the network's own code overwrites in this operation.
        """
        kind = kind or ("member" if any(v.kind == "member" for v in operands) else "shared")
        value = TracedValue(
            kind, rank, shares=shares, owns_memory=shares is None, spread=shares is not None and shares.spread
        )
        self.steps.append((compute, operands, value, overwrite, writes))
        return value

    def trace_parameter(self, name: str) -> TracedValue:
        require(id(self.tensors[name]) in self.names)  # Tensors outside the state dict are not stacked over members.
        return TracedValue("parameter", self.tensors[name].dim(), name=self.names[id(self.tensors[name])])

    def place_parameter(
        self, tensor: Tensor | None, arrange: Callable[[Tensor], Tensor], kernel: bool = False
    ) -> TracedValue:
        """Reserve a place for a layer's parameter; the place of a missing parameter (None) stays empty."""
        require(tensor is None or id(tensor) in self.names)
        value = TracedValue("parameter", place=len(self.parameters))
        self.parameters.append(None if tensor is None else StepParameter(self.names[id(tensor)], arrange, kernel))
        return value

    def per_member(self, value: TracedValue) -> TracedValue:
        """Return a value that each member has separately: a value shared by all members is repeated."""
        if value.kind == "member":
            return value
        return self.add_step(program.repeat_for_members, (value,), value.rank, kind="member", shares=value)

    def add_layer(self, node: fx.Node, layer: Any) -> TracedValue:
        x = self.value_of(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(x, TracedValue) or not x.is_activation:
            raise UnknownOperation
        kind = type(layer)
        if kind in program.CONVOLUTIONS:
            return self.add_convolution(node, layer, x)
        if kind in program.BATCH_NORMS:
            return self.add_batch_norm(node, layer, x)
        if kind is nn.Linear:
            require(x.rank == 2)
            operands = self.place_parameter(layer.weight, lambda t: t), self.place_parameter(layer.bias, lambda t: t)
            return self.add_step(program.linear(x.kind == "shared"), (x, *operands), 2, kind="member")
        if kind is nn.GroupNorm:
            require(x.rank > 2)
            affine = [self.place_parameter(t, flatten_members) for t in (layer.weight, layer.bias)]
            return self.add_step(program.group_norm(layer.num_groups, layer.eps), (self.per_member(x), *affine), x.rank)
        if kind in program.IDENTITY_LAYERS:
            return self.add_step(program.return_input, (x,), x.rank, shares=x)
        if kind is nn.Flatten:
            require(x.rank > 1 and layer.start_dim == 1 and layer.end_dim in (-1, x.rank - 1))
            return self.add_step(program.flatten, (x,), 2, shares=x)
        if kind in program.IN_PLACE_LAYERS:
            twins = copy.copy(layer), copy.copy(layer)
            twins[0].inplace, twins[1].inplace = False, True
            writes = x if layer.inplace else None
            return self.add_step(program.call_twin_layers(twins), (x,), x.rank, overwrite=True, writes=writes)
        require(
            program.CHANNELWISE_LAYERS.get(kind, -1) in (None, x.rank) and not getattr(layer, "return_indices", False)
        )
        return self.add_step(program.call_layer(layer), (x,), x.rank)

    def add_convolution(self, node: fx.Node, layer: Any, x: TracedValue) -> TracedValue:
        require(layer.padding_mode == "zeros" and x.rank == layer.weight.dim())
        shared = x.kind == "shared" and layer.groups == 1
        x = x if shared else self.per_member(x)
        weight = self.place_parameter(layer.weight, flatten_members, kernel=True)
        bias = self.place_parameter(layer.bias, flatten_members)
        names = self.name_of(layer.weight), self.name_of(layer.bias)
        self.convolutions[node] = names, weight.place, bias.place
        return self.add_step(program.convolution(layer, shared), (x, weight, bias), x.rank, kind="member")

    def add_batch_norm(self, node: fx.Node, layer: Any, x: TracedValue) -> TracedValue:
        ranks = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}[type(layer)]
        require(layer.running_mean is not None and layer.running_var is not None and x.rank in ranks)
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        operands = [self.place_parameter(t, flatten_members) for t in tensors]
        (before,) = node.all_input_nodes
        if before in self.convolutions and len(before.users) == 1:
            names, kernel, bias = self.convolutions[before]
            mean, var, gamma, beta = (v.place for v in operands)
            own = tuple(self.name_of(t) for t in tensors)
            self.norms.append(FoldableNorm(kernel, bias, names, (mean, var, gamma, beta), own, layer.eps))  # type: ignore[arg-type]
        return self.add_step(program.batch_norm(layer.eps), (self.per_member(x), *operands), x.rank)

    def name_of(self, tensor: Tensor | None) -> str:
        return "" if tensor is None else self.names[id(tensor)]

    def finish(self, result: TracedValue) -> Program:
        """Assign places, and find the last step that reads each value; return the program."""
        start = len(self.parameters)
        values = [self.inputs, *[value for _, _, value, _, _ in self.steps]]
        for i, value in enumerate(values):
            value.place = start + i
        last: dict[TracedValue, int] = {}
        for i, (_, operands, _, _, _) in enumerate(self.steps):
            last.update({v.root: i for v in operands})
        last[result.root] = len(self.steps)
        written = []
        for i, (compute, operands, value, overwrite, writes) in enumerate(self.steps):
            require(writes is None or (writes.root.owns_memory and last[writes.root] == i))
            free = [v.is_activation and v.root.owns_memory and not v.spread and last[v.root] == i for v in operands]
            roots = [v.root for v in operands]
            free = [ok and roots.count(root) == 1 for ok, root in zip(free, roots, strict=True)]
            freed_places = tuple(v.place for v in values[: i + 1] if last.get(v.root) == i)
            reads = tuple(v.place for v in operands)
            written.append(
                Step(compute, reads, value.place, free.index(True) if overwrite and any(free) else -1, freed_places)
            )
        return Program(tuple(self.parameters), tuple(written), start + len(values), result.place, tuple(self.norms))


def flatten_members(stack: Tensor) -> Tensor:
    """Merge the member axis of a stacked tensor with the next axis; return (member·axis, …)."""
    return stack.flatten(0, 1)


def require(condition: object) -> None:
    """Raise UnknownOperation unless a condition holds."""
    if not condition:
        raise UnknownOperation


def flatten_nested(arguments: Any) -> Iterator[Any]:
    """Yield the elements of nested lists and tuples."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from flatten_nested(argument)
        else:
            yield argument


def are_constants(arguments: Any) -> bool:
    return all(isinstance(a, CONSTANT_TYPES) for a in flatten_nested(arguments))


def add_call(builder: ProgramBuilder, node: fx.Node) -> Any:
    """Add the steps for a call of a function or method; return the TracedValue of its result, or a constant.

    Raises:
        UnknownOperation: the function has no known step.
    """
    name = _function_name(node)
    args, options = builder.value_of(node.args), {k: builder.value_of(v) for k, v in node.kwargs.items()}
    first = args[0] if args else None
    if not any(isinstance(a, TracedValue) for a in flatten_nested((args, *options.values()))):
        return _evaluate_constant(node, name, args)
    base = _ASSIGNING.get(name, name.removesuffix("_"))
    writes = first if base != name else None
    if base in program.IN_PLACE_FUNCTIONS and options.pop("inplace", False):
        writes = first
    if base in program.BINARY and len(args) == 2 and not options:
        return _add_binary(builder, base, args, writes)
    if name in ("cat", "concat") and isinstance(first, list | tuple):
        require((args[1:], options) in (((1,), {}), ((), {"dim": 1})))
        parts = tuple(builder.per_member(_require_activation(v)) for v in first)
        require(len({v.rank for v in parts}) == 1 and parts[0].rank > 1)
        return builder.add_step(program.concatenate, parts, parts[0].rank)
    if not isinstance(first, TracedValue):
        raise UnknownOperation
    if first.kind == "shape" and name == "getitem":
        require(type(args[1]) is int)
        return TracedValue("extent", of=first.of, dim=args[1])
    if first.kind == "parameter":
        return _change_parameter(name, first, args[1:], options)
    return _add_activation(builder, node, base, _require_activation(first), args[1:], options, writes)


def _function_name(node: fx.Node) -> str:
    """Return the name of a function or method; refuse functions that are not torch's or Python's."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if any(node.target is pool for pool in program.POOLS):
        return "pool"
    require(any(getattr(space, name, None) is node.target for space in _NAMESPACES))
    return str(name)


def _require_activation(value: Any) -> TracedValue:
    if not isinstance(value, TracedValue) or not value.is_activation:
        raise UnknownOperation
    return value


def _evaluate_constant(node: fx.Node, name: str, args: tuple[Any, ...]) -> Any:
    """Evaluate a call without tensors, such as a comparison of ranks; return its result."""
    if node.target in _COMPARING and are_constants(args):
        return node.target(*args)
    require(name == "_assert" and args[0] is True)
    return None


def _add_activation(
    builder: ProgramBuilder,
    node: fx.Node,
    name: str,
    x: TracedValue,
    args: tuple[Any, ...],
    options: dict[str, Any],
    writes: TracedValue | None,
) -> Any:
    is_constant = are_constants((args, *options.values()))
    if name in program.POINTWISE and is_constant:
        overwrite = name in program.IN_PLACE_FUNCTIONS
        require(not overwrite or not any(isinstance(a, bool) for a in args))  # A bool might be the argument `inplace`.
        shares = x if name in program.MAY_RETURN_INPUT else None
        return builder.add_step(
            program.pointwise(name, args, options), (x,), x.rank, shares=shares, overwrite=overwrite, writes=writes
        )
    require(writes is None)
    if name in program.REDUCTIONS and is_constant:
        return _add_reduction(builder, name, x, args, options)
    if name in ("flatten", "view", "reshape"):
        return _add_flatten(builder, name, x, args, options)
    if name in ("getattr", "size", "dim", "ndimension"):
        require(not options)
        return _describe_value(name, x, args)
    if name == "to":
        return _add_cast(builder, x, args, options)
    if name == "expand":
        require(len(args) == 1 and isinstance(args[0], TracedValue) and args[0].kind == "shape" and not options)
        like = _require_activation(args[0].of)
        require(like.rank == x.rank and like.kind == x.kind)
        value = builder.add_step(program.expand_like, (x, like), x.rank, shares=x)
        value.spread = True
        return value
    if name == "dropout":
        require(is_constant and (args[1] if len(args) > 1 else options.get("training", True)) is False)
        return builder.add_step(program.return_input, (x,), x.rank, shares=x)
    require(name == "pool" and is_constant and program.POOLS[node.target] == x.rank)  # type: ignore[index]
    require(not options.get("return_indices", False) and len(args) < 6)
    return builder.add_step(program.call_function(node.target, args, options), (x,), x.rank)  # type: ignore[arg-type]


def _add_binary(builder: ProgramBuilder, name: str, pair: Sequence[Any], writes: TracedValue | None) -> TracedValue:
    values = [v for v in pair if isinstance(v, TracedValue)]
    activations = [v for v in values if v.is_activation]
    require(activations and all(v.is_activation or v.kind == "parameter" for v in values))
    require(all(isinstance(v, TracedValue) or type(v) in (int, float) for v in pair))
    require(
        name not in ("max", "min", "maximum", "minimum") or len(values) == 2
    )  # With a single tensor, max and min are reductions.
    if not isinstance(pair[0], TracedValue):
        require(name in ("add", "mul"))
        pair = pair[::-1]
    rank = activations[0].rank
    require(all(v.rank == rank for v in activations) and rank > 1)
    # True if all values are computed from the inputs alone, and so equal for all members.
    alone = len({v.kind for v in values}) == 1
    operands = [
        v if alone else builder.per_member(v) if v.is_activation else _align_parameter(builder, v, rank)
        for v in pair
        if isinstance(v, TracedValue)
    ]
    number = None if isinstance(pair[1], TracedValue) else pair[1]
    return builder.add_step(program.binary(name, number), tuple(operands), rank, overwrite=True, writes=writes)


def _align_parameter(builder: ProgramBuilder, value: TracedValue, rank: int) -> TracedValue:
    """Reserve a place for a parameter in the shape of activations, (1, member·channel, …); return its TracedValue."""
    inner = value.arrange

    def bring(stack: Tensor) -> Tensor:
        tensor = inner(stack)
        tensor = tensor.reshape(len(tensor), *[1] * (rank - tensor.dim() + 1), *tensor.shape[1:])
        return tensor.transpose(0, 1).flatten(1, 2)

    tensor = next(t for n, t in builder.tensors.items() if builder.names.get(id(t)) == value.name)
    try:
        trial_result = bring(tensor.new_empty((2, *tensor.shape), device="meta"))
    except RuntimeError as error:  # The shape of the parameter does not fit.
        raise UnknownOperation from error
    require(value.rank <= rank and trial_result.dim() == rank and trial_result.shape[0] == 1)
    placed = builder.place_parameter(tensor, bring)
    return (
        placed
        if value.cast is None
        else builder.add_step(program.cast_like, (placed, value.cast), rank, kind="parameter")
    )


def _change_parameter(name: str, value: TracedValue, args: tuple[Any, ...], options: dict[str, Any]) -> TracedValue:
    """Return a parameter with another shape, or with the dtype of an activation."""
    inner = value.arrange
    if name == "to":
        (kind,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
        require(isinstance(kind, TracedValue) and kind.kind == "dtype" and set(options) <= {"dtype"})
        return TracedValue("parameter", value.rank, name=value.name, arrange=inner, cast=kind.of)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    require(name in ("view", "reshape") and not options and all(type(n) is int for n in sizes))
    return TracedValue(
        "parameter",
        len(sizes),
        name=value.name,
        arrange=lambda stack: inner(stack).reshape(len(stack), *sizes),
        cast=value.cast,
    )


def _name_arguments(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments of a call as name -> value."""
    require(len(args) <= len(names))
    return dict(zip(names[: len(args)], args, strict=True))


def _add_reduction(
    builder: ProgramBuilder, name: str, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    named = _name_arguments(("dim", "keepdim"), args) | options
    require(set(named) <= {"dim", "keepdim"} and named.get("dim") is not None)
    dims = named["dim"] if isinstance(named["dim"], list | tuple) else (named["dim"],)
    axes = tuple(sorted(d % x.rank for d in dims))
    require(axes and axes[0] > 1)
    keep = bool(named.get("keepdim", False))
    return builder.add_step(program.reduce_spatial(name, axes, keep), (x,), x.rank if keep else x.rank - len(axes))


def _add_flatten(
    builder: ProgramBuilder, name: str, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    """Flatten all axes after the batch axis; a view must have the sizes (batch, -1), or (-1, a number)."""
    width = 0
    require(x.rank > 1)
    if name == "flatten":
        named = _name_arguments(("start_dim", "end_dim"), args) | options
        require(named in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1}))
    else:
        sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        require(len(sizes) == 2 and not options)
        if isinstance(sizes[0], TracedValue):
            require(sizes[0].kind == "extent" and sizes[0].dim == 0 and sizes[1] == -1)
        else:
            require(sizes[0] == -1 and type(sizes[1]) is int and sizes[1] > 0)
            width = sizes[1]
    return builder.add_step(program.flatten_to(width) if width else program.flatten, (x,), 2, shares=x)


def _describe_value(name: str, x: TracedValue, args: tuple[Any, ...]) -> Any:
    if name == "size" and args:
        require(type(args[0]) is int)
        return TracedValue("extent", of=x, dim=args[0])
    if name in ("dim", "ndimension") or args == ("ndim",):
        return x.rank
    require(name == "size" or args in (("shape",), ("dtype",)))
    return TracedValue("dtype" if args == ("dtype",) else "shape", of=x)


def _add_cast(builder: ProgramBuilder, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]) -> TracedValue:
    (kind,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
    require(set(options) <= {"dtype"})
    if isinstance(kind, torch.dtype):
        return builder.add_step(program.call_function(Tensor.to, (kind,), {}), (x,), x.rank, shares=x)
    require(isinstance(kind, TracedValue) and kind.kind == "dtype")
    return builder.add_step(program.cast_like, (x, _require_activation(kind.of)), x.rank, shares=x)
