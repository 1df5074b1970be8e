"""A diagonal Gaussian over the weights of a network: fitted to members, sampled, pruned.

The Gaussians q_d and q_r of Xiao, Liu & Bamler 2023 (arXiv 2401.00611): q_d is fitted to members as stored, q_r to
members that were aligned to one of the members. Running statistics are not fitted, since running statistics are no
weights, but estimated anew for every network drawn from a Gaussian (see `statistics`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_statistic

Params = Mapping[str, Tensor]
PRUNING_RULES = ("sigma", "snr")


@dataclass(frozen=True, eq=False)
class Gaussian:
    """Independent normal distributions, one per weight.

    Args:
        mean: means of the weights, name -> (*shape), float32.
        std: standard deviations of the weights, name -> (*shape), float32; 0 if all members have the same value.
        fixed: tensors that are no weights, name -> (*shape): integers, and running statistics to be estimated anew.
    """

    mean: Params
    std: Params
    fixed: Params

    @property
    def sigmas(self) -> Tensor:
        """The standard deviations of all weights, (weight,)."""
        return torch.cat([std.flatten() for std in self.std.values()])

    @property
    def center(self) -> dict[str, Tensor]:
        """The network whose weights are the means, name -> (1, *shape)."""
        return self._with_fixed_tensors({name: mean[None] for name, mean in self.mean.items()}, 1)

    def sample(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw networks; return name -> (draw, *shape).

        Networks that are drawn one by one equal networks that are drawn together.

        Args:
            count: number of samples.
            generator: torch generator on the CPU, also if the Gaussian is on another device.
        """
        draws: dict[str, list[Tensor]] = {name: [] for name in self.mean}
        for _ in range(count):
            for name, mean in self.mean.items():
                noise = torch.randn(mean.shape, generator=generator).to(mean.device)
                draws[name].append(mean + self.std[name] * noise)
        return self._with_fixed_tensors({name: torch.stack(values) for name, values in draws.items()}, count)

    def pruned(self, levels: Sequence[float], by: str = "sigma") -> dict[str, Tensor]:
        """Set a share of the weights to 0 and all other weights to their means; return one network for each share, name
        -> (level, *shape).

        The weights of all tensors are ranked together; among equal weights the first is kept.

        Args:
            levels: shares of weights that are set to 0, in 0..1, one share per network.
            by: rule that selects the kept weights. "sigma" keeps weights with the lowest standard deviations, as
                the paper does; "snr" keeps weights with the largest |mean| / standard deviation (Blundell et al. 2015,
                arXiv 1505.05424, section 5.1).

        Raises:
            UsageError: a level is out of its range, or the rule is unknown.

        >>> means = {"w": torch.tensor([1.0, 8.0])}
        >>> gaussian = Gaussian(means, {"w": torch.tensor([0.5, 1.0])}, {})
        >>> gaussian.pruned([0.5])["w"], gaussian.pruned([0.5], by="snr")["w"]
        (tensor([[1., 0.]]), tensor([[0., 8.]]))
        """
        for level in levels:
            if not 0 <= level <= 1:
                raise UsageError("pruning level", expected="a share from 0 to 1", found=repr(level))
        if by not in PRUNING_RULES:
            raise UsageError("rule of pruning", expected=f"one of {', '.join(PRUNING_RULES)}", found=repr(by))
        ranking_values = self.sigmas
        if by == "snr":
            means = torch.cat([mean.flatten() for mean in self.mean.values()])
            ranking_values = -(means.abs() / ranking_values).nan_to_num(nan=0.0, posinf=torch.inf)
        order = ranking_values.argsort(stable=True)
        is_kept = torch.zeros(len(levels), len(order), dtype=torch.bool, device=order.device)
        for row, level in zip(is_kept, levels, strict=True):
            row[order[: len(order) - round(level * len(order))]] = True
        masks = torch.split(is_kept, [mean.numel() for mean in self.mean.values()], dim=1)
        weights = {
            name: torch.where(mask.view(-1, *mean.shape), mean, 0)
            for (name, mean), mask in zip(self.mean.items(), masks, strict=True)
        }
        return self._with_fixed_tensors(weights, len(levels))

    def _with_fixed_tensors(self, weights: dict[str, Tensor], network_count: int) -> dict[str, Tensor]:
        return weights | {name: tensor.expand(network_count, *tensor.shape) for name, tensor in self.fixed.items()}


def fit_gaussian(stacked: Params) -> Gaussian:
    """Fit mean and variance of every weight over the members of a stack; return the Gaussian.

    The variance is unbiased: sums are divided by members - 1. The variance has no lower limit.

    Args:
        stacked: parameters and buffers, name -> (member, *shape), of two members or more.

    Raises:
        UsageError: there are fewer than two members, or integer tensors differ between members.

    >>> gaussian = fit_gaussian({"w": torch.tensor([[1.0], [3.0]])})
    >>> gaussian.mean["w"], gaussian.std["w"]
    (tensor([2.]), tensor([1.4142]))
    """
    members = len(next(iter(stacked.values())))
    return fit_subsets([stacked], torch.ones(1, members, dtype=torch.bool))[0]


def fit_subsets(
    batches: Iterable[Params], subsets: Tensor, device: str | torch.device = "cpu", excluded_names: Collection[str] = ()
) -> list[Gaussian]:
    """Fit a Gaussian to each of many subsets of members, which are read once; return the Gaussians.

    Args:
        batches: batches of stacked members in order, each name -> (member, *shape).
        subsets: whether each member is in each subset, (subset, member) bool; two members or more in each.
        device: torch device of the sums, which are float64.
        excluded_names: names of tensors that are left out, because each is tied to another tensor.

    Raises:
        UsageError: a subset has fewer than two members, or integer tensors differ between members.
    """
    sizes = subsets.sum(1).tolist()
    if min(sizes) < 2:
        expected = "two or more: one has no variance"
        raise UsageError("members to fit a Gaussian to", expected=expected, found=str(min(sizes)), do="Select more")
    first_tensors: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    squared_sums: dict[str, Tensor] = {}
    start = 0
    for stacked in batches:
        member_count = len(next(iter(stacked.values())))
        membership = subsets[:, start : start + member_count].to(device, torch.float64)
        start += member_count
        for name, tensor in stacked.items():
            if name in excluded_names:
                continue
            values = tensor.to(device)
            center = first_tensors.setdefault(name, values[0].clone())
            if not tensor.is_floating_point() or is_statistic(name):
                _check_equal_integers(name, values, center)
                continue
            # Sums are of differences from the first member, since sums of squares of values far from 0 would lose
            # digits.
            deviations = (values.double() - center.double()).flatten(1)
            sums[name] = sums.get(name, 0) + membership @ deviations
            squared_sums[name] = squared_sums.get(name, 0) + membership @ deviations.square()
    gaussians = []
    for i, size in enumerate(sizes):
        mean, std = {}, {}
        for name, total in sums.items():
            center, mean_deviation = first_tensors[name], total[i] / size
            variance = (squared_sums[name][i] - size * mean_deviation.square()).clamp(min=0) / (size - 1)
            mean[name] = (center.double() + mean_deviation.view(center.shape)).float()
            std[name] = variance.sqrt().view(center.shape).float()
        gaussians.append(Gaussian(mean, std, {name: t for name, t in first_tensors.items() if name not in sums}))
    return gaussians


def _check_equal_integers(tensor_name: str, stacked_tensor: Tensor, first_tensor: Tensor) -> None:
    if not stacked_tensor.is_floating_point() and not (stacked_tensor == first_tensor).all():
        raise UsageError(
            f"tensor {tensor_name!r}", expected="the same integers in all members", found="others", tensor=tensor_name
        )
