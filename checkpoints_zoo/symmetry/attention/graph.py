"""The aten graph of a module, recorded by `torch.export`, with the names of its parameters and its constants."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from checkpoints_zoo.errors import SymmetryError, UsageError


@dataclass
class Graph:
    """A recorded network.

    Args:
        nodes: the operations, in order.
        parameters: placeholder -> name of the parameter.
        constants: placeholder -> a buffer or a constant tensor, with its value.
    """

    nodes: list[fx.Node]
    parameters: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, Tensor] = field(default_factory=dict)


def record(module: nn.Module, example: tuple[Tensor, ...], keywords: Mapping[str, Any] | None = None) -> Graph:
    """Record the operations that a module runs on an example in eval mode.

    Args:
        module: the module. A copy of it is recorded.
        example: the inputs, whose values do not matter.
        keywords: inputs by keyword.

    Raises:
        SymmetryError: the operations depend on the values of the inputs.
        UsageError: the module cannot process the example.
    """
    network = copy_to_run(module)
    example = tuple(torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x for x in example)
    with torch.no_grad():
        try:
            network(*example, **(keywords or {}))
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise UsageError(
                "example",
                expected=f"inputs that {type(module).__name__} takes",
                found=str(error).partition("\n")[0],
                do="Give one batch of inputs as `example`",
            ) from error
        try:
            with _without_fused_layers():
                program = torch.export.export(network, example, dict(keywords or {}), strict=False)
        except Exception as error:  # torch.export raises errors of many kinds, some of them private.
            raise SymmetryError(
                f"recording {type(module).__name__}",
                expected="operations that are the same for all inputs",
                found=str(error).partition("\n")[0][:300],
                do="Give a module that torch.export can record, without control flow that depends on the input",
            ) from error
    tensors = {**program.state_dict, **program.constants}
    states = dict(network.named_parameters(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(states.items())}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    parameters, constants = {}, {}
    for node in program.graph.nodes:
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if spec is None or spec.kind is InputKind.USER_INPUT:
            continue
        if spec.kind is InputKind.PARAMETER:
            parameters[node] = first[id(states[str(spec.target)])]
        else:
            constants[node] = tensors[str(spec.target)]
    return Graph([node for node in program.graph.nodes if not _is_check(node)], parameters, constants)


def check_buffers(module: nn.Module) -> None:
    """Check that the buffers of a network have values: masks, slopes and positions decide on its symmetries.

    Raises:
        SymmetryError: a buffer has no memory.
    """
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise SymmetryError(
                f"buffer {name!r} of {type(module).__name__}", expected="values, which decide on its symmetries",
                found="none, on the device meta", do="Build the network with memory, its parameters apart",
            )  # fmt: skip


def has_attention(graph: Graph) -> bool:
    """Return whether a network has a softmax between two products of activations, or a fused attention."""
    names = {str(node.target).partition(".default")[0] for node in graph.nodes}
    return any("scaled_dot_product_attention" in name or "softmax" in name for name in names)


def _is_check(node: fx.Node) -> bool:
    """Return whether an operation only checks a dtype; such an operation reads no result for others."""
    if "_assert_tensor_metadata" not in str(node.target):
        return False
    for argument in node.all_input_nodes:
        argument.users.pop(node, None)
    return True


def copy_to_run(module: nn.Module) -> nn.Module:
    """Copy a network, in eval mode, with zeros for parameters and buffers without memory (`check_buffers` refuses such
    buffers), and without a cache of keys and values as an output."""
    network = copy.deepcopy(module).eval()
    config = getattr(network, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
    zeros: dict[int, Any] = {}
    for layer in network.modules():
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in zeros:
                        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
                        zeros[id(tensor)] = nn.Parameter(made) if isinstance(tensor, nn.Parameter) else made
                    tensors[name] = zeros[id(tensor)]
    return network


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """While the `with` block runs, let attention layers of torch run their single operations."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
