"""Scale factors while a network is traced: vectors of positive unknowns, and what is found out about their products.

A scale is a product of powers of factors. What an operation demands of scales is linear in their logarithms, so that
each demand replaces one factor by a product of others; the factors that are left can be chosen freely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

Product = dict["Factor", Fraction]  # factor -> power; empty: the scale is 1
ONE = Fraction(1)


@dataclass(eq=False)
class Factor:
    """A vector of positive scales: entry e of a run of length L is multiplied by value e * count // L.

    Args:
        count: how many values.
        born, name: as of a space.
        weak: no layer's output is scaled by it alone: it goes first when factors are found to depend on each other.
        origin: (tensor, axis) that it was made for; None: it is a product that got a name.
        norms: layers that undo it; to whether they do so exactly.
        writers: (order, tensor, axis) of what is multiplied by it at the layer that opened it.
        into: the product that it was found to equal.
        start: of a piece, the number of its first value among those of the whole.
        pieces: by (start, stop), fractions of the run, once its run was cut.
    """

    count: int
    born: int
    name: str
    weak: bool = True
    origin: tuple[str, int] | None = None
    norms: dict[str, bool] = field(default_factory=dict)
    writers: list[tuple[int, str, int]] = field(default_factory=list)
    into: Product | None = None
    start: int | None = None
    pieces: dict[tuple[Fraction, Fraction], Factor] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.start + self.count}]"


def times(*products: Product, power: Fraction | int = 1) -> Product:
    """Multiply products, the last of them raised to a power; return what is left of it."""
    result: Product = {}
    for i, product in enumerate(products):
        exponent = Fraction(power if i == len(products) - 1 else 1)
        for factor, p in settled(product).items():
            result[factor] = result.get(factor, Fraction(0)) + p * exponent
    return {factor: p for factor, p in result.items() if p}


def settled(product: Product) -> Product:
    """Replace factors by what they were found to equal; return the product."""
    if all(factor.into is None for factor in product):
        return product
    result: Product = {}
    for factor, p in product.items():
        for f, q in ({factor: Fraction(1)} if factor.into is None else settled(factor.into)).items():
            result[f] = result.get(f, Fraction(0)) + p * q
    return {factor: p for factor, p in result.items() if p}


def equate(one: Product, other: Product) -> None:
    """Make two scales of one run equal: a factor becomes the product of others."""
    difference = times(one, other, power=-1)
    if not difference:
        return
    pivot = max(difference, key=lambda f: (f.weak, f.count, f.born))
    power = difference.pop(pivot)
    for factor in difference:
        tie(factor, pivot.count)
        for norm, exact in pivot.norms.items():
            factor.norms[norm] = factor.norms.get(norm, True) and exact
    pivot.into = {factor: -p / power for factor, p in difference.items()}
    if list(pivot.into.values()) == [1]:
        (factor,) = pivot.into
        factor.writers = sorted({*factor.writers, *pivot.writers})


def tie(factor: Factor, count: int) -> None:
    """Make a factor constant on `count` equal blocks of its run."""
    factor.count = math.gcd(factor.count, count)


def piece(factor: Factor, start: Fraction, stop: Fraction) -> Factor:
    """Return the factor of a part of a run, given as fractions of it."""
    if stop - start == 1 or factor.count == 1:
        return factor
    if (factor.count * start).denominator > 1 or (factor.count * stop).denominator > 1:
        factor.count = 1  # a value on both sides of the cut: one for all is a subgroup
        return factor
    if (start, stop) not in factor.pieces:
        first, last = int(factor.count * start), int(factor.count * stop)
        part = replace(factor, count=last - first, start=(factor.start or 0) + first, pieces={})
        part.norms, part.writers = dict(factor.norms), list(factor.writers)
        factor.pieces[start, stop] = part
    return factor.pieces[start, stop]
