"""The mass of a collection's members beside the smallest that rescaling can give them."""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import SMALL_MEMBER, check_device, one_thread
from checkpoints_zoo.symmetry.canonical import mass
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

__all__ = ["MassAt", "MinimalMass", "along_training", "ends", "minimal_mass", "take"]

_BATCH = 1 << 28  # bytes of members that are read at once


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

    Where snapshots are kept, `zoo.load(name, snapshots=True)` gives the masses along training, and `along_training`
    gathers them by epoch.
    """
    on = check_device(device)
    module, table = members.skeleton(), members.symmetry_table
    tied = modules.tied(module)
    parts = []
    with one_thread(members.member_nbytes < SMALL_MEMBER and on.type == "cpu"):
        for _, params in members.batches(members.held_by(_BATCH), on):
            parts.append(mass.minimal_mass(table, params, biases=biases, hold=hold, approximate=approximate, same=tied))
    return mass.join(parts, members.ids, parts[0].held)


@dataclass(frozen=True)
class MassAt:
    """The mass of members after one epoch.

    Args:
        epoch: of the snapshots.
        members: how many there are.
        mass, minimum, excess: their means; the last in percent of the minimum.
        lowest, highest: the smallest and largest excess in percent.
        residual: the largest certificate of the minima.
    """

    epoch: int
    members: int
    mass: float
    minimum: float
    excess: float
    lowest: float
    highest: float
    residual: float


def along_training(found: MinimalMass, epochs: Sequence[int]) -> tuple[MassAt, ...]:
    """Gather snapshots by epoch; return how mass, minimum and excess change along training.

    Args:
        found: of snapshots.
        epochs: of each.

    Raises:
        UsageError: another number of epochs.
    """
    _check_epochs(found, epochs)
    result = []
    for epoch in sorted(set(epochs)):
        at = [i for i, e in enumerate(epochs) if e == epoch]
        excess = found.excess[at]
        mass, minimum, mean = (float(values[at].mean()) for values in (found.before, found.after, found.excess))
        bounds = float(excess.min()), float(excess.max())
        result.append(MassAt(int(epoch), len(at), mass, minimum, mean, *bounds, float(found.residual[at].max())))
    return tuple(result)


def ends(found: MinimalMass, epochs: Sequence[int]) -> list[int]:
    """Find each member's last snapshot; return their positions.

    Raises:
        UsageError: another number of epochs.
    """
    _check_epochs(found, epochs)
    last: dict[int, int] = {}
    for i, (member, epoch) in enumerate(zip(found.ids, epochs, strict=True)):
        if member not in last or epoch > epochs[last[member]]:
            last[member] = i
    return sorted(last.values())


def take(found: MinimalMass, positions: Sequence[int]) -> MinimalMass:
    """Return the masses of some members or snapshots."""
    at = list(positions)
    return dataclasses.replace(
        found,
        ids=tuple(found.ids[i] for i in at),
        before=found.before[at],
        after=found.after[at],
        unbounded=found.unbounded[at],
        residual=found.residual[at],
        converged=found.converged[at],
        sweeps=found.sweeps[at],
        history=found.history[:, at],
        scales={name: values[at] for name, values in found.scales.items()},
        dead=tuple(found.dead[i] for i in at),
    )


def _check_epochs(found: MinimalMass, epochs: Sequence[int]) -> None:
    if len(epochs) != len(found):
        raise UsageError("epochs", expected=f"{len(found)}, one of each snapshot", found=str(len(epochs)))
