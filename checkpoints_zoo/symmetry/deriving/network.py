"""Derive the symmetry table of a collection, an architecture or a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import FormatError, SymmetryError, UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.networks.architectures import ARCHITECTURES, IMAGE_SHAPES
from checkpoints_zoo.networks.modules import build_architecture, check_module
from checkpoints_zoo.sources.finding import select_members
from checkpoints_zoo.symmetry.attention import derive_with_attention
from checkpoints_zoo.symmetry.deriving.structure import build_table
from checkpoints_zoo.symmetry.deriving.trace import trace_labels
from checkpoints_zoo.symmetry.table import Table


def symmetries(network: str | nn.Module, example: Tensor | tuple[Tensor, ...] | None = None) -> Table:
    """Derive the symmetries of a network from its trace; return the symmetry table.

    Networks with attention also have matrices and shifts in the table (see docs/transformers.md).

    Args:
        network: name of a collection or an architecture, or any module (used in eval mode).
        example: one batch of inputs, or a tuple of batches. Only shapes matter. The example is None if the network is
            given by a name.

    Raises:
        SymmetryError: the effect of an operation on permutations and scales is unknown. The error names the operation.
        UsageError: the example is missing, or the module cannot process it.
        CollectionNotFound: no collection or architecture has this name.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> print(symmetries(net, torch.zeros(1, 2)))
    Symmetries of Sequential
    <BLANKLINE>
    10^0.8 permutations in 1 group; 10^0.8 without those of streams
    3 exact scale factors, 0 approximate ones
    <BLANKLINE>
    group  units  kind  written by
    0      3      free  0.weight
    <BLANKLINE>
    scale  values  kind   opened by
    0      3       exact  0.weight
    <BLANKLINE>
    tensor    shape  moved by  scaled by
    0.weight  3 × 2  0         0
    0.bias    3      0         0
    2.weight  1 × 3  ·, 0      0^-1
    2.bias    1
    """
    if isinstance(network, str) and example is None:
        return _table_of_named_network(network)
    if not isinstance(network, nn.Module):
        expected = "a name without an example, or a module with one"
        raise UsageError("network", expected=expected, found=f"{network!r} with {type(example).__name__}"[:120])
    examples = example if isinstance(example, tuple) else (example,)
    if not examples or not all(isinstance(x, Tensor) for x in examples):
        raise UsageError("example", expected="a tensor, or a tuple of tensors", found=repr(example)[:80])
    return _table_of_module(network, tuple(x for x in examples if isinstance(x, Tensor)), type(network).__name__)


def _table_of_module(module: nn.Module, examples: tuple[Tensor, ...], network_name: str) -> Table:
    check_module(module, f"network {network_name}")
    states = module.state_dict(keep_vars=True)
    float_tensor = next((t for t in states.values() if t.is_floating_point()), torch.zeros(()))
    converted_examples = tuple(
        x.to(float_tensor.device, float_tensor.dtype if x.is_floating_point() else x.dtype) for x in examples
    )
    shapes = {n: tuple(t.shape) for n, t in states.items()}
    try:
        labels = trace_labels(module, converted_examples)
    except UsageError as error:  # A symmetry error is one too.
        try:
            table = derive_with_attention(network_name, module, shapes, converted_examples)
        except SymmetryError:
            raise
        except UsageError as wrong_example:
            # An error of the trace has a cause where torch.fx could not record the network at all.
            is_recorded = not isinstance(error, SymmetryError) or error.__cause__ is None
            raise error if is_recorded else wrong_example from None
        if table is None:
            raise
        return table
    return build_table(network_name, shapes, labels)


def _image_shape(collection: str, preprocessing: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the channels, height and width of the input images of a collection."""
    size, channels = preprocessing.get("size"), preprocessing.get("channels")
    shape = (channels, *size) if isinstance(size, list | tuple) else ()
    if len(shape) != 3 or not all(type(n) is int and 0 < n < 65_536 for n in shape):
        raise FormatError(
            f"preprocessing of {collection}",
            expected="channels, and a size of height and width",
            found=repr(preprocessing)[:80],
        )
    return shape


def _table_of_named_network(network_name: str) -> Table:
    if network_name in ARCHITECTURES:
        return _table_of_architecture(network_name, network_name, {}, IMAGE_SHAPES[network_name])
    listing = catalog.listing_of(network_name)
    if listing is not None and listing.stated is not None:
        # The catalog knows the network of members without a manifest: nothing is fetched.
        architecture, preprocessing = listing.architecture, listing.stated.preprocessing
        arguments: Mapping[str, Any] = {"classes": len(listing.stated.classes)}
    else:
        description = select_members(network_name).description
        architecture, preprocessing = description.architecture, description.preprocessing
        arguments = description.arguments
    return _table_of_architecture(network_name, architecture, arguments, _image_shape(network_name, preprocessing))


def _table_of_architecture(
    network_name: str, architecture: str, arguments: Mapping[str, Any], image_shape: tuple[int, ...]
) -> Table:
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"architecture {architecture!r} of {network_name}",
            expected=f"one that the package has ({', '.join(ARCHITECTURES)})",
            found="another",
            do="Give the module and an example of its inputs instead of the name",
        )
    with torch.device("meta"):
        module = build_architecture(architecture, **arguments)
    return _table_of_module(module, (torch.zeros(2, *image_shape),), network_name)
