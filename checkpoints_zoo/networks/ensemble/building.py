"""The program of a traced network, written layer by layer; functions between layers are in `calling`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from checkpoints_zoo.networks.ensemble import calling, steps
from checkpoints_zoo.networks.ensemble.program import Compute, Norm, Parameter, Program, Step
from checkpoints_zoo.networks.ensemble.values import PLAIN, Unknown, Value, require, side_by_side


class Builder:
    """Follow a graph and write its steps.

    Args:
        module: whose graph it is.
        rank: of the inputs.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.layers: dict[str, Any] = dict(module.named_modules())
        # Of names tied to one tensor the last counts, as in a strict load.
        self.names = {id(t): n for n, t in module.state_dict(keep_vars=True).items()}
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
                self.known[node] = calling.call(self, node)
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
        return self.add(steps.repeat, (value,), value.rank, kind="own", shares=value)

    def layer(self, node: fx.Node, layer: Any) -> Value:
        x = self.value(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(x, Value) or not x.active:
            raise Unknown
        kind = type(layer)
        if kind in steps.CONVOLUTIONS:
            return self.convolution(node, layer, x)
        if kind in steps.BATCH_NORMS:
            return self.batch_norm(node, layer, x)
        if kind is nn.Linear:
            require(x.rank == 2)
            operands = self.placed(layer.weight, lambda t: t), self.placed(layer.bias, lambda t: t)
            return self.add(steps.linear(x.kind == "shared"), (x, *operands), 2, kind="own")
        if kind is nn.GroupNorm:
            require(x.rank > 2)
            affine = [self.placed(t, side_by_side) for t in (layer.weight, layer.bias)]
            return self.add(steps.group_norm(layer.num_groups, layer.eps), (self.own(x), *affine), x.rank)
        if kind in steps.SAME:
            return self.add(steps.same, (x,), x.rank, shares=x)
        if kind is nn.Flatten:
            require(x.rank > 1 and layer.start_dim == 1 and layer.end_dim in (-1, x.rank - 1))
            return self.add(steps.flatten, (x,), 2, shares=x)
        if kind in steps.IN_PLACE:
            twins = copy.copy(layer), copy.copy(layer)
            twins[0].inplace, twins[1].inplace = False, True
            writes = x if layer.inplace else None
            return self.add(steps.switched(twins), (x,), x.rank, over=True, writes=writes)
        require(steps.LAYERS.get(kind, -1) in (None, x.rank) and not getattr(layer, "return_indices", False))
        return self.add(steps.layer(layer), (x,), x.rank)

    def convolution(self, node: fx.Node, layer: Any, x: Value) -> Value:
        require(layer.padding_mode == "zeros" and x.rank == layer.weight.dim())
        shared = x.kind == "shared" and layer.groups == 1
        x = x if shared else self.own(x)
        weight = self.placed(layer.weight, side_by_side, kernel=True)
        bias = self.placed(layer.bias, side_by_side)
        names = self.name_of(layer.weight), self.name_of(layer.bias)
        self.convolutions[node] = names, weight.place, bias.place
        return self.add(steps.convolution(layer, shared), (x, weight, bias), x.rank, kind="own")

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
        return self.add(steps.batch_norm(layer.eps), (self.own(x), *operands), x.rank)

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
