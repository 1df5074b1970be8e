"""How the figure of an ensemble comes near that of an infinite one as members are added, and how many that takes.

The mean figure of ensembles of k members is a + b/k + c/k² + …. For the Brier score it is a + b/k exactly: with the
members' errors e_i (probabilities minus the label's indicator), the mean over ensembles of |mean of e|² is
a + (B1 - a)/k, B1 the mean of |e_i|² and a that of e_i·e_j over pairs, so that single members and all members together
give the limit a without drawing anything; Ueda & Nakano, Generalization error of ensemble estimators (1996), of squared
errors. A smooth function of the mean probabilities (NLL, mutual information) has the series by its Taylor expansion in
their errors: Lobacheva et al., On power laws in deep ensembles (2020), of the NLL. A figure that sorts or counts
(accuracy, ECE, AUROC) has it as far as many inputs make it smooth; its intervals are wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.metrics import Interval, Plan

_NO_SPREAD = 1e6  # share of a distance from which its half width says nothing: two halves of the members gain nothing
_NORMAL = 1.959964  # quantile, 95 % two-sided
EXACT = ("brier",)  # a + b/k holds exactly
SMOOTH = ("nll", "brier", "mi_id", "mi_ood", "temperature")  # in the mean probabilities: what members share cancels
CONSTANT = ("disagreement",)  # a mean over pairs: the same for every size


@dataclass(frozen=True)
class Needed:
    """How many members a figure takes to come within some distance of its limit.

    Args:
        figure: its name.
        within: the distance, in the figure's unit.
        members: the least ensemble that is within it, and so is every larger one; None if it takes more than there are.
        low, high: of 95 % over members; None where nothing can be said. Numbers above `at_hand` go by 1/k.
        at_hand: how many members there are.
        extrapolated: `members`, or by 1/k what it would take.
    """

    figure: str
    within: float
    members: int | None
    low: int | None
    high: int | None
    at_hand: int
    extrapolated: int

    def __str__(self) -> str:
        text = f"{self.members:,}" if self.members is not None else f"more than {self.at_hand:,}"
        if self.members is None:
            text += f", about {self.extrapolated:,} by 1/k"
        if self.low is not None:
            text += f" [{self.low:,}, {'…' if self.high is None else f'{self.high:,}'}]"
        return text


@dataclass(frozen=True)
class Growth:
    """How far a figure's mean over ensembles of some size is from the figure of an infinite ensemble.

    Args:
        sizes: that were measured, rising, from 1 to all members.
        distances: mean figure minus limit, of each size, in the figure's unit.
        limit: of the figure; low and high over members.
        spread: half the width of a 95 % interval of the distances over members, as a share of them; None for fewer
            than three members.
        noise: half the width of a 95 % interval of each distance, in the figure's unit: of the random subsets, and for
            a figure that counts or sorts of all members' figure itself.
    """

    sizes: Sequence[int]
    distances: Sequence[float]
    limit: Interval
    spread: float | None
    noise: Sequence[float]

    def needed(self, figure: str, within: float) -> Needed:
        """Find the least ensemble whose mean figure is within some distance of the limit; return it.

        The distance of a size is the largest of it and all larger ones, between sizes straight in 1/k.

        Args:
            figure: its name.
            within: the distance, in the figure's unit, above 0.

        >>> growth = Growth((1, 4, 16), (0.8, 0.2, 0.05), Interval(0.1, 0.08, 0.12), 0.25, (0.0, 0.0, 0.0))
        >>> growth.needed("nll", 0.1)
        Needed(figure='nll', within=0.1, members=8, low=6, high=10, at_hand=16, extrapolated=8)
        """
        distances = [abs(x) for x in self.distances]
        needed = self._first(distances, within, distances[-1] / within)
        low: int | None = None
        high: int | None = None
        if self.spread is not None and not self.spread < _NO_SPREAD:  # the halves gain nothing: nothing is known
            low = self.sizes[0]
        elif self.spread is not None:
            widths = [math.hypot(self.spread * x, n) for x, n in zip(distances, self.noise, strict=True)]
            # Beyond all members the distance d goes by 1/k: d ± sqrt((spread d)² + noise²) = within.
            share, noise = 1 - self.spread**2, self.noise[-1]
            root = math.sqrt(max(0.0, within**2 - share * (within**2 - noise**2)))
            least = (within + root) / share if share > 0 else math.inf
            low = self._first([x - w for x, w in zip(distances, widths, strict=True)], within, distances[-1] / least)
            if within > noise:
                most = (within**2 - noise**2) / (within + root)
                high = self._first(
                    [x + w for x, w in zip(distances, widths, strict=True)], within, distances[-1] / most
                )
        members = self.sizes[-1]
        return Needed(figure, within, needed if needed <= members else None, low, high, members, needed)

    def _first(self, distances: Sequence[float], within: float, beyond: float) -> int:
        """Return the least size from which on all distances are at most so much.

        Args:
            distances: of `sizes`.
            within: so much.
            beyond: multiple of all members, for where those are not near enough.
        """
        largest = -math.inf
        after: tuple[int, float] | None = None
        for size, distance in zip(reversed(self.sizes), reversed(distances), strict=True):
            before, largest = largest, max(largest, distance)
            if largest > within:
                if after is None:
                    return _whole(size * max(beyond, 1.0))
                # Straight in 1/k between this size and the one after it.
                share = (within - before) / (largest - before)
                return min(after[0], _whole(1 / ((1 - share) / after[0] + share / size)))
            after = (size, largest)
        return self.sizes[0]


def _whole(size: float) -> int:
    """Round a size up, but for rounding errors; return it."""
    return math.ceil(size * (1 - 1e-12))


def needed(growths: Mapping[str, Growth], figure: str, within: float | str) -> Needed:
    """Find the least ensemble whose mean figure is within some distance of the limit; return it.

    Args:
        growths: figure -> how it grows.
        figure: its name.
        within: the distance, in the figure's unit, or as a share of the limit ("5%").

    Raises:
        UsageError: no such figure, or a distance that is none.
    """
    if not growths:
        raise UsageError("limits of figures", expected="two members or more", found="one")
    number, share = check_distance(figure, within, growths)
    distance = number * abs(growths[figure].limit.value) / 100 if share else number
    if not distance > 0:
        raise UsageError(f"distance of {figure} from its limit", expected="above 0", found=f"{within} of a limit of 0")
    return growths[figure].needed(figure, distance)


def check_distance(figure: str, within: float | str, figures: Iterable[str]) -> tuple[float, bool]:
    """Check the arguments of `needed`; return the number, and whether it is a percentage of the limit.

    Args:
        figure, within: as in `needed`.
        figures: that have a limit.

    Raises:
        UsageError: no such figure, or a distance that is none.
    """
    known = [n for n in figures if n not in CONSTANT]
    if figure not in known:
        found = "a mean over pairs, the same for every size" if figure in CONSTANT else "none such"
        raise UsageError(f"limit of figure {figure!r}", expected=f"one of {', '.join(known)}", found=found)
    share = isinstance(within, str) and within.endswith("%")
    try:
        number = float(within.removesuffix("%")) if isinstance(within, str) else float(within)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(
            f"distance of {figure} from its limit",
            expected='a number above 0, or a percentage of the limit such as "5%"',
            found=repr(within)[:80],
        )
    return number, share


def estimate_growth(name: str, singles: Tensor, curve: Mapping[int, tuple[Plan, Tensor]]) -> Growth:
    """Estimate the limit of a figure from the sizes that were measured; return how far each of them is from it.

    The mean figure of size k minus that of all N members is fitted, over the sizes from 2 on, by b (1/k - 1/N) +
    c (1/k² - 1/N²), by least squares that weigh size k by k (the mean over random subsets varies with 1/k). The limit
    is the figure of all members minus b/N + c/N². On Gaussian logits, 64 members, this misses the distance of all
    members by 2 to 6 % for the NLL, where a line through sizes 1 and 64 misses it by 20 to 100 %.

    The limit's interval and `spread` are a jackknife's, by lines through one member and N/2 of each half.

    Args:
        name: of the figure.
        singles: (member,) its value for each of two members or more.
        curve: size -> the plan of its subsets, and the figure of each (subset,); with all members, whose plan is a
            jackknife's.
    """
    members = len(singles)
    plan, values = curve[members]
    everyone, halves = values[0], values[1:]
    measured = {size: subsets for size, subsets in curve.items() if 1 < size < members}
    if len(halves):
        measured.setdefault(len(plan.chosen[1]), (plan, halves))
    averages = {size: _mean(singles, *subsets) for size, subsets in sorted(measured.items())}
    means = {1: float(singles.mean()), **{size: mean for size, (mean, _) in averages.items()}}
    if name in EXACT:
        gain = (means[1] - float(everyone)) * members / (members - 1)
        limit, noise = float(everyone) - gain / members, [0.0] * (1 + len(means))
        distances = [gain / size for size in (*means, members)]
    else:
        rests = {1: singles.new_zeros(1), **{size: rest for size, (_, rest) in averages.items()}}
        whole = plan.intervals(values[:, None])[0]
        error = 0.0 if whole.high is None or name in SMOOTH else whole.high - whole.value
        limit, noise = _limit(means, rests, members, float(everyone), error)
        distances = [x - limit for x in (*means.values(), float(everyone))]
    around, spread = Interval(limit, None, None), None
    if len(halves):
        single = torch.stack([singles[half].mean() for half in plan.chosen[1:]])
        size = len(plan.chosen[1])
        gains = (single - halves) * size / (size - 1)
        limits = halves - gains / size
        around, gained = plan.intervals(
            torch.stack([torch.cat([halves.new_tensor([limit]), limits]), torch.cat([gains.mean()[None], gains])], 1)
        )
        if gained.high is not None:
            spread = (gained.high - gained.value) / max(abs(gained.value), 1e-300)
        if around.high is not None:
            half = max(math.hypot(around.high - limit, noise[-1]), noise[0])
            around = Interval(limit, limit - half, limit + half)
    return Growth((*means, members), tuple(distances), around, spread, tuple(noise))


def _mean(singles: Tensor, plan: Plan, values: Tensor) -> tuple[float, Tensor]:
    """Average a figure over random subsets; return the mean, and what is left of each subset's figure around it.

    What a subset's figure shares with the mean of its members' own figures is taken out and put back with the mean over
    all members, which is known (a control variate): which members happened to be drawn more often then matters less.

    Args:
        singles: (member,) figures of the members.
        plan: the subsets.
        values: (subset,) their figures.
    """
    if plan.complete:
        return float(values.mean()), values.new_zeros(1)
    chosen = plan.chosen[1:] if plan.whole else plan.chosen
    of_singles = torch.stack([singles[subset].mean() for subset in chosen])
    apart = of_singles - of_singles.mean()
    slope = float(apart @ values) / max(float(apart @ apart), 1e-300)
    rest = values - values.mean() - slope * apart
    return float(values.mean() - slope * (of_singles.mean() - singles.mean())), rest


def _limit(
    means: Mapping[int, float], rests: Mapping[int, Tensor], members: int, everyone: float, error: float
) -> tuple[float, list[float]]:
    """Fit what is left of a figure beyond all members; return the limit, and the error of each size's distance from it.

    Args:
        means: size -> mean figure.
        rests: size -> what is left of each subset's figure around it. The random subsets of one row are nested, so that
            theirs go together.
        members: how many there are.
        everyone, error: their figure, and as much of its error as the means do not share.
    """
    sizes = [size for size in means if size > 1]
    sizes = sizes if len(sizes) > 1 else list(means)
    at = torch.tensor(sizes, dtype=torch.float64)
    powers = torch.arange(1, 1 + min(2, len(sizes)), dtype=torch.float64)
    last = members**-powers
    weigh = at.sqrt()[:, None]
    # The distance of all members from the limit, as a sum of shares of (a size's mean - their figure).
    weights = (last @ torch.linalg.pinv(weigh * (at[:, None] ** -powers - last)) * weigh[:, 0]).tolist()
    shares = dict(zip(sizes, weights, strict=True))
    left = sum(share * (means[size] - everyone) for size, share in shares.items())
    total = sum(shares.values())
    noise = []
    for size in (*means, members):
        parts = {other: share + (size == other) for other, share in shares.items()}
        if size < members:
            parts.setdefault(size, 1.0)
        rest = torch.zeros(1, dtype=torch.float64)
        for other, part in parts.items():
            rest = rest + part * rests[other]
        drawn = _NORMAL * float(rest.square().mean()) ** 0.5 / len(rest) ** 0.5
        noise.append(math.hypot(drawn, (total + (size < members)) * error))
    return everyone - left, noise
