"""The builder of a program: it translates a traced graph and its layers into steps, and numbers their values.

This is one file, because it is one class. The rules of functions are in `operations`, which calls the builder.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from checkpoints_zoo.networks.ensemble import batch_layout, program
from checkpoints_zoo.networks.ensemble.program import Compute, FoldableNorm, Program, Step, StepParameter
from checkpoints_zoo.networks.ensemble.traced import (
    OperandAxes,
    TracedStep,
    TracedValue,
    UnknownOperation,
    keep_axes,
    move_selections,
    require,
)
from checkpoints_zoo.networks.modules import last_names

CONSTANT_TYPES = (bool, int, float, str, type(None), torch.dtype)


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
        self.steps: list[TracedStep] = []
        self.value_of_node: dict[fx.Node, Any] = {}
        self.inputs = TracedValue("shared", rank)
        self.convolutions: dict[fx.Node, tuple[tuple[str, str], int, int]] = {}
        self.norms: list[FoldableNorm] = []

    def build(self, graph: fx.Graph, add_call: Callable[[ProgramBuilder, fx.Node], Any]) -> Program:
        """Translate a graph into a program; return the program.

        Args:
            graph: the traced graph of the module.
            add_call: function that adds the steps for a call, `operations.add_call`.

        Raises:
            UnknownOperation: an operation has no known step.
        """
        result = None
        for node in graph.nodes:
            if node.op == "placeholder":
                require(not self.value_of_node or node.args)  # Only the first input of the network may lack a default.
                self.value_of_node[node] = node.args[0] if self.value_of_node else self.inputs
            elif node.op == "get_attr":
                self.value_of_node[node] = self.trace_parameter(str(node.target))
            elif node.op == "call_module":
                self.value_of_node[node] = self.add_layer(node, self.layers[str(node.target)])
            elif node.op == "output":
                result = self.in_channel_layout(self.replace_nodes(node.args[0]))
            else:
                self.value_of_node[node] = add_call(self, node)
        if not isinstance(result, TracedValue) or result.kind != "member" or result.rank < 2:
            raise UnknownOperation
        return self.number_values(result)

    def replace_nodes(self, argument: Any) -> Any:
        """Return an argument with each graph node replaced by its TracedValue."""
        if isinstance(argument, fx.Node):
            return self.value_of_node[argument]
        if isinstance(argument, list | tuple):
            return type(argument)([self.replace_nodes(a) for a in argument])
        if isinstance(argument, slice):
            require(are_constants((argument.start, argument.stop, argument.step)))
        else:
            require(isinstance(argument, CONSTANT_TYPES) or argument is ...)
        return argument

    def add_step(
        self,
        compute: Compute,
        operands: tuple[TracedValue, ...],
        rank: int,
        *,
        result_kind: str = "",
        batch_axis: int | None = None,
        shares_memory_with: TracedValue | None = None,
        can_overwrite: bool = False,
        overwritten_value: TracedValue | None = None,
        operand_axes: OperandAxes = lambda axis: {},
    ) -> TracedValue:
        """Add a step to the program; return the TracedValue of its result.

        Args:
            compute, operands, can_overwrite, overwritten_value, operand_axes: as in `TracedStep`.
            rank: number of axes of the result.
            result_kind: kind of the result; "" to derive it from the operands.
            batch_axis: the result's axis (member·batch); None if the members lie along the channels.
            shares_memory_with: the operand with which the result may share memory.
        """
        result_kind = result_kind or ("member" if any(v.kind == "member" for v in operands) else "shared")
        value = TracedValue(
            result_kind,
            rank,
            batch_axis=batch_axis,
            shares=shares_memory_with,
            owns_memory=shares_memory_with is None,
            shares_addresses=shares_memory_with is not None and shares_memory_with.shares_addresses,
        )
        self.steps.append(TracedStep(compute, operands, value, can_overwrite, overwritten_value, operand_axes))
        return value

    def trace_parameter(self, tensor_name: str) -> TracedValue:
        # Tensors outside the state dict are not stacked over members.
        require(id(self.tensors[tensor_name]) in self.names)
        return TracedValue("parameter", self.tensors[tensor_name].dim(), name=self.names[id(self.tensors[tensor_name])])

    def tensor_of(self, parameter: TracedValue) -> Tensor:
        return next(t for t in self.tensors.values() if self.names.get(id(t)) == parameter.name)

    def add_parameter(
        self, tensor: Tensor | None, arrange: Callable[[Tensor], Tensor], kernel_groups: int | None = None
    ) -> TracedValue:
        """Reserve a position in the list of values for a layer's parameter; the value of a missing parameter stays
        None."""
        require(tensor is None or id(tensor) in self.names)
        value = TracedValue("parameter", place=len(self.parameters))
        self.parameters.append(
            None if tensor is None else StepParameter(self.names[id(tensor)], arrange, kernel_groups)
        )
        return value

    def repeat_if_shared(self, value: TracedValue) -> TracedValue:
        """Return a value of kind "member": a value that all members share is repeated, once for each member."""
        if value.kind == "member":
            return value
        return self.add_step(
            program.repeat_for_members, (value,), value.rank, result_kind="member", shares_memory_with=value
        )

    def in_batch_layout(self, value: TracedValue) -> TracedValue:
        """Return a value in the batch layout, (member·batch, …)."""
        if value.batch_axis is not None:
            require(value.batch_axis == 0)
            return value
        require(value.rank > 1)
        return self.add_step(
            batch_layout.channels_to_batch(value.kind == "shared"), (value,), value.rank,
            result_kind="member", batch_axis=0, shares_memory_with=value,
        )  # fmt: skip

    def in_channel_layout(self, value: Any) -> Any:
        """Return a value in the channel layout, (batch, member·channel, …)."""
        if not isinstance(value, TracedValue) or value.batch_axis is None:
            return value
        require(value.batch_axis == 0 and value.rank > 1)
        return self.add_step(batch_layout.batch_to_channels, (value,), value.rank, shares_memory_with=value)

    def add_layer(self, node: fx.Node, layer: Any) -> TracedValue:
        x = self.replace_nodes(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(x, TracedValue) or not x.is_activation:
            raise UnknownOperation
        layer_class = type(layer)
        if layer_class is nn.LayerNorm:
            gain_and_offset = [self.add_parameter(t, lambda t: t) for t in (layer.weight, layer.bias)]
            return self.add_layer_norm(x, layer.normalized_shape, gain_and_offset, layer.eps)
        if layer_class is nn.Linear and (x.rank > 2 or x.batch_axis is not None):
            weight, bias = (self.add_parameter(t, lambda t: t) for t in (layer.weight, layer.bias))
            return self.add_step(
                batch_layout.linear, (self.in_batch_layout(x), weight, bias), x.rank,
                batch_axis=0, operand_axes=keep_axes(range(x.rank - 1)),
            )  # fmt: skip
        if layer_class in (*program.CONVOLUTIONS, *program.BATCH_NORMS, nn.GroupNorm):
            x = self.in_channel_layout(x)
        if layer_class in program.CONVOLUTIONS:
            return self.add_convolution(node, layer, x)
        if layer_class in program.BATCH_NORMS:
            return self.add_batch_norm(node, layer, x)
        if layer_class is nn.Linear:
            require(x.rank == 2)
            operands = self.add_parameter(layer.weight, lambda t: t), self.add_parameter(layer.bias, lambda t: t)
            return self.add_step(program.linear(x.kind == "shared"), (x, *operands), 2, result_kind="member")
        if layer_class is nn.GroupNorm:
            require(x.rank > 2)
            affine_values = [self.add_parameter(t, flatten_members) for t in (layer.weight, layer.bias)]
            return self.add_step(
                program.group_norm(layer.num_groups, layer.eps), (self.repeat_if_shared(x), *affine_values), x.rank
            )
        axis = x.batch_axis
        require(axis in (None, 0))
        if layer_class in program.IDENTITY_LAYERS:
            return self.add_step(program.return_input, (x,), x.rank, batch_axis=axis, shares_memory_with=x)
        if layer_class is nn.Flatten:
            require(x.rank > 1 and layer.start_dim == 1 and layer.end_dim in (-1, x.rank - 1))
            return self.add_step(program.flatten, (x,), 2, batch_axis=axis, shares_memory_with=x)
        if layer_class in program.IN_PLACE_LAYERS:
            layer_copies = copy.copy(layer), copy.copy(layer)
            layer_copies[0].inplace, layer_copies[1].inplace = False, True
            overwritten_value = x if layer.inplace else None
            return self.add_step(
                program.TwinLayers(*layer_copies),
                (x,),
                x.rank,
                batch_axis=axis,
                can_overwrite=True,
                overwritten_value=overwritten_value,
                operand_axes=keep_axes(range(x.rank)),
            )
        require(
            program.STATELESS_LAYERS.get(layer_class, -1) in (None, x.rank)
            and not getattr(layer, "return_indices", False)
        )
        # A pool computes an entry from its neighbours too; the other layers compute each entry on its own.
        separate_axes = range(0 if program.STATELESS_LAYERS[layer_class] else x.rank)
        return self.add_step(
            program.call_layer(layer), (x,), x.rank, batch_axis=axis, operand_axes=keep_axes(separate_axes)
        )

    def add_layer_norm(
        self, x: TracedValue, shape: Sequence[int], affine_values: Sequence[TracedValue], eps: float
    ) -> TracedValue:
        require(len(shape) < x.rank)
        return self.add_step(
            batch_layout.layer_norm(tuple(shape), eps), (self.in_batch_layout(x), *affine_values), x.rank,
            batch_axis=0, operand_axes=keep_axes(range(x.rank - len(shape))),
        )  # fmt: skip

    def add_convolution(self, node: fx.Node, layer: Any, x: TracedValue) -> TracedValue:
        require(layer.padding_mode == "zeros" and x.rank == layer.weight.dim())
        is_input_shared = x.kind == "shared" and layer.groups == 1
        x = x if is_input_shared else self.repeat_if_shared(x)
        weight = self.add_parameter(layer.weight, flatten_members, 0 if is_input_shared else layer.groups)
        bias = self.add_parameter(layer.bias, flatten_members)
        tensor_names = self.parameter_name(layer.weight), self.parameter_name(layer.bias)
        self.convolutions[node] = tensor_names, weight.place, bias.place
        return self.add_step(program.convolution(layer), (x, weight, bias), x.rank, result_kind="member")

    def add_batch_norm(self, node: fx.Node, layer: Any, x: TracedValue) -> TracedValue:
        ranks = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}[type(layer)]
        require(layer.running_mean is not None and layer.running_var is not None and x.rank in ranks)
        tensors = layer.running_mean, layer.running_var, layer.weight, layer.bias
        operands = [self.add_parameter(t, flatten_members) for t in tensors]
        (node_before,) = node.all_input_nodes
        if node_before in self.convolutions and len(node_before.users) == 1:
            tensor_names, kernel_place, bias_place = self.convolutions[node_before]
            mean_place, variance_place, weight_place, offset_place = (v.place for v in operands)
            places = mean_place, variance_place, weight_place, offset_place
            mean, variance, weight, offset = (self.parameter_name(t) for t in tensors)
            norm_names = mean, variance, weight, offset
            self.norms.append(FoldableNorm(kernel_place, bias_place, tensor_names, places, norm_names, layer.eps))
        return self.add_step(program.BatchNorm(layer.eps), (self.repeat_if_shared(x), *operands), x.rank)

    def parameter_name(self, tensor: Tensor | None) -> str:
        return "" if tensor is None else self.names[id(tensor)]

    def number_values(self, network_output: TracedValue) -> Program:
        """Number the values, and find the last step that reads each value; return the program."""
        traced_steps = move_selections(self.steps, network_output)
        start = len(self.parameters)
        values = [self.inputs, *[step.value for step in traced_steps]]
        for i, value in enumerate(values):
            value.place = start + i
        last_reader: dict[TracedValue, int] = {}
        for i, step in enumerate(traced_steps):
            last_reader.update({v.memory_owner: i for v in step.operands})
        last_reader[network_output.memory_owner] = len(traced_steps)
        steps = []
        for i, step in enumerate(traced_steps):
            if step.overwritten_value is not None:
                owner = step.overwritten_value.memory_owner
                require(owner.owns_memory and last_reader[owner] == i)
            can_be_overwritten = [
                v.is_activation
                and v.memory_owner.owns_memory
                and not v.shares_addresses
                and last_reader[v.memory_owner] == i
                for v in step.operands
            ]
            memory_owners = [v.memory_owner for v in step.operands]
            can_be_overwritten = [
                is_last_reader and memory_owners.count(owner) == 1
                for is_last_reader, owner in zip(can_be_overwritten, memory_owners, strict=True)
            ]
            freed_places = tuple(v.place for v in values[: i + 1] if last_reader.get(v.memory_owner) == i)
            operand_places = tuple(v.place for v in step.operands)
            steps.append(
                Step(
                    step.compute,
                    operand_places,
                    step.value.place,
                    can_be_overwritten.index(True) if step.can_overwrite and any(can_be_overwritten) else -1,
                    freed_places,
                )
            )
        return Program(
            tuple(self.parameters), tuple(steps), start + len(values), network_output.place, tuple(self.norms)
        )


def flatten_members(stack: Tensor) -> Tensor:
    """Merge the member axis of a stacked tensor with the next axis; return (member·axis, …)."""
    return stack.flatten(0, 1)


def flatten_nested(arguments: Any) -> Iterator[Any]:
    """Yield the elements of nested lists and tuples."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from flatten_nested(argument)
        else:
            yield argument


def are_constants(arguments: Any) -> bool:
    return all(isinstance(a, CONSTANT_TYPES) for a in flatten_nested(arguments))
