"""The change of a network's outputs under approximate scales, which norms undo only up to their eps."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.applying import rescale
from checkpoints_zoo.symmetry.table import Table


def approximate_changes(
    table: Table, weights: Mapping[str, Tensor], module: nn.Module, inputs: Tensor, factor: float = 2.0
) -> dict[str, float]:
    """Measure how far each approximate scale changes the outputs; return name of the scale -> relative change.

    A norm without running statistics divides by sqrt(variance + eps). If the input of this norm is multiplied by s, the
    output is multiplied by sqrt((variance + eps) / (variance + eps / s²)), which is close to 1 only if eps is small
    against the variance. The change of the outputs therefore depends on the weights and inputs; small weights before
    the norm make the change large.

    Args:
        table: symmetry table of the network.
        weights: state dict of one member.
        module: the network. A copy of the network runs in eval mode.
        inputs: batch of inputs.
        factor: number by which all units of one scale are multiplied, one scale at a time; 1 / factor is tried as well.

    Returns:
        For each scale that is not exact, the largest change of an output, divided by the largest magnitude of all
        outputs. Exact scales are left out.

    Raises:
        UsageError: the factor is not positive and finite.

    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    >>> images = torch.rand(4, 1, 8, 8)
    >>> changes = approximate_changes(symmetries(net, images), net.state_dict(), net, images)
    >>> list(changes), changes["0"] < 0.01
    (['0'], True)
    """
    if not 0 < factor < float("inf"):
        raise UsageError("factor", expected="a positive number", found=f"{factor:g}")
    network, state = copy.deepcopy(module).eval(), dict(weights)
    with torch.no_grad():
        before: Tensor = functional_call(network, state, (inputs,))
        largest = before.abs().max().item() or 1.0
        changes = {}
        for scale in (scale for scale in table.scales.values() if not scale.exact):
            differences = []
            for value in (factor, 1 / factor):
                unit_factors = torch.full((scale.size,), value, dtype=before.dtype, device=before.device)
                after: Tensor = functional_call(network, rescale(table, state, {scale.name: unit_factors}), (inputs,))
                differences.append((after - before).abs().max().item() / largest)
            changes[scale.name] = max(differences)
    return changes
