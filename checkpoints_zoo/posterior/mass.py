"""The mass of a collection's members beside the smallest that rescaling can give them."""

from __future__ import annotations

from collections import abc

import torch
from torch import nn

from checkpoints_zoo.canonical import mass
from checkpoints_zoo.canonical.mass import MinimalMass
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.device import one_thread
from checkpoints_zoo.symmetry import Table, symmetries

__all__ = ["MinimalMass", "minimal_mass"]

_BATCH = 1 << 28  # bytes of members that are read at once
_SMALL = 1 << 22  # bytes of a member whose operations are too small for a second thread


def minimal_mass(
    members: Collection,
    *,
    biases: bool = False,
    hold: abc.Collection[str] = (),
    approximate: bool = False,
    device: str | torch.device = "cpu",
) -> MinimalMass:
    """Minimise each member's sum of squared weights over all scales that leave its function as it is; return both.

    Args:
        members: of one architecture; with snapshots, each is a member of its own.
        biases, hold, approximate: as in `canonical.mass.minimal_mass`.
        device: where to compute.

    Raises:
        SymmetryError: an architecture whose symmetries can't be derived.
        SelectionError, DamagedError, LayoutError, NetworkError: members that are none, or can't be read.
        UsageError: no such scale or device.

    >>> import checkpoints_zoo as zoo
    >>> found = zoo.minimal_mass(zoo.load("convnet-digits", n=4))
    >>> bool((found.excess > 5).all()), bool((found.residual < 1e-3).all())
    (True, True)
    """
    module, table = members.skeleton(), _table(members)
    states = module.state_dict(keep_vars=True)
    # Of names tied to one tensor the last counts, as in an ensemble.
    last = set({id(tensor): name for name, tensor in states.items()}.values())
    each = members.nbytes // len(members)
    parts = []
    with one_thread(each < _SMALL and torch.device(device).type == "cpu"):
        for _, params in members.batches(max(1, min(len(members), _BATCH // max(1, each))), device):
            tied = set(states) - last
            parts.append(mass.minimal_mass(table, params, biases=biases, hold=hold, approximate=approximate, same=tied))
    return mass.join(parts, members.ids, parts[0].held)


def _table(members: Collection) -> Table:
    preprocess = members.preprocess
    module: nn.Module = members.skeleton()
    return symmetries(module, torch.zeros(2, preprocess.channels, *preprocess.size))
