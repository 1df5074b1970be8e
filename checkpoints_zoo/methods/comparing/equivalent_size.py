"""Equivalent sizes: how many independent members have, on average, the figure of a given ensemble."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from checkpoints_zoo.evaluation.figures import MONOTONE_FIGURES
from checkpoints_zoo.methods.comparing.estimates import Estimate


@dataclass(frozen=True)
class FigureCurve:
    """A figure of ensembles of independent members, over their sizes.

    Args:
        sizes: ensemble sizes, rising, from 1 to all members.
        values: mean figure of each size.
        limit: value of the figure for an infinite ensemble.
    """

    sizes: Sequence[int]
    values: Sequence[float]
    limit: float

    @classmethod
    def from_growth(cls, growth: Mapping[str, Any]) -> Self:
        """Make a curve of a figure's growth from `Uncertainty.measure_curve`; return the curve."""
        return cls(growth["sizes"], [growth["limit"] + d for d in growth["distances"]], growth["limit"])

    def falling_distances(self) -> list[float]:
        """Return the distances of the values from the limit, positive for a single member and falling with the size.

        Distances of random subsets do not always fall with the size; isotonic regression averages neighbouring
        distances until all distances fall. No distance is below 0.
        """
        from scipy.optimize import isotonic_regression

        sign = 1.0 if self.values[0] >= self.limit else -1.0
        regression = isotonic_regression([sign * (v - self.limit) for v in self.values], increasing=False)
        return [max(0.0, float(value)) for value in regression.x]

    def equal_ensemble_size(self, figure_value: float) -> float:
        """Return the size of the ensembles whose mean figure equals a given value, interpolated linearly in 1/k.

        The size is 0 if a single member has a better figure than `figure_value`, and infinity if `figure_value` is at
        the limit or better than the limit. For sizes above the number of members, the distance from the limit is
        proportional to 1/k.

        >>> curve = FigureCurve((1, 2, 4), (0.9, 0.5, 0.3), 0.1)  # 0.1 + 0.8/k
        >>> [round(curve.equal_ensemble_size(figure_value), 3) for figure_value in (0.5, 0.4, 0.2, 1.0)]
        [2.0, 2.667, 8.0, 0.0]
        """
        distances = self.falling_distances()
        sign = 1.0 if self.values[0] >= self.limit else -1.0
        target_distance = sign * (figure_value - self.limit)
        if target_distance <= 0:
            return math.inf
        if target_distance > distances[0]:
            return 0.0
        for position in range(1, len(distances)):
            if target_distance > distances[position]:
                share_of_step = (distances[position - 1] - target_distance) / (
                    distances[position - 1] - distances[position]
                )
                return 1 / ((1 - share_of_step) / self.sizes[position - 1] + share_of_step / self.sizes[position])
            if target_distance == distances[position] and (
                position + 1 == len(distances) or distances[position + 1] < target_distance
            ):
                return float(self.sizes[position])
        return self.sizes[-1] * distances[-1] / target_distance


@dataclass(frozen=True)
class EquivalentSize:
    """The size of the ensembles of independent members whose mean figure equals a given figure.

    Args:
        members: number of members; 0 for less than one member, infinity if the figure is at the limit or better than
            the limit.
        low, high: equivalent sizes of the two ends of the figure's 95 % interval; None if there is no interval. The
            uncertainty of the curve is ignored.
        at_hand: number of members that the curve was measured with; larger sizes are extrapolated.
        limit: the figure of an infinite ensemble.
    """

    members: float
    low: float | None
    high: float | None
    at_hand: int
    limit: float

    def __str__(self) -> str:
        if self.members == 0:
            return "less than 1"
        if self.members > self.at_hand:
            return f"more than {self.at_hand:,} (the limit is {self.limit:.4g})"
        return self.short

    @property
    def short(self) -> str:
        """A short text for a table: "<1 [<1, 2.2]", ">64 [12, >64]"."""
        bounds = [] if self.low is None or self.high is None else [self.low, self.high]
        interval = f" [{', '.join(map(self._size_text, bounds))}]" if bounds else ""
        return self._size_text(self.members) + interval

    def _size_text(self, size: float) -> str:
        return "<1" if size < 1 else f">{self.at_hand}" if size > self.at_hand else f"{size:.2g}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; infinity is "inf"."""
        sizes = {"members": self.members, "low": self.low, "high": self.high}
        return {n: "inf" if x == math.inf else x for n, x in sizes.items()} | {
            "at_hand": self.at_hand, "limit": self.limit,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read the values that `to_json` returned; return the result."""
        low, high = (None if values[n] is None else float(values[n]) for n in ("low", "high"))
        return cls(float(values["members"]), low, high, values["at_hand"], values["limit"])


def equivalent_size(curve: FigureCurve, figure: Estimate) -> EquivalentSize | None:
    """Find the equivalent size of a figure on the population's curve; return the size, or None if there is none.

    Args:
        curve: curve of the population; a curve that does not change with the size has no equivalent sizes.
        figure: estimate of the ensemble's figure; a figure that is not finite has no equivalent size.
    """
    if not math.isfinite(figure.value) or curve.falling_distances()[0] <= 0 or len(curve.sizes) < 2:
        return None
    low = high = None
    if figure.low is not None and figure.high is not None:
        low, high = sorted(curve.equal_ensemble_size(x) for x in (figure.low, figure.high))
    return EquivalentSize(curve.equal_ensemble_size(figure.value), low, high, curve.sizes[-1], curve.limit)


def equivalent_sizes(growth: Mapping[str, Any], figures: Mapping[str, Estimate]) -> dict[str, EquivalentSize]:
    """Find the equivalent size of each figure that grows or falls with the size; return figure -> size.

    Args:
        growth: figure -> growth with the size, as returned by `Uncertainty.measure_curve`.
        figures: figure -> estimate for an ensemble.
    """
    sizes_by_figure = {
        n: equivalent_size(FigureCurve.from_growth(growth[n]), figures[n])
        for n in MONOTONE_FIGURES
        if n in growth and n in figures
    }
    return {n: x for n, x in sizes_by_figure.items() if x is not None}
