"""Symmetries of networks with attention, whose groups are continuous: heads, matrices inside them, shifts of biases."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from torch import Tensor, nn

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.attention.confirming import confirm
from checkpoints_zoo.symmetry.attention.graph import check_buffers, has_attention, record
from checkpoints_zoo.symmetry.attention.rules import RULES
from checkpoints_zoo.symmetry.attention.shifts import find_shifts
from checkpoints_zoo.symmetry.attention.structure import build_table
from checkpoints_zoo.symmetry.attention.trace import Trace
from checkpoints_zoo.symmetry.table import Axes, Table


def derive_with_attention(
    network: str, module: nn.Module, shapes: dict[str, tuple[int, ...]], example: tuple[Tensor, ...]
) -> Table | None:
    """Derive the symmetry table of a network with attention; return None if the network has no attention.

    Args:
        network: name of the network.
        module: the network.
        shapes: shapes of all tensors of the state dict, by name.
        example: one batch of inputs. Only shapes matter.

    Raises:
        SymmetryError: the effect of an operation is unknown. The error names the operation.
        UsageError: the network cannot process the example.
    """
    graph = None
    with contextlib.suppress(SymmetryError):
        graph = record(module, example)
    if graph is None or not has_attention(graph):
        return None
    check_buffers(module)
    parameter_shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    trace = Trace(graph, parameter_shapes, RULES)
    table = build_table(network, trace)
    rest = {name: table.tensors.get(name, Axes(shape, "other", 0.0, (), ())) for name, shape in shapes.items()}
    return confirm(module, example, replace(table, tensors=rest, shifts=find_shifts(trace)))
