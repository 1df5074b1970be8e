"""The figures of any subset of a population's members, from logits that need not fit into memory.

The logits are walked over in blocks of inputs: once for what does not depend on the subset, and once for each group of
subsets whose mean probabilities `MEMORY` holds (the calibration of each class sorts all inputs).

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.figures import (
    FIGURES,
    OOD_FIGURES,
    PROBABILITIES,
    SCALED,
    SCORES,
    TEMPERATURE,
)

MEMORY = 2**27  # bytes of mean probabilities that are held
TOGETHER = 512  # subsets in a walk over the inputs out of distribution, of which a few numbers an input are held
VALUES = 2**20  # (member, input) that are held at a time
READ_BYTES = 2**24  # of logits that are read at a time
BLOCK_BYTES = 2**22  # of probabilities in a block of inputs, of all members or of all subsets


class Logits(Protocol):
    """Logits of members that can be read in parts."""

    @property
    def shape(self) -> Sequence[int]:
        """(members, inputs, classes)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the logits of some inputs, (member, input, class)."""

    def one(self, at: int) -> Tensor:
        """Return the logits of the member at a position, (input, class)."""


@dataclass(frozen=True)
class InMemory:
    """Logits in memory.

    Args:
        logits: (member, input, class).
    """

    logits: Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.logits.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        return self.logits[:, begin:end].to(dtype)

    def one(self, at: int) -> Tensor:
        return self.logits[at]


@dataclass(frozen=True)
class InputSubset:
    """Logits of some of the inputs that other logits have.

    Args:
        logits: of all inputs.
        inputs: (input,) positions of the inputs to keep, rising.
    """

    logits: Logits
    inputs: Tensor

    @property
    def shape(self) -> Sequence[int]:
        members, _, classes = self.logits.shape
        return members, len(self.inputs), classes

    @property
    def dtype(self) -> torch.dtype:
        return self.logits.dtype

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        members, _, classes = self.shape
        out = torch.empty(members, end - begin, classes, dtype=dtype)
        wanted = self.inputs[begin:end].tolist()
        longest = max(1, READ_BYTES // (members * classes * self.dtype.itemsize))
        done = 0
        # Runs of neighbours, with the inputs between them that are dropped: few long reads, none over READ_BYTES.
        while done < len(wanted):
            first = wanted[done]
            after = next((i for i in range(done, len(wanted)) if wanted[i] >= first + longest), len(wanted))
            read = self.logits.block(first, wanted[after - 1] + 1, dtype)
            out[:, done:after] = read[:, self.inputs[begin + done : begin + after] - first]
            done = after
        return out

    def one(self, at: int) -> Tensor:
        return self.logits.one(at)[self.inputs]


class DataSetLogits:
    """Logits of one data set, member by member, and what is computed of them once for all subsets.

    Args:
        logits: of all members.
        labels: (input,), None for inputs without.

    Attributes:
        entropy: (member,) mean over the inputs, float64.
        information: (input,) mutual information of label and member, of all members.
        mean_probs: (input, class) of all members.
        label_log_probs: (member, input) log probability of each label.
        voted: (member, input) most probable class.
    """

    def __init__(self, logits: Tensor | Logits, labels: Tensor | None) -> None:
        self.logits: Logits = InMemory(logits) if isinstance(logits, Tensor) else logits
        self.labels = labels
        members, inputs, classes = self.logits.shape
        self.kind = kind = torch.promote_types(self.logits.dtype, torch.float32)
        self.entropy = torch.zeros(members, dtype=torch.float64)
        self.information = torch.empty(inputs, dtype=kind)
        self.mean_probs = torch.empty(inputs, classes, dtype=kind)
        labelled = inputs if labels is not None else 0
        self.label_log_probs = torch.empty(members, labelled, dtype=kind)
        self.voted = torch.empty(members, labelled, dtype=torch.int16 if classes < 2**15 else torch.int32)
        for here, logits_here in self.blocks():
            log_probs = logits_here.log_softmax(-1)
            probs = log_probs.exp()
            entropy = metrics.entropy(probs)
            self.entropy += entropy.double().sum(1) / inputs
            self.mean_probs[here] = probs.mean(0)
            total = metrics.entropy(self.mean_probs[here], check=False)
            self.information[here] = (total - entropy.mean(0)).clamp_(min=0)
            if labels is not None:
                at = labels[here].expand(members, -1).unsqueeze(-1)
                self.label_log_probs[:, here] = log_probs.gather(-1, at).squeeze(-1)
                self.voted[:, here] = probs.argmax(-1).to(self.voted.dtype)

    def blocks(self, rows: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Walk over the inputs; yield where they are and all members' logits (member, input, class).

        Args:
            rows: probabilities (row, input, class) that are made of them.
        """
        members, inputs, classes = self.logits.shape
        step = max(1, BLOCK_BYTES // (4 * max(rows, members) * classes))
        together = step * max(1, READ_BYTES // (self.logits.dtype.itemsize * members * classes * step))
        for begin in range(0, inputs, together):
            read = self.logits.block(begin, min(inputs, begin + together), self.logits.dtype)
            for at in range(0, read.shape[1], step):
                some = read[:, at : at + step]
                yield slice(begin + at, begin + at + some.shape[1]), some.to(self.kind)

    def means(self, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Average the members of subsets; yield where the inputs are and mean probabilities (subset, input, class).

        Args:
            weights: (subset, member), 1 for those that are in it.
        """
        weights = weights.to(self.kind)
        sizes = weights.sum(1)[:, None, None]
        # A product with one row adds up in another order at the end of a block: equal inputs would not stay level.
        rows = weights if len(weights) > 1 else weights.expand(2, -1)
        for here, logits in self.blocks(len(weights)):
            # Ones and zeros, divided after the sum: of members that agree the mean is what each says.
            sums = (rows @ logits.softmax(-1).flatten(1))[: len(weights)]
            yield here, sums.view(len(weights), -1, logits.shape[-1]).div_(sizes)

    def all_means(self, weights: Tensor) -> Tensor:
        """Return the mean probabilities of subsets on all inputs, (subset, input, class); weights as in `means`."""
        probs = torch.empty(len(weights), *self.logits.shape[1:], dtype=self.kind)
        for here, means in self.means(weights):
            probs[:, here] = means
        return probs

    def log_probs_of_labels(self, at: Tensor) -> Tensor:
        """Return the log of some members' mean probability of each label, (input,), whatever underflows.

        Args:
            at: their positions.
        """
        step = max(1, VALUES // len(at))
        parts = [part.index_select(0, at).logsumexp(0) for part in torch.split(self.label_log_probs, step, 1)]
        return torch.cat(parts) - math.log(len(at))

    def disagreement(self, at: Tensor) -> Tensor:
        """Return the disagreement of some members, NaN for one, float64.

        Args:
            at: their positions.
        """
        inputs, classes = self.mean_probs.shape
        disagreement = torch.zeros((), dtype=torch.float64)
        for part in torch.split(self.voted, max(1, VALUES // len(at)), 1):
            voted = part.index_select(0, at).long()
            disagreement += metrics.disagreement_of_votes(voted, classes) * (voted.shape[1] / inputs)
        return disagreement

    def log_probs(self, at: Tensor, probs: Tensor) -> Tensor:
        """Return the log of some members' mean probabilities, (input, class), a label's also where it underflows.

        Another class's that is 0 in this dtype counts as the least number there is in it.

        Args:
            at: positions of the members.
            probs: their mean probabilities, (input, class).
        """
        if len(at) == 1:
            return self.logits.one(int(at)).to(self.kind).log_softmax(-1)
        least = torch.finfo(probs.dtype).tiny
        log_probs = probs.clamp_min(least).log_()
        if self.labels is None:
            return log_probs
        labels = self.labels.unsqueeze(-1)
        exact, rounded = self.log_probs_of_labels(at).unsqueeze(-1), log_probs.gather(-1, labels)
        # Only where it underflows: another rounding would tell labels from other classes that are level with them.
        return log_probs.scatter_(-1, labels, torch.where(probs.gather(-1, labels) < least, exact, rounded))


class Population:
    """Predictions of all members, and the figures of any subset of them.

    Args:
        logits: on inputs with labels.
        labels: (input,).
        ood_logits: on inputs out of distribution, None without any.
        held_out: logits on other inputs, and their labels (input,): each subset's temperature is fitted to them. None
            for no temperature scaling.
    """

    def __init__(
        self,
        logits: Tensor | Logits,
        labels: Tensor,
        ood_logits: Tensor | Logits | None,
        held_out: tuple[Tensor | Logits, Tensor] | None = None,
    ) -> None:
        self.members = logits.shape[0]
        self.labels = labels
        self.inside = DataSetLogits(logits, labels)
        self.outside = None if ood_logits is None else DataSetLogits(ood_logits, None)
        self.held_out = None if held_out is None else DataSetLogits(*held_out)
        ood_inputs = 0 if self.outside is None else self.outside.logits.shape[1]
        self.is_ood = torch.arange(len(labels) + ood_inputs) >= len(labels)
        self.names = [n for n in FIGURES if self.outside is not None or n not in OOD_FIGURES]
        self.scaled_names: list[str] = []
        if self.held_out is not None:
            self.scaled_names = [n for n in SCALED if n == TEMPERATURE or n in self.names]

    def measure(self, subsets: Sequence[Tensor]) -> Tensor:
        """Measure the ensembles of some members each; return (subset, figure) float64.

        The figures are those of `names`, and after temperature scaling those of `scaled_names`.

        Args:
            subsets: positions of members, (k,) each; duplicates are measured once.
        """
        order = {tuple(subset.tolist()): subset for subset in subsets}
        rows = {key: self._single(int(subset)) for key, subset in order.items() if len(key) == 1}
        rest = [key for key in order if len(key) > 1]
        size = _at_a_time(self.inside)
        for at in range(0, len(rest), TOGETHER):
            group = [order[key] for key in rest[at : at + TOGETHER]]
            weights = torch.zeros(len(group), self.members)
            for row, subset in zip(weights, group, strict=True):
                row[subset] = 1
            temperatures = self._temperatures(group, weights)
            outside = None if self.outside is None else _OodPredictions.of_subsets(self.outside, weights, temperatures)
            for i in range(0, len(group), size):
                probs = self.inside.all_means(weights[i : i + size])
                for j, subset in enumerate(group[i : i + size]):
                    temperature = None if temperatures is None else temperatures[i + j]
                    rows[tuple(subset.tolist())] = self._row(subset, probs[j], temperature, outside, i + j)
                del probs  # or the next group's are held beside them
        return torch.stack([rows[tuple(subset.tolist())] for subset in subsets])

    def _single(self, at: int) -> Tensor:
        """Return the figures of one member."""
        temperature = None
        if self.held_out is not None and self.held_out.labels is not None:
            log_probs = self.held_out.logits.one(at).to(self.held_out.kind).log_softmax(-1)
            temperature = metrics.temperature(log_probs, self.held_out.labels, check=False)
        outside = None if self.outside is None else _OodPredictions.of_member(self.outside, at, temperature)
        probs = self.inside.logits.one(at).to(self.inside.kind).softmax(-1)
        return self._row(torch.tensor([at]), probs, temperature, outside, 0)

    def _temperatures(self, subsets: Sequence[Tensor], weights: Tensor) -> Tensor | None:
        """Fit the temperature of each subset to the inputs held out; return (subset,) float64, None without any.

        Args:
            subsets: positions of members.
            weights: (subset, member), 1 for those that are in it.
        """
        held_out = self.held_out
        if held_out is None or held_out.labels is None:
            return None
        temperatures = torch.empty(len(subsets), dtype=torch.float64)
        size = _at_a_time(held_out)
        for i in range(0, len(subsets), size):
            probs = held_out.all_means(weights[i : i + size])
            for j, subset in enumerate(subsets[i : i + size]):
                temperatures[i + j] = metrics.temperature(
                    held_out.log_probs(subset, probs[j]), held_out.labels, check=False
                )
            del probs
        return temperatures

    def _row(
        self, subset: Tensor, probs: Tensor, temperature: Tensor | None, outside: _OodPredictions | None, at: int
    ) -> Tensor:
        """Return the figures of a subset before and after scaling, (figure,) float64.

        Args:
            subset: positions of the members.
            probs: their mean probabilities, (input, class).
            temperature: theirs, None for no scaling.
            outside: predictions of a group of subsets on the inputs out of distribution.
            at: the subset's place in that group.
        """
        inside = self.inside
        figures = self._of_probs(probs, None if outside is None else outside.largest[at])
        figures["nll"] = -inside.log_probs_of_labels(subset).double().mean()
        figures["mi_id"] = (metrics.entropy(probs, check=False).double().mean() - inside.entropy[subset].mean()).clamp(
            min=0
        )
        figures["disagreement"] = inside.disagreement(subset)
        if outside is not None and self.outside is not None:
            figures["mi_ood"] = (outside.entropy[at].double() - self.outside.entropy[subset].mean()).clamp(min=0)
        row = [figures[n] for n in self.names]
        if temperature is not None:
            log_probs = metrics.tempered(inside.log_probs(subset, probs), temperature.to(probs.dtype))
            figures = self._of_probs(log_probs.exp(), None if outside is None else outside.scaled[at])
            figures["nll"] = metrics.nll(log_probs, self.labels, check=False)
            figures[TEMPERATURE] = temperature
            row += [figures[n] for n in self.scaled_names]
        return torch.stack([x.double() for x in row])

    def _of_probs(self, probs: Tensor, largest: Tensor | None) -> dict[str, Tensor]:
        """Return the figures that probabilities alone decide.

        Args:
            probs: (input, class).
            largest: the largest probability of each input out of distribution, (input,).
        """
        figures = self._metrics(PROBABILITIES, probs, self.labels)
        if largest is not None:
            figures |= self._metrics(SCORES, -torch.cat([probs.amax(-1), largest]), self.is_ood)
        return figures

    def _metrics(self, of: str, values: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the figures that are computed of probabilities, or of scores, each by the metric of its name."""
        names = [name for name in self.names if FIGURES[name].of == of]
        return {name: getattr(metrics, name)(values, targets, check=False) for name in names}

    def drawing(self, temperature: float | None = None) -> dict[str, Any]:
        """Return what a picture needs: bins of a reliability diagram, information of each input.

        Args:
            temperature: of all members, for the bins after scaling.
        """
        probs = self.inside.mean_probs
        values = _bars("reliability", probs, self.labels)
        if temperature is not None:
            log_probs = self.inside.log_probs(torch.arange(self.members), probs)
            values |= _bars("scaled_reliability", metrics.tempered(log_probs, temperature).exp(), self.labels)
        values["mi_id"] = self.inside.information.tolist()
        if self.outside is not None:
            values["mi_ood"] = self.outside.information.tolist()
        return values


@dataclass(frozen=True)
class _OodPredictions:
    """Predictions of some subsets on the inputs out of distribution.

    Args:
        largest: mean probability, (subset, input).
        entropy: mean over the inputs, (subset,).
        scaled: `largest` after temperature scaling.
    """

    largest: Tensor
    entropy: Tensor
    scaled: Tensor

    @classmethod
    def of_subsets(cls, data: DataSetLogits, weights: Tensor, temperatures: Tensor | None) -> _OodPredictions:
        """Walk over the inputs once for some subsets; return their predictions.

        Args:
            data: logits of those inputs.
            weights: (subset, member), 1 for those that are in it.
            temperatures: (subset,), None for no scaling.
        """
        largest = torch.empty(len(weights), data.logits.shape[1], dtype=data.kind)
        scaled = torch.empty_like(largest) if temperatures is not None else largest
        entropy = torch.zeros(len(weights), dtype=torch.float64)
        for here, means in data.means(weights):
            largest[:, here] = means.amax(-1)
            entropy += metrics.entropy(means, check=False).double().sum(1)
            if temperatures is not None:
                log_probs = means.clamp_min_(torch.finfo(means.dtype).tiny).log_()
                scaled[:, here] = (
                    metrics.tempered(log_probs, temperatures.to(means.dtype)[:, None, None]).amax(-1).exp()
                )
        return cls(largest, entropy / largest.shape[1], scaled)

    @classmethod
    def of_member(cls, data: DataSetLogits, at: int, temperature: Tensor | None) -> _OodPredictions:
        """Return the predictions of the member at a position, as those of one subset; arguments as in `of_subsets`."""
        logits = data.logits.one(at).to(data.kind)
        probs = logits.softmax(-1)  # as in `_single`: equal inputs in and out of distribution are to be level
        largest = probs.amax(-1)[None]
        scaled = largest
        if temperature is not None:
            scaled = metrics.tempered(logits.log_softmax(-1), temperature.to(data.kind)).exp().amax(-1)[None]
        return cls(largest, metrics.entropy(probs, check=False).double().mean()[None], scaled)


def _at_a_time(data: DataSetLogits) -> int:
    """Return how many subsets' mean probabilities on a set of inputs are held."""
    _, inputs, classes = data.logits.shape
    return max(1, MEMORY // (4 * inputs * classes))


def _bars(name: str, probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the bars of a reliability diagram, with a name before each."""
    bins = metrics.reliability(probs, labels)
    return {f"{name}_{n}": getattr(bins, n).tolist() for n in ("confidence", "accuracy", "inputs")}
