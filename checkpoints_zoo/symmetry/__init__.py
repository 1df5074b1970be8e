"""Symmetries of networks, derived from the traced module: permutations, scales, signs, matrices, shifts.

`deriving` derives the symmetry table of any module. `canonical` removes symmetries from weights. The functions here
draw, compose, invert and apply elements of the symmetry group.

>>> table = symmetries("convnet-digits")
>>> [group.size for group in table.groups.values()], table.scaling_freedom
([8, 16, 32], 56)
"""

from checkpoints_zoo.symmetry.applying import apply, flip, permute, rescale
from checkpoints_zoo.symmetry.approximate import approximate_changes
from checkpoints_zoo.symmetry.composing import compose, inverse
from checkpoints_zoo.symmetry.deriving.network import symmetries
from checkpoints_zoo.symmetry.elements import Element, random_element, random_transpositions
from checkpoints_zoo.symmetry.matrices import turn
from checkpoints_zoo.symmetry.shifting import random_shifts, shift
from checkpoints_zoo.symmetry.table import Axes, Group, Matrix, Move, Power, Scale, Shift, Sign, Table

__all__ = [
    "Axes", "Element", "Group", "Matrix", "Move", "Power", "Scale", "Shift", "Sign", "Table", "apply",
    "approximate_changes", "compose", "flip", "inverse", "permute", "random_element", "random_shifts",
    "random_transpositions", "rescale", "shift", "symmetries", "turn",
]  # fmt: skip
