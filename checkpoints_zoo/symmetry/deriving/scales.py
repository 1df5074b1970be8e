"""Scale factors and signs of a traced network: vectors of unknown numbers, with equations between their products.

A scale is a product of powers of factors. Each equation is linear in the logarithms of the factors, and replaces one
factor by a product of others. The factors that remain can be chosen freely. Signs have equations too, and the powers of
signs count modulo 2. A product contains both kinds: since scales are positive, an equation of products is one equation
of scales and one equation of signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

Product = dict["Factor", Fraction]  # A product of powers of factors, factor -> exponent; an empty product is 1.
ONE = Fraction(1)


@dataclass(eq=False)
class Factor:
    """A vector of positive scales, or of signs: entry e of a run of length L is multiplied by value e * count // L.

    Args:
        count: number of values of the factor.
        serial: serial number.
        name: name of the layer that opened the factor.
        weak: whether no layer has an output that this factor alone scales. Equations replace weak factors first.
        origin: (tensor name, axis) that the factor scales; None if the factor stands for a product of factors.
        norms: name of a layer that undoes the factor -> whether the layer undoes it exactly.
        writers: (serial number, tensor name, axis) of the tensors that the factor multiplies in the layer that opened
            it.
        replaced_by: the product of other factors that replaces this factor.
        start: position of the first value in the longer factor from which this factor was cut; None if it was not cut.
        pieces: (start, stop), as fractions of the run -> the part of the factor between them.
        sign: whether the values are signs, 1 or -1, not positive scales.
    """

    count: int
    serial: int
    name: str
    weak: bool = True
    origin: tuple[str, int] | None = None
    norms: dict[str, bool] = field(default_factory=dict)
    writers: list[tuple[int, str, int]] = field(default_factory=list)
    replaced_by: Product | None = None
    start: int | None = None
    pieces: dict[tuple[Fraction, Fraction], Factor] = field(default_factory=dict)
    sign: bool = False

    @property
    def label(self) -> str:
        return self.name if self.start is None else f"{self.name}[{self.start}:{self.start + self.count}]"


def multiply_products(*products: Product, last_power: Fraction | int = 1) -> Product:
    """Multiply products, the last one raised to a power; return the product without cancelled factors."""
    result: Product = {}
    for i, product in enumerate(products):
        exponent = Fraction(last_power if i == len(products) - 1 else 1)
        for factor, p in resolve_product(product).items():
            result[factor] = result.get(factor, Fraction(0)) + p * exponent
    return _without_cancelled_factors(result)


def signs_of(product: Product) -> Product:
    """Return the signs of a product."""
    return {factor: p for factor, p in product.items() if factor.sign}


def magnitudes_of(product: Product) -> Product:
    """Return the positive scales of a product."""
    return {factor: p for factor, p in product.items() if not factor.sign}


def _without_cancelled_factors(product: Product) -> Product:
    """Return a product without its cancelled factors, and with powers of signs modulo 2."""
    powers = {factor: p % 2 if factor.sign else p for factor, p in product.items()}
    return {factor: p for factor, p in powers.items() if p}


def resolve_product(product: Product) -> Product:
    """Replace each factor by the product that it equals; return the product of the remaining factors."""
    if all(factor.replaced_by is None for factor in product):
        return product
    result: Product = {}
    for factor, p in product.items():
        for f, q in (
            {factor: Fraction(1)} if factor.replaced_by is None else resolve_product(factor.replaced_by)
        ).items():
            result[f] = result.get(f, Fraction(0)) + p * q
    return _without_cancelled_factors(result)


def equate_products(first_product: Product, second_product: Product) -> None:
    """Make two products of one run equal: replace one scale by other scales, and one sign by other signs."""
    difference = multiply_products(first_product, second_product, last_power=-1)
    for part in (magnitudes_of(difference), signs_of(difference)):
        if part:
            _replace_factor(part)


def _replace_factor(product: Product) -> None:
    """Force a product to be 1 by replacing one of its factors by the inverse of the others."""
    replaced_factor = max(product, key=lambda f: (f.weak, f.count, f.serial))
    power = product.pop(replaced_factor)
    for factor in product:
        tie_values(factor, replaced_factor.count)
        for norm, exact in replaced_factor.norms.items():
            factor.norms[norm] = factor.norms.get(norm, True) and exact
    replaced_factor.replaced_by = _without_cancelled_factors({factor: -p / power for factor, p in product.items()})
    if list(replaced_factor.replaced_by.values()) == [1]:
        (factor,) = replaced_factor.replaced_by
        factor.writers = sorted({*factor.writers, *replaced_factor.writers})


def tie_values(factor: Factor, block_count: int) -> None:
    """Divide the entries that a factor scales into `block_count` equal blocks, and give each block one value."""
    factor.count = math.gcd(factor.count, block_count)


def factor_of_part(factor: Factor, start: Fraction, stop: Fraction) -> Factor:
    """Return the factor of a part of a run; `start` and `stop` are fractions of the run."""
    if stop - start == 1 or factor.count == 1:
        return factor
    if (factor.count * start).denominator > 1 or (factor.count * stop).denominator > 1:
        factor.count = 1  # A single value lies on both sides of the cut, so the whole run gets one value.
        return factor
    if (start, stop) not in factor.pieces:
        first, last = int(factor.count * start), int(factor.count * stop)
        part = replace(factor, count=last - first, start=(factor.start or 0) + first, pieces={})
        part.norms, part.writers = dict(factor.norms), list(factor.writers)
        factor.pieces[start, stop] = part
    return factor.pieces[start, stop]
