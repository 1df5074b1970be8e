"""Measure any subset of a population's members, from logits that need not fit into memory.

The logits are read in blocks of inputs: once for the values that do not depend on the subset, and once for each group
of subsets whose mean probabilities fit into `MOST_MEAN_BYTES`.

Axes: logits and probabilities (member, input, class).

This is one file, because figures of subsets are made block by block, as the logits are read.
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
    SCALED_FIGURES,
    SCORES,
    TEMPERATURE,
    UNCERTAINTY,
)
from checkpoints_zoo.formats.progress import progress

MOST_MEAN_BYTES = 2**27  # Largest number of bytes of mean probabilities in memory at a time.
SUBSETS_PER_PASS = 512  # Number of subsets measured in one pass over the inputs out of distribution.
MOST_VALUES = 2**20  # Largest number of (member, input) values in memory at a time.
MOST_READ_BYTES = 2**24  # Largest number of bytes of logits in one read.
BLOCK_BYTES = 2**22  # Number of bytes of probabilities in a block of inputs, for all members or for all subsets.


class Logits(Protocol):
    """Logits of members that can be read in parts."""

    @property
    def shape(self) -> Sequence[int]:
        """Numbers of members, inputs and classes."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the logits of some inputs, (member, input, class)."""

    def one(self, position: int) -> Tensor:
        """Return the logits of the member at a position, (input, class)."""


@dataclass(frozen=True)
class InMemory:
    """Logits in memory.

    Args:
        logits: logits in memory, (member, input, class).
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

    def one(self, position: int) -> Tensor:
        return self.logits[position]


@dataclass(frozen=True)
class InputSubset:
    """The logits of some of the inputs of other logits.

    Args:
        logits: logits of all inputs, from which some are selected.
        inputs: rising positions of the inputs to keep, (input,).
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
        selected_logits = torch.empty(members, end - begin, classes, dtype=dtype)
        positions = self.inputs[begin:end].tolist()
        most_inputs_per_read = max(1, MOST_READ_BYTES // (members * classes * self.dtype.itemsize))
        start = 0
        # The logits are read by few long reads of at most MOST_READ_BYTES, which include unselected inputs between
        # selected ones.
        while start < len(positions):
            first = positions[start]
            stop = next(
                (i for i in range(start, len(positions)) if positions[i] >= first + most_inputs_per_read),
                len(positions),
            )
            read_logits = self.logits.block(first, positions[stop - 1] + 1, dtype)
            selected_logits[:, start:stop] = read_logits[:, self.inputs[begin + start : begin + stop] - first]
            start = stop
        return selected_logits

    def one(self, position: int) -> Tensor:
        return self.logits.one(position)[self.inputs]


class DataSetLogits:
    """Logits of one data set, and values that are computed once for all subsets of members.

    Args:
        logits: logits of all members.
        labels: labels of the inputs, (input,); None if there are none.

    Attributes:
        entropy: mean entropy over the inputs for each member, (member,), float64.
        information: mutual information of label and member for each input, over all members, (input,).
        mean_probs: mean probabilities of all members, (input, class).
        label_log_probs: log probability of each label for each member, (member, input).
        votes: most probable class of each input for each member, (member, input).
        log_other_probs: log(1 − p) for the largest probability p, (member, input); exact also where p rounds to 1.
    """

    def __init__(self, logits: Tensor | Logits, labels: Tensor | None) -> None:
        self.logits: Logits = InMemory(logits) if isinstance(logits, Tensor) else logits
        self.labels = labels
        members, inputs, classes = self.logits.shape
        self.dtype = dtype = torch.promote_types(self.logits.dtype, torch.float32)
        self.entropy = torch.zeros(members, dtype=torch.float64)
        self.information = torch.empty(inputs, dtype=dtype)
        self.mean_probs = torch.empty(inputs, classes, dtype=dtype)
        labelled_input_count = inputs if labels is not None else 0
        self.label_log_probs = torch.empty(members, labelled_input_count, dtype=dtype)
        self.votes = torch.empty(members, labelled_input_count, dtype=torch.int16 if classes < 2**15 else torch.int32)
        self.log_other_probs = torch.empty(members, inputs, dtype=dtype)
        for span, span_logits in self.blocks():
            self.log_other_probs[:, span] = _log_other_probs(span_logits)
            log_probs = span_logits.log_softmax(-1)
            probs = log_probs.exp()
            entropy = metrics.entropy(probs)
            self.entropy += entropy.double().sum(1) / inputs
            self.mean_probs[span] = probs.mean(0)
            total = metrics.entropy(self.mean_probs[span], check=False)
            self.information[span] = (total - entropy.mean(0)).clamp_(min=0)
            if labels is not None:
                label_index = labels[span].expand(members, -1).unsqueeze(-1)
                self.label_log_probs[:, span] = log_probs.gather(-1, label_index).squeeze(-1)
                self.votes[:, span] = probs.argmax(-1).to(self.votes.dtype)

    def blocks(self, array_count: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over blocks of inputs; yield the range of inputs and all members' logits (member, input, class).

        Args:
            array_count: number of arrays (input, class) that the caller computes from a block; more arrays make blocks
                smaller.
        """
        members, inputs, classes = self.logits.shape
        step = max(1, BLOCK_BYTES // (4 * max(array_count, members) * classes))
        inputs_per_read = step * max(1, MOST_READ_BYTES // (self.logits.dtype.itemsize * members * classes * step))
        for read_start in range(0, inputs, inputs_per_read):
            read_logits = self.logits.block(read_start, min(inputs, read_start + inputs_per_read), self.logits.dtype)
            for start in range(0, read_logits.shape[1], step):
                block = read_logits[:, start : start + step]
                yield slice(read_start + start, read_start + start + block.shape[1]), block.to(self.dtype)

    def iterate_mean_probs(self, membership: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Average the members of subsets; yield ranges of inputs and mean probabilities (subset, input, class).

        Args:
            membership: 1 for the members of a subset, else 0, (subset, member).
        """
        membership = membership.to(self.dtype)
        sizes = membership.sum(1)[:, None, None]
        # A matrix product with a single row adds up in another order at the end of a block, so that equal inputs would
        # get unequal values.
        summed_membership = membership if len(membership) > 1 else membership.expand(2, -1)
        for span, logits in self.blocks(len(membership)):
            # Sum first, then divide: if all members agree, the mean is exactly their common value.
            sums = (summed_membership @ logits.softmax(-1).flatten(1))[: len(membership)]
            yield span, sums.view(len(membership), -1, logits.shape[-1]).div_(sizes)

    def mean_probs_of_subsets(self, membership: Tensor) -> Tensor:
        """Return the mean probabilities of subsets on all inputs, (subset, input, class).

        Args:
            membership: the same argument as in `iterate_mean_probs`.
        """
        probs = torch.empty(len(membership), *self.logits.shape[1:], dtype=self.dtype)
        for span, means in self.iterate_mean_probs(membership):
            probs[:, span] = means
        return probs

    def log_probs_of_labels(self, member_positions: Tensor) -> Tensor:
        """Return the log of some members' mean probability of each label, (input,); the log is exact even if the
        probability underflows.

        Args:
            member_positions: positions of the members of the subset.
        """
        step = max(1, MOST_VALUES // len(member_positions))
        parts = [
            part.index_select(0, member_positions).logsumexp(0) for part in torch.split(self.label_log_probs, step, 1)
        ]
        return torch.cat(parts) - math.log(len(member_positions))

    def uncertainty(self, member_positions: Tensor, largest_probs: Tensor) -> Tensor:
        """Return log(1 − p), p the largest mean probability of some members, (input,); exact also where p rounds to 1.

        Args:
            member_positions: positions of the members of the subset.
            largest_probs: largest mean probability p of each input, (input,).
        """
        uncertainty = torch.log1p(-largest_probs.double().clamp(max=1))
        # Where 1 − p is below 0.5 / members, all members agree on the class, and 1 − p is the mean of the members'
        # values.
        is_near_1 = largest_probs > 1 - 0.5 / len(member_positions)
        if bool(is_near_1.any()):
            log_other_probs = self.log_other_probs[:, is_near_1].index_select(0, member_positions).double()
            uncertainty[is_near_1] = log_other_probs.logsumexp(0) - math.log(len(member_positions))
        return uncertainty.to(self.dtype)

    def disagreement(self, member_positions: Tensor) -> Tensor:
        """Return the disagreement of some members, float64; NaN for a single member.

        Args:
            member_positions: positions of the members of the subset.
        """
        inputs, classes = self.mean_probs.shape
        disagreement = torch.zeros((), dtype=torch.float64)
        for part in torch.split(self.votes, max(1, MOST_VALUES // len(member_positions)), 1):
            votes = part.index_select(0, member_positions).long()
            disagreement += metrics.disagreement_of_votes(votes, classes) * (votes.shape[1] / inputs)
        return disagreement

    def log_mean_probs(self, member_positions: Tensor, mean_probs: Tensor) -> Tensor:
        """Return the log of some members' mean probabilities, (input, class), exact for a label that underflows.

        Another class's probability that is 0 in this dtype counts as the smallest normal number of the dtype.

        Args:
            member_positions: positions of the members of the subset.
            mean_probs: mean probabilities of these members, (input, class).
        """
        if len(member_positions) == 1:
            return self.logits.one(int(member_positions)).to(self.dtype).log_softmax(-1)
        smallest_normal = torch.finfo(mean_probs.dtype).tiny
        log_probs = mean_probs.clamp_min(smallest_normal).log_()
        if self.labels is None:
            return log_probs
        labels = self.labels.unsqueeze(-1)
        exact_log_probs, rounded_log_probs = (
            self.log_probs_of_labels(member_positions).unsqueeze(-1),
            log_probs.gather(-1, labels),
        )
        # Replace a label's probability only where the probability underflows: elsewhere the exact value is rounded
        # differently, which could break a tie between the label and another class.
        return log_probs.scatter_(
            -1, labels, torch.where(mean_probs.gather(-1, labels) < smallest_normal, exact_log_probs, rounded_log_probs)
        )


class Population:
    """Predictions of all members, and the figures of any subset of them.

    Args:
        logits: logits on inputs with labels.
        labels: number of the class of each input, (input,).
        ood_logits: logits on inputs out of distribution; None if there are none.
        held_out: logits on other inputs and their labels (input,), to which each subset's temperature is fitted.
            `held_out` is None for no temperature scaling.
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
        self.test = DataSetLogits(logits, labels)
        self.ood = None if ood_logits is None else DataSetLogits(ood_logits, None)
        self.held_out = None if held_out is None else DataSetLogits(*held_out)
        ood_inputs = 0 if self.ood is None else self.ood.logits.shape[1]
        self.is_ood = torch.arange(len(labels) + ood_inputs) >= len(labels)
        self.names = [n for n in FIGURES if self.ood is not None or n not in OOD_FIGURES]
        self.scaled_names: list[str] = []
        if self.held_out is not None:
            self.scaled_names = [n for n in SCALED_FIGURES if n == TEMPERATURE or n in self.names]

    def measure(self, subsets: Sequence[Tensor]) -> Tensor:
        """Measure ensembles; return (subset, figure) float64.

        The columns are the figures named in `names`, then the figures named in `scaled_names` after temperature
        scaling.

        Args:
            subsets: the ensembles, each as (k,) positions of members; duplicates are measured once.
        """
        order = {tuple(subset.tolist()): subset for subset in subsets}
        single_keys = [key for key in order if len(key) == 1]
        rows = {
            key: self._measure_member(key[0]) for key in progress(single_keys, len(single_keys), "figures of members")
        }
        larger_keys = [key for key in order if len(key) > 1]
        size = _most_subsets_in_memory(self.test)
        for first in progress(
            range(0, len(larger_keys), SUBSETS_PER_PASS), len(larger_keys), "figures of ensembles", "ensembles",
            size=lambda first: min(SUBSETS_PER_PASS, len(larger_keys) - first),
        ):  # fmt: skip
            group = [order[key] for key in larger_keys[first : first + SUBSETS_PER_PASS]]
            membership = torch.zeros(len(group), self.members)
            for row, subset in zip(membership, group, strict=True):
                row[subset] = 1
            temperatures = self._fit_temperatures(group, membership)
            ood = None if self.ood is None else _OodPredictions.compute_for_subsets(self.ood, membership, temperatures)
            for i in range(0, len(group), size):
                probs = self.test.mean_probs_of_subsets(membership[i : i + size])
                for j, subset in enumerate(group[i : i + size]):
                    temperature = None if temperatures is None else temperatures[i + j]
                    rows[tuple(subset.tolist())] = self._figures_of_subset(subset, probs[j], temperature, ood, i + j)
                del probs  # Free the memory before the next group's mean probabilities are computed.
        return torch.stack([rows[tuple(subset.tolist())] for subset in subsets])

    def _measure_member(self, position: int) -> Tensor:
        """Return the figures of one member."""
        temperature = None
        if self.held_out is not None and self.held_out.labels is not None:
            log_probs = self.held_out.logits.one(position).to(self.held_out.dtype).log_softmax(-1)
            temperature = metrics.temperature(log_probs, self.held_out.labels, check=False)
        ood = None if self.ood is None else _OodPredictions.compute_for_member(self.ood, position, temperature)
        probs = self.test.logits.one(position).to(self.test.dtype).softmax(-1)
        return self._figures_of_subset(torch.tensor([position]), probs, temperature, ood, 0)

    def _fit_temperatures(self, subsets: Sequence[Tensor], membership: Tensor) -> Tensor | None:
        """Fit the temperature of each subset to the held-out inputs; return (subset,) float64, or None without held-out
        inputs.

        Args:
            subsets: the subsets, each as positions of members.
            membership: 1 for the members of a subset, else 0, (subset, member).
        """
        held_out = self.held_out
        if held_out is None or held_out.labels is None:
            return None
        temperatures = torch.empty(len(subsets), dtype=torch.float64)
        size = _most_subsets_in_memory(held_out)
        for i in range(0, len(subsets), size):
            probs = held_out.mean_probs_of_subsets(membership[i : i + size])
            for j, subset in enumerate(subsets[i : i + size]):
                temperatures[i + j] = metrics.temperature(
                    held_out.log_mean_probs(subset, probs[j]), held_out.labels, check=False
                )
            del probs
        return temperatures

    def _figures_of_subset(
        self, subset: Tensor, probs: Tensor, temperature: Tensor | None, ood: _OodPredictions | None, ood_row: int
    ) -> Tensor:
        """Return the figures of a subset before and after scaling, (figure,) float64.

        Args:
            subset: positions of the subset's members.
            probs: mean probabilities of these members, (input, class).
            temperature: temperature of the subset; None for no temperature scaling.
            ood: predictions of several subsets, including `subset`, on the inputs out of distribution; None without
                such inputs.
            ood_row: the row of this subset in `ood`.
        """
        test = self.test
        uncertainty = test.uncertainty(subset, probs.amax(-1))
        figures = self._probability_figures(probs, uncertainty, None if ood is None else ood.uncertainty[ood_row])
        figures["nll"] = -test.log_probs_of_labels(subset).double().mean()
        figures["mi_id"] = (metrics.entropy(probs, check=False).double().mean() - test.entropy[subset].mean()).clamp(
            min=0
        )
        figures["disagreement"] = test.disagreement(subset)
        if ood is not None and self.ood is not None:
            figures["mi_ood"] = (ood.entropy[ood_row].double() - self.ood.entropy[subset].mean()).clamp(min=0)
        row = [figures[n] for n in self.names]
        if temperature is not None:
            unscaled_log_probs = test.log_mean_probs(subset, probs)
            log_probs = metrics.tempered(unscaled_log_probs, temperature.to(probs.dtype))
            # The formula is the same as for inputs out of distribution, so that equal inputs of both data sets get
            # equal values.
            uncertainty = _log_other_probs(unscaled_log_probs / temperature.to(probs.dtype))
            figures = self._probability_figures(
                log_probs.exp(), uncertainty, None if ood is None else ood.scaled[ood_row]
            )
            figures["nll"] = metrics.nll(log_probs, self.labels, check=False)
            figures[TEMPERATURE] = temperature
            row += [figures[n] for n in self.scaled_names]
        return torch.stack([x.double() for x in row])

    def _probability_figures(
        self, probs: Tensor, uncertainty: Tensor, ood_uncertainty: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the figures that depend on the probabilities alone.

        Args:
            probs: mean probabilities, (input, class).
            uncertainty: log(1 − largest probability) of each input, (input,).
            ood_uncertainty: log(1 − largest probability) of each input out of distribution, (input,).
        """
        figures = self._compute_metrics(PROBABILITIES, probs, self.labels)
        figures |= self._compute_metrics(UNCERTAINTY, probs, self.labels, uncertainty=uncertainty)
        if ood_uncertainty is not None:
            figures |= self._compute_metrics(SCORES, torch.cat([uncertainty, ood_uncertainty]), self.is_ood)
        return figures

    def _compute_metrics(self, input_kind: str, *tensors: Tensor, **named: Tensor) -> dict[str, Tensor]:
        """Compute all figures with one kind of input, each by the metric of the same name; return the figures."""
        names = [name for name in self.names if FIGURES[name].input_kind == input_kind]
        return {name: getattr(metrics, name)(*tensors, **named, check=False) for name in names}

    def picture_values(self, temperature: float | None = None) -> dict[str, Any]:
        """Return the values for pictures: bins of a reliability diagram, mutual information of each input.

        Args:
            temperature: temperature of the ensemble of all members, for the bins after scaling.
        """
        probs = self.test.mean_probs
        values = _reliability_bars("reliability", probs, self.labels)
        if temperature is not None:
            log_probs = self.test.log_mean_probs(torch.arange(self.members), probs)
            values |= _reliability_bars(
                "scaled_reliability", metrics.tempered(log_probs, temperature).exp(), self.labels
            )
        values["mi_id"] = self.test.information.tolist()
        if self.ood is not None:
            values["mi_ood"] = self.ood.information.tolist()
        return values


@dataclass(frozen=True)
class _OodPredictions:
    """Predictions of some subsets on the inputs out of distribution.

    Args:
        uncertainty: log(1 − largest mean probability) of each input, (subset, input).
        entropy: mean entropy over the inputs, (subset,).
        scaled: `uncertainty` after temperature scaling.
    """

    uncertainty: Tensor
    entropy: Tensor
    scaled: Tensor

    @classmethod
    def compute_for_subsets(
        cls, ood_logits: DataSetLogits, membership: Tensor, temperatures: Tensor | None
    ) -> _OodPredictions:
        """Compute the predictions of some subsets in one pass over the inputs; return the predictions.

        Args:
            ood_logits: logits on the inputs out of distribution.
            membership: 1 for the members of a subset, else 0, (subset, member).
            temperatures: temperature of each subset, (subset,); None for no scaling.
        """
        largest_probs = torch.empty(len(membership), ood_logits.logits.shape[1], dtype=ood_logits.dtype)
        scaled = torch.empty_like(largest_probs)
        entropy = torch.zeros(len(membership), dtype=torch.float64)
        for span, means in ood_logits.iterate_mean_probs(membership):
            largest_probs[:, span] = means.amax(-1)
            entropy += metrics.entropy(means, check=False).double().sum(1)
            if temperatures is not None:
                log_probs = means.clamp_min_(torch.finfo(means.dtype).tiny).log_()
                scaled[:, span] = _log_other_probs(log_probs / temperatures.to(means.dtype)[:, None, None])
        subsets = [row.nonzero().flatten() for row in membership]
        uncertainty = torch.stack([ood_logits.uncertainty(s, p) for s, p in zip(subsets, largest_probs, strict=True)])
        return cls(uncertainty, entropy / largest_probs.shape[1], uncertainty if temperatures is None else scaled)

    @classmethod
    def compute_for_member(
        cls, ood_logits: DataSetLogits, position: int, temperature: Tensor | None
    ) -> _OodPredictions:
        """Return the predictions of one member as a subset of size 1; arguments are the same as in
        `compute_for_subsets`."""
        logits = ood_logits.logits.one(position).to(ood_logits.dtype)
        probs = logits.softmax(-1)  # Computed as in `_measure_member`, so that equal inputs get equal values.
        uncertainty = ood_logits.uncertainty(torch.tensor([position]), probs.amax(-1))[None]
        scaled = uncertainty
        if temperature is not None:
            scaled = _log_other_probs(logits.log_softmax(-1) / temperature.to(ood_logits.dtype))[None]
        return cls(uncertainty, metrics.entropy(probs, check=False).double().mean()[None], scaled)


def _log_other_probs(logits: Tensor) -> Tensor:
    """Return log(1 − p) of each input, where p is its largest probability, (…, input), computed in float64.

    Args:
        logits: logits or log probabilities, (…, input, class).
    """
    exact_logits = logits.double()
    other_logits = exact_logits.scatter(-1, exact_logits.argmax(-1, keepdim=True), -math.inf)
    return (other_logits.logsumexp(-1) - exact_logits.logsumexp(-1)).to(logits.dtype)


def _most_subsets_in_memory(data_set_logits: DataSetLogits) -> int:
    """Return the number of subsets whose mean probabilities fit into `MOST_MEAN_BYTES`."""
    _, inputs, classes = data_set_logits.logits.shape
    return max(1, MOST_MEAN_BYTES // (4 * inputs * classes))


def _reliability_bars(key_prefix: str, probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the bars of a reliability diagram by name; each name begins with the prefix."""
    bins = metrics.reliability(probs, labels)
    return {f"{key_prefix}_{n}": getattr(bins, n).tolist() for n in ("confidence", "accuracy", "inputs")}
