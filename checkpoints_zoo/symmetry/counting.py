"""How many symmetries a table has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints_zoo.symmetry.table import Table


def log10_permutations(table: Table, streams: bool) -> float:
    """Add up log10 of the groups' orders; return the sum.

    A group of n units in b blocks has ((n / b)!)^b permutations inside the blocks; those of the blocks are another
    group's. (A wreath product.)

    Args:
        streams: whether groups of residual streams count.
    """
    counted = [g for g in table.groups.values() if streams or not g.stream]
    return sum(g.blocks * math.lgamma(g.size // g.blocks + 1) for g in counted) / math.log(10)


def scaling_freedom(table: Table, exact: bool) -> int:
    """Count the free scale factors that are exact, or those that are not; return how many."""
    return sum(scale.size for scale in table.scales.values() if scale.exact is exact)
