"""The figures of any subset of a population, from logits that need not fit into memory.

The logits are walked over in blocks of inputs: once for what does not depend on the subset, and once for each group of
subsets whose mean probabilities `MEMORY` holds (the calibration of each class sorts all inputs).

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoints_zoo import metrics
from checkpoints_zoo.figures import FIGURES, OOD_FIGURES
from checkpoints_zoo.metrics import Interval

MEMORY = 2**27  # bytes of mean probabilities that are held
VALUES = 2**20  # (member, input) that are held at a time
TOGETHER = 512  # subsets in a walk over the inputs out of distribution, of which two numbers an input are held
READ_BYTES = 2**24  # of logits that are read at a time
BLOCK_BYTES = 2**22  # of probabilities in a block of inputs, of all members or of all subsets


class Logits(Protocol):
    """Logits of members that can be read in parts."""

    @property
    def shape(self) -> Sequence[int]:
        """(members, inputs, classes)."""

    @property
    def dtype(self) -> torch.dtype:
        """What they are held in."""

    def block(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return the logits of some inputs, (member, input, class)."""

    def one(self, at: int) -> Tensor:
        """Return the logits of the member at a position, (input, class)."""


@dataclass(frozen=True)
class Held:
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


class _Side:
    """What the members say of one set of inputs, as far as it is the same in every subset.

    Args:
        logits: of all members.
        labels: (input,), None for inputs without.
    """

    def __init__(self, logits: Logits, labels: Tensor | None) -> None:
        self.logits, self.labels = logits, labels
        members, inputs, classes = logits.shape
        self.kind = kind = torch.promote_types(logits.dtype, torch.float32)
        self.entropy = torch.zeros(members, dtype=torch.float64)
        self.information = torch.empty(inputs, dtype=kind)
        self.everyone = torch.empty(inputs, classes, dtype=kind)
        labelled = inputs if labels is not None else 0
        self.label_log_probs = torch.empty(members, labelled, dtype=kind)
        self.voted = torch.empty(members, labelled, dtype=torch.int16 if classes < 2**15 else torch.int32)
        for here, found in self.blocks():
            log_probs = found.log_softmax(-1)
            probs = log_probs.exp()
            entropy = metrics.entropy(probs)
            self.entropy += entropy.double().sum(1) / inputs
            self.everyone[here] = probs.mean(0)
            total = metrics.entropy(self.everyone[here], check=False)
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
        for here, found in self.blocks(len(weights)):
            # Ones and zeros, divided after the sum: of members that agree the mean is what each says.
            sums = weights @ found.softmax(-1).flatten(1)
            yield here, sums.view(len(weights), -1, found.shape[-1]).div_(sizes)

    def of_labels(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return negative log-likelihood and disagreement of some members, NaN for one, float64.

        Args:
            at: their positions.
        """
        inputs, classes = self.everyone.shape
        nll, disagreement = torch.zeros(2, dtype=torch.float64)
        step = max(1, VALUES // len(at))
        for begin in range(0, inputs, step):
            log_probs = self.label_log_probs[:, begin : begin + step].index_select(0, at)
            nll -= (torch.logsumexp(log_probs, 0) - math.log(len(at))).double().sum() / inputs
            voted = self.voted[:, begin : begin + step].index_select(0, at).long()
            disagreement += metrics.disagreement_of_votes(voted, classes) * (voted.shape[1] / inputs)
        return nll, disagreement


class Population:
    """Predictions of all members, and the figures of any subset of them.

    Args:
        logits: on inputs with labels.
        labels: (input,).
        ood_logits: on inputs out of distribution, None without any.
    """

    def __init__(self, logits: Tensor | Logits, labels: Tensor, ood_logits: Tensor | Logits | None) -> None:
        self.members = logits.shape[0]
        self.labels = labels
        self.inside = _Side(Held(logits) if isinstance(logits, Tensor) else logits, labels)
        self.outside = None
        if ood_logits is not None:
            self.outside = _Side(Held(ood_logits) if isinstance(ood_logits, Tensor) else ood_logits, None)
        ood_inputs = 0 if self.outside is None else self.outside.logits.shape[1]
        self.is_ood = torch.arange(len(labels) + ood_inputs) >= len(labels)
        self.names = [n for n in FIGURES if self.outside is not None or n not in OOD_FIGURES]

    def measure(self, subsets: Sequence[Tensor]) -> Tensor:
        """Measure the ensembles of some members each; return (subset, figure) float64, figures in the order of `names`.

        Args:
            subsets: positions of members, (k,) each; of equal ones, one is measured.
        """
        order = {tuple(subset.tolist()): subset for subset in subsets}
        found = {key: self._single(int(subset)) for key, subset in order.items() if len(key) == 1}
        rest = [key for key in order if len(key) > 1]
        _, inputs, classes = self.inside.logits.shape
        size = max(1, MEMORY // (4 * inputs * classes))
        for at in range(0, len(rest), TOGETHER):
            some = rest[at : at + TOGETHER]
            weights = torch.zeros(len(some), self.members)
            for row, key in zip(weights, some, strict=True):
                row[order[key]] = 1
            outside = self._outside(weights)
            for i in range(0, len(some), size):
                part = [order[key] for key in some[i : i + size]]
                others = None if outside is None else outside[i : i + size]
                found.update(zip(some[i : i + size], self._group(part, weights[i : i + size], others), strict=True))
        return torch.stack([found[tuple(subset.tolist())] for subset in subsets])

    def _single(self, at: int) -> Tensor:
        """Return the figures of one member."""
        outside = None
        if self.outside is not None:
            probs = self.outside.logits.one(at).to(self.outside.kind).softmax(-1)
            outside = probs.amax(-1), metrics.entropy(probs, check=False).mean()
        return self._figures(torch.tensor([at]), self.inside.logits.one(at).to(self.inside.kind).softmax(-1), outside)

    def _group(
        self, subsets: Sequence[Tensor], weights: Tensor, outside: Sequence[tuple[Tensor, Tensor]] | None
    ) -> list[Tensor]:
        """Return the figures of some subsets, whose mean probabilities are held until then."""
        probs = self._means(weights)
        return [
            self._figures(subset, probs[i], None if outside is None else outside[i]) for i, subset in enumerate(subsets)
        ]

    def _outside(self, weights: Tensor) -> list[tuple[Tensor, Tensor]] | None:
        """Return what subsets say of the inputs out of distribution: largest mean probability (input,), mean entropy.

        Args:
            weights: (subset, member), 1 for those that are in it.
        """
        if self.outside is None:
            return None
        largest = torch.empty(len(weights), self.outside.logits.shape[1], dtype=self.outside.kind)
        entropy = torch.zeros(len(weights), dtype=torch.float64)
        for here, means in self.outside.means(weights):
            largest[:, here] = means.amax(-1)
            entropy += metrics.entropy(means, check=False).double().sum(1)
        return list(zip(largest, entropy / largest.shape[1], strict=True))

    def _means(self, weights: Tensor) -> Tensor:
        """Return the mean probabilities of subsets on the inputs with labels, (subset, input, class)."""
        probs = torch.empty(len(weights), *self.inside.logits.shape[1:], dtype=self.inside.kind)
        for here, means in self.inside.means(weights):
            probs[:, here] = means
        return probs

    def _figures(self, at: Tensor, probs: Tensor, outside: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the figures of the ensemble of some members, (figure,) float64.

        Args:
            at: positions of the members.
            probs: their mean probabilities, (input, class).
            outside: on the other inputs: their largest mean probability (input,), and mean entropy.
        """
        labels, inside = self.labels, self.inside
        nll, disagreement = inside.of_labels(at)
        found = [
            metrics.accuracy(probs, labels, check=False),
            nll,
            metrics.brier(probs, labels, check=False),
            metrics.ece(probs, labels, check=False),
            metrics.adaptive_ece(probs, labels, check=False),
            metrics.ace(probs, labels, check=False),
            metrics.aurc(probs, labels, check=False),
            (metrics.entropy(probs, check=False).double().mean() - inside.entropy[at].mean()).clamp(min=0),
            disagreement,
        ]
        if outside is not None and self.outside is not None:
            largest, entropy = outside
            scores = -torch.cat([probs.amax(-1), largest])
            found += [
                (entropy.double() - self.outside.entropy[at].mean()).clamp(min=0),
                metrics.auroc(scores, self.is_ood, check=False),
                metrics.aupr(scores, self.is_ood, check=False),
                metrics.fpr95(scores, self.is_ood, check=False),
            ]
        return torch.stack([x.double() for x in found])

    def named(self, intervals: Iterable[Interval]) -> dict[str, Interval]:
        """Name intervals by their figures, each cut at the figure's range; return them."""
        return {n: FIGURES[n].within(x) for n, x in zip(self.names, intervals, strict=True)}

    def drawing(self) -> dict[str, Any]:
        """Return what a picture needs: bins of a reliability diagram, information of each input."""
        bins = metrics.reliability(self.inside.everyone, self.labels)
        drawn = {f"reliability_{n}": getattr(bins, n).tolist() for n in ("confidence", "accuracy", "inputs")}
        drawn["mi_id"] = self.inside.information.tolist()
        if self.outside is not None:
            drawn["mi_ood"] = self.outside.information.tolist()
        return drawn
