"""How many symmetries a table has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints_zoo.symmetry.table import Group, Table


def log10_permutations(table: Table, streams: bool) -> float:
    """Add up log10 of the groups' orders; return the sum.

    Args:
        streams: whether groups of residual streams count.
    """
    return sum(log10_order(g) for g in table.groups.values() if streams or not g.stream)


def log10_order(group: Group) -> float:
    """Return log10 of how many permutations a group has.

    A group of n units in b blocks has ((n / b)!)^b permutations inside the blocks; those of the blocks are another
    group's. (A wreath product.)
    """
    return group.blocks * math.lgamma(group.size // group.blocks + 1) / math.log(10)


def scaling_freedom(table: Table, exact: bool) -> int:
    """Count the free scale factors that are exact, or those that are not; return how many."""
    return sum(scale.size for scale in table.scales.values() if scale.exact is exact)
