"""Modules that take a member's tensors: built without memory of their own, checked against the layout."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, is_counter, is_statistic
from checkpoints_zoo.networks.tensors import check_tensors

Build = Callable[[], nn.Module]


def skeleton(build: Build, layout: Layout, name: str) -> nn.Module:
    """Build a module in eval mode whose parameters have shapes but no memory; return it.

    Args:
        build: builds the architecture.
        layout: whose tensors it must take.
        name: of the collection, for errors.

    Raises:
        LayoutError: the module's tensors are not the layout's, by name and shape.
        UsageError: `build` is no function, or returns no module.
    """
    module = built(build, name)
    kept = module.state_dict(keep_vars=True)
    if loose(module):  # buffers outside the state dict (position tables and the like) need their values
        module = build()
    try:
        check_tensors({n: tuple(t.shape) for n, t in kept.items()}, layout, f"architecture for {name}")
    except LayoutError as error:
        error.do = "Give the architecture that these members were trained with"
        raise
    return module.eval().requires_grad_(False)


def built(build: Build, name: str) -> nn.Module:
    """Build a module, without memory for its parameters where that can be; return it.

    Args:
        build: builds the architecture.
        name: of the collection, for errors.

    Raises:
        UsageError: `build` is no function, or returns no module.
    """
    module: object = build
    if not isinstance(module, nn.Module) and callable(module):
        try:
            with torch.device("meta"):
                module = build()
        except RuntimeError:  # it looks at values while it builds
            module = build()
    if not isinstance(module, nn.Module) or module is build:
        raise UsageError(
            f"architecture for {name}",
            expected="a function that returns a torch.nn.Module",
            found=repr(module).partition("\n")[0][:80],
        )
    return module


def loose(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers that are not in its state dict."""
    kept = module.state_dict(keep_vars=True)
    return {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if n not in kept}


def norm_tensors(names: Iterable[str]) -> set[str]:
    """Name the tensors of layers with running statistics: these compute in float32 or wider, whatever the rest does."""
    names = list(names)
    layers = {name.rpartition(".")[0] for name in names if is_statistic(name)}
    return {name for name in names if name.rpartition(".")[0] in layers}


def input_dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype that a module of these tensors takes as inputs: that of its weights, norms aside."""
    norms = norm_tensors(state)
    floats = [n for n, t in state.items() if t.is_floating_point()]
    return state[next((n for n in floats if n not in norms), floats[0])].dtype if floats else torch.float32


def settled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Widen half-precision tensors of layers with running statistics to float32; return all tensors."""
    norms = norm_tensors(state)
    narrow = (torch.float16, torch.bfloat16)
    return {n: t.float() if n in norms and t.dtype in narrow else t for n, t in state.items()}


def filled(module: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Copy a skeleton around a member's tensors, which are not copied; return it as a module like any other.

    Args:
        module: from `skeleton`.
        state: of one member, its names and shapes checked already; counters are set to zero.
        device: where the rest of the module goes.
    """
    state, memo = settled(state), {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_counter(name):
            memo[id(tensor)] = torch.zeros((), dtype=torch.int64, device=device)
        else:
            memo[id(tensor)] = nn.Parameter(state[name]) if isinstance(tensor, nn.Parameter) else state[name]
    kind = input_dtype(state)
    for tensor in loose(module).values():
        own = tensor.detach().clone().to(device, kind if tensor.is_floating_point() else tensor.dtype)
        memo[id(tensor)] = nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own
    filled = _copied(module, memo)
    return filled if device.type == "cpu" else filled.to(device)


_PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    type(torch.relu),
    type(skeleton),
)


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Do what copy.deepcopy does, in a fifth of its time: what the memo holds takes the place of what it stands for."""
    if id(module) in memo or hasattr(module, "__deepcopy__"):
        found: nn.Module = copy.deepcopy(module, memo)
        return found
    twin = memo[id(module)] = object.__new__(type(module))
    for name, value in module.__dict__.items():
        if name == "_modules":
            value = {key: child if child is None else _copied(child, memo) for key, child in value.items()}
        elif name in ("_parameters", "_buffers"):
            value = {key: memo[id(t)] if id(t) in memo else copy.deepcopy(t, memo) for key, t in value.items()}
        elif type(value) in (dict, OrderedDict) and not value:
            value = type(value)()
        elif not (isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(v, _PLAIN) for v in value))):
            value = copy.deepcopy(value, memo)
        twin.__dict__[name] = value
    return twin


def tied(module: nn.Module) -> set[str]:
    """Return the names of a state dict that stand for a tensor which a later name stands for too.

    Of names tied to one tensor the last counts, as in a strict load.
    """
    states = module.state_dict(keep_vars=True)
    return set(states) - set({id(tensor): name for name, tensor in states.items()}.values())
