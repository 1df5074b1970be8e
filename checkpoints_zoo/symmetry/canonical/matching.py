"""One network matched to a reference: groups are visited, and move if that gains, until none does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry.canonical.families import Families, visit
from checkpoints_zoo.symmetry.canonical.products import Permutations, Products, Reference
from checkpoints_zoo.symmetry.table import Table

STATISTICS = ("mean", "variance")
_NOTHING = 1e-12  # of the product of both networks' norms: a visit has to gain more


@dataclass(frozen=True)
class Found:
    """What `Matching` holds, of one member."""

    permutations: Permutations
    sweeps: int
    visits: int
    converged: bool


class Matcher:
    """One reference, prepared once for all members.

    Args:
        table: of the network.
        reference: name -> (*shape), all tensors that count, in one dtype.
        thing: words for it.

    Raises:
        DamagedError: a weight that is not finite.
    """

    def __init__(self, table: Table, reference: Mapping[str, Tensor], thing: str = "the reference") -> None:
        self._table, self._reference, self._families = table, Reference(table, reference), Families(table)
        self._norm = _norm(reference, thing)
        ups, downs = self._families.above, self._families.below
        # Whose visits may end otherwise once a group has moved.
        self._touched = {
            group: {h for reader in readers for h in (reader, *ups[reader])}
            for group, readers in self._reference.readers.items()
        }
        self._linear = {g: not downs[g] and g not in self._reference.readers[g] for g in table.groups}

    def match(
        self, params: Mapping[str, Tensor], start: Mapping[str, Tensor], seed: int, most: int, thing: str
    ) -> Found:
        """Match one network; return its permutations.

        Args:
            params: name -> (*shape), in the reference's dtype, on its device.
            start: permutations to start from.
            seed: of the order of visits.
            most: sweeps at most.
            thing: words for the network.

        Raises:
            DamagedError: a weight that is not finite.
        """
        products = Products(self._reference, params)
        scale = self._norm * _norm(params, thing)
        permutations = {
            g: start[g].cpu() if g in start else torch.arange(n.size) for g, n in self._table.groups.items()
        }
        names, generator = list(permutations), np.random.default_rng(seed)
        waiting, sweeps, visits = set(names), 0, 0
        while waiting and sweeps < most:
            sweeps += 1
            for group in (names[i] for i in generator.permutation(len(names))):
                if group not in waiting:
                    continue
                waiting.discard(group)
                visits += 1
                for name in self._visit(products, group, permutations, scale):
                    waiting |= self._touched[name]
        return Found(permutations, sweeps, visits, not waiting)

    def objective(self, params: Mapping[str, Tensor], permutations: Permutations) -> float:
        """Return the inner product of the reference and a permuted network, in float64."""
        return self._reference.objective(params, permutations)

    def _visit(self, products: Products, group: str, permutations: Permutations, scale: float) -> list[str]:
        """Move a group, and those whose blocks it moves, if that gains; return the names of what has moved."""
        best, gain = visit(products, self._families, group, permutations)
        moved = [name for name, p in best.items() if not torch.equal(p, permutations[name])]
        if not moved:
            return []
        # Products are rounded: a gain that may be none, or that isn't the sum of one group's, is found exactly.
        rounding = torch.finfo(products.dtype).eps * scale
        if not self._linear[group] or gain <= rounding:
            names = {name for group in moved for name in self._reference.names[group]}
            before, after = (
                self._reference.objective(products.tensors, p, names) for p in (permutations, permutations | best)
            )
            gain = after - before
            if gain <= _NOTHING * scale:
                return []
        permutations |= {name: best[name] for name in moved}
        return moved


def counted(table: Table, params: Mapping[str, Tensor], thing: str) -> dict[str, Tensor]:
    """Return the tensors that count: those that move, but for statistics and integers."""
    counted = {}
    for name, axes in table.tensors.items():
        if not axes.moves or axes.role in STATISTICS:
            continue
        if name not in params:
            raise LayoutError(
                f"tensor {name!r} of the {thing}", expected=f"it, as {table.network} has it", found="none", tensor=name
            )
        if params[name].is_floating_point():
            counted[name] = params[name].detach()
    return counted


def wider(*dtypes: torch.dtype) -> torch.dtype:
    """Return what to compute in: float64 if any is, or float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _norm(params: Mapping[str, Tensor], thing: str) -> float:
    """Return the norm of all weights.

    Raises:
        DamagedError: one is not finite, or so large that squares aren't.
    """
    norms = [torch.linalg.vector_norm(tensor) for tensor in params.values()]
    total = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    largest = torch.finfo(norms[0].dtype).max ** 0.5 if norms else 1.0
    if total < largest:
        return total
    for name, tensor in params.items():
        if not bool(tensor.isfinite().all()):
            raise DamagedError(f"tensor {name!r} of {thing}", expected="finite weights", found="others", tensor=name)
    raise UsageError(
        f"weights of {thing}",
        expected=f"a norm below {largest:.2g}, so that products are finite",
        found=f"{total:.3g}",
        do="Give them in float64",
    )
