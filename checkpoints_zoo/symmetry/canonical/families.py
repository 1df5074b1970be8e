"""Visits of groups: the best permutation of one, with the groups whose blocks it moves, while all others stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations as orders

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoints_zoo.symmetry.canonical.assignment import Matrix, assign
from checkpoints_zoo.symmetry.canonical.products import Permutations, Products, Reference, Term, split
from checkpoints_zoo.symmetry.table import Table

_ALL_ORDERS = 3  # units in a block up to which all their orders are tried at once

Inside = dict[str, NDArray[np.int64]]  # group -> (new unit u of the mover, old unit v, place): what v's block becomes


class Families:
    """Which groups move the blocks of which.

    Args:
        table: of the network.
    """

    def __init__(self, table: Table) -> None:
        self.groups = table.groups
        self.children = {g: [c.name for c in table.groups.values() if c.mover == g] for g in table.groups}
        self.above: dict[str, tuple[str, ...]] = {}
        for name in table.groups:
            chain, mover = [], table.groups[name].mover
            while mover is not None:
                chain.append(mover)
                mover = table.groups[mover].mover
            self.above[name] = tuple(chain)
        self.below = {g: tuple(c for c in table.groups if g in self.above[c]) for g in table.groups}

    def joint(self, one: str, other: str) -> str | None:
        """Return the closest group that moves blocks of two others."""
        return next((g for g in self.above[one] if g in self.above[other]), None)


def visit(products: Products, families: Families, group: str, permutations: Permutations) -> tuple[Permutations, float]:
    """Return the best permutation of a group, and of the groups that it moves, and what the former adds.

    Blocks stay where the group's mover puts them. Of groups whose blocks this one moves, each pair of an old and a new
    place of a block is given the order inside that is best for it; in a grouped kernel between two of them, the
    later one's best order is found behind the earlier one's.

    Args:
        products: of the network that is matched.
        families: of its groups.
        group: the one to visit.
        permutations: of all groups, as they are.
    """
    values, inside = _Subtree(products, families, group, permutations).solve(group)
    size, blocks = families.groups[group].size, families.groups[group].blocks
    width = size // blocks
    places = np.empty(size, dtype=np.int64)
    for b in range(blocks):
        source = int(permutations[group][b * width]) // width if blocks > 1 else 0
        new, old = slice(b * width, (b + 1) * width), slice(source * width, (source + 1) * width)
        places[new] = source * width + assign(values[new, old])
    result = {group: torch.from_numpy(places)}
    for name, chosen in inside.items():
        moved = chosen[np.arange(size), places] + places[:, None] * chosen.shape[-1]
        result[name] = torch.from_numpy(moved.flatten())
    rows, before = np.arange(size), permutations[group].numpy()
    return result, float((values[rows, places] - values[rows, before]).sum(dtype=np.float64))


class _Subtree:
    """A group with those that it moves."""

    def __init__(self, products: Products, families: Families, top: str, permutations: Permutations) -> None:
        self._products, self._families, self._permutations = products, families, permutations
        self._behind = _behind(products.reference, families, top)
        self._without = [term for _, early, late in self._behind for term in (early, late)]
        self._more: dict[str, Matrix] = {}

    def solve(self, group: str) -> tuple[Matrix, Inside]:
        """Return what is gained at best if new unit u is old unit v, (u, v), and the orders inside blocks that do."""
        gains = self._products.gains(group, self._permutations, self._without)
        values: Matrix = gains.cpu().numpy()
        if group in self._more:
            values = values + self._more[group]
        inside: Inside = {}
        for child in self._families.children[group]:
            for joint, early, late in self._behind:
                if joint == group and (late.move.group == child or child in self._families.above[late.move.group]):
                    more = _behind_gains(self._products, late, inside[early.move.group])
                    self._more[late.move.group] = self._more.get(late.move.group, 0) + more
            below, nested = self.solve(child)
            best, order = best_orders(below, len(values))
            values = values + best
            inside[child] = order
            inside |= {name: _nested(order, chosen) for name, chosen in nested.items()}
        return values, inside


def best_orders(values: Matrix, blocks: int) -> tuple[Matrix, NDArray[np.int64]]:
    """Return for each new and old place of a block the best sum inside, (new, old), and its order, (new, old, unit).

    Args:
        values: (new unit, old unit).
        blocks: how many the units are in.
    """
    width = len(values) // blocks
    pairs = values.reshape(blocks, width, blocks, width).transpose(0, 2, 1, 3)
    if width <= _ALL_ORDERS:
        every = np.array(list(orders(range(width))))
        sums = pairs[:, :, np.arange(width), every].sum(-1)
        return sums.max(-1), every[sums.argmax(-1)]
    order = np.array([[assign(pair) for pair in row] for row in pairs])
    return np.take_along_axis(pairs, order[..., None], -1)[..., 0].sum(-1), order


def _nested(order: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return orders inside a mover's units from those inside its child's: (new, old, unit of the child x place)."""
    count, width, inner = len(order), order.shape[-1], chosen.shape[-1]
    new = np.arange(count)[:, None, None] * width + np.arange(width)
    old = np.arange(count)[None, :, None] * width + order
    result: NDArray[np.int64] = chosen[new, old] + order[..., None] * inner
    return result.reshape(count, count, width * inner)


def _behind(reference: Reference, families: Families, top: str) -> Sequence[tuple[str, Term, Term]]:
    """Return grouped kernels between two groups that a third moves: it, the earlier one's term and the later one's."""
    if len(families.below[top]) < 2:
        return ()
    order = (top, *families.below[top])
    found = []
    for late in (term for group in order for term in reference.terms[group] if term.kernel is not None):
        for early in (term for group in order for term in reference.terms[group] if term.name == late.name):
            joint = families.joint(early.move.group, late.move.group)
            if len(late.axes.moves) != 2 or late.kernel is None or joint not in order:
                continue
            first, second = (_child(families, joint, term.move.group) for term in (early, late))
            if families.groups[joint].size == late.kernel.within and order.index(first) < order.index(second):
                found.append((joint, early, late))
    return found


def _child(families: Families, top: str, group: str) -> str:
    """Return the one of a group's children that another group is or is below of."""
    chain = (group, *families.above[group])
    return chain[chain.index(top) - 1]


def _behind_gains(products: Products, late: Term, inside: NDArray[np.int64]) -> Matrix:
    """Return gains of a grouped kernel's later axis where the other one is ordered as is best for each pair of blocks.

    Args:
        products: of the network that is matched.
        late: the kernel's term.
        inside: (new block, old block, place), the other axis's orders.
    """
    blocks, axis = len(inside), 1 - late.move.axis
    fixed, own = (
        split(tensors[late.name], 0, blocks).flatten(3) for tensors in (products.reference.tensors, products.tensors)
    )
    if axis == 0:
        fixed, own = fixed.transpose(1, 2), own.transpose(1, 2)
    rows = []
    for u, order in enumerate(torch.from_numpy(inside).to(own.device)):
        moved = own[torch.arange(blocks, device=own.device)[:, None], :, order].transpose(1, 2)
        rows.append(fixed[u].flatten(1) @ moved.flatten(0, 1).flatten(1).T)
    result: Matrix = torch.cat(rows).cpu().numpy().astype(np.float64)
    return result
