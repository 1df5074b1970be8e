"""Frames: the coordinates of a traced network's activations, and the matrices that may act on them.

A coordinate is an entry of a feature axis, such as one unit of a layer's output. A matrix symmetry maps the coordinates
of an activation by a matrix, and the weights that read the activation by its inverse. Coordinates that have to move
alike share one frame. What the operations of the network ask of a frame restricts its matrices: a norm asks for
orthogonal matrices, an activation for permutations.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntFlag

import torch
from torch import Tensor

FIXED = -1  # An entry that no symmetry moves.
ZERO = -2  # An entry that is zero, and that fits every frame.


class Limit(IntFlag):
    """What an operation asks of the matrices that act on a frame."""

    NONE = 0
    NORM = 1  # The matrices keep the Euclidean norm.
    MEAN = 2  # The matrices keep the vector of ones.
    UNITS = 4  # The matrices move and scale single units.
    POSITIVE = 8  # The matrices scale by positive numbers.
    ROTATION = 16  # The matrices commute with the rotations of a pair of coordinates.
    PINNED = 32  # Only the identity acts.


ONE = Limit.UNITS | Limit.NORM | Limit.POSITIVE  # Permutations alone.


class Frames:
    """All coordinates of a network, joined into frames (union-find), with the limits of each frame.

    A coordinate has one parity against its frame: an even one is mapped by the matrix A of the frame, an odd one by the
    inverse transpose of A.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._frame: list[int] = []
        self._parity: list[int] = []
        self._slot: list[int] = []  # Coordinates of one slot move together under permutations.
        self._place: list[int] = []  # Coordinates of one place are one entry of one activation.
        self._limit: list[Limit] = []
        self.parts: list[list[Tensor]] = []  # One entry a claim: the parts into which the claim divides coordinates.
        self.rotations: list[Tensor] = []  # Pairs of coordinates that positions turn.
        self.source: list[int] = []  # The number of the call of `new` that made a coordinate.

    def new(self, count: int, name: str) -> Tensor:
        """Return `count` new coordinates, (count), that a layer `name` opens."""
        first, source = len(self._frame), len(self.names)
        self.names.append(name)
        self._frame += range(first, first + count)
        self._slot += range(first, first + count)
        self._place += range(first, first + count)
        self._parity += [0] * count
        self._limit += [Limit.NONE] * count
        self.source += [source] * count
        coordinates = torch.arange(first, first + count)
        self.claim([coordinates])
        return coordinates

    def frame(self, coordinate: int) -> tuple[int, int]:
        """Return the frame of a coordinate, and the coordinate's parity."""
        path, parity = [], 0
        while self._frame[coordinate] != coordinate:
            path.append(coordinate)
            coordinate = self._frame[coordinate]
        for entry in reversed(path):
            parity ^= self._parity[entry]
            self._frame[entry], self._parity[entry] = coordinate, parity
        return coordinate, parity

    def slot(self, coordinate: int) -> int:
        """Return the slot of a coordinate: the coordinates of one slot move together under permutations."""
        return _root(self._slot, coordinate)

    def place(self, coordinate: int) -> int:
        """Return the place of a coordinate: the coordinates of one place are one entry of one activation."""
        return _root(self._place, coordinate)

    def limit_of(self, coordinate: int) -> Limit:
        """Return the limits of the frame of a coordinate."""
        return self._limit[self.frame(coordinate)[0]]

    def limit(self, coordinates: Tensor, limit: Limit) -> None:
        """Add limits to the frames of coordinates."""
        for coordinate in unique(coordinates):
            self._limit[self.frame(coordinate)[0]] |= limit

    def claim(self, parts: Iterable[Tensor]) -> None:
        """Divide coordinates into parts; matrices mix coordinates of one part alone."""
        self.parts.append([part[part >= 0] for part in parts])

    def claim_units(self, coordinates: Tensor, limit: Limit) -> None:
        """Let only permutations and scales act on the frames of coordinates."""
        self.limit(coordinates, limit | Limit.UNITS)
        self.parts.append([torch.tensor([coordinate]) for coordinate in unique(coordinates)])

    def tie(self, first: Tensor, second: Tensor) -> None:
        """Let coordinates move together under permutations; their scales may differ."""
        for a, b in _pairs(first, second):
            if min(a, b) >= 0:
                _unite(self._slot, a, b)
            elif ZERO not in (a, b):
                self._limit[self.frame(max(a, b))[0]] |= Limit.PINNED

    def join(self, first: Tensor, second: Tensor, dual: bool = False, place: bool = True) -> None:
        """Let coordinates share one frame.

        Args:
            first: coordinates; FIXED pins the coordinate beside it, and ZERO fits all.
            second: coordinates of the same shape.
            dual: whether the inverse transpose of the matrix acts on the second ones.
            place: whether they are one entry of one activation.
        """
        for a, b in _pairs(first, second):
            if min(a, b) >= 0:
                self._join(a, b, int(dual))
                if place:
                    _unite(self._place, a, b)
            elif ZERO not in (a, b):
                self._limit[self.frame(max(a, b))[0]] |= Limit.PINNED

    def join_places(self, first: Tensor, second: Tensor) -> None:
        """Let coordinates be one entry of one activation, in frames of their own."""
        for a, b in _pairs(first, second):
            _unite(self._place, a, b)

    def _join(self, a: int, b: int, dual: int) -> None:
        _unite(self._slot, a, b)
        (frame, parity), (other, other_parity) = self.frame(a), self.frame(b)
        dual ^= parity ^ other_parity
        if frame == other:
            if dual:
                self._limit[frame] |= Limit.NORM  # A matrix that equals its own inverse transpose is orthogonal.
            return
        kept, replaced = min(frame, other), max(frame, other)
        self._frame[replaced], self._parity[replaced] = kept, dual
        self._limit[kept] |= self._limit[replaced]


def _root(parents: list[int], entry: int) -> int:
    while parents[entry] != entry:
        parents[entry] = parents[parents[entry]]
        entry = parents[entry]
    return entry


def _unite(parents: list[int], a: int, b: int) -> None:
    a, b = _root(parents, a), _root(parents, b)
    parents[max(a, b)] = min(a, b)


def unique(coordinates: Tensor) -> list[int]:
    """Return the coordinates of a tensor, each once, in rising order."""
    found: list[int] = coordinates.flatten().unique().tolist()
    return [coordinate for coordinate in found if coordinate >= 0]


def _pairs(first: Tensor, second: Tensor) -> list[tuple[int, int]]:
    """Return the pairs of entries of two tensors with at least one coordinate, each once."""
    if first is second or first.numel() == 0:
        return []
    first, second = torch.broadcast_tensors(first, second)
    for axis in range(first.ndim):
        if first.stride(axis) == second.stride(axis) == 0:  # Both repeat their entries.
            first, second = first.narrow(axis, 0, 1), second.narrow(axis, 0, 1)
    stacked = torch.stack([first, second])
    pairs = stacked.flatten(1).unique(dim=1).T.tolist()
    return [(a, b) for a, b in pairs if max(a, b) >= 0 and a != b]
