"""A module traced with labels on the axes of its tensors, one rule an operation; and the table that the labels make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn

from checkpoints_zoo.errors import SymmetryError, UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer, first_names
from checkpoints_zoo.symmetry.deriving.labels import Segment, Space, pin, pin_scale, resolved, root
from checkpoints_zoo.symmetry.deriving.operations import (
    ATTRIBUTES,
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    SILENT,
    Rule,
    full_name,
    rule_of,
)
from checkpoints_zoo.symmetry.deriving.scales import Factor, tie, times
from checkpoints_zoo.symmetry.deriving.values import Step, Value
from checkpoints_zoo.symmetry.table import Axes, Group, Move, Power, Scale, Table

T = TypeVar("T", Space, Factor)


def trace(module: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Value]:
    """Follow an example through a module in eval mode; return its parameters and buffers with their labels, by name.

    Args:
        module: it is not changed.
        example: inputs; only their shapes matter.

    Raises:
        SymmetryError: an operation without a rule, or a module that can't be traced.
        UsageError: the module doesn't take the example.
    """
    states = module.state_dict(keep_vars=True)
    with torch.no_grad(), _evaluating(module):
        walk = _Walk(module, _recorded(module), states)
        walk.run(*example)
    return {name: walk.states[id(t)] for name, t in states.items() if id(t) in walk.states}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and each of its layers back into its own afterwards.

    A copy would not do: functions that a module keeps may hold on to the module itself.
    """
    modes = {layer: layer.training for layer in module.modules()}
    try:
        for layer in modes:
            layer.training = False
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def _recorded(module: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    try:
        return tracer.record(module)
    except TRACE_ERRORS as error:
        raise SymmetryError(
            f"tracing {type(module).__name__}" + (f", layer {tracer.at!r}" if tracer.at else ""),
            expected="operations that are the same for all inputs",
            found=str(error).partition("\n")[0],
            do="Give a module that torch.fx can trace, without control flow that depends on the input",
        ) from error


class _Tracer(Tracer):
    """Record what a module does, down to the layers that have a rule, and to torch's own."""

    at = ""  # the layer that is being recorded; after a failure, where it was

    def record_call(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before, self.at = self.at, self.path_of_module(m)
        result = super().record_call(m, forward, args, kwargs)
        self.at = before
        return result

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return rule_of(module) is not None or super().is_leaf_module(module, name)


class _Walk(fx.Interpreter):
    """Run a graph, and label each result from the labels of what went in."""

    def __init__(self, module: nn.Module, graph: fx.Graph, states: dict[str, Tensor]) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False
        first = first_names(module)
        self.named = {id(t): first[name] for name, t in states.items()}
        self.states: dict[int, Value] = {}
        self.labels: dict[fx.Node, Any] = {}
        self.births: Iterator[int] = count()

    def run_node(self, node: fx.Node) -> Any:
        kind = type(self.fetch_attr(str(node.target))) if node.op == "call_module" else None
        step = Step(full_name(kind) if kind else _operation(node), _layer(node), births=self.births)
        try:
            result = super().run_node(node)
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise UsageError(
                "example",
                expected=f"inputs that {type(self.module).__name__} takes",
                found=f"at {step.operation}: {str(error).partition(chr(10))[0]}",
                do="Give one batch of inputs as `example`",
            ) from error
        step.shape = _shapes(result)
        with step.checked():
            self.labels[node] = label = self._label(step, node, result)
            if isinstance(label, Value) and label.shape != step.shape:
                step.refuse(f"a result of shape {step.shape} where its rule gives {label.shape}")
        return result

    def _label(self, step: Step, node: fx.Node, result: Any) -> Any:
        arguments = fx.map_arg(node.args, self._argument)
        named = fx.map_arg(node.kwargs, self._argument)
        if node.op == "placeholder":
            return _still(step, step.shape) if isinstance(result, Tensor) else None
        if node.op == "get_attr":
            return self._state(step, result) if isinstance(result, Tensor) else None
        if node.op == "output":
            for value in _values(arguments):
                for axis in value.axes:
                    pin(axis)
            return None
        if node.op == "call_module":
            return self._layer(step, self.fetch_attr(str(node.target)), arguments, named)
        return _applied(step, node, arguments, named, result)

    def _argument(self, node: fx.Node) -> Any:
        return self.env[node] if self.labels[node] is None else self.labels[node]

    def _state(self, step: Step, tensor: Tensor) -> Value:
        """Return the label of a parameter or buffer; of any other tensor, that it stays as it is."""
        if id(tensor) not in self.named:
            return Value(tuple(step.still(size) for size in tensor.shape))
        if id(tensor) not in self.states:
            self.states[id(tensor)] = value = step.fresh(tuple(tensor.shape), self.named[id(tensor)])
            for axis in () if tensor.is_floating_point() else value.axes:
                pin_scale(axis)
        return self.states[id(tensor)]

    def _layer(self, step: Step, layer: nn.Module, arguments: Any, named: Any) -> Any:
        tensors = {n: t for n, t in layer.state_dict(keep_vars=True).items() if not is_counter(n)}
        rule = rule_of(layer)
        if rule is None:
            if not tensors and all(value.fixed for value in _values((arguments, named))):
                return _still(step, step.shape)
            step.refuse("a layer without a rule")
        if layer._forward_hooks or layer._forward_pre_hooks:
            step.refuse("a layer with hooks, which may change what it computes")
        asked: set[str] = set()

        def own(name: str) -> Value | None:
            asked.add(name)
            return self._state(step, tensors[name]) if name in tensors else None

        result = rule(step, layer, own, *arguments, **named)
        if left := sorted(set(tensors) - asked):
            step.refuse(f"a layer with tensors of its own: {', '.join(left)}")
        return result


def _applied(step: Step, node: fx.Node, arguments: Any, named: dict[str, Any], result: Any) -> Any:
    """Apply the rule of a function or method; return the result's labels, None if it is no tensor."""
    values = list(_values((arguments, named)))
    tensors = step.shape is not None
    if not values or node.target in SILENT:
        if node.target is getattr and tensors:
            arguments, named, rule = arguments[:1], {}, ATTRIBUTES.get(arguments[1])
        else:
            return _still(step, step.shape) if tensors else None
    elif node.target is operator.getitem and isinstance(arguments[0], tuple | list):
        return arguments[0][arguments[1]]
    else:
        rule = _rule(node)
    if "input" in named:
        arguments, named = (named["input"], *arguments), {k: v for k, v in named.items() if k != "input"}
    if "other" in named:
        arguments, named = (*arguments, named["other"]), {k: v for k, v in named.items() if k != "other"}
    if rule is None and tensors and all(value.fixed for value in values):
        return _still(step, step.shape)
    if rule is None or not tensors or "out" in named:
        step.refuse("no rule for it")
    try:
        signature(rule).bind(step, *arguments, **named)
    except TypeError as error:
        step.refuse(f"arguments that its rule doesn't know ({error})")
    label = rule(step, *arguments, **named)
    if _in_place(node):
        _check_in_place(step, arguments[0], label)
    return label


def _rule(node: fx.Node) -> Rule | None:
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    full = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
    return FUNCTIONS.get(node.target) or FUNCTIONS.get(full)


def _in_place(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.target in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _check_in_place(step: Step, before: Value, after: Value) -> None:
    """Refuse a change in place that other views of the tensor would have to learn of."""
    if before.state:
        step.refuse("a change of one of the module's own tensors")
    for one, other in zip(before.axes, after.axes, strict=True):
        for a, b in zip(resolved(one), resolved(other), strict=True):
            if a.space is not b.space or times(a.scale, b.scale, power=-1):
                step.refuse("a change in place of what other operations may still read")


def _still(step: Step, shape: Any) -> Any:
    """Return labels that say that nothing moves or scales, for a tensor or several."""
    if shape is None or (shape and not isinstance(shape[0], int)):
        return None if shape is None else tuple(_still(step, inner) for inner in shape)
    return Value(tuple(step.still(size) for size in shape))


def _shapes(result: Any) -> Any:
    """Return a tensor's shape, a tuple of those of several, None for what is no tensor."""
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, tuple | list) and result and all(isinstance(r, Tensor) for r in result):
        return tuple(tuple(r.shape) for r in result)
    return None


def _values(arguments: Any) -> Iterator[Value]:
    """Yield all labels within arguments."""
    if isinstance(arguments, Value):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _values(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _values(argument)


def _operation(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", str(node.target))
    return name if module in ("", "_operator", None) else f"{module}.{name}"


def _layer(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = list(stack.values())[-1][0]
    return str(path)


def build(network: str, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Value]) -> Table:
    """Collect what moves and scales; return the table.

    Args:
        network: its name.
        shapes: of all its tensors, by name.
        values: of those that the trace met.
    """
    runs = {name: list(_runs(values[name])) if name in values else [] for name in shapes}
    every = [run.segment for found in runs.values() for run in found]
    spaces = _named(_moving(segment.space for segment in every))
    for segment in every:
        for factor in segment.scale:
            _follow_units(factor, segment)
    factors = _named(factor for segment in every for factor in segment.scale)
    movers = {f: spaces.get(mover) for segment in every for f in segment.scale if (mover := _mover(f, segment))}
    tensors = {}
    for name, shape in shapes.items():
        value = values.get(name, Value(()))
        moves = [
            Move(run.axis, spaces[run.segment.space], run.offset, run.segment.span, run.within)
            for run in runs[name]
            if run.segment.space in spaces
        ]
        powers = [
            Power(run.axis, factors[f], float(p), run.offset, run.segment.length, run.within)
            for run in runs[name]
            for f, p in run.segment.scale.items()
        ]
        tensors[name] = Axes(shape, value.role or "other", value.shift, tuple(moves), tuple(powers))
    groups = {name: _group(name, space, spaces) for space, name in spaces.items()}
    scales = {
        name: Scale(
            name,
            f.count,
            movers.get(f),
            all(f.norms.values()),
            tuple(f.norms),
            _noted(f),
        )
        for f, name in factors.items()
    }
    return Table(network, tensors, groups, scales)


class _Run(NamedTuple):
    """A segment of a tensor's axis, and where it starts."""

    axis: int
    offset: int
    segment: Segment
    within: int


def _runs(value: Value) -> Iterator[_Run]:
    inner = value.within
    for i, axis in enumerate(value.axes):
        blocks, own = inner if inner and i == 1 else (0, axis)
        offset = 0
        for segment in resolved(own):
            yield _Run(i, offset, segment, blocks)
            offset += segment.length


def _moving(spaces: Iterable[Space]) -> Iterator[Space]:
    """Yield spaces that move, and the spaces of the blocks they lie in."""
    for space in spaces:
        outer: Space | None = space
        while outer is not None:
            if not outer.pinned and outer.size > 1:
                yield outer
            outer = None if outer.blocks is None else root(outer.blocks)


def _named(found: Iterable[T]) -> dict[T, str]:
    """Name spaces or factors after their layers, in the order they were opened; blocks come before what they hold."""
    ordered = sorted(set(found), key=lambda x: (x.born, getattr(x, "size", 0)))
    names: dict[T, str] = {}
    taken: set[str] = set()
    for x in ordered:
        own = x.label or "input"
        name, number = own, 1
        while name in taken:
            number += 1
            name = f"{own} #{number}"
        taken.add(name)
        names[x] = name
    return names


def _follow_units(factor: Factor, segment: Segment) -> None:
    """Make a factor one value for all where its values follow neither units nor blocks, so that these can move."""
    if _mover(factor, segment) is None and not segment.space.pinned:
        tie(factor, 1)


def _mover(factor: Factor, segment: Segment) -> Space | None:
    """Return the space whose units carry a factor's values with them."""
    space: Space | None = segment.space
    while space is not None and factor.count > 1:
        if factor.count % space.size == 0:
            return space
        space = None if space.blocks is None else root(space.blocks)
    return None


def _group(name: str, space: Space, spaces: Mapping[Space, str]) -> Group:
    outer = None if space.blocks is None else root(space.blocks)
    writers = _noted(space)
    blocks, mover = (1, None) if outer is None else (outer.size, spaces.get(outer))
    return Group(name, space.size, blocks, mover, space.stream and len(writers) > 1, writers)


def _noted(x: Space | Factor) -> tuple[tuple[str, int], ...]:
    return tuple((tensor, axis) for _, tensor, axis in sorted(set(x.writers)))
