"""Limits: the figure of an infinite ensemble, and how many members bring an ensemble within some distance of it.

The mean figure of ensembles of k members is a + b/k + c/k² + …, and a is its limit. For the Brier score a + b/k holds
exactly. With the members' errors e_i (probabilities minus the label's indicator), the mean over ensembles of
|mean of e|² is a + (B1 - a)/k, where B1 is the mean of |e_i|² and a the mean of e_i·e_j over pairs. Therefore the limit
a follows from the figures of single members and of all members, without random subsets (Ueda & Nakano, Generalization
error of ensemble estimators, 1996). A smooth function of the mean probabilities (NLL, mutual information) has this
series by its Taylor expansion in the errors (for the NLL: Lobacheva et al., On power laws in deep ensembles, 2020). A
figure that sorts or counts (accuracy, ECE, AUROC) has this series only if many inputs make the figure nearly smooth;
its intervals are wide.

This is one file, because the limit, its interval and the members needed come from one fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.figures import CONSTANT_FIGURES, EXACT, KNOWN_FIGURES, ROUGH
from checkpoints_zoo.evaluation.metrics import Interval, Plan

# If half the width of an interval is this many times its value, larger ensembles gain nothing, and the interval says
# nothing.
_USELESS_SPREAD = 1e6
_NORMAL_QUANTILE = 1.959964  # Quantile of the normal distribution for two-sided 95 % intervals.


@dataclass(frozen=True)
class Needed:
    """The number of members that an ensemble needs to bring a figure within some distance of its limit.

    Args:
        figure: name of the figure.
        within: the allowed distance from the limit, in the figure's unit.
        members: smallest size from which on the mean figure is within the distance; None if more members than `at_hand`
            are needed.
        low, high: bounds of the 95 % interval of the needed number; None if there is no bound. Numbers above `at_hand`
            are extrapolated, with distances proportional to 1/k.
        at_hand: number of members that were measured.
        extrapolated: needed number of members; a number above `at_hand` is predicted by distances proportional to 1/k.
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
        sizes: measured sizes of ensembles, increasing, from 1 to all members.
        distances: mean figure minus limit, for each of the sizes, in the figure's unit.
        limit: figure of an infinite ensemble, with the bounds of an interval over members.
        spread: half the width of a 95 % interval of the distances over members, as a share of the distances; None for
            fewer than 32 members.
        noise: half the width of a 95 % interval of each distance, in the figure's unit. The interval covers the random
            choice of subsets and, for a figure that counts or sorts, the error of the figure of all members.
    """

    sizes: Sequence[int]
    distances: Sequence[float]
    limit: Interval
    spread: float | None
    noise: Sequence[float]

    def needed(self, figure: str, within: float) -> Needed:
        """Find the smallest ensemble whose mean figure is within some distance of the limit; return it.

        The distance at a size counts as the largest distance at this and all larger sizes. Between measured sizes the
        distance is interpolated linearly in 1/k.

        Args:
            figure: name of the figure.
            within: the allowed distance from the limit, in the figure's unit, above 0.

        >>> growth = Growth((1, 4, 16), (0.8, 0.2, 0.05), Interval(0.1, 0.08, 0.12), 0.25, (0.0, 0.0, 0.0))
        >>> growth.needed("nll", 0.1)
        Needed(figure='nll', within=0.1, members=8, low=6, high=10, at_hand=16, extrapolated=8)
        """
        distances = [abs(x) for x in self.distances]
        needed_size = self._smallest_sufficient_size(distances, within, distances[-1] / within)
        low: int | None = None
        high: int | None = None
        if self.spread is not None and not self.spread < _USELESS_SPREAD:
            low = self.sizes[0]
        elif self.spread is not None:
            half_widths = [math.hypot(self.spread * x, n) for x, n in zip(distances, self.noise, strict=True)]
            # For more than all members, the distance d is proportional to 1/k; solve d ± sqrt((spread d)² + noise²) =
            # within.
            one_minus_spread_squared, noise_of_all = 1 - self.spread**2, self.noise[-1]
            root = math.sqrt(max(0.0, within**2 - one_minus_spread_squared * (within**2 - noise_of_all**2)))
            distance_at_low = (within + root) / one_minus_spread_squared if one_minus_spread_squared > 0 else math.inf
            low = self._smallest_sufficient_size(
                [x - w for x, w in zip(distances, half_widths, strict=True)], within, distances[-1] / distance_at_low
            )
            if within > noise_of_all:
                distance_at_high = (within**2 - noise_of_all**2) / (within + root)
                high = self._smallest_sufficient_size(
                    [x + w for x, w in zip(distances, half_widths, strict=True)],
                    within,
                    distances[-1] / distance_at_high,
                )
        members = self.sizes[-1]
        return Needed(figure, within, needed_size if needed_size <= members else None, low, high, members, needed_size)

    def _smallest_sufficient_size(self, distances: Sequence[float], within: float, size_multiple: float) -> int:
        """Return the least size from which on all distances are at most `within`.

        Args:
            distances: distance from the limit of each size in `sizes`.
            within: largest allowed distance from the limit.
            size_multiple: needed size as a multiple of the number of all members, if all members are not enough.
        """
        largest_distance = -math.inf
        larger_size_and_distance: tuple[int, float] | None = None
        for size, distance in zip(reversed(self.sizes), reversed(distances), strict=True):
            previous_distance, largest_distance = largest_distance, max(largest_distance, distance)
            if largest_distance > within:
                if larger_size_and_distance is None:
                    return _round_up(size * max(size_multiple, 1.0))
                # Interpolate linearly in 1/k between this size and the next larger size.
                share = (within - previous_distance) / (largest_distance - previous_distance)
                return min(
                    larger_size_and_distance[0],
                    _round_up(1 / ((1 - share) / larger_size_and_distance[0] + share / size)),
                )
            larger_size_and_distance = (size, largest_distance)
        return self.sizes[0]


def _round_up(size: float) -> int:
    """Round the size of an ensemble up to a whole number, ignoring errors of float arithmetic; return the number."""
    return math.ceil(size * (1 - 1e-12))


def needed_members(growths: Mapping[str, Growth], figure: str, within: float | str) -> Needed:
    """Find the smallest ensemble whose mean figure is within some distance of the limit; return it.

    Args:
        growths: figure -> its growth with the number of members.
        figure: name of the figure.
        within: the allowed distance from the limit, in the figure's unit, or as a share of the limit ("5%").

    Raises:
        UsageError: there is no figure of this name, or the distance is not above 0.
    """
    if not growths:
        raise UsageError("limits of figures", expected="two members or more", found="one")
    amount, is_percent = check_distance(figure, within, growths)
    distance = amount * abs(growths[figure].limit.value) / 100 if is_percent else amount
    if not distance > 0:
        raise UsageError(f"distance of {figure} from its limit", expected="above 0", found=f"{within} of a limit of 0")
    return growths[figure].needed(figure, distance)


def check_distance(figure: str, within: float | str, figures: Iterable[str]) -> tuple[float, bool]:
    """Check the arguments of `needed_members`; return the distance as a number, and whether it is a percentage of the
    limit.

    Args:
        figure, within: name of the figure, and allowed distance from its limit, as in `needed_members`.
        figures: names of the figures that have a limit.

    Raises:
        UsageError: there is no figure of this name, or the distance is not above 0.
    """
    figures_with_limit = [n for n in figures if n not in CONSTANT_FIGURES]
    if figure not in figures_with_limit:
        found = "a mean over pairs, the same for every size" if figure in CONSTANT_FIGURES else "none such"
        raise UsageError(f"limit of figure {figure!r}", expected=f"one of {', '.join(figures_with_limit)}", found=found)
    is_percent = isinstance(within, str) and within.endswith("%")
    try:
        distance = float(within.removesuffix("%")) if isinstance(within, str) else float(within)
    except (TypeError, ValueError):
        distance = math.nan
    if not 0 < distance < math.inf:
        raise UsageError(
            f"distance of {figure} from its limit",
            expected='a number above 0, or a percentage of the limit such as "5%"',
            found=repr(within)[:80],
        )
    return distance, is_percent


def estimate_growth(
    figure: str, single_figures: Tensor, plan_and_figures_by_size: Mapping[int, tuple[Plan, Tensor]]
) -> Growth:
    """Estimate the limit of a figure from the measured sizes; return the distance of each size from it.

    The mean figure of size k minus the figure of all N members is fitted, over the sizes from 2 on, by
    b (1/k - 1/N) + c (1/k² - 1/N²), by least squares with weight k for size k (the variance of a mean over random
    subsets is proportional to 1/k). The limit is the figure of all members minus b/N + c/N². In simulations (Gaussian
    logits, 64 members, NLL) the distance of all members from the limit has an error of 2 to 6 %; with a line through
    sizes 1 and 64 the error is 20 to 100 %.

    The limit's interval and `spread` come from a jackknife over halves of the members: each half gives a line through
    sizes 1 and N/2.

    Args:
        figure: name of the figure.
        single_figures: (member,) value of the figure for each single member, at least two.
        plan_and_figures_by_size: size -> plan of the subsets of this size, and the figure of each subset, (subset,).
            The plan for the size of all members comes from `jackknife_plan`.
    """
    members = len(single_figures)
    plan, values = plan_and_figures_by_size[members]
    figure_of_all, figures_of_halves = values[0], values[plan.random_slice]
    measured_by_size = {
        size: plan_and_figures for size, plan_and_figures in plan_and_figures_by_size.items() if 1 < size < members
    }
    if len(figures_of_halves):
        measured_by_size.setdefault(len(plan.chosen[1]), (plan, values))
    mean_and_residuals_by_size = {
        size: _mean_and_residuals(single_figures, *plan_and_figures)
        for size, plan_and_figures in sorted(measured_by_size.items())
    }
    mean_by_size = {
        1: float(single_figures.mean()),
        **{size: mean for size, (mean, _) in mean_and_residuals_by_size.items()},
    }
    if KNOWN_FIGURES[figure].growth == EXACT:
        gain_to_limit = (mean_by_size[1] - float(figure_of_all)) * members / (members - 1)
        limit, noise = float(figure_of_all) - gain_to_limit / members, [0.0] * (1 + len(mean_by_size))
        distances = [gain_to_limit / size for size in (*mean_by_size, members)]
    else:
        residuals_by_size = {
            1: single_figures.new_zeros(1),
            **{size: residual for size, (_, residual) in mean_and_residuals_by_size.items()},
        }
        all_members_interval = plan.intervals(values[:, None])[0]
        error = (
            0.0
            if all_members_interval.high is None or KNOWN_FIGURES[figure].growth != ROUGH
            else all_members_interval.high - all_members_interval.value
        )
        limit, noise = _fit_limit(mean_by_size, residuals_by_size, members, float(figure_of_all), error)
        distances = [x - limit for x in (*mean_by_size.values(), float(figure_of_all))]
    limit_interval, spread = Interval(limit, None, None), None
    if len(figures_of_halves):
        single_means = torch.stack([single_figures[subset].mean() for subset in plan.chosen[1:]])
        subset_sizes = values.new_tensor([len(subset) for subset in plan.chosen[1:]])
        gains_to_limit = (single_means - values[1:]) * subset_sizes / (subset_sizes - 1)
        limits_of_subsets = values[1:] - gains_to_limit / subset_sizes
        mean_gain_to_limit = gains_to_limit[: len(figures_of_halves)].mean()
        limit_interval, gain_interval = plan.intervals(
            torch.stack(
                [
                    torch.cat([values.new_tensor([limit]), limits_of_subsets]),
                    torch.cat([mean_gain_to_limit[None], gains_to_limit]),
                ],
                1,
            )
        )
        if gain_interval.high is not None:
            spread = (gain_interval.high - gain_interval.value) / max(abs(gain_interval.value), 1e-300)
        if limit_interval.low is not None and limit_interval.high is not None:
            half_width_below = max(math.hypot(limit - limit_interval.low, noise[-1]), noise[0])
            half_width_above = max(math.hypot(limit_interval.high - limit, noise[-1]), noise[0])
            limit_interval = Interval(limit, limit - half_width_below, limit + half_width_above)
    return Growth((*mean_by_size, members), tuple(distances), limit_interval, spread, tuple(noise))


def _mean_and_residuals(single_figures: Tensor, plan: Plan, subset_figures: Tensor) -> tuple[float, Tensor]:
    """Average a figure over random subsets; return the mean, and each subset's residual around it.

    A control variate makes the mean more exact: a subset's figure is correlated with the mean of its members' single
    figures, whose mean over all members is known.

    Args:
        single_figures: (member,) value of the figure for each single member.
        plan: plan of the measured subsets.
        subset_figures: (subset,) value of the figure for each subset of the plan; only random subsets are averaged.
    """
    if plan.is_complete:
        return float(subset_figures[plan.random_slice].mean()), subset_figures.new_zeros(1)
    chosen, subset_figures = plan.chosen[plan.random_slice], subset_figures[plan.random_slice]
    single_means = torch.stack([single_figures[subset].mean() for subset in chosen])
    mean_deviations = single_means - single_means.mean()
    slope = float(mean_deviations @ subset_figures) / max(float(mean_deviations @ mean_deviations), 1e-300)
    residuals = subset_figures - subset_figures.mean() - slope * mean_deviations
    return float(subset_figures.mean() - slope * (single_means.mean() - single_figures.mean())), residuals


def _fit_limit(
    mean_by_size: Mapping[int, float],
    residuals_by_size: Mapping[int, Tensor],
    member_count: int,
    figure_of_all: float,
    extra_error: float,
) -> tuple[float, list[float]]:
    """Extrapolate a figure beyond all members; return the limit, and for each size the error of the
    figure's distance from the limit.

    Args:
        mean_by_size: size -> mean figure over ensembles of this size.
        residuals_by_size: size -> residual of each subset around the mean, (subset,). Subset i of a small size is part
            of subset i of a larger size, so that their residuals are correlated.
        member_count: number of all members.
        figure_of_all: figure of the ensemble of all members.
        extra_error: the share of the error of `figure_of_all` that does not depend on the means, in the figure's unit.
    """
    sizes = [size for size in mean_by_size if size > 1]
    sizes = sizes if len(sizes) > 1 else list(mean_by_size)
    size_tensor = torch.tensor(sizes, dtype=torch.float64)
    powers = torch.arange(1, 1 + min(2, len(sizes)), dtype=torch.float64)
    powers_of_all = member_count**-powers
    root_sizes = size_tensor.sqrt()[:, None]
    # The distance of all members from the limit is the sum of share * (mean of a size - figure of all members).
    share_list = (
        powers_of_all
        @ torch.linalg.pinv(root_sizes * (size_tensor[:, None] ** -powers - powers_of_all))
        * root_sizes[:, 0]
    ).tolist()
    share_of_size = dict(zip(sizes, share_list, strict=True))
    extrapolated_gain = sum(share * (mean_by_size[size] - figure_of_all) for size, share in share_of_size.items())
    total_share = sum(share_of_size.values())
    noise = []
    for size in (*mean_by_size, member_count):
        weight_of_size = {other_size: share + (size == other_size) for other_size, share in share_of_size.items()}
        if size < member_count:
            weight_of_size.setdefault(size, 1.0)
        residual_sum = torch.zeros(1, dtype=torch.float64)
        for measured_size, size_weight in weight_of_size.items():
            residual_sum = residual_sum + size_weight * residuals_by_size[measured_size]
        sampling_error = _NORMAL_QUANTILE * float(residual_sum.square().mean()) ** 0.5 / len(residual_sum) ** 0.5
        noise.append(math.hypot(sampling_error, (total_share + (size < member_count)) * extra_error))
    return figure_of_all - extrapolated_gain, noise
