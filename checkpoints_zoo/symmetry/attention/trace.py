"""The trace of a recorded network: the walk over its operations, and what the rules of operations use.

This is one file, because most of it is one class, `Trace`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.attention.frames import FIXED, ONE, ZERO, Frames, Limit
from checkpoints_zoo.symmetry.attention.graph import Graph
from checkpoints_zoo.symmetry.attention.labels import Core, Label, Parameter, Record, fixed, varies
from checkpoints_zoo.symmetry.table import StridedView


@dataclass(frozen=True)
class Rule:
    """The rule of an operation.

    Args:
        apply: function of (trace, *arguments, **options) of the operation, which returns the label of the result.
        takes_parameters: whether `apply` gets parameters before they become activations.
        takes_fixed: whether `apply` is called if no symmetry moves an entry of any operand.
    """

    apply: Callable[..., Any]
    takes_parameters: bool = False
    takes_fixed: bool = False


class Trace:
    """The labels of a recorded network, with the frames of its coordinates.

    Args:
        graph: the recorded network.
        shapes: name of a parameter -> its shape.
        rules: name of an operation -> its rule.

    Attributes:
        node: the present operation.
        frames: all coordinates.
        records: the axes of parameters that coordinates act on.
        cores: the attentions, in order.
        labels: operation -> its label, a parameter, or the value of a constant.
        roles: name of a vector -> "gain" if it multiplies an activation, "offset" if a norm adds it.
        outputs: source of coordinates -> the records of the layer that wrote them, if no gain is part of it.
        value_records: name of a parameter that is an activation -> its record.
    """

    def __init__(self, graph: Graph, shapes: dict[str, tuple[int, ...]], rules: Mapping[str, Rule]) -> None:
        self.graph, self.shapes, self.rules = graph, shapes, rules
        self.frames = Frames()
        self.records: list[Record] = []
        self.cores: list[Core] = []
        self.labels: dict[fx.Node, Any] = {}
        self.roles: dict[str, str] = {}
        self._axes: dict[StridedView, list[Record]] = {}  # Part of a parameter -> the records of its axes.
        self.value_records: dict[str, Record] = {}
        self._values: dict[str, Label] = {}  # Name of a parameter -> its label as an activation.
        self.outputs: dict[int, list[Record]] = {}
        self._gained: dict[tuple[int, ...], int] = {}  # (coordinate, gain) -> coordinate of their product.
        self.node: fx.Node = graph.nodes[0]
        for self.node in graph.nodes:
            self.labels[self.node] = self._run(self.node)

    # What every rule uses.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result of the present operation."""
        return tuple(self.node.meta["val"].shape)

    @property
    def layer(self) -> str:
        """The path of the layer that runs the present operation."""
        stack = self.node.meta.get("nn_module_stack") or {"": ("", None)}
        return str(list(stack.values())[-1][0])

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error that names the present operation."""
        where = f" in layer {self.layer!r}" if self.layer else ""
        raise SymmetryError(
            f"operation {operation_name(self.node)}{where}",
            expected="one whose effect on symmetries is known",
            found=reason,
            do="Give a network without it; its symmetries can't be derived",
        )

    def fixed_result(self) -> Any:
        """Return the label of the result of the present operation if no symmetry moves an entry."""
        result = self.node.meta.get("val")
        if isinstance(result, Tensor):
            return fixed(tuple(result.shape))
        if isinstance(result, tuple | list):
            return tuple(fixed(tuple(value.shape)) for value in result)
        return None

    def is_kernel(self, name: str) -> bool:
        """Return whether axes of a parameter were opened: a layer reads it."""
        return any(part.tensor == name for part in self._axes)

    def axes(self, parameter: Parameter) -> list[Record]:
        """Return the records of all axes of a part of a parameter; the first use opens them."""
        part = parameter.part
        if part not in self._axes:
            if part.tensor in self._values or any(_overlap(part, other) for other in self._axes):
                self.refuse(f"parameter {part.tensor!r} in several parts that overlap")
            self._axes[part] = [self._record(part, axis) for axis in range(len(part.size))]
        return self._axes[part]

    def _record(self, part: StridedView, axis: int) -> Record:
        layer = part.tensor.rpartition(".")[0] or part.tensor
        record = Record(part, axis, self.frames.new(part.size[axis], layer))
        self.records.append(record)
        return record

    def record_of(self, coordinates: Tensor) -> Record | None:
        """Return the axis of a parameter that has the coordinates; None if they are of several or no parameters."""
        first = int(coordinates.max())
        sources = {self.frames.source[c] for c in coordinates.unique().tolist() if c >= 0}
        if len(sources) != 1:
            return None
        return next((r for r in self.records if first in r.coordinates.tolist()), None)

    def value(self, operand: Any) -> Label:
        """Return an operand as a label; a parameter becomes an activation with coordinates on its last long axis."""
        if isinstance(operand, Label):
            return operand
        if isinstance(operand, Tensor):
            is_zero = operand.numel() > 0 and not bool(operand.any())
            return Label(torch.full((), ZERO if is_zero else FIXED).expand(operand.shape))
        if isinstance(operand, Parameter):
            if operand.tensor not in self._values:
                if self.is_kernel(operand.tensor):
                    self.refuse(f"parameter {operand.tensor!r}, which is a kernel elsewhere")
                shape = self.shapes[operand.tensor]
                whole = Parameter(operand.tensor, torch.empty(shape, device="meta"))
                axis = max((i for i, size in enumerate(shape) if size > 1), default=len(shape) - 1)
                if not shape:
                    return fixed(())
                record = self._record(whole.part, axis)
                back = [1] * (len(shape) - 1 - axis)
                coordinates = record.coordinates.reshape(-1, *back).expand(shape).contiguous()
                self._values[operand.tensor] = Label(coordinates)
                self.value_records[operand.tensor] = record
            view = operand.view
            whole_coordinates = self._values[operand.tensor].coordinates
            return Label(whole_coordinates.as_strided(view.shape, view.stride(), view.storage_offset()).clone())
        return fixed(())

    # Uses that limit frames.

    def one(self, label: Label) -> Label:
        """Let only permutations act on an activation; return its plain label."""
        if label.squares or label.factor is not None or label.more:
            for coordinates in (label.coordinates, *(term[0] for term in label.more)):
                self.frames.claim_units(coordinates, ONE)
            if label.more:
                self.frames.limit(label.coordinates, Limit.PINNED)
                for coordinates, _ in label.more:
                    self.frames.limit(coordinates, Limit.PINNED)
        label = self.without_gain(replace(label, factor=None, more=(), squares=False))
        self.frames.claim_units(label.coordinates, ONE)
        return label

    def plain(self, label: Label) -> Label:
        """Return a label without factors, mixtures and gain: what these leave of the symmetries stays."""
        if label.squares or label.more:
            return self.one(label)
        if label.factor is not None:
            axes = [i for i in range(label.coordinates.ndim) if varies(label.coordinates, i)]
            factor = label.factor.expand(label.coordinates.shape)
            if any(bool((factor != factor.narrow(i, 0, 1)).any()) for i in axes):
                return self.one(label)
            label = replace(label, factor=None)
        return self.without_gain(label)

    def without_gain(self, label: Label) -> Label:
        """Let a gain be part of the frame: only permutations and scales act on the activation."""
        if label.gain is None:
            return label
        self.frames.claim_units(label.coordinates, ONE)
        self.frames.claim_units(label.gain.coordinates, Limit.NONE)
        self.frames.tie(label.coordinates, label.gain.coordinates)
        # Each entry stays a coordinate of its own, also where one gain multiplies several heads.
        pairs = torch.stack([label.coordinates, label.gain.coordinates.expand(label.coordinates.shape)])
        pairs, entries = pairs.flatten(1).unique(dim=1, return_inverse=True)
        new = [pair for pair in map(tuple, pairs.T.tolist()) if pair not in self._gained]
        if new:
            before, gains = torch.tensor(new).T
            after = self.frames.new(len(new), self.frames.names[self.frames.source[int(gains[-1])]])
            self.frames.join(after, gains, place=False)
            self.frames.join_places(after, before)
            self._gained |= dict(zip(new, after.tolist(), strict=True))
        after = torch.tensor([self._gained[pair] for pair in map(tuple, pairs.T.tolist())])
        return replace(label, coordinates=after[entries].reshape(label.coordinates.shape), gain=None)

    def claim_norm(self, coordinates: Tensor, limit: Limit) -> None:
        """Limit the frames of the last axis of an activation to matrices that keep what a norm computes."""
        self.frames.limit(coordinates, limit)
        self.frames.claim(coordinates.reshape(-1, coordinates.shape[-1]).unique(dim=0).unbind())

    def rows(self, coordinates: Tensor, axes: int = 1) -> Tensor:
        """Let the coordinates of the last axes be the same at all positions; return them, without positions."""
        flat = coordinates.reshape(-1, *coordinates.shape[coordinates.ndim - axes :])
        first = flat[0]
        for row in flat.flatten(1).unique(dim=0):
            self.frames.join(first.flatten(), row)
        return first

    # The walk.

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            if node in self.graph.parameters:
                name = self.graph.parameters[node]
                return Parameter(name, torch.empty(self.shapes[name], device="meta"))
            if node in self.graph.constants:
                return self.graph.constants[node]
            value = node.meta.get("val")
            return fixed(tuple(value.shape)) if isinstance(value, Tensor) else value
        if node.op == "get_attr":
            return fixed(self.shape)
        arguments: Any = fx.map_arg(node.args, lambda n: self.labels[n])
        options: Any = fx.map_arg(node.kwargs, lambda n: self.labels[n])
        operands = list(operands_in((arguments, options)))
        if node.op == "output":
            for operand in operands:
                label = self.plain(self.value(operand))
                self.frames.limit(label.coordinates, Limit.PINNED)
            return None
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        if not operands:
            return run_node(node, arguments, options)  # A constant: its value is known.
        stem = operation_stem(node)
        is_in_place = operation_name(node).startswith(f"aten.{stem}_.")
        if is_in_place and len(node.all_input_nodes[0].users) > 1 and not self.value(arguments[0]).is_fixed:
            self.refuse("a change in place of a tensor that other operations read")
        rule = self.rules.get(stem)
        if rule is None or not rule.takes_parameters:
            values = [self.value(operand) for operand in operands]
            if all(value.is_fixed for value in values) and not (rule and rule.takes_fixed):
                return self.fixed_result()
        if rule is None:
            self.refuse("no rule for it")
        return rule.apply(self, *arguments, **options)


def operands_in(arguments: Any) -> Iterator[Label | Parameter]:
    """Yield the labels and parameters within nested arguments."""
    if isinstance(arguments, Label | Parameter):
        yield arguments
    elif isinstance(arguments, dict):
        yield from operands_in(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from operands_in(argument)


def replace_operands(arguments: Any, replacement: Callable[[Any], Any], kinds: Any = Label | Parameter) -> Any:
    """Replace the labels and parameters, or objects of other kinds, within nested arguments."""
    if isinstance(arguments, kinds):
        return replacement(arguments)
    if isinstance(arguments, dict):
        return {key: replace_operands(value, replacement, kinds) for key, value in arguments.items()}
    if isinstance(arguments, tuple | list):
        replaced = [replace_operands(value, replacement, kinds) for value in arguments]
        return tuple(replaced) if isinstance(arguments, tuple) else replaced
    return arguments


def _overlap(first: StridedView, second: StridedView) -> bool:
    """Return whether two parts share entries of one parameter."""
    if first.tensor != second.tensor:
        return False
    entries = []
    for part in (first, second):
        last = part.offset + sum((n - 1) * step for n, step in zip(part.size, part.stride, strict=True))
        entries.append(part.of(torch.arange(last + 1)[None]).flatten())
    return bool(torch.isin(*entries).any())


def run_node(node: fx.Node, arguments: Any, options: Any) -> Any:
    """Run an operation on values."""
    operation: Any = node.target
    return operation(*arguments, **options)


def operation_stem(node: fx.Node) -> str:
    """Return the name of an operation without its overload, and without the ending of operations in place."""
    return operation_name(node).removeprefix("aten.").partition(".")[0].removesuffix("_")


def operation_name(node: fx.Node) -> str:
    """Return the name of an operation, as error texts give it."""
    return str(node.target)
