"""Members for posteriors, version 0.1: stacked parameters as states of parallel chains, and chains as an ensemble.

posteriors' functions take the parameters of one chain; `torch.vmap` runs them for all chains. Parameters are
TensorDicts: posteriors 0.1.3 does not treat a plain dict in a state as tensors, so vmap would lose all chains but one.

Axes: every tensor is (member, …).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.interop.batches import as_ensemble
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.ensemble import Ensemble

REQUIREMENT = "posteriors>=0.1,<0.2"


def stacked(members: Collection | Ensemble) -> tuple[Any, Any]:
    """Stack the members' tensors; return (parameters, buffers), each a TensorDict of batch size (member,).

    Chains sample the parameters; buffers, such as running statistics, stay constant. Parameters and buffers equal those
    of `torch.func.stack_module_state`, without counters, and share the memory of an ensemble.

    Args:
        members: collection (in float32 on the CPU), or an ensemble in memory.

    Raises:
        UsageError: posteriors is not installed; the ensemble is read in chunks.
        DamagedError, TooLargeError: the same cases as in `Collection.ensemble`.
    """
    tensordict_class = import_optional("tensordict", REQUIREMENT).TensorDict
    ensemble = as_ensemble(members)
    parameters, buffers = _split_stack(ensemble[0], ensemble.stacked)
    size = [len(ensemble)]
    return tensordict_class(parameters, batch_size=size), tensordict_class(buffers, batch_size=size)


def _split_stack(module: nn.Module, stack: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a stack into parameters and buffers; tied tensors appear under their last name only."""
    parameters, tied = {n for n, _ in module.named_parameters(remove_duplicate=False)}, modules.superseded_names(module)
    untied_tensors = {n: t.detach() for n, t in stack.items() if n not in tied}
    return {n: t for n, t in untied_tensors.items() if n in parameters}, {
        n: t for n, t in untied_tensors.items() if n not in parameters
    }


def forward(members: Collection | Ensemble) -> Callable[[Any, Any, Tensor], Tensor]:
    """Return the members' network as a function of one member's (parameters, buffers, inputs).

    The function returns logits (batch, class); it works with torch.vmap, torch.func.grad and similar transforms.

    Args:
        members: any members of the collection, or an ensemble.
    """
    # The module needs only the structure, so only the first member is read.
    first_member = members[:1] if isinstance(members, Collection) else as_ensemble(members)

    module = as_ensemble(first_member)[0].requires_grad_(False)

    def run_network(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, {**parameters, **buffers}, (inputs,))
        return logits

    return run_network


def state(members: Collection | Ensemble, transform: Any) -> Any:
    """Start a chain at each member; return the stacked state of all chains, of batch size (member,).

    Advance the chains with `torch.vmap(transform.update, in_dims=(0, None), randomness="different")(state, batch)`, or
    with in_dims (0, 0) if each member has its own batch. `state[i]` is the state of one chain. The parameters share the
    memory of an ensemble: updates in place would change it.

    Args:
        members: collection or ensemble, as in `stacked`.
        transform: the result of `build` of a posteriors algorithm: sghmc, sgld or baoa (sgnht and sglrw take no
            TensorDict).

    Raises:
        UsageError, DamagedError, TooLargeError: the same cases as in `stacked`.
    """
    parameters, _ = stacked(members)
    return torch.vmap(transform.init, randomness="different")(parameters)


def ensemble(drawn: Any, members: Collection | Ensemble) -> Ensemble:
    """Return the ensemble of stacked parameters, with the buffers of the members at which the chains started.

    Nothing is copied: the ensemble shares the memory of the state.

    Args:
        drawn: stacked state of the chains, or its parameters: a mapping name -> tensor (member, …).
        members: members at which the chains started, in the same order.

    Raises:
        LayoutError: names or shapes differ from the members'.
        UsageError: the same cases as in `stacked`; or the state has no parameters.
    """
    parameters = getattr(drawn, "params", drawn)
    if not hasattr(parameters, "keys"):
        expected = "a stacked state of posteriors, or its parameters by name"
        raise UsageError("drawn parameters", expected=expected, found=type(drawn).__name__)
    start_members = as_ensemble(members)
    module = start_members[0]
    expected_parameters, buffers = _split_stack(module, start_members.stacked)
    for name in sorted({*expected_parameters, *parameters.keys()}):
        expected_stacked_shape = tuple(expected_parameters[name].shape) if name in expected_parameters else "none"
        shape = tuple(parameters[name].shape) if name in parameters.keys() else "none"  # noqa: SIM118 (not a dict)
        if expected_stacked_shape != shape:
            raise LayoutError(
                f"drawn parameters {name!r}", expected=str(expected_stacked_shape), found=str(shape), tensor=name
            )
    tensors = {**buffers, **{name: parameters[name].detach() for name in expected_parameters}}
    tensors |= {
        name: tensors[last_name]
        for name, last_name in modules.last_names(module).items()
        if name in start_members.stacked
    }
    return Ensemble(module.requires_grad_(False), tensors, start_members.ids)
