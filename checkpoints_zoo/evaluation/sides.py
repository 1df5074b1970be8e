"""What members say of one set of inputs, walked over in blocks: the logits need not fit into memory.

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from checkpoints_zoo.evaluation import metrics

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


@dataclass(frozen=True)
class Part:
    """Some of the inputs of other logits.

    Args:
        logits: of all inputs.
        inputs: (input,) positions of those that are wanted, rising.
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


class Side:
    """What the members say of one set of inputs, as far as it is the same in every subset.

    Args:
        logits: of all members.
        labels: (input,), None for inputs without.
    """

    def __init__(self, logits: Tensor | Logits, labels: Tensor | None) -> None:
        self.logits: Logits = Held(logits) if isinstance(logits, Tensor) else logits
        self.labels = labels
        members, inputs, classes = self.logits.shape
        self.kind = kind = torch.promote_types(self.logits.dtype, torch.float32)
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
        # A product with one row adds up in another order at the end of a block: equal inputs would not stay level.
        rows = weights if len(weights) > 1 else weights.expand(2, -1)
        for here, found in self.blocks(len(weights)):
            # Ones and zeros, divided after the sum: of members that agree the mean is what each says.
            sums = (rows @ found.softmax(-1).flatten(1))[: len(weights)]
            yield here, sums.view(len(weights), -1, found.shape[-1]).div_(sizes)

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
        inputs, classes = self.everyone.shape
        found = torch.zeros((), dtype=torch.float64)
        for part in torch.split(self.voted, max(1, VALUES // len(at)), 1):
            voted = part.index_select(0, at).long()
            found += metrics.disagreement_of_votes(voted, classes) * (voted.shape[1] / inputs)
        return found

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
        found = probs.clamp_min(least).log_()
        if self.labels is None:
            return found
        labels = self.labels.unsqueeze(-1)
        exact, rounded = self.log_probs_of_labels(at).unsqueeze(-1), found.gather(-1, labels)
        # Only where it underflows: another rounding would tell labels from other classes that are level with them.
        return found.scatter_(-1, labels, torch.where(probs.gather(-1, labels) < least, exact, rounded))
