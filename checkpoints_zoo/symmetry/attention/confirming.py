"""Confirm a derived table on random weights: parts of the group that would change the network's function are left out.

Rules of operations look at one operation at a time. A network that combines operations in a way that no rule knows
could get a larger group than it has; running it shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.applying import apply
from checkpoints_zoo.symmetry.attention.graph import copy_to_run
from checkpoints_zoo.symmetry.composing import compose
from checkpoints_zoo.symmetry.elements import Element, random_element
from checkpoints_zoo.symmetry.table import Table, keep_parts

LARGEST_NETWORK = 100_000_000  # Parameters of a network that is confirmed: 87 million take 6.5 GB.
_TOLERANCE = 1e-5  # Largest change, as a share of the largest output: networks may compute in float32 inside.
_SEED = 0
Name = tuple[str, str]  # Kind of a part of the group ("groups", …), and its name.


def confirm(module: nn.Module, example: tuple[Tensor, ...], table: Table) -> Table:
    """Run a network on random weights before and after random elements of its table; return the table without the
    parts that change an output. A table that can't be confirmed says why.

    Args:
        module: the network.
        example: one batch of inputs. Floating-point inputs are drawn anew; whole numbers are 0 or 1 where the network
            takes these, and those of the example otherwise.
        table: the derived table.

    Raises:
        SymmetryError: an element still changes an output.
    """
    if sum(parameter.numel() for parameter in module.parameters()) > LARGEST_NETWORK:
        return replace(table, unconfirmed=f"it has more than {LARGEST_NETWORK:,} parameters")
    trial = _Trial(module, example)
    if not trial.before:
        return replace(table, unconfirmed="on random weights it gives no finite outputs")
    names = [(kind, name) for kind in _KINDS for name in getattr(table, kind)]
    names = _largest_part(names, lambda some: trial.keeps_function(_only(table, some)))
    names = _largest_part(names, lambda some: trial.composes(_only(table, some)))
    table = _only(table, names)
    if not trial.keeps_function(table):
        raise SymmetryError(
            f"symmetries of {table.network}",
            expected="elements that keep its function", found="a change of its outputs",
            do="Give a network with simpler attention; its symmetries can't be derived",
        )  # fmt: skip
    return table


_KINDS = ("groups", "scales", "signs", "matrices", "shifts")


class _Trial:
    """A network with random weights, and its outputs."""

    def __init__(self, module: nn.Module, example: tuple[Tensor, ...]) -> None:
        self.generator = torch.Generator().manual_seed(_SEED)
        self.network = copy_to_run(module).cpu().double()
        self.weights = {name: self._draw(p.shape) for name, p in self.network.named_parameters()}
        shapes = [x.shape for x in example]
        floats = [torch.randn(shape, generator=self.generator, dtype=torch.float64) for shape in shapes]
        bits = [torch.randint(2, shape, generator=self.generator) for shape in shapes]
        self.before: list[Tensor] = []
        for numbers in (bits, example):
            self.inputs = tuple(
                f if x.is_floating_point() else n.to(x.dtype) for x, f, n in zip(example, floats, numbers, strict=True)
            )
            self.before = self._outputs(self.weights)
            if self.before:
                break

    def _draw(self, shape: torch.Size) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        scaled: Tensor = drawn / max(1, shape[1:].numel()) ** 0.5 if len(shape) > 1 else 1 + 0.3 * drawn
        return scaled

    def _outputs(self, weights: dict[str, Tensor]) -> list[Tensor]:
        """Return the outputs; none if the network cannot run, or some are not finite."""
        with torch.no_grad():
            try:
                result = functional_call(self.network, weights, self.inputs)
            except (RuntimeError, IndexError, ValueError, TypeError):
                return []
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.numel()]
        outputs = [x for x in leaves if x.is_floating_point()]
        return outputs if all(bool(x.isfinite().all()) for x in outputs) else []

    def keeps_function(self, table: Table) -> bool:
        """Return whether a random element of a table keeps the outputs."""
        try:
            moved = apply(table, self.weights, _moving_element(table, self.generator))
        except (RuntimeError, IndexError, KeyError):  # The moves of a tensor overlap, or leave it.
            return False
        after = self._outputs(moved)
        return len(after) == len(self.before) and all(
            float((x - y).abs().max()) <= _TOLERANCE * float(x.abs().max())
            for x, y in zip(self.before, after, strict=True)
        )

    def composes(self, table: Table) -> bool:
        """Return whether two random elements are, one after the other, what `compose` makes of them."""
        first, second = (random_element(table, self.generator) for _ in range(2))
        one_by_one = apply(table, apply(table, self.weights, first), second)
        at_once = apply(table, self.weights, compose(table, first, second))
        return all(
            float((at_once[name] - tensor).abs().max()) <= 1e-8 * (1 + float(tensor.abs().max()))
            for name, tensor in one_by_one.items()
        )


def _moving_element(table: Table, generator: torch.Generator) -> Element:
    """Draw an element that moves all units of each group, and changes a sign of each vector of signs."""
    element = random_element(table, generator)
    permutations: dict[str, Tensor] = {}

    def permutation(name: str) -> Tensor:
        group = table.groups[name]
        if name not in permutations:
            blocks = torch.arange(group.blocks) if group.mover is None else permutation(group.mover)
            width = group.size // group.blocks
            permutations[name] = (blocks[:, None] * width + torch.arange(width).roll(1)).flatten()
        return permutations[name]

    signs = {name: torch.cat([-torch.ones(1).double(), values[1:]]) for name, values in element.signs.items()}
    return replace(element, permutations={name: permutation(name) for name in table.groups}, signs=signs)


def _largest_part(names: Sequence[Name], holds: Callable[[Sequence[Name]], bool]) -> list[Name]:
    """Return the names of parts that hold together: without those that fail alone, and then one after the other."""
    if not names or holds(names):
        return list(names)
    failing = set(_failing(names, holds))
    rest = [name for name in names if name not in failing]
    if holds(rest):
        return rest
    kept: list[Name] = []
    for name in rest:
        kept += [name] if holds([*kept, name]) else []
    return kept


def _failing(names: Sequence[Name], holds: Callable[[Sequence[Name]], bool]) -> list[Name]:
    """Return the parts that fail alone, found by halves."""
    if not names or holds(names):
        return []
    if len(names) == 1:
        return list(names)
    middle = len(names) // 2
    return [*_failing(names[:middle], holds), *_failing(names[middle:], holds)]


def _only(table: Table, names: Sequence[Name]) -> Table:
    return keep_parts(table, **{kind: {n for k, n in names if k == kind} for kind in _KINDS})
