"""Trace a module with labelled axes, one rule for each operation.

This is one file, because one walk records the operations, applies their rules and checks the results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from checkpoints_zoo.errors import SymmetryError, UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer, first_names
from checkpoints_zoo.symmetry.deriving.labels import pin_axis, pin_scale, resolve_axis
from checkpoints_zoo.symmetry.deriving.operations import (
    ATTRIBUTE_RULES,
    FUNCTION_RULES,
    IN_PLACE_OPERATORS,
    METHOD_RULES,
    WITHOUT_TENSOR_RESULT,
    Rule,
    full_name,
    layer_rule,
)
from checkpoints_zoo.symmetry.deriving.scales import (
    equate_products,
    magnitudes_of,
    multiply_products,
)
from checkpoints_zoo.symmetry.deriving.values import Labelled, Step


def trace_labels(module: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Labelled]:
    """Run a module on an example in eval mode; return the labels of its parameters and buffers, by name.

    Args:
        module: the module. The module is not changed.
        example: inputs. Only the shapes of the inputs matter.

    Raises:
        SymmetryError: an operation has no rule, or the module cannot be traced.
        UsageError: the module cannot process the example.
    """
    states = module.state_dict(keep_vars=True)
    with torch.no_grad(), _eval_mode(module), _copied_data(states.values()):
        interpreter = _LabelInterpreter(module, _record_graph(module), states)
        interpreter.run(*example)
    labels = interpreter.states
    return {name: labels[id(t)] for name, t in states.items() if id(t) in labels}


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode; restore the mode of each layer afterwards.

    A copy of the module is no substitute: functions stored in a module may refer to the module itself.
    """
    modes = {layer: layer.training for layer in module.modules()}
    try:
        for layer in modes:
            layer.training = False
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode


@contextmanager
def _copied_data(tensors: Iterable[Tensor]) -> Iterator[None]:
    """While the `with` block runs, let tensors hold copies of their data, since some operations change data in place;
    then restore the original data."""
    data = {id(tensor): (tensor, tensor.data) for tensor in tensors}
    try:
        for tensor, original in data.values():
            tensor.data = original.clone()
        yield
    finally:
        for tensor, original in data.values():
            tensor.data = original


def _record_graph(module: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    try:
        return tracer.record_graph(module)
    except TRACE_ERRORS as error:
        raise SymmetryError(
            f"tracing {type(module).__name__}" + (f", layer {tracer.at!r}" if tracer.at else ""),
            expected="operations that are the same for all inputs",
            found=str(error).partition("\n")[0],
            do="Give a module that torch.fx can trace, without control flow that depends on the input",
        ) from error


class _Tracer(Tracer):
    """Record the operations of a module. Layers with a rule, and the layers of torch, are single operations."""

    at = ""  # Path of the layer that is being recorded, or that failed.

    def record_call(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before, self.at = self.at, self.path_of_module(m)
        result = super().record_call(m, forward, args, kwargs)
        self.at = before
        return result

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return layer_rule(module) is not None or super().is_leaf_module(module, name)


class _LabelInterpreter(fx.Interpreter):
    """Run a graph, and derive the label of each result from the labels of the arguments."""

    def __init__(self, module: nn.Module, graph: fx.Graph, state_tensors: dict[str, Tensor]) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False
        first = first_names(module)
        self.state_names = {id(t): first[name] for name, t in state_tensors.items()}
        self.states: dict[int, Labelled] = {}
        self.labels: dict[fx.Node, Any] = {}
        self.serials: Iterator[int] = count()

    def run_node(self, node: fx.Node) -> Any:
        kind = type(self.fetch_attr(str(node.target))) if node.op == "call_module" else None
        step = Step(full_name(kind) if kind else _operation_name(node), _layer_path(node), serials=self.serials)
        try:
            result = super().run_node(node)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError) as error:
            raise UsageError(
                "example",
                expected=f"inputs that {type(self.module).__name__} takes",
                found=f"at {step.operation}: {str(error).partition(chr(10))[0]}",
                do="Give one batch of inputs as `example`",
            ) from error
        step.shape = _result_shape(result)
        with step.naming_operation():
            self.labels[node] = label = self._label_result(step, node, result)
            if not self._keeps_values(node, result):
                for value in _all_labels(label):
                    for axis in value.axes:
                        pin_scale(axis)
            if isinstance(label, Labelled) and label.shape != step.shape:
                step.refuse(f"a result of shape {step.shape} where its rule gives {label.shape}")
        return result

    def _label_result(self, step: Step, node: fx.Node, result: Any) -> Any:
        arguments = fx.map_arg(node.args, self._label_or_value)
        options = fx.map_arg(node.kwargs, self._label_or_value)
        if node.op == "placeholder":
            return _fixed_labels(step, step.shape) if isinstance(result, Tensor) else None
        if node.op == "get_attr":
            return self._label_tensor(step, result) if isinstance(result, Tensor) else None
        if node.op == "output":
            for value in _all_labels(arguments):
                for axis in value.axes:
                    pin_axis(axis)
            return None
        if node.op == "call_module":
            return self._apply_layer_rule(step, self.fetch_attr(str(node.target)), arguments, options)
        return _apply_rule(step, node, arguments, options, result)

    def _keeps_values(self, node: fx.Node, result: Any) -> bool:
        """Return whether the dtype of a result can hold all values of its arguments; a cast to a narrower dtype would
        round."""
        arguments = [self.env[argument] for argument in node.all_input_nodes]
        dtypes = {a.dtype for a in arguments if isinstance(a, Tensor) and a.is_floating_point() and a.ndim}
        tensors = [t for t in (result if isinstance(result, tuple | list) else (result,)) if isinstance(t, Tensor)]
        return all(t.dtype == torch.promote_types(t.dtype, dtype) for t in tensors for dtype in dtypes)

    def _label_or_value(self, node: fx.Node) -> Any:
        return self.env[node] if self.labels[node] is None else self.labels[node]

    def _label_tensor(self, step: Step, tensor: Tensor) -> Labelled:
        """Return the label of a parameter or buffer. A tensor that is no parameter or buffer gets fixed axes."""
        if id(tensor) not in self.state_names:
            return Labelled(tuple(step.fixed_axis(size) for size in tensor.shape))
        if id(tensor) not in self.states:
            self.states[id(tensor)] = value = step.label_state(tuple(tensor.shape), self.state_names[id(tensor)])
            for axis in () if tensor.is_floating_point() else value.axes:
                pin_scale(axis)
        return self.states[id(tensor)]

    def _apply_layer_rule(self, step: Step, layer: nn.Module, arguments: Any, options: Any) -> Any:
        tensors = {n: t for n, t in layer.state_dict(keep_vars=True).items() if not is_counter(n)}
        rule = layer_rule(layer)
        if rule is None:
            if not tensors and all(value.is_fixed for value in _all_labels((arguments, options))):
                return _fixed_labels(step, step.shape)
            step.refuse("a layer without a rule")
        if layer._forward_hooks or layer._forward_pre_hooks:
            step.refuse("a layer with hooks, which may change what it computes")
        requested: set[str] = set()

        def tensor_of(tensor_name: str) -> Labelled | None:
            requested.add(tensor_name)
            return self._label_tensor(step, tensors[tensor_name]) if tensor_name in tensors else None

        result = rule(step, layer, tensor_of, *arguments, **options)
        if unused_tensors := sorted(set(tensors) - requested):
            step.refuse(f"a layer with further tensors: {', '.join(unused_tensors)}")
        return result


def _apply_rule(step: Step, node: fx.Node, arguments: Any, options: dict[str, Any], result: Any) -> Any:
    """Apply the rule of a function or method; return the label of the result, or None if the result is no tensor."""
    values = list(_all_labels((arguments, options)))
    tensors = step.shape is not None
    if not values or node.target in WITHOUT_TENSOR_RESULT:
        if node.target is getattr and tensors:
            arguments, options, rule = arguments[:1], {}, ATTRIBUTE_RULES.get(arguments[1])
        else:
            return _fixed_labels(step, step.shape) if tensors else None
    elif node.target is operator.getitem and isinstance(arguments[0], tuple | list):
        return arguments[0][arguments[1]]
    else:
        rule = _rule_of_node(node)
    if "input" in options:
        arguments, options = (options["input"], *arguments), {k: v for k, v in options.items() if k != "input"}
    if "other" in options:
        arguments, options = (*arguments, options["other"]), {k: v for k, v in options.items() if k != "other"}
    if rule is None and tensors and all(value.is_fixed for value in values):
        return _fixed_labels(step, step.shape)
    if rule is None or not tensors or "out" in options:
        step.refuse("no rule for it")
    try:
        signature(rule).bind(step, *arguments, **options)
    except TypeError as error:
        step.refuse(f"unsupported arguments ({error})")
    label = rule(step, *arguments, **options)
    if _is_in_place(node):
        _check_in_place(step, arguments[0], label)
    return label


def _rule_of_node(node: fx.Node) -> Rule | None:
    if node.op == "call_method":
        return METHOD_RULES.get(str(node.target))
    full = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', '')}"
    return FUNCTION_RULES.get(node.target) or FUNCTION_RULES.get(full)


def _is_in_place(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.target in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _check_in_place(step: Step, label_before: Labelled, label_after: Labelled) -> None:
    """Refuse an operation in place that would also change other views of the tensor."""
    if label_before.state_name:
        step.refuse("a change in place of a parameter or buffer")
    for axis_before, axis_after in zip(label_before.axes, label_after.axes, strict=True):
        for a, b in zip(resolve_axis(axis_before), resolve_axis(axis_after), strict=True):
            difference = multiply_products(a.scale, b.scale, last_power=-1)
            if a.space is not b.space or magnitudes_of(difference):
                step.refuse("a change in place of a tensor that other operations may read")
            equate_products(difference, {})


def _fixed_labels(step: Step, shape: Any) -> Any:
    """Return labels with fixed axes for one tensor, or for a tuple of tensors."""
    if shape is None or (shape and not isinstance(shape[0], int)):
        return None if shape is None else tuple(_fixed_labels(step, inner) for inner in shape)
    return Labelled(tuple(step.fixed_axis(size) for size in shape))


def _result_shape(result: Any) -> Any:
    """Return the shape of a tensor, a tuple of shapes for several tensors, or None for other results."""
    if isinstance(result, Tensor):
        return tuple(result.shape)
    if isinstance(result, tuple | list) and result and all(isinstance(r, Tensor) for r in result):
        return tuple(tuple(r.shape) for r in result)
    return None


def _all_labels(arguments: Any) -> Iterator[Labelled]:
    """Yield the labels of all tensors within nested arguments."""
    if isinstance(arguments, Labelled):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _all_labels(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _all_labels(argument)


def _operation_name(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", str(node.target))
    return name if module in ("", "_operator", None) else f"{module}.{name}"


def _layer_path(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    path = list(stack.values())[-1][0]
    return str(path)
