"""What needs the weights themselves: symmetries, distances of two halves, alignment, mass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.formats.text import counted, in_bytes
from checkpoints_zoo.populations.alignment_table import Alignment, alignment
from checkpoints_zoo.populations.discrepancy import MMD, mmd, ns
from checkpoints_zoo.populations.mass import MinimalMass, minimal_mass
from checkpoints_zoo.symmetry import Table

MOST_MEMBERS, MOST_BYTES = 128, 2**31  # whose weights are read


@dataclass(frozen=True)
class Weighed:
    """What the weights of some members say.

    Args:
        members: the first ones, as many as are read.
        of: how many there are.
        table: of the symmetries; None where none can be derived.
        why: there is no table.
        before, after: members at even positions against those at odd ones, as they are and without symmetries; None for
            less than 4 members, and `after` without a table.
        aligned: to the first member; None for one member, and without a table.
        masses: None without a table.
    """

    members: Collection
    of: int
    table: Table | None
    why: str
    before: MMD | None
    after: MMD | None
    aligned: Alignment | None
    masses: MinimalMass | None


def weigh(members: Collection, device: str | torch.device, seed: int, say: Callable[[str], object]) -> Weighed:
    """Measure what weights say, of the first 128 members and no more than 2 GiB; return it.

    Args:
        members: whose.
        device: where to compute.
        seed: of the permutations of the test.
        say: told what is being done.

    Raises:
        DamagedError, LayoutError, NetworkError, SourceNotFound: weights that can't be read.
    """
    some = members[: max(1, min(MOST_MEMBERS, MOST_BYTES // members.member_nbytes))]
    say(f"{members.name}: weights of {counted(len(some), 'member')}, {in_bytes(some.nbytes)} …")
    table, why = None, ""
    try:
        table = some.symmetry_table
    except SymmetryError as error:
        why = str(error)
    before = after = None
    if len(some) >= 4 and table is None:
        before = mmd(some, device=device, seed=seed)
    elif len(some) >= 4:
        both = ns(some, device=device, seed=seed)
        before, after = both.mmd, both.ns
    aligned = alignment(some, to=some.ids[0]) if table is not None and len(some) > 1 else None
    masses = None if table is None else minimal_mass(some, device=device)
    return Weighed(some, len(members), table, why, before, after, aligned, masses)
