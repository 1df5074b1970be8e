"""Members for posteriors, versions 0.1: their parameters stacked, as states of parallel chains, and back.

posteriors' functions take the parameters of one chain; `torch.vmap` runs them for all. Parameters are TensorDicts here:
posteriors 0.1.3 keeps a plain dict as no tensor of its state, and under vmap all chains but one would be lost.

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
from checkpoints_zoo.interop.batches import ensemble_of
from checkpoints_zoo.interop.optional_packages import needed
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.ensemble import Ensemble

REQUIREMENT = "posteriors>=0.1,<0.2"


def stacked(members: Collection | Ensemble) -> tuple[Any, Any]:
    """Stack the members' tensors; return (parameters, buffers), each a TensorDict of batch size (member,).

    Parameters are what a posterior is over, buffers what stays: running statistics. They are those of
    `torch.func.stack_module_state`, counters aside, and share an ensemble's memory.

    Args:
        members: a collection (in float32 on the CPU), or an ensemble that is held in memory.

    Raises:
        UsageError: no posteriors; an ensemble that is read in chunks.
        DamagedError, TooLargeError: as `Collection.ensemble`.
    """
    kind = needed("tensordict", REQUIREMENT).TensorDict
    ensemble = ensemble_of(members)
    own, rest = _split(ensemble[0], ensemble.stacked)
    size = [len(ensemble)]
    return kind(own, batch_size=size), kind(rest, batch_size=size)


def _split(module: nn.Module, stack: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part a stack into parameters and buffers, each under its last name."""
    parameters, tied = {n for n, _ in module.named_parameters(remove_duplicate=False)}, modules.superseded_names(module)
    kept = {n: t.detach() for n, t in stack.items() if n not in tied}
    return {n: t for n, t in kept.items() if n in parameters}, {n: t for n, t in kept.items() if n not in parameters}


def forward(members: Collection | Ensemble) -> Callable[[Any, Any, Tensor], Tensor]:
    """Make the members' network a function of one member's (parameters, buffers, inputs); return it.

    Its result is the logits (batch, class); it composes with torch.vmap, torch.func.grad and the like.

    Args:
        members: any selection of the collection, or an ensemble.
    """
    one = members[:1] if isinstance(members, Collection) else ensemble_of(members)  # to read a single member
    module = ensemble_of(one)[0].requires_grad_(False)

    def run(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(module, {**parameters, **buffers}, (inputs,))
        return logits

    return run


def state(members: Collection | Ensemble, transform: Any) -> Any:
    """Start one chain at each member; return the stacked state of them all, of batch size (member,).

    Advance it with `torch.vmap(transform.update, in_dims=(0, None), randomness="different")(state, batch)`, or with
    in_dims (0, 0) where each member has a batch of its own. `state[i]` is one chain's state. Its parameters share an
    ensemble's memory, which updates in place would change.

    Args:
        members: as of `stacked`.
        transform: what `build` of a posteriors algorithm returned: sghmc, sgld, baoa (its sgnht and
            sglrw take no TensorDict).

    Raises:
        UsageError, DamagedError, TooLargeError: as `stacked`.
    """
    parameters, _ = stacked(members)
    return torch.vmap(transform.init, randomness="different")(parameters)


def ensemble(drawn: Any, members: Collection | Ensemble) -> Ensemble:
    """Make stacked parameters an ensemble, with the buffers of the members that the chains started at; return it.

    Nothing is copied: the ensemble has the state's memory.

    Args:
        drawn: a stacked state, or its parameters: any mapping of name -> (member, …).
        members: as many, in the same order.

    Raises:
        LayoutError: names or shapes that are not the members'.
        UsageError: as `stacked`; no parameters in a state.
    """
    found = getattr(drawn, "params", drawn)
    if not hasattr(found, "keys"):
        expected = "a stacked state of posteriors, or its parameters by name"
        raise UsageError("drawn parameters", expected=expected, found=type(drawn).__name__)
    first = ensemble_of(members)
    module = first[0]
    own, rest = _split(module, first.stacked)
    for name in sorted({*own, *found.keys()}):
        wanted = tuple(own[name].shape) if name in own else "none"
        shape = tuple(found[name].shape) if name in found.keys() else "none"  # noqa: SIM118 (no dict)
        if wanted != shape:
            raise LayoutError(f"drawn parameters {name!r}", expected=str(wanted), found=str(shape), tensor=name)
    new = {**rest, **{name: found[name].detach() for name in own}}
    new |= {name: new[last] for name, last in modules.last_names(module).items() if name in first.stacked}
    return Ensemble(module.requires_grad_(False), new, first.ids)
