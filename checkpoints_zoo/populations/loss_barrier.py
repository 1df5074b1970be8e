"""The loss barrier: how far the loss rises on the straight line between two members.

Axes: losses and accuracies (pair, point).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.metrics import Interval, bootstrap_mean
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.untrained_networks import STACK_BYTES, Evaluator, make_evaluator

if TYPE_CHECKING:
    import pandas as pd

Params = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Barriers(PrintedResult):
    """Loss and accuracy on the lines (1 − λ)·first + λ·second between pairs of members.

    Args:
        pairs: member ids of the two ends.
        lambdas: positions on the line, from 0 to 1, (point,).
        losses: mean negative log-likelihood, nats, (pair, point).
        accuracies: accuracies in 0..1, (pair, point).
        stored: losses of the two ends with their stored running statistics, nats, (pair, 2); for networks without
            running statistics `stored` equals the ends of `losses`.
        data: name and fingerprint of the images evaluated on.
        inputs: number of inputs.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" if there are none.
        statistics_images: number of images that running statistics are estimated on.
    """

    pairs: tuple[tuple[int, int], ...]
    lambdas: Tensor
    losses: Tensor
    accuracies: Tensor
    stored: Tensor
    data: str
    inputs: int
    statistics: str
    statistics_images: int

    def _one_line(self) -> str:
        return f"{len(self)} pairs on {self.data.split(' ')[0]}, mean {self.mean} nats"

    def to_text(self) -> str:
        """Return a table with one row per pair."""
        rows = [
            {"first": a, "second": b, "barrier (nats)": height}
            for (a, b), height in zip(self.pairs, self.barriers.tolist(), strict=True)
        ]
        return f"{text_table(rows)}\n\nMean {self.mean} nats, on {self.data.split(' ')[0]}, {self.inputs:,} inputs."

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def barriers(self) -> Tensor:
        """The largest loss of the points minus the mean of the two ends, nats, (pair,); 0 or more."""
        return self.losses.amax(-1) - (self.losses[:, 0] + self.losses[:, -1]) / 2

    @property
    def mean(self) -> Interval:
        """Mean of the barriers, with a bootstrap interval over the pairs (given the member that all pairs share)."""
        mean = bootstrap_mean(self.barriers)
        return mean if mean.low is None else replace(mean, low=max(mean.low, 0.0))  # A barrier is 0 or more.

    def to_frame(self) -> pd.DataFrame:
        """Return one row per pair and point: first, second, lambda, loss, accuracy."""
        import pandas as pd

        rows = [
            {"first": a, "second": b, "lambda": x, "loss": loss, "accuracy": accuracy}
            for (a, b), losses, accuracies in zip(
                self.pairs, self.losses.tolist(), self.accuracies.tolist(), strict=True
            )
            for x, loss, accuracy in zip(self.lambdas.tolist(), losses, accuracies, strict=True)
        ]
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """Return the result as JSON text."""
        mean = self.mean
        values: dict[str, Any] = {
            "data": self.data, "inputs": self.inputs, "statistics": self.statistics,
            "statistics_images": self.statistics_images, "unit": "nats", "level": mean.level,
            "mean": {"value": mean.value, "low": mean.low, "high": mean.high}, "pairs": [list(p) for p in self.pairs],
            "barriers": self.barriers.tolist(), "lambdas": self.lambdas.tolist(), "losses": self.losses.tolist(),
            "accuracies": self.accuracies.tolist(), "stored": self.stored.tolist(),
        }  # fmt: skip
        return json.dumps(values, indent=1)


def barrier(
    first: Collection | Member,
    second: Member | None = None,
    data: ImageInput | None = None,
    *,
    to: int | None = None,
    points: int = 25,
    statistics: ImageInput | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> Barriers:
    """Measure the loss on straight lines between members; return the losses of all lines.

    `barrier(members)` measures the lines from one member of a collection to all others, `barrier(a, b)` the line
    between two members. `barrier(members)` measures before alignment, `barrier(members.align(to=0))` after alignment.

    The barrier is the largest loss of the points minus the mean of the two ends (Ainsworth et al. 2023, Git Re-Basin,
    arXiv 2209.04836). Running statistics of batch norm are estimated anew at every point, the ends included, so that
    a line has no jumps.

    Args:
        first: collection of two members or more (each snapshot counts as a member), or the member at λ = 0.
        second: the member at λ = 1, of the same architecture; None with a collection.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        to: id of the collection's member at which all lines start; None for its first member.
        points: number of evenly spaced points on a line, both ends included.
        statistics: images for running statistics, by name (the training split) or as `images.of` takes them; None for
            the collection's own.
        device: torch device on which the networks run, in float32.
        batch: largest number of images in a forward pass.

    Raises:
        UsageError: the images lack labels or have other classes, there are fewer than two points or members, or the
            members have different networks.
        MemberNotFound: there is no member with the id `to`.
        DamagedError: some weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=4)
    >>> lines = barrier(members)
    >>> lines.pairs, bool(lines.mean.low > 0.5)
    (((0, 1), (0, 2), (0, 3)), True)
    >>> barrier(members[0], members[1]).losses.shape
    torch.Size([1, 25])
    """
    _check_ends(first, second, to)
    members = first.selected if isinstance(first, Member) else first
    evaluator = make_evaluator(members, data, statistics, device, batch)
    if isinstance(first, Member) and second is not None:
        lines = iter([_read_both_ends(first, second, evaluator.device)])
        return _measure_lines(evaluator, [(first.id, second.id)], lines, points)
    start = members[0] if to is None else members.member(to)
    key = (start.id, start.epoch)
    pairs = [(start.id, member) for member, epoch in members._snapshot_keys if (member, epoch) != key]
    return _measure_lines(evaluator, pairs, _read_line_ends(members, start, evaluator.device), points)


def _check_ends(first: object, second: object, to: int | None) -> None:
    """Check that the arguments are two members, or a collection alone.

    Raises:
        UsageError: the arguments are neither two members nor a collection alone.
    """
    found = type(second).__name__
    if isinstance(first, Member):
        if not isinstance(second, Member):
            do = "Give a second member, or a collection alone"
            raise UsageError("second", expected="a Member beside a Member", found=found, do=do)
        if to is not None:
            raise UsageError("to", expected="None: the line starts at the first member", found=repr(to))
        return
    if not isinstance(first, Collection):
        expected = "a Collection, or a Member and a second one"
        raise UsageError("members of a loss barrier", expected=expected, found=type(first).__name__)
    if second is not None:
        raise UsageError("second", expected="None beside a Collection", found=found, do="Give images as data=")
    if len(first) < 2:
        found = f"{len(first)} of {first.name}"
        raise UsageError("members of a loss barrier", expected="two or more", found=found, do="Select more members")


def _read_both_ends(first_member: Member, second_member: Member, device: torch.device) -> tuple[Params, Params]:
    """Read the weights of two members; return both, name -> (*shape).

    Raises:
        UsageError: the members have different networks.
    """
    start, end = (_read_weights(member, device) for member in (first_member, second_member))
    shapes = [{name: tuple(t.shape) for name, t in params.items()} for params in (start, end)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"members {first_member.collection}/{first_member.id} and {second_member.collection}/{second_member.id}",
            expected="tensors of the same names and shapes",
            found="others",
        )
    return start, end


def _read_line_ends(
    members: Collection, reference_member: Member, device: torch.device
) -> Iterator[tuple[Params, Params]]:
    """Yield the weights of both ends of each line from one member to each other member, in order."""
    reference, keys = _read_weights(reference_member, device), iter(members._snapshot_keys)
    batches = members.batches(members._member_count_within(STACK_BYTES), device, torch.float32)
    for _, stacked in progress(batches, len(members), f"{members.name}: lines", size=lambda batch: len(batch[0])):
        for i in range(len(next(iter(stacked.values())))):
            if next(keys) != (reference_member.id, reference_member.epoch):
                yield reference, {name: t[i] for name, t in stacked.items()}


def _read_weights(member: Member, device: torch.device) -> dict[str, Tensor]:
    """Return a member's parameters and buffers in float32, name -> (*shape)."""
    return {name: t[0] for name, t in member.selected._read(device, torch.float32).items()}


def interpolate(first_network: Params, second_network: Params, lambdas: Tensor) -> dict[str, Tensor]:
    """Return the networks (1 − λ)·first + λ·second, stacked: name -> (point, *shape); the two ends are exact.

    Running statistics are interpolated like weights and have to be estimated anew: see
    `statistics.reestimate_statistics`.

    Args:
        first_network, second_network: tensors of the two networks, name -> (*shape).
        lambdas: positions on the line, (point,).

    Raises:
        UsageError: integer tensors differ.

    >>> interpolate({"w": torch.zeros(2)}, {"w": torch.ones(2)}, torch.tensor([0.0, 0.25]))["w"]
    tensor([[0.0000, 0.0000],
            [0.2500, 0.2500]])
    """
    line = {}
    for name, start in first_network.items():
        end = second_network[name]
        if start.is_floating_point():
            weight = lambdas.to(start.device, start.dtype).view(-1, *[1] * start.ndim)
            line[name] = torch.lerp(start[None], end[None], weight)
        elif torch.equal(start, end):
            line[name] = start.expand(len(lambdas), *start.shape)
        else:
            raise UsageError(f"tensor {name!r}", expected="the same integers in both members", found="others")
    return line


def _measure_lines(
    evaluator: Evaluator, pairs: list[tuple[int, int]], lines: Iterator[tuple[Params, Params]], point_count: int
) -> Barriers:
    if type(point_count) is not int or point_count < 2:
        raise UsageError("points on a line", expected="a whole number from 2", found=repr(point_count))
    lambdas = torch.linspace(0, 1, point_count, dtype=torch.float64)
    losses, accuracies, stored = [], [], []
    for first, second in lines:
        member_bytes = sum(t.numel() * t.element_size() for t in first.values())
        with one_thread(member_bytes < SMALL_MEMBER_BYTES and evaluator.device.type == "cpu"):
            parts = [
                evaluator.log_probs(interpolate(first, second, lambda_chunk))
                for lambda_chunk in torch.split(lambdas, max(1, STACK_BYTES // member_bytes))
            ]
            losses.append(torch.cat([evaluator.losses(part) for part in parts]))
            accuracies.append(torch.cat([evaluator.accuracies(part) for part in parts]))
            ends = losses[-1][[0, -1]]
            if evaluator.training is not None:
                both_ends = {name: torch.stack([first[name], second[name]]) for name in first}
                ends = evaluator.losses(evaluator.log_probs(both_ends, reestimated=False))
            stored.append(ends)
    return Barriers(
        pairs=tuple(pairs),
        lambdas=lambdas,
        losses=torch.stack(losses),
        accuracies=torch.stack(accuracies),
        stored=torch.stack(stored),
        data=arguments.report_image_name(evaluator.test.data),
        inputs=len(evaluator.test.data),
        statistics=evaluator.statistics_image_name,
        statistics_images=evaluator.statistics_image_count,
    )
